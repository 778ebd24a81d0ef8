"""Shares: the parts that callers may take of what all callers use together.

A `Share` counts an amount, such as bytes on the disk, in all and for each caller. One caller may
take a part of the total. What a caller has beyond its part, because it was promised before, is not
taken from the others: they find the same room as if the caller had its part alone.

Clients without tokens are one caller, the anonymous one, whose part is the total: nobody knows
whether they are one client. Queues for slots and turns are `deferreds.FairQueue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum

import attrs

from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import CallerQuotaExceeded, ServerBusy


class SharedResource(Enum):
    """What is shared; the value names it in docs/security.md (Budgets)."""

    UPLOADS = "disk for uploads"
    UNREAD_EVENTS = "events that nobody has read, on the disk"
    EVENT_MEMORY = "events in memory"
    FIXED_EVENT_MEMORY = "events that have to stay in memory"
    ENDED_EVALUATIONS = "finished evaluations"
    ARCHIVE = "disk for the archive"
    CALLBACKS = "memory for callbacks"
    LINK_READERS = "requests by links at once"
    LINKED_EVALUATIONS = "evaluations with links"


def _discard_nothing(amount: int, caller: str | None) -> bool:
    return False


@attrs.define(eq=False)
class Share:
    """Amount of a resource that is in use, in all and by each caller.

    - `total`: the amount for all callers; `part`: that of one, None for the total.
    - `refusal_of_caller`, `refusal_of_all`: what a caller is told beyond its part, and beyond the
      total; `retry_after`: the seconds after which it may try again.
    - `make_room(amount, caller)`: gives back at least `amount` of what can be discarded, and
      returns True; returns False, and gives back nothing, if that is too little. It takes from the
      caller or, for None, first from the callers that have most (`list_callers`).
    """

    resource: SharedResource
    total: int
    part: int | None = None
    refusal_of_caller: str = ""
    refusal_of_all: str = ""
    retry_after: int = 30
    make_room: Callable[[int, str | None], bool] = _discard_nothing
    used: int = attrs.field(default=0, init=False)
    used_by_caller: Counter[str] = attrs.field(factory=Counter, init=False)

    def compute_part(self, caller: str) -> int:
        """Return the amount that a caller may take."""
        if self.part is None or caller == ANONYMOUS_CALLER:
            return self.total
        return min(self.part, self.total)

    def is_part_used_up(self, caller: str) -> bool:
        """Return whether a caller has its part."""
        return self.used_by_caller[caller] >= self.compute_part(caller)

    @property
    def is_used_up(self) -> bool:
        """Whether nothing is left for a caller that has nothing."""
        return self._compute_excess(1) > 0

    def _compute_excess(self, amount: int) -> int:
        """Return by how much an amount more would exceed the total; 0 or less if it fits."""
        excess = self.used + amount - self.total
        if excess <= 0:
            return excess
        within_parts = sum(
            min(used, self.compute_part(name)) for name, used in self.used_by_caller.items()
        )
        return within_parts + amount - self.total

    def check(self, amount: int, caller: str) -> None:
        """Raise an error if a caller cannot take an amount, also after `make_room`.

        Raises: CallerQuotaExceeded, if it would exceed the caller's part; ServerBusy.
        """
        part = self.compute_part(caller)
        if part < self.total:
            excess = self.used_by_caller[caller] + amount - part
            if excess > 0 and not self.make_room(excess, caller):
                raise CallerQuotaExceeded(self.refusal_of_caller, self.retry_after)
        excess = self._compute_excess(amount)
        if excess > 0 and not self.make_room(excess, None):
            raise ServerBusy(self.refusal_of_all, self.retry_after)

    def take_within_part(self, amount: int, caller: str) -> None:
        """Count an amount for a caller. Raises as `check`, and counts nothing then."""
        self.check(amount, caller)
        self.take(amount, caller)

    def take(self, amount: int, caller: str) -> None:
        """Count an amount for a caller, whether there is room or not."""
        self.used += amount
        self.used_by_caller[caller] += amount
        if not self.used_by_caller[caller]:
            del self.used_by_caller[caller]

    def give_back(self, amount: int, caller: str) -> None:
        """Count an amount no more. A caller gives back what it has taken, at most."""
        assert 0 <= amount <= self.used_by_caller[caller]
        self.take(-amount, caller)

    def list_callers(self) -> list[str]:
        """Return the callers that have something, those with most first."""
        return [caller for caller, _ in self.used_by_caller.most_common()]
