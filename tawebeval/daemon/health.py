"""Readiness: checks of admission and disks, and the probe of a sandbox that has failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import attrs
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from tawebeval.core.evaluations import EvaluationCounters
from tawebeval.deferreds import WorkerThreads, run_in_background
from tawebeval.errors import ServerBusy, SetupProblem, format_size
from tawebeval.evaluations.registry import EvaluationRegistry
from tawebeval.linux.filetree import is_disk_full

DISK_CHECK_PERIOD = 5.0
"""Seconds between two checks of a disk that works."""

DISK_CHECK_TIMEOUT = 5.0
"""Seconds that a check of a disk may take."""

SANDBOX_PROBE_PERIOD = 10.0
"""Seconds between two probes of a sandbox that has failed."""

PROBE_CONTENT = b"tawebeval\n"

log = Logger()


@attrs.define(eq=False)
class DiskCheck:
    """The file system of the directory `path`, checked by one thread at a time."""

    name: str
    path: Path
    _threads: WorkerThreads
    _clock: IReactorTime
    _fault: str | None = None
    _started: float | None = None  # clock time at which the running check started
    _next_check: float = 0.0  # clock time of the next check

    def start_check_if_due(self, min_free_bytes: int) -> None:
        """Start a check if one is due; with a fault, one is due at each call.

        `min_free_bytes` must be free.
        """
        now = self._clock.seconds()
        if self._started is None and (self._fault is not None or now >= self._next_check):
            self._started, self._next_check = now, now + DISK_CHECK_PERIOD
            run_in_background(
                self._run_check(min_free_bytes), log, "defect: a disk could not be checked"
            )

    async def _run_check(self, min_free_bytes: int) -> None:
        try:
            self._fault = await self._threads.run_in_thread(
                find_disk_fault, self.path, min_free_bytes
            )
        finally:
            self._started = None

    @property
    def fault(self) -> str | None:
        """The fault, as the predicate of a sentence about the disk; None if it works."""
        if self._started is not None and self._clock.seconds() - self._started > DISK_CHECK_TIMEOUT:
            return f"hangs: writing a small file took over {DISK_CHECK_TIMEOUT:g} seconds"
        return self._fault


@attrs.define
class Readiness:
    """Readiness for new evaluations: admission, and `min_free_bytes` bytes on each of the disks."""

    _registry: EvaluationRegistry
    _tally: EvaluationCounters
    _disks: Sequence[DiskCheck]
    min_free_bytes: int

    def check_disks(self) -> None:
        """Check the disks that are due. To be called once a second."""
        for disk in self._disks:
            disk.start_check_if_due(self.min_free_bytes)

    def find_unreadiness_reasons(self) -> list[str]:
        """Return the reasons why a new evaluation would be refused or lost, as sentences.

        Anonymous clients may read them: they contain no paths and no names of callers.
        """
        found = []
        try:
            self._registry.check_readiness()
        except ServerBusy as error:
            found.append(error.detail)
        found += [
            f"the file system of the {disk.name} {disk.fault}"
            for disk in self._disks
            if disk.fault is not None
        ]
        store = self._registry.context.store
        if store is not None and store.problem is not None:
            found.append("evaluations cannot be stored; see the log")
        if self._tally.latest_fault is not None:
            _, what = self._tally.latest_fault
            found.append(f"the last evaluation was lost: {what}")
        return found


@attrs.define(eq=False)
class SandboxProbe:
    """Probe of the sandbox, repeated while the last evaluation has failed because of the daemon.

    `probe_sandbox` blocks and returns the problem, or None. Without the probe a daemon behind a
    proxy would never become ready again: the proxy sends evaluations to ready daemons only.
    """

    _tally: EvaluationCounters
    _probe_sandbox: Callable[[], SetupProblem | None]
    _threads: WorkerThreads
    _clock: IReactorTime
    _last_problem: SetupProblem | None = None
    _is_running: bool = False

    def start_probe_if_needed(self) -> None:
        """Start a probe. To be called every `SANDBOX_PROBE_PERIOD` seconds."""
        fault = self._tally.latest_fault
        if fault is not None and not self._is_running:
            self._is_running = True
            run_in_background(self._probe(fault), log, "defect: the sandbox could not be probed")

    async def _probe(self, fault: tuple[float, str]) -> None:
        try:
            problem = await self._threads.run_in_thread(self._probe_sandbox)
        except OSError as error:
            log.warn("the sandbox could not be probed: {error}", error=error)
            return
        finally:
            self._is_running = False
        if self._tally.latest_fault is not fault:
            return  # an evaluation has ended meanwhile: its result is newer
        if problem is None:
            log.info(
                "the sandbox works again; evaluations were lost because: {fault}", fault=fault[1]
            )
            self._tally.set_latest_fault(None, self._clock.seconds())
        elif problem != self._last_problem:
            what, remedy = problem
            log.warn("the sandbox does not work: {what}; {remedy}", what=what, remedy=remedy)
        self._last_problem = problem


def find_disk_fault(path: Path, min_free_bytes: int) -> str | None:
    """Return the fault of a file system, None if it works and has `min_free_bytes` left. Blocks."""
    try:
        status = os.statvfs(path)
    except FileNotFoundError:
        return "cannot be used: its directory was removed; restart the daemon"
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    # File systems without a fixed number of inodes report 0 of 0.
    full = status.f_files > 0 and status.f_favail == 0
    full = full or status.f_bavail * status.f_frsize < min_free_bytes
    try:
        probe_disk_write(path)
    except OSError as error:
        if not is_disk_full(error):
            return f"cannot be written to: {error.strerror}"
        full = True
    return (
        f"has less than {format_size(min_free_bytes)} free (twice limits.free_disk), or no free"
        " inode"
        if full
        else None
    )


def probe_disk_write(directory: Path) -> None:
    """Write a small unnamed file and read it back. Blocks. Raises: OSError.

    statvfs(3) does not always show that the kernel has shut a file system down after an error.
    """
    with TemporaryFile(dir=directory, buffering=0) as file:
        file.write(PROBE_CONTENT)
        file.seek(0)
        if file.read() != PROBE_CONTENT:
            raise OSError(errno.EIO, "the bytes read back differ from those written")
