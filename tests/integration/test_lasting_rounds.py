"""Evaluations of all kinds, whose daemon is killed or stopped again and again.

The environment variable TAWEBEVAL_ROUNDS is the number of ends, and raises that of evaluations:
four for each end. The moments depend on the number, too.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import signal
import time
from collections import Counter
from hashlib import sha256
from traceback import format_exc
from typing import Any, ClassVar

import attrs
from twisted.internet import reactor
from twisted.internet.defer import Deferred, DeferredSemaphore, gatherResults
from twisted.internet.task import TaskStopped, deferLater

from tawebeval.linux.starter_client import StarterClient
from tawebeval.sandbox.workspace import derive_log_pseudonym
from tawebeval.web.routes import MAX_METRICS_AGE_SECONDS
from tests.cases.patience import LONG_PATIENCE
from tests.integration.client import Client, Event, joined, python
from tests.integration.harness import CONFIGURATION, RepositoryTestCase, until
from tests.integration.processes import alive, children, descriptors, processes
from tests.integration.receivers import Receiver
from tests.integration.repositories import GitRepository, HttpServer, stop_after
from tests.integration.resuming_readers import (
    READERS,
    LibraryReader,
    ResumingReader,
    insist_on_answer,
)
from tests.integration.starters import KeptDaemon, start_kept

KIB = 2**10

_NUMBERS = """
import sys, time
for block in range({blocks}):
    sys.stdout.write("".join(f"{{block}} {{n}}\\n" for n in range({lines})))
    sys.stdout.flush()
    time.sleep({pause})
"""
_VALUES = """
import json, os, time
begin, end = os.environ["EVALUATION_DATA_BEGIN"], os.environ["EVALUATION_DATA_END"]
for n in range({count}):
    print("line", n, end="", flush=True)
    time.sleep({pause})
    print("\\n" + begin, flush=True)
    time.sleep({pause})
    print(json.dumps({{"type": "case", "case": str(n), "verdict": "accepted"}}))
    print(end, flush=True)
"""
_FILES = """
import os, time
begin, end = os.environ["EVALUATION_FILE_BEGIN"], os.environ["EVALUATION_FILE_END"]
for n in range({count}):
    with open(f"file-{{n}}", "w") as file:
        file.write(f"{{n}} " * {repeats})
    print(begin, "X-SEGI-As: path", "", f"file-{{n}}", sep="\\n", flush=True)
    time.sleep({pause})
    print(end, flush=True)
