"""A machine that has no more processes: nobody who did not use them is to blame."""

from __future__ import annotations

from pathlib import Path

from tests.integration.cgroups import needs_cgroups
from tests.integration.client import failure, text
from tests.integration.harness import CONFIGURATION, DaemonTestCase


class FewProcessesTests(DaemonTestCase):
    """The group around those of all evaluations has a limit while the daemon runs."""

    configuration = CONFIGURATION

    async def find_limit(self) -> None:
        self.assertEqual(text(await self.run_command("exec cat README")), "an evaluator\n")
        found = [path for path in self.daemon.cgroups() if (path / "pids.max").exists()]
        self.most: Path = min(found, key=lambda path: len(str(path))) / "pids.max"
        before = self.most.read_text()
        self.addCleanup(self.most.write_text, before)

    async def allow(self, count: int) -> None:
        """Let there be so many processes beside those that are there when no evaluation is left."""
        await self.daemon.nothing_left()
        there = int(self.most.with_name("pids.current").read_text())
        self.most.write_text(str(there + count))

    @needs_cgroups
    async def test_evaluation_without_processes_for_its_sandbox_is_lost(self) -> None:
        await self.find_limit()
        for count, words in (
            (1, "the sandbox could not be started"),
            (2, "the sandbox could not start a process for the evaluator"),
        ):
            await self.allow(count)
            error = failure(await self.run_command("exec cat README"), "lost")
            self.assertIn(words, error["message"])
        await self.allow(3)
        self.assertEqual(text(await self.run_command("exec cat README")), "an evaluator\n")

    @needs_cgroups
    async def test_lack_of_processes_is_not_blamed_on_the_evaluator(self) -> None:
        await self.find_limit()
        await self.allow(3)
        error = failure(await self.run_command("cat README"), "exit")
        self.assertIn("fork", error["stderr"])

    async def test_evaluator_has_no_descriptor_of_its_sandbox(self) -> None:
        listed = text(await self.run_command("ls /proc/self/fd; ls /proc/1/fd 2>/dev/null"))
        self.assertEqual(listed.split(), ["0", "1", "2", "3"])  # the last one is of `ls` itself
