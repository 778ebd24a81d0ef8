"""Child processes with their pipes, driving a Twisted `ProcessProtocol`.

`Spawner` starts the daemon's own children, such as git's commands, by `Popen`, which uses vfork,
and knows which still run. `ProcessTransport` is what a run needs of an evaluator's process.

`reactor.spawnProcess` is not used: it walks over every open descriptor in the reactor's thread,
forks if a directory is given, and looks at every child whenever one ends. Here a pidfd reports the
end of one child only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from resource import struct_rusage
from typing import IO, Any, Protocol

from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.main import CONNECTION_DONE
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

STDOUT, STDERR = 1, 2
_READ = 64 * 1024


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
class _Pipe:
    """The read end of a child's pipe; `name` is the child's descriptor, 1 or 2."""

    def __init__(self, reactor: Any, child: ChildProcess, name: int, file: IO[bytes]) -> None:
        self._reactor = reactor
        self._child = child
        self._name = name
        self._file = file
        os.set_blocking(file.fileno(), False)
        reactor.addReader(self)

    @property
    def is_closed(self) -> bool:
        """Whether the pipe is closed here."""
        return self._file.closed

    def fileno(self) -> int:
        """Return the pipe's descriptor, -1 when closed."""
        return -1 if self._file.closed else self._file.fileno()

    def logPrefix(self) -> str:
        """Return the name for log lines."""
        return type(self).__name__

    def doRead(self) -> Any:
        """Read once; return the reason to close, if any."""
        try:
            chunk = self._file.read(_READ)
        except OSError:
            return CONNECTION_DONE
        if chunk:
            self._child.on_output(self._name, chunk)
        return CONNECTION_DONE if chunk == b"" else None  # None: there is nothing now

    def connectionLost(self, reason: Failure) -> None:
        """Close the pipe."""
        if not self._file.closed:
            self._reactor.removeReader(self)
            self._file.close()
            self._child.on_output_end(self._name)

    def read_remaining_output(self) -> None:
        """Read what the pipe holds now, and close it, in the next turn: other writers may remain.

        Closed at once, its number may become that of another descriptor, for which the reactor
        would take what epoll(7) has reported of this one in the same turn.
        """
        if not self._file.closed:
            self._reactor.removeReader(self)
            held = fcntl.ioctl(self._file.fileno(), termios.FIONREAD, bytes(4))
            self._reactor.callLater(0, self._read_rest, int.from_bytes(held, sys.byteorder))

    def _read_rest(self, size: int) -> None:
        if self._file.closed:
            return
        if size:
            self._child.on_output(self._name, self._file.read(size))
        self.connectionLost(Failure(CONNECTION_DONE))


@implementer(IReadDescriptor)
class _PidReader:
    """The pidfd of a child, readable at the child's end."""

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

    def __init__(
        self,
        reactor: Any,
        protocol: ProcessProtocol,
        process: subprocess.Popen[bytes],
        on_reaped: Callable[[int], object] = lambda pid: None,
    ) -> None:
        """Take over a child. `on_reaped(pid)` is called when the kernel may use `pid` again.

        Raises: OSError, if there is no pidfd for it; then it is killed.
        """
        assert process.stdout is not None
        assert process.stderr is not None
        files = {STDOUT: process.stdout, STDERR: process.stderr}
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.communicate()
            raise
        process.returncode = 0  # so that Popen does not wait for it
        self.resource_usage: struct_rusage | None = None
        self.pid = process.pid
        self._on_reaped = on_reaped
        self._protocol = protocol
        self._reason: Failure | None = None  # of its end
        self._has_ended = False
        self._pipes = [_Pipe(reactor, self, name, file) for name, file in files.items()]
        _PidReader(reactor, pidfd, self._reap)
        protocol.makeConnection(self)

    @property
    def is_running(self) -> bool:
        """Whether the process itself runs, whatever its own children do."""
        return self._reason is None

    def on_output(self, name: int, chunk: bytes) -> None:
        """Pass on output of the process."""
        self._protocol.childDataReceived(name, chunk)

    def on_output_end(self, name: int) -> None:
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
        are_closed = all(pipe.is_closed for pipe in self._pipes)
        if self._reason is not None and are_closed and not self._has_ended:
            self._has_ended = True
            self._protocol.processEnded(self._reason)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process group, also after the child's own end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def read_remaining_output(self) -> None:
        """Read what the pipes hold now, and close them: other processes may keep them open."""
        for pipe in self._pipes:
            pipe.read_remaining_output()


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
        process = subprocess.Popen(
            argv,
            bufsize=0,
            env=dict(environment),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=descriptors,
            umask=0o022,
        )
        self._children.add(process.pid)
        try:
            return ChildProcess(self._reactor, protocol, process, self._children.discard)
        except OSError:
            self._children.discard(process.pid)
            raise

    @property
    def child_count(self) -> int:
        """The number of children that were not reaped yet."""
        return len(self._children)

    def is_child(self, pid: int) -> bool:
        """Tell whether `pid` is a known child that was not reaped yet."""
        return pid in self._children
