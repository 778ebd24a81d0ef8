"""The limits of one run: what of it the kernel enforces, what is checked, and what was used."""

from __future__ import annotations

import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from tawebeval.config import LimitSettings
from tawebeval.core.checkout import Commit
from tawebeval.errors import EvaluationFailure, build_limit_failure, format_size
from tawebeval.linux.cgroups import CgroupManager, EvaluationCgroup, ResourceUsage
from tawebeval.linux.child import ProcessTransport
from tawebeval.linux.processes import list_descendants, measure_cpu_seconds
from tawebeval.sandbox.disk_usage import BLOCK_BYTES, SIGNIFICANT_DISK_USAGE_BYTES, DiskMeter
from tawebeval.sandbox.workspace import READ_ONLY_WORKSPACE_NAMES, Workspace

_STACK = 8 * 2**20  # bytes: the soft limit of most systems
_SIGNALS = 1024  # pending signals, which the kernel counts for all processes of a user
# Seconds for which a limit that the kernel enforces may go unnoticed: the run gains nothing by it.
_UNNOTICED = 1.0


def build_cpu_limit_failure(limits: LimitSettings) -> EvaluationFailure:
    """Return the error of a run over its processor time."""
    what = f"used over {limits.cpu} seconds of processor time"
    return build_limit_failure("cpu", "cpu", what, limits.cpu)


def build_disk_limit_failure(limits: LimitSettings) -> EvaluationFailure:
    """Return the error of a run over its disk space."""
    what = f"wrote over {format_size(limits.disk)} to the disk"
    return build_limit_failure("disk", "disk", what, limits.disk)


class RunLimits(ABC):
    """The limits of one run, for `LimitMonitor` and for the run's end.

    While the run goes on, `check` is called in a thread. When all processes have ended,
    `read_usage` is, and then `check(final=True)` after a failure, or else
    `find_unnoticed_failure`.

    - `settings`: the limits.
    - `first_process`: None until the run has one.
    - `disk_bytes`: the bytes of the run on the disk, as last counted.
    - `free_disk_bytes`: the free bytes of the disk at the last look.
    """

    first_process: ProcessTransport | None = None
    disk_bytes: int = 0
    free_disk_bytes: float = inf

    def __init__(self, settings: LimitSettings) -> None:
        self.settings = settings

    @abstractmethod
    def check(self, final: bool = False, work: float = inf) -> EvaluationFailure | None:
        """Return the error of the first exceeded limit; None if all are kept. Blocks.

        `final`, for a run that has failed, looks more closely. `work` is the maximum number of
        looks at the disk.

        Raises: TooManyInspections, if more are needed and no other limit is exceeded.
        """

    def find_unnoticed_failure(self) -> EvaluationFailure | None:
        """Return the error of a run over a limit that has exited with status 0 all the same.

        On this machine the kernel ends a whole run that is over its memory.
        """
        return None

    @abstractmethod
    def read_usage(self, rusage: resource.struct_rusage | None) -> ResourceUsage:
        """Return the usage, when all processes have ended. Blocks.

        `rusage` is the usage that wait4(2) has returned; None if it was not called.
        """

    def close(self) -> None:  # noqa: B027
        """Remove what enforces the limits. Blocks. Raises: OSError; call again later."""

    @property
    def is_disk_nearly_full(self) -> bool:
        """Whether less than `limits.free_disk` was free at the last look."""
        return self.free_disk_bytes < self.settings.free_disk

    def make_disk_error(self) -> EvaluationFailure:
        """Return the error of a run that is stopped because the disk is nearly full."""
        floor = self.settings.free_disk
        return EvaluationFailure(
            "disk",
            f"the evaluator was stopped: under {format_size(floor)} (limits.free_disk) of the"
            " server's disk is free, and the evaluator's files take"
            f" {format_size(self.disk_bytes)}",
            {"limit": "limits.free_disk", "value": floor},
        )


