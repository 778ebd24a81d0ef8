"""Runs of submissions: the daemon's side of `broker`, which does the work.

Each evaluation has a listening socket in its sandbox. The broker is started with the first
connection, so an evaluator that runs no submission costs a socket and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from tawebeval.deferreds import OneShotEvent, WorkerThreads, run_in_background
from tawebeval.errors import EvaluationFailure
from tawebeval.linux.child import ProcessAdopter, ProcessTransport, StartedProcess
from tawebeval.linux.filetree import make_sealed_memfd
from tawebeval.linux.launcher_client import FIRST_PASSED_DESCRIPTOR, LaunchSpec
from tawebeval.sandbox import broker

BROKER_PROCESS_NAME = "tawebeval-broker"
"""The name of the process in process lists."""

_SOURCE = Path(broker.__file__).read_bytes()  # now: the user of the service may not read it later
_PYTHON = "/usr/bin/python3"  # that of evaluators
BROKER_SOCKET_NAME = "runner"
"""The name of the socket in a workspace."""

_BACKLOG = 128
_MESSAGE = 1024  # bytes of what the broker says on stderr, which only defects do

log = Logger()


@contextlib.contextmanager
def make_broker_spec(
    configuration: Mapping[str, Any], listening: int, filters: Sequence[int], groups: Sequence[str]
) -> Iterator[LaunchSpec]:
    """Make what starts a broker; it is closed after the start. Raises: OSError."""
    with contextlib.ExitStack() as opened:
        given = []
        for name, content in (
            ("source", _SOURCE),
            ("configuration", json.dumps(configuration).encode()),
        ):
            given.append(make_sealed_memfd(name, content))
            opened.callback(os.close, given[-1])
        argv = [
            _PYTHON,
            "-I",
            "-S",
            f"/proc/self/fd/{FIRST_PASSED_DESCRIPTOR}",
            BROKER_PROCESS_NAME,
        ]
        yield LaunchSpec(argv, {}, "/", (*given, listening, *filters), groups)


class BrokerProtocol(ProcessProtocol):
    """The protocol of a broker; `ended` is set when it has ended."""

    def __init__(self) -> None:
        self.ended: OneShotEvent[None] = OneShotEvent()
        self.process: ProcessTransport | None = None
        self._said = b""
        self.is_expected_to_end = False

    def makeConnection(self, transport: Any) -> None:
        """Connect the started process, a `ProcessTransport`."""
        self.process = transport
        super().makeConnection(transport)  # type: ignore[no-untyped-call]

    def errReceived(self, data: bytes) -> None:
        """Keep the end of what the broker says."""
        self._said = (self._said + data)[-_MESSAGE:]

    def processExited(self, reason: Failure) -> None:
        """Read what it has said: its own children may keep the pipe open."""
        assert self.process is not None, "it has run"
        self.process.read_remaining_output()

    def processEnded(self, reason: Failure) -> None:
        """Log what it has said, which only a defect makes it do."""
        if self._said and not self.is_expected_to_end:
            said = self._said.decode(errors="replace")
            log.warn("the broker of an evaluation's submissions has failed: {said}", said=said)
        self.ended.set_value(None)

    def kill(self) -> None:
        """Kill the broker; the programs that it runs end with it."""
        self.is_expected_to_end = True
        if self.process is not None and self.process.is_running:
            self.process.signal_group(signal.SIGKILL)


def listen_in_directory(directory: Path) -> socket.socket:
    """Return a listening socket in a directory. Blocks. Raises: OSError."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # By a descriptor: a socket's path has at most 107 bytes (unix(7)).
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listening.bind(f"/proc/self/fd/{place}/{BROKER_SOCKET_NAME}")
        finally:
            os.close(place)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def refuse_connections(listening: socket.socket) -> None:
    """Refuse connections to a socket from now on, whoever else has a descriptor of it."""
    listening.shutdown(socket.SHUT_RDWR)
    listening.setblocking(False)
    with contextlib.suppress(BlockingIOError, OSError):
        while True:
            listening.accept()[0].close()


@implementer(IReadDescriptor)
class BrokerStarter:
    """Starts the broker of one evaluation with the first connection to its listening socket.

    `start(descriptor)` starts it, in a thread; `stop(failure)` is called if it cannot be started.
    The socket is closed in the end. `connect`, if it is given, connects a broker that runs already.
    """

    def __init__(
        self,
        listening: socket.socket,
        reactor: Any,
        threads: WorkerThreads,
        spawner: ProcessAdopter,
        start: Callable[[int], StartedProcess],
        stop: Callable[[EvaluationFailure], object],
        connect: Callable[[ProcessProtocol], object] | None = None,
    ) -> None:
        self._socket = listening
        self._reactor = reactor
        self._threads = threads
        self._spawner = spawner
        self._start = start
        self._stop = stop
        self._broker = BrokerProtocol()
        self._starting: Deferred[None] | None = None
        if connect is None:
            reactor.addReader(self)
        else:
            self._starting = succeed(None)
            connect(self._broker)
            self._broker.ended.add_callback(self._refuse)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def logPrefix(self) -> str:
        """Return the name for log lines."""
        return type(self).__name__

    def doRead(self) -> None:
        """Start the broker, which accepts connections from now on."""
        self._reactor.removeReader(self)
        self._starting = run_in_background(
            self._start_broker(), log, "the broker of an evaluation's submissions cannot be started"
        )

    def connectionLost(self, reason: Failure) -> None:
        """Do nothing: the reactor stops."""

    async def _start_broker(self) -> None:
        try:
            started = await self._threads.run_in_thread(self._start, self._socket.fileno())
        except OSError as error:
            # The evaluator may have ended meanwhile; otherwise its runs fail by no fault of it.
            if not self._broker.is_expected_to_end:
                log.warn("tawebeval-run does not work in an evaluation: {error}", error=error)
                what = "the sandbox for the submission could not be started; submit again"
                self._stop(EvaluationFailure("lost", what))
            self._refuse()
            return
        self._spawner.adopt_child(self._broker, started)
        self._broker.ended.add_callback(self._refuse)
        if self._broker.is_expected_to_end:
            self._broker.kill()

    def _refuse(self, _: object = None) -> None:
        """Refuse connections that no broker accepts any more."""
        if self._socket.fileno() >= 0:
            refuse_connections(self._socket)

    @property
    def broker_pid(self) -> int | None:
        """The running broker; None if there is none."""
        process = self._broker.process
        return process.pid if process is not None and process.is_running else None

    async def end_broker(self) -> None:
        """End the broker with all that it runs, and return after its end."""
        self._broker.kill()
        if self._starting is not None:
            await self._starting
            if self._broker.process is not None:
                await self._broker.ended.wait()
        else:
            self._reactor.removeReader(self)
        self._socket.close()
