"""Readers of files that other processes write, such as the stdout of an evaluator.

`InotifyFileWatcher` says when a watched file has grown: at once by inotify(7), and by a slow poll
where inotify does not: its queue has overflowed, the user's watches are used up, or another machine
has written. `FileTail` reads one file, 64 KiB in a turn of the reactor. It reads what the page
cache holds (preadv2(2), RWF_NOWAIT), and leaves to a thread what the disk has to bring.

`TailedProcess` drives a Twisted `ProcessProtocol` from the files into which the starter stores the
stdout, stderr and exit of a process (`linux.starter`). It makes no difference whether the process
has just begun, goes on after a restart of the daemon, or has ended long ago: bytes come in order
and once, from given offsets on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from resource import struct_rusage
from typing import Any, Protocol

import attrs
import msgspec
from twisted.internet import inotify
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.python.filepath import FilePath

from tawebeval.deferreds import run_in_background
from tawebeval.linux.child import STDERR, STDOUT, make_exit_reason
from tawebeval.linux.starter import MAX_SLOW_READ_CPU_SECONDS
from tawebeval.linux.starter_client import (
    STARTER_ENDED_MESSAGE,
    ProgramState,
    ProgramStateListener,
    StartedProgram,
    read_exit_file,
)

POLL_SECONDS = 0.5
"""Seconds after which a file is looked at that inotify has said nothing of."""

_READ = 64 * 1024
_buffer = bytearray(_READ)  # of all reads of the reactor's thread

log = Logger()


class InotifyFileWatcher:
    """Watcher of the files that grow; `watch` before the first read, `unwatch` before a removal."""

    def __init__(self, reactor: Any) -> None:
        self._callbacks: dict[bytes, Callable[[], object]] = {}
        self._on_modified = [self._call_one]  # of each watch: there are thousands
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

    def watch(self, path: str, on_change: Callable[[], object], *, is_urgent: bool = True) -> None:
        """Call `on_change()` now and then, and if the file `is_urgent`, when it has grown."""
        file = FilePath(os.fsencode(path))
        self._callbacks[file.path] = on_change
        if not self._poll.running:
            self._poll.start(POLL_SECONDS, now=False)
        if self._inotify is not None and is_urgent:
            # The user may have no watch left: then there is the poll.
            with contextlib.suppress(inotify.INotifyError):
                self._inotify.watch(file, inotify.IN_MODIFY, callbacks=self._on_modified)

    def unwatch(self, path: str) -> None:
        """Stop watching a file. Twisted closes all of inotify if a watched file is removed."""
        self._unwatch(FilePath(os.fsencode(path)))

    def _unwatch(self, file: FilePath[bytes]) -> None:
        if self._callbacks.pop(file.path, None) is None:
            return  # the watcher was closed, and then the last output read
        if not self._callbacks:
            self._poll.stop()
        if self._inotify is not None:
            with contextlib.suppress(KeyError):
                self._inotify.ignore(file)

    def close(self) -> None:
        """Stop watching."""
        for path in list(self._callbacks):
            self._unwatch(FilePath(path))
        if self._inotify is not None:
            self._inotify.loseConnection()
            self._inotify = None

    def _call_one(self, _: inotify.INotify, file: FilePath[bytes], mask: int) -> None:
        if on_change := self._callbacks.get(file.path):
            on_change()

    def _call_all(self) -> None:
        for on_change in list(self._callbacks.values()):
            on_change()


RunInThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Function that makes a call that may wait for the disk."""


class ProgramController(Protocol):
    """The parent of a process: the methods of `StarterClient` that `TailedProcess` calls."""

    def watch_program(self, directory: Path, listener: ProgramStateListener) -> None:
        """Tell `listener` the state of a program soon, and whenever it changes."""

    def unwatch_program(self, directory: Path) -> None:
        """Tell nothing of a program any more."""

    def signal_program(self, directory: Path, number: int) -> None:
        """Send a signal to the process group of a program, also after its own end."""

    def close_output(self, directory: Path) -> None:
        """Store what the pipes of a program hold now, and close them."""


class FileWatcher(Protocol):
    """What tells that files have grown."""

    def watch(self, path: str, on_change: Callable[[], object], *, is_urgent: bool = True) -> None:
        """Call `on_change()` when the file has grown; at once if it `is_urgent`."""

    def unwatch(self, path: str) -> None:
        """Stop watching a file."""


@attrs.frozen
class TailContext:
    """What `TailedProcess` needs of the daemon: the starter, and how to read files.

    `reads_in_thread`: another machine has the files, so that each read may wait.
    """

    reactor: Any
    starter: ProgramController
    watcher: FileWatcher
    run_in_thread: RunInThread
    reads_in_thread: bool = False


