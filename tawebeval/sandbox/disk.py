"""The disk usage of a run: how many bytes and files its directory and its processes hold. Blocks.

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

from tawebeval.linux.filetree import get_disk_bytes, open_listable_directory

# Levels of directories, each of which takes a descriptor. Deeper trees are made to do harm.
_DEEPEST = 100
_ANYWAY = 10.0  # seconds after which files are counted in any case
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)

BLOCK_BYTES = 4096
"""Maximum bytes that a file takes beyond its own size."""


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

    `has_uncounted_deep_directories`: there are directories below those that were counted.
    `inspected_entry_count`: directory entries, threads and descriptors that the count looked at.
    """

    disk_bytes: int = 0
    file_count: int = 0
    largest_file_bytes: int = 0
    has_uncounted_deep_directories: bool = False
    inspected_entry_count: int = attrs.field(default=0, eq=False)


@attrs.define
class _DiskCount:
    """A count that goes on.

    Files unchanged since `since`, in seconds since the epoch, are not the largest. The count stops
    beyond `most` bytes and files. `_seen` may take 20 MB.
    """

    _since: float
    _most: tuple[float, float]
    usage: DiskUsage = attrs.field(factory=DiskUsage)
    _seen: set[tuple[int, int]] = attrs.field(factory=set)

    def add_file(self, status: os.stat_result) -> None:
        """Count a file; only the first of several names takes room."""
        file, usage = (status.st_dev, status.st_ino), self.usage
        usage.file_count += 1
        if file not in self._seen:
            if status.st_nlink != 1:
                self._seen.add(file)
            usage.disk_bytes += get_disk_bytes(status)
            if status.st_ctime >= self._since:
                usage.largest_file_bytes = max(usage.largest_file_bytes, status.st_size)
        if usage.disk_bytes > self._most[0] or usage.file_count > self._most[1]:
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
                self.usage.inspected_entry_count += 1
                with _ignore_missing():
                    self.add_file(entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.name)
        if depth == _DEEPEST:
            self.usage.has_uncounted_deep_directories |= bool(below)
            return
        for name in below:
            self.usage.inspected_entry_count += 1
            with _ignore_missing():
                inner = open_listable_directory(name, directory)
                try:
                    self.add_directory(inner, depth + 1)
                finally:
                    os.close(inner)

    def add_unlinked_files(self, pid: int, device: int, disk: tuple[int, int]) -> None:
        """Count the unlinked files that a process has open on a device or disk (`_measure_disk`).

        Each of its threads may have a table of descriptors of its own, and has one although the
        first thread has ended.
        """
        with _ignore_missing():
            for thread in os.listdir(f"/proc/{pid}/task"):
                self.usage.inspected_entry_count += 1
                with _ignore_missing(), os.scandir(f"/proc/{pid}/task/{thread}/fd") as descriptors:
                    for descriptor in descriptors:
                        self.usage.inspected_entry_count += 1
                        with _ignore_missing():
                            status = os.stat(descriptor.path)
                            file = status.st_dev, status.st_ino
                            if status.st_nlink or file in self._seen:
                                continue
                            # An overlay with its changes on this disk has other devices.
                            if status.st_dev == device or _measure_disk(descriptor.path) == disk:
                                self.add_file(status)


def _measure_disk(file: str | int) -> tuple[int, int]:
    """Return the size of a file's file system; an overlay has that of the one with its changes.

    Without the number of its inodes, which XFS changes with its free blocks.
    """
    system = os.statvfs(file)
    return system.f_frsize, system.f_blocks


@attrs.define
class DiskMeter:
    """The meter of one directory, which may take `size` bytes and `files` files.

    - `pids`: returns the processes whose unlinked files count.
    - `excluded_names`: names in the directory that are not the run's.
    - `run_start_time`: the start of the run, in seconds since the epoch.
    - `floor`: while fewer bytes of the file system are free, each look counts anew.
    - `last_usage`, `free_bytes`: the last usage, and the free bytes at the last look.
    """

    _directory: Path
    _size: float
    _files: float
    _pids: Callable[[], Iterable[int]]
    _excluded_names: Collection[str] = frozenset()
    run_start_time: float = 0.0
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
        count = _DiskCount(self.run_start_time, (self._size, self._files))
        top = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            count.add_directory(top, excluded_names=self._excluded_names)
            device, disk = os.fstat(top).st_dev, _measure_disk(top)
            for pid in self._pids():
                count.add_unlinked_files(pid, device, disk)
        except _LimitExceeded:
            pass
        finally:
            os.close(top)
        return count.usage

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
