"""Processes without a parent that waits for them: orphans of a run, and those of a dead daemon.

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
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from twisted.internet.task import deferLater
from twisted.logger import Logger

from tawebeval.linux.cgroups import EvaluationCgroup
from tawebeval.linux.child import Spawner, has_process_ended
from tawebeval.linux.privileges import prctl
from tawebeval.linux.processes import list_children, list_descendants, read_stat

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
