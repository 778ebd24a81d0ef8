"""`linux.tail`, on real files."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet import inotify, reactor
from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from tawebeval.linux import tail
from tawebeval.linux.starter import LaunchSpec
from tawebeval.linux.starter_client import (
    STARTER_ENDED_MESSAGE,
    ProgramState,
    ProgramStateListener,
    StartedProgram,
)
from tawebeval.linux.tail import (
    POLL_SECONDS,
    FileTail,
    InotifyFileWatcher,
    TailContext,
    TailedProcess,
)
from tests.cases.patience import PATIENCE
from tests.cases.starters import Keeping, StarterCase

USAGE = tuple(resource.getrusage(resource.RUSAGE_SELF))
READER = """
import os, sys
from pathlib import Path
from twisted.internet import reactor
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.threads import deferToThread
from tawebeval.linux.starter_client import StartedProgram, StarterClient
from tawebeval.linux.tail import InotifyFileWatcher
from tawebeval.linux.tail import TailContext, TailedProcess

path, directory, pid, start_time_ticks, copy = sys.argv[1:]

class Copying(ProcessProtocol):
    def outReceived(self, data):
        os.write(output, data)

    def processExited(self, reason):
        self.transport.read_remaining_output()

    def processEnded(self, reason):
        print(reason.value.exitCode, flush=True)
        reactor.stop()

output = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
client = StarterClient.connect(Path(path))
client.attach_reactor(reactor)
context = TailContext(reactor, client, InotifyFileWatcher(reactor), deferToThread)
program = StartedProgram(Path(directory), int(pid), int(start_time_ticks))
TailedProcess(context, Copying(), program, stdout_offset=os.fstat(output).st_size)
reactor.run()
"""


class PlayedStarter:
    """A starter that the test plays: it notes what it is asked."""

    def __init__(self) -> None:
        self.listener: ProgramStateListener | None = None
        self.asked: list[Any] = []

    def watch_program(self, directory: Path, listener: ProgramStateListener) -> None:
        self.listener = listener

    def unwatch_program(self, directory: Path) -> None:
        self.listener = None

    def signal_program(self, directory: Path, number: int) -> None:
        self.asked.append(number)

    def close_output(self, directory: Path) -> None:
        self.asked.append("close")


class PlayedWatcher:
    """A watcher by which the test says that a file has grown."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callable[[], object]] = {}
        self.unwatch = self.callbacks.pop

    def watch(self, path: str, on_change: Callable[[], object], *, is_urgent: bool = True) -> None:
        self.callbacks[path] = on_change


class TailedProcessTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        for name in ("stdout", "stderr"):
            (self.directory / name).touch()
        self.starter, self.watcher, self.clock = PlayedStarter(), PlayedWatcher(), Clock()
        self.protocol = Keeping()

    def connect(self, stdout_offset: int = 0) -> TailedProcess:
        context: Any = (self.clock, self.starter, self.watcher, lambda call: succeed(call()))
        program = StartedProgram(self.directory, 7, 9)
        process = TailedProcess(TailContext(*context), self.protocol, program, stdout_offset)
        for opened in process._tails:
            self.addCleanup(opened.close)
        return process

    def print(self, content: bytes, name: str = "stdout") -> None:
        with (self.directory / name).open("ab") as file:
            file.write(content)
        if callback := self.watcher.callbacks.get(str(self.directory / name)):
            callback()
        self.take_turns()

    def take_turns(self) -> None:
        self.clock.pump([0] * 10)

    def tell(self, **state: Any) -> None:
        assert self.starter.listener is not None
        self.starter.listener(ProgramState(pid=7, start_time_ticks=9, **state))
        self.take_turns()

    def save(self, **state: Any) -> None:
        content = {"pid": 7, "start_time_ticks": 9, "rusage": USAGE, **state}
        (self.directory / "exit").write_text(json.dumps(content))

    def test_output_exit_and_ends_come_in_order(self) -> None:
        process = self.connect()
        self.print(b"one")
        self.print(b"error", "stderr")
        self.assertTrue(process.is_running)
        self.assertFalse(process.has_exited)
        self.tell(wait_status=0x300, rusage=USAGE)
        self.assertFalse(process.is_running)
        self.print(b"two")
        self.assertEqual(self.protocol.told, ["exited"])
        process.read_remaining_output()
        self.assertEqual(self.starter.asked, ["close"])
        (self.directory / "stdout").open("ab").write(b"three")
        self.tell(wait_status=0x300, rusage=USAGE, is_output_complete=True)
        self.assertEqual(self.protocol.printed, {1: b"onetwothree", 2: b"error"})
        self.assertEqual(sorted(self.protocol.told[1:3]), ["lost 1", "lost 2"])
        self.assertEqual(self.protocol.told[3:], ["ended"])
        reason = self.successResultOf(self.protocol.ended)
        self.assertIsInstance(reason, ProcessTerminated)
        self.assertEqual((reason.exitCode, reason.signal), (3, None))
        self.assertIsNone(process.lost_reason)
        assert process.resource_usage is not None
        self.assertEqual(process.resource_usage.ru_maxrss, USAGE[2])
        self.assertEqual(self.watcher.callbacks, {})
        process.signal_group(signal.SIGKILL)  # the number may be another's
        self.assertEqual(self.starter.asked, ["close"])

    def test_silent_process_can_be_replaced_by_another_process(
        self,
    ) -> None:
        process = self.connect()
        for name in ("stdout", "stderr"):
            (self.directory / "new").write_text(name)
            (self.directory / "new").rename(self.directory / name)
        process.switch_to_process(8, 10)
        self.take_turns()
        self.assertEqual(self.protocol.printed, {1: b"stdout", 2: b"stderr"})
        assert self.starter.listener is not None
        ended = ProgramState(8, 10, 0, USAGE, is_output_complete=True)
        self.starter.listener(ended)
        self.take_turns()
        self.assertIsNone(process.lost_reason)
        self.assertEqual(self.protocol.told[-1], "ended")

    def test_process_is_lost_if_an_empty_file_replaces_stdout_after_a_read(self) -> None:
        process = self.connect()
        self.print(b"one")
        (self.directory / "new").touch()
        (self.directory / "new").rename(self.directory / "stdout")
        process.switch_to_process(7, 9)
        self.take_turns()
        self.assertEqual(process.lost_reason, "the file of stdout has shrunk")

    def test_detached_process_delivers_and_signals_nothing(self) -> None:
        process = self.connect()
        self.print(b"one")
        listener = self.starter.listener
        process.detach()
        process.detach()
        self.print(b"two")
        self.assertFalse(process.is_running)
        process.signal_group(signal.SIGKILL)
        process.read_remaining_output()
        process.resumeProducing()
        self.take_turns()
        assert listener is not None
        listener(ProgramState(pid=7, start_time_ticks=9, wait_status=0, rusage=USAGE))
        listener(None)
        self.take_turns()
        self.assertEqual((self.protocol.printed, self.protocol.told), ({1: b"one", 2: b""}, []))
        self.assertEqual((self.starter.asked, self.watcher.callbacks), ([], {}))

    def test_delivery_begins_at_the_offset(self) -> None:
        self.print(b"0123456789")
        self.print(b"abcdef", "stderr")
        self.connect(4)
        self.take_turns()
        self.assertEqual(self.protocol.printed, {1: b"456789", 2: b"abcdef"})

    def test_paused_output_waits(self) -> None:
        process = self.connect()
        process.pauseProducing()
        self.print(b"later")
        self.tell(wait_status=0, rusage=USAGE, is_output_complete=True)
        self.assertEqual(
            (self.protocol.printed[1], self.protocol.told), (b"", ["exited", "lost 2"])
        )
        process.resumeProducing()
        self.take_turns()
        self.assertEqual(self.protocol.printed[1], b"later")
        self.assertIsInstance(self.successResultOf(self.protocol.ended), ProcessDone)

    def test_process_end_is_reported_after_both_files_have_shrunk(self) -> None:
        process = self.connect()
        for name in ("stdout", "stderr"):
            self.print(b"some", name)
            (self.directory / name).write_bytes(b"")
            self.watcher.callbacks[str(self.directory / name)]()
        self.assertEqual(self.protocol.told, ["lost 1", "lost 2"])
        self.tell(wait_status=9, rusage=USAGE, is_output_complete=True)
        self.assertEqual(self.protocol.told[2:], ["exited", "ended"])
        self.assertEqual(process.lost_reason, "the file of stdout has shrunk")
        self.assertEqual(self.watcher.callbacks, {})

    def test_process_unknown_to_the_starter_is_lost_unless_its_exit_is_stored(
        self,
    ) -> None:
        unknown, other = ProgramState(7, 9, is_unknown=True), ProgramState(7, 10)
        ended = {"wait_status": 0, "is_output_complete": True}
        for saved, state, lost, number in (
            (ended, unknown, None, None),
            (None, unknown, "not known any more", 9),
            ({**ended, "start_time_ticks": 10}, unknown, "not known any more", 9),
            (None, other, "not known any more", 9),
            ({**ended, "wait_status": 9, "write_errno": 28}, unknown, "No space left", 9),
            (ended, None, None, None),
            (None, None, STARTER_ENDED_MESSAGE, 9),
            ({"wait_status": 0}, None, STARTER_ENDED_MESSAGE, None),
        ):
            self.setUp()
            process = self.connect()
            self.print(b"some")
            if saved is not None:
                self.save(**saved)
            process.on_program_state(state)
            self.take_turns()
            self.assertEqual(self.protocol.printed[1], b"some")
            self.assertEqual(process.lost_reason is None, lost is None, (saved, state))
            self.assertIn(lost or "", process.lost_reason or "")
            self.assertEqual(self.successResultOf(self.protocol.ended).signal, number)

    def test_full_disk_kills_the_process(self) -> None:
        process = self.connect()
        self.tell(write_errno=28)
        self.tell(write_errno=28)
        self.assertEqual(self.starter.asked, [signal.SIGKILL])
        self.assertIn("No space left", process.lost_reason or "")

    def test_shrunk_output_file_kills_the_process(self) -> None:
        process = self.connect()
        self.print(b"some")
        os.truncate(self.directory / "stdout", 2)
        self.print(b"")
        self.assertIn("stdout has shrunk", process.lost_reason or "")
        self.assertEqual(self.protocol.told, ["lost 1"])
        self.tell(wait_status=9, rusage=USAGE, is_output_complete=True)
        self.assertEqual(self.protocol.told, ["lost 1", "exited", "lost 2", "ended"])
        self.assertEqual(self.starter.asked, [signal.SIGKILL])

    def test_slow_reads_are_reported_once_over_the_limit(self) -> None:
        process, told = self.connect(), []
        process.on_slow_reads = lambda: told.append("slow")
        for seconds in (0.2, 0.5):
            self.tell(slow_read_cpu_seconds=seconds)
        self.assertEqual(told, ["slow"])

    def test_process_has_the_pid_or_the_error_of_the_broker(self) -> None:
        process, told = self.connect(), []
        process.on_broker_error = told.append
        self.tell(broker_pid=77)
        self.assertEqual(process.broker_pid, 77)
        self.tell(broker_error="why")
        self.assertEqual((process.broker_pid, told), (None, ["why"]))

    def test_missing_files_are_an_error(self) -> None:
        (self.directory / "stderr").unlink()
        self.assertRaises(FileNotFoundError, self.connect)
        self.assertEqual(self.watcher.callbacks, {})


