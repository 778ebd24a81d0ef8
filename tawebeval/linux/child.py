"""Child processes with their pipes, driving a Twisted `ProcessProtocol`.

`start_child` starts a program by `Popen`, which uses vfork; `ChildProcess` takes over a child,
whichever program has started it; `Spawner` does both and knows which children still run.
`PipedProcess` is what `ChildProcess` has in common with `keeper_owned_process.KeeperOwnedProcess`.

`reactor.spawnProcess` is not used: it walks over every open descriptor in the reactor's thread,
forks if a directory is given, looks at every child whenever one ends, and reads 8 KiB at a time.
Here a pidfd reports the end of one child only, and `PipeReader` reads 64 KiB from a pipe that holds
256 KiB.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from resource import struct_rusage
from time import thread_time
from typing import Any, Protocol

import attrs
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.main import CONNECTION_DONE
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

_READ = 64 * 1024
_PIPE = 256 * 1024  # bytes: the size of a pipe that was found full
_SLOW = 0.005  # seconds of processor time, a hundred times as long as a read takes


class PipeListener(Protocol):
    """The receiver of a child's output; `name` is the child's descriptor, 1 or 2."""

    def on_pipe_data(self, name: int, chunk: bytes) -> None:
        """Take bytes that were read."""

    def on_pipe_end(self, name: int) -> None:
        """Take the end of the pipe, once."""


@implementer(IReadDescriptor)
class PipeReader:
    """The reader of one pipe of a child, which reads large pieces and can be paused.

    A pipe that is found full is made larger, for its writer waits. The pipes of a user other than
    root have one limit together (pipe(7)), so pipes that are never full stay small.

    `is_closed` tells whether the pipe's end was reached. `pipe_read_cpu_seconds` is the processor
    time of slow reads in seconds: each read wakes all epoll instances that watch the pipe.
    """

    __slots__ = (
        "_descriptor",
        "_holds",
        "_is_ending",
        "_is_turn_due",
        "_left",
        "_owner",
        "_paused",
        "_reactor",
        "descriptor_number",
        "is_closed",
        "pipe_read_cpu_seconds",
    )

    def __init__(self, reactor: Any, descriptor: int, name: int, owner: PipeListener) -> None:
        self.descriptor_number = name
        self.is_closed = False
        self.pipe_read_cpu_seconds = 0.0
        self._reactor = reactor
        self._descriptor = descriptor
        self._owner = owner
        self._paused = False
        self._left = 0  # bytes to read in turns of their own, whatever the reactor reports
        self._is_ending = False  # whether the pipe is closed after them
        self._is_turn_due = False
        self._holds = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
        reactor.addReader(self)

    def fileno(self) -> int:
        """Return the pipe's descriptor, -1 when closed."""
        return -1 if self.is_closed else self._descriptor

    def logPrefix(self) -> str:
        """Return the name for log lines."""
        return type(self).__name__

    def doRead(self) -> Any:
        """Read once; return the reason to close, if any."""
        began = thread_time()
        try:
            chunk = self.read_chunk(_READ)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return CONNECTION_DONE
        if not chunk:
            return CONNECTION_DONE
        if len(chunk) >= self._holds:
            self._enlarge()
        took = thread_time() - began
        if took > _SLOW:
            self.pipe_read_cpu_seconds += took
        self._owner.on_pipe_data(self.descriptor_number, chunk)
        return None

    def read_chunk(self, size: int) -> bytes:
        """Return at most `size` bytes, b"" at the end. Raises: OSError."""
        return os.read(self._descriptor, size)

    def count_readable_bytes(self) -> int:
        """Return the bytes that can be read now (ioctl_tty(2), FIONREAD)."""
        held = fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(4))
        return int.from_bytes(held, sys.byteorder)

    def _enlarge(self) -> None:
        """Enlarge the pipe; at the user's limit of pipe pages leave it for a later read."""
        with contextlib.suppress(OSError):
            self._holds = fcntl.fcntl(self._descriptor, fcntl.F_SETPIPE_SZ, _PIPE)

    def connectionLost(self, reason: Failure) -> None:
        """Close the pipe."""
        if self.is_closed:
            return
        self._reactor.removeReader(self)
        self.is_closed = True
        os.close(self._descriptor)
        self._owner.on_pipe_end(self.descriptor_number)

    def pauseProducing(self) -> None:
        """Stop reading, so that the child blocks once the pipe is full."""
        if not self._paused and not self.is_closed:
            self._paused = True
            self._reactor.removeReader(self)

    def resumeProducing(self) -> None:
        """Resume reading."""
        if self._paused and not self.is_closed:
            self._paused = False
            self._read_on()

    def read_one_chunk_per_turn(self, size: int) -> None:
        """Read the next `size` bytes at once, each chunk in a turn of its own."""
        self._reactor.removeReader(self)
        self._left = size
        self._read_on()

    def read_remaining_output(self) -> None:
        """Read the bytes that the pipe holds now, and close it: other writers may remain."""
        if not self.is_closed:
            self._is_ending = True
            self.read_one_chunk_per_turn(self.count_readable_bytes())

    def _read_on(self) -> None:
        if not self._left and not self._is_ending:
            self._reactor.addReader(self)
        elif not self._is_turn_due:
            self._is_turn_due = True
            self._reactor.callLater(0, self._take_turn)

    def _take_turn(self) -> None:
        self._is_turn_due = False
        if self.is_closed or (self._paused and self._left):
            return
        chunk = self.read_chunk(min(_READ, self._left)) if self._left else b""
        if chunk:
            self._left -= len(chunk)
            self._read_on()
            self._owner.on_pipe_data(self.descriptor_number, chunk)
        else:
            self.connectionLost(Failure(CONNECTION_DONE))


