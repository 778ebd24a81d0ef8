"""Evaluators that do not behave: odd output, stray processes, and what they find around them."""

from __future__ import annotations

from twisted.internet.threads import deferToThread

from tawebeval.client import Client, Data, EvaluationError
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
_NESTED = """
import os
for depth in %s:
    value = "[" * depth + "]" * depth
    print("", os.environ["EVALUATION_DATA_BEGIN"], value, sep="\\n")
    print(os.environ["EVALUATION_DATA_END"])
"""


class DriverTests(DaemonTestCase):
    async def test_core_dump_has_nothing_of_the_memory(self) -> None:
        signal, size = map(int, text(await self.run_command(python(_CRASH))).split())
        self.assertEqual(signal, 11)
        self.assertLess(size, 2**20)

    async def test_client_reads_what_the_daemon_accepts_as_nested(self) -> None:
        depths = [*range(850, 1050, 3), 100_000]  # Python 3.13 goes deeper than 3.11
        identifier = await self.begin(python(_NESTED % depths))
        with Client(self.daemon.url) as client:
            events = await deferToThread(lambda: list(client.events(identifier)))
        read = [len(event.written) // 2 for event in events if isinstance(event, Data)]
        refused = [event for event in events if isinstance(event, EvaluationError)]
        self.assertEqual({event.reason for event in refused}, {"protocol"})
        self.assertEqual(read, depths[: len(read)])
        self.assertEqual(len(read) + len(refused), len(depths))


class EvaluatorTests(evaluators.EvaluatorCase):
    """Evaluators on this machine."""


class BlockTests(blocks.BlockCase):
    """Their blocks."""