class FileTail:
    """Reader of the file `path` from `offset` on, as far as it goes and as it grows.

    `number` is 1 for stdout, 2 for stderr, whose growth may be told late. The tail calls
    `on_data(number, bytes)`, and at the end `on_end(number, problem)`: None after `finish`, or why
    nothing more can be read. `is_closed` says that nothing more is read.
    """

    def __init__(
        self,
        context: TailContext,
        path: str,
        offset: int,
        number: int,
        on_data: Callable[[int, bytes], object],
        on_end: Callable[[int, str | None], object],
    ) -> None:
        """Open and watch the file. Raises: OSError."""
        self.offset = offset
        self._context = context
        self._path = path
        self._number = number
        self._on_data = on_data
        self._on_end = on_end
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.is_closed = False
        self._is_paused = False
        self._is_turn_due = False
        self._is_thread_reading = False
        self._is_finishing = False
        context.watcher.watch(path, self.on_change, is_urgent=number == STDOUT)

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

    def reopen(self) -> None:
        """Go on with another file, which has taken the place of this one. Raises: OSError."""
        if not self.is_closed:
            with open(self._path, "rb", buffering=0) as file:
                os.dup2(file.fileno(), self._descriptor, inheritable=False)
            self._read_later()

    def close(self) -> None:
        """Read nothing more, and close the file."""
        if not self.is_closed:
            self.is_closed = True
            self._context.watcher.unwatch(self._path)
            if not self._is_thread_reading:
                os.close(self._descriptor)

    def _read_later(self) -> None:
        if not (self._is_turn_due or self._is_thread_reading):
            self._is_turn_due = True
            self._context.reactor.callLater(0, self._take_turn)

    def _take_turn(self) -> None:
        self._is_turn_due = False
        self.on_change()

    def _read(self) -> None:
        try:
            in_thread = self._context.reads_in_thread
            chunk = None if in_thread else _read_cached(self._descriptor, self.offset)
        except OSError as error:
            self._end(f"cannot be read: {error.strerror}")
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
            chunk = await self._context.run_in_thread(read)
        except OSError as error:
            failure = error
        self._is_thread_reading = False
        if self.is_closed:
            os.close(self._descriptor)
        elif failure is not None:
            self._end(f"cannot be read: {failure.strerror}")
        elif not self._is_paused:  # else the page cache has the bytes until the tail resumes
            self._take(chunk)

    def _end(self, problem: str | None = None) -> None:
        self.close()
        self._on_end(
            self._number, problem and f"the file of {os.path.basename(self._path)} {problem}"
        )

    def _take(self, chunk: bytes) -> None:
        self.offset += len(chunk)
        # A read from the page cache also ends before a page that the disk has to bring.
        remaining = os.fstat(self._descriptor).st_size - self.offset
        if remaining > 0 or (chunk and self._is_finishing):
            self._read_later()
        if chunk:
            self._on_data(self._number, chunk)
        elif remaining < 0:
            self._end("has shrunk")
        elif remaining == 0 and self._is_finishing:
            self._end()


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


def _ignore(*_: object) -> None:
    """Do nothing."""


