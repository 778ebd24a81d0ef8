"""The archive of a real daemon: over restarts and kills, and on a full disk."""

from __future__ import annotations

import json
import signal

import attrs
from twisted.internet import reactor
from twisted.internet.task import deferLater

from tests.integration.client import Client, Event, python, text
from tests.integration.harness import (
    CONFIGURATION,
    RepositoryTestCase,
)
from tests.integration.harness import Daemon as PlainDaemon
from tests.integration.rounds_case import EVALUATIONS, ROUNDS, Course, RoundsCase

ARCHIVE = f"{CONFIGURATION}\n[archive]\nenabled = true\n"
NUMBERS = "import sys\nfor number in range(int(sys.argv[1])): print('line', number)"


def numbers(count: int) -> str:
    """Return what an evaluator with `NUMBERS` prints."""
    return "".join(f"line {number}\n" for number in range(count))


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


async def wait_archived(client: Client, count: int) -> None:
    """Wait until so many evaluations were archived since the start."""
    while await client.figure("archived_total") < count:
        await deferLater(reactor, 0.01)


class RestartTests(RepositoryTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.daemon = PlainDaemon(ARCHIVE)
        self.addCleanup(self.daemon.remove)
        self.client = Client(self.daemon.url)
        self.addCleanup(self.client.close)
        await self.start()

    async def start(self) -> None:
        self.daemon.start()
        await self.daemon.ready()

    async def test_restart_keeps_events_order_status_and_submission(self) -> None:
        counts = (0, 3, 50_000)
        identifiers = [await self.begin(python(NUMBERS, str(count))) for count in counts]
        for identifier in identifiers:
            await self.client.follow(identifier)
        judged = await self.begin(
            "cat $SUBMISSION_FILE_SOLUTION; echo $TURINGARENA_SEED", seed="77"
        )
        await self.client.follow(judged)
        await wait_archived(self.client, 4)
        running = await self.begin_and_wait("echo ready; exec sleep 600")
        await self.daemon.stop()
        await self.start()
        self.assertEqual(await list_all(self.client), [*identifiers, judged, running])
        for identifier, count in zip(identifiers, counts, strict=True):
            for _ in range(2):
                self.assertEqual(text(await read_pages(self.client, identifier)), numbers(count))
            status = await self.client.status(identifier)
            self.assertEqual((status["state"], status["archived"]), ("finished", True))
            received = bytearray()
            await self.client.stream(
                f"/evaluation/{identifier}/events",
                received.extend,
                {"Accept": "application/jsonl"},
            )
            events = [json.loads(line) for line in received.splitlines()]
            self.assertEqual(text(events), numbers(count))
        events = await read_pages(self.client, running)
        self.assertEqual(text(events), "ready\n")
        self.assertEqual(events[-1]["payload"]["reason"], "shutdown")
        self.assertEqual((await self.client.get("/evaluation/" + "a" * 40)).code, 404)
        answer = await self.client.request("POST", f"/evaluation/{judged}/rerun")
        self.assertEqual(answer.code, 200, answer.body)
        again = answer.json["evaluation_id"]
        self.assertEqual(text(await self.client.follow(again)), "42\n77\n")
        self.assertEqual(await list_all(self.client), [*identifiers, judged, running, again])
        await self.daemon.nothing_left()
        await self.daemon.stop()


class LastingTests(RoundsCase):
    configuration = ARCHIVE

    async def test_archive_has_each_event_once_after_random_kills(self) -> None:
        await self.run_rounds(EVALUATIONS, ROUNDS, signal.SIGKILL)

    async def count_descriptors(self) -> int:
        """Return how many descriptors the daemon has once it has read archived rows, too."""
        await list_all(self.client)
        return await super().count_descriptors()

    async def check_courses(self, courses: list[Course]) -> None:
        """Compare the archive with what readers got."""
        for course in courses:
            # The last acknowledgement may have been lost in a kill.
            await self.client.page(course.identifier, "end")
            events = await read_pages(self.client, course.identifier)
            self.assertEqual(events, course.reader.events, course.kind.name)
            found = await self.client.status(course.identifier)
            self.assertTrue(found["archived"])
            self.check_status(course, attrs.evolve(course.reader, status=found))
        listed = await list_all(self.client)
        self.assertEqual(len(listed), len(set(listed)))
        self.assertEqual(set(listed[1:]), {course.identifier for course in courses})
