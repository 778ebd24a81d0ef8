"""Processes that a daemon has left that was killed: found when the next one starts, and ended.

In a sandbox, or in a cgroup, they have ended with it or are found there. Without either they live
on. They are recognised by what they have inherited: a variable of their environment, or a working
directory, that leads into the daemon's own directories, and no terminal. So neither those of
another daemon are meant, nor an operator's shell that happens to stand there. Everything here
blocks.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from twisted.logger import Logger

from tawebeval.linux.reaper import descendants, send

_INHERITED = (b"TEMPORARY_DIRECTORY", b"GIT_DIR")  # by evaluators, and by what git starts
_AGAIN = 0.01  # seconds between two looks at what was killed
_LOOKS = 500  # the most looks: after 5 s something hangs in the kernel

log = Logger()


def end_leftovers(*roots: Path) -> None:
    """Kill all processes of directories below one of `roots`; return when they are gone."""
    ended: set[int] = set()
    for _ in range(_LOOKS):
        found = list(_find([bytes(root) + b"/" for root in roots]))
        if not found:
            break
        for pid in found:
            for one in (pid, *descendants(pid)):
                send(one, signal.SIGKILL)
        ended.update(found)
        time.sleep(_AGAIN)
    else:
        log.error("processes {pids} survive being killed", pids=found)
    if ended:
        log.warn(
            "{count} processes were ended that an earlier daemon has left: {pids}",
            count=len(ended),
            pids=sorted(ended),
        )


def _find(roots: Collection[bytes]) -> Iterator[int]:
    own = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != own:
            with suppress(OSError):  # it is somebody else's, or has just gone
                if _is_below(f"/proc/{name}", roots) and not _has_terminal(f"/proc/{name}"):
                    yield int(name)


def _is_below(process: str, roots: Collection[bytes]) -> bool:
    """Tell whether a process works below one of these directories, or was told of it."""
    if any(os.readlink(os.fsencode(f"{process}/cwd")).startswith(root) for root in roots):
        return True
    with open(f"{process}/environ", "rb") as file:
        told = (entry.partition(b"=") for entry in file.read().split(b"\0"))
        return any(
            value.startswith(root)
            for name, _, value in told
            if name in _INHERITED
            for root in roots
        )


def _has_terminal(process: str) -> bool:
    with open(f"{process}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[4] != "0"  # tty_nr (proc(5))
