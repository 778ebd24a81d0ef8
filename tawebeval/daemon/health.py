"""Readiness: checks of admission and disks, and the probe of a sandbox that has failed."""

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
from tawebeval.deferreds import WorkerThreads, run_in_background
from tawebeval.errors import Busy, Problem, format_size
from tawebeval.evaluations.registry import Registry
from tawebeval.linux.filetree import is_full

DISK_PERIOD = 5.0
"""Seconds between two checks of a disk that works."""

DISK_TIMEOUT = 5.0
"""Seconds that a check of a disk may take."""

PROBE_PERIOD = 10.0
"""Seconds between two probes of a sandbox that has failed."""

_CONTENT = b"tawebeval\n"

log = Logger()


@attrs.define(eq=False)
class Disk:
    """The file system of the directory `path`, checked by one thread at a time."""

    name: str
    path: Path
    _threads: WorkerThreads
    _clock: IReactorTime
    _fault: str | None = None
    _started: float | None = None  # clock time at which the running check started
    _next_check: float = 0.0  # clock time of the next check

    def check(self, free: int) -> None:
        """Start a check if one is due; with a fault, one is due at each call.

        `free` is the number of bytes that must be free.
        """
        now = self._clock.seconds()
        if self._started is None and (self._fault is not None or now >= self._next_check):
            self._started, self._next_check = now, now + DISK_PERIOD
            run_in_background(self._run_check(free), log, "defect: a disk could not be checked")

    async def _run_check(self, free: int) -> None:
        try:
            self._fault = await self._threads.run(find_fault, self.path, free)
        finally:
            self._started = None

    @property
    def fault(self) -> str | None:
        """The fault, as the predicate of a sentence about the disk; None if it works."""
        if self._started is not None and self._clock.seconds() - self._started > DISK_TIMEOUT:
            return f"hangs: writing a small file took over {DISK_TIMEOUT:g} seconds"
        return self._fault


@attrs.define
class Readiness:
    """Readiness for new evaluations: admission, and `free` bytes on each of the disks."""

    _registry: Registry
    _tally: EvaluationTally
    _disks: Sequence[Disk]
    free: int

    def check(self) -> None:
        """Check the disks that are due. To be called once a second."""
        for disk in self._disks:
            disk.check(self.free)

    def find_obstacles(self) -> list[str]:
        """Return the reasons why a new evaluation would be refused or lost, as sentences.

        Anonymous clients may read them: they contain no paths and no names of callers.
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
            found.append(f"the last evaluation was lost: {what}")
        return found


class SandboxProbe(Service):
    """Probe of the sandbox, repeated while the last evaluation has failed because of the daemon.

    `probe_sandbox` blocks and returns the problem, or None. Without the probe a daemon behind a
    proxy would never become ready again: the proxy sends evaluations to ready daemons only.
    """

    name = "probe"

    def __init__(
        self,
        tally: EvaluationTally,
        probe_sandbox: Callable[[], Problem | None],
        threads: WorkerThreads,
        clock: Any,
    ) -> None:
        self._tally = tally
        self._probe_sandbox = probe_sandbox
        self._threads = threads
        self._clock = clock
        self._last_problem: Problem | None = None
        self._probes = LoopingCall(self._probe)
        self._probes.clock = clock

    def startService(self) -> None:
        """Start probing."""
        super().startService()
        self._probes.start(PROBE_PERIOD, now=False)

    def stopService(self) -> None:
        """Stop probing."""
        super().stopService()
        self._probes.stop()

    def _probe(self) -> Deferred[None] | None:
        fault = self._tally.fault
        return None if fault is None else Deferred.fromCoroutine(self._run_check(fault))

    async def _run_check(self, fault: tuple[float, str]) -> None:
        try:
            problem = await self._threads.run(self._probe_sandbox)
        except Exception:  # noqa: BLE001  (a timer that fails once stops for good)
            log.failure("defect: the sandbox could not be probed")
            return
        if self._tally.fault is not fault:
            return  # an evaluation has ended meanwhile: its result is newer
        if problem is None:
            log.info(
                "the sandbox works again; evaluations were lost because: {fault}", fault=fault[1]
            )
            self._tally.set_fault(None, self._clock.seconds())
        elif problem != self._last_problem:
            what, remedy = problem
            log.warn("the sandbox does not work: {what}; {remedy}", what=what, remedy=remedy)
        self._last_problem = problem


def find_fault(path: Path, free: int) -> str | None:
    """Return the fault of a file system, None if it works and has `free` bytes left. Blocks."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    # File systems without a fixed number of inodes report 0 of 0.
    full = status.f_files > 0 and status.f_favail == 0
    full = full or status.f_bavail * status.f_frsize < free
    try:
        write_and_read(path)
    except OSError as error:
        if not is_full(error):
            return f"cannot be written to: {error.strerror}"
        full = True
    return (
        f"has less than {format_size(free)} free (health.free_disk), or no free inode"
        if full
        else None
    )


def write_and_read(directory: Path) -> None:
    """Write a small unnamed file and read it back. Blocks. Raises: OSError.

    statvfs(3) does not always show that the kernel has shut a file system down after an error.
    """
    with TemporaryFile(dir=directory, buffering=0) as file:
        file.write(_CONTENT)
        file.seek(0)
        if file.read() != _CONTENT:
            raise OSError(errno.EIO, "the bytes read back differ from those written")
