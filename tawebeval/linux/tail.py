"""Reader of files that other processes write, such as the stdout of an evaluator.

`FileWatcher` says when a watched file has grown: at once by inotify(7), and by a slow poll where
inotify does not: its queue has overflowed, the user's watches are used up, or another machine has
written. `FileTail` reads one file, 64 KiB in a turn of the reactor. It reads what the page cache
holds (preadv2(2), RWF_NOWAIT), and leaves to a thread what the disk has to bring.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from twisted.internet import inotify
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.filepath import FilePath

POLL_SECONDS = 0.5
"""Seconds after which a file is looked at that inotify has said nothing of."""

_READ = 64 * 1024
_buffer = bytearray(_READ)  # of all reads of the reactor's thread

log = Logger()


class FileWatcher:
    """Watcher of the files that grow; `watch` before the first read, `unwatch` before a removal."""

    def __init__(self, reactor: Any) -> None:
        self._callbacks: dict[Path, Callable[[], object]] = {}
        self._poll = LoopingCall(self._call_all)
        self._poll.clock = reactor
        self._inotify: inotify.INotify | None = None
        try:
            self._inotify = inotify.INotify(reactor)
        except inotify.INotifyError as error:  # the user has no instance left
            log.warn(
                "inotify: {error}; output arrives up to {seconds} s later; raise"
                " fs.inotify.max_user_instances",
                error=error,
                seconds=POLL_SECONDS,
            )
        else:
            self._inotify.startReading()

    def watch(self, path: Path, on_change: Callable[[], object]) -> None:
        """Call `on_change()` when the file has grown, and now and then besides."""
        self._callbacks[path] = on_change
        if not self._poll.running:
            self._poll.start(POLL_SECONDS, now=False)
        if self._inotify is not None:
            # The user may have no watch left: then there is the poll.
            with contextlib.suppress(inotify.INotifyError):
                self._inotify.watch(
                    FilePath(os.fsencode(path)),
                    mask=inotify.IN_MODIFY,
                    callbacks=[lambda *_: on_change()],
                )

    def unwatch(self, path: Path) -> None:
        """Stop watching a file. Twisted closes all of inotify if a watched file is removed."""
        if self._callbacks.pop(path, None) is None:
            return  # the watcher was closed, and then the last output read
        if not self._callbacks:
            self._poll.stop()
        if self._inotify is not None:
            with contextlib.suppress(KeyError):
                self._inotify.ignore(FilePath(os.fsencode(path)))

    def close(self) -> None:
        """Stop watching."""
        for path in list(self._callbacks):
            self.unwatch(path)
        if self._inotify is not None:
            self._inotify.loseConnection()
            self._inotify = None

    def _call_all(self) -> None:
        for on_change in list(self._callbacks.values()):
            on_change()


class TailOwner(Protocol):
    """Owner of a `FileTail`."""

    def on_tail_data(self, chunk: bytes) -> None:
        """Take bytes that were read."""

    def on_tail_end(self) -> None:
        """Take the end, which comes after `FileTail.finish`."""

    def on_tail_shrunk(self) -> None:
        """Handle that bytes which were read are gone from the file; nothing more is read."""

    def on_tail_error(self, error: OSError) -> None:
        """Handle that the disk cannot bring the file; nothing more is read."""


class FileTail:
    """Reader of a file from `offset` on, as far as it goes and as it grows.

    `run_in_thread(call)` makes a call that may wait for the disk; with `reads_in_thread` each read
    does. A tail closes its `descriptor`. `is_closed` says that nothing more is read.
    """

    def __init__(
        self,
        clock: Any,
        descriptor: int,
        offset: int,
        owner: TailOwner,
        run_in_thread: Callable[[Callable[[], bytes]], Awaitable[bytes]],
        *,
        reads_in_thread: bool = False,
    ) -> None:
        self.offset = offset
        self._clock = clock
        self._descriptor = descriptor
        self._owner = owner
        self._run_in_thread = run_in_thread
        self._reads_in_thread = reads_in_thread
        self.is_closed = False
        self._is_paused = False
        self._is_turn_due = False
        self._is_thread_reading = False
        self._is_finishing = False

    def on_change(self) -> None:
        """Read on, unless the tail is paused or reads already."""
        if not (self._is_turn_due or self._is_thread_reading or self._is_paused or self.is_closed):
            self._read()

    def pauseProducing(self) -> None:
        """Stop reading; the file goes on to grow."""
        self._is_paused = True

    def resumeProducing(self) -> None:
        """Resume reading, in another turn of the reactor."""
        self._is_paused = False
        self._read_later()

    def finish(self) -> None:
        """Read what the file has, and report the end: its writers have ended."""
        self._is_finishing = True
        self._read_later()

    def close(self) -> None:
        """Read nothing more, and close the file."""
        if not self.is_closed:
            self.is_closed = True
            if not self._is_thread_reading:
                os.close(self._descriptor)

    def _read_later(self) -> None:
        if not (self._is_turn_due or self._is_thread_reading):
            self._is_turn_due = True
            self._clock.callLater(0, self._take_turn)

    def _take_turn(self) -> None:
        self._is_turn_due = False
        self.on_change()

    def _read(self) -> None:
        try:
            chunk = None if self._reads_in_thread else _read_cached(self._descriptor, self.offset)
        except OSError as error:
            self._fail(error)
            return
        if chunk is None:
            self._is_thread_reading = True
            Deferred.fromCoroutine(self._read_in_thread())
        else:
            self._take(chunk)

    async def _read_in_thread(self) -> None:
        read = partial(os.pread, self._descriptor, _READ, self.offset)
        chunk, failure = b"", None
        try:
            chunk = await self._run_in_thread(read)
        except OSError as error:
            failure = error
        self._is_thread_reading = False
        if self.is_closed:
            os.close(self._descriptor)
        elif failure is not None:
            self._fail(failure)
        elif not self._is_paused:  # else the page cache has the bytes until the tail resumes
            self._take(chunk)

    def _fail(self, error: OSError) -> None:
        self.close()
        self._owner.on_tail_error(error)

    def _take(self, chunk: bytes) -> None:
        self.offset += len(chunk)
        # A read from the page cache also ends before a page that the disk has to bring.
        remaining = os.fstat(self._descriptor).st_size - self.offset
        if remaining > 0 or (chunk and self._is_finishing):
            self._read_later()
        if chunk:
            self._owner.on_tail_data(chunk)
        elif remaining < 0:
            self.close()
            self._owner.on_tail_shrunk()
        elif remaining == 0 and self._is_finishing:
            self.close()
            self._owner.on_tail_end()


def _read_cached(descriptor: int, offset: int) -> bytes | None:
    """Return bytes that need no disk, b"" at the end of the file, None if the disk has them."""
    try:
        size = os.preadv(descriptor, [_buffer], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:  # of tmpfs, which is memory
            raise
        return os.pread(descriptor, _READ, offset)
    return bytes(memoryview(_buffer)[:size])
