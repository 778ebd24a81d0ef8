"""Starting evaluators, by `launcher`: a small process, where the daemon is large and has threads.

What the daemon would have programs do between fork and exec is done there by a few lines of Python.
Everything here blocks: some milliseconds, and no longer than `_PATIENCE`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock

import attrs
from twisted.logger import Logger

from tawebeval.linux import launcher
from tawebeval.linux.filetree import remove
from tawebeval.linux.pipes import open_pipe
from tawebeval.linux.privileges import User
from tawebeval.linux.reports import ENDED, REPORT, Overlay, reported
from tawebeval.linux.starting import Started, taken_over

_UNSHARE = ("/usr/bin/unshare", "--user", "--map-current-user", "--mount", "--keep-caps", "--")
# Of the daemon's own Python the user that it has become may not be able to read anything.
_PYTHONS = (sys.executable, "/usr/bin/python3")
_SOURCE = Path(launcher.__file__).read_bytes()  # now, for the same reason
NAME = "tawebeval-launcher"
"""By which people find the process among others."""

FIRST = 3
"""The number under which a program has the first of its descriptors; the others follow."""

_PATIENCE = 10.0  # seconds for the process to start, and to answer
_COMPLAINT = 8 * 1024  # bytes of what it says before it fails
_HANGS = "the process that starts evaluators does not answer"
_NONE = "the process that starts evaluators cannot be started"
_NO_MORE = "no process can be started"

log = Logger()


@attrs.frozen
class Launch:
    """A program to start.

    It gets `descriptors` under the numbers from `FIRST` on, in their order. It enters `groups`, of
    which these are files to write to. `limits`, soft and hard, are by the numbers of `resource`.
    Its nice value is the daemon's and `niceness`.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    descriptors: Sequence[int] = ()
    groups: Sequence[str] = ()
    limits: Mapping[int, tuple[int, int]] = attrs.field(factory=dict)
    niceness: int = 0


@attrs.frozen
class Layers:
    """What an overlay consists of: what is under it, what changes, and a place for the kernel.

    It is mounted over `upper`, for the program that is started, and nobody else.
    """

    lower: Path
    upper: Path
    work: Path


def _words(launch: Launch, layers: Layers | None) -> bytes:
    return launcher.encode(
        map(os.fsencode, (layers.lower, layers.upper, layers.work) if layers else ()),
        map(os.fsencode, launch.groups),
        (f"{number}:{soft}:{hard}".encode() for number, (soft, hard) in launch.limits.items()),
        map(os.fsencode, launch.argv),
        (os.fsencode(f"{name}={value}") for name, value in launch.environment.items()),
        [os.fsencode(launch.directory), b"%d" % launch.niceness],
    )


