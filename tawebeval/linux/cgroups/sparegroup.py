"""One cgroup that is there before an evaluation needs it.

A group is a directory in up to three hierarchies, with limits to be written. To make it takes about
as long as all that is left to do then before the evaluator can be started. So one is made when
another was just removed, while nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Lock

import attrs

from tawebeval.config import Limits
from tawebeval.linux.cgroups.groups import Group


@attrs.define(eq=False)
class SpareGroup:
    """Keeps a group in which nobody has been; `make` makes one, by name and limits.

    All of this blocks, hardly, and any thread may do it.
    """

    _make: Callable[[str, Limits], Group]
    _kept: tuple[Limits, Group] | None = None
    _count: int = 0  # of those that were tried: names are not used again
    _lock: Lock = attrs.field(factory=Lock, repr=False)

    def take(self, limits: Limits) -> Group | None:
        """Return the group, which is the caller's from now on.

        None where there is none that has these limits and was left alone by others.
        """
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is None:
            return None
        its_limits, group = kept
        if its_limits == limits and group.there:
            return group
        with suppress(OSError):  # it goes at the daemon's end, if not now
            group.remove()
        return None

    def renew(self, limits: Limits) -> None:
        """Keep one, with these limits, if there is none; not where none can be made just now."""
        with self._lock, suppress(OSError):
            if self._kept is None:
                self._count += 1
                self._kept = limits, self._make(f"spare-{self._count}", limits)
