"""How much of the disk a run takes. Everything here blocks.

A file system without project quotas does not tell it. So the files in the run's directories are
counted, and those without a name that a process of the run has open. A count is repeated when the
file system has become fuller by a good part of what the run may still take, and now and then.

A file that is mapped and not open is not counted: /proc tells which part of it is mapped, not how
large it is. And a process with many threads can keep whoever reads its mappings waiting for as
long as it likes, since both take the same lock.
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

from tawebeval.linux.opening import LISTED, open_directory

# Levels of directories, for each of which a descriptor is open: what is deeper was made to be in
# the way.
_DEEPEST = 100
_ANYWAY = 10.0  # seconds after which is counted although the file system looks as before
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)

LITTLE = 5_000
"""Looks that a count may take where others wait for it: some 50 ms."""

BLOCK = 4096
"""Bytes that a small file takes at most beyond its own."""
MUCH = 2**20
"""Bytes that a run has on the disk before it matters to a disk that is nearly full."""


class TooMuchWork(Exception):
    """A count would take more looks than it may."""


class _Enough(Exception):
    """It is known that there is more than there may be."""


@contextmanager
def _gone() -> Iterator[None]:
    """Pass over what is gone meanwhile, or not ours; never over what is just not to be seen now.

    Without descriptors nothing could be looked at, and the count would be 0.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise


@attrs.define
class DiskUse:
    """What was counted: bytes on the disk, files and directories, the size of the largest.

    `too_deep` tells that there are directories below those that were counted, `looks` how many
    entries of directories, threads and descriptors were looked at.
    """

    size: int = 0
    files: int = 0
    largest: int = 0
    too_deep: bool = False
    looks: int = attrs.field(default=0, eq=False)


@attrs.define
class Count(DiskUse):
    """What has been counted until now, and what is needed to count on.

    What has not changed `since` then, in seconds since the epoch, is no candidate for the
    largest. `most` is how many bytes and files are enough to know; `work` how many looks the
    count may take.
    """

    _since: float = attrs.field(default=0.0, repr=False, eq=False)
    _most: tuple[float, float] = attrs.field(default=(inf, inf), repr=False, eq=False)
    _work: float = attrs.field(default=inf, repr=False, eq=False)
    _seen: set[tuple[int, int]] = attrs.field(factory=set, repr=False, eq=False)

    def add(self, status: os.stat_result) -> None:
        """Count a file; of several names of one only the first takes room."""
        self.files += 1
        file = status.st_dev, status.st_ino
        if file not in self._seen:
            if status.st_nlink != 1:
                self._seen.add(file)
            self.size += status.st_blocks * 512
            if status.st_ctime >= self._since:
                self.largest = max(self.largest, status.st_size)
        if self.size > self._most[0] or self.files > self._most[1]:
            raise _Enough

    def _look(self) -> None:
        self.looks += 1
        if self.looks > self._work:
            raise TooMuchWork

    def add_below(
        self, directory: int, depth: int = 0, apart: Collection[str] = frozenset()
    ) -> None:
        """Count what is below an open directory, without ever following a symbolic link.

        What has one of the names `apart` there is not counted.
        """
        below = []
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name in apart:
                    continue
                self._look()
                with _gone():
                    self.add(entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.name)
        if depth == _DEEPEST:
            self.too_deep = self.too_deep or bool(below)
            return
        for name in below:
            self._look()
            with _gone():
                inner = open_directory(name, directory, LISTED)
                try:
                    self.add_below(inner, depth + 1)
                finally:
                    os.close(inner)

    def add_nameless(self, pid: int, devices: Collection[int]) -> None:
        """Count what a process has open on those devices although it was removed.

        Each of its threads may have a table of descriptors of its own, and has one although the
        first thread has ended.
        """
        with _gone():
            for thread in os.listdir(f"/proc/{pid}/task"):
                self._look()
                with _gone(), os.scandir(f"/proc/{pid}/task/{thread}/fd") as descriptors:
                    for descriptor in descriptors:
                        self._look()
                        with _gone():
                            status = os.stat(descriptor.path)
                            if status.st_nlink == 0 and status.st_dev in devices:
                                self._add_once(status)

    def _add_once(self, status: os.stat_result) -> None:
        if (status.st_dev, status.st_ino) not in self._seen:
            self.add(status)


