"""Back-pressure: an evaluator that prints more than is read has to wait, and nothing is lost."""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import suppress as suppressing
from hashlib import sha256
from itertools import count
from pathlib import Path

from twisted.internet import reactor
from twisted.internet.task import deferLater

from tests.integration.attacks.bombs import SAME_FILE
from tests.integration.client import data, joined, python, text
from tests.integration.harness import DaemonTestCase, until
from tests.integration.processes import alive, children, new_word, processes, state

MIB = 2**20
FILE = 3 * MIB  # what a file of 2,090,000 bytes becomes, and some more
LINES = 100_000
FILL = "x" * 1000

FLOOD = f"""
import sys
for i in range({LINES}):
    sys.stdout.write(f"{{i:08d}}" + {FILL!r} + "\\n")
"""


class FloodTests(DaemonTestCase):
    """The usual buffer, and much more than it holds."""

    async def test_a_flood_waits_for_its_reader_and_arrives_exactly(self) -> None:
        """100 MB that nobody reads stop the evaluator, not the daemon; then all is read."""
        small = self.daemon.memory
        word = new_word()
        identifier = await self.begin(python(FLOOD, word))
        while (await self.client.status(identifier))["buffered_bytes"] < 8 * MIB:
            pass
        # The sandbox's own processes have children, down to the evaluator.
        (flood,) = (pid for pid in processes(word) if not children(pid))
        await until(lambda: _blocked(flood), "the evaluator is blocked")
        # What was read last is an event only when its partial line has waited long enough.
        before = None
        while (now := await self.client.status(identifier))["events"] != before:
            before = now["events"]
            await deferLater(reactor, 0.2)
        self.assertTrue(alive(flood), "it goes on although nobody reads")
        self.assertEqual(now["state"], "running")
        self.assertLess(now["buffered_bytes"], 9 * MIB)
        self.assertLess(self.daemon.memory - small, 48 * MIB)
        digest, cursor, most = sha256(), None, 0
        for pages in count(1):
            page = await self.client.page(identifier, cursor, wait=10)
            digest.update(text(page["data"]).encode())
            cursor = page["end"]
            if pages % 20 == 0:
                most = max(most, self.daemon.memory)
            if cursor is None:
                break
        wanted = sha256()
        for i in range(LINES):
            wanted.update(f"{i:08d}{FILL}\n".encode())
        self.assertEqual(digest.hexdigest(), wanted.hexdigest())
        self.assertLess(most - small, 48 * MIB)

    async def test_files_wait_for_their_reader_and_arrive_exactly(self) -> None:
        """Of files that a few bytes name one is in memory at a time, also after the evaluator."""
        small = self.daemon.memory
        word = new_word()
        identifier = await self.begin(python(SAME_FILE, "40", word))
        await until(lambda: not processes(word), "the evaluator has exited")
        while (status := await self.client.status(identifier))["buffered_bytes"] < 8 * MIB:
            pass
        self.assertEqual(status["state"], "running")
        self.assertLess(status["buffered_bytes"], 8 * MIB + FILE)
        count, cursor, most = 0, None, 0
        while True:
            page = await self.client.page(identifier, cursor, wait=10)
            for one in data(page["data"]):
                self.assertEqual(len(one["content_base64"]), (2_090_000 + 2) // 3 * 4)
                count += 1
            most = max(most, self.daemon.memory)
            cursor = page["end"]
            if cursor is None:
                break
        self.assertEqual(count, 40)
        self.assertLess(most - small, 48 * MIB)


class FullAtTheEndTests(DaemonTestCase):
    """A buffer that holds what is read at once, but not what is in the pipe."""

    configuration = """
        [repositories]
        protocols = ["file"]
        [buffers]
        evaluation = 102400
        """

    async def test_the_buffer_may_become_full_when_the_evaluator_has_ended(self) -> None:
        """While the daemon is busy elsewhere, a run prints more than fits, and ends."""
        line, word = "x" * 999, new_word()
        program = f"""
import os
os.chdir(os.environ["HOME"])
os.mkfifo("gate")
open("gate").read()
print("{line}\\n" * 190, end="", flush=True)
"""
        identifier = await self.begin(python(program, word))
        (gate,) = await until(
            lambda: list(self.daemon.state.glob("evaluations/*/home/gate")), "it waits"
        )
        # Its pipe holds all of that, as it does when much was printed before.
        for one in processes(word):
            # Some of a sandbox may be closed to us, but all have the same stdout.
            with suppressing(PermissionError), open(f"/proc/{one}/fd/1", "wb") as stdout:
                fcntl.fcntl(stdout, fcntl.F_SETPIPE_SZ, 2**18)
        pid = self.daemon.pid
        self.addCleanup(os.kill, pid, signal.SIGCONT)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: state(pid) == "T", "the daemon is stopped")
        gate.write_text("go")
        await until(lambda: not processes(word), "the evaluator has ended")
        os.kill(pid, signal.SIGCONT)
        events = await self.client.follow(identifier)
        self.assertEqual(joined(events), [f"{line}\n" * 190])


def _blocked(pid: int) -> bool:
    """Tell whether a process sleeps, in a write to a pipe where that can be known."""
    try:
        place = Path(f"/proc/{pid}/wchan").read_text()
    except PermissionError:
        place = "0"
    return state(pid) == "S" and ("pipe" in place or place == "0")
