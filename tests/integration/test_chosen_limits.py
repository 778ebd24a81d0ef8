"""Limits that a request chooses, in the real sandbox: higher and lower than the defaults."""

from __future__ import annotations

from typing import Any

from tests.integration.attacks import bombs
from tests.integration.cgroups import needs_cgroups
from tests.integration.client import failure, python, text
from tests.integration.harness import CONFIGURATION, DaemonTestCase

MIB = 2**20
SLEEPERS = "exec 2>&-; for i in $(seq 20); do sleep 60 & done; echo all run"
HEAP = """
taken = bytearray(%d)
print("all there")
"""
LIMITS = f"""
[limits]
wall_clock = 60
memory = {64 * MIB}
processes = 16
output = 1024

[limits.maximum]
memory = {192 * MIB}
processes = 64
output = {MIB}
"""


class ChosenLimitTests(DaemonTestCase):
    """A daemon with low defaults and higher maxima."""

    configuration = CONFIGURATION + LIMITS

    async def run_with(self, command: str, **limits: str) -> tuple[list[dict[str, Any]], Any]:
        """Return the events of a command with some limits, and the limits in its status."""
        fields = {f"limits[{name}]": value for name, value in limits.items()}
        identifier = await self.begin(command, **fields)
        status = await self.client.ended(identifier)
        return await self.client.follow(identifier), status["limits"]

    async def check_stopped(self, command: str, reason: str, limit: str, value: str) -> None:
        events, held = await self.run_with(command, **{limit: value})
        error = failure(events, reason)
        self.assertEqual(error["limit"], f"limits.{limit}")
        self.assertEqual(error["value"], held[limit])

    async def check_free(self, command: str, words: str, limit: str, low: str, high: str) -> None:
        """Hold that a command fails with the default of a limit and ends well with a higher one."""
        events, held = await self.run_with(command)
        failure(events, limit)
        self.assertEqual(str(held[limit]), low)
        events, held = await self.run_with(command, **{limit: high})
        self.assertEqual(text(events), words)

    async def test_lower_wall_clock_stops_the_run(self) -> None:
        await self.check_stopped("exec sleep 60", "timeout", "wall_clock", "0.5")

    async def test_lower_processor_time_stops_the_run(self) -> None:
        await self.check_stopped(python("while True: pass"), "cpu", "cpu", "1")

    async def test_output_limit_of_the_request_holds_below_and_above_the_default(self) -> None:
        await self.check_stopped("seq 1000", "output", "output", "2K")
        await self.check_free("yes | head -n 1000", "y\n" * 1000, "output", "1024", "3K")

    async def test_lower_file_size_holds_in_the_sandbox(self) -> None:
        events, _ = await self.run_with("head -c 2M /dev/zero > file", file_size="1M")
        self.assertEqual(failure(events, "file_size")["value"], MIB)

    @needs_cgroups
    async def test_memory_of_the_evaluation_has_the_limit_of_the_request(self) -> None:
        await self.check_stopped(python(bombs.HEAP), "memory", "memory", "32M")
        await self.check_free(
            python(HEAP % (100 * MIB)), "all there\n", "memory", str(64 * MIB), "160MiB"
        )

    @needs_cgroups
    async def test_number_of_processes_has_the_limit_of_the_request(self) -> None:
        await self.check_stopped(python(bombs.FORKS), "processes", "processes", "12")
        await self.check_free(SLEEPERS, "all run\n", "processes", "16", "40")

    async def test_sandbox_starts_with_the_lowest_limits(self) -> None:
        events, held = await self.run_with(
            "echo hello", memory="16M", processes="8", open_files="16", file_size="1K", disk="1K",
            disk_files="1", output="1K", stderr="1K", cpu="1",
        )  # fmt: skip
        self.assertEqual(text(events), "hello\n")
        self.assertEqual((held["memory"], held["disk"]), (16 * MIB, 1024))

    @needs_cgroups
    async def test_submission_has_no_more_memory_than_the_request(self) -> None:
        program = python(HEAP % (100 * MIB)).removeprefix("exec ")
        command = f"tawebeval-run -- {program}; echo $?"
        events, _ = await self.run_with(command)
        self.assertNotIn("all there", text(events))
        failure(events, "memory")
        events, _ = await self.run_with(command, memory="160M")
        self.assertEqual(text(events), "all there\n0\n")
