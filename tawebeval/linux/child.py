"""Child processes, however they were started: they drive an ordinary `ProcessProtocol`.

Why not `reactor.spawnProcess`: it walks over every open descriptor in the reactor's
thread, forks where a directory is given, looks at every child whenever one ends, and
reads 8 KiB at a time. Here a pidfd tells of one child's end and of no other's, and
`PipeReader` reads 64 KiB from a pipe that holds 256.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from resource import struct_rusage
from typing import Any

from twisted.internet.error import ProcessDone, ProcessExitedAlready, ProcessTerminated
from twisted.internet.interfaces import IAddress, IProcessTransport, IReadDescriptor
from twisted.internet.main import CONNECTION_DONE
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from tawebeval.linux.pipes import PipeReader
from tawebeval.linux.starting import Started, start

STDOUT, STDERR = 1, 2


@implementer(IReadDescriptor)
class _PidReader:
    """Waits for a child's end by its pidfd."""

    __slots__ = ("_child", "_descriptor", "_reactor")

    def __init__(self, reactor: Any, descriptor: int, child: ChildProcess) -> None:
        self._reactor = reactor
        self._descriptor = descriptor
        self._child = child
        reactor.addReader(self)

    def fileno(self) -> int:
        return self._descriptor

    def logPrefix(self) -> str:
        return type(self).__name__

    def doRead(self) -> None:
        self._reactor.removeReader(self)
        os.close(self._descriptor)
        self._descriptor = -1
        self._child.exited()

    def connectionLost(self, reason: Failure) -> None:
        """Do nothing: the reactor stops, and the child with it."""


@implementer(IProcessTransport)
class ChildProcess:
    """A running child; `usage` is what it and those it waited for have used, once it has ended.

    There may be thousands, so each keeps only what its end needs.
    """

    __slots__ = ("_ended", "_protocol", "_reaped", "_reason", "_stderr", "_stdout", "pid", "usage")

    def __init__(
        self,
        reactor: Any,
        protocol: ProcessProtocol,
        started: Started,
        reaped: Callable[[int], object] = lambda pid: None,
    ) -> None:
        """Take over a child. `reaped(pid)` is called when `pid` may be another's again."""
        self.usage: struct_rusage | None = None
        self.pid = started.pid
        self._reaped = reaped
        self._protocol = protocol
        self._reason: Failure | None = None  # of its end
        self._ended = False
        _PidReader(reactor, started.pidfd, self)
        self._stdout = PipeReader(reactor, started.stdout, STDOUT, self)
        self._stderr = PipeReader(reactor, started.stderr, STDERR, self)
        protocol.makeConnection(self)

    @property
    def running(self) -> bool:
        """Whether the child itself, whatever it has started, has not ended."""
        return self._reason is None

    @property
    def delay(self) -> float:
        """The processor time of slow reads of stdout and stderr, in seconds."""
        return self._stdout.delay + self._stderr.delay

    # What happens to the child

    def received(self, name: int, chunk: bytes) -> None:
        """Pass on what the child has printed to stdout or stderr."""
        self._protocol.childDataReceived(name, chunk)

    def lost(self, name: int) -> None:
        """Take the end of stdout or stderr."""
        self._protocol.childConnectionLost(name)
        self._check_end()

    def exited(self) -> None:
        """Take the child's own end."""
        _, status, self.usage = os.wait4(self.pid, 0)
        self._reaped(self.pid)
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
            and self._stdout.closed
            and self._stderr.closed
            and not self._ended
        ):
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
        self._stdout.read_the_rest()
        self._stderr.read_the_rest()

    def pauseProducing(self) -> None:
        """Stop reading the child's stdout."""
        self._stdout.pauseProducing()

    def resumeProducing(self) -> None:
        """Read the child's stdout again."""
        self._stdout.resumeProducing()

    def closeChildFD(self, descriptor: int) -> None:
        """Read no more of the child's stdout or stderr."""
        for reader in (self._stdout, self._stderr):
            if reader.name == descriptor:
                reader.connectionLost(Failure(CONNECTION_DONE))

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
        self._coming: set[object] = set()
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
        """Start a child, as `start` says."""
        started = start(argv, environment, directory, descriptors)
        self._children.add(started.pid)
        return self.adopt(protocol, started)

    def adopt(self, protocol: ProcessProtocol, started: Started) -> ChildProcess:
        """Let a child that was started in some other way drive a protocol from now on."""
        return ChildProcess(self._reactor, protocol, started, self._reaped)

    @contextlib.contextmanager
    def expecting(self) -> Iterator[Callable[[int], object]]:
        """Within it a child of ours is started, in any thread; give what is to be told its number.

        Until then nobody is known to be an orphan, and waited for as one.
        """
        start = object()
        self._coming.add(start)
        try:
            yield self._children.add
        finally:
            self._coming.discard(start)

    def waited_for(self, pid: int) -> None:
        """Take note that somebody has waited for a child that nobody has adopted."""
        self._children.discard(pid)

    @property
    def complete(self) -> bool:
        """Whether there is no child that is not known yet."""
        return not self._coming

    @property
    def running(self) -> int:
        """How many children there are that were not waited for yet."""
        return len(self._children)

    def is_child(self, pid: int) -> bool:
        """Tell whether `pid` is a child that was started here and not waited for yet."""
        return pid in self._children