class LocalRunLimits(RunLimits):
    """The limits of a run on this machine; `cgroup` is None until `make_cgroup`, or if closed."""

    cgroup: EvaluationCgroup | None = None

    def __init__(
        self,
        settings: LimitSettings,
        cgroups: CgroupManager,
        workspace: Workspace,
        commit: Commit,
    ) -> None:
        super().__init__(settings)
        self._cgroups = cgroups
        # The limit is for what the evaluator adds. The checkout is there from the start, or an
        # overlay copies a file of it when the evaluator changes the file.
        self._most_disk = settings.disk + commit.size + BLOCK_BYTES * commit.file_count
        self._most_files = settings.disk_files + commit.file_count
        self.disk = DiskMeter(
            workspace.root,
            self._most_disk,
            self._most_files,
            lambda: [pid for main in self._list_main_pids() for pid in list_descendants(main)],
            excluded_names=READ_ONLY_WORKSPACE_NAMES,
            run_start_time=time.time(),
            floor=settings.free_disk,
        )

    def _list_main_pids(self) -> Sequence[int]:
        """Return the first process, and the broker of submissions: others descend from them."""
        first = self.first_process
        if first is None or not first.is_running:
            return ()  # another process may have its number
        broker = getattr(first, "broker_pid", None)
        return (first.pid,) if broker is None else (first.pid, broker)

    def make_cgroup(self, name: str) -> EvaluationCgroup:
        """Make the cgroup, whose name other users can read. Blocks. Raises: OSError."""
        self.cgroup = self._cgroups.make_evaluation_cgroup(name, self.settings)
        return self.cgroup

    def close(self) -> None:
        """Kill the processes that are left in the cgroup, and remove it. Blocks.

        Raises: OSError, if killed processes do not end soon; call again later.
        """
        if self.cgroup is not None:
            self.cgroup.remove_cgroup()
            self.cgroup = None

    def describe_for_resume(self) -> dict[str, Any]:
        """Return what `resume` needs, as JSON."""
        return {
            "group": None if self.cgroup is None else self.cgroup.name,
            "devices": sorted(self.disk.device_numbers),
            "since": self.disk.run_start_time,
        }

    def resume(self, described: Mapping[str, Any]) -> None:
        """Go on with the limits of a run that an earlier process of the daemon has started."""
        if described["group"] is not None:
            self.cgroup = self._cgroups.find_evaluation_cgroup(described["group"])
        self.disk.device_numbers = frozenset(described["devices"])
        self.disk.run_start_time = described["since"]

    def check(self, final: bool = False, work: float = inf) -> EvaluationFailure | None:
        """Return the error of the first exceeded limit; None if all are kept. Blocks."""
        limits = self.settings
        # An exited run may be read for long, and uses nothing but the disk.
        if self.cgroup is not None and (final or self._list_main_pids()):
            over = self.cgroup.find_exceeded_limits(0 if final else _UNNOTICED)
            if "memory" in over:
                return self._build_memory_failure()
            if "processes" in over:
                what = f"started over {limits.processes} processes and threads"
                return build_limit_failure("processes", "processes", what, limits.processes)
            if self.cgroup.is_over_cpu_limit(limits.cpu, self._measure_cpu_seconds):
                return build_cpu_limit_failure(limits)
        try:
            disk = self.disk.measure_usage(again=final, work=work)
        finally:
            self.disk_bytes = self.disk.last_usage.disk_bytes
            self.free_disk_bytes = self.disk.free_bytes
        if disk.disk_bytes > self._most_disk:
            return build_disk_limit_failure(limits)
        if disk.file_count > self._most_files or disk.has_uncounted_deep_directories:
            what = f"made over {limits.disk_files} files and directories, or nested them too deeply"
            return build_limit_failure("disk", "disk_files", what, limits.disk_files)
        if final and disk.largest_file_bytes >= limits.file_size:
            what = f"wrote a file of {format_size(limits.file_size)}"
            return build_limit_failure("file_size", "file_size", what, limits.file_size)
        if (
            final
            and self.is_disk_nearly_full
            and (
                self.disk_bytes >= SIGNIFICANT_DISK_USAGE_BYTES
                or self.free_disk_bytes < SIGNIFICANT_DISK_USAGE_BYTES
            )
        ):
            return self.make_disk_error()
        return None

    def _build_memory_failure(self) -> EvaluationFailure:
        limit = self.settings.memory
        what = f"used over {format_size(limit)} of memory"
        if self.cgroup is not None and (programs := self.cgroup.submission_peak_memory_bytes):
            what = f"and the submission's programs ({format_size(min(programs, limit))}) {what}"
        return build_limit_failure("memory", "memory", what, limit)

    def _measure_cpu_seconds(self) -> float:
        """Return the processor time of all processes without cgroups, as far as /proc tells."""
        return sum(map(measure_cpu_seconds, self._list_main_pids()))

    def read_usage(self, rusage: resource.struct_rusage | None) -> ResourceUsage:
        """Return the usage, when all processes have ended. Blocks."""
        if self.cgroup is None:
            return ResourceUsage(None, None)
        return self.cgroup.read_usage(rusage)

    def list_rlimits(self, *, apart: bool) -> Mapping[str, tuple[int, int]]:
        """Return the resource limits of each process, soft and hard, by their names.

        Resources that the cgroup limits are left out. `apart`: the kernel counts the user's
        processes for this run alone, as in a user namespace. The hard limits of core dumps and of
        processor time are the daemon's: some programs raise the soft limits of their children.
        """
        limits, core = self.settings, resource.getrlimit(resource.RLIMIT_CORE)[1]
        own_cpu = resource.getrlimit(resource.RLIMIT_CPU)[1]
        own_as = resource.getrlimit(resource.RLIMIT_AS)[1]
        own_stack = resource.getrlimit(resource.RLIMIT_STACK)[1]
        bounds = {
            # Twice as much: the kernel compares it with ticks, and `LimitMonitor` looks first.
            "cpu": (2 * limits.cpu + 1, own_cpu),
            "fsize": (limits.file_size, limits.file_size),
            "nofile": (limits.open_files, limits.open_files),
            # With 1 byte the kernel writes no file and starts no crash handler. With 0 it starts
            # the machine's handler, as root (core(5)).
            "core": (1 if core else 0, core),
            # Whatever the shell of the daemon had.
            "as": (own_as, own_as),
            "stack": (_STACK if own_stack < 0 else min(_STACK, own_stack), own_stack),
            "msgqueue": (0, 0),
            "sigpending": (_SIGNALS, _SIGNALS),
            "nice": (0, 0),
            "rtprio": (0, 0),
        }
        if apart and "processes" not in self._cgroups.enforced_resources:
            bounds["nproc"] = (limits.processes, limits.processes)
        if "memory" not in self._cgroups.enforced_resources:
            bounds["data"] = (limits.memory, limits.memory)
        return bounds


def convert_rlimit_names(rlimits: Mapping[str, tuple[int, int]]) -> Mapping[int, tuple[int, int]]:
    """Return limits with the numbers of their resources (getrlimit(2)) in place of names."""
    return {getattr(resource, f"RLIMIT_{name.upper()}"): rlimits[name] for name in rlimits}
