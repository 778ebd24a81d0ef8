"""The monitor of limits that the kernel does not enforce, or enforces without a notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import EvaluationFailure, format_size
from tawebeval.sandbox.disk_usage import (
    MAX_SHARED_THREAD_INSPECTIONS,
    SIGNIFICANT_DISK_USAGE_BYTES,
    TooManyInspections,
)
from tawebeval.sandbox.run_limits import RunLimits

_PAUSE = 0.25  # seconds between two looks at all runs
_PATIENCE = 4  # looks until the files of a stopped run are removed, as a rule
_BLIND = 8  # failed looks in a row; a run that is being removed fails once or twice

log = Logger()


StopRun = Callable[[EvaluationFailure], object]


@attrs.define
class FullDiskPolicy:
    """The choice of a run to stop while the disk is nearly full: the one with most bytes on it.

    The next run is chosen after the time to remove the files of the first, or at once if the disk
    goes on filling up. If the disk fills up and no run has many bytes there, a run hides its files:
    then all runs are chosen, one after the other, the youngest first.
    """

    _mark: float = 0  # free bytes; one MiB less means that the disk goes on filling up
    _patience: int = 0  # looks for which no run is chosen

    def choose_run_to_stop(self, runs: Iterable[RunLimits]) -> RunLimits | None:
        """Return the run to stop now, if any; `runs` are in the order of their start."""
        short = [run for run in runs if run.is_disk_nearly_full]
        if not short:
            self._mark, self._patience = 0, 0
            return None
        free = min(run.free_disk_bytes for run in short)
        filling = free < self._mark - SIGNIFICANT_DISK_USAGE_BYTES
        if filling or free > self._mark:
            self._mark = free
        if self._patience and not filling:
            self._patience -= 1
            return None
        chosen = max(short, key=lambda run: run.disk_bytes)
        if chosen.disk_bytes < SIGNIFICANT_DISK_USAGE_BYTES:
            if not filling:
                return None
            chosen = short[-1]  # the disk was not nearly full before its start
        self._patience = _PATIENCE
        return chosen


class LimitMonitor:
    """The monitor of all runs: it looks at each in turn, in one of `threads`.

    A run that takes more than `MAX_SHARED_THREAD_INSPECTIONS` looks at the disk is looked at by
    `others`, so that it does not delay small runs.
    """

    def __init__(self, clock: Any, threads: WorkerThreads, others: WorkerThreads) -> None:
        self._clock = clock
        self._threads = threads
        self._others = others
        self._watched: dict[RunLimits, StopRun] = {}
        # Failed looks in a row.
        self._failures: Counter[RunLimits] = Counter()
        self._apart: set[RunLimits] = set()  # looked at by `others` just now
        self._relief = FullDiskPolicy()
        self._relieved: set[RunLimits] = set()  # chosen by `_relief` already
        self._next: IDelayedCall | None = None
        self._looking = False

    def add_run(self, run: RunLimits, stop: StopRun) -> None:
        """Look at the limits of a run from now on; call `stop(error)` when it exceeds a limit.

        The error's reason is `lost` if several looks in a row fail.
        """
        self._watched[run] = stop
        self._plan()

    def remove_run(self, run: RunLimits) -> None:
        """Stop looking at the limits of a run."""
        del self._watched[run]
        self._failures.pop(run, None)
        self._relieved.discard(run)
        if not self._watched and self._next is not None:
            self._next.cancel()
            self._next = None

    def _plan(self) -> None:
        if self._watched and self._next is None and not self._looking:
            self._next = self._clock.callLater(_PAUSE, self._start)

    def _start(self) -> None:
        self._next = None
        self._looking = True
        Deferred.fromCoroutine(self._look())

    async def _look(self) -> None:
        try:
            runs = {
                run: 0 if run in self._apart else MAX_SHARED_THREAD_INSPECTIONS
                for run in self._watched
            }
            for run, found in await self._threads.run_in_thread(check_run_limits, runs):
                if run in self._watched:  # it may have ended meanwhile
                    self._take(run, found)
            self._relieve()
        finally:
            self._looking = False
            self._plan()

    def _relieve(self) -> None:
        chosen = self._relief.choose_run_to_stop(
            run for run in self._watched if run not in self._relieved
        )
        if chosen is not None:
            self._relieved.add(chosen)
            log.warn(
                f"under {format_size(chosen.settings.free_disk)} (limits.free_disk) of the disk is"
                " free: the run with the most bytes on it"
                f" ({format_size(chosen.disk_bytes)}) is stopped",
                free=chosen.free_disk_bytes,
                least=chosen.settings.free_disk,
                written=chosen.disk_bytes,
            )
            self._watched[chosen](chosen.make_disk_error())

    async def _look_apart(self, run: RunLimits) -> None:
        self._apart.add(run)
        try:
            ((_, found),) = await self._others.run_in_thread(check_run_limits, {run: inf})
        finally:
            self._apart.remove(run)
        if run in self._watched:
            self._take(run, found)

    def _take(self, run: RunLimits, found: Exception | None) -> None:
        """Act on the result of a look."""
        if isinstance(found, TooManyInspections):
            if run not in self._apart:
                Deferred.fromCoroutine(self._look_apart(run))
            return
        if found is None or isinstance(found, EvaluationFailure):
            self._failures.pop(run, None)
            if found is not None:
                self._watched[run](found)
            return
        self._failures[run] += 1
        if self._failures[run] == _BLIND:
            message = "the run's limits could not be checked"
            if isinstance(found, OSError):
                log.error("a run is stopped: {problem}", problem=f"{message}: {found}")
                message = f"{message}: {found.strerror}"
            else:
                log.failure(
                    "defect: a run is stopped, as its limits cannot be checked", Failure(found)
                )
                message = f"defect of the daemon: {message}"
            self._watched[run](EvaluationFailure("lost", message))


def check_run_limits(
    runs: Mapping[RunLimits, float],
) -> Sequence[tuple[RunLimits, Exception | None]]:
    """Return the result of a look at each run. Blocks.

    None: all limits are kept; EvaluationError: the exceeded limit; another exception: the look has
    failed. `runs` has the maximum looks at the disk for each run.
    """
    found: list[tuple[RunLimits, Exception | None]] = []
    for run, work in runs.items():
        try:
            found.append((run, run.check(work=work)))
        except Exception as error:  # noqa: BLE001  (the other runs need their look)
            found.append((run, error))
    return found
