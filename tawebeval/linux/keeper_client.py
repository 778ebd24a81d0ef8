"""The client of `keeper`, the process that outlives the daemon and holds its descriptors.

`KeeperClient` is the daemon's connection: it blocks until `attach`, and from then on the reactor
serves it. `start_program` uses a connection of its own, so that a thread may call it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from resource import struct_rusage
from typing import Any, NoReturn

import attrs
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReadWriteDescriptor
from twisted.internet.main import CONNECTION_DONE
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from tawebeval.errors import ConfigurationError
from tawebeval.linux import keeper
from tawebeval.linux.child import has_process_ended

ANSWER_TIMEOUT = 10  # seconds for an answer, before `attach`
MAX_QUEUED_REQUESTS = 4096  # requests: with more the keeper is taken for dead
KEEPER_SOURCE = Path(keeper.__file__).read_bytes()  # now: later the user may lack permission
_RETRY = 0.1  # seconds, where the user has too many descriptors in flight (unix(7))
_LOST = "the keeper of evaluators has ended"
_HANGS = "the keeper of evaluators does not answer"
_VERSION = (
    "the keeper of evaluators speaks version {} of its protocol, and this daemon version {};"
    " restart tawebeval-keeper.service, which ends all running evaluations"
)

log = Logger()


@attrs.frozen
class DescriptorBundle:
    """Descriptors that the keeper holds, duplicated for the caller, and a process or 0."""

    descriptors: Sequence[int]
    pid: int


@attrs.frozen
class RunningKeeper:
    """A keeper: its socket, the number of its process, and launchers of an earlier daemon."""

    path: str
    pid: int
    launcher_bundles: Mapping[str, DescriptorBundle] = attrs.field(factory=dict)


@attrs.frozen
class KeeperChild:
    """A program that `start_program` has started. The keeper reaps it."""

    pid: int
    pidfd: int

    def kill(self) -> None:
        """Kill the program with its process group, and close the pidfd."""
        with contextlib.suppress(ProcessLookupError):  # it is reaped: the number may be another's
            signal.pidfd_send_signal(self.pidfd, 0)
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self.pidfd)


def execute_keeper(path: Path, cgroups: str, environment: Mapping[str, str]) -> NoReturn:
    """Become the keeper, which listens at `path`. Raises: ConfigurationError.

    `cgroups` is for `KeeperClient.cgroups`. Of the environment the keeper has only what
    sd_notify(3) needs.
    """
    given = {keeper.CGROUP_DESCRIPTION_VARIABLE: cgroups}
    if "NOTIFY_SOCKET" in environment:
        given["NOTIFY_SOCKET"] = environment["NOTIFY_SOCKET"]
    source = os.memfd_create("source", os.MFD_CLOEXEC)
    os.pwrite(source, KEEPER_SOURCE, 0)
    os.dup2(source, 0)
    # This user may lack permission to read the Python of this process.
    for python in dict.fromkeys((sys.executable, "/usr/bin/python3")):
        options = [python, "-I", "-S"]
        with contextlib.suppress(OSError):
            if subprocess.run([*options, "-c", ""], env={}, stdin=source).returncode == 0:
                argv = [*options, "/proc/self/fd/0", keeper.PROCESS_NAME, str(path)]
                os.execve(python, argv, given)  # noqa: S606
    raise ConfigurationError("no Python that the user can execute", "install /usr/bin/python3")


def start_program(path: str, argv: Sequence[str], descriptors: Sequence[int]) -> KeeperChild:
    """Let the keeper start a program with this stdin, stdout and stderr. Blocks. Raises: OSError.

    The program leads a session of its own, and has no environment; its directory is `/`.
    """
    with _connect(path) as connection:
        answer, (pidfd,) = _ask(connection, {"request": "start", "argv": argv}, descriptors)
        return KeeperChild(answer["pid"], pidfd)


def keep_bundle(path: str, name: str, descriptors: Sequence[int], pid: int) -> None:
    """Let the keeper hold descriptors and a process. Blocks. Raises: OSError."""
    with _connect(path) as connection:
        request = {"id": 0, "request": "keep", "name": name, "pid": pid}
        socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
        _ask(connection, {"request": "version"})  # when it answers it has taken them


@implementer(IReadWriteDescriptor)
class KeeperClient:
    """The daemon's connection to the keeper.

    `path` is the keeper's socket, `pid` the number of its process, `cgroups` the description of the
    cgroups that it has opened for evaluations, "" without (`cgroups.manager.open_keeper_cgroups`).
    Requests arrive in the order in which they were made. Not for use by several threads.
    """

    def __init__(self, connection: socket.socket, path: str, pid: int, cgroups: str) -> None:
        self.path = path
        self.pid = pid
        self.cgroups = cgroups
        self._pidfd: int | None = os.pidfd_open(pid)
        self._connection: socket.socket | None = connection
        self._reactor: Any = None
        self._on_lost: Callable[[], object] = lambda: None
        self._number = 0  # of the last request
        self._waiting: dict[int, Deferred[tuple[int, struct_rusage | None]]] = {}
        # Messages that the socket did not take, with duplicates of their descriptors.
        self._queue: deque[tuple[bytes, Sequence[int]]] = deque()
        self._flushes: list[Deferred[None]] = []

    @classmethod
    def connect(cls, path: str) -> KeeperClient:
        """Connect to the keeper. Blocks. Raises: OSError, ConfigurationError."""
        connection = _connect(path)
        try:
            answer, _ = _ask(connection, {"request": "version"})
            if answer["version"] != keeper.PROTOCOL_VERSION:
                raise ConfigurationError(
                    _VERSION.format(answer["version"], keeper.PROTOCOL_VERSION)
                )
        except BaseException:
            connection.close()
            raise
        return cls(connection, path, answer["pid"], answer["cgroups"])

    def list_bundles(self) -> dict[str, DescriptorBundle]:
        """Return all bundles. Only before `attach`. Blocks. Raises: OSError."""
        assert self._connection is not None
        assert self._reactor is None
        found: dict[str, DescriptorBundle] = {}
        after = 0
        try:
            while True:
                answer, descriptors = _ask(self._connection, {"request": "list", "after": after})
                if not answer["bundles"]:
                    return found
                after = answer["after"]
                for name, pid, count in answer["bundles"]:
                    if name in found:  # replaced between two pages
                        keeper.close_descriptors(found[name].descriptors)
                    found[name] = DescriptorBundle(descriptors[:count], pid)
                    descriptors = descriptors[count:]
        except OSError:
            for bundle in found.values():
                keeper.close_descriptors(bundle.descriptors)
            raise

    def attach(self, reactor: Any, on_lost: Callable[[], object] = lambda: None) -> None:
        """Let the reactor serve the connection; `on_lost` is called once when the keeper ends."""
        assert self._connection is not None
        self._reactor = reactor
        self._on_lost = on_lost
        self._connection.setblocking(False)
        reactor.addReader(self)

    @property
    def is_alive(self) -> bool:
        """Whether the keeper's process lives, connected or not."""
        return self._pidfd is not None and not has_process_ended(self._pidfd)

    def keep_bundle(self, name: str, descriptors: Sequence[int], pid: int = 0) -> None:
        """Hold descriptors, and a process that the keeper's launcher has started, under a name.

        They replace the bundle of that name, if there is one. The caller may close its descriptors.
        An error of the keeper is logged. After the end of the connection nothing happens. Raises:
        OSError, if a descriptor cannot be sent.
        """
        self._send({"request": "keep", "name": name, "pid": pid}, descriptors)

    def drop_bundle(self, name: str) -> None:
        """Close the descriptors of a bundle, and kill its process if that still runs."""
        self._send({"request": "drop", "name": name})

    def reap_unclaimed_children(self) -> None:
        """Reap ended children of the keeper that belong to no bundle."""
        self._send({"request": "reap_others"})

    def flush(self) -> Deferred[None]:
        """Return a Deferred that fires when no request waits in this process, or at the end."""
        if not self._queue:
            return succeed(None)
        flushed: Deferred[None] = Deferred()
        self._flushes.append(flushed)
        return flushed

    def wait_for_exit_status(
        self, name: str, pid: int = 0
    ) -> Deferred[tuple[int, struct_rusage | None]]:
        """Return the wait status and the usage of a bundle's process, which has ended.

        If the keeper has refused the bundle, they are those of its child `pid`, once.

        The Deferred fails with OSError: ConnectionError at the end of the connection, ECHILD if the
        status is unknown, EBUSY if the process still runs.
        """
        number = self._send({"request": "wait", "name": name, "pid": pid})
        if not number:
            return fail(ConnectionResetError(errno.ECONNRESET, _LOST))
        waiting = self._waiting[number] = Deferred()
        return waiting

    def close(self) -> None:
        """Close the connection; `on_lost` is not called."""
        self.ignore_connection_loss()
        self._lose()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def ignore_connection_loss(self) -> None:
        """Expect the end of the connection: `on_lost` is not called."""
        self._on_lost = lambda: None

    def _send(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> int:
        """Send a request or queue it; return its number, 0 without a connection."""
        if self._connection is None:
            return 0
        self._number += 1
        message = json.dumps({"id": self._number, **request}).encode()
        if self._reactor is None:
            socket.send_fds(self._connection, [message], descriptors)
        elif self._queue or not self._try(message, descriptors):
            if len(self._queue) >= MAX_QUEUED_REQUESTS:
                log.error("the keeper of evaluators does not take requests any more")
                self._reactor.callLater(0, self._lose)
                return 0
            self._queue.append((message, [os.dup(descriptor) for descriptor in descriptors]))
        return self._number

    def _try(self, message: bytes, descriptors: Sequence[int]) -> bool:
        """Send without blocking; tell whether the message is done with."""
        assert self._connection is not None
        try:
            socket.send_fds(self._connection, [message], descriptors)
        except BlockingIOError:
            self._reactor.addWriter(self)
            return False
        except ConnectionError:
            return True  # reading finds the end of the connection, too
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self._reactor.removeWriter(self)
            self._reactor.callLater(_RETRY, self._retry)
            return False
        return True

    def _retry(self) -> None:
        if self._connection is not None and self._queue:
            self._reactor.addWriter(self)

    def fileno(self) -> int:
        """Return the descriptor of the connection, -1 if it is closed."""
        return -1 if self._connection is None else self._connection.fileno()

    def logPrefix(self) -> str:
        """Return the name for log lines."""
        return type(self).__name__

    def doWrite(self) -> None:
        """Send queued requests."""
        while self._queue and self._try(*self._queue[0]):
            keeper.close_descriptors(self._queue.popleft()[1])
        if not self._queue:
            self._reactor.removeWriter(self)
            self._end_flushes()

    def _end_flushes(self) -> None:
        flushes, self._flushes = self._flushes, []
        for flushed in flushes:
            flushed.callback(None)

    def doRead(self) -> Any:
        """Read one answer; return the reason to close, if any."""
        if self._connection is None:
            return CONNECTION_DONE
        try:
            message = self._connection.recv(keeper.MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return CONNECTION_DONE
        if not message:
            return CONNECTION_DONE
        self._take(json.loads(message))
        return None

    def _take(self, answer: Mapping[str, Any]) -> None:
        waiting = self._waiting.pop(answer["id"], None)
        if "error" in answer:
            if waiting is None:
                log.error("the keeper of evaluators: {error}", error=answer["error"])
            else:
                waiting.errback(OSError(answer["errno"], answer["error"]))
        elif waiting is not None:
            waiting.callback((answer["status"], struct_rusage(answer["rusage"])))

    def connectionLost(self, reason: Failure) -> None:
        """Take the end of the connection."""
        self._lose()

    def _lose(self) -> None:
        if self._connection is None:
            return
        if self._reactor is not None:
            self._reactor.removeReader(self)
            self._reactor.removeWriter(self)
        self._connection.close()
        self._connection = None
        for _, descriptors in self._queue:
            keeper.close_descriptors(descriptors)
        self._queue.clear()
        self._end_flushes()
        self._on_lost()
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.errback(ConnectionResetError(errno.ECONNRESET, _LOST))


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Not by settimeout(), with which connect(2) fails at once if other clients wait, too.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", ANSWER_TIMEOUT, 0))
        with _timeout():
            connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _timeout() -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise TimeoutError(errno.ETIMEDOUT, _HANGS) from None


def _ask(
    connection: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int] = ()
) -> tuple[dict[str, Any], list[int]]:
    """Return the answer to a request, and its descriptors. Blocks. Raises: OSError."""
    socket.send_fds(connection, [json.dumps({"id": 0, **request}).encode()], descriptors)
    while True:
        with _timeout():
            answer, received = _receive(connection)
        if answer["id"] == 0:
            break
        log.error("the keeper of evaluators: {error}", error=answer.get("error"))  # of a keep
    if "error" in answer:
        raise OSError(answer["errno"], answer["error"])
    return answer, received


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    message, descriptors, is_whole = keeper.receive_message(
        connection, keeper.MAX_DESCRIPTORS_PER_MESSAGE
    )
    if not message:
        raise ConnectionResetError(errno.ECONNRESET, _LOST)
    if not is_whole:
        keeper.close_descriptors(descriptors)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return json.loads(message), descriptors
