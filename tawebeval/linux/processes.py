"""Processes and what they have used, by /proc (proc(5)).

This module imports the standard library only: `programs` packs it for programs that know nothing of
tawebeval.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds, the unit of times in /proc/PID/stat


def has_process(pid: int) -> bool:
    """Tell whether a process has this number, also if /proc hides it (`hidepid` in proc(5))."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def read_stat(process: int | str) -> list[bytes]:
    """Return the fields of a stat file from the third one on, which is the state.

    `process` is a number, or names a process or thread below /proc. Raises: OSError.
    """
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def list_children(pid: int | str) -> Iterator[int]:
    """Yield the children of a process; none if it has ended."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                yield from map(int, file.read().split())
    # Hidden, as the starter by `ProtectProc=invisible`: /proc may show its children.
    if isinstance(pid, int) and not os.path.exists(f"/proc/{pid}") and has_process(pid):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                if int(read_stat(name)[1]) == pid:
                    yield int(name)


def list_descendants(pid: int | str) -> list[int]:
    """Return all descendants of a process, each behind its parent."""
    found = list(list_children(pid))
    for one in found:
        found.extend(list_children(one))
    return found


def measure_cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants, never too much.

    Missing are ended children of processes that ignore SIGCHLD. Parents come first: the time of a
    child that ends meanwhile is not counted twice.
    """
    ticks = 0
    for one in (pid, *list_descendants(pid)):
        with suppress(OSError):
            ticks += sum(map(int, read_stat(one)[11:15]))
    return ticks * _TICK
