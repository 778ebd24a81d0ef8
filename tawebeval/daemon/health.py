"""Whether the daemon would take work, and if not, why."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

import attrs
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from tawebeval.core.tally import EvaluationTally
from tawebeval.deferreds import Threads, in_background
from tawebeval.errors import Busy
from tawebeval.evaluations.registry import Registry
from tawebeval.linux.diskfaults import is_full

PERIOD = 5.0
"""Seconds between two trials of a disk with which nothing is wrong."""

PATIENCE = 5.0
"""Seconds that a disk may take for one."""

_CONTENT = b"tawebeval\n"

log = Logger()


@attrs.define(eq=False)
class Disk:
    """The file system of the directory `path`, which is tried by a thread, once at a time."""

    name: str
    path: Path
    _threads: Threads
    _clock: IReactorTime
    _fault: str | None = None
    _began: float | None = None  # when the trial that is being made began, in seconds of the clock
    _due: float = 0.0  # when the next one is

    def look(self, free: int) -> None:
        """Begin a trial if one is due; where something is wrong that is always."""
        now = self._clock.seconds()
        if self._began is None and (self._fault is not None or now >= self._due):
            self._began, self._due = now, now + PERIOD
            in_background(self._try(free), log, "a disk could not be tried")

    async def _try(self, free: int) -> None:
        try:
            self._fault = await self._threads.run(find_fault, self.path, free)
        finally:
            self._began = None

    @property
    def fault(self) -> str | None:
        """What is wrong with it, in words for after its name."""
        if self._began is not None and self._clock.seconds() - self._began > PATIENCE:
            return f"does not answer: a small file was not written within {PATIENCE:g} seconds"
        return self._fault


@attrs.define
class Readiness:
    """Looks at what a new evaluation needs first.

    On each of the `disks`, whose names are for people, `free` bytes have to be left.
    """

    _registry: Registry
    _tally: EvaluationTally
    _disks: Sequence[Disk]
    free: int

    def look(self) -> None:
        """Try the disks now and then; to be called once a second."""
        for disk in self._disks:
            disk.look(self.free)

    def obstacles(self) -> list[str]:
        """Return sentences that say why no work would be taken; none where it would.

        Strangers may read them: there are no paths in them, nor anybody's names.
        """
        found = []
        try:
            self._registry.check_admission()
        except Busy as error:
            found.append(error.detail)
        found += [
            f"the file system of the {disk.name} {disk.fault}"
            for disk in self._disks
            if disk.fault is not None
        ]
        if self._tally.fault is not None:
            _, what = self._tally.fault
            found.append(f"the last evaluation was lost here: {what}")
        return found


def find_fault(path: Path, free: int) -> str | None:
    """Return what is wrong with a file system, or None if `free` bytes are left there. Blocks."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    # Some file systems have no fixed number of inodes, and say 0 of 0.
    full = status.f_files > 0 and status.f_favail == 0
    full = full or status.f_bavail * status.f_frsize < free
    try:
        write_and_read(path)
    except OSError as error:
        if not is_full(error):
            return f"cannot be written to: {error.strerror}"
        full = True
    return "is full, or nearly so" if full else None


def write_and_read(directory: Path) -> None:
    """Write a small file without a name, and read it. Blocks. Raises OSError.

    What the kernel says of a file system that it closed after an error need not show that.
    """
    with TemporaryFile(dir=directory, buffering=0) as file:
        file.write(_CONTENT)
        file.seek(0)
        if file.read() != _CONTENT:
            raise OSError(errno.EIO, "what is read there is not what was written")
