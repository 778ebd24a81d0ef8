"""The limits of a run: what the kernel enforces, what `LimitMonitor` checks, and what was used.

Everything but `LimitMonitor` blocks.

A file system does not know the usage of a run. So the files in the run's directories are counted,
and the unlinked files that its processes have open. A count is repeated when the file system has
filled up by half of what the run may still take, and at least every ten seconds.

A file that is mapped and not open is not counted: /proc has the mapped part, not the size. And a
process with many threads can keep a reader of its mappings waiting, since both take the same lock.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.config import LimitSettings
from tawebeval.core.evaluations import Commit
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import EvaluationFailure, build_limit_failure, format_size
from tawebeval.linux.cgroups import CgroupManager, EvaluationCgroup, ResourceUsage
from tawebeval.linux.filetree import open_directory
from tawebeval.linux.kernel_files import list_descendants, measure_cpu_seconds
from tawebeval.linux.tail import TailedProcess
from tawebeval.sandbox.workspace import READ_ONLY_WORKSPACE_NAMES, Workspace

# Levels of directories, each of which takes a descriptor. Deeper trees are made to do harm.
_DEEPEST = 100
_ANYWAY = 10.0  # seconds after which files are counted in any case
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)

LARGE_INSPECTION_COUNT = 5_000
"""Inspections of a count from which on other runs do not wait for the run: some 50 ms."""

BLOCK_BYTES = 4096
"""Maximum bytes that a file takes beyond its own size."""
SIGNIFICANT_DISK_USAGE_BYTES = 2**20
"""Bytes on the disk from which on a run matters to a nearly full disk."""


class _LimitExceeded(Exception):
    """A count has exceeded its limits already."""


@contextmanager
def _ignore_missing() -> Iterator[None]:
    """Ignore files that are removed meanwhile or not accessible.

    A lack of descriptors is not ignored: the count would be 0.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise


@attrs.define
class DiskUsage:
    """A count of bytes on the disk, files and directories, and bytes of the largest file.

    Files unchanged since `since`, in seconds since the epoch, are not the largest. The count stops
    beyond `most` bytes and files.

    `has_uncounted_deep_directories`: there are directories below those that were counted.
    `inspection_count`: the directory entries, threads and descriptors that the count has looked at.
    """

    disk_bytes: int = 0
    file_count: int = 0
    largest_file_bytes: int = 0
    has_uncounted_deep_directories: bool = False
    inspection_count: int = attrs.field(default=0, eq=False)
    _since: float = attrs.field(default=0.0, eq=False)
    _most: tuple[float, float] = attrs.field(default=(inf, inf), eq=False)
    _seen: set[tuple[int, int]] = attrs.field(factory=set, init=False, eq=False, repr=False)

    def add_file(self, status: os.stat_result) -> None:
        """Count a file; only the first of several names takes room."""
        file = (status.st_dev, status.st_ino)
        self.file_count += 1
        if file not in self._seen:
            if status.st_nlink != 1:
                self._seen.add(file)
            self.disk_bytes += status.st_blocks * 512
            if status.st_ctime >= self._since:
                self.largest_file_bytes = max(self.largest_file_bytes, status.st_size)
        if self.disk_bytes > self._most[0] or self.file_count > self._most[1]:
            raise _LimitExceeded

    def add_directory(
        self, directory: int, depth: int = 0, excluded_names: Collection[str] = frozenset()
    ) -> None:
        """Count everything below an open directory, except the names `excluded_names` in it.

        Symbolic links are not followed.
        """
        below = []
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name in excluded_names:
                    continue
                self.inspection_count += 1
                with _ignore_missing():
                    self.add_file(entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.name)
        if depth == _DEEPEST:
            self.has_uncounted_deep_directories |= bool(below)
            return
        for name in below:
            self.inspection_count += 1
            with _ignore_missing():
                inner = open_directory(name, directory)
                try:
                    self.add_directory(inner, depth + 1)
                finally:
                    os.close(inner)

    def add_unlinked_files(self, pid: int, devices: Collection[int]) -> None:
        """Count the unlinked files on `devices` that a process has open.

        Each of its threads may have a table of descriptors of its own, and has one although the
        first thread has ended.
        """
        with _ignore_missing():
            for thread in os.listdir(f"/proc/{pid}/task"):
                self.inspection_count += 1
                with _ignore_missing(), os.scandir(f"/proc/{pid}/task/{thread}/fd") as descriptors:
                    for descriptor in descriptors:
                        self.inspection_count += 1
                        with _ignore_missing():
                            status = os.stat(descriptor.path)
                            file = status.st_dev, status.st_ino
                            is_unlinked = status.st_nlink == 0 and status.st_dev in devices
                            if is_unlinked and file not in self._seen:
                                self.add_file(status)


