"""Connections that break at random places: who repeats the last request loses nothing."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from tests.integration import resuming_readers
from tests.integration.client import Client, joined
from tests.integration.cutting_proxy import CuttingProxy, Place
from tests.integration.harness import CONFIGURATION, DaemonTestCase
from tests.integration.numbered_lines import EVALUATOR, printed
from tests.integration.resuming_readers import (
    LibraryReader,
    LineReader,
    PageReader,
    PollReader,
    ResumingReader,
    ServerSentReader,
    WebSocketReader,
    insist,
)

_LITTLE_MEMORY = """
[buffers]
total = 1_048_576
"""

# A stream that came to an end is not cut any more, so it has to be cut before.
_UNFINISHED = (Place.WITHIN_REQUEST, Place.BEFORE_RESPONSE, Place.WITHIN_RESPONSES)


class CutConnectionTests(DaemonTestCase):
    """A client whose every connection is cut, sooner or later.

    The daemon has less memory than is printed, so that events are read again from the disk.
    """

    configuration: ClassVar[str] = CONFIGURATION + _LITTLE_MEMORY

    async def through(
        self, seed: int, longest: int, places: tuple[Place, ...] = tuple(Place)
    ) -> Client:
        self.proxy = CuttingProxy(self.daemon.port, seed, places, longest)
        self.addCleanup(self.proxy.stop)
        client = Client(f"http://127.0.0.1:{await self.proxy.listen()}")
        self.addCleanup(client.close)
        return client

    def check_cuts(self, places: tuple[Place, ...]) -> None:
        """Hold that there were cuts at all these places."""
        for place in places:
            self.assertGreater(self.proxy.cuts[place], 1, place)

    async def check(self, kind: type[ResumingReader], seed: int, *places: Place) -> None:
        """Hold that a reader has everything, though there were cuts at all these places."""
        self.patch(resuming_readers, "_PAUSE", 0.02)
        client = await self.through(seed, 3_000_000, places)
        reader = kind(client, await self.begin(EVALUATOR))
        await reader.read()
        self.assertTrue(joined(reader.events) == printed(), "not what was printed")
        self.check_cuts(places)

    async def test_pages_lose_and_repeat_nothing(self) -> None:
        await self.check(PageReader, 1, *Place)

    async def test_long_polls_lose_and_repeat_nothing(self) -> None:
        await self.check(PollReader, 2, *Place)

    async def test_server_sent_events_lose_and_repeat_nothing(self) -> None:
        await self.check(ServerSentReader, 7, *_UNFINISHED)

    async def test_json_lines_lose_and_repeat_nothing(self) -> None:
        await self.check(LineReader, 8, *_UNFINISHED)

    async def test_web_sockets_lose_and_repeat_nothing(self) -> None:
        await self.check(WebSocketReader, 5, *_UNFINISHED)

    async def test_library_loses_and_repeats_nothing(self) -> None:
        await self.check(LibraryReader, 8, *_UNFINISHED)

    async def test_form_repeated_with_its_key_begins_one_evaluation(self) -> None:
        client = await self.through(6, 50_000)
        known = await self.listed()
        begun = set()
        for number in range(20):
            post = partial(self._post, client, f"key-{number}")
            identifier = await insist(post)
            self.assertEqual(await insist(post), identifier)
            begun.add(identifier)
        self.client.evaluations += begun
        self.assertEqual(await self.listed() - known, begun)
        self.assertEqual(len(begun), 20)
        self.check_cuts(tuple(Place))

    async def _post(self, client: Client, key: str) -> str:
        return await client.evaluate(
            self.repository.url,
            self.commit,
            "printf ran",
            files=[("solution", "solution.txt", b"42\n" * 10_000)],
            headers={"Idempotency-Key": key},
        )

    async def listed(self) -> set[str]:
        """Return the identifiers of all evaluations that the daemon knows."""
        listing = (await self.client.get("/evaluations")).json
        self.assertIsNone(listing["end"])
        return {entry["evaluation_id"] for entry in listing["data"]}
