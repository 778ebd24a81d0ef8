"""Attacks by output, on this machine and on a cluster."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from tests.integration.attacks import bombs
from tests.integration.attacks.case import HONEST, HONEST_OUTPUT, MIB, OUTPUT, STDERR, AttackCase
from tests.integration.client import failure, joined, python


class OutputCase(AttackCase):
    """More than anybody wants to read."""

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

    async def test_stdout(self) -> None:
        """Lines without end."""
        await self.flood(python(bombs.FLOOD, "1"), "output", OUTPUT)

    async def test_stderr(self) -> None:
        """Complaints without end, which nobody waits for."""
        await self.flood(python(bombs.FLOOD, "2"), "stderr", STDERR)

    async def test_a_line_of_ten_gigabytes(self) -> None:
        """A line that would not end before ten gigabytes."""
        await self.flood(python(bombs.LONG_LINE), "output", OUTPUT)

    async def test_broken_values(self) -> None:
        """Values that are none, which are much work and become nothing."""
        await self.flood(python(bombs.BROKEN_VALUES), "output", OUTPUT)

    async def test_the_same_file_again_and_again(self) -> None:
        """50 KB that name 836 MB of files: these are output, too."""
        await self.flood(python(bombs.SAME_FILE, "400"), "output", OUTPUT)

    async def test_floods_beside_others(self) -> None:
        """Floods that nobody reads wait, and others go on."""
        floods = [await self.begin(python(bombs.FLOOD, "1")) for _ in range(3)]
        self.assertEqual(joined(await self.run_command(python(HONEST))), [HONEST_OUTPUT])
        for identifier in floods:
            await self.client.cancel(identifier)