@attrs.define
class DiskMeter:
    """The meter of one directory, which may take `size` bytes and `files` files.

    - `pids`: returns the processes whose unlinked files count.
    - `excluded_names`: names in the directory that are not the run's.
    - `run_start_time`: the start of the run, in seconds since the epoch.
    - `device_numbers`: those of overlays whose changes lie in the directory: unlinked files there
      count, too.
    - `floor`: while fewer bytes of the file system are free, each look counts anew.
    - `last_usage`, `free_bytes`: the last usage, and the free bytes at the last look.
    """

    _directory: Path
    _size: float
    _files: float
    _pids: Callable[[], Iterable[int]]
    _excluded_names: Collection[str] = frozenset()
    run_start_time: float = 0.0
    device_numbers: Collection[int] = frozenset()
    _time: Callable[[], float] = time.monotonic
    _floor: int = 0
    last_usage: DiskUsage = attrs.field(factory=DiskUsage)
    free_bytes: float = inf
    _left: tuple[int, int] | None = None  # of the file system, at the last count
    _counted: float = 0.0

    def measure_usage(self, again: bool = False, counts: bool = True) -> DiskUsage:
        """Return the usage; count the files anew if `again` or if it may have changed.

        Without `counts` return the last usage, and measure the free bytes alone. Raises: OSError.
        """
        system = os.statvfs(self._directory)
        self.free_bytes = system.f_bavail * system.f_frsize
        left = system.f_bfree * system.f_frsize, system.f_ffree
        if counts and (again or self._stale(left)):
            self.last_usage = self._count()
            self._left = left
            self._counted = self._time()
        return self.last_usage

    def _count(self) -> DiskUsage:
        usage = DiskUsage(since=self.run_start_time, most=(self._size, self._files))
        top = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            usage.add_directory(top, excluded_names=self._excluded_names)
            devices = {os.fstat(top).st_dev, *self.device_numbers}
            for pid in self._pids():
                usage.add_unlinked_files(pid, devices)
        except _LimitExceeded:
            pass
        finally:
            os.close(top)
        return usage

    def _stale(self, left: tuple[int, int]) -> bool:
        if (
            self._left is None
            or self._time() - self._counted > _ANYWAY
            or self.free_bytes < self._floor
        ):
            return True
        rests = self._size - self.last_usage.disk_bytes, self._files - self.last_usage.file_count
        return any(
            then - now > rest / 2 for then, now, rest in zip(self._left, left, rests, strict=True)
        )


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


class RunLimits:
    """The limits of one run, for `LimitMonitor` and for the run's end.

    While the run goes on, `check` is called in a thread. When all processes have ended,
    `read_usage` is, and then `check(final=True)` after a failure, or else
    `find_unnoticed_failure`.

    - `settings`: the limits.
    - `cgroup`: None until `make_cgroup`, or if closed.
    - `first_process`: None until the run has one.
    - `disk_bytes`: the bytes of the run on the disk, as last counted.
    - `free_disk_bytes`: the free bytes of the disk at the last look.
    - `inspection_count`: the inspections that the last count has taken.
    """

    cgroup: EvaluationCgroup | None = None
    first_process: TailedProcess | None = None
    disk_bytes: int = 0
    free_disk_bytes: float = inf
    inspection_count: int = 0

    def __init__(
        self,
        settings: LimitSettings,
        cgroups: CgroupManager,
        workspace: Workspace,
        commit: Commit,
    ) -> None:
        self.settings = settings
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

    def check(self, final: bool = False, counts: bool = True) -> EvaluationFailure | None:
        """Return the error of the first exceeded limit; None if all are kept. Blocks.

        `final`, for a run that has failed, looks more closely. Without `counts` no files are
        counted.
        """
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
            disk = self.disk.measure_usage(again=final, counts=counts)
        finally:
            self.disk_bytes = self.disk.last_usage.disk_bytes
            self.inspection_count = self.disk.last_usage.inspection_count
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

    def find_unnoticed_failure(self) -> EvaluationFailure | None:
        """Return the error of a run over a limit that has exited with status 0 all the same.

        On this machine the kernel ends a whole run that is over its memory.
        """
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
        """Return the usage, when all processes have ended. Blocks.

        `rusage` is the usage that wait4(2) has returned; None if it was not called.
        """
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


_PAUSE = 0.25  # seconds between two looks at all runs
_PATIENCE = 4  # looks until the files of a stopped run are removed, as a rule
_BLIND = 8  # failed looks in a row; a run that is being removed fails once or twice

log = Logger()


StopRun = Callable[[EvaluationFailure], object]


@attrs.define
class FullDiskPolicy:
    """The choice of a run to stop while the disk is nearly full: the one with most bytes on it.

    The next run is chosen after the time to remove the files of the first, or at once if the disk
    goes on filling up. If the disk fills up and no run has many bytes there, a run hides its files:
    then all runs are chosen, one after the other, the youngest first.
    """

    _mark: float = 0  # free bytes; one MiB less means that the disk goes on filling up
    _patience: int = 0  # looks for which no run is chosen

    def choose_run_to_stop(self, runs: Iterable[RunLimits]) -> RunLimits | None:
        """Return the run to stop now, if any; `runs` are in the order of their start."""
        short = [run for run in runs if run.is_disk_nearly_full]
        if not short:
            self._mark, self._patience = 0, 0
            return None
        free = min(run.free_disk_bytes for run in short)
        filling = free < self._mark - SIGNIFICANT_DISK_USAGE_BYTES
        if filling or free > self._mark:
            self._mark = free
        if self._patience and not filling:
            self._patience -= 1
            return None
        chosen = max(short, key=lambda run: run.disk_bytes)
        if chosen.disk_bytes < SIGNIFICANT_DISK_USAGE_BYTES:
            if not filling:
                return None
            chosen = short[-1]  # the disk was not nearly full before its start
        self._patience = _PATIENCE
        return chosen


