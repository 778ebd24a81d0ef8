"""Evaluations of all kinds, whose daemon is killed or restarted again and again."""

from __future__ import annotations

import signal

from tests.integration.client import Client, Event
from tests.integration.harness import CONFIGURATION
from tests.integration.rounds_case import (
    EVALUATIONS,
    ROUNDS,
    Course,
    RoundsCase,
    compute_digest,
)

ARCHIVE = f"{CONFIGURATION}\n[archive]\nenabled = true\n"


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


class RestartTests(RoundsCase):
    async def test_random_restarts_lose_and_repeat_nothing(self) -> None:
        await self.run_rounds(EVALUATIONS // 2, ROUNDS // 2, signal.SIGTERM)


class ArchiveTests(RoundsCase):
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
            self.assertEqual(compute_digest(events), course.digest, course.kind.name)
            found = await self.client.status(course.identifier)
            self.assertTrue(found["archived"])
            self.check_status(course, found)
        listed = await list_all(self.client)
        self.assertEqual(len(listed), len(set(listed)))
        self.assertEqual(set(listed[1:]), {course.identifier for course in courses})
