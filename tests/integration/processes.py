"""Processes of evaluators, found from outside.

A sandbox has process identifiers of its own, so what an evaluator prints of them says nothing
here. It is known by a word instead that stands in its command line or its environment; who
shed both is known by the process namespace, which nobody leaves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4


def new_word() -> str:
    """Return a word that no other process has."""
    return f"word-{uuid4().hex}"


def state(pid: int) -> str:
    """Return the letter of proc(5) for a process's state, X for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def threads(pid: int) -> list[str]:
    """Return these letters for the threads of a process that lives."""
    return [state(int(task)) for task in os.listdir(f"/proc/{pid}/task")]


def alive(pid: int) -> bool:
    """Tell whether a process exists and is more than a zombie."""
    return state(pid) not in "ZX"


def children(pid: int) -> list[int]:
    """Return the children of a process, also those that are dead but not waited for."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, tasks.read_text().split())
    return found


def command_line(pid: int) -> bytes:
    """Return the command line of a process, with NUL between its words; empty if it is dead."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def descriptors(pid: int) -> list[str] | None:
    """Return which descriptors a process has open, None if it is gone or about to be."""
    # The kernel refuses an ordinary user those of a process that exits.
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return os.listdir(f"/proc/{pid}/fd")
    return None


def everybody() -> Iterator[int]:
    """Yield the identifiers of all processes on this machine that are alive."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and alive(int(name)):
            yield int(name)


def processes(word: str) -> list[int]:
    """Return the living processes that have `word` in their command line or environment."""
    return [pid for pid in everybody() if pid != os.getpid() and word.encode() in _told(pid)]


class Namespaces:
    """Process namespaces that somebody was seen in, held so that no other gets their number."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def note(self, pids: Iterable[int]) -> None:
        """Take note of the namespaces, other than this one, that these processes are in."""
        for pid in pids:
            with suppress(OSError):
                descriptor = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY)
                number = os.fstat(descriptor).st_ino
                if number in self._held or number == _namespace(os.getpid()):
                    os.close(descriptor)
                else:
                    self._held[number] = descriptor

    def inhabitants(self) -> list[int]:
        """Return the living processes that are in one of these namespaces."""
        return [pid for pid in everybody() if _namespace(pid) in self._held]

    def close(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])


def _told(pid: int) -> bytes:
    """Return the command line and environment of a process, as far as they can be read."""
    told = b""
    for name in ("cmdline", "environ"):
        with suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
            told += file.read()
    return told


def _namespace(pid: int) -> int:
    """Return the number of a process's namespace of processes, 0 where it cannot be known."""
    with suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    return 0