"""
_MEMORY = "import time\nprint('ready')\ntime.sleep(0.3)\nx = bytearray(b'x') * (200 * 2**20)"
_RUNS = "for n in $(seq {}); do tawebeval-run -- sh -c 'sleep 0.1; echo yes'; done; echo end"


@attrs.frozen
class Kind:
    """What an evaluator does, and what clients have to see of that.

    - `printed`: as `joined` has it, without the final event.
    - `reasons`: the possible ones of the final event, empty if there is none.
    - `fields`: more fields of the form.
    - `is_cancelled`, `is_called_back`: whether the test does so. `is_read_late`: whether the reader
      begins after some more kills.
    - `has_own_repository`: whether its repository is fetched, slowly.
    """

    name: str
    command: str
    printed: list[Any]
    reasons: tuple[str, ...] = ()
    fields: dict[str, str] = attrs.field(factory=dict)
    is_cancelled: bool = False
    is_called_back: bool = False
    is_read_late: bool = False
    has_own_repository: bool = False

    @property
    def state(self) -> str:
        if not self.reasons:
            return "finished"
        return "cancelled" if self.is_cancelled else "failed"


def make_numbers(blocks: int, lines: int, pause: float = 0) -> tuple[str, str]:
    """Return a command that prints numbers, and what it prints; `pause` in seconds."""
    command = python(_NUMBERS.format(blocks=blocks, lines=lines, pause=pause))
    return command, "".join(f"{b} {n}\n" for b in range(blocks) for n in range(lines))


def make_values(count: int, pause: float = 0) -> tuple[str, list[Any]]:
    """Return a command that prints text and values, and what `joined` has of it."""
    printed: list[Any] = []
    for n in range(count):
        printed += [f"line {n}", [{"type": "case", "case": str(n), "verdict": "accepted"}]]
    return python(_VALUES.format(count=count, pause=pause)), printed


def make_kinds() -> list[Kind]:
    """Return a kind of each sort."""
    fast, fast_text = make_numbers(10, 5000)
    slow, slow_text = make_numbers(100, 20, 0.02)
    much, much_text = make_numbers(1, 40_000)
    values, values_printed = make_values(30, 0.04)
    asleep, failing = "echo ready; exec sleep 600", "echo one; sleep 0.5; exit 3"
    greedy, cut = python(_MEMORY), [fast_text[: 100 * KIB]]
    files = [
        [
            {
                "type": "file",
                "filename": f"file-{n}",
                "content_type": "application/octet-stream",
                "content_base64": base64.b64encode(f"{n} ".encode() * 20_000).decode(),
            }
        ]
        for n in range(8)
    ]
    return [
        Kind("fast", fast, [fast_text]),
        Kind("slow", slow, [slow_text]),
        Kind("silent", "sleep 3; echo late; echo no >&2; exit 3", ["late\n"], ("exit",)),
        Kind("full", much, [much_text], is_read_late=True),
        Kind("values", values, values_printed),
        Kind("files", python(_FILES.format(count=8, repeats=20_000, pause=0.2)), files),
        Kind("unread", "cat $SUBMISSION_FILE_SOLUTION", ["42\n"], is_read_late=True),
        Kind("submissions", _RUNS.format(10), ["yes\n" * 10 + "end\n"]),
        Kind("cancelled", asleep, ["ready\n"], ("cancelled",), is_cancelled=True),
        Kind("fetched", "cat README", ["an evaluator\n"], has_own_repository=True),
        Kind("called back", failing, ["one\n"], ("exit",), is_called_back=True),
        Kind("over its time", asleep, ["ready\n"], ("timeout",), {"limits[wall_clock]": "2"}),
        Kind("over its output", fast, cut, ("output",), {"limits[output]": str(100 * KIB)}),
        Kind("over its memory", greedy, ["ready\n"], ("memory", "exit"), {"limits[memory]": "64M"}),
        Kind("partial", "printf a; sleep 1; printf b; sleep 1; echo; echo c", ["ab\nc\n"]),
    ]


def check_events(kind: Kind, events: list[dict[str, Any]]) -> None:
    """Fail unless these are all events of a kind, in order."""
    found = joined(events)
    if kind.reasons:
        (error,) = found.pop()
        assert error["type"] == "evaluation_error", (kind.name, error)
        assert error["reason"] in kind.reasons, (kind.name, error)
    assert len(found) == len(kind.printed), (kind.name, [str(each)[:200] for each in found])
    for one, other in zip(found, kind.printed, strict=True):
        if one != other:  # which are long
            pairs = enumerate(zip(str(one), str(other), strict=False))
            at = next((n for n, (a, b) in pairs if a != b), 0)
            around = slice(max(0, at - 50), at + 50)
            raise AssertionError(kind.name, at, str(one)[around], str(other)[around])


def compute_digest(events: list[dict[str, Any]]) -> str:
    """Return a digest of events."""
    return sha256(json.dumps(events, sort_keys=True).encode()).hexdigest()


ROUNDS = int(os.environ.get("TAWEBEVAL_ROUNDS", "6"))
EVALUATIONS = max(30, 4 * ROUNDS)
AT_ONCE = 30
"""Evaluations that are accepted and not read to their end."""

WORD = f"rounds-{os.urandom(8).hex()}"
_EVALUATIONS = "[evaluations]"
_CONNECTIONS = 8  # to the starter, that the daemon keeps for calls at the same time
_IN_A_ROW = 3  # kills before a daemon is ready, at most


class SlowServer(HttpServer):
    """A git server that takes its time in the middle of a pack."""

    def send_half(self) -> None:
        self.half_sent.set()
        time.sleep(1)


@attrs.define
class Course:
    """One evaluation, from its form to its last event; `key` is its Idempotency-Key.

    `event_count` and `digest` are of the events that its reader got: kept, those of thousands of
    evaluations would take all memory.
    """

    kind: Kind
    reader_type: type[ResumingReader]
    key: str
    url: str
    commit: str
    callback: str
    identifier: str = ""
    event_count: int = 0
    digest: str = ""


async def read_pages(client: Client, identifier: str, limit: int = 10**6) -> list[Event]:
    """Return all events of an evaluation, read from the first page to the last."""
    events: list[Event] = []
    after = "0"
    while after != "end":
        answer = await client.get(
            f"/evaluation/{identifier}/events", params={"after": after, "limit": str(limit)}
        )
        assert answer.code == 200, answer.body
        events += answer.json["data"]
        after = answer.json["end"]
    return events


async def list_all(client: Client) -> list[str]:
    """Return the identifiers of all evaluations in the list."""
    found: list[str] = []
    after = ""
    while True:
        answer = await client.get(f"/evaluations?{after}")
        listing = answer.json
        found += [one["evaluation_id"] for one in listing["data"]]
        if listing["end"] is None:
            return found
        after = f"after={listing['end']}"


class RoundsCase(RepositoryTestCase):
    """Evaluations of all kinds at once, and a daemon that ends and starts meanwhile."""

    timeout = max(LONG_PATIENCE, 10.0 * ROUNDS)
    more: ClassVar[str] = ""
    daemon: KeptDaemon

    def configure(self) -> str:
        environment = f'{_EVALUATIONS}\nenvironment = {{ WORD = "{WORD}" }}'
        configuration = CONFIGURATION.replace(_EVALUATIONS, environment)
        more = f"{self.more}[buffers]\ntotal = 1048576\n"
        return f"{configuration}{more}{self.configure_callbacks()}"

    async def setUp(self) -> None:
        await super().setUp()
        await start_kept(self, KeptDaemon(self.configure()))
        self.server = stop_after(self, SlowServer(self.folder))
        self.receiver = Receiver(*[500] * 8, 200)
        self.addCleanup(self.receiver.stop)
        self.chance = random.Random(ROUNDS)
        self.kills = 0
        self.events: Counter[str] = Counter()
        self.is_over = False

    # Evaluations

    def make_courses(self, count: int) -> list[Course]:
        """Return so many evaluations of all kinds, for all readers."""
        kinds, courses = make_kinds(), []
        for number in range(count):
            kind = kinds[number % len(kinds)]
            reader_type = READERS[(number + number // len(kinds)) % len(READERS)]
            url, commit = self.repository.url, self.commit
            if kind.has_own_repository:
                repository = GitRepository(self.folder / f"repository-{number}")
                repository.write("README", "an evaluator\n")
                commit = repository.commit()
                url = f"{self.server.url}/repository-{number}/.git"
            callback = f"{self.receiver.url}&number={number}"
            courses.append(Course(kind, reader_type, f"key-{number}", url, commit, callback))
        self.chance.shuffle(courses)
        return courses

    async def submit(self, course: Course) -> str:
        """Send the form until there is an answer; return the identifier."""
        fields = dict(course.kind.fields)
        if course.kind.is_called_back:
            fields["callback_url"] = course.callback
        answer = await insist_on_answer(
            lambda: self.client.post(
                course.url,
                course.commit,
                course.kind.command,
                headers={"Idempotency-Key": course.key},
                **fields,
            )
        )
        assert answer.code == 200, answer.body
        return str(answer.json["evaluation_id"])

    async def run_course(self, course: Course) -> str:
        """Run an evaluation; return what is wrong. The others go on."""
        try:
            await self.follow_course(course)
        except Exception:  # noqa: BLE001
            name = derive_log_pseudonym(course.identifier) if course.identifier else "not accepted"
            lines = [line for line in self.daemon.lines if name in line]
            what = f"{course.kind.name}, {course.reader_type.__name__}, {name}"
            return "\n".join((what, *lines, format_exc()))
        return ""

    async def follow_course(self, course: Course) -> None:
        """Begin an evaluation, do with it what its kind says, and compare what its reader gets."""
        kind = course.kind
        course.identifier = await self.submit(course)
        if self.chance.random() < 0.5:
            await self.wait_for_kills(1)
            self.assertEqual(await self.submit(course), course.identifier, kind.name)
        if kind.is_read_late:
            await self.wait_for_kills(2)
        reader = course.reader_type(self.client, course.identifier)
        reading = Deferred.fromCoroutine(reader.read())
        if kind.is_cancelled:
            await self.cancel_running(reader)
        await reading
        check_events(kind, reader.events)
        course.event_count, course.digest = len(reader.events), compute_digest(reader.events)
        self.check_status(course, reader.status)
        self.events[kind.name] += course.event_count

    async def wait_for_kills(self, count: int) -> None:
        """Wait for more kills, or the last one."""
        wanted = self.kills + count
        await until(lambda: self.kills >= wanted or self.is_over, "the daemon was killed")

    async def cancel_running(self, reader: ResumingReader) -> None:
        path = f"/evaluation/{reader.identifier}"
        state = ""
        while state != "running":
            state = (await insist_on_answer(lambda: self.client.get(path))).json["state"]
            await deferLater(reactor, 0.05)
        await deferLater(reactor, self.chance.uniform(0.5, 2))
        answer = await insist_on_answer(lambda: self.client.request("DELETE", path))
        self.assertEqual(answer.code, 204, answer.body)

    def check_status(self, course: Course, status: dict[str, Any] | None) -> None:
        """Compare the status document after the end."""
        kind = course.kind
        if status is None:  # forgotten, which only the library's last request does before
            self.assertIs(course.reader_type, LibraryReader)
            return
        self.assertEqual(status["state"], kind.state, kind.name)
        self.assertEqual(sum(status["events"].values()), course.event_count, kind.name)
        if kind.name == "values":
            cases = {"accepted": len(kind.printed) // 2}
            self.assertEqual(status["results"]["cases"], cases)
        if kind.reasons:
            self.assertIn(status["error"]["reason"], kind.reasons)
        if kind.reasons == ("exit",):
            self.assertEqual(status["exit"], {"status": 3, "signal": None})
        elif not kind.reasons:
            self.assertEqual(status["exit"], {"status": 0, "signal": None})

    def check_callbacks(self, courses: list[Course]) -> None:
        """Each callback came, always with the same document and the same Webhook-Id."""
        arrivals: dict[str, set[tuple[str, bytes]]] = {}
        for post in self.receiver.posts:
            document = json.loads(post.body)
            arrived = post.headers["webhook-id"], post.body
            arrivals.setdefault(document["evaluation_id"], set()).add(arrived)
        wanted = {each.identifier for each in courses if each.kind.is_called_back}
        self.assertEqual(set(arrivals), wanted)
        self.assertEqual([each for each in arrivals.values() if len(each) != 1], [])

    # The daemon

    async def end_often(self, courses: Deferred[Any], ends: int) -> None:
        """Kill or stop the daemon so often, at random moments, also while it starts."""
        while self.kills < ends and not courses.called:
            await deferLater(reactor, self.chance.uniform(0.1, 1.5))
            await self.end(self.chance.choice((signal.SIGKILL, signal.SIGTERM)))
            if self.chance.random() < 0.3:
                for _ in range(self.chance.randint(1, _IN_A_ROW)):
                    self.daemon.start()
                    await deferLater(reactor, self.chance.uniform(0, 2))
                    await self.end(signal.SIGKILL)
            self.daemon.start()
            await self.daemon.ready()
        self.is_over = True

    async def end(self, number: int) -> None:
        await self.daemon.end(number)
        self.kills += 1

    async def run_rounds(self, count: int, ends: int) -> None:
        """Run so many evaluations, and end the daemon so often."""
        held = await self.count_descriptors()
        courses = self.make_courses(count)
        places = DeferredSemaphore(AT_ONCE)
        everything = gatherResults(
            [
                places.run(lambda each=each: Deferred.fromCoroutine(self.run_course(each)))
                for each in courses
            ]
        )
        await self.end_often(everything, ends)
        failures = [each for each in await everything if each]
        self.flushLoggedErrors(TaskStopped)  # treq stops a form twice if the connection is cut
        self.assertEqual(failures, [], "\n".join(failures))
        await until(lambda: self.count_posted() >= self.count_callbacks(courses), "callbacks came")
        self.check_callbacks(courses)
        for course in courses:  # the last acknowledgement may have been lost in a kill
            await self.client.ask(course.identifier, "end")
        await self.check_courses(courses)
        await self.nothing_left(held)
        self.daemon.check_log()
        await self.check_counts()
        print(f"{self.kills} ends, {len(courses)} evaluations, {self.events.total()} events")

    async def check_courses(self, courses: list[Course]) -> None:
        """Check more of them, in other classes, when their readers have all events."""

    async def count_descriptors(self) -> int:
        """Return how many descriptors the daemon has after an evaluation and a list."""
        await list_all(self.client)
        await self.client.follow(await self.begin("echo first"))
        await self.client.close()
        await self.daemon.nothing_left()
        return len(descriptors(self.daemon.pid) or [])

    def count_posted(self) -> int:
        """Return how many evaluations have a callback that was delivered."""
        return len({json.loads(post.body)["evaluation_id"] for post in self.receiver.posts})

    def count_callbacks(self, courses: list[Course]) -> int:
        return sum(each.kind.is_called_back for each in courses)

    async def nothing_left(self, held: int) -> None:
        """Wait until nothing is left; `held` is the number of descriptors before."""
        await self.client.close()
        try:
            await until(lambda: self.list_remains(held) == [], "nothing is left")
        except AssertionError as error:
            raise AssertionError(f"{error}, but {self.list_remains(held)}") from None

    async def check_counts(self) -> None:
        """Fail if the metrics still have an evaluation."""
        await deferLater(reactor, MAX_METRICS_AGE_SECONDS)
        figures = (await self.client.get("/metrics")).body.decode()
        counts = re.findall(r'(?m)^tawebeval_evaluations\{state="(\w+)"\} (\S+)$', figures)
        self.assertIn("running", dict(counts))
        self.assertEqual([each for each in counts if float(each[1])], [])

    def list_remains(self, held: int) -> list[str]:
        """Return what there is of evaluations, in the daemon, in the starter and on the machine."""
        starter = StarterClient.connect(self.daemon.socket)
        found = [str(directory) for directory in starter.list_programs()]
        starter.close()
        found += self.daemon.leftovers()
        found += [f"process {pid}" for pid in processes(WORD)]
        found += [f"child of the starter {pid}" for pid in children(starter.pid) if alive(pid)]
        pid = self.daemon.pid
        now = [os.readlink(f"/proc/{pid}/fd/{number}") for number in descriptors(pid) or []]
        most = held + _CONNECTIONS
        return [*found, f"more than {most} descriptors: {now}"] if len(now) > most else found


class RestartTests(RoundsCase):
    """Without an archive, as by default, the room of events is free once they are acknowledged."""

    async def test_readers_have_each_event_once_after_random_kills_and_stops(self) -> None:
        await self.run_rounds(EVALUATIONS // 2, ROUNDS // 2)


class ArchiveTests(RoundsCase):
    more = "[archive]\nenabled = true\n"

    async def test_readers_and_archive_have_each_event_once_after_random_kills_and_stops(
        self,
    ) -> None:
        await self.run_rounds(EVALUATIONS, ROUNDS)

    async def check_courses(self, courses: list[Course]) -> None:
        """Compare the archive with what readers got."""
        for course in courses:
            events = await read_pages(self.client, course.identifier)
            self.assertEqual(compute_digest(events), course.digest, course.kind.name)
            found = await self.client.status(course.identifier)
            self.assertTrue(found["archived"])
            self.check_status(course, found)
        listed = await list_all(self.client)
        self.assertEqual(len(listed), len(set(listed)))
        self.assertEqual(set(listed[1:]), {course.identifier for course in courses})
