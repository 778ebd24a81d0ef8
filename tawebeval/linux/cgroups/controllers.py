"""Cgroup controllers (memory, pids, cpu), each in version 1 and version 2.

The kernel's admin-guide/cgroup-v1 and admin-guide/cgroup-v2 describe the files.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

import attrs

from tawebeval.config import LimitSettings
from tawebeval.linux.cgroups.filesystem import CgroupDirectory

WEIGHT, SHARES = 100, 1024
"""The defaults of a new cgroup: `cpu.weight` (version 2) and `cpu.shares` (version 1)."""

EVALUATOR_CGROUP_NAME = "evaluator"
"""The cgroup of the evaluator below its evaluation's, where there are others (`sandbox.broker`)."""

_PROGRAM = "run-"  # begins the names of the cgroups of a submission's programs (`sandbox.broker`)

# The kernel rounds bytes down to pages, which are of 64 KiB at most.
_PAGE = 65536

# The kernel kills a process for a request of up to eight pages; a larger one it only refuses.
_LAST_REQUEST = 8 * _PAGE


@attrs.frozen
class MemoryCharge:
    """Bytes of memory charged to a cgroup, page cache included: at the peak, and now."""

    peak_bytes: int
    current_bytes: int


class CgroupController:
    """One limit, or one measure, of all processes in a cgroup together.

    `name` is the kernel's name of the controller, or the file of a measure that needs none.
    Subclasses override the methods that apply to them.
    """

    name: str

    def set_limit(self, group: CgroupDirectory, limits: LimitSettings) -> None:
        """Set the limit. Raises: OSError."""

    def is_limit_set(self, group: CgroupDirectory, limits: LimitSettings) -> bool:
        """Tell whether the cgroup really has this limit, or can be measured."""
        raise NotImplementedError

    def is_limit_exceeded(self, group: CgroupDirectory) -> bool:
        """Tell whether this limit, and no other, has stopped a process in the cgroup."""
        return False

    def read_cpu_seconds(self, group: CgroupDirectory) -> float | None:
        """Return the processor time of all processes, also ended ones; None if unknown."""
        return None

    def read_memory_without_cache(self, group: CgroupDirectory) -> int | None:
        """Return the bytes in use now, without the page cache; None if unknown."""
        return None

    def read_memory_charge(self, group: CgroupDirectory) -> MemoryCharge | None:
        """Return the memory charged to the cgroup; None if unknown."""
        return None

    def read_submission_peak_memory_bytes(self, group: CgroupDirectory) -> int:
        """Return the sum of the peak bytes of a submission's programs; 0 if unknown.

        Those of programs that have ended are gone, as a rule.
        """
        return 0


class MemoryController(CgroupController):
    """The memory limit, in version 2."""

    name = "memory"
    _limit = "memory.max"
    _peak = "memory.peak"  # since Linux 5.19
    _current = "memory.current"
    # The lines of `memory.stat` for memory that is no page cache, with that of the cgroups below.
    _anonymous = re.compile("^(?:anon|shmem) ([0-9]+)$", re.MULTILINE)

    def set_limit(self, group: CgroupDirectory, limits: LimitSettings) -> None:
        """Set the limit: without swap, and the kernel kills all processes together."""
        group.write_file("memory.max", str(limits.memory))
        group.write_file_if_exists("memory.swap.max", "0")
        group.write_file_if_exists("memory.oom.group", "1")

    def is_limit_set(self, group: CgroupDirectory, limits: LimitSettings) -> bool:
        """Tell whether the cgroup has this limit."""
        limit = group.read_number(self._limit)
        return limit is not None and limits.memory - _PAGE < limit <= limits.memory

    def is_limit_exceeded(self, group: CgroupDirectory) -> bool:
        """Tell whether the kernel killed a process, and this cgroup met its limit.

        Otherwise the machine, or a cgroup above this one, was out of memory.
        """
        if not group.read_flat_keyed_file("memory.events").get("oom_kill"):
            return False
        # Limits of cgroups below do not count here (since Linux 5.2).
        own = group.read_flat_keyed_file("memory.events.local") or group.read_flat_keyed_file(
            "memory.events"
        )
        return own.get("oom", 0) > 0

    def read_memory_without_cache(self, group: CgroupDirectory) -> int | None:
        """Return the bytes of anonymous and shared memory."""
        return group.sum_numbers_in_file("memory.stat", self._anonymous)

    def read_memory_charge(self, group: CgroupDirectory) -> MemoryCharge | None:
        """Return the memory charged to the cgroup."""
        peak, current = group.read_number(self._peak), group.read_number(self._current)
        return None if peak is None or current is None else MemoryCharge(peak, current)

    def read_submission_peak_memory_bytes(self, group: CgroupDirectory) -> int:
        """Return the sum of the peak bytes of a submission's programs."""
        with suppress(OSError):
            return sum(
                each.read_number(self._peak) or 0
                for each in group.list_children()
                if os.path.basename(each.path).startswith(_PROGRAM)
            )
        return 0


