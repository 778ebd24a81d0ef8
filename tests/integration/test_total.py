"""Many evaluations in little memory: those who read get all, whatever the others leave unread."""

from __future__ import annotations

import random
from hashlib import sha256
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

from tests.integration.client import text
from tests.integration.harness import DaemonTestCase

MIB = 2**20
EVALUATIONS = 100
LINES = 3000
LINE = "0123456789" * 8


class TotalTests(DaemonTestCase):
    """100 evaluations, which together print six times what they may hold, and more as events."""

    configuration = """
        [repositories]
        protocols = ["file"]
        [evaluations]
        running = 40
        queued = 1000
        retain = 10
        [buffers]
        total = 4194304
        """

    async def begin_patiently(self, command: str) -> str:
        """Begin an evaluation, as soon as others have read what they should."""
        while True:
            answer = await self.client.post(self.repository.url, self.commit, command)
            if answer.code == 200:
                return str(answer.json["evaluation_id"])
            answer.problem(503)
            await deferLater(reactor, 0.5)

    async def read(self, number: int, identifier: str, chance: random.Random) -> str:
        """Read an evaluation to its end, and return a digest of it.

        Some are slow, and some go away while they wait and ask the same again.
        """
        digest, cursor = sha256(), None
        while True:
            if number % 3 == 1:
                await deferLater(reactor, chance.random() / 2)
                gone = Deferred.fromCoroutine(self.client.ask(identifier, cursor, wait=1))
                gone.addErrback(lambda failure: None)
                await deferLater(reactor, chance.random() / 20)
                gone.cancel()
            page: Any = await self.client.page(identifier, cursor, wait=5)
            digest.update(text(page["data"]).encode())
            assert all(event["type"] == "text" for event in page["data"]), page["data"]
            cursor = page["end"]
            if cursor is None:
                return digest.hexdigest()

    async def test_many_evaluations_stay_within_the_memory_of_all(self) -> None:
        chance = random.Random(1)
        small, most = self.daemon.memory, 0
        reading: list[tuple[int, Deferred[str]]] = []
        for number in range(EVALUATIONS):
            identifier = await self.begin_patiently(f"yes {LINE}{number:03d} | head -n {LINES}")
            if number % 3 != 2:
                coroutine = self.read(number, identifier, chance)
                reading.append((number, Deferred.fromCoroutine(coroutine)))
            most = max(most, self.daemon.memory)
        found = gatherResults([one for _, one in reading])
        while not found.called:
            await deferLater(reactor, 0.2)
            most = max(most, self.daemon.memory)
        for (number, _), digest in zip(reading, await found, strict=True):
            wanted = sha256(f"{LINE}{number:03d}\n".encode() * LINES).hexdigest()
            self.assertEqual(digest, wanted, number)
        self.assertLess(most - small, 80 * MIB)
