"""The times at which refused clients are to repeat their requests (`Retry-After`).

Each end of an evaluation makes room for one form. `RetrySchedule` measures how often that happens,
and gives each refused client the next end that no other client has got. So clients come back one
after the other, when there is room for them.
"""

from __future__ import annotations

from math import ceil

LEAST_SECONDS, MOST_SECONDS = 1, 120

_ASSUMED_RUN = 10.0  # seconds that evaluations last, before any was measured
_MEASURED_ENDS = 32  # ends of which the mean is taken, at least
_PURGED_CALLERS = 1000  # number of callers above which past times are dropped


class RetrySchedule:
    """Schedule of the retries of all clients, for a queue of `slot_count` slots.

    The measured interval is the mean over about as many ends as twice the slots, because
    evaluations that begin together often end together. Only ends count at which all slots were in
    use: others come more rarely. All times are in seconds of one clock.
    """

    def __init__(self, slot_count: int) -> None:
        self._interval = _ASSUMED_RUN / slot_count
        self._measured = slot_count  # ends in the mean
        self._most_measured = max(_MEASURED_ENDS, 2 * slot_count)
        self._since: float | None = None  # the last end, or since when all are used; None otherwise
        # The latest time given to a client: of each caller over its share, of all others by None.
        self._planned: dict[str | None, float] = {}
        self._purge_at = _PURGED_CALLERS

    def record_all_slots_used(self, now: float) -> None:
        """Note that all slots are in use."""
        if self._since is None:
            self._since = now

    def record_evaluation_end(self, now: float, *, are_all_slots_used: bool) -> None:
        """Note the end of an evaluation, and whether all slots are still in use."""
        if self._since is not None:
            self._measured = min(self._measured + 1, self._most_measured)
            self._interval += (now - self._since - self._interval) / self._measured
        self._since = now if are_all_slots_used else None

    def estimate_seconds_between_ends(self, now: float) -> float:
        """Return the seconds between two ends; the time since the last one counts if it is long."""
        lasted = 0.0 if self._since is None else now - self._since
        return self._interval + max(0.0, lasted - self._interval) / (self._measured + 1)

    def schedule_retry(self, now: float, caller: str | None = None, caller_count: int = 1) -> int:
        """Return the seconds after which a refused client is to come back.

        `caller` is the caller whose share is used up; None if the queue is full. Of the ends, a
        caller has the part of one of `caller_count` callers that wait.

        If the next free end is over 2 minutes ahead, several clients get the same time, in the
        second of these minutes.
        """
        interval = self.estimate_seconds_between_ends(now) * max(1, caller_count)
        delay = max(0.0, self._planned.get(caller, now) - now) + interval
        if delay > MOST_SECONDS:
            half = MOST_SECONDS / 2
            delay = half + delay % half
        self._planned[caller] = now + delay
        if len(self._planned) > self._purge_at:
            self._planned = {one: time for one, time in self._planned.items() if time > now}
            self._purge_at = max(_PURGED_CALLERS, 2 * len(self._planned))
        return max(LEAST_SECONDS, ceil(delay))
