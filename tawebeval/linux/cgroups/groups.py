"""The processes of one evaluation in cgroups: what they use, what stops them, their end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from math import inf
from resource import struct_rusage
from typing import Literal, TypeVar

import attrs

from tawebeval.config import Limits
from tawebeval.linux.cgroups.controllers import Control
from tawebeval.linux.cgroups.filesystem import Directory, removed_in_failure, sweep

What = Literal["memory", "processes", "cpu", "weight"]

Parts = Mapping[What, tuple[Control, Directory]]
"""Each control with the directory where it is at work."""

T = TypeVar("T")


_BLOCK = 512  # bytes: in blocks of this size getrusage(2) counts input and output
_KIB = 1024  # bytes: the unit of its `ru_maxrss`


@attrs.frozen
class Usage:
    """What a group has used: seconds of all processors, bytes at once; None where unknown."""

    cpu_seconds: float | None
    peak_memory: int | None


@attrs.define
class Group:
    """The processes of one evaluation; made by `Cgroups.make`.

    `homes` are the places where all groups are, `name` is the group's own in each of them.
    """

    _homes: Parts
    _name: str
    _time: Callable[[], float] = time.monotonic
    _exceeded: frozenset[What] = frozenset()
    _removed: bool = False
    _looked: float = -inf  # when it was last asked whom limits have stopped
    _cpu_due: float = 0.0  # not before this can the processor time be over its limit
    _most_memory: int = 0  # bytes without the page cache, that a look has found

    @property
    def _parts(self) -> Sequence[tuple[What, Control, Directory]]:
        """Each control with the directory where it is at work for this group."""
        return [(what, control, home / self._name) for what, (control, home) in self._homes.items()]

    @property
    def _directories(self) -> Sequence[Directory]:
        return [home / self._name for home in directories(self._homes)]

    def make(self, limits: Limits) -> None:
        """Make it, with these limits. Blocks.

        Raises OSError when it cannot be made, and then leaves nothing behind.
        """
        with ExitStack() as made:
            for directory in self._directories:
                directory.make()
                made.enter_context(removed_in_failure(directory))
            for _, control, directory in self._parts:
                control.limit(directory, limits)

    @property
    def there(self) -> bool:
        """Whether nobody has removed it; a few looks."""
        return all(directory.has("cgroup.procs") for directory in self._directories)

    def entry(self) -> Sequence[str]:
        """Return the files into which a process has to write "0" to get in, up to three.

        It must have a single thread. What it starts later is in, too. It cannot get out by itself
        as long as it does not see the file system of the cgroups.
        """
        return [group.entrance() for group in self._directories]

    def usage(self, waited: struct_rusage | None) -> Usage:
        """Return what the group has used, when all of its processes have ended; a few small reads.

        `waited` is what the kernel says of those that were waited for, None where nobody was.
        """
        return Usage(self._cpu_seconds(), self._peak_memory(waited))

    def _peak_memory(self, waited: struct_rusage | None) -> int | None:
        """Return the most memory at once, without the page cache, as near as the kernel tells.

        It counts that memory together with the page cache. So this is the largest of some figures
        none of which should be too high:

        - what looks have found;
        - the peak with the page cache, less the most that the page cache can have been: what was
          read and written, or what is left now;
        - the peak less what is left now. That has files in it that were removed meanwhile, so it
          is no more than the largest process has had, which has files in it that it has mapped.
        """
        charged = _known(control.charged(group) for _, control, group in self._parts)
        if charged is None:
            return self._most_memory or None
        if "memory" in self.exceeded():  # then the kernel had given back all that it could
            return charged.peak
        moved, largest = 0, charged.peak
        if waited is not None:
            moved = _BLOCK * (waited.ru_inblock + waited.ru_oublock)
            largest = _KIB * waited.ru_maxrss
        return max(
            self._most_memory,
            charged.peak - max(charged.now, moved),
            min(charged.peak - charged.now, largest),
        )

    def _cpu_seconds(self) -> float | None:
        return _known(control.cpu_seconds(group) for _, control, group in self._parts)

    def over_cpu(self, limit: float) -> bool:
        """Tell whether it has used more than so many seconds of all processors; False if unknown.

        A small read, and only when it can be so by now: faster than all processors run nobody is.
        """
        now = self._time()
        if now < self._cpu_due:
            return False
        used = self._cpu_seconds()
        if used is None:
            return False
        self._cpu_due = now + (limit - used) / (os.cpu_count() or 1)
        return used > limit

    def exceeded(self, patience: float = 0.0) -> frozenset[What]:
        """Return which limits have stopped somebody in the group; a few small reads.

        What was so in the last `patience` seconds need not be in it yet. After `remove`,
        whose killing looks like it, this does not change any more.
        """
        now = self._time()
        if not self._removed and now - self._looked >= patience:
            self._looked = now
            memory = _known(each.memory(group) for _, each, group in self._parts) or 0
            self._most_memory = max(self._most_memory, memory)
            found = {what for what, each, group in self._parts if each.exceeded(group)}
            if found:  # mostly there is nothing, and then there is nothing to be kept
                self._exceeded |= found
        return self._exceeded

    def remove(self) -> None:
        """Kill everybody in the group and remove it; waits up to a second until they have gone.

        Raises OSError where it stays, for one. It may be tried again then.
        """
        self.exceeded()
        self._removed = True
        for _, error in sweep(self._directories):
            raise error


def _known(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def directories(parts: Parts) -> Sequence[Directory]:
    """Return the directories of all parts, each once though it may serve for several."""
    return list(dict.fromkeys(directory for _, directory in parts.values()))
