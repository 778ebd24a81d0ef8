"""Child processes, and the end of processes that are nobody's children.

`Spawner` starts the daemon's own children, such as git's commands, by `Popen`, which uses vfork,
and knows which still run. `ChildProcess` drives a Twisted `ProcessProtocol` by their pipes.
An evaluator's process is a `tail.TailedProcess`.

`reactor.spawnProcess` is not used: it walks over every open descriptor in the reactor's thread,
forks if a directory is given, and looks at every child whenever one ends. Here a pidfd reports the
end of one child only.

Without a sandbox a process may leave its process group, its session and its parent. It then becomes
a child of the nearest *subreaper* (prctl(2)): of the starter if it is an evaluator's, of the daemon
if it is git's. `OrphanReaper` recognises an evaluator's by what it has inherited: the run's secret
markers in its environment, or a working directory below the run's own. A process that hides both
stays; only a process namespace can promise more.

`kill_stale_processes` finds, at the start, the processes of a daemon that was killed. In a sandbox
or a cgroup they have ended with it or are found there. Without either they live on, and are
recognised by a variable of their environment, or a working directory, below the daemon's own
directories, and by having no terminal: neither the processes of another daemon are meant, nor an
operator's shell that happens to stand there.
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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from resource import struct_rusage
from typing import IO, Any

from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.main import CONNECTION_DONE
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from tawebeval.linux.cgroups import EvaluationCgroup
from tawebeval.linux.kernel_files import list_children, list_descendants, read_stat
from tawebeval.linux.privileges import prctl

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

    It calls the protocol as a `TailedProcess` does, but cannot be paused; there is no stdin to
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

    def is_child(self, pid: int) -> bool:
        """Tell whether `pid` is a known child that was not reaped yet."""
        return pid in self._children


_PR_SET_CHILD_SUBREAPER = 36
_EXITING = 0x4  # PF_EXITING among the flags of proc(5)'s stat
_PAUSE = 0.002  # seconds between two searches for killed processes
_SEARCHES = 2500  # after these 5 s a process hangs in the kernel

log = Logger()


def become_subreaper() -> None:
    """Let orphans among this process's descendants become its children (prctl(2))."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


class OrphanReaper:
    """The orphans of runs, which become children of the starter, and of git, which become ours.

    The starter reaps those that it has adopted.
    """

    def __init__(self, reactor: Any, spawner: Spawner) -> None:
        self._reactor = reactor
        self._spawner = spawner

    async def kill_orphans_of_run(self, mark: bytes, directory: str, starter: int) -> None:
        """Kill the orphans with `mark` in their environment or a directory below `directory`.

        They are children of the process `starter`, or ours once that has ended. Return when they
        and their descendants have ended, or after five seconds. Raises: OSError, if they cannot be
        looked for.
        """
        killed: set[int] = set()
        for _ in range(_SEARCHES):
            orphans = chain(self.list_adopted_orphans(), list_children(starter))
            found = [(pid, _belongs(pid, mark, directory)) for pid in orphans]
            # Descendants without the mark may take longer to end than those with it.
            killed = {pid for pid in killed if _is_alive(pid)}
            if not killed and all(belongs is False for _, belongs in found):
                os.close(os.open("/proc", os.O_PATH))  # without a descriptor none is found
                return
            for pid in (pid for pid, belongs in found if belongs):
                for one in (pid, *list_descendants(pid)):
                    send_signal(one, signal.SIGKILL)
                    killed.add(one)
            await deferLater(self._reactor, _PAUSE)
        killed.update(pid for pid, belongs in found if belongs is not False)
        log.error("processes {pids} survive being killed", pids=sorted(killed))

    async def kill_process_of_run(self, pid: int, group: EvaluationCgroup, starter: int) -> None:
        """Kill a process if it is in a cgroup, or a child of `starter`; return after its end.

        Otherwise it was reaped already, and `pid` may be a stranger's. Raises: OSError.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            if not group.has_process(pid) and pid not in list_children(starter):
                return
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            for _ in range(_SEARCHES):
                if has_process_ended(pidfd):
                    return
                await deferLater(self._reactor, _PAUSE)
        finally:
            os.close(pidfd)
        log.error("process {pid} survives being killed", pid=pid)

    def reap_ended_orphans(self) -> None:
        """Reap orphans that have ended by themselves, or with their git command."""
        with contextlib.suppress(ChildProcessError):  # there are no children at all
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                list(self.list_adopted_orphans())

    def list_adopted_orphans(self) -> Iterator[int]:
        """Yield the living children that the daemon has not started, and reap the dead ones."""
        for pid in list(list_children("self")):
            if not self._spawner.is_child(pid):
                with contextlib.suppress(ChildProcessError):
                    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                        yield pid
                    else:
                        os.waitpid(pid, os.WNOHANG)


def _is_alive(pid: int) -> bool:
    """Tell whether a process can still run."""
    try:
        return read_stat(pid)[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _belongs(pid: int, mark: bytes, directory: str) -> bool | None:
    """Return whether an orphan belongs to the run; None while it exits, when nothing tells.

    Its descendants may belong to other runs. They become orphans themselves, and are judged then.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return None
    # The first thread may have ended long before the others. One that lives tells enough: all have
    # the same environment, and mostly the same directory.
    verdicts = (
        does_thread_belong_to_run(f"{pid}/task/{thread}", mark, directory) for thread in threads
    )
    return next((verdict for verdict in verdicts if verdict is not None), None)


def does_thread_belong_to_run(thread: str, mark: bytes, directory: str) -> bool | None:
    """Return whether a thread, a path below /proc, shows that it belongs to the run."""
    try:
        if int(read_stat(thread)[6]) & _EXITING:
            return None
        if f"{os.readlink(f'/proc/{thread}/cwd')}/".startswith(f"{directory}/"):
            return True
        with open(f"/proc/{thread}/environ", "rb") as file:
            return mark in file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:
        return False


_INHERITED = (b"TEMPORARY_DIRECTORY", b"GIT_DIR")  # by evaluators, and by what git starts
_STALE_PAUSE = 0.01  # seconds between two searches for stale processes
_STALE_SEARCHES = 500  # after these 5 s a process hangs in the kernel


def kill_stale_processes(*roots: Path) -> None:
    """Kill the processes that a dead daemon has left below `roots`. Blocks, up to five seconds."""
    ended: set[int] = set()
    for _ in range(_STALE_SEARCHES):
        found = list(_find_stale(tuple(bytes(root) + b"/" for root in roots)))
        if not found:
            break
        for pid in found:
            for one in (pid, *list_descendants(pid)):
                send_signal(one, signal.SIGKILL)
        ended.update(found)
        time.sleep(_STALE_PAUSE)
    else:
        log.error("processes {pids} survive being killed", pids=found)
    if ended:
        what = "killed {count} processes left by an earlier daemon: {pids}"
        log.warn(what, count=len(ended), pids=sorted(ended))


def _find_stale(roots: tuple[bytes, ...]) -> Iterator[int]:
    """Yield processes without a terminal whose directory or environment lies below `roots`."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # another user's process, or one that has just ended
            places = [os.readlink(os.fsencode(f"/proc/{name}/cwd"))]
            with open(f"/proc/{name}/environ", "rb") as file:
                given = (entry.partition(b"=") for entry in file.read().split(b"\0"))
                places += [value for variable, _, value in given if variable in _INHERITED]
            is_below = any(place.startswith(roots) for place in places)
            if is_below and int(name) != os.getpid() and int(read_stat(name)[4]) == 0:  # tty_nr
                yield int(name)
