"""The client of `starter`, the process that starts programs and outlives the daemon.

`StarterClient.start_program` and the other calls that block use connections that no other thread
uses meanwhile, so that any thread may make them. From `attach_reactor` on, the reactor serves one
connection more, which brings notices of programs that end, and takes requests that are not
answered.

`build_program_archive` makes programs of some modules of tawebeval: archives (zipapp) or
directories that Python executes with `python3 -I -S` where tawebeval is not installed: as another
user, on another machine, or for longer than this version is installed. Their modules import the
standard library, and each other.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from zipfile import ZipFile, ZipInfo

import attrs
import msgspec
from twisted.internet.interfaces import IReadWriteDescriptor
from twisted.internet.main import CONNECTION_DONE
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from tawebeval.errors import ConfigurationError
from tawebeval.linux import kernel_files, starter
from tawebeval.linux.child import has_process_ended
from tawebeval.linux.starter import LaunchSpec


def collect_program_files(*modules: ModuleType) -> Mapping[str, bytes]:
    """Return the files of a program: `main()` of the first module, which imports the others.

    Called when the daemon begins: later its user may lack the permission to read the sources.
    """
    files = {"__main__.py": f"from {modules[0].__name__} import main\n\nmain()\n".encode()}
    for module in modules:
        path = module.__name__.replace(".", "/")
        files[f"{path}.py"] = Path(module.__file__ or "").read_bytes()
        files |= {f"{parent}/__init__.py": b"" for parent in list(Path(path).parents)[:-1]}
    return files


def build_program_archive(*modules: ModuleType) -> bytes:
    """Return the archive of a program, of the files of `collect_program_files`."""
    archive = io.BytesIO()
    with ZipFile(archive, "w") as file:
        for name, content in collect_program_files(*modules).items():
            file.writestr(ZipInfo(name), content)  # without the present time
    return archive.getvalue()


ANSWER_TIMEOUT = 10  # seconds for an answer
STARTER_ARCHIVE = build_program_archive(starter, kernel_files)
STARTER_ENDED_MESSAGE = "the starter of evaluators has ended"
_HANGS = "the starter of evaluators does not answer"
_VERSION = (
    "the starter of evaluators speaks version {} of its protocol, and this daemon version {};"
    " restart tawebeval-starter.service, which ends all running evaluations"
)
_LOOK = 0.002  # seconds between two looks whether a starter listens, or a program has ended
_READ = 64 * 1024
_MAX_REQUESTS = 4096  # that wait for a starter which reads none
_PEER = struct.Struct("3i")  # pid, uid and gid
_TIMEOUT = struct.pack("ll", ANSWER_TIMEOUT, 0)  # seconds and microseconds

log = Logger()


@attrs.frozen
class StartedProgram:
    """A program that the starter has started; `directory` has its files, and is its name.

    `start_time_ticks` is field 22 of proc(5)'s stat: with `pid` it names one process of this boot.
    `overlay_descriptor` is one of the top directory of its overlay; None without.
    """

    directory: Path
    pid: int
    start_time_ticks: int
    overlay_descriptor: int | None = None


class ProgramState(msgspec.Struct, frozen=True):
    """What the starter knows of a program: see `starter.Program.describe_state`.

    With `is_unknown` it knows nothing. `wait_status` and `rusage` are None while the program runs.
    """

    pid: int = 0
    start_time_ticks: int = 0
    wait_status: int | None = None
    rusage: tuple[int | float, ...] | None = None  # so that counts stay integers
    is_output_complete: bool = False
    write_errno: int | None = None
    slow_read_cpu_seconds: float = 0.0
    broker_pid: int | None = None
    broker_error: str | None = None
    is_unknown: bool = False


ProgramStateListener = Callable[[ProgramState | None], object]
"""Function that takes the state of a program; None at the end of the connection to the starter."""


def read_exit_file(directory: Path) -> ProgramState | None:
    """Return how a program has ended; None if it has not, or was lost. Blocks."""
    try:
        return msgspec.json.decode((directory / "exit").read_bytes(), type=ProgramState)
    except (OSError, msgspec.MsgspecError):
        return None


def execute_starter(path: Path, cgroups: str, environment: Mapping[str, str]) -> NoReturn:
    """Become the starter, which listens at `path`. Raises: ConfigurationError.

    `cgroups` is for `StarterClient.cgroups`. Of the environment the starter has only what
    sd_notify(3) needs.
    """
    given = {starter.CGROUP_DESCRIPTION_VARIABLE: cgroups}
    if "NOTIFY_SOCKET" in environment:
        given["NOTIFY_SOCKET"] = environment["NOTIFY_SOCKET"]
    argv = _list_arguments(path)
    os.dup2(_make_program_file(), 0)
    os.execve(argv[0], argv, given)  # noqa: S606


def spawn_starter(path: Path) -> None:
    """Start a starter. Blocks.

    It ends with the calling thread, whatever ends that (PR_SET_PDEATHSIG). Its directory is made,
    and has what it says in the file `log`. Raises: OSError, ConfigurationError.
    """
    argv = [*_list_arguments(path), str(os.getpid())]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    program = _make_program_file()
    said = os.open(path.parent / "log", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            argv,
            env={},
            cwd="/",
            stdin=program,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,  # a key on the terminal shall not end it before the daemon
        )
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while process.poll() is None:
            with (
                contextlib.suppress(FileNotFoundError, ConnectionRefusedError),
                _connect(path) as connection,
            ):
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
                if _PEER.unpack(peer)[0] == process.pid:  # else another starter listens
                    process.returncode = 0  # so that Popen does not wait for it
                    return
            if time.monotonic() > deadline:
                process.kill()
                raise TimeoutError(errno.ETIMEDOUT, _HANGS)
            time.sleep(_LOOK)
        words = os.pread(said, _READ, 0).decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(
            None, f"the starter of evaluators cannot be started: {words or STARTER_ENDED_MESSAGE}"
        )
    finally:
        os.close(program)
        os.close(said)


def _make_program_file() -> int:
    program = os.memfd_create("program", os.MFD_CLOEXEC)
    os.pwrite(program, STARTER_ARCHIVE, 0)
    return program


def _list_arguments(path: Path) -> list[str]:
    """Return the arguments of a starter whose stdin is its program. Raises: ConfigurationError.

    This user may lack permission to execute the Python of this process.
    """
    for python in (sys.executable, "/usr/bin/python3"):
        options, nothing = [python, "-I", "-S"], subprocess.DEVNULL
        with contextlib.suppress(OSError):
            tried = subprocess.run([*options, "-c", ""], env={}, stdin=nothing, stderr=nothing)
            if tried.returncode == 0:
                return [*options, "/proc/self/fd/0", starter.PROCESS_NAME, str(path)]
    raise ConfigurationError("no Python that the user can execute", "install /usr/bin/python3")


@implementer(IReadWriteDescriptor)
class StarterClient:
    """The daemon's connections to the starter.

    `path` is the starter's socket, `pid` the number of its process, `cgroups` the description of
    the cgroups that it has opened for evaluations, "" without. `mount_problem` is why it can mount
    no overlay; None if it can.
    """

    def __init__(self, path: Path, answer: Mapping[str, Any]) -> None:
        self.path = path
        self.pid: int = answer["pid"]
        self.cgroups: str = answer["cgroups"]
        self.mount_problem: str | None = answer["mount_problem"]
        self._pidfd: int | None = os.pidfd_open(self.pid)
        self._connection: socket.socket | None = None
        self._reactor: Any = None
        self._on_lost: Callable[[], object] = lambda: None
        self._listeners: dict[str, ProgramStateListener] = {}
        self._requests: deque[bytes] = deque()  # that the socket has yet to take
        self._idle: list[socket.socket] = []  # connections of `_call`: one more takes 20 calls

    @classmethod
    def connect(cls, path: Path) -> StarterClient:
        """Connect to a running starter. Blocks. Raises: OSError, ConfigurationError."""
        with _connect(path) as connection:
            answer, _ = _ask(connection, {"request": "version"})
        if answer["version"] != starter.PROTOCOL_VERSION:
            raise ConfigurationError(_VERSION.format(answer["version"], starter.PROTOCOL_VERSION))
        return cls(path, answer)

    # Calls that block, for any thread

    def start_program(
        self, directory: Path, launch: LaunchSpec, overlay_directories: Sequence[Path] = ()
    ) -> StartedProgram:
        """Start a program whose files are in `directory`, which is made. Blocks.

        `overlay_directories` are those of `LaunchSpec`. The caller closes the descriptor of the
        overlay. Raises: OSError, if the program cannot be started.
        """
        directory.mkdir(mode=0o700, exist_ok=True)
        launch = launch._replace(overlay_directories=list(map(str, overlay_directories)))
        content = json.dumps(launch.build_json_object()).encode()
        if len(content) > starter.MAX_START_FILE_BYTES:
            raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with open(os.open(directory / "start", flags, 0o600), "wb") as file:
            file.write(content)
        try:
            answer, tops = self._call({"request": "start", "name": str(directory)})
        except TimeoutError:
            with contextlib.suppress(OSError):
                self.forget_program_blocking(directory)
            raise
        top = next(iter(tops), None)
        return StartedProgram(directory, answer["pid"], answer["start_time_ticks"], top)

    def reopen_overlay(self, directory: Path) -> int | None:
        """Return a descriptor of a running program's overlay; None without. Blocks."""
        with contextlib.suppress(OSError):
            _, tops = self._call({"request": "tree", "name": str(directory)})
            return next(iter(tops), None)
        return None

    def list_programs(self) -> set[Path]:
        """Return the names of all programs. Blocks. Raises: OSError."""
        found = set()
        with _connect(self.path) as connection:
            notice, _ = _receive(connection, {"request": "list"})
            while notice["notice"]:
                found.add(Path(notice["notice"]))
                notice, _ = _receive(connection)
        return found

    def wait_for_program(self, directory: Path, timeout: float) -> tuple[int, bytes]:
        """Return the exit status of a program, negative for a signal, and what it printed. Blocks.

        Raises: OSError; TimeoutError, if it has not ended after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (state := read_exit_file(directory)) is None or not state.is_output_complete:
            if not self.is_starter_alive:
                raise ConnectionResetError(errno.ECONNRESET, STARTER_ENDED_MESSAGE)
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"it did not end within {timeout:g} seconds")
            time.sleep(_LOOK)
        assert state.wait_status is not None, "it has ended"
        printed = b"".join((directory / name).read_bytes() for name in ("stdout", "stderr"))
        return os.waitstatus_to_exitcode(state.wait_status), printed

    def forget_program_blocking(self, directory: Path) -> None:
        """Kill a program, and drop what the starter knows of it. Blocks. Raises: OSError."""
        self._call({"request": "forget", "name": str(directory)})

    def stop_starter(self, number: int = signal.SIGTERM) -> None:
        """End the starter by a signal, and return after its end. Blocks.

        At SIGTERM it kills all programs first; at SIGKILL it notes no exit of its programs.
        """
        if self._pidfd is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll(ANSWER_TIMEOUT * 1000)
        with contextlib.suppress(ChildProcessError):  # of another process of the daemon
            os.waitpid(self.pid, os.WNOHANG)

    def _call(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], Sequence[int]]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = _connect(self.path)
        try:
            answer = _ask(connection, request)
        except BaseException:
            connection.close()  # a late answer must not become that of the next request
            raise
        self._idle.append(connection)
        return answer

    # In the reactor

    def attach_reactor(self, reactor: Any, on_lost: Callable[[], object] = lambda: None) -> None:
        """Let the reactor serve a connection. `on_lost` is called once when the starter ends.

        Blocks. Raises: OSError.
        """
        self._connection = _connect(self.path)
        _ask(self._connection, {"request": "attach"})
        self._reactor = reactor
        self._on_lost = on_lost
        reactor.addReader(self)

    @property
    def is_starter_alive(self) -> bool:
        """Whether the starter's process lives, connected or not."""
        return self._pidfd is not None and not has_process_ended(self._pidfd)

    def watch_program(self, directory: Path, listener: ProgramStateListener) -> None:
        """Tell `listener` the state of a program soon, and whenever it changes.

        `attach_reactor` was called before.
        """
        if self._connection is None:
            self._reactor.callLater(0, listener, None)
            return
        self._listeners[str(directory)] = listener
        self._send({"request": "look", "name": str(directory)})

    def unwatch_program(self, directory: Path) -> None:
        """Tell nothing of a program any more."""
        self._listeners.pop(str(directory), None)

    def signal_program(self, directory: Path, number: int) -> None:
        """Send a signal to the process group of a program, also after its own end."""
        self._send({"request": "signal", "name": str(directory), "number": number})

    def close_output(self, directory: Path) -> None:
        """Store what the pipes of a program hold now, and close them."""
        self._send({"request": "close", "name": str(directory)})

    def forget_program(self, directory: Path) -> None:
        """Kill a program if it runs, and drop what the starter knows of it."""
        self._send({"request": "forget", "name": str(directory)})

    def ignore_connection_loss(self) -> None:
        """Expect the end of the connection: `on_lost` is not called."""
        self._on_lost = lambda: None

    def close(self) -> None:
        """Close the connections; `on_lost` is not called."""
        self.ignore_connection_loss()
        self._lose()
        while self._idle:
            self._idle.pop().close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def fileno(self) -> int:
        """Return the connection's descriptor, -1 without a connection."""
        return -1 if self._connection is None else self._connection.fileno()

    def logPrefix(self) -> str:
        """Return the name for log lines."""
        return type(self).__name__

    def doRead(self) -> Any:
        """Read one notice; return the reason to close, if any."""
        if self._connection is None:
            return CONNECTION_DONE
        try:
            message = self._connection.recv(starter.MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return CONNECTION_DONE
        if not message:
            return CONNECTION_DONE
        notice = json.loads(message)
        listener = self._listeners.get(notice["notice"])
        if listener is not None:
            listener(msgspec.convert(notice, ProgramState))
        return None

    def connectionLost(self, reason: Failure) -> None:
        """Take the end of the connection."""
        self._lose()

    def doWrite(self) -> None:
        """Send the requests that wait."""
        try:
            while self._connection is not None and self._requests:
                self._connection.send(self._requests[0], socket.MSG_DONTWAIT)
                self._requests.popleft()
        except BlockingIOError:
            self._reactor.addWriter(self)
            return
        except OSError:  # it has ended, which `doRead` finds
            self._requests.clear()
        self._reactor.removeWriter(self)

    def _send(self, request: Mapping[str, Any]) -> None:
        """Send a request, or let it wait until the socket takes it; without a connection drop it.

        A starter that leaves too many waiting counts as lost.
        """
        if self._connection is None:
            return
        self._requests.append(json.dumps(request).encode())
        self.doWrite()
        if len(self._requests) > _MAX_REQUESTS:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _lose(self) -> None:
        if self._connection is None:
            return
        self._reactor.removeReader(self)
        self._reactor.removeWriter(self)
        self._requests.clear()
        self._connection.close()
        self._connection = None
        listeners, self._listeners = self._listeners, {}
        on_lost, self._on_lost = self._on_lost, lambda: None
        on_lost()
        for listener in listeners.values():
            listener(None)


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Not by settimeout(), with which connect(2) fails at once if other clients wait, too.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, _TIMEOUT)
        with kernel_files.shorten_socket_path(str(path)) as short:
            connection.connect(short)
    except BlockingIOError:
        connection.close()
        raise TimeoutError(errno.ETIMEDOUT, _HANGS) from None
    except OSError:
        connection.close()
        raise
    return connection


def _ask(
    connection: socket.socket, request: Mapping[str, Any]
) -> tuple[dict[str, Any], Sequence[int]]:
    """Return the answer to a request, and its descriptors. Blocks. Raises: OSError."""
    answer, received = _receive(connection, {"id": 0, **request})
    while "id" not in answer:
        answer, received = _receive(connection)
    if "error" in answer:
        raise OSError(answer["errno"], answer["error"], answer["path"])
    return answer, received


def _receive(
    connection: socket.socket, request: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], Sequence[int]]:
    """Send a request, if any; return the next message, and its descriptors. Blocks.

    Raises: OSError.
    """
    try:
        if request is not None:
            connection.send(json.dumps(request).encode())
        message, received = starter.receive_message(connection)
    except BlockingIOError:
        raise TimeoutError(errno.ETIMEDOUT, _HANGS) from None
    except (BrokenPipeError, ConnectionResetError):
        message = b""
    if not message:
        raise ConnectionResetError(errno.ECONNRESET, STARTER_ENDED_MESSAGE)
    return json.loads(message), received
