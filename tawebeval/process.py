"""Child processes: a `Popen` and a pidfd that drive an ordinary `ProcessProtocol`.

Why not `reactor.spawnProcess`: it walks over every open descriptor in the reactor's
thread, forks where a directory is given, looks at every child whenever one ends, and
reads 8 KiB at a time. `Popen` uses vfork, the pidfd tells of one child's end and of no
other's, and `PipeReader` reads 64 KiB from a pipe that holds 256.

Each child leads a session and process group of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from resource import struct_rusage
from typing import Any

from twisted.internet.error import ProcessDone, ProcessExitedAlready, ProcessTerminated
from twisted.internet.interfaces import IAddress, IProcessTransport, IReadDescriptor
from twisted.internet.main import CONNECTION_DONE
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from tawebeval.pipes import PipeReader, open_pipe

STDOUT, STDERR = 1, 2


@implementer(IReadDescriptor)
class _PidReader:
    """Waits for a child's end by its pidfd."""

    def __init__(self, reactor: Any, descriptor: int, exited: Callable[[], object]) -> None:
        self._reactor = reactor
        self._descriptor = descriptor
        self._exited = exited
        reactor.addReader(self)

    def fileno(self) -> int:
        return self._descriptor

    def logPrefix(self) -> str:
        return type(self).__name__

    def doRead(self) -> None:
        self._reactor.removeReader(self)
        os.close(self._descriptor)
        self._descriptor = -1
        self._exited()

    def connectionLost(self, reason: Failure) -> None:
        """Do nothing: the reactor stops, and the child with it."""


@implementer(IProcessTransport)
class ChildProcess:
    """A running child; `usage` is what it and those it waited for have used, once it has ended."""

    usage: struct_rusage | None = None

    def __init__(
        self,
        reactor: Any,
        protocol: ProcessProtocol,
        argv: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        *,
        descriptors: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
        reader: Callable[..., PipeReader] = PipeReader,
        reaped: Callable[[int], object] = lambda pid: None,
    ) -> None:
        """Start `argv` in `directory` with just that environment and, as a rule, nothing on stdin.

        Raises OSError where that is impossible. The child gets `descriptors` under the same
        numbers; they stay open here, too. `reader` makes what reads stdout;
        `reaped(pid)` is called when the child has ended and `pid` may be another's.
        """
        self._reaped = reaped
        self._protocol = protocol
        self._ended = False
        with contextlib.ExitStack() as writing, contextlib.ExitStack() as reading:
            ends = {name: open_pipe(reading, writing) for name in (STDOUT, STDERR)}
            self._popen = subprocess.Popen(
                argv,
                env=dict(environment),
                cwd=directory,
                stdin=stdin,
                stdout=ends[STDOUT][1],
                stderr=ends[STDERR][1],
                start_new_session=True,
                pass_fds=descriptors,
                umask=0o022,
            )
            self.pid = self._popen.pid
            self._popen.args = ()  # which would be kept until the end, and are long
            try:
                _PidReader(reactor, os.pidfd_open(self.pid), self._exited)
            except OSError:
                self._popen.kill()
                self._popen.wait()
                raise
            reading.pop_all()
        self._readers = {
            name: self._read(reactor, name, end, reader if name == STDOUT else PipeReader)
            for name, (end, _) in ends.items()
        }
        protocol.makeConnection(self)

    def _read(
        self, reactor: Any, name: int, end: int, reader: Callable[..., PipeReader]
    ) -> PipeReader:
        return reader(
            reactor,
            end,
            lambda chunk: self._protocol.childDataReceived(name, chunk),
            lambda: self._lost(name),
        )

    @property
    def running(self) -> bool:
        """Whether the child itself, whatever it has started, has not ended."""
        return self._popen.returncode is None

    # What happens to the child

    def _lost(self, name: int) -> None:
        del self._readers[name]
        self._protocol.childConnectionLost(name)
        self._check_end()

    def _exited(self) -> None:
        _, status, self.usage = os.wait4(self.pid, 0)
        self._reaped(self.pid)
        code = self._popen.returncode = os.waitstatus_to_exitcode(status)
        self._reason = Failure(
            ProcessDone(status)
            if code == 0
            else ProcessTerminated(max(code, 0) or None, -code if code < 0 else None, status)
        )
        self._protocol.processExited(self._reason)
        self._check_end()

    def _check_end(self) -> None:
        if not self.running and not self._readers and not self._ended:
            self._ended = True
            self._protocol.processEnded(self._reason)

    # What is done to the child

    def signalProcess(self, signalID: str | int) -> None:
        """Send a signal, by number or by a name without SIG, to the child's process group.

        Raises ProcessExitedAlready.
        """
        number = signal.Signals[f"SIG{signalID}"] if isinstance(signalID, str) else signalID
        if not self.running:
            raise ProcessExitedAlready
        self.signal_group(number)

    def signal_group(self, number: int) -> None:
        """Send a signal to what there is of the child's process group, also after its own end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def read_the_rest(self) -> None:
        """Do not wait for those who still hold the child's stdout and stderr."""
        for reader in list(self._readers.values()):
            reader.read_the_rest()

    def pauseProducing(self) -> None:
        """Stop reading the child's stdout."""
        if STDOUT in self._readers:
            self._readers[STDOUT].pauseProducing()

    def resumeProducing(self) -> None:
        """Read the child's stdout again."""
        if STDOUT in self._readers:
            self._readers[STDOUT].resumeProducing()

    def closeChildFD(self, descriptor: int) -> None:
        """Read no more of the child's stdout or stderr."""
        if descriptor in self._readers:
            self._readers[descriptor].connectionLost(Failure(CONNECTION_DONE))

    def closeStdout(self) -> None:
        """Read no more of the child's stdout."""
        self.closeChildFD(STDOUT)

    def closeStderr(self) -> None:
        """Read no more of the child's stderr."""
        self.closeChildFD(STDERR)

    def loseConnection(self) -> None:
        """Read no more of either."""
        self.closeStdout()
        self.closeStderr()

    # The rest of the interface: there is nothing to write to.

    def closeStdin(self) -> None:
        """Do nothing: the child's stdin is at its end from the start."""

    def write(self, data: bytes) -> None:
        """Refuse: the child's stdin is at its end from the start."""
        raise NotImplementedError("the child's stdin is at its end")

    def writeSequence(self, data: Any) -> None:
        """Refuse, as `write` does."""
        self.write(b"")

    def writeToChild(self, childFD: int, data: bytes) -> None:
        """Refuse, as `write` does."""
        self.write(data)

    def getPeer(self) -> IAddress:
        """Refuse: a process has no address."""
        raise NotImplementedError("a process has no address")

    def getHost(self) -> IAddress:
        """Refuse: a process has no address."""
        raise NotImplementedError("a process has no address")


class Spawner:
    """Starts children and knows those that run, by their process identifiers."""

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
        stdin: int = subprocess.DEVNULL,
    ) -> ChildProcess:
        """Start a child, as `ChildProcess` says."""
        child = ChildProcess(
            self._reactor,
            protocol,
            argv,
            environment,
            directory,
            descriptors=descriptors,
            stdin=stdin,
            reaped=self._children.discard,
        )
        self._children.add(child.pid)
        return child

    @property
    def running(self) -> int:
        """How many children there are that were not waited for yet."""
        return len(self._children)

    def is_child(self, pid: int) -> bool:
        """Tell whether `pid` is a child that was started here and not waited for yet."""
        return pid in self._children
