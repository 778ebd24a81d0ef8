"""Attacks by output, on this machine and on a cluster."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from tests.integration.attacks import bombs
from tests.integration.attacks.case import HONEST, HONEST_OUTPUT, MIB, OUTPUT, STDERR, AttackCase
from tests.integration.client import failure, joined, python


class OutputCase(AttackCase):
    async def flood(self, command: str, reason: str, value: int) -> None:
        """Check that a flood is stopped, and that the daemon's memory does not grow with it."""
        before = self.daemon.memory
        identifier = await self.begin(command)
        reading = Deferred.fromCoroutine(self.client.follow(identifier))
        self.assertEqual(joined(await self.run_command(python(HONEST))), [HONEST_OUTPUT])
        error = failure(await reading, reason)
        self.assertEqual((await self.client.get("/health")).code, 200)
        self.assertEqual((error["limit"], error["value"]), (f"limits.{reason}", value))
        self.assertLess(self.daemon.memory - before, 48 * MIB)

    async def test_floods_are_stopped_beside_an_honest_evaluation(self) -> None:
        for command, reason, value in (
            (python(bombs.FLOOD, "1"), "output", OUTPUT),
            (python(bombs.FLOOD, "2"), "stderr", STDERR),
            (python(bombs.LONG_LINE), "output", OUTPUT),
            (python(bombs.BROKEN_VALUES), "output", OUTPUT),
            (python(bombs.SAME_FILE, "400"), "output", OUTPUT),  # 50 KB that name 836 MB
        ):
            await self.flood(command, reason, value)
