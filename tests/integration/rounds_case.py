"""A test case with evaluations of all kinds, whose daemon ends and starts again and again.

The environment variable TAWEBEVAL_ROUNDS is the number of ends, and raises that of evaluations:
four for each end. The moments depend on the number, too.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from traceback import format_exc
from typing import Any

import attrs
from twisted.internet import reactor
from twisted.internet.defer import Deferred, DeferredSemaphore, gatherResults
from twisted.internet.task import TaskStopped, deferLater

from tawebeval.linux.starter_client import StarterClient
from tawebeval.sandbox.workspace import derive_log_pseudonym
from tawebeval.web.context import MAX_METRICS_AGE
from tests.integration.harness import until
from tests.integration.lasting_kinds import Kind, check_events, make_kinds
from tests.integration.processes import alive, children, descriptors, processes
from tests.integration.receivers import Receiver
from tests.integration.repositories import GitRepository, HttpServer
from tests.integration.resuming_readers import (
    READERS,
    LibraryReader,
    ResumingReader,
    insist_on_answer,
)
from tests.integration.starters import KeptDaemonTestCase

ROUNDS = int(os.environ.get("TAWEBEVAL_ROUNDS", "10"))
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
        """Wait."""
        self.half_sent.set()
        time.sleep(1)


@attrs.define
class Course:
    """One evaluation, from its form to its last event; `key` is its Idempotency-Key."""

    kind: Kind
    reader_type: type[ResumingReader]
    key: str
    url: str
    commit: str
    callback: str
    identifier: str = ""
    reader: ResumingReader = attrs.field(init=False)


class RoundsCase(KeptDaemonTestCase):
    """Evaluations of all kinds at once, and a daemon that ends and starts meanwhile."""

    def configure(self) -> str:
        """Return the configuration."""
        environment = f'{_EVALUATIONS}\nenvironment = {{ WORD = "{WORD}" }}'
        configuration = self.configuration.replace(_EVALUATIONS, environment)
        return f"{configuration}[buffers]\ntotal = 1048576\n{self.configure_callbacks(0.5)}"

    async def setUp(self) -> None:
        await super().setUp()
        self.server = SlowServer(self.folder)
        self.addCleanup(self.server.stop)
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
        reader = course.reader = course.reader_type(self.client, course.identifier)
        reading = Deferred.fromCoroutine(reader.read())
        if kind.is_cancelled:
            await self.cancel_running(reader)
        await reading
        check_events(kind, reader.events)
        self.check_status(course, reader)
        self.events[kind.name] += len(reader.events)

    async def wait_for_kills(self, count: int) -> None:
        """Wait for more kills, or the last one."""
        wanted = self.kills + count
        await until(lambda: self.kills >= wanted or self.is_over, "the daemon was killed")

    async def cancel_running(self, reader: ResumingReader) -> None:
        """Cancel an evaluation that runs."""
        path = f"/evaluation/{reader.identifier}"
        state = ""
        while state != "running":
            state = (await insist_on_answer(lambda: self.client.get(path))).json["state"]
            await deferLater(reactor, 0.05)
        await deferLater(reactor, self.chance.uniform(0.5, 2))
        answer = await insist_on_answer(lambda: self.client.request("DELETE", path))
        self.assertEqual(answer.code, 204, answer.body)

    def check_status(self, course: Course, reader: ResumingReader) -> None:
        """Compare the status document after the end."""
        kind, status = course.kind, reader.status
        if status is None:  # forgotten, which only the library's last request does before
            self.assertIs(course.reader_type, LibraryReader)
            return
        self.assertEqual(status["state"], kind.state, kind.name)
        self.assertEqual(sum(status["events"].values()), len(reader.events), kind.name)
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

    async def end_often(self, courses: Deferred[Any], ends: int, number: int) -> None:
        """End the daemon by a signal so often, at random moments, also while it starts."""
        while self.kills < ends and not courses.called:
            await deferLater(reactor, self.chance.uniform(0.1, 1.5))
            await self.end(number)
            if self.chance.random() < 0.3:
                for _ in range(self.chance.randint(1, _IN_A_ROW)):
                    self.start_daemon()
                    await deferLater(reactor, self.chance.uniform(0, 2))
                    await self.end(signal.SIGKILL)
            self.start_daemon()
            await self.daemon.ready()
        self.is_over = True

    def start_daemon(self) -> None:
        """Start the daemon again."""
        self.daemon.start()

    async def end(self, number: int) -> None:
        """End the daemon by a signal."""
        await self.daemon.end(number)
        self.kills += 1

    async def run_rounds(self, count: int, ends: int, number: int) -> None:
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
        await self.end_often(everything, ends, number)
        failures = [each for each in await everything if each]
        self.flushLoggedErrors(TaskStopped)  # treq stops a form twice if the connection is cut
        self.assertEqual(failures, [], "\n".join(failures))
        await until(lambda: self.count_posted() >= self.count_callbacks(courses), "callbacks came")
        self.check_callbacks(courses)
        await self.check_courses(courses)
        await self.nothing_left(held)
        self.daemon.check_log()
        await self.check_counts()
        print(f"{self.kills} ends, {len(courses)} evaluations, {self.events.total()} events")

    async def check_courses(self, courses: list[Course]) -> None:
        """Check more, in other modules."""

    async def count_descriptors(self) -> int:
        """Return how many descriptors the daemon has after a first evaluation."""
        await self.client.follow(await self.begin("echo first"))
        await self.client.close()
        await self.daemon.nothing_left()
        return len(descriptors(self.daemon.pid) or [])

    def count_posted(self) -> int:
        """Return how many evaluations have a callback that was delivered."""
        return len({json.loads(post.body)["evaluation_id"] for post in self.receiver.posts})

    def count_callbacks(self, courses: list[Course]) -> int:
        """Return how many evaluations have a callback."""
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
        await deferLater(reactor, MAX_METRICS_AGE)
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
