"""Whether one more evaluation is accepted, or begins: what may be unread and what may wait."""

from __future__ import annotations

from tawebeval.admission import Queue
from tawebeval.core.tokens import ANYBODY
from tawebeval.errors import Busy, OverShare
from tawebeval.evaluations.context import Surroundings
from tawebeval.evaluations.records import Records

_RETRY_AFTER = 5  # seconds, where a place in the queue is missing
_RETRY_LATER = 30  # seconds, where readers are behind


class Acceptance:
    """Knows what there is of everything, and how much there may be.

    What is a caller's own fault is said first, for that the caller can mend. `queue` has these
    `bounds`, and lets in whom `admits` does.
    """

    def __init__(
        self, surroundings: Surroundings, records: Records, bounds: tuple[int, int, int, int]
    ) -> None:
        self._surroundings = surroundings
        self._records = records
        self.queue = Queue(*bounds, admits=self.admits)

    def check(self, caller: str) -> None:
        """Raise OverShare where the caller has its share of something, Busy where all is full.

        What streams have sent to the end, and is kept only in case that some of it was lost, is
        forgotten before anybody is refused for it.
        """
        while self._kept_share_used(caller) and self._records.forget_sent(caller):
            pass
        while self._too_much_kept() and self._records.forget_sent():
            pass
        if self._kept_share_used(caller):
            raise OverShare(
                "as many of your evaluations have ended and are not read to the end as may: read"
                " some, or discard them by asking for their events with after=end",
                _RETRY_LATER,
            )
        if not self.admits(caller):
            raise OverShare(
                "the events of your evaluations take as much memory as they may: read some, or"
                " discard those that have ended by asking for their events with after=end",
                _RETRY_LATER,
            )
        if self._too_much_kept():
            raise Busy("too much has not been read yet; try again later", _RETRY_LATER)
        if self.queue.share_used(caller):
            raise OverShare("as many of your evaluations wait as may; try later", _RETRY_AFTER)
        if self.queue.full(caller):
            raise Busy("as many evaluations are waiting as may; try again later", _RETRY_AFTER)

    def admits(self, caller: str) -> bool:
        """Whether what a caller has waiting may begin: not while it has its share of the memory.

        The queue goes on when the caller has less again.
        """
        budget = self._surroundings.budget
        while budget.share_used(caller) and self._records.forget_sent(caller):
            pass
        if not budget.share_used(caller):
            return True
        budget.call_on_relief(caller, self.queue.go_on)
        return False

    def _too_much_kept(self) -> bool:
        return (
            self._records.kept >= self._surroundings.configuration.evaluations.kept
            or self._surroundings.budget.spent
        )

    def _kept_share_used(self, caller: str) -> bool:
        configuration = self._surroundings.configuration
        share = configuration.callers.kept
        if caller == ANYBODY or not 0 < share < configuration.evaluations.kept:
            return False
        return self._records.kept_of(caller) >= share