def open_pipe(reading: contextlib.ExitStack, writing: contextlib.ExitStack) -> tuple[int, int]:
    """Return a pipe whose read end does not block; the stacks close its ends."""
    ends = os.pipe2(os.O_CLOEXEC)
    reading.callback(os.close, ends[0])
    writing.callback(os.close, ends[1])
    os.set_blocking(ends[0], False)
    return ends


@attrs.frozen
class StartedProcess:
    """A running child, leader of its own session and process group, that nobody waits for yet.

    `pidfd` becomes readable at the child's end; `stdout` and `stderr` are the non-blocking read
    ends of its pipes. The code that takes the child over closes all three.
    """

    pid: int
    pidfd: int
    stdout: int
    stderr: int


def start_child(
    argv: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    descriptors: Sequence[int] = (),
) -> StartedProcess:
    """Start `argv` in `directory` with just that environment and an empty stdin. Blocks, hardly.

    The child gets `descriptors` under the same numbers; they stay open here, too. Raises: OSError.
    """
    with contextlib.ExitStack() as writing, contextlib.ExitStack() as reading:
        stdout, stderr = (open_pipe(reading, writing) for _ in range(2))
        process = subprocess.Popen(
            argv,
            env=dict(environment),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=stdout[1],
            stderr=stderr[1],
            start_new_session=True,
            pass_fds=descriptors,
            umask=0o022,
        )
        process.returncode = 0  # so that Popen does not wait for the child
        started = open_child_pidfd(process.pid, stdout[0], stderr[0])
        reading.pop_all()
        return started


def open_child_pidfd(pid: int, stdout: int, stderr: int) -> StartedProcess:
    """Open a pidfd for a child of this process or of the keeper; without one, kill the child.

    Raises: OSError.
    """
    try:
        return StartedProcess(pid, os.pidfd_open(pid), stdout, stderr)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        raise


def has_process_ended(pidfd: int) -> bool:
    """Tell whether a process has ended, reaped or not."""
    poll = select.poll()  # not select(2), which takes no descriptor above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def kill_started_child(started: StartedProcess) -> None:
    """Kill a child that nothing takes over, with its process group; close its descriptors."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    for descriptor in (started.pidfd, started.stdout, started.stderr):
        os.close(descriptor)


def wait_for_exit(started: StartedProcess, timeout: float) -> tuple[int, bytes]:
    """Return the exit status of a child, negative for a signal, and its output. Blocks.

    The output has to fit into the pipes. The child is killed after `timeout` seconds. Raises:
    TimeoutError.
    """
    printed = bytearray()
    with contextlib.ExitStack() as stack:
        pipes = (started.stdout, started.stderr)
        for descriptor in (started.pidfd, *pipes):
            stack.callback(os.close, descriptor)
        poll = select.poll()
        poll.register(started.pidfd, select.POLLIN)
        if not poll.poll(timeout * 1000):
            os.kill(started.pid, signal.SIGKILL)
            os.waitpid(started.pid, 0)
            raise TimeoutError(errno.ETIMEDOUT, f"it did not end within {timeout:g} seconds")
        for pipe in pipes:
            with contextlib.suppress(BlockingIOError):
                while chunk := os.read(pipe, _READ):
                    printed += chunk
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1])
    except ChildProcessError:  # it is another one's child, or was reaped already
        status = 0
    return status, bytes(printed)


STDOUT, STDERR = 1, 2


@implementer(IReadDescriptor)
class _PidReader:
    """The pidfd of a child, readable at the child's end."""

    __slots__ = ("_descriptor", "_process", "_reactor")

    def __init__(self, reactor: Any, descriptor: int, process: PipedProcess) -> None:
        self._reactor = reactor
        self._descriptor = descriptor
        self._process = process
        reactor.addReader(self)

    def fileno(self) -> int:
        return self._descriptor

    def logPrefix(self) -> str:
        return type(self).__name__

    def doRead(self) -> None:
        self._reactor.removeReader(self)
        descriptor, self._descriptor = self._descriptor, -1
        self._process.on_exit(descriptor)

    def connectionLost(self, reason: Failure) -> None:
        """Do nothing: the reactor stops."""

    @property
    def has_exited(self) -> bool:
        """Whether the process has ended."""
        return self._descriptor < 0 or has_process_ended(self._descriptor)


