"""The end of the daemon, told to those who are there: no connection just drops."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
from twisted.internet.defer import gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from tawebeval.core.states import State
from tawebeval.deferreds import Condition, poll_until
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.evaluations.records import Record, Records, Subscriptions

_FAREWELL = 5.0  # seconds in which readers can still take what they have not, at the end

log = Logger()


@attrs.define
class Drain:
    """What is done from the moment when nothing more is accepted until nothing is left.

    `progress()` is to be called whenever an evaluation is over, one is forgotten, or a stream
    has left.
    """

    _alive: Mapping[str, Record]
    _records: Records
    _followers: Subscriptions
    _clock: IReactorTime
    begun: bool = False
    _hurried: bool = False
    _readers: dict[str, None] = attrs.field(factory=dict)
    _progress: Condition[None] = attrs.field(factory=Condition)

    def progress(self) -> None:
        """Look whether what is waited for has come about."""
        self._progress.notify(None)

    def note_reader(self, identifier: str) -> None:
        """Note that pages of an evaluation are read: its end is expected to be, too."""
        if self.begun:
            self._readers[identifier] = None

    def stop_now(self) -> None:
        """Let nothing run any longer."""
        self._hurried = True
        self.progress()

    async def close(self, drain: float) -> bool:
        """End what waits, what runs in `drain` seconds, and return when readers have the ends.

        They have some seconds for that. Tell whether there was anything to end, or anybody.
        """
        self.begun = True
        active = bool(self._alive)
        self._stop([one for one in self._evaluations() if one.state is State.QUEUED])
        if drain and self._alive and not self._hurried:
            log.info(
                "{count} evaluations have {drain:g} seconds to end by themselves; another signal"
                " ends them at once",
                count=len(self._alive),
                drain=drain,
            )
            await self._wait(lambda: self._hurried or not self._alive, drain)
        over = [one.over.wait() for one in self._evaluations()]
        self._stop(self._evaluations())
        await gatherResults(over)
        for identifier in self._records.read_by_pages():
            self.note_reader(identifier)
        active = active or bool(self._followers or self._readers)
        await self._wait(self._all_told, _FAREWELL)
        return active

    def _evaluations(self) -> list[Evaluation]:
        return [record.evaluation for record in self._alive.values()]

    def _stop(self, evaluations: list[Evaluation]) -> None:
        for evaluation in evaluations:
            evaluation.stop(EvaluationFailure("shutdown", "the service was stopped"))

    def _all_told(self) -> bool:
        """Whether nobody follows, and those who read pages have read theirs to the end."""
        while self._readers:
            identifier, _ = self._readers.popitem()
            if identifier in self._records:
                self._readers[identifier] = None
                return False
        return not self._followers

    async def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        """Return when it is done, at the latest after so many seconds."""
        await poll_until(done, self._progress, seconds, self._clock)