class TailedProcess:
    """A process of the starter, whose output and exit drive a `ProcessProtocol`.

    - `makeConnection(self)` of the protocol comes first;
    - `childDataReceived(1 or 2, data)` delivers all bytes of stderr, and of stdout from
      `stdout_offset` on, in order and once, `childConnectionLost(1 or 2)` their ends; between
      `pauseProducing` and `resumeProducing` no stdout is delivered;
    - `processExited(reason)` comes once at the process's own end: `ProcessDone`, or
      `ProcessTerminated` with the exit code or the signal; `is_running` is False from then on, and
      `resource_usage` known;
    - `processEnded(reason)` comes once after that and after both ends of output.

    If the disk takes no more output, or the starter has ended, `lost_reason` tells so, and the
    process is killed. `on_slow_reads()` is called if its output is not read any more, for the time
    that takes. `broker_pid` is the running broker, None without one; `on_broker_error(reason)` is
    called if none can run.
    """

    def __init__(
        self,
        context: TailContext,
        protocol: ProcessProtocol,
        program: StartedProgram,
        stdout_offset: int = 0,
    ) -> None:
        """Take over a process. Raises: OSError, if its files cannot be opened."""
        self.context = context
        self.directory = program.directory
        self.pid = program.pid
        self.resource_usage: struct_rusage | None = None
        self.lost_reason: str | None = None
        self.broker_pid: int | None = None
        self.on_slow_reads: Callable[[], object] = _ignore
        self.on_broker_error: Callable[[str], object] = _ignore
        self.start_time_ticks = program.start_time_ticks
        self._protocol = protocol
        self._state = ProgramState()
        self._reason: Failure | None = None  # of its end
        self._is_finishing = False
        self._has_ended = False
        self._tails = [self._open_tail(STDOUT, "stdout", stdout_offset)]
        try:
            self._tails.append(self._open_tail(STDERR, "stderr", 0))
        except OSError:
            self._tails[0].close()
            raise
        for tail in self._tails:
            tail.resumeProducing()  # what there is already
        protocol.makeConnection(self)
        context.starter.watch_program(self.directory, self.on_program_state)

    @property
    def is_running(self) -> bool:
        """Whether the process itself runs, whatever its own children do."""
        return self._reason is None and not self._has_ended

    @property
    def has_exited(self) -> bool:
        """Whether the process has ended; `processExited` may not be called yet."""
        return self._reason is not None or os.path.exists(self.directory / "exit")

    def signal_group(self, number: int) -> None:
        """Send a signal to the process group, also after the process's own end."""
        if not self._has_ended:
            self.context.starter.signal_program(self.directory, number)

    def pauseProducing(self) -> None:
        """Deliver no stdout; the process goes on."""
        self._tails[0].pauseProducing()

    def resumeProducing(self) -> None:
        """Deliver stdout again."""
        self._tails[0].resumeProducing()

    def read_remaining_output(self) -> None:
        """Deliver what is printed already, and then the ends: other processes hold the pipes."""
        if not self._has_ended:
            self.context.starter.close_output(self.directory)

    def switch_to_process(self, pid: int, start_time_ticks: int) -> None:
        """Go on with another process, whose files have taken the place of those of this one.

        This one has printed nothing. Raises: OSError.
        """
        self.pid, self.start_time_ticks = pid, start_time_ticks
        for tail in self._tails:
            tail.reopen()

    def detach(self) -> None:
        """Deliver and signal nothing any more; the process goes on."""
        if not self._has_ended:
            self._has_ended = True
            self.context.starter.unwatch_program(self.directory)
            for tail in self._tails:
                tail.close()

    # What the starter tells

    def on_program_state(self, state: ProgramState | None) -> None:
        """Take what the starter knows of the process; None if it has ended."""
        if self._has_ended:
            return
        if state is None:  # the files have all that is known
            self._read_exit(STARTER_ENDED_MESSAGE)
            return
        if state.is_unknown or not self._is_own(state):
            self._read_exit("it is not known any more how the evaluator has ended")
            return
        self._state = state
        self.broker_pid = state.broker_pid
        if state.slow_read_cpu_seconds >= MAX_SLOW_READ_CPU_SECONDS:
            self.on_slow_reads()
        if state.broker_error is not None:
            self.on_broker_error(state.broker_error)
        if state.write_errno is not None and self.lost_reason is None:
            self._on_lost_output(_explain_write_error(state.write_errno))
        if state.wait_status is not None:
            self._set_exit(state.wait_status, state.rusage)
        self._check_completion()

    def _is_own(self, state: ProgramState) -> bool:
        """Tell whether a state is of this process, and not of another one with its number."""
        return (state.pid, state.start_time_ticks) == (self.pid, self.start_time_ticks)

    def _on_lost_output(self, reason: str) -> None:
        """Handle that a part of the output is missing: the process is worthless."""
        self.lost_reason = self.lost_reason or reason
        self.signal_group(signal.SIGKILL)

    def _read_exit(self, reason: str) -> None:
        """Read how the process has ended; `reason` is why nothing else is known."""
        self.context.starter.unwatch_program(self.directory)
        run_in_background(self._take_exit_file(reason), log, "defect: an exit is unknown")

    async def _take_exit_file(self, reason: str) -> None:
        state = await self.context.run_in_thread(lambda: read_exit_file(self.directory))
        if self._has_ended:
            return
        if state is None or not self._is_own(state):
            state = ProgramState()
        if state.wait_status is None or not state.is_output_complete:
            self.lost_reason = self.lost_reason or reason
        if state.write_errno is not None:
            self.lost_reason = _explain_write_error(state.write_errno)
        self._state = msgspec.structs.replace(state, is_output_complete=True)
        status = signal.SIGKILL if state.wait_status is None else state.wait_status
        self._set_exit(status, state.rusage)
        self._check_completion()

    def _set_exit(self, status: int, usage: tuple[int | float, ...] | None) -> None:
        if self._reason is not None:
            return
        self.resource_usage = None if usage is None else struct_rusage(usage)
        self._reason = make_exit_reason(status)
        self._protocol.processExited(self._reason)

    def _check_completion(self) -> None:
        """Once nothing more is written, read the files to their ends."""
        is_complete = self._reason is not None and self._state.is_output_complete
        if is_complete and not self._is_finishing:
            self._is_finishing = True
            for tail in self._tails:
                if not tail.is_closed:
                    tail.finish()
            self._check_end()  # both may have ended before: they had shrunk

    # What the files tell

    def _open_tail(self, number: int, name: str, offset: int) -> FileTail:
        return FileTail(
            self.context,
            os.path.join(self.directory, name),
            offset,
            number,
            self._protocol.childDataReceived,
            self._on_output_end,
        )

    def _on_output_end(self, number: int, problem: str | None) -> None:
        """Pass on the end of stdout or stderr; after both and the exit, that of all."""
        if problem is not None:
            self._on_lost_output(problem)
        self._protocol.childConnectionLost(number)
        self._check_end()

    def _check_end(self) -> None:
        are_read = all(tail.is_closed for tail in self._tails)
        if are_read and self._reason is not None and not self._has_ended:
            self._has_ended = True
            self.context.starter.unwatch_program(self.directory)
            self._protocol.processEnded(self._reason)


def _explain_write_error(number: int) -> str:
    return f"the daemon could not store the output: {os.strerror(number)}"
