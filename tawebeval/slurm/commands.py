"""Slurm's commands squeue and scancel, as children with a deadline.

They take no thread: while the controller is away each waits for it, up to its deadline.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.deferreds import run_in_background
from tawebeval.errors import FailureReason
from tawebeval.linux.child import ProcessTransport
from tawebeval.slurm.jobs import SQUEUE_OPTIONS, QueuedJob, parse_squeue

COMMAND_TIMEOUT = 15.0
"""Seconds for one command."""

SQUEUE_PERIOD = 2.0
"""Seconds before each squeue, which tells of all jobs together."""

_PASSED = ("SLURM_CONF", "PATH", "SLURM_JWT")
_CANCEL_LOOKS = 10  # for jobs to cancel
_MISSES = 15  # looks without a job that was in the queue before, until it counts as gone

log = Logger()


LOSS_REASONS: tuple[FailureReason, ...] = (
    "node",
    "preempted",
    "memory",
    "timeout",
    "revoked",
    "lost",
)
"""Reasons for which a job ends without an outcome."""


@attrs.define(eq=False)
class JobCounters:
    """Counts of jobs. `is_controller_unreachable`: whether the last squeue has failed."""

    lost_jobs_by_reason: Counter[str] = attrs.field(
        factory=lambda: Counter(dict.fromkeys(LOSS_REASONS, 0))
    )
    restarted_jobs: int = 0
    is_controller_unreachable: bool = False
    _running: dict[str, bool] = attrs.field(factory=dict)  # by name: whether a node runs it

    def record_job_state(self, name: str, *, is_running: bool) -> None:
        """Note a job that waits or runs."""
        self._running[name] = is_running

    def record_job_end(self, name: str) -> None:
        """Note the end of a job's srun."""
        self._running.pop(name, None)

    def count_jobs(self) -> dict[str, int]:
        """Return the numbers of jobs that wait and that run."""
        running = sum(self._running.values())
        return {"waiting": len(self._running) - running, "running": running}


def build_command_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of Slurm's commands, from that of the daemon."""
    passed = {name: environment[name] for name in _PASSED if name in environment}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", **passed}


class SlurmCommandFailed(Exception):
    """A command that has failed; `str()` is the end of its stderr."""


class _Command(ProcessProtocol):
    """One command: its stdout, and its end."""

    def __init__(self, clock: Any) -> None:
        self.ended = Deferred[str]()
        self._printed = {1: bytearray(), 2: bytearray()}
        self._deadline = clock.callLater(COMMAND_TIMEOUT, self._on_deadline)
        self._process: ProcessTransport

    def makeConnection(self, transport: Any) -> None:
        self._process = transport
        super().makeConnection(transport)

    def _on_deadline(self) -> None:
        self._printed[2] += b"no answer within %d seconds" % COMMAND_TIMEOUT
        self._process.signal_group(9)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        self._printed[childFD] += data

    def processEnded(self, reason: Failure) -> None:
        is_late = not self._deadline.active()
        if not is_late:
            self._deadline.cancel()
        if is_late or isinstance(reason.value, ProcessTerminated):
            said = self._printed[2][-400:].decode(errors="replace").strip()
            self.ended.errback(SlurmCommandFailed(said or str(reason.value)))
        else:
            self.ended.callback(self._printed[1].decode(errors="replace"))


SpawnCommand = Callable[[ProcessProtocol, Sequence[str], Mapping[str, str], str], object]
WatchJob = Callable[[QueuedJob | None], object]
IsMeant = Callable[[str], bool]


@attrs.define(eq=False)
class _Watch:
    on_state: WatchJob
    is_to_end: bool
    misses_left: int


@attrs.define(eq=False)
class SlurmCommands:
    """Slurm's commands: one watch of the queue for all jobs, and cancellations."""

    _clock: Any
    _spawn: SpawnCommand
    _environment: Mapping[str, str] = attrs.field(factory=build_command_environment)
    counters: JobCounters = attrs.field(factory=JobCounters)
    _watches: dict[str, _Watch] = attrs.field(factory=dict)  # by name
    _cancels: dict[IsMeant, int] = attrs.field(factory=dict)  # looks that are left
    _is_polling: bool = False

    def watch_job(self, name: str, on_state: WatchJob, *, misses: int | None = None) -> None:
        """Call `on_state` with what squeue says of a job now and then, None if it is gone.

        A controller that has lost its state may forget a job without a word to srun. `misses`, for
        a job without srun, or of an earlier process of the daemon: the looks without the job until
        it counts as gone; its end is told, too. Without it a job is gone only after it was in the
        queue.
        """
        self._watches[name] = _Watch(on_state, misses is not None, misses or 0)
        self._poll()

    def unwatch_job(self, name: str) -> None:
        """End `watch_job`."""
        self._watches.pop(name, None)

    def cancel_job(self, name: str) -> None:
        """Cancel the jobs of a name.

        A job of an srun that was killed would otherwise keep its node until its time is over.
        """
        self.cancel_jobs(name.__eq__)

    def cancel_jobs(self, is_meant: IsMeant) -> None:
        """Cancel jobs by their names, also those that are in the queue only a few looks later."""
        self._cancels[is_meant] = _CANCEL_LOOKS
        self._poll()

    def _poll(self) -> None:
        if not self._is_polling:
            self._is_polling = True
            run_in_background(self._watch_queue(), log, "defect: Slurm's queue is not watched")

    async def _watch_queue(self) -> None:
        try:
            while True:
                await deferLater(self._clock, SQUEUE_PERIOD)
                if not (self._watches or self._cancels):
                    return
                await self._look()
        finally:
            self._is_polling = self.counters.is_controller_unreachable = False

    async def _look(self) -> None:
        ended = ["--states=all"] if any(one.is_to_end for one in self._watches.values()) else []
        try:
            jobs = parse_squeue(await self._run("squeue", *SQUEUE_OPTIONS, *ended))
        except (SlurmCommandFailed, OSError) as error:
            if not self.counters.is_controller_unreachable:  # once while the controller is away
                log.warn("the queue of Slurm is unknown: {error}", error=error)
            self.counters.is_controller_unreachable = True
            return
        self.counters.is_controller_unreachable = False
        for name, watch in list(self._watches.items()):
            job = jobs.get(name)
            if job is not None:
                watch.misses_left = max(watch.misses_left, _MISSES)
                watch.on_state(job)
            elif watch.misses_left:
                watch.misses_left -= 1
                if not watch.misses_left:
                    watch.on_state(None)
        await self._cancel([job for job in jobs.values() if job.is_alive])

    async def _cancel(self, jobs: Sequence[QueuedJob]) -> None:
        """Cancel jobs by one command: there may be hundreds."""
        found = [job.identifier for job in jobs if any(meant(job.name) for meant in self._cancels)]
        self._cancels = {meant: left - 1 for meant, left in self._cancels.items() if left > 1}
        if found:
            try:
                await self._run("scancel", *found)
            except (SlurmCommandFailed, OSError) as error:
                words = "{count} jobs of Slurm are not cancelled: {error}"
                log.warn(words, count=len(found), error=error)

    async def _run(self, *argv: str) -> str:
        """Return the stdout of a command. Raises: SlurmCommandFailed, OSError."""
        command = _Command(self._clock)
        self._spawn(command, argv, self._environment, "/")
        return await command.ended
