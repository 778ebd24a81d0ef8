"""Shutdown: the drain of all evaluations, whose readers still get the last events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import attrs
from twisted.internet.defer import gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from tawebeval.core.states import EvaluationState
from tawebeval.deferreds import Condition, wait_until
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.reading import Subscription
from tawebeval.evaluations.records import EvaluationRecord, RecordIndex

_LAST_READ = 5.0  # seconds in which readers can still take the last events

log = Logger()


@attrs.define
class EvaluationDrain:
    """Shutdown of the registry, from the last accepted evaluation until nothing is left.

    `alive` are the evaluations with a process or a directory. The registry calls
    `on_drain_progress` whenever an evaluation is cleaned up or forgotten, or a stream ends.
    """

    _alive: Mapping[str, EvaluationRecord]
    _records: RecordIndex
    _subscriptions: Collection[Subscription]
    _clock: IReactorTime
    has_begun: bool = False
    _is_urgent: bool = False
    _page_readers: dict[str, None] = attrs.field(factory=dict)
    _progress: Condition = attrs.field(factory=Condition)

    def on_drain_progress(self) -> None:
        """Check again whether `drain_evaluations` can go on."""
        self._progress.notify()

    def expect_page_reader(self, identifier: str) -> None:
        """Expect a client to read the pages of an evaluation to their end, once the drain runs."""
        if self.has_begun:
            self._page_readers[identifier] = None

    def end_drain_early(self) -> None:
        """End the time that running evaluations have."""
        self._is_urgent = True
        self.on_drain_progress()

    async def drain_evaluations(self, drain_seconds: float) -> bool:
        """End queued evaluations at once, running ones after `drain_seconds`; await readers.

        Readers have some seconds for the last events. Return whether there was an evaluation or a
        reader.
        """
        self.has_begun = True
        was_active = bool(self._alive)
        self._stop(
            [one for one in self._evaluations() if one.details.state is EvaluationState.QUEUED]
        )
        if drain_seconds and self._alive and not self._is_urgent:
            log.info(
                "stopping: {count} evaluations have {drain:g} seconds to end (service.drain);"
                " another signal ends them at once",
                count=len(self._alive),
                drain=drain_seconds,
            )
            await self._wait(lambda: self._is_urgent or not self._alive, drain_seconds)
        ends = [evaluation.cleanup_event.wait() for evaluation in self._evaluations()]
        self._stop(self._evaluations())
        await gatherResults(ends)
        for identifier in self._records.find_evaluations_read_by_pages():
            self.expect_page_reader(identifier)
        was_active = was_active or bool(self._subscriptions or self._page_readers)
        await self._wait(self._is_all_read, _LAST_READ)
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

    def _is_all_read(self) -> bool:
        """Return whether no stream is left, and readers of pages have read them to the end."""
        while self._page_readers:
            identifier, _ = self._page_readers.popitem()
            if identifier in self._records:
                self._page_readers[identifier] = None
                return False
        return not self._subscriptions

    async def _wait(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Return when `is_done()` is true, at the latest after `seconds`."""
        await wait_until(is_done, self._progress, seconds, self._clock)
