"""What cgroups limit and measure, in the words of either version of them.

The files of version 1 are described in the kernel's admin-guide/cgroup-v1, those of version
2 in admin-guide/cgroup-v2.
"""

from __future__ import annotations

import re

import attrs

from tawebeval.config import Limits
from tawebeval.linux.cgroups.filesystem import Directory

WEIGHT, SHARES = 100, 1024
"""What a new group has of `cpu.weight` (version 2) and of `cpu.shares` (version 1)."""

# The kernel rounds bytes down to pages, which are of 64 KiB at most.
_PAGE = 65536

# For eight pages at once the kernel still kills somebody; more it just refuses.
_LAST_REQUEST = 8 * _PAGE

# The lines of `memory.stat` for memory that is no page cache, of both versions.
_ANONYMOUS = re.compile("^(?:anon|rss|shmem) ([0-9]+)$", re.MULTILINE)


@attrs.frozen
class Charged:
    """Bytes of memory that a group is charged for, with the page cache: at the peak, and now."""

    peak: int
    now: int


class Control:
    """One limit, or one measure, of all processes in a group together.

    `controller` is what the kernel calls it, or the file of what needs none. Subclasses override
    what they have.
    """

    controller: str

    def limit(self, group: Directory, limits: Limits) -> None:
        """Set the limit; raises OSError."""

    def holds(self, group: Directory, limits: Limits) -> bool:
        """Tell whether the group really has this limit, or can be measured."""
        raise NotImplementedError

    def exceeded(self, group: Directory) -> bool:
        """Tell whether the limit, and no other, has stopped somebody in the group."""
        return False

    def cpu_seconds(self, group: Directory) -> float | None:
        """Return the processor time of all processes that are or were in the group."""
        return None

    def memory(self, group: Directory) -> int | None:
        """Return the bytes that processes of the group have now, without the page cache.

        None where the kernel does not say.
        """
        return None

    def charged(self, group: Directory) -> Charged | None:
        """Return what is charged to the group; None where the kernel does not say."""
        return None


class Memory(Control):
    """Memory, under version 2."""

    controller = "memory"

    def limit(self, group: Directory, limits: Limits) -> None:
        """Set the limit; no swap beyond it, and the end of all is the end of one."""
        group.write("memory.max", str(limits.memory))
        group.write_if_there("memory.swap.max", "0")
        group.write_if_there("memory.oom.group", "1")

    def holds(self, group: Directory, limits: Limits) -> bool:
        """Tell whether the group has this limit."""
        return _rounded(group.number("memory.max"), limits.memory)

    def exceeded(self, group: Directory) -> bool:
        """Tell whether somebody was killed, and this group's limit was met.

        Without the second one it is the machine that was out of memory, or a group around
        this one.
        """
        counts = group.counts("memory.events")
        return counts.get("oom_kill", 0) > 0 and counts.get("max", 0) > 0

    def memory(self, group: Directory) -> int | None:
        """Return the bytes of anonymous and shared memory."""
        return group.sum("memory.stat", _ANONYMOUS)

    def charged(self, group: Directory) -> Charged | None:
        """Return what is charged (since Linux 5.19)."""
        return _charged(group, "memory.peak", "memory.current")


class LegacyMemory(Memory):
    """Memory, under version 1."""

    def limit(self, group: Directory, limits: Limits) -> None:
        """Set the limit, for memory and then, where swap is counted, for both together."""
        group.write("memory.limit_in_bytes", str(limits.memory))
        group.write_if_there("memory.memsw.limit_in_bytes", str(limits.memory))
        group.write_if_there("memory.swappiness", "0")

    def holds(self, group: Directory, limits: Limits) -> bool:
        """Tell whether the group has this limit."""
        return _rounded(group.number("memory.limit_in_bytes"), limits.memory)

    def exceeded(self, group: Directory) -> bool:
        """Tell whether somebody was killed, and this group's limit was met.

        The peak shows the latter: `memory.failcnt` stays 0 in some kernels.
        """
        if not group.counts("memory.oom_control").get("oom_kill"):
            return False
        limit = group.number("memory.limit_in_bytes") or 0
        names = ("memory.max_usage_in_bytes", "memory.memsw.max_usage_in_bytes")
        return any((group.number(name) or 0) > limit - _LAST_REQUEST for name in names)

    def charged(self, group: Directory) -> Charged | None:
        """Return what is charged."""
        return _charged(group, "memory.max_usage_in_bytes", "memory.usage_in_bytes")


class Processes(Control):
    """Processes and threads, under both versions."""

    controller = "pids"

    def limit(self, group: Directory, limits: Limits) -> None:
        """Set the limit."""
        group.write("pids.max", str(limits.processes))

    def holds(self, group: Directory, limits: Limits) -> bool:
        """Tell whether the group has this limit."""
        return group.number("pids.max") == limits.processes

    def exceeded(self, group: Directory) -> bool:
        """Tell whether a fork has failed, and this group's limit was met.

        It may have been the limit of a group around this one, which many kernels count here. Before
        Linux 6.6 nothing tells.
        """
        if not group.counts("pids.events").get("max"):
            return False
        peak, limit = group.number("pids.peak"), group.number("pids.max")
        return peak is None or limit is None or peak >= limit


class Cpu(Control):
    """Processor time, which version 2 measures without any controller."""

    controller = "cpu.stat"

    def holds(self, group: Directory, limits: Limits) -> bool:
        """Tell whether it can be measured."""
        return self.cpu_seconds(group) is not None

    def cpu_seconds(self, group: Directory) -> float | None:
        """Return the seconds that were used."""
        used = group.counts("cpu.stat").get("usage_usec")
        return None if used is None else used / 10**6


class LegacyCpu(Control):
    """Processor time, under version 1."""

    controller = "cpuacct"

    def holds(self, group: Directory, limits: Limits) -> bool:
        """Tell whether it can be measured."""
        return self.cpu_seconds(group) is not None

    def cpu_seconds(self, group: Directory) -> float | None:
        """Return the seconds that were used."""
        used = group.number("cpuacct.usage")
        return None if used is None else used / 10**9


@attrs.frozen
class Weight(Control):
    """The share of the processors where others want them, too: that of every new group."""

    _file: str
    _share: int
    controller = "cpu"

    def holds(self, group: Directory, limits: Limits) -> bool:
        """Tell whether the group has this share."""
        return group.number(self._file) == self._share


def _charged(group: Directory, peak: str, now: str) -> Charged | None:
    most, left = group.number(peak), group.number(now)
    return None if most is None or left is None else Charged(most, left)


def _rounded(number: int | None, wanted: int) -> bool:
    return number is not None and wanted - _PAGE < number <= wanted