class LimitMonitor:
    """The monitor of all runs: it looks at each in turn, in one of `threads`.

    The files of a run whose count has been large once are counted by `others` from then on, so
    that it does not delay small runs.
    """

    def __init__(self, clock: Any, threads: WorkerThreads, others: WorkerThreads) -> None:
        self._clock = clock
        self._threads = threads
        self._others = others
        self._watched: dict[RunLimits, StopRun] = {}
        # Failed looks in a row.
        self._failures: Counter[RunLimits] = Counter()
        self._large: set[RunLimits] = set()
        self._apart: set[RunLimits] = set()  # counted by `others` just now
        self._relief = FullDiskPolicy()
        self._relieved: set[RunLimits] = set()  # chosen by `_relief` already
        self._next: IDelayedCall | None = None
        self._looking = False

    def add_run(self, run: RunLimits, stop: StopRun) -> None:
        """Look at the limits of a run from now on; call `stop(error)` when it exceeds a limit.

        The error's reason is `lost` if several looks in a row fail.
        """
        self._watched[run] = stop
        self._plan()

    def remove_run(self, run: RunLimits) -> None:
        """Stop looking at the limits of a run."""
        del self._watched[run]
        self._failures.pop(run, None)
        self._large.discard(run)
        self._relieved.discard(run)
        if not self._watched and self._next is not None:
            self._next.cancel()
            self._next = None

    def _plan(self) -> None:
        if self._watched and self._next is None and not self._looking:
            self._next = self._clock.callLater(_PAUSE, self._start)

    def _start(self) -> None:
        self._next = None
        self._looking = True
        Deferred.fromCoroutine(self._look())

    async def _look(self) -> None:
        try:
            for run in self._large - self._apart:
                Deferred.fromCoroutine(self._look_apart(run))
            runs = {run: run not in self._large for run in self._watched}
            for run, found in await self._threads.run_in_thread(check_run_limits, runs):
                self._take(run, found, has_counted=runs[run])
            self._relieve()
        finally:
            self._looking = False
            self._plan()

    def _relieve(self) -> None:
        chosen = self._relief.choose_run_to_stop(
            run for run in self._watched if run not in self._relieved
        )
        if chosen is not None:
            self._relieved.add(chosen)
            log.warn(
                f"under {format_size(chosen.settings.free_disk)} (limits.free_disk) of the disk is"
                " free: the run with the most bytes on it"
                f" ({format_size(chosen.disk_bytes)}) is stopped",
                free=chosen.free_disk_bytes,
                least=chosen.settings.free_disk,
                written=chosen.disk_bytes,
            )
            self._watched[chosen](chosen.make_disk_error())

    async def _look_apart(self, run: RunLimits) -> None:
        self._apart.add(run)
        try:
            ((_, found),) = await self._others.run_in_thread(check_run_limits, {run: True})
        finally:
            self._apart.remove(run)
        self._take(run, found, has_counted=True)

    def _take(self, run: RunLimits, found: Exception | None, *, has_counted: bool) -> None:
        """Act on the result of a look."""
        if run not in self._watched:  # it has ended meanwhile
            return
        if run.inspection_count > LARGE_INSPECTION_COUNT:
            self._large.add(run)
        if found is None or isinstance(found, EvaluationFailure):
            if has_counted:
                self._failures.pop(run, None)
            if found is not None:
                self._watched[run](found)
            return
        self._failures[run] += 1
        if self._failures[run] == _BLIND:
            message = "the run's limits could not be checked"
            if isinstance(found, OSError):
                log.error("a run is stopped: {problem}", problem=f"{message}: {found}")
                message = f"{message}: {found.strerror}"
            else:
                log.failure(
                    "defect: a run is stopped, as its limits cannot be checked", Failure(found)
                )
                message = f"defect of the daemon: {message}"
            self._watched[run](EvaluationFailure("lost", message))


def check_run_limits(
    runs: Mapping[RunLimits, bool],
) -> Sequence[tuple[RunLimits, Exception | None]]:
    """Return the result of a look at each run, which counts its files if the value says so. Blocks.

    None: all limits are kept; EvaluationFailure: the exceeded limit; another exception: the look
    has failed.
    """
    found: list[tuple[RunLimits, Exception | None]] = []
    for run, counts in runs.items():
        try:
            found.append((run, run.check(counts=counts)))
        except Exception as error:  # noqa: BLE001  (the other runs need their look)
            found.append((run, error))
    return found
