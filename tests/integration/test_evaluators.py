"""Evaluators on this machine: what they find, print and leave, and why they end."""

from __future__ import annotations

from tests.integration import evaluator_case
from tests.integration.client import python, text

_CRASH = """
import os, resource, signal
resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
try:
    open("/proc/self/coredump_filter", "w").write("0x7f")
except OSError:
    pass
block = b"x" * (50 * 2**20)
if os.fork() == 0:
    os.kill(os.getpid(), signal.SIGSEGV)
print(os.WTERMSIG(os.wait()[1]))
print(sum(entry.stat().st_size for entry in os.scandir() if "core" in entry.name))
"""


class EvaluatorTests(evaluator_case.EvaluatorCase):
    async def test_crashed_evaluator_leaves_no_core_dump_over_1_mib(self) -> None:
        signal, size = map(int, text(await self.run_command(python(_CRASH))).split())
        self.assertEqual(signal, 11)
        self.assertLess(size, 2**20)

    async def test_sandbox_starts_with_the_lowest_limits(self) -> None:
        lowest = "memory=16M processes=8 open_files=16 file_size=1K disk=1K disk_files=1 output=1K"
        pairs = (word.split("=") for word in f"{lowest} stderr=1K cpu=1".split())
        fields = {f"limits[{name}]": value for name, value in pairs}
        identifier = await self.begin("echo hello", **fields)
        limits = (await self.client.ended(identifier))["limits"]
        self.assertEqual(text(await self.client.follow(identifier)), "hello\n")
        self.assertEqual((limits["memory"], limits["disk"]), (16 * 2**20, 1024))
