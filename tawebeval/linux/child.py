"""Child processes with their pipes, driving a Twisted `ProcessProtocol`.

`Spawner` starts the daemon's own children, such as git's commands, by `Popen`, which uses vfork,
and knows which still run. `ProcessTransport` is what a run needs of an evaluator's process.

`reactor.spawnProcess` is not used: it walks over every open descriptor in the reactor's thread,
forks if a directory is given, looks at every child whenever one ends, and reads 8 KiB at a time.
Here a pidfd reports the end of one child only, and `PipeReader` reads 64 KiB from a pipe that holds
256 KiB.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from resource import struct_rusage
from typing import Any, Protocol

import attrs
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.main import CONNECTION_DONE
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

STDOUT, STDERR = 1, 2
_READ = 64 * 1024
_PIPE = 256 * 1024  # bytes: the size of a pipe that was found full


class PipeListener(Protocol):
    """The receiver of a child's output; `name` is the child's descriptor, 1 or 2."""

    def on_pipe_data(self, name: int, chunk: bytes) -> None:
        """Take bytes that were read."""

    def on_pipe_end(self, name: int) -> None:
        """Take the end of the pipe, once."""


@implementer(IReadDescriptor)
class PipeReader:
    """The reader of one pipe of a child, which reads large pieces.

    A pipe that is found full is made larger, for its writer waits. The pipes of a user other than
    root have one limit together (pipe(7)), so pipes that are never full stay small.
    """

    __slots__ = ("_descriptor", "_holds", "_name", "_owner", "_reactor", "is_closed")

    def __init__(self, reactor: Any, descriptor: int, name: int, owner: PipeListener) -> None:
        self.is_closed = False
        self._reactor = reactor
        self._descriptor = descriptor
        self._name = name
        self._owner = owner
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
        try:
            chunk = os.read(self._descriptor, _READ)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return CONNECTION_DONE
        if not chunk:
            return CONNECTION_DONE
        if len(chunk) >= self._holds:
            self._enlarge()
        self._owner.on_pipe_data(self._name, chunk)
        return None

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
        self._owner.on_pipe_end(self._name)

    def read_remaining_output(self) -> None:
        """Read what the pipe holds now, and close it, in the next turn: other writers may remain.

        Closed at once, its number may become that of another descriptor, for which the reactor
        would take what epoll(7) has reported of this one in the same turn.
        """
        if not self.is_closed:
            self._reactor.removeReader(self)
            held = fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(4))
            self._reactor.callLater(0, self._read_rest, int.from_bytes(held, sys.byteorder))

    def _read_rest(self, size: int) -> None:
        if self.is_closed:
            return
        if size:
            self._owner.on_pipe_data(self._name, os.read(self._descriptor, size))
        self.connectionLost(Failure(CONNECTION_DONE))


def open_pipe(reading: contextlib.ExitStack, writing: contextlib.ExitStack) -> tuple[int, int]:
    """Return a pipe whose read end does not block; the stacks close its ends."""
    ends = os.pipe2(os.O_CLOEXEC)
    reading.callback(os.close, ends[0])
    writing.callback(os.close, ends[1])
    os.set_blocking(ends[0], False)
    return ends


@attrs.frozen
class _StartedProcess:
    """A running child, leader of its own session and process group, that nobody waits for yet.

    `pidfd` becomes readable at the child's end; `stdout` and `stderr` are the non-blocking read
    ends of its pipes. The `ChildProcess` that takes the child over closes all three.
    """

    pid: int
    pidfd: int
    stdout: int
    stderr: int


def _start_child(
    argv: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    descriptors: Sequence[int],
) -> _StartedProcess:
    """Start a child, as `Spawner` says. Raises: OSError."""
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
        started = _StartedProcess(process.pid, _open_pidfd(process.pid), stdout[0], stderr[0])
        reading.pop_all()
        return started


def _open_pidfd(pid: int) -> int:
    """Open a pidfd for a child; without one, kill the child. Raises: OSError."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def has_process_ended(pidfd: int) -> bool:
    """Tell whether a process has ended, reaped or not."""
    poll = select.poll()  # not select(2), which takes no descriptor above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def make_exit_reason(status: int) -> Failure:
    """Return the reason for `ProcessProtocol.processExited`, by a status of wait(2)."""
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return Failure(ProcessDone(status))
    return Failure(ProcessTerminated(max(code, 0) or None, -code if code < 0 else None, status))


