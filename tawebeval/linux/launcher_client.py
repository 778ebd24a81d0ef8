"""The client of `launcher`, a small process that starts programs for the daemon.

The daemon is large and has threads, so forking it is slow, and Python code between fork and exec is
unsafe. The launcher does this work in a few lines of Python: it mounts overlays, enters cgroups and
sets limits. `LauncherClient` starts the launcher, sends it requests and replaces it when it ends.
All methods block: for some milliseconds, and no longer than `LAUNCHER_TIMEOUT`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock

import attrs
from twisted.logger import Logger

from tawebeval.linux import launcher
from tawebeval.linux.child import StartedProcess, open_child_pidfd, open_pipe
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.keeper_client import KeeperChild, RunningKeeper, keep_bundle
from tawebeval.linux.keeper_client import start_program as start_in_keeper
from tawebeval.linux.privileges import User

_ENDED = "the launcher of evaluators has ended"

_MESSAGE = 8 * 1024  # bytes: more than a message with one path


class OverlayMountError(OSError):
    """The failure to mount an overlay."""


@attrs.frozen
class MountedOverlay:
    """A mounted overlay: a descriptor of its top directory, and the devices of its files."""

    root_descriptor: int
    device_numbers: frozenset[int]


def read_launch_report(report: socket.socket) -> tuple[int, MountedOverlay | None]:
    """Return the number of the started child, and its overlay, if any.

    Raises: OSError. ConnectionError and TimeoutError mean that the launcher is of no use any more.
    """
    pid, devices, tops = 0, list[int](), list[int]()
    try:
        while True:
            message, descriptors = launcher.receive_message(report, _MESSAGE, 1)
            tops += descriptors
            if not message:
                break
            numbers, *failure = message.split(b"\0")
            pid, *devices = map(int, numbers.split())
            if failure:
                raise _failure(*failure)
        if not pid:
            raise ConnectionResetError(errno.ECONNRESET, _ENDED)
    except OSError as error:
        for top in tops:
            os.close(top)
        if pid:
            os.kill(pid, signal.SIGKILL)
            if not isinstance(error, TimeoutError):  # after that the child may hang in the kernel
                with contextlib.suppress(ChildProcessError):  # a child of the keeper
                    os.waitpid(pid, 0)
        raise
    return pid, MountedOverlay(tops[0], frozenset(devices)) if tops else None


def _failure(step: bytes, number: bytes, path: bytes) -> OSError:
    kind = OverlayMountError if step == launcher.MOUNT else OSError
    return kind(int(number), os.strerror(int(number)), os.fsdecode(path) or None)


UNSHARE_COMMAND = (
    "/usr/bin/unshare",
    "--user",
    "--map-current-user",
    "--mount",
    "--keep-caps",
    "--",
)
# The service user may lack permission to read the daemon's own Python.
PYTHON_CANDIDATES = (sys.executable, "/usr/bin/python3")
LAUNCHER_SOURCE = Path(launcher.__file__).read_bytes()  # now, for the same reason
KEPT_LAUNCHER_PREFIX = f"launcher.{launcher.PROTOCOL_VERSION}."
"""The beginning of the names of a keeper's bundles with a launcher that this release can use."""
LAUNCHER_PROCESS_NAME = "tawebeval-launcher"
"""The name of the process in process lists."""

FIRST_PASSED_DESCRIPTOR = 3
"""The number of the first of a program's `descriptors`; the others follow."""

LAUNCHER_TIMEOUT = 10.0  # seconds for the process to start, and to answer
_ATTEMPTS = 6  # to start a program, if launchers are killed
_COMPLAINT = 8 * 1024  # bytes of what it says before it fails
_HANGS = "the launcher of evaluators does not answer"
_NONE = "the launcher of evaluators cannot be started"
_NO_MORE = "the launcher of evaluators cannot start a process"

log = Logger()