class StdoutProducer(Protocol):
    """The stdout of a process, which can be paused (`IPushProducer`)."""

    def pauseProducing(self) -> None:
        """Stop reading stdout."""

    def resumeProducing(self) -> None:
        """Read stdout again."""


class ProcessTransport(StdoutProducer, Protocol):
    """A process whose output and exit drive a `ProcessProtocol`: what a run of an evaluator needs.

    Implemented by `ChildProcess`, for children of the daemon, and by
    `keeper_owned_process.KeeperOwnedProcess`, for children of the keeper. The duties:

    - call `makeConnection(self)` of the protocol first;
    - call `childDataReceived(1 or 2, data)` with all bytes of stdout and stderr, in order and
      once, and `childConnectionLost(1 or 2)` at their ends; between `pauseProducing` and
      `resumeProducing` read no stdout, so that the process blocks once its pipe is full;
    - call `processExited(reason)` once at the process's own end: `ProcessDone`, or
      `ProcessTerminated` with the exit code or the signal; `is_running` is False from then on;
    - call `processEnded(reason)` once after that and after both ends of output.

    `on_broker_error(reason)` is called if no program of the submission can run. `resource_usage` is
    the resource usage, None until the end. `pipe_read_cpu_seconds` is the
    processor time of slow reads, in seconds.
    """

    pid: int
    start_time: int
    resource_usage: struct_rusage | None
    on_broker_error: Callable[[str], object]

    @property
    def is_running(self) -> bool:
        """Whether the process itself runs, whatever its own children do."""

    @property
    def has_exited(self) -> bool:
        """Whether the process has ended; `processExited` may not be called yet."""

    @property
    def pipe_read_cpu_seconds(self) -> float:
        """The processor time of slow reads of stdout and stderr, in seconds."""

    @property
    def lost_reason(self) -> str | None:
        """Why the exit or a part of the output is unknown; None if both are known."""

    def signal_group(self, number: int) -> None:
        """Send a signal to the process group, also after the process's own end."""

    def read_remaining_output(self) -> None:
        """Read the bytes that the pipes hold now, and close them: other processes may hold them."""


class ResumableProcess(ProcessTransport, Protocol):
    """A `ProcessTransport` that stores stdout, for a later process of the daemon."""

    @property
    def delivered_bytes(self) -> int:
        """The offset in stdout up to which `childDataReceived` was called, now or before."""

    def release_output_memory(self, before: int) -> None:
        """Release the memory of stdout before an offset, at most up to `delivered_bytes`."""


class PipedProcess(ABC):
    """A process with two pipes and a pidfd: the transport of its `ProcessProtocol`.

    Of `IProcessTransport` it has `pid` and the methods of a producer; there is no stdin to write
    to. A subclass opens `_stdout` and `_stderr` before it calls `__init__`, and reports the exit by
    `set_exit`. Thousands may run, so each is small.
    """

    __slots__ = (
        "_ended",
        "_pid_reader",
        "_protocol",
        "_reason",
        "_stderr",
        "_stdout",
        "pid",
        "resource_usage",
    )

    _stdout: PipeReader
    _stderr: PipeReader

    def __init__(self, reactor: Any, protocol: ProcessProtocol, pid: int, pidfd: int) -> None:
        self.resource_usage: struct_rusage | None = None
        self.pid = pid
        self._protocol = protocol
        self._reason: Failure | None = None  # of its end
        self._ended = False
        self._pid_reader = _PidReader(reactor, pidfd, self)
        protocol.makeConnection(self)

    @property
    def is_running(self) -> bool:
        """Whether the process itself runs, whatever its own children do."""
        return self._reason is None

    @property
    def has_exited(self) -> bool:
        """Whether the process has ended; `processExited` may not be called yet."""
        return self._pid_reader.has_exited

    @property
    def pipe_read_cpu_seconds(self) -> float:
        """The processor time of slow reads of stdout and stderr, in seconds."""
        return self._stdout.pipe_read_cpu_seconds + self._stderr.pipe_read_cpu_seconds

    @property
    def lost_reason(self) -> str | None:
        """None: the exit and the output are known."""
        return None

    def on_pipe_data(self, name: int, chunk: bytes) -> None:
        """Pass on output of the process."""
        self._protocol.childDataReceived(name, chunk)

    def on_pipe_end(self, name: int) -> None:
        """Take the end of stdout or stderr."""
        self._protocol.childConnectionLost(name)
        self._check_end()

    @abstractmethod
    def on_exit(self, pidfd: int) -> None:
        """Take the exit of the process, and its pidfd, which this object closes from now on."""

    def set_exit(self, status: int, usage: struct_rusage | None) -> None:
        """Tell the protocol the exit: the status as of wait4(2), and the resource usage."""
        self.resource_usage = usage
        code = os.waitstatus_to_exitcode(status)
        self._reason = Failure(
            ProcessDone(status)
            if code == 0
            else ProcessTerminated(max(code, 0) or None, -code if code < 0 else None, status)
        )
        self._protocol.processExited(self._reason)
        self._check_end()

    def _check_end(self) -> None:
        if (
            self._reason is not None
            and self._stdout.is_closed
            and self._stderr.is_closed
            and not self._ended
        ):
            self._ended = True
            self.on_end()
            self._protocol.processEnded(self._reason)

    @abstractmethod
    def on_end(self) -> None:
        """Close what is open after the exit and the ends of both pipes."""

    @abstractmethod
    def signal_group(self, number: int) -> None:
        """Send a signal to the process group, also after the process's own end."""

    def read_remaining_output(self) -> None:
        """Read what the pipes hold now, and close them: other processes may keep them open."""
        self._stdout.read_remaining_output()
        self._stderr.read_remaining_output()

    def pauseProducing(self) -> None:
        """Stop reading stdout."""
        self._stdout.pauseProducing()

    def resumeProducing(self) -> None:
        """Read stdout again."""
        self._stdout.resumeProducing()