class ProcessTransport(Protocol):
    """A process whose output and exit drive a `ProcessProtocol`: what a run of an evaluator needs.

    Implemented by `tailed_process.TailedProcess`. The duties:

    - call `makeConnection(self)` of the protocol first;
    - call `childDataReceived(1 or 2, data)` with all bytes of stdout and stderr, in order and
      once, and `childConnectionLost(1 or 2)` at their ends; between `pauseProducing` and
      `resumeProducing` deliver no stdout;
    - call `processExited(reason)` once at the process's own end: `ProcessDone`, or
      `ProcessTerminated` with the exit code or the signal; `is_running` is False from then on;
    - call `processEnded(reason)` once after that and after both ends of output;
    - after `leave` call and signal nothing: another process of the daemon goes on.

    `on_broker_error(reason)` is called if no program of the submission can run.
    """

    pid: int
    start_time: int
    on_broker_error: Callable[[str], object]

    @property
    def resource_usage(self) -> struct_rusage | None:
        """The resource usage, None until the end."""

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

    def pauseProducing(self) -> None:
        """Deliver no stdout."""

    def resumeProducing(self) -> None:
        """Deliver stdout again."""

    def signal_group(self, number: int) -> None:
        """Send a signal to the process group, also after the process's own end."""

    def read_remaining_output(self) -> None:
        """Read the bytes that the pipes hold now, and close them: other processes may hold them."""

    def leave(self) -> None:
        """Deliver and signal nothing any more; `is_running` is False from now on."""


@implementer(IReadDescriptor)
class _PidReader:
    """The pidfd of a child, readable at the child's end."""

    __slots__ = ("_descriptor", "_on_exit", "_reactor")

    def __init__(self, reactor: Any, descriptor: int, on_exit: Callable[[], object]) -> None:
        self._reactor = reactor
        self._descriptor = descriptor
        self._on_exit = on_exit
        reactor.addReader(self)

    def fileno(self) -> int:
        return self._descriptor

    def logPrefix(self) -> str:
        return type(self).__name__

    def doRead(self) -> None:
        self._reactor.removeReader(self)
        os.close(self._descriptor)
        self._descriptor = -1
        self._on_exit()

    def connectionLost(self, reason: Failure) -> None:
        """Do nothing: the reactor stops."""


class ChildProcess:
    """A running child of this process, the transport of its `ProcessProtocol`.

    It calls the protocol as a `ProcessTransport` does, but cannot be paused; there is no stdin to
    write to. `resource_usage` is that of the child and of the children that it waited for, None
    until its end. The child leads a session and a process group.
    """

    __slots__ = (
        "_has_ended",
        "_on_reaped",
        "_protocol",
        "_reason",
        "_stderr",
        "_stdout",
        "pid",
        "resource_usage",
    )

    def __init__(
        self,
        reactor: Any,
        protocol: ProcessProtocol,
        started: _StartedProcess,
        on_reaped: Callable[[int], object] = lambda pid: None,
    ) -> None:
        """Take over a child. `on_reaped(pid)` is called when the kernel may use `pid` again."""
        self.resource_usage: struct_rusage | None = None
        self.pid = started.pid
        self._on_reaped = on_reaped
        self._protocol = protocol
        self._reason: Failure | None = None  # of its end
        self._has_ended = False
        self._stdout = PipeReader(reactor, started.stdout, STDOUT, self)
        self._stderr = PipeReader(reactor, started.stderr, STDERR, self)
        _PidReader(reactor, started.pidfd, self._reap)
        protocol.makeConnection(self)

    @property
    def is_running(self) -> bool:
        """Whether the process itself runs, whatever its own children do."""
        return self._reason is None

    def on_pipe_data(self, name: int, chunk: bytes) -> None:
        """Pass on output of the process."""
        self._protocol.childDataReceived(name, chunk)

    def on_pipe_end(self, name: int) -> None:
        """Take the end of stdout or stderr."""
        self._protocol.childConnectionLost(name)
        self._check_end()

    def _reap(self) -> None:
        _, status, self.resource_usage = os.wait4(self.pid, 0)
        self._on_reaped(self.pid)
        self._reason = make_exit_reason(status)
        self._protocol.processExited(self._reason)
        self._check_end()

    def _check_end(self) -> None:
        are_closed = self._stdout.is_closed and self._stderr.is_closed
        if self._reason is not None and are_closed and not self._has_ended:
            self._has_ended = True
            self._protocol.processEnded(self._reason)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process group, also after the child's own end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def read_remaining_output(self) -> None:
        """Read what the pipes hold now, and close them: other processes may keep them open."""
        self._stdout.read_remaining_output()
        self._stderr.read_remaining_output()


class Spawner:
    """The children of the daemon: it starts them, and knows which still run."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._children: set[int] = set()

    def __call__(
        self,
        protocol: ProcessProtocol,
        argv: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        *,
        descriptors: Sequence[int] = (),
    ) -> ChildProcess:
        """Start `argv` in `directory` with just that environment. Blocks, hardly.

        The child gets `descriptors` under the same numbers; they stay open here, too. Raises:
        OSError.
        """
        started = _start_child(argv, environment, directory, descriptors)
        self._children.add(started.pid)
        return ChildProcess(self._reactor, protocol, started, self._children.discard)

    @property
    def child_count(self) -> int:
        """The number of children that were not reaped yet."""
        return len(self._children)

    def is_child(self, pid: int) -> bool:
        """Tell whether `pid` is a known child that was not reaped yet."""
        return pid in self._children