@attrs.frozen
class LaunchSpec:
    """A program to start, with everything that its process gets.

    - `descriptors`: the program has them under the numbers from `FIRST_PASSED_DESCRIPTOR` on.
    - `cgroup_procs_files`: the files of cgroups to which the process writes "0" to enter.
    - `rlimits`: soft and hard limits, by the RLIMIT numbers of `resource`.
    - `has_own_process_limit`: the process has a user namespace of its own, so that it shares no
      limit of a user with others.
    - `niceness`: the increment over the daemon's nice value.
    - `needed_paths`: the paths that the program needs, besides the layers of its tree; None if it
      may need any.
    - `overlay_mount_pid`: a started program, by its number, that mounted an overlay and still runs:
      the process sees its mounts.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    descriptors: Sequence[int] = ()
    cgroup_procs_files: Sequence[str] = ()
    rlimits: Mapping[int, tuple[int, int]] = attrs.field(factory=dict)
    niceness: int = 0
    has_own_process_limit: bool = False
    overlay_mount_pid: int | None = None
    needed_paths: Sequence[str] | None = None


@attrs.frozen
class OverlayLayers:
    """The directories of an overlay mount (the kernel's filesystems/overlayfs).

    The overlay is mounted over `upper`, and visible to the started program only.
    """

    lower: Path
    upper: Path
    work: Path


def _words(launch: LaunchSpec, layers: OverlayLayers | None, *, few_mounts: bool) -> bytes:
    mounts: Sequence[str | Path] = ()
    if layers is not None:
        mounts = (layers.lower, layers.upper, layers.work)
    elif launch.overlay_mount_pid is not None:
        mounts = (f"/proc/{launch.overlay_mount_pid}/ns/mnt",)
    return launcher.encode_launch_request(
        map(os.fsencode, mounts),
        map(os.fsencode, launch.cgroup_procs_files),
        (f"{number}:{soft}:{hard}".encode() for number, (soft, hard) in launch.rlimits.items()),
        map(os.fsencode, launch.argv),
        (os.fsencode(f"{name}={value}") for name, value in launch.environment.items()),
        [
            os.fsencode(launch.directory),
            b"%d" % launch.niceness,
            b"%d" % few_mounts,
            b"%d" % launch.has_own_process_limit,
        ],
    )


_KERNEL_PATHS = ("/proc", "/dev")  # which bwrap needs itself


def is_launcher(pid: int) -> bool:
    """Tell whether a process is a launcher, or one of its spare processes."""
    try:
        return LAUNCHER_PROCESS_NAME.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(
            b"\0"
        )
    except OSError:
        return False


def _list_outermost(paths: Iterable[str]) -> Sequence[str]:
    """Return those paths that exist, have no link in them, and lie below no other one."""
    found = list[str]()
    for path in sorted({path for path in paths if path == os.path.realpath(path)}):
        is_below = any(path.startswith(f"{one}/") for one in found)
        if not is_below and path != "/" and os.path.exists(path):
            found.append(path)
    return found


def _identify(path: str) -> tuple[int, int] | None:
    """Return what tells a file from another one in its place; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@attrs.frozen
class LauncherProcess:
    """A process that runs `launcher`, and the connection to it."""

    process: subprocess.Popen[bytes] | KeeperChild
    connection: socket.socket

    def read_error(self) -> ConnectionError:
        """Return the error of a launcher that has ended, with its errno if it has sent one."""
        with contextlib.suppress(OSError):
            # A request that the launcher did not take leaves an error on the socket: clear it.
            self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            number = int(self.connection.recv(_MESSAGE, socket.MSG_DONTWAIT) or 0)
            if number:
                return ConnectionResetError(number, f"{_NO_MORE}: {os.strerror(number)}")
        return ConnectionResetError(errno.ECONNRESET, _ENDED)

    def disconnect(self) -> None:
        """Close the connection; the launcher of a keeper lives on."""
        self.connection.close()
        if isinstance(self.process, KeeperChild):
            os.close(self.process.pidfd)

    def kill(self) -> None:
        """Kill the launcher and its spare process. Programs that it has started live on."""
        self.connection.close()
        if isinstance(self.process, KeeperChild):
            self.process.kill()
            return
        # Its number is the process group of both, and not free before the launcher is reaped.
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start_launcher(
    *, mounting: bool, user: User | None = None, keeper: str | None = None
) -> LauncherProcess:
    """Start the launcher, as `user` if one is given. Raises: OSError.

    With `mounting` the launcher runs in a user namespace of its own, in which it may mount. The
    calling thread becomes the parent of all started programs: a program with PR_SET_PDEATHSIG ends
    with this thread. With the path of a `keeper` its process becomes the parent instead, and the
    launcher runs as the keeper's user.
    """
    errors = list[OSError]()
    for python in dict.fromkeys(PYTHON_CANDIDATES):
        argv = [*(UNSHARE_COMMAND if mounting else ()), python]
        try:
            try:
                return start_process(argv, user, keeper)
            except ConnectionError:
                log.warn("{what} at its start; starting another one", what=_ENDED)
                return start_process(argv, user, keeper)
        except OSError as error:
            errors.append(error)
    # A Python that started and then died explains more than one that could not be executed.
    died = [error for error in errors if isinstance(error, ConnectionError)]
    said = "; ".join(dict.fromkeys(str(e.strerror or e) for e in died or errors))
    raise OSError(errno.ECONNRESET if died else None, said)  # the former is a ConnectionError


def start_process(
    python: Sequence[str], user: User | None, keeper: str | None = None
) -> LauncherProcess:
    """Start the launcher with this Python. Raises: OSError, TimeoutError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        theirs,
        _in_memory("source", LAUNCHER_SOURCE) as source,
        _in_memory("complaint") as complaint,
    ):
        try:
            ours.settimeout(LAUNCHER_TIMEOUT)
            argv = [*python, "-I", "-S", "/proc/self/fd/0", LAUNCHER_PROCESS_NAME]
            streams = (source, theirs.fileno(), complaint)
            process = (
                _start_child(argv, streams, user)
                if keeper is None
                else start_in_keeper(keeper, argv, streams)
            )
        except OSError:
            ours.close()
            raise
        theirs.close()
        started = LauncherProcess(process, ours)
        try:
            if ours.recv(len(launcher.READY_MESSAGE)) == launcher.READY_MESSAGE:
                return started
            said = os.pread(complaint, _COMPLAINT, 0).decode(errors="replace").strip()
            if not said:
                raise ConnectionResetError(errno.ECONNRESET, _ENDED)
            raise OSError(None, said.rpartition("\n")[2])
        except OSError:
            started.kill()
            raise


def _start_child(
    argv: Sequence[str], streams: Sequence[int], user: User | None
) -> subprocess.Popen[bytes]:
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        argv,
        env={},
        cwd="/",
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,  # a key on the terminal shall not end it before the daemon
        user=user.uid if user else None,
        group=user.gid if user else None,
        extra_groups=() if user else None,
    )


@contextlib.contextmanager
def _in_memory(name: str, content: bytes = b"") -> Iterator[int]:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.pwrite(descriptor, content, 0)
        yield descriptor
    finally:
        os.close(descriptor)


class LauncherClient:
    """The client of one launcher at a time, which is replaced when it has ended.

    With a `keeper` the started programs are the keeper's children (`linux.keeper`), and so is the
    launcher, which outlives this process: only it can enter the mounts of what it has started.

    A program that needs nothing but `paths` and what is below them sees no mount besides.
    """

    def __init__(
        self,
        *,
        mounting: bool = False,
        user: User | None = None,
        keeper: RunningKeeper | None = None,
        paths: Sequence[str] = (),
    ) -> None:
        self._mounting = mounting
        # Where few mounts are.
        self._paths = _list_outermost((*_KERNEL_PATHS, *paths)) if mounting and paths else ()
        self._beginnings = tuple(f"{path}/" for path in self._paths)
        self._identities: list[tuple[int, int] | None] = []  # of the paths, as they are there
        self._has_few_mounts = False
        self._user = user
        self._keeper = keeper
        self._may_take_over = True
        self.launcher: LauncherProcess | None = None
        self._lock = Lock()

    def start_launcher(self) -> None:
        """Start the launcher now; otherwise `start_program` does. Raises: OSError."""
        with self._lock:
            self._renew_mounts(self._current())

    def start_program(
        self, launch: LaunchSpec, layers: OverlayLayers | None = None
    ) -> tuple[StartedProcess, MountedOverlay | None]:
        """Start a program; with `layers` mount their overlay, whose top the caller closes.

        Raises: OSError, if the program cannot be started; OverlayMountError, if that is for the
        overlay.
        """
        attempts_left = _ATTEMPTS
        while True:
            try:
                return self._start(launch, layers)
            except (ConnectionError, TimeoutError) as error:
                # One that hangs has taken `LAUNCHER_TIMEOUT`: that is waited for twice at most.
                attempts_left -= _ATTEMPTS // 2 if isinstance(error, TimeoutError) else 1
                if attempts_left <= 0:
                    raise
                # The program cannot begin any more: its report would be refused.
                log.warn("{what}; starting another one", what=error.strerror)
                if layers is not None:  # the kernel refuses a work directory that was used before
                    remove_tree(layers.work)
                    layers.work.mkdir()

    def _start(
        self, launch: LaunchSpec, layers: OverlayLayers | None
    ) -> tuple[StartedProcess, MountedOverlay | None]:
        if self._paths:
            with contextlib.suppress(OSError):  # which is raised below
                self.start_launcher()
        few_mounts = layers is not None and self._needs_few_mounts(launch, layers)
        report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        report.settimeout(LAUNCHER_TIMEOUT)
        with contextlib.ExitStack() as reading, report:
            with contextlib.ExitStack() as writing:
                writing.enter_context(theirs)
                words = writing.enter_context(
                    _in_memory("words", _words(launch, layers, few_mounts=few_mounts))
                )
                stdout, stderr = (open_pipe(reading, writing) for _ in range(2))
                given = [words, theirs.fileno(), stdout[1], stderr[1], *launch.descriptors]
                asked = self._ask(given)
            try:
                pid, overlay = read_launch_report(report)
            except TimeoutError:
                self.end_launcher(asked)
                raise TimeoutError(errno.ETIMEDOUT, _HANGS) from None
            except ConnectionError:
                error = asked.read_error()
                self.end_launcher(asked)
                raise error from None
            if overlay is not None:
                reading.callback(os.close, overlay.root_descriptor)
            started = open_child_pidfd(pid, stdout[0], stderr[0])
            reading.pop_all()
            return started, overlay

    def _ask(self, descriptors: Sequence[int]) -> LauncherProcess:
        """Send a request; return the launcher that got it."""
        with self._lock:
            try:
                asked = self._current()
            except OSError as error:
                # The text may have paths of this machine in it, and would go to clients.
                log.error("{what}: {error}", what=_NONE, error=error.strerror)  # noqa: TRY400
                raise OSError(error.errno, _NONE) from None
            try:
                socket.send_fds(asked.connection, [b"\n"], descriptors)
            except (ConnectionError, TimeoutError):
                why = asked.read_error()
                self._end()
                raise why from None
            return asked

    def _current(self) -> LauncherProcess:
        if self.launcher is None:
            self._identities, self._has_few_mounts = [], False
            keeper = self._keeper
            if keeper is None:
                self.launcher = start_launcher(mounting=self._mounting, user=self._user)
            else:
                self.launcher = self._take_over(keeper) or self._start_in_keeper(keeper)
        return self.launcher

    def _renew_mounts(self, asked: LauncherProcess) -> None:
        """Have a launcher show the few mounts anew if one of their paths is another directory."""
        identities = [_identify(path) for path in self._paths]
        if identities != self._identities:
            self._has_few_mounts = False
            self._has_few_mounts = self._reduce_mounts(asked)
            self._identities = identities

    def _reduce_mounts(self, asked: LauncherProcess) -> bool:
        """Have a launcher make a mount namespace with few mounts; return whether it can."""
        paths = map(os.fsencode, self._paths)
        request = launcher.encode_launch_request(paths, (), (), (), (), [b"/", b"0", b"0", b"0"])
        try:
            report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with report:
                report.settimeout(LAUNCHER_TIMEOUT)
                with theirs, _in_memory("words", request) as words:
                    socket.send_fds(asked.connection, [b"\n"], [words, theirs.fileno()])
                pid, _ = read_launch_report(report)
        except OSError as error:
            log.debug("programs see all mounts of the machine: {why}", why=error.strerror)
            return False
        with contextlib.suppress(ChildProcessError):  # a child of the keeper
            os.waitpid(pid, 0)
        return True

    def _needs_few_mounts(self, launch: LaunchSpec, layers: OverlayLayers) -> bool:
        """Tell whether the few mounts, if they are there, do for a program and its tree."""
        if launch.needed_paths is None or not self._has_few_mounts:
            return False
        needed = (*launch.needed_paths, *map(str, (layers.lower, layers.upper, layers.work)))
        return all(map(self._is_below_few, needed))

    def _is_below_few(self, path: str) -> bool:
        """Tell whether a path, and what its links lead to, are below the few paths.

        A link, such as that of an environment, may lead elsewhere. No path is looked at besides the
        few: its disk may hang.
        """
        return f"{path}/".startswith(self._beginnings) and (
            f"{os.path.realpath(path)}/".startswith(self._beginnings)
        )

    @property
    def _bundle_name(self) -> str:
        return KEPT_LAUNCHER_PREFIX + ("mounting" if self._mounting else "plain")

    def _take_over(self, keeper: RunningKeeper) -> LauncherProcess | None:
        """Return the launcher of an earlier process of the daemon, once, if it lives."""
        bundle = keeper.launcher_bundles.get(self._bundle_name)
        if bundle is None or not self._may_take_over:
            return None
        self._may_take_over = False
        connection = socket.socket(fileno=bundle.descriptors[0])
        connection.settimeout(LAUNCHER_TIMEOUT)
        try:
            return LauncherProcess(KeeperChild(bundle.pid, os.pidfd_open(bundle.pid)), connection)
        except ProcessLookupError:
            connection.close()
            return None

    def _start_in_keeper(self, keeper: RunningKeeper) -> LauncherProcess:
        started = start_launcher(mounting=self._mounting, keeper=keeper.path)
        keep_bundle(
            keeper.path, self._bundle_name, [started.connection.fileno()], started.process.pid
        )
        return started

    def end_launcher(self, launcher: LauncherProcess) -> None:
        """End a launcher, unless it was replaced already."""
        with self._lock:
            if self.launcher is launcher:
                self._end()

    def close(self) -> None:
        """End the launcher, unless a keeper has it; started programs run on."""
        with self._lock:
            if self._keeper is not None and self.launcher is not None:
                self.launcher.disconnect()
                self.launcher = None
            self._end()

    def _end(self) -> None:
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher = None
