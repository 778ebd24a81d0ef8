"""What is counted while the daemon works, as plain numbers: cheap to note, read when asked for.

Nothing here knows how it will be shown; `metrics` makes Prometheus's own of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

import attrs

from tawebeval.core.states import State

FOREVER = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Bounds, in seconds, for what may take minutes: to wait, to fetch, to run."""

MOMENTS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bounds, in seconds, for what should take no time at all: answers, turns of the reactor."""


@attrs.define(eq=False)
class Histogram:
    """How many values were up to each of `bounds`, which ascend, and how many above all.

    `sum` is that of all values.
    """

    bounds: Sequence[float]
    sum: float = 0.0
    _counts: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Yield each bound, infinity at last, and how many values are not above it."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            yield bound, total


@attrs.define(eq=False)
class EvaluationTally:
    """What becomes of evaluations.

    `states` has how many are in each state now, `ended` how many have ended how, by state and
    reason (which is empty for a good end), `forgotten` how many were drained and how many
    expired, `stages` how long was spent in each state before the end, in seconds.

    `fault` is a time, in seconds, and what was wrong with this machine then, if the evaluation
    that has ended last was lost by that, and nothing has shown since that it is mended.
    """

    accepted: int = 0
    states: Counter[State] = attrs.field(factory=Counter)
    ended: Counter[tuple[State, str]] = attrs.field(factory=Counter)
    forgotten: Counter[State] = attrs.field(factory=Counter)
    stages: dict[State, Histogram] = attrs.field(init=False)
    fault: tuple[float, str] | None = None

    def __attrs_post_init__(self) -> None:
        self.stages = {state: Histogram(FOREVER) for state in State if not state.ended}

    def begin(self) -> None:
        """Count one that is accepted."""
        self.accepted += 1
        self.states[State.QUEUED] += 1

    def judge(self, fault: str | None, now: float) -> None:
        """Note whether this machine has lost an evaluation by a fault of its own."""
        self.fault = None if fault is None else (now, fault)

    def step(self, before: State, after: State, seconds: float, reason: str = "") -> None:
        """Count a step, after so many seconds in the state `before`; `reason` is that of an end."""
        self.states[before] -= 1
        if before.ended:
            self.forgotten[after] += 1
            return
        self.stages[before].observe(seconds)
        self.states[after] += 1
        if after.ended:
            self.ended[after, reason] += 1


@attrs.define(eq=False)
class CacheTally:
    """What the cache of repositories was good for.

    `hits` counts what was there, and `misses` what was not, by what was looked for: "commits",
    "checkouts". `fetches` is how attempts to get commits have ended: `fetched`, `failed`,
    `cancelled`; what several wait for is one fetch. `seconds` is how long they took.
    """

    hits: Counter[str] = attrs.field(factory=Counter)
    misses: Counter[str] = attrs.field(factory=Counter)
    evictions: int = 0
    fetches: Counter[str] = attrs.field(factory=Counter)
    seconds: Histogram = attrs.field(factory=lambda: Histogram(FOREVER))

    def look(self, for_: str, found: bool) -> None:
        """Count that something was looked for."""
        (self.hits if found else self.misses)[for_] += 1
