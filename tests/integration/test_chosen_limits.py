"""Limits that a request chooses, in the real sandbox: higher and lower than the defaults."""

from __future__ import annotations

from typing import Any

from tests.integration.client import failure, text
from tests.integration.harness import CONFIGURATION, DaemonTestCase

MIB = 2**20
LIMITS = f"""
[limits]
wall_clock = 60
output = 1024

[limits.maximum]
output = {MIB}
"""


class ChosenLimitTests(DaemonTestCase):
    """A daemon with a low default and a higher maximum."""

    configuration = CONFIGURATION + LIMITS

    async def run_with(self, command: str, **limits: str) -> tuple[list[dict[str, Any]], Any]:
        """Return the events of a command with some limits, and the limits in its status."""
        fields = {f"limits[{name}]": value for name, value in limits.items()}
        identifier = await self.begin(command, **fields)
        status = await self.client.ended(identifier)
        return await self.client.follow(identifier), status["limits"]

    async def test_limits_of_the_request_hold_below_and_above_the_defaults(self) -> None:
        for command, reason, limits in (
            ("exec sleep 60", "timeout", {"wall_clock": "0.5"}),
            ("seq 1000", "output", {}),
            ("seq 1000", "output", {"output": "2K"}),
            ("head -c 2M /dev/zero > file", "file_size", {"file_size": "1M"}),
        ):
            events, held = await self.run_with(command, **limits)
            error = failure(events, reason)
            self.assertEqual(error["value"], held[error["limit"].removeprefix("limits.")])
        events, _ = await self.run_with("yes | head -n 1000", output="3K")
        self.assertEqual(text(events), "y\n" * 1000)

    async def test_sandbox_starts_with_the_lowest_limits(self) -> None:
        events, held = await self.run_with(
            "echo hello", memory="16M", processes="8", open_files="16", file_size="1K", disk="1K",
            disk_files="1", output="1K", stderr="1K", cpu="1",
        )  # fmt: skip
        self.assertEqual(text(events), "hello\n")
        self.assertEqual((held["memory"], held["disk"]), (16 * MIB, 1024))