@attrs.frozen
class Launcher:
    """The process of `launcher`, and the connection to it."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    def ended(self) -> ConnectionError:
        """Return the error of one that has ended: what it has said of that, if it has."""
        with contextlib.suppress(OSError):
            # First of all there is an error to be had, where an order was not taken any more.
            self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            number = int(self.connection.recv(REPORT, socket.MSG_DONTWAIT) or 0)
            if number:
                return ConnectionResetError(number, f"{_NO_MORE}: {os.strerror(number)}")
        return ConnectionResetError(errno.ECONNRESET, ENDED)

    def close(self) -> None:
        """End it, and its spare, even if they hang. What it has started lives on."""
        self.connection.close()
        # Its number is that of the group of both, and nobody else's until it was waited for.
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start_launcher(*, mounting: bool, user: User | None = None) -> Launcher:
    """Start the process, as `user` if one is given. Raises OSError.

    One that is `mounting` is in a user namespace of its own. The thread that calls this is the
    parent of all that is started by it: what wants to end with its parent ends with this thread.
    """
    errors = list[OSError]()
    for python in dict.fromkeys(_PYTHONS):
        argv = [*(_UNSHARE if mounting else ()), python]
        try:
            try:
                return _start(argv, user)
            except ConnectionError:  # somebody has killed it
                log.warn("{what} as it began: another one is started", what=ENDED)
                return _start(argv, user)
        except OSError as error:
            errors.append(error)
    # One that could be executed, and has just died, is what is wrong; others never did.
    died = [error for error in errors if isinstance(error, ConnectionError)]
    raise OSError(None, "; ".join(dict.fromkeys(str(e.strerror or e) for e in died or errors)))


def _start(python: Sequence[str], user: User | None) -> Launcher:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        theirs,
        _in_memory("source", _SOURCE) as source,
        _in_memory("complaint") as complaint,
    ):
        try:
            ours.settimeout(_PATIENCE)
            process = subprocess.Popen(
                [*python, "-I", "-S", "/proc/self/fd/0", NAME],
                env={},
                cwd="/",
                stdin=source,
                stdout=theirs.fileno(),
                stderr=complaint,
                start_new_session=True,  # no key on a terminal ends it before the daemon does
                user=user.uid if user else None,
                group=user.gid if user else None,
                extra_groups=() if user else None,
            )
        except OSError:
            ours.close()
            raise
        theirs.close()
        started = Launcher(process, ours)
        try:
            if ours.recv(len(launcher.READY)) == launcher.READY:
                return started
            said = os.pread(complaint, _COMPLAINT, 0).decode(errors="replace").strip()
            if not said:
                raise ConnectionResetError(errno.ECONNRESET, ENDED)
            raise OSError(None, said.rpartition("\n")[2])
        except OSError:
            started.close()
            raise


@contextlib.contextmanager
def _in_memory(name: str, content: bytes = b"") -> Iterator[int]:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.pwrite(descriptor, content, 0)
        yield descriptor
    finally:
        os.close(descriptor)


class Launching:
    """Starts programs by a launcher, which is replaced when it has ended."""

    def __init__(self, *, mounting: bool = False, user: User | None = None) -> None:
        self._mounting = mounting
        self._user = user
        self._launcher: Launcher | None = None
        self._lock = Lock()

    def open(self) -> None:
        """Start the launcher, which otherwise the first program does. Raises OSError."""
        with self._lock:
            self._current()

    def start(self, launch: Launch, layers: Layers | None = None) -> tuple[Started, Overlay | None]:
        """Start a program; with `layers` return their overlay, too, whose top the caller closes.

        Raises OSError where it cannot be started, and NotMounted where that is for the overlay.
        """
        try:
            return self._start(launch, layers)
        except (ConnectionError, TimeoutError) as error:
            # It cannot begin any more: its report would be refused.
            log.warn("{what}: another one is started", what=error.strerror)
            if layers is not None:  # the kernel takes no work directory that it has had before
                remove(layers.work)
                layers.work.mkdir()
            return self._start(launch, layers)

    def _start(self, launch: Launch, layers: Layers | None) -> tuple[Started, Overlay | None]:
        report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        report.settimeout(_PATIENCE)
        with contextlib.ExitStack() as reading, report:
            with contextlib.ExitStack() as writing:
                writing.enter_context(theirs)
                words = writing.enter_context(_in_memory("words", _words(launch, layers)))
                stdout, stderr = (open_pipe(reading, writing) for _ in range(2))
                given = [words, theirs.fileno(), stdout[1], stderr[1], *launch.descriptors]
                asked = self._ask(given)
            try:
                pid, overlay = reported(report)
            except TimeoutError:
                self._drop(asked)
                raise TimeoutError(errno.ETIMEDOUT, _HANGS) from None
            except ConnectionError:
                error = asked.ended()
                self._drop(asked)
                raise error from None
            if overlay is not None:
                reading.callback(os.close, overlay.top)
            started = taken_over(pid, stdout[0], stderr[0])
            reading.pop_all()
            return started, overlay

    def _ask(self, descriptors: Sequence[int]) -> Launcher:
        """Send an order, and return to whom."""
        with self._lock:
            try:
                asked = self._current()
            except OSError as error:
                # Its words may have paths of this machine in them, and go to clients.
                log.error("{what}: {error}", what=_NONE, error=error.strerror)  # noqa: TRY400
                raise OSError(error.errno, _NONE) from None
            try:
                socket.send_fds(asked.connection, [b"\n"], descriptors)
            except (ConnectionError, TimeoutError):
                why = asked.ended()
                self._end()
                raise why from None
            return asked

    def _current(self) -> Launcher:
        if self._launcher is None:
            self._launcher = start_launcher(mounting=self._mounting, user=self._user)
        return self._launcher

    def _drop(self, launcher: Launcher) -> None:
        """End one that is of no use any more, unless somebody else has done so."""
        with self._lock:
            if self._launcher is launcher:
                self._end()

    def close(self) -> None:
        """End the launcher; what was started runs on."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None
