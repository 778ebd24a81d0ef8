"""A sandbox that has failed is tried until it works: readiness comes back with nobody's help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from tawebeval.core.tally import EvaluationTally
from tawebeval.deferreds import Threads
from tawebeval.errors import Problem

PERIOD = 10.0  # seconds between two trials

log = Logger()


class Retrial(Service):
    """Tries the sandbox, as long as the evaluation that ended last was lost by a fault of ours.

    `trial` returns why it does not work, and blocks. Where evaluations are sent only to who is
    ready none would come that could show that the fault is mended.
    """

    name = "retrial"

    def __init__(
        self,
        tally: EvaluationTally,
        trial: Callable[[], Problem | None],
        threads: Threads,
        clock: Any,
    ) -> None:
        self._tally = tally
        self._trial = trial
        self._threads = threads
        self._clock = clock
        self._told: Problem | None = None
        self._trials = LoopingCall(self._look)
        self._trials.clock = clock

    def startService(self) -> None:
        """Look from now on."""
        super().startService()
        self._trials.start(PERIOD, now=False)

    def stopService(self) -> None:
        """Begin no more trials."""
        super().stopService()
        self._trials.stop()

    def _look(self) -> Deferred[None] | None:
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
