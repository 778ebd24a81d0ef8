"""`linux.tail`, on real files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from twisted.internet import inotify, reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from tawebeval.linux import tail
from tawebeval.linux.tail import POLL_SECONDS, FileTail, FileWatcher


class Owner:
    def __init__(self) -> None:
        self.received = b""
        self.reads = 0
        self.told: list[object] = []
        self.on_data: Callable[[], object] = lambda: None

    def on_tail_data(self, chunk: bytes) -> None:
        self.received += chunk
        self.reads += 1
        self.on_data()

    def on_tail_end(self) -> None:
        self.told.append("end")

    def on_tail_shrunk(self) -> None:
        self.told.append("shrunk")

    def on_tail_error(self, error: OSError) -> None:
        self.told.append(error.errno)


class TailTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        self.path.touch()
        self.clock = Clock()
        self.owner = Owner()
        self.calls: list[tuple[Callable[[], bytes], Deferred[bytes]]] = []
        self.tail = self.open()

    def open(self, offset: int = 0) -> FileTail:
        def run_in_thread(call: Callable[[], bytes]) -> Deferred[bytes]:
            self.calls.append((call, Deferred()))
            return self.calls[-1][1]

        descriptor = os.open(self.path, os.O_RDONLY)
        opened = FileTail(self.clock, descriptor, offset, self.owner, run_in_thread)
        self.addCleanup(opened.close)
        return opened

    def print(self, content: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(content)

    def uncache(self) -> None:
        self.patch(tail, "_read_cached", lambda descriptor, offset: None)

    def test_what_is_printed_is_read(self) -> None:
        self.tail.on_change()
        for content in (b"a", b"bc\n"):
            self.print(content)
            self.tail.on_change()
        self.assertEqual(self.owner.received, b"abc\n")

    def test_tail_begins_at_its_offset(self) -> None:
        self.print(b"abc")
        self.open(2).on_change()
        self.assertEqual(self.owner.received, b"c")

    def test_one_turn_reads_64_kib(self) -> None:
        self.print(b"x" * 150_000)
        self.tail.on_change()
        self.tail.on_change()
        self.assertEqual(self.owner.reads, 1)
        self.assertEqual(len(self.owner.received), 65536)
        self.clock.pump([0] * 5)
        self.assertEqual(len(self.owner.received), 150_000)

    def test_paused_tail_reads_nothing(self) -> None:
        self.print(b"x" * 70_000)
        self.owner.on_data = self.tail.pauseProducing
        self.tail.on_change()
        self.clock.pump([0] * 3)
        self.tail.on_change()
        self.assertEqual(len(self.owner.received), 65536)
        self.tail.resumeProducing()
        self.clock.advance(0)
        self.assertEqual(len(self.owner.received), 70_000)

    def test_end_comes_after_all_bytes_and_pauses(self) -> None:
        self.print(b"x" * 150_000)
        self.owner.on_data = self.tail.pauseProducing
        self.tail.finish()
        for _ in range(3):
            self.assertEqual(self.owner.told, [])
            self.clock.pump([0] * 3)
            self.tail.resumeProducing()
        self.clock.pump([0] * 3)
        self.assertEqual(len(self.owner.received), 150_000)
        self.assertEqual(self.owner.told, ["end"])
        self.assertTrue(self.tail.is_closed)

    def test_shrunk_file_is_told_and_not_read_again(self) -> None:
        self.print(b"abc")
        self.tail.on_change()
        os.truncate(self.path, 1)
        self.tail.on_change()
        self.print(b"defg")
        self.tail.on_change()
        self.assertEqual(self.owner.told, ["shrunk"])
        self.assertEqual(self.owner.received, b"abc")

    def test_disk_is_read_in_a_thread(self) -> None:
        self.print(b"abc")
        self.uncache()
        self.tail.on_change()
        self.tail.on_change()
        ((call, result),) = self.calls
        self.assertEqual(self.owner.received, b"")
        result.callback(call())
        self.assertEqual(self.owner.received, b"abc")

    def test_file_stays_open_while_a_thread_reads_it(self) -> None:
        self.print(b"abc")
        self.uncache()
        self.tail.on_change()
        self.tail.close()
        ((call, result),) = self.calls
        result.callback(call())
        self.assertEqual(self.owner.received, b"")
        self.assertRaises(OSError, call)

    def test_error_of_the_disk_is_told(self) -> None:
        self.uncache()
        self.tail.on_change()
        self.calls[0][1].errback(OSError(errno.EIO, "I/O error"))
        self.assertEqual(self.owner.told, [errno.EIO])
        self.assertTrue(self.tail.is_closed)

    def test_error_of_a_read_from_memory_is_told(self) -> None:
        def fail(*arguments: object) -> int:
            raise OSError(errno.EIO, "I/O error")

        self.patch(os, "preadv", fail)
        self.tail.on_change()
        self.assertEqual(self.owner.told, [errno.EIO])

    def test_file_system_without_such_reads_is_read_at_once(self) -> None:
        def fail(*arguments: object) -> int:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        self.patch(os, "preadv", fail)
        self.print(b"abc")
        self.tail.on_change()
        self.assertEqual(self.owner.received, b"abc")

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
        self.assertEqual(len(self.owner.received), 70_000)

    def test_tail_that_pauses_while_a_thread_reads_takes_the_bytes_later(self) -> None:
        self.print(b"abc")
        self.uncache()
        self.tail.on_change()
        self.tail.pauseProducing()
        self.calls[0][1].callback(self.calls[0][0]())
        self.assertEqual(self.owner.received, b"")
        self.tail.resumeProducing()
        self.clock.advance(0)
        self.calls[1][1].callback(self.calls[1][0]())
        self.assertEqual(self.owner.received, b"abc")

    def test_closed_tail_takes_no_turn(self) -> None:
        self.print(b"x" * 70_000)
        self.tail.on_change()
        self.tail.close()
        self.clock.advance(0)
        self.assertEqual(self.owner.reads, 1)


class WatcherTests(TestCase):
    def watch(self, path: Path, watcher: FileWatcher) -> Deferred[None]:
        changed: Deferred[None] = Deferred()
        watcher.watch(path, lambda: None if changed.called else changed.callback(None))
        return changed

    def test_file_can_be_unwatched_after_the_close(self) -> None:
        path = Path(self.mktemp())
        path.touch()
        watcher = FileWatcher(reactor)
        self.watch(path, watcher)
        watcher.close()
        watcher.unwatch(path)

    async def test_growth_is_told_before_any_poll(self) -> None:
        clock = Clock()
        watcher = FileWatcher(reactor)
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
        watcher.unwatch(paths[1])
        paths[1].unlink()
        paths[0].write_bytes(b"a")
        await changes[0].addTimeout(60, reactor)

    def test_files_are_polled_without_inotify(self) -> None:
        def fail(*arguments: object) -> int:
            raise inotify.INotifyError

        for name in ("init", "add"):
            patched = self.patch(inotify.INotify._inotify, name, fail)
            clock = MemoryReactorClock()
            watcher = FileWatcher(clock)
            path = Path(self.mktemp())
            path.touch()
            changed = self.watch(path, watcher)
            clock.advance(POLL_SECONDS)
            self.assertTrue(changed.called)
            watcher.close()
            self.assertEqual((clock.getDelayedCalls(), clock.readers), ([], set()))
            patched.restore()
