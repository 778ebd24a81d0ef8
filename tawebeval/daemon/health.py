"""Readiness: whether the daemon would take work, and the probe of a sandbox that has failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import attrs
from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from tawebeval.core.tally import EvaluationTally
from tawebeval.deferreds import WorkerThreads, in_background
from tawebeval.errors import Busy, Problem
from tawebeval.evaluations.registry import Registry
from tawebeval.linux.filetree import is_full

DISK_PERIOD = 5.0
"""Seconds between two trials of a disk that works."""

DISK_TIMEOUT = 5.0
"""Seconds that a trial of a disk may take."""

PROBE_PERIOD = 10.0
"""Seconds between two probes of a sandbox that has failed."""

_CONTENT = b"tawebeval\n"

log = Logger()


@attrs.define(eq=False)
class Disk:
    """The file system of the directory `path`, tried by one thread at a time."""

    name: str
    path: Path
    _threads: WorkerThreads
    _clock: IReactorTime
    _fault: str | None = None
    _began: float | None = None  # when the trial that is being made began, in seconds of the clock
    _due: float = 0.0  # when the next one is

    def check(self, free: int) -> None:
        """Begin a trial if one is due, as it always is while something is wrong.

        The disk has to have `free` bytes left.
        """
        now = self._clock.seconds()
        if self._began is None and (self._fault is not None or now >= self._due):
            self._began, self._due = now, now + DISK_PERIOD
            in_background(self._try(free), log, "a disk could not be tried")

    async def _try(self, free: int) -> None:
        try:
            self._fault = await self._threads.run(find_fault, self.path, free)
        finally:
            self._began = None

    @property
    def fault(self) -> str | None:
        """What is wrong with the disk, to be read after its name; None if it works."""
        if self._began is not None and self._clock.seconds() - self._began > DISK_TIMEOUT:
            return f"does not answer: a small file was not written within {DISK_TIMEOUT:g} seconds"
        return self._fault


@attrs.define
class Readiness:
    """Checks of what a new evaluation needs: admission, and `free` bytes on each of the `disks`."""

    _registry: Registry
    _tally: EvaluationTally
    _disks: Sequence[Disk]
    free: int

    def check(self) -> None:
        """Try the disks that are due; to be called once a second."""
        for disk in self._disks:
            disk.check(self.free)

    def obstacles(self) -> list[str]:
        """Return why no work would be taken, as sentences; none if work would be taken.

        Strangers may read them: they contain no paths and no names of callers.
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


class SandboxProbe(Service):
    """Repeated trial of the sandbox while the last evaluation to end was lost by a fault of ours.

    `trial` returns why the sandbox does not work, or None, and blocks. A proxy that sends
    evaluations only to ready daemons would send none that could show that the fault is gone.
    """

    name = "probe"

    def __init__(
        self,
        tally: EvaluationTally,
        trial: Callable[[], Problem | None],
        threads: WorkerThreads,
        clock: Any,
    ) -> None:
        self._tally = tally
        self._trial = trial
        self._threads = threads
        self._clock = clock
        self._told: Problem | None = None
        self._trials = LoopingCall(self._probe)
        self._trials.clock = clock

    def startService(self) -> None:
        """Begin to probe."""
        super().startService()
        self._trials.start(PROBE_PERIOD, now=False)

    def stopService(self) -> None:
        """Begin no more trials."""
        super().stopService()
        self._trials.stop()

    def _probe(self) -> Deferred[None] | None:
        fault = self._tally.fault
        return None if fault is None else Deferred.fromCoroutine(self._try(fault))

    async def _try(self, fault: tuple[float, str]) -> None:
        try:
            problem = await self._threads.run(self._trial)
        except Exception:  # noqa: BLE001  (a timer that fails once stops for good)
            log.failure("the sandbox could not be tried")
            return
        if self._tally.fault is not fault:
            return  # an evaluation has ended meanwhile, which knows better
        if problem is None:
            log.info("what an evaluation was lost by is mended: {fault}", fault=fault[1])
            self._tally.judge(None, self._clock.seconds())
        elif problem != self._told:
            what, remedy = problem
            log.warn("the sandbox does not work: {what}; {remedy}", what=what, remedy=remedy)
        self._told = problem


def find_fault(path: Path, free: int) -> str | None:
    """Return what is wrong with a file system, None if it has `free` bytes left. Blocks."""
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
    """Write a small file without a name, and read it. Blocks. Raises: OSError.

    The status of a file system that the kernel closed after an error need not show the error.
    """
    with TemporaryFile(dir=directory, buffering=0) as file:
        file.write(_CONTENT)
        file.seek(0)
        if file.read() != _CONTENT:
            raise OSError(errno.EIO, "what is read there is not what was written")
