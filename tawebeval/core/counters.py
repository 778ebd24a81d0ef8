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

from tawebeval.core.states import EvaluationState
from tawebeval.errors import FailureReason

LONG_DURATION_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Bounds of a histogram, in seconds, for stages that may take minutes: queue, fetch, run."""

SHORT_DURATION_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bounds of a histogram, in seconds, for short work: responses, turns of the reactor."""

_ENDS = (
    (EvaluationState.FINISHED, ""),
    (EvaluationState.CANCELLED, "cancelled"),
    *(
        (EvaluationState.FAILED, reason)
        for reason in get_args(FailureReason)
        if reason != "cancelled"
    ),
)


@attrs.define(eq=False)
class Histogram:
    """Number of values up to each of the ascending `bounds`, and above all; `sum` of all values."""

    bounds: Sequence[float]
    sum: float = 0.0
    _counts: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def record_value(self, value: float) -> None:
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
class EvaluationCounters:
    """Counters of evaluations.

    `counts_by_state` counts evaluations by their present state, `ended_counts_by_state_and_reason`
    by the state and the reason at their end; the reason of FINISHED is empty. `durations_by_state`
    has the seconds spent in each state before the end.

    `latest_fault` has the time in seconds and the message if the latest evaluation to end was lost
    by a fault of this machine, else None.
    """

    counts_by_state: Counter[EvaluationState] = attrs.field(
        factory=lambda: Counter(dict.fromkeys(EvaluationState, 0))
    )
    ended_counts_by_state_and_reason: Counter[tuple[str, str]] = attrs.field(
        factory=lambda: Counter(dict.fromkeys(_ENDS, 0))
    )
    durations_by_state: dict[str, Histogram] = attrs.field(
        factory=lambda: {
            state: Histogram(LONG_DURATION_BOUNDS)
            for state in EvaluationState
            if not state.has_ended
        }
    )
    latest_fault: tuple[float, str] | None = None
    restored_count: int = 0  # of evaluations that an earlier process has accepted

    @property
    def accepted_count(self) -> int:
        """Number of evaluations accepted since the daemon's start."""
        return self.counts_by_state.total() - self.restored_count

    def record_accepted_evaluation(self) -> None:
        """Count an accepted evaluation."""
        self.counts_by_state[EvaluationState.QUEUED] += 1

    def record_restored_evaluation(self, state: EvaluationState) -> None:
        """Count an evaluation that an earlier process of the daemon has accepted."""
        self.restored_count += 1
        self.counts_by_state[state] += 1

    def set_latest_fault(self, fault: str | None, now: float) -> None:
        """Set or clear `fault`; `now` is in seconds."""
        self.latest_fault = None if fault is None else (now, fault)

    def record_transition(
        self, before: EvaluationState, after: EvaluationState, seconds: float, reason: str = ""
    ) -> None:
        """Count a change of state after `seconds` in `before`.

        `reason` is the reason of a bad end, else "".
        """
        self.counts_by_state[before] -= 1
        self.counts_by_state[after] += 1
        if before.has_ended:
            return
        self.durations_by_state[before].record_value(seconds)
        if after.has_ended:
            self.ended_counts_by_state_and_reason[after, reason] += 1


@attrs.define(eq=False)
class GitCacheCounters:
    """Counters of the cache of repositories.

    `lookup_counts` counts by kind ("commits", "checkouts") and result ("hit", "miss").
    `fetch_counts` counts attempts to fetch a commit by their end; a fetch that several evaluations
    wait for counts once. `fetch_durations` has the seconds that fetches take.
    """

    lookup_counts: Counter[tuple[str, str]] = attrs.field(
        factory=lambda: Counter(
            dict.fromkeys(product(("commits", "checkouts"), ("hit", "miss")), 0)
        )
    )
    eviction_count: int = 0
    fetch_counts: Counter[str] = attrs.field(
        factory=lambda: Counter(fetched=0, failed=0, cancelled=0)
    )
    fetch_durations: Histogram = attrs.field(factory=lambda: Histogram(LONG_DURATION_BOUNDS))

    def record_lookup(self, object_kind: str, is_hit: bool) -> None:
        """Count a lookup."""
        self.lookup_counts[object_kind, "hit" if is_hit else "miss"] += 1
