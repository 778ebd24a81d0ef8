"""Evaluators that do not behave: odd output, stray processes, and what they find around them."""

from __future__ import annotations

from twisted.trial.unittest import SkipTest

from tests.integration.cgroups import reason_to_skip
from tests.integration.client import python, text
from tests.integration.harness import DaemonTestCase
from tests.integration.wire import blocks, evaluators

# What TuringArena's drivers of 2018 and 2019 do in the child that becomes the submission.
_DRIVER = """
import os, resource
pid = os.fork()
if pid == 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (10, resource.RLIM_INFINITY))
    print(resource.getrlimit(resource.RLIMIT_CPU), flush=True)
    os._exit(0)
print(os.waitpid(pid, 0)[1])
"""

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
    async def unlimited(self, command: str) -> None:
        """Hold that a driver has set its limits, where a group measures the processor time."""
        reason = reason_to_skip()
        if reason:
            raise SkipTest(reason)
        self.assertEqual(text(await self.run_command(command)), "(10, -1)\n0\n")

    async def test_hard_limits_can_be_unlimited(self) -> None:
        await self.unlimited(python(_DRIVER))

    async def test_core_dump_has_nothing_of_the_memory(self) -> None:
        signal, size = map(int, text(await self.run_command(python(_CRASH))).split())
        self.assertEqual(signal, 11)
        self.assertLess(size, 2**20)


class EvaluatorTests(evaluators.EvaluatorCase):
    """Evaluators on this machine."""


class BlockTests(blocks.BlockCase):
    """Their blocks."""