class LegacyMemoryController(MemoryController):
    """The memory limit, in version 1."""

    _limit = "memory.limit_in_bytes"
    _peak = "memory.max_usage_in_bytes"
    _current = "memory.usage_in_bytes"
    # Other lines leave out the cgroups of submissions.
    _anonymous = re.compile("^total_(?:rss|shmem) ([0-9]+)$", re.MULTILINE)

    def set_limit(self, group: CgroupDirectory, limits: LimitSettings) -> None:
        """Set the limit, for memory and then, where swap is counted, for both together."""
        group.write_file("memory.limit_in_bytes", str(limits.memory))
        group.write_file_if_exists("memory.memsw.limit_in_bytes", str(limits.memory))
        group.write_file_if_exists("memory.swappiness", "0")

    def is_limit_exceeded(self, group: CgroupDirectory) -> bool:
        """Tell whether the kernel killed a process, and this cgroup met its limit.

        The kernel counts a kill only in the cgroup of the killed process, which may be that of a
        submission's program (`sandbox.broker`). A program at its own limit is not counted.
        """
        if not _is_full(group):
            return False
        return _has_killed(group) or any(
            _has_killed(each) and not _is_full(each) for each in group.list_children()
        )


class PidsController(CgroupController):
    """The limit of processes and threads, in both versions."""

    name = "pids"

    def set_limit(self, group: CgroupDirectory, limits: LimitSettings) -> None:
        """Set the limit."""
        group.write_file("pids.max", str(limits.processes))

    def is_limit_set(self, group: CgroupDirectory, limits: LimitSettings) -> bool:
        """Tell whether the cgroup has this limit."""
        return group.read_number("pids.max") == limits.processes

    def is_limit_exceeded(self, group: CgroupDirectory) -> bool:
        """Tell whether a fork has failed, and this cgroup met its limit.

        Many kernels also count here a fork that failed for the limit of a cgroup above. Before
        Linux 6.6 the two cannot be told apart.
        """
        # The evaluator is in a cgroup below once there are others for submissions.
        if not any(
            each.read_flat_keyed_file("pids.events").get("max")
            for each in (group, group / EVALUATOR_CGROUP_NAME)
        ):
            return False
        peak, limit = group.read_number("pids.peak"), group.read_number("pids.max")
        return peak is None or limit is None or peak >= limit


class CpuMeter(CgroupController):
    """Processor time, which version 2 measures without any controller."""

    name = "cpu.stat"

    def is_limit_set(self, group: CgroupDirectory, limits: LimitSettings) -> bool:
        """Tell whether processor time can be measured."""
        return self.read_cpu_seconds(group) is not None

    def read_cpu_seconds(self, group: CgroupDirectory) -> float | None:
        """Return the used processor time in seconds."""
        used = group.read_flat_keyed_file("cpu.stat").get("usage_usec")
        return None if used is None else used / 10**6


class LegacyCpuMeter(CpuMeter):
    """Processor time, in version 1."""

    name = "cpuacct"

    def read_cpu_seconds(self, group: CgroupDirectory) -> float | None:
        """Return the used processor time in seconds."""
        used = group.read_number("cpuacct.usage")
        return None if used is None else used / 10**9


@attrs.frozen
class CpuWeightController(CgroupController):
    """The share of contended processors: that of every new cgroup."""

    _file: str
    _share: int
    name = "cpu"

    def is_limit_set(self, group: CgroupDirectory, limits: LimitSettings) -> bool:
        """Tell whether the cgroup has this share."""
        return group.read_number(self._file) == self._share


def _has_killed(group: CgroupDirectory) -> bool:
    return group.read_flat_keyed_file("memory.oom_control").get("oom_kill", 0) > 0


def _is_full(group: CgroupDirectory) -> bool:
    """Tell whether a cgroup of version 1 has met its limit of memory.

    The peak shows it: `memory.failcnt` stays 0 in some kernels.
    """
    limit = group.read_number("memory.limit_in_bytes")
    names = ("memory.max_usage_in_bytes", "memory.memsw.max_usage_in_bytes")
    return limit is not None and any(
        (group.read_number(name) or 0) > limit - _LAST_REQUEST for name in names
    )
