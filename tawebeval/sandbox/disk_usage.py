"""Disk usage of a run. Everything here blocks.

A file system does not know the usage of a run. So the files in the run's directories are counted,
and the unlinked files that its processes have open. A count is repeated when the file system has
filled up by half of what the run may still take, and at least every ten seconds.

A file that is mapped and not open is not counted: /proc has the mapped part, not the size. And a
process with many threads can keep a reader of its mappings waiting, since both take the same lock.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

import attrs

from tawebeval.linux.filetree import DIRECTORY_LIST_MODE_BITS, open_directory

# Levels of directories, each of which takes a descriptor. Deeper trees are made to do harm.
_DEEPEST = 100
_ANYWAY = 10.0  # seconds after which files are counted in any case
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)

MAX_SHARED_THREAD_INSPECTIONS = 5_000
"""Maximum looks of a count that other runs wait for: some 50 ms."""

BLOCK_BYTES = 4096
"""Maximum bytes that a file takes beyond its own size."""
SIGNIFICANT_DISK_USAGE_BYTES = 2**20
"""Bytes on the disk from which on a run matters to a nearly full disk."""


class TooManyInspections(Exception):
    """A count would take more looks at the disk than allowed."""


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
    """A finished count: bytes on the disk, files and directories, bytes of the largest file.

    `has_uncounted_deep_directories`: there are directories below those that were counted.
    `inspection_count`: the directory entries, threads and descriptors that the count has looked at.
    """

    disk_bytes: int = 0
    file_count: int = 0
    largest_file_bytes: int = 0
    has_uncounted_deep_directories: bool = False
    inspection_count: int = attrs.field(default=0, eq=False)


@attrs.define
class DiskCount:
    """A count in progress, whose result is in `usage`.

    Files unchanged since `since`, in seconds since the epoch, are not the largest. The count stops
    beyond `most` bytes and files, and fails after `work` looks.
    """

    _since: float
    _most: tuple[float, float]
    _work: float
    usage: DiskUsage = attrs.field(factory=DiskUsage, init=False)
    _seen: set[tuple[int, int]] = attrs.field(factory=set, init=False)

    def add_file(self, status: os.stat_result) -> None:
        """Count a file; only the first of several names takes room."""
        usage, file = self.usage, (status.st_dev, status.st_ino)
        usage.file_count += 1
        if file not in self._seen:
            if status.st_nlink != 1:
                self._seen.add(file)
            usage.disk_bytes += status.st_blocks * 512
            if status.st_ctime >= self._since:
                usage.largest_file_bytes = max(usage.largest_file_bytes, status.st_size)
        if usage.disk_bytes > self._most[0] or usage.file_count > self._most[1]:
            raise _LimitExceeded

    def _look(self) -> None:
        self.usage.inspection_count += 1
        if self.usage.inspection_count > self._work:
            raise TooManyInspections

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
                self._look()
                with _ignore_missing():
                    self.add_file(entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.name)
        if depth == _DEEPEST:
            self.usage.has_uncounted_deep_directories = (
                self.usage.has_uncounted_deep_directories or bool(below)
            )
            return
        for name in below:
            self._look()
            with _ignore_missing():
                inner = open_directory(name, directory, DIRECTORY_LIST_MODE_BITS)
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
                self._look()
                with _ignore_missing(), os.scandir(f"/proc/{pid}/task/{thread}/fd") as descriptors:
                    for descriptor in descriptors:
                        self._look()
                        with _ignore_missing():
                            status = os.stat(descriptor.path)
                            file = status.st_dev, status.st_ino
                            is_unlinked = status.st_nlink == 0 and status.st_dev in devices
                            if is_unlinked and file not in self._seen:
                                self.add_file(status)


def measure_disk_usage(
    directory: Path,
    pids: Iterable[int],
    excluded_names: Collection[str] = frozenset(),
    since: float = 0.0,
    devices: Collection[int] = frozenset(),
    most: tuple[float, float] = (inf, inf),
    work: float = inf,
) -> DiskUsage:
    """Count the files below `directory`, and the unlinked ones that the processes `pids` hold.

    `devices` are those of overlays whose changes lie in the directory: unlinked files there count,
    too. `excluded_names`, `since`, `most` and `work` are as in `DiskCount`.

    Raises: OSError, TooManyInspections.
    """
    count = DiskCount(since, most, work)
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        count.add_directory(top, excluded_names=excluded_names)
        devices = {os.fstat(top).st_dev, *devices}
        for pid in pids:
            count.add_unlinked_files(pid, devices)
    except _LimitExceeded:
        pass
    finally:
        os.close(top)
    return count.usage


@attrs.define
class DiskMeter:
    """The meter of one directory, which may take `size` bytes and `files` files.

    - `pids`: returns the processes whose unlinked files count.
    - `excluded_names`: names in the directory that are not the run's.
    - `run_start_time`: the start of the run, in seconds since the epoch.
    - `device_numbers`: as in `measure_disk_usage`.
    - `floor`: while fewer bytes of the file system are free, each look counts anew.
    - `last_usage`, `free_bytes`: the last usage, and the free bytes at the last look.
    """

    _directory: Path
    _size: int
    _files: int
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

    def measure_usage(self, again: bool = False, work: float = inf) -> DiskUsage:
        """Return the usage; count the files anew if `again` or if it may have changed.

        Raises: OSError; TooManyInspections, if a count takes, or has taken last time, more than
        `work` looks.
        """
        system = os.statvfs(self._directory)
        self.free_bytes = system.f_bavail * system.f_frsize
        left = system.f_bfree * system.f_frsize, system.f_ffree
        if again or self._stale(left):
            if self.last_usage.inspection_count > work:
                raise TooManyInspections
            self.last_usage = measure_disk_usage(
                self._directory,
                self._pids(),
                self._excluded_names,
                self.run_start_time,
                self.device_numbers,
                (self._size, self._files),
                work,
            )
            self._left = left
            self._counted = self._time()
        return self.last_usage

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
