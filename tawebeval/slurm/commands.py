"""Slurm's commands squeue, scontrol and scancel, as children with a deadline.

They take no thread: while the controller is away each waits for it, up to its deadline.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from twisted.internet.defer import Deferred, DeferredSemaphore
from twisted.internet.error import ProcessTerminated
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.deferreds import run_in_background
from tawebeval.errors import FailureReason
from tawebeval.linux.child import ProcessTransport
from tawebeval.slurm.jobs import SQUEUE_OPTIONS, QueuedJob, parse_scontrol_job, parse_squeue

COMMAND_TIMEOUT = 15.0
"""Seconds for one command."""

SQUEUE_PERIOD = 2.0
"""Seconds between the end of one squeue and the begin of the next, for all jobs together."""

_AT_ONCE = 4  # commands
_PRINTED = 8 * 2**20  # bytes of stdout, and of stderr: 50,000 jobs
_UNKNOWN_JOB = "Invalid job id"
_PASSED = ("SLURM_CONF", "PATH", "SLURM_JWT")
_CANCELS = 30  # attempts to cancel a job, one in each SQUEUE_PERIOD
_LOOKS = 5  # for jobs that a killed daemon has left
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
        self._clock = clock
        self._printed = {1: bytearray(), 2: bytearray()}
        self._failure = ""
        self._deadline: IDelayedCall
        self._process: ProcessTransport

    def makeConnection(self, transport: Any) -> None:
        self._process = transport
        self._deadline = self._clock.callLater(COMMAND_TIMEOUT, self._on_deadline)
        super().makeConnection(transport)

    def _on_deadline(self) -> None:
        self._fail(f"no answer within {COMMAND_TIMEOUT:g} seconds")

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        printed = self._printed[childFD]
        printed += data[: _PRINTED - len(printed)]
        if len(printed) == _PRINTED:  # a part of a queue would look as if jobs were gone
            self._fail(f"it printed {_PRINTED // 2**20} MiB or more")

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        self._process.signal_group(9)

    def processEnded(self, reason: Failure) -> None:
        if self._deadline.active():
            self._deadline.cancel()
        if isinstance(reason.value, ProcessTerminated) or self._failure:
            said = self._printed[2][-400:].decode(errors="replace").strip()
            self.ended.errback(SlurmCommandFailed(self._failure or said or str(reason.value)))
        else:
            self.ended.callback(self._printed[1].decode(errors="replace"))


SpawnCommand = Callable[[ProcessProtocol, Sequence[str], Mapping[str, str], str], object]


@attrs.define(eq=False)
class SlurmCommands:
    """Slurm's commands, a few at a time, and one watch of the queue for all waiting jobs."""

    _clock: Any
    _spawn: SpawnCommand
    _environment: Mapping[str, str] = attrs.field(factory=build_command_environment)
    counters: JobCounters = attrs.field(factory=JobCounters)
    _turns: DeferredSemaphore = attrs.field(factory=lambda: DeferredSemaphore(_AT_ONCE))
    _watchers: dict[str, Callable[[QueuedJob | None], object]] = attrs.field(factory=dict)
    _missed: dict[str, int] = attrs.field(factory=dict)  # looks, of jobs that were seen before
    _to_cancel: dict[str, int] = attrs.field(factory=dict)
    _is_leftover: Callable[[str], bool] = attrs.field(default=lambda _: False)
    _looks_left: int = 0
    _is_polling: bool = False

    async def run(self, *argv: str) -> str:
        """Return the stdout of a command. Raises: SlurmCommandFailed, OSError."""
        await self._turns.acquire()
        try:
            command = _Command(self._clock)
            self._spawn(command, argv, self._environment, "/")
            return await command.ended
        finally:
            self._turns.release()

    async def show_job(self, identifier: str) -> Mapping[str, str] | None:
        """Return the fields of a job, none if Slurm does not know it; None if it does not answer.

        While squeue fails no job is asked for: many would wait for a controller that is away.
        """
        if self.counters.is_controller_unreachable:
            return None
        try:
            return parse_scontrol_job(
                await self.run("scontrol", "--oneliner", "show", "job", identifier)
            )
        except (SlurmCommandFailed, OSError) as error:
            log.warn("the job {job} of Slurm is unknown: {error}", job=identifier, error=error)
            if _UNKNOWN_JOB in str(error):
                return {}
            self._looks_left = max(1, self._looks_left)  # until squeue succeeds
            self._poll()
            return None

    def watch_job(
        self,
        name: str,
        on_state: Callable[[QueuedJob | None], object],
        *,
        is_known: bool = False,
    ) -> None:
        """Call `on_state` now and then with what squeue says of a job, None once it is gone.

        A controller that has lost its state may forget a job without a word to srun. `is_known`:
        the job was in the queue before.
        """
        self._watchers[name] = on_state
        if is_known:
            self._missed.setdefault(name, 0)
        self._poll()

    def unwatch_job(self, name: str) -> None:
        """End `watch_job`."""
        self._watchers.pop(name, None)
        self._missed.pop(name, None)

    def is_job_missing(self, name: str) -> bool:
        """Tell whether a watched job was in the queue, and was not at the last look."""
        return self._missed.get(name, 0) > 0

    def cancel_job(self, name: str) -> None:
        """Cancel the jobs of a name, again and again until the queue has none, or it is hopeless.

        A job of an srun that was killed would otherwise keep its node until its time is over.
        """
        self._to_cancel[name] = _CANCELS
        self._poll()

    def cancel_stale_jobs(self, is_leftover: Callable[[str], bool]) -> None:
        """Cancel the jobs that an earlier daemon has left, by their names.

        A killed daemon's last srun may still be on its way, so the queue is looked at a few times.
        """
        self._is_leftover = is_leftover
        self._looks_left = _LOOKS
        self._poll()

    def _poll(self) -> None:
        if not self._is_polling:
            self._is_polling = True
            run_in_background(self._watch_queue(), log, "defect: Slurm's queue is not watched")

    async def _watch_queue(self) -> None:
        try:
            while self._watchers or self._to_cancel or self._looks_left:
                await self._look()
                await deferLater(self._clock, SQUEUE_PERIOD)
        finally:
            self._is_polling = self.counters.is_controller_unreachable = False

    async def _look(self) -> None:
        try:
            jobs = parse_squeue(await self.run("squeue", *SQUEUE_OPTIONS))
        except (SlurmCommandFailed, OSError) as error:
            if not self.counters.is_controller_unreachable:  # once while the controller is away
                log.warn("the queue of Slurm is unknown: {error}", error=error)
            self.counters.is_controller_unreachable = True
            return
        self.counters.is_controller_unreachable = False
        for name, watcher in list(self._watchers.items()):
            if name in jobs:
                self._missed[name] = 0
                watcher(jobs[name])
            elif name in self._missed:
                self._missed[name] += 1
                if self._missed[name] == _MISSES:
                    watcher(None)
        if self._looks_left:
            self._looks_left -= 1
            for name in filter(self._is_leftover, jobs):
                self._to_cancel.setdefault(name, _CANCELS)
        await self._cancel_jobs(jobs)

    async def _cancel_jobs(self, jobs: Mapping[str, QueuedJob]) -> None:
        """Cancel those that are in the queue, by one command: there may be hundreds."""
        found = []
        # A job may come into the queue later than its cancellation.
        for name in list(self._to_cancel):
            self._to_cancel[name] -= 1
            if self._to_cancel[name] <= 0:
                del self._to_cancel[name]
            elif name in jobs and jobs[name].state != "COMPLETING":
                found.append(jobs[name].identifier)
            elif self._to_cancel[name] < _CANCELS - 2:
                del self._to_cancel[name]
        if found:
            try:
                await self.run("scancel", *found)
            except (SlurmCommandFailed, OSError) as error:
                log.warn(
                    "{count} jobs of Slurm are not cancelled: {error}",
                    count=len(found),
                    error=error,
                )
