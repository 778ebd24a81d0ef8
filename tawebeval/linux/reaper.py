"""Ending a whole process tree, also those of it who ran away.

Without a sandbox a process may leave its process group, its session and its parent. It
then becomes a child of the nearest *subreaper*, which the daemon makes itself. There it
is found, and recognised by what it inherited: the run's secret markers in its
environment, or a working directory below the run's own.

One that has hidden from all of that stays. Only a sandbox that is a process namespace can
promise more.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from twisted.internet.task import deferLater
from twisted.logger import Logger

from tawebeval.linux.child import Spawner
from tawebeval.linux.kernel import prctl

_PR_SET_CHILD_SUBREAPER = 36
_EXITING = 0x4  # PF_EXITING among the flags of proc(5)'s stat
_AGAIN = 0.002  # seconds between two looks at what was killed
_LOOKS = 2500  # the most looks: after 5 s something hangs in the kernel

log = Logger()


def become_subreaper() -> None:
    """Let orphans among the daemon's descendants become its children (prctl(2))."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int | str) -> Iterator[int]:
    """Yield the children of a process (proc(5)), none if it is gone."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                yield from map(int, file.read().split())


def descendants(pid: int) -> list[int]:
    """Return the children of a process, theirs, and so on, however deep."""
    found = [pid]
    for one in found:
        found.extend(children(one))
    return found[1:]


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


class Orphans:
    """Finds and ends the orphans of a run."""

    def __init__(self, reactor: Any, spawner: Spawner) -> None:
        self._reactor = reactor
        self._spawner = spawner

    async def end(self, mark: bytes, directory: str) -> None:
        """Kill all orphans that bear `mark` in their environment or work below `directory`.

        Returns when they are gone, and their descendants.
        """
        killed: set[int] = set()
        for _ in range(_LOOKS):
            found = [pid for pid in self._adopted() if _belongs(pid, mark, directory)]
            # Of these some bear no mark, and may take longer than those that do.
            killed = {pid for pid in killed if _is_alive(pid)}
            if not found and not killed:
                return
            for pid in found:
                for one in (pid, *descendants(pid)):
                    send(one, signal.SIGKILL)
                    killed.add(one)
            await deferLater(self._reactor, _AGAIN)
        log.error("processes {pids} survive being killed", pids=sorted(killed))

    async def gone(self, pid: int) -> None:
        """Kill a process that is a child by now, because its parent has ended; return after it."""
        for _ in range(_LOOKS):
            try:
                if os.waitpid(pid, os.WNOHANG) != (0, 0):
                    return
            except ChildProcessError:  # somebody has waited for it already
                return
            send(pid, signal.SIGKILL)  # nobody else can have its number
            await deferLater(self._reactor, _AGAIN)
        log.error("process {pid} survives being killed", pid=pid)

    def reap(self) -> None:
        """Wait for orphans that have ended by themselves, or with the git command they were of."""
        with contextlib.suppress(ChildProcessError):  # there are no children at all
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                list(self._adopted())

    def expecting(self) -> AbstractContextManager[Callable[[int], object]]:
        """Within it a child that is no orphan comes to be, as `Spawner.expecting` says."""
        return self._spawner.expecting()

    def waited_for(self, pid: int) -> None:
        """Take note that somebody has waited for such a child."""
        self._spawner.waited_for(pid)

    def _adopted(self) -> Iterator[int]:
        """Yield the living children that nobody here has started, and reap the dead ones."""
        found = list(children("self"))
        # Asked before who is known: none of those found can become known after that.
        complete = self._spawner.complete
        for pid in found:
            if not self._spawner.is_child(pid):
                with contextlib.suppress(ChildProcessError):
                    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                        yield pid
                    elif complete:
                        os.waitpid(pid, os.WNOHANG)


def _is_alive(pid: int) -> bool:
    """Tell whether a process can still run."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _belongs(pid: int, mark: bytes, directory: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            flags = int(file.read().rpartition(")")[2].split()[6])
        if flags & _EXITING:
            return True  # what it inherited cannot be seen any more: wait for it
        if f"{os.readlink(f'/proc/{pid}/cwd')}/".startswith(f"{directory}/"):
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read()
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has died just now
    except PermissionError:
        return False
