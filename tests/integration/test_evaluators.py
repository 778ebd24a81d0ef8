"""Evaluators on this machine: what they find, print and leave, and why they end."""

from __future__ import annotations

from twisted.internet import reactor
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from tawebeval_client import Client, Data, EvaluationError
from tests.integration.client import failure, python, text
from tests.integration.wire import evaluators

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


class EvaluatorTests(evaluators.EvaluatorCase):
    async def test_core_dump_has_nothing_of_the_memory(self) -> None:
        signal, size = map(int, text(await self.run_command(python(_CRASH))).split())
        self.assertEqual(signal, 11)
        self.assertLess(size, 2**20)

    async def test_client_reads_what_the_daemon_accepts_as_nested(self) -> None:
        depths = [*range(850, 1050, 3), 100_000]  # Python 3.13 goes deeper than 3.11
        identifier = await self.begin(python(_NESTED % depths))
        with Client(self.daemon.url) as client:
            events = await deferToThread(lambda: list(client.events(identifier)))
        read = [len(event.raw_json) // 2 for event in events if isinstance(event, Data)]
        refused = [event for event in events if isinstance(event, EvaluationError)]
        self.assertEqual({event.reason for event in refused}, {"protocol"})
        self.assertEqual(read, depths[: len(read)])
        self.assertEqual(len(read) + len(refused), len(depths))

    async def test_evaluation_cancelled_while_it_starts_ends_at_once(self) -> None:
        await self.run_command("true")  # from here on the commit is there
        for delay in range(0, 40, 2):
            identifier = await self.begin("sleep 600; echo too late; exec sleep 600")
            await deferLater(reactor, delay / 1000)
            await self.client.cancel(identifier)
            events = await self.client.follow(identifier)
            failure(events, "cancelled")
            self.assertEqual(text(events), "", f"after {delay} ms")

    async def test_sandbox_starts_with_the_lowest_limits(self) -> None:
        lowest = "memory=16M processes=8 open_files=16 file_size=1K disk=1K disk_files=1 output=1K"
        pairs = (word.split("=") for word in f"{lowest} stderr=1K cpu=1".split())
        fields = {f"limits[{name}]": value for name, value in pairs}
        identifier = await self.begin("echo hello", **fields)
        limits = (await self.client.ended(identifier))["limits"]
        self.assertEqual(text(await self.client.follow(identifier)), "hello\n")
        self.assertEqual((limits["memory"], limits["disk"]), (16 * 2**20, 1024))