class KilledReaderTests(StarterCase):
    def test_killed_readers_lose_and_repeat_no_byte(self) -> None:
        lines = "import sys\nfor i in range(200000): print(i, flush=i % 97 == 0)\nsys.exit(5)"
        launch = LaunchSpec([sys.executable, "-c", lines], {}, "/")
        directory = self.directory / "program"
        program = self.client.start_program(directory, launch)
        copy = self.directory / "copy"
        arguments = [self.starter.path, directory, program.pid, program.start_time_ticks, copy]
        argv = [sys.executable, "-c", READER, *map(str, arguments)]
        kills = 0
        deadline = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < deadline, "it does not end"
            reader = subprocess.Popen(argv, stdout=subprocess.PIPE, env={"PYTHONPATH": os.getcwd()})
            if kills < 6:
                size = copy.stat().st_size if copy.exists() else 0
                while reader.poll() is None and (not copy.exists() or copy.stat().st_size <= size):
                    time.sleep(0.001)
                time.sleep(random.random() * 0.02)
                reader.kill()
                kills += 1
            said, _ = reader.communicate(timeout=PATIENCE)
            if said:
                break
        self.assertEqual(said, b"5\n")
        self.assertEqual(copy.read_bytes(), b"".join(b"%d\n" % i for i in range(200000)))


class TailTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        self.path.touch()
        self.clock = Clock()
        self.reads: list[bytes] = []
        self.ends: list[str | None] = []
        self.on_data: Callable[[], object] = lambda: None
        self.calls: list[tuple[Callable[[], bytes], Deferred[bytes]]] = []

        def run_in_thread(call: Callable[[], bytes]) -> Deferred[bytes]:
            self.calls.append((call, Deferred()))
            return self.calls[-1][1]

        def take_data(number: int, chunk: bytes) -> None:
            self.reads.append(chunk)
            self.on_data()

        def take_end(number: int, problem: str | None) -> None:
            self.ends.append(problem)

        starter, watcher = PlayedStarter(), PlayedWatcher()
        context = TailContext(self.clock, starter, watcher, run_in_thread)
        self.tail = FileTail(context, str(self.path), 0, 1, take_data, take_end)
        self.addCleanup(self.tail.close)

    @property
    def received(self) -> bytes:
        return b"".join(self.reads)

    def print(self, content: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(content)

    def uncache(self) -> None:
        self.patch(tail, "_read_cached", lambda descriptor, offset: None)

    def test_one_turn_reads_64_kib(self) -> None:
        self.print(b"x" * 150_000)
        self.tail.on_change()
        self.tail.on_change()
        self.assertEqual(len(self.reads), 1)
        self.assertEqual(len(self.received), 65536)
        self.clock.pump([0] * 5)
        self.assertEqual(len(self.received), 150_000)

    def test_end_is_reported_after_all_bytes_even_if_paused(self) -> None:
        self.print(b"x" * 150_000)
        self.on_data = self.tail.pauseProducing
        self.tail.finish()
        for _ in range(3):
            self.assertEqual(self.ends, [])
            self.clock.pump([0] * 3)
            self.tail.resumeProducing()
        self.clock.pump([0] * 3)
        self.assertEqual(len(self.received), 150_000)
        self.assertEqual(self.ends, [None])
        self.assertTrue(self.tail.is_closed)

    def test_disk_is_read_in_a_thread(self) -> None:
        self.print(b"abc")
        self.uncache()
        self.tail.on_change()
        self.tail.on_change()
        ((call, result),) = self.calls
        self.assertEqual(self.received, b"")
        result.callback(call())
        self.assertEqual(self.received, b"abc")

    def test_file_stays_open_while_a_thread_reads_it(self) -> None:
        self.print(b"abc")
        self.uncache()
        self.tail.on_change()
        self.tail.close()
        ((call, result),) = self.calls
        result.callback(call())
        self.assertEqual(self.received, b"")
        self.assertRaises(OSError, call)

    def test_error_of_a_read_in_a_thread_ends_the_tail_with_the_reason(self) -> None:
        self.uncache()
        self.tail.on_change()
        self.calls[0][1].errback(OSError(errno.EIO, "I/O error"))
        self.assertEqual(self.ends, [f"the file of {self.path.name} cannot be read: I/O error"])
        self.assertTrue(self.tail.is_closed)

    def test_error_of_a_nonblocking_read_ends_the_tail_with_the_reason(self) -> None:
        def fail(*arguments: object) -> int:
            raise OSError(errno.EIO, "I/O error")

        self.patch(os, "preadv", fail)
        self.tail.on_change()
        self.assertEqual(self.ends, [f"the file of {self.path.name} cannot be read: I/O error"])

    def test_file_is_read_directly_if_the_file_system_lacks_nonblocking_reads(self) -> None:
        def fail(*arguments: object) -> int:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        self.patch(os, "preadv", fail)
        self.print(b"abc")
        self.tail.on_change()
        self.assertEqual(self.received, b"abc")

    def test_bytes_that_are_not_cached_are_read_in_the_next_turn(self) -> None:
        preadv = os.preadv

        def read_a_page(fd: int, buffers: list[bytearray], offset: int, flags: int) -> int:
            if offset >= 4096:
                raise BlockingIOError
            return preadv(fd, [memoryview(buffers[0])[:4096]], offset, flags)

        self.patch(os, "preadv", read_a_page)
        self.print(b"x" * 70_000)
        self.tail.on_change()
        self.clock.advance(0)
        for call, result in self.calls:
            result.callback(call())
            self.clock.advance(0)
        self.assertEqual(len(self.received), 70_000)

    def test_bytes_read_by_a_thread_during_a_pause_are_delivered_after_resume(self) -> None:
        self.print(b"abc")
        self.uncache()
        self.tail.on_change()
        self.tail.pauseProducing()
        self.calls[0][1].callback(self.calls[0][0]())
        self.assertEqual(self.received, b"")
        self.tail.resumeProducing()
        self.clock.advance(0)
        self.calls[1][1].callback(self.calls[1][0]())
        self.assertEqual(self.received, b"abc")


class WatcherTests(TestCase):
    def watch(self, path: Path, watcher: InotifyFileWatcher) -> Deferred[None]:
        changed: Deferred[None] = Deferred()
        watcher.watch(str(path), lambda: None if changed.called else changed.callback(None))
        return changed

    def test_file_can_be_unwatched_after_the_close(self) -> None:
        path = Path(self.mktemp())
        path.touch()
        watcher = InotifyFileWatcher(reactor)
        self.watch(path, watcher)
        watcher.close()
        watcher.unwatch(str(path))

    async def test_growth_of_a_file_is_noticed_by_inotify_without_a_poll(self) -> None:
        clock = Clock()
        watcher = InotifyFileWatcher(reactor)
        watcher._poll.clock = clock
        self.addCleanup(watcher.close)
        paths = [Path(self.mktemp()) for _ in range(2)]
        for path in paths:
            path.touch()
        changes = [self.watch(path, watcher) for path in paths]
        paths[1].write_bytes(b"a")
        await changes[1].addTimeout(60, reactor)
        self.assertFalse(changes[0].called)
        # A file that is watched no longer may be removed.
        watcher.unwatch(str(paths[1]))
        paths[1].unlink()
        paths[0].write_bytes(b"a")
        await changes[0].addTimeout(60, reactor)

    def test_files_are_polled_without_inotify(self) -> None:
        def fail(*arguments: object) -> int:
            raise inotify.INotifyError

        for name in ("init", "add"):
            patched = self.patch(inotify.INotify._inotify, name, fail)
            clock = MemoryReactorClock()
            watcher = InotifyFileWatcher(clock)
            path = Path(self.mktemp())
            path.touch()
            changed = self.watch(path, watcher)
            clock.advance(POLL_SECONDS)
            self.assertTrue(changed.called)
            watcher.close()
            self.assertEqual((clock.getDelayedCalls(), clock.readers), ([], set()))
            patched.restore()
