"""Child processes, and the end of processes that are nobody's children.

`spawn_child` starts the daemon's own children, git's commands, by `Popen`, which uses vfork.
`ChildProcess` drives a Twisted `ProcessProtocol` by their pipes. An evaluator's process is a
`tail.TailedProcess`.

`reactor.spawnProcess` is not used: it walks over every open descriptor in the reactor's thread,
forks if a directory is given, and looks at every child whenever one ends. Here a pidfd reports the
end of one child only.

Without a sandbox a process may leave its process group, its session and its parent, and, without
cgroups too, outlive a daemon that is killed. `kill_directory_processes` recognises it by a variable
of its environment, or a working directory, below the run's or the daemon's own directories. A
process that hides both stays; only a process namespace can promise more.
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
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.process import ProcessReader
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from tawebeval.linux.kernel_files import (
    list_descendant_pids,
    read_process_stat,
    send_signal,
)

STDOUT, STDERR = 1, 2


def has_process_ended(pidfd: int, timeout: float = 0) -> bool:
    """Tell whether a process has ended, reaped or not, or ends within `timeout` seconds."""
    poll = select.poll()  # not select(2), which takes no descriptor above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def make_exit_reason(status: int) -> Failure:
    """Return the reason for `ProcessProtocol.processExited`, by a status of wait(2)."""
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return Failure(ProcessDone(status))
    return Failure(ProcessTerminated(max(code, 0) or None, -code if code < 0 else None, status))


@implementer(IReadDescriptor)
class ChildProcess:
    """A running child of this process, the transport of its `ProcessProtocol`.

    It calls the protocol as a `tail.TailedProcess` does, but cannot be paused; there is no stdin to
    write to. The child leads a session and a process group.
    """

    def __init__(
        self,
        reactor: Any,
        protocol: ProcessProtocol,
        process: subprocess.Popen[bytes],
    ) -> None:
        """Take over a child.

        Raises: OSError, if there is no pidfd for it, or no epoll watch; then it is killed.
        """
        assert process.stdout is not None
        assert process.stderr is not None
        self._pipes: dict[int, IO[bytes]] = {STDOUT: process.stdout, STDERR: process.stderr}
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.communicate()
            raise
        process.returncode = 0  # so that Popen does not wait for it
        self.pid = process.pid
        self._protocol = protocol
        self._reason: Failure | None = None  # of its end
        self._has_ended = False
        self._readers: list[Any] = []
        self._reactor = reactor
        try:
            for name, pipe in self._pipes.items():
                self._readers.append(ProcessReader(reactor, self, name, pipe.fileno()))
            reactor.addReader(self)
        except OSError:
            self._give_up()
            raise
        protocol.makeConnection(self)

    def _give_up(self) -> None:
        """Kill the child, of whose end or output nothing would tell. Blocks, hardly."""
        for reader in self._readers:
            reader.stopReading()
        for pipe in self._pipes.values():
            pipe.close()
        self.signal_group(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._pidfd)

    @property
    def is_running(self) -> bool:
        """Whether the process itself runs, whatever its own children do."""
        return self._reason is None

    def childDataReceived(self, name: int, data: bytes) -> None:
        """Pass on output of the process."""
        self._protocol.childDataReceived(name, data)

    def childConnectionLost(self, name: int, reason: Failure) -> None:
        """Take the end of stdout or stderr."""
        self._pipes.pop(name).close()
        self._protocol.childConnectionLost(name)
        self._check_end()

    def fileno(self) -> int:
        """Return the pidfd, which is readable at the end of the child."""
        return self._pidfd

    def logPrefix(self) -> str:
        """Return the name for log lines."""
        return type(self).__name__

    def connectionLost(self, reason: Failure) -> None:
        """Do nothing: the reactor stops."""

    def doRead(self) -> None:
        """Reap the child."""
        self._reactor.removeReader(self)
        os.close(self._pidfd)
        self._pidfd = -1
        _, status = os.waitpid(self.pid, 0)
        self._reason = make_exit_reason(status)
        self._protocol.processExited(self._reason)
        self._check_end()

    def _check_end(self) -> None:
        if self._reason is not None and not self._pipes and not self._has_ended:
            self._has_ended = True
            self._protocol.processEnded(self._reason)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process group, also after the child's own end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def read_remaining_output(self) -> None:
        """Read what the pipes hold now, and close them: other processes may keep them open."""
        for reader in self._readers:
            if pipe := self._pipes.get(reader.name):
                held = int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
                if held:
                    self.childDataReceived(reader.name, os.read(pipe.fileno(), held))
                reader.loseConnection()  # in the next turn: its number may become another's


def spawn_child(
    reactor: Any,
    protocol: ProcessProtocol,
    argv: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    *,
    descriptors: Sequence[int] = (),
) -> ChildProcess:
    """Start `argv` in `directory` with just that environment. Blocks, hardly.

    The child gets `descriptors` under the same numbers; they stay open here, too. Raises: OSError.
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
    return ChildProcess(reactor, protocol, process)


