"""Evaluators that do not behave: odd output, stray processes, and what they find around them."""

from __future__ import annotations

from tests.integration.client import python, text
from tests.integration.harness import DaemonTestCase
from tests.integration.wire import blocks, evaluators

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


class DriverTests(DaemonTestCase):
    async def test_core_dump_has_nothing_of_the_memory(self) -> None:
        signal, size = map(int, text(await self.run_command(python(_CRASH))).split())
        self.assertEqual(signal, 11)
        self.assertLess(size, 2**20)


class EvaluatorTests(evaluators.EvaluatorCase):
    """Evaluators on this machine."""


class BlockTests(blocks.BlockCase):
    """Their blocks."""
