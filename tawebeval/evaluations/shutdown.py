"""Shutdown: the drain of all evaluations, whose readers still get the last events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import attrs
from twisted.internet.defer import gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from tawebeval.core.evaluations import EvaluationState
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.reading import Subscription
from tawebeval.evaluations.records import EvaluationRecord, RecordIndex

_LAST_READ = 5.0  # seconds in which readers can still take the last events
_LOOK = 0.05  # seconds between two looks

log = Logger()


@attrs.define
class EvaluationDrain:
    """Shutdown of the registry, from the last accepted evaluation until nothing is left.

    `alive` are the evaluations with a process or a directory, `subscriptions` the streams.
    """

    _alive: Mapping[str, EvaluationRecord]
    _records: RecordIndex
    _subscriptions: Collection[Subscription]
    _clock: IReactorTime
    has_begun: bool = False
    is_urgent: bool = False

    async def drain_evaluations(self, drain_seconds: float) -> bool:
        """End queued evaluations at once, running ones after `drain_seconds`; await readers.

        Readers have some seconds for the last events. Return whether there was an evaluation or a
        reader. `is_urgent` ends the time that running evaluations have.
        """
        self.has_begun = True
        was_active = bool(self._alive)
        self._stop(
            [one for one in self._evaluations() if one.details.state is EvaluationState.QUEUED]
        )
        if drain_seconds and self._alive and not self.is_urgent:
            log.info(
                "stopping: {count} evaluations have {drain:g} seconds to end (service.drain);"
                " another signal ends them at once",
                count=len(self._alive),
                drain=drain_seconds,
            )
            await self._wait(lambda: self.is_urgent or not self._alive, drain_seconds)
        ends = [evaluation.cleanup_event.wait() for evaluation in self._evaluations()]
        self._stop(self._evaluations())
        await gatherResults(ends)
        was_active = was_active or self._has_reader()
        await self._wait(lambda: not self._has_reader(), _LAST_READ)
        return was_active

    def _evaluations(self) -> list[Evaluation]:
        return [record.evaluation for record in self._alive.values()]

    def _stop(self, evaluations: list[Evaluation]) -> None:
        for evaluation in evaluations:
            evaluation.stop(
                EvaluationFailure(
                    "shutdown", "the daemon was stopped; submit again when it is back"
                )
            )

    def _has_reader(self) -> bool:
        """Return whether a stream is left, or a reader of pages is expected to read on."""
        return bool(self._subscriptions) or self._records.has_page_reader

    async def _wait(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Return when `is_done()` is true, at the latest after `seconds`."""
        deadline = self._clock.seconds() + seconds
        while not is_done() and (left := deadline - self._clock.seconds()) > 0:
            await deferLater(self._clock, min(left, _LOOK))