_VARIABLES = (b"TEMPORARY_DIRECTORY", b"GIT_DIR")  # inherited from evaluators and git
_PAUSE = 0.002  # seconds between two searches for killed processes
_MAX_SECONDS = 5  # for their end: later a process hangs in the kernel

log = Logger()


def kill_adopted_process(pid: int, starter: int) -> None:
    """Kill a process if it is a child of `starter`; return after its end.

    Otherwise it was reaped already, and `pid` may be a stranger's. Blocks, up to five seconds.
    Raises: OSError.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if int(read_process_stat(pid)[1]) == starter:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                if not has_process_ended(pidfd, _MAX_SECONDS):
                    log.error("process {pid} survives being killed", pid=pid)
        finally:
            os.close(pidfd)


def kill_directory_processes(*roots: Path, parent: int | None = None) -> Collection[int]:
    """Kill what works in a directory below `roots`, with all descendants; return their numbers.

    That are processes whose working directory, TEMPORARY_DIRECTORY or GIT_DIR lies there. Those
    with a terminal are spared unless they are children of `parent`: an operator's shell may happen
    to stand there. Return after their end. Blocks, up to five seconds. Raises: OSError, if they
    cannot be looked for.
    """
    places = tuple(bytes(root) + b"/" for root in roots)
    killed: set[int] = set()
    deadline = time.monotonic() + _MAX_SECONDS
    while found := {*_find_below(places, parent), *filter(_is_alive, killed)}:
        if time.monotonic() > deadline:
            log.error("processes {pids} survive being killed", pids=sorted(found))
            break
        for pid in found - killed:
            for one in (pid, *list_descendant_pids(pid)):
                send_signal(one, signal.SIGKILL)
                killed.add(one)
        time.sleep(_PAUSE)
    return killed


def _find_below(places: tuple[bytes, ...], parent: int | None) -> Iterator[int]:
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with suppress(
            FileNotFoundError, ProcessLookupError, PermissionError
        ):  # ended, or another's
            if pid != os.getpid() and any(
                place.startswith(places) for place in _read_places(f"/proc/{pid}/task")
            ):
                stat = read_process_stat(pid)
                if int(stat[4]) == 0 or int(stat[1]) == parent:  # tty_nr, ppid
                    yield pid


def _read_places(tasks: str) -> Sequence[bytes]:
    """Return where the first thread that tells it works; the others may outlive the main thread."""
    for thread in os.listdir(tasks):
        with suppress(FileNotFoundError, ProcessLookupError):
            found = []
            try:
                found.append(os.readlink(os.fsencode(f"{tasks}/{thread}/cwd")) + b"/")
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:  # anybody can go so deep
                    raise
            with open(f"{tasks}/{thread}/environ", "rb") as file:
                given = (entry.partition(b"=") for entry in file.read().split(b"\0"))
                return [*found, *(value for variable, _, value in given if variable in _VARIABLES)]
    return ()


def _is_alive(pid: int) -> bool:
    """Tell whether a process can still run."""
    try:
        return read_process_stat(pid)[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False
