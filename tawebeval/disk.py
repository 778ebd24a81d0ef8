"""How much of the disk a run takes. Everything here blocks.

There is no quota that every machine has, so what lies in the run's directories is counted,
and what is open or mapped there but has no name any more. Counting is dear: it is done when the
file system has become fuller by a good part of what the run may still take, and now and then.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

from tawebeval.opening import LISTED, open_directory

# Levels of directories, for each of which a descriptor is open: what is deeper was made to be in
# the way.
_DEEPEST = 100
_ANYWAY = 10.0  # seconds after which is counted although the file system looks as before
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)


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

    `too_deep` tells that there are directories below those that were counted.
    """

    size: int = 0
    files: int = 0
    largest: int = 0
    too_deep: bool = False


@attrs.define
class Count(DiskUse):
    """What has been counted until now, and what is needed to count on.

    What has not changed `since` then, in seconds since the epoch, is no candidate for the
    largest.
    """

    _since: float = attrs.field(default=0.0, repr=False, eq=False)
    _seen: set[tuple[int, int]] = attrs.field(factory=set, repr=False, eq=False)
    _mapped: dict[tuple[int, int], int] = attrs.field(factory=dict, repr=False, eq=False)

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
                with _gone():
                    self.add(entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.name)
        if depth == _DEEPEST:
            self.too_deep = self.too_deep or bool(below)
            return
        for name in below:
            with _gone():
                inner = open_directory(name, directory, LISTED)
                try:
                    self.add_below(inner, depth + 1)
                finally:
                    os.close(inner)

    def add_nameless(self, pid: int, devices: Collection[int]) -> None:
        """Count what a process has open on those devices although it was removed."""
        with _gone():
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with _gone():
                    status = os.stat(f"/proc/{pid}/fd/{descriptor}")
                    if status.st_nlink == 0 and status.st_dev in devices:
                        self.add(status)

    def add_mapped(self, pid: int, devices: Collection[int]) -> None:
        """Count what a process has mapped on those devices although it was removed and closed.

        How large such a file is only root can learn: what counts is how far it is mapped.
        """
        # A line ends with LF alone: the kernel leaves a CR in a file's name as it is.
        with _gone(), open(f"/proc/{pid}/maps", errors="replace", newline="\n") as file:
            for line in file:
                with suppress(ValueError):  # no such line is known; it shall hide no other
                    self._add_mapping(line, devices)

    def _add_mapping(self, line: str, devices: Collection[int]) -> None:
        if not line.endswith(" (deleted)\n"):
            return
        addresses, _, offset, numbers, inode, _ = line.split(None, 5)
        start, end = (int(number, 16) for number in addresses.split("-"))
        major, minor = (int(number, 16) for number in numbers.split(":"))
        mapped = os.makedev(major, minor), int(inode)
        if mapped[0] in devices and mapped not in self._seen:
            known = self._mapped.get(mapped)
            extent = max(known or 0, int(offset, 16) + end - start)
            self.files += known is None
            self.size += extent - (known or 0)
            self._mapped[mapped] = extent


def measure(
    directory: Path,
    pids: Iterable[int],
    apart: Collection[str] = frozenset(),
    since: float = 0.0,
    devices: Collection[int] = frozenset(),
) -> DiskUse:
    """Return what lies below `directory`, and what those processes hold of its file system.

    `apart` and `since` are as `Count` says. On `devices` they hold of it, too: those are of
    overlays, whose changes lie in it.
    """
    count = Count(since=since)
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        count.add_below(top, apart=apart)
        devices = {os.fstat(top).st_dev, *devices}
    finally:
        os.close(top)
    pids = list(pids)
    for pid in pids:
        count.add_nameless(pid, devices)
    for pid in pids:  # what somebody has open was counted exactly
        count.add_mapped(pid, devices)
    return DiskUse(count.size, count.files, count.largest, count.too_deep)


@attrs.define
class DiskWatch:
    """Keeps an eye on one directory, which may take `size` bytes and `files` files.

    What in it is called as one of `apart` is not the run's. `since` is when the run began, in
    seconds since the epoch. `devices` are as `measure` says.
    """

    _directory: Path
    _size: int
    _files: int
    _pids: Callable[[], Iterable[int]]
    _apart: Collection[str] = frozenset()
    _since: float = 0.0
    devices: Collection[int] = frozenset()
    _time: Callable[[], float] = time.monotonic
    _use: DiskUse = attrs.field(factory=DiskUse)
    _free: tuple[int, int] | None = None
    _counted: float = 0.0

    def look(self, again: bool = False) -> DiskUse:
        """Return what was counted last, which is counted anew if `again` or where it may matter."""
        system = os.statvfs(self._directory)
        free = system.f_bfree * system.f_frsize, system.f_ffree
        if again or self._stale(free):
            self._use = measure(
                self._directory, self._pids(), self._apart, self._since, self.devices
            )
            self._free = free
            self._counted = self._time()
        return self._use

    def _stale(self, free: tuple[int, int]) -> bool:
        if self._free is None or self._time() - self._counted > _ANYWAY:
            return True
        left = self._size - self._use.size, self._files - self._use.files
        return any(
            then - now > rest / 2 for then, now, rest in zip(self._free, free, left, strict=True)
        )
