"""Quotas of callers in what all callers use together, and when refused callers come back.

A `Budget` counts an amount, such as bytes on the disk, in all and for each caller. One caller may
take its quota of the total. What a caller has beyond its quota, because it was promised before,
is not taken from the others: they find the same room as if the caller had its quota alone.

Clients without tokens are one caller, the anonymous one, whose quota is the total: nobody knows
whether they are one client. `deferreds.FairQueue` is a waiting line for two budgets: slots, and
places in the line itself.

Each end of an evaluation makes room for one form. `RetrySchedule` measures how often that happens,
and gives each refused client the next end that no other client has got (`Retry-After`). So clients
come back one after the other, when there is room for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from math import ceil

import attrs

from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import CallerQuotaExceeded, ServerBusy


class SharedResource(Enum):
    """What is shared; the value names it in docs/security.md (Budgets)."""

    UPLOADS = "disk for uploads"
    UNREAD_EVENTS = "events that nobody has read, on the disk"
    EVENT_MEMORY = "events in memory"
    PINNED_EVENT_MEMORY = "events that have to stay in memory"
    ENDED_EVALUATIONS = "finished evaluations"
    ARCHIVE = "disk for the archive"
    CALLBACKS = "memory for callbacks"
    LINK_READERS = "requests by links at once"
    LINKED_EVALUATIONS = "evaluations with links"
    JOINT_LISTS = "lists over several daemons"
    SLOTS = "slots for runs, fetches, callbacks and reads"
    QUEUE = "places in queues for slots"


def _discard_nothing(amount: int, caller: str | None) -> bool:
    return False


@attrs.define(eq=False)
class Budget:
    """Amount of a resource that is in use, in all and by each caller.

    - `total`: the amount for all callers; `caller_quota`: that for one caller, None for the total.
    - `quota_refusal_message`, `total_refusal_message`: what a caller is told beyond its quota, and
      beyond the total; `retry_after`: the seconds after which it may try again.
    - `make_room(amount, caller)`: gives back at least `amount` of what can be discarded, and
      returns True; returns False, and gives back nothing, if that is too little. It takes from the
      caller or, for None, first from the callers that have most (`list_callers`).
    - `on_quota_freed()` is called when a caller no longer uses up its quota.
    """

    resource: SharedResource
    total: int
    caller_quota: int | None = None
    quota_refusal_message: str = ""
    total_refusal_message: str = ""
    retry_after: int = 30
    make_room: Callable[[int, str | None], bool] = _discard_nothing
    on_quota_freed: Callable[[], object] = lambda: None
    used: int = attrs.field(default=0, init=False)
    used_by_caller: Counter[str] = attrs.field(factory=Counter, init=False)

    def compute_quota(self, caller: str) -> int:
        """Return the amount that a caller may take."""
        if self.caller_quota is None or caller == ANONYMOUS_CALLER:
            return self.total
        return min(self.caller_quota, self.total)

    def is_quota_used_up(self, caller: str) -> bool:
        """Return whether a caller has used up its quota."""
        return self.used_by_caller[caller] >= self.compute_quota(caller)

    @property
    def is_used_up(self) -> bool:
        """Whether nothing is left for a caller that has nothing."""
        return self._compute_excess(1) > 0

    def _compute_excess(self, amount: int) -> int:
        """Return by how much an amount more would exceed the total; 0 or less if it fits."""
        excess = self.used + amount - self.total
        if excess <= 0:
            return excess
        within_quotas = sum(
            min(used, self.compute_quota(name)) for name, used in self.used_by_caller.items()
        )
        return within_quotas + amount - self.total

    def check_amount(self, amount: int, caller: str, *, makes_room: bool = True) -> None:
        """Raise an error if a caller cannot take an amount, also after `make_room` if `makes_room`.

        Raises: CallerQuotaExceeded, if it would exceed the caller's quota; ServerBusy.
        """
        make_room = self.make_room if makes_room else _discard_nothing
        quota = self.compute_quota(caller)
        if quota < self.total:
            excess = self.used_by_caller[caller] + amount - quota
            if excess > 0 and not make_room(excess, caller):
                raise CallerQuotaExceeded(self.quota_refusal_message, self.retry_after)
        excess = self._compute_excess(amount)
        if excess > 0 and not make_room(excess, None):
            raise ServerBusy(self.total_refusal_message, self.retry_after)

    def take_within_quota(self, amount: int, caller: str, *, makes_room: bool = True) -> None:
        """Count an amount for a caller. Raises as `check_amount`, and counts nothing then."""
        self.check_amount(amount, caller, makes_room=makes_room)
        self.record_usage(amount, caller)

    def record_usage(self, amount: int, caller: str) -> None:
        """Count an amount for a caller, whether there is room or not; below 0, count it no more."""
        was_used_up = self.is_quota_used_up(caller)
        self.used += amount
        self.used_by_caller[caller] += amount
        if not self.used_by_caller[caller]:
            del self.used_by_caller[caller]
        if was_used_up and not self.is_quota_used_up(caller):
            self.on_quota_freed()

    def give_back(self, amount: int, caller: str) -> None:
        """Count an amount no more. A caller gives back what it has taken, at most."""
        assert 0 <= amount <= self.used_by_caller[caller]
        self.record_usage(-amount, caller)

    def list_callers(self) -> list[str]:
        """Return the callers that have something, those with most first."""
        return [caller for caller, _ in self.used_by_caller.most_common()]


MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1, 120

_ASSUMED_RUN = 10.0  # seconds that evaluations last, before any was measured
_MEASURED_ENDS = 32  # ends of which the mean is taken, at least


class RetrySchedule:
    """Schedule of the retries of all clients, for a queue of `slot_count` slots.

    The measured interval is the mean over about as many ends as twice the slots, because
    evaluations that begin together often end together. Only ends count at which all slots were in
    use: others come more rarely. All times are in seconds of one clock.
    """

    def __init__(self, slot_count: int) -> None:
        self.interval = _ASSUMED_RUN / slot_count
        self._measured = slot_count  # ends in the mean
        self._most_measured = max(_MEASURED_ENDS, 2 * slot_count)
        self._since: float | None = None  # the last end, or since when all are used; None otherwise
        # The latest time given to a client: of each caller over its share, of all others by None.
        self._planned: dict[str | None, float] = {}

    def record_all_slots_used(self, now: float) -> None:
        """Note that all slots are in use."""
        if self._since is None:
            self._since = now

    def record_evaluation_end(self, now: float, *, are_all_slots_used: bool) -> None:
        """Note the end of an evaluation, and whether all slots are still in use."""
        if self._since is not None:
            self._measured = min(self._measured + 1, self._most_measured)
            self.interval += (now - self._since - self.interval) / self._measured
        self._since = now if are_all_slots_used else None

    def schedule_retry(self, now: float, caller: str | None = None, caller_count: int = 1) -> int:
        """Return the seconds after which a refused client is to come back.

        `caller` is the caller whose share is used up; None if the queue is full. Of the ends, a
        caller has the share of one of `caller_count` callers that wait. The time since the last end
        counts if it is longer than the mean.

        If the next free end is over 2 minutes ahead, several clients get the same time, in the
        second of these minutes.
        """
        lasted = 0.0 if self._since is None else now - self._since
        interval = self.interval + max(0.0, lasted - self.interval) / (self._measured + 1)
        interval *= max(1, caller_count)
        delay = max(0.0, self._planned.get(caller, now) - now) + interval
        if delay > MAX_RETRY_SECONDS:
            half = MAX_RETRY_SECONDS / 2
            delay = half + delay % half
        self._planned[caller] = now + delay
        return max(MIN_RETRY_SECONDS, ceil(delay))
