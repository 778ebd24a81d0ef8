"""Limits that a request chooses, in the real sandbox: higher and lower than the defaults."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SkipTest

from tests.integration.attacks import bombs
from tests.integration.cgroups import reason_to_skip
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
        """Hold that a command is stopped by a limit that its request has chosen."""
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

    def need_groups(self) -> None:
        """Skip the test where cgroups cannot hold limits of memory and processes."""
        reason = reason_to_skip()
        if reason is not None:
            raise SkipTest(reason)

    async def test_wall_clock(self) -> None:
        """A lower wall clock stops the run."""
        await self.check_stopped("exec sleep 60", "timeout", "wall_clock", "0.5")

    async def test_cpu(self) -> None:
        """Less processor time stops the run."""
        await self.check_stopped(python("while True: pass"), "cpu", "cpu", "1")

    async def test_output(self) -> None:
        """Output is counted up to the request's limit, below the default and above it."""
        await self.check_stopped("seq 1000", "output", "output", "2K")
        await self.check_free("yes | head -n 1000", "y\n" * 1000, "output", "1024", "3K")

    async def test_file_size(self) -> None:
        """A lower limit of files holds inside the sandbox."""
        events, _ = await self.run_with("head -c 2M /dev/zero > file", file_size="1M")
        self.assertEqual(failure(events, "file_size")["value"], MIB)

    async def test_memory(self) -> None:
        """The memory of the whole evaluation has the request's limit."""
        self.need_groups()
        await self.check_stopped(python(bombs.HEAP), "memory", "memory", "32M")
        await self.check_free(
            python(HEAP % (100 * MIB)), "all there\n", "memory", str(64 * MIB), "160MiB"
        )

    async def test_processes(self) -> None:
        """The number of processes has the request's limit."""
        self.need_groups()
        await self.check_stopped(python(bombs.FORKS), "processes", "processes", "12")
        await self.check_free(SLEEPERS, "all run\n", "processes", "16", "40")

    async def test_least(self) -> None:
        """The lowest limits that a request may choose let the sandbox start."""
        events, held = await self.run_with(
            "echo hello", memory="16M", processes="8", open_files="16", file_size="1K", disk="1K",
            disk_files="1", output="1K", stderr="1K", cpu="1",
        )  # fmt: skip
        self.assertEqual(text(events), "hello\n")
        self.assertEqual((held["memory"], held["disk"]), (16 * MIB, 1024))

    async def test_submission(self) -> None:
        """Programs of the submission have no more memory than the request's limit."""
        self.need_groups()
        program = python(HEAP % (100 * MIB)).removeprefix("exec ")
        command = f"tawebeval-run -- {program}; echo $?"
        events, _ = await self.run_with(command)
        self.assertNotIn("all there", text(events))
        failure(events, "memory")
        events, _ = await self.run_with(command, memory="160M")
        self.assertEqual(text(events), "all there\n0\n")
