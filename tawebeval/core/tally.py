"""Counters and histograms as plain numbers, which cost little; `daemon.metrics` exports them.

The keys of a counter are the labels of its metric. All known labels are counted from the start,
as 0: to Prometheus the first sample of a series is no increase, so it would raise no alert.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import get_args

import attrs

from tawebeval.core.states import State
from tawebeval.errors import Reason

LONG_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Bounds of a histogram, in seconds, for stages that may take minutes: queue, fetch, run."""

SHORT_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bounds of a histogram, in seconds, for short work: responses, turns of the reactor."""

_ENDS = (
    (State.FINISHED, ""),
    (State.CANCELLED, "cancelled"),
    *((State.FAILED, reason) for reason in get_args(Reason) if reason != "cancelled"),
)


@attrs.define(eq=False)
class Histogram:
    """Number of values up to each of the ascending `bounds`, and above all; `sum` of all values."""

    bounds: Sequence[float]
    sum: float = 0.0
    _counts: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def list_buckets(self) -> Iterator[tuple[float, int]]:
        """Yield each bound, infinity at last, and the number of values up to it."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            yield bound, total


@attrs.define(eq=False)
class EvaluationTally:
    """Counters of evaluations.

    `states` counts evaluations by their present state, `ended` by the state and the reason at
    their end; the reason of FINISHED is empty. `durations` has the seconds spent in each state
    before the end.

    `fault` has the time in seconds and the message if the latest evaluation to end was lost by a
    fault of this machine, else None.
    """

    states: Counter[State] = attrs.field(factory=lambda: Counter(dict.fromkeys(State, 0)))
    ended: Counter[tuple[str, str]] = attrs.field(factory=lambda: Counter(dict.fromkeys(_ENDS, 0)))
    durations: dict[str, Histogram] = attrs.field(
        factory=lambda: {state: Histogram(LONG_BOUNDS) for state in State if not state.has_ended}
    )
    fault: tuple[float, str] | None = None

    @property
    def accepted(self) -> int:
        """Number of evaluations accepted since the daemon's start."""
        return self.states.total()

    def record_accepted(self) -> None:
        """Count an accepted evaluation."""
        self.states[State.QUEUED] += 1

    def set_fault(self, fault: str | None, now: float) -> None:
        """Set or clear `fault`; `now` is in seconds."""
        self.fault = None if fault is None else (now, fault)

    def record_transition(
        self, before: State, after: State, seconds: float, reason: str = ""
    ) -> None:
        """Count a change of state after `seconds` in `before`.

        `reason` is the reason of a bad end, else "".
        """
        self.states[before] -= 1
        self.states[after] += 1
        if before.has_ended:
            return
        self.durations[before].observe(seconds)
        if after.has_ended:
            self.ended[after, reason] += 1


@attrs.define(eq=False)
class CacheTally:
    """Counters of the cache of repositories.

    `lookups` counts by kind ("commits", "checkouts") and result ("hit", "miss"). `fetches` counts
    attempts to fetch a commit by their end; a fetch that several evaluations wait for counts once.
    `durations` has the seconds that fetches take.
    """

    lookups: Counter[tuple[str, str]] = attrs.field(
        factory=lambda: Counter(
            dict.fromkeys(product(("commits", "checkouts"), ("hit", "miss")), 0)
        )
    )
    evictions: int = 0
    fetches: Counter[str] = attrs.field(factory=lambda: Counter(fetched=0, failed=0, cancelled=0))
    durations: Histogram = attrs.field(factory=lambda: Histogram(LONG_BOUNDS))

    def record_lookup(self, kind: str, is_hit: bool) -> None:
        """Count a lookup."""
        self.lookups[kind, "hit" if is_hit else "miss"] += 1