def measure(
    directory: Path,
    pids: Iterable[int],
    apart: Collection[str] = frozenset(),
    since: float = 0.0,
    devices: Collection[int] = frozenset(),
    most: tuple[float, float] = (inf, inf),
    work: float = inf,
) -> DiskUse:
    """Return what lies below `directory`, and what those processes hold of its file system.

    `apart`, `since`, `most` and `work` are as `Count` says. On `devices` they hold of it, too:
    those are of overlays, whose changes lie in it. Raises OSError, TooMuchWork.
    """
    count = Count(since=since, most=most, work=work)
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        count.add_below(top, apart=apart)
        devices = {os.fstat(top).st_dev, *devices}
        for pid in pids:
            count.add_nameless(pid, devices)
    except _Enough:
        pass
    finally:
        os.close(top)
    return DiskUse(count.size, count.files, count.largest, count.too_deep, count.looks)


def told_use(directory: Path, system: os.statvfs_result) -> DiskUse | None:
    """Return what the file system says that a directory takes which it holds to a quota.

    `system` is what it says of itself; None is that it says the same of the directory. Raises
    OSError.
    """
    there = os.statvfs(directory)
    if there.f_blocks >= system.f_blocks:
        return None
    return DiskUse((there.f_blocks - there.f_bfree) * there.f_frsize, there.f_files - there.f_ffree)


@attrs.define
class DiskWatch:
    """Keeps an eye on one directory, which may take `size` bytes and `files` files.

    What in it is called as one of `apart` is not the run's. `since` is when the run began, in
    seconds since the epoch. `devices` are as `measure` says. While less than `floor` bytes of the
    file system are free, each look counts anew. Where the directory is `held` to a quota the file
    system tells how much is in it. `use` is what was found last, `free` how many bytes were free at
    the last look.
    """

    _directory: Path
    _size: int
    _files: int
    _pids: Callable[[], Iterable[int]]
    _apart: Collection[str] = frozenset()
    _since: float = 0.0
    devices: Collection[int] = frozenset()
    _time: Callable[[], float] = time.monotonic
    _floor: int = 0
    _held: bool = False
    use: DiskUse = attrs.field(factory=DiskUse)
    free: float = inf
    _left: tuple[int, int] | None = None  # of the file system, at the last count
    _counted: float = 0.0

    def look(self, again: bool = False, work: float = inf) -> DiskUse:
        """Return what was found last; files are counted anew if `again` or where it may matter.

        Raises OSError, and TooMuchWork where that takes more than `work` looks, as the last count
        may have told.
        """
        system = os.statvfs(self._directory.parent if self._held else self._directory)
        self.free = system.f_bavail * system.f_frsize
        left = system.f_bfree * system.f_frsize, system.f_ffree
        told = told_use(self._directory, system) if self._held else None
        if again or (told is None and self._stale(left)):
            if self.use.looks > work:
                raise TooMuchWork
            self.use = measure(
                self._directory,
                self._pids(),
                self._apart,
                self._since,
                self.devices,
                (self._size, self._files),
                work,
            )
            self._left = left
            self._counted = self._time()
        if told is not None:
            self.use = attrs.evolve(self.use, size=told.size, files=told.files)
        return self.use

    def _stale(self, left: tuple[int, int]) -> bool:
        if self._left is None or self._time() - self._counted > _ANYWAY or self.free < self._floor:
            return True
        rests = self._size - self.use.size, self._files - self.use.files
        return any(
            then - now > rest / 2 for then, now, rest in zip(self._left, left, rests, strict=True)
        )