class ChildProcess(PipedProcess):
    """A running child of this process: a `ProcessTransport`.

    `resource_usage` is the resource usage of the child and of the children that it waited for.
    """

    __slots__ = ("_reaped",)

    def __init__(
        self,
        reactor: Any,
        protocol: ProcessProtocol,
        started: StartedProcess,
        reaped: Callable[[int], object] = lambda pid: None,
    ) -> None:
        """Take over a child. `reaped(pid)` is called when the kernel may use `pid` again."""
        self._reaped = reaped
        self._stdout = PipeReader(reactor, started.stdout, STDOUT, self)
        self._stderr = PipeReader(reactor, started.stderr, STDERR, self)
        super().__init__(reactor, protocol, started.pid, started.pidfd)

    def on_exit(self, pidfd: int) -> None:
        """Reap the child, and tell the protocol its exit status."""
        os.close(pidfd)
        _, status, usage = os.wait4(self.pid, 0)
        self._reaped(self.pid)
        self.set_exit(status, usage)

    def on_end(self) -> None:
        """Do nothing: all is closed."""

    def signal_group(self, number: int) -> None:
        """Send a signal to the child's process group, also after the child's own end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class ProcessAdopter(Protocol):
    """What lets a started process drive a protocol."""

    def adopt_child(self, protocol: ProcessProtocol, started: StartedProcess) -> ProcessTransport:
        """Let a child that another program has started drive a protocol from now on."""


class Spawner:
    """The children of the daemon: it starts them, and knows which still run."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._children: set[int] = set()
        self._expected: set[object] = set()
        self._reaped = self._children.discard

    def __call__(
        self,
        protocol: ProcessProtocol,
        argv: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        *,
        descriptors: Sequence[int] = (),
    ) -> ChildProcess:
        """Start a child, as `start_child` does. Blocks, hardly. Raises: OSError."""
        started = start_child(argv, environment, directory, descriptors)
        self._children.add(started.pid)
        return self.adopt_child(protocol, started)

    def adopt_child(self, protocol: ProcessProtocol, started: StartedProcess) -> ChildProcess:
        """Let a child that another program has started drive a protocol from now on."""
        return ChildProcess(self._reactor, protocol, started, self._reaped)

    @contextlib.contextmanager
    def expect_new_child(self) -> Iterator[Callable[[int], object]]:
        """Expect a child that a thread starts in the body; yield a function that takes its number.

        Until the body ends no unknown child is taken for an orphan and reaped. A child of the
        keeper is ignored: its number would stay known after its end.
        """

        def tell(pid: int) -> None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                self._children.add(pid)

        start = object()
        self._expected.add(start)
        try:
            yield tell
        finally:
            self._expected.discard(start)

    def forget_child(self, pid: int) -> None:
        """Forget a child that was reaped elsewhere and never adopted."""
        self._children.discard(pid)

    @property
    def has_no_expected_child(self) -> bool:
        """Whether every child is known: none is expected."""
        return not self._expected

    @property
    def child_count(self) -> int:
        """The number of children that were not reaped yet."""
        return len(self._children)

    def is_child(self, pid: int) -> bool:
        """Tell whether `pid` is a known child that was not reaped yet."""
        return pid in self._children
