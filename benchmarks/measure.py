"""Figures: samples of several rounds, what they come to, and whether that is enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

import attrs

Round = Mapping[str, float]
"""What one round has measured, by name."""


@attrs.frozen
class Spread:
    """The median of some samples, and the extremes."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return the spread of at least one sample."""
        return cls(median(samples), min(samples), max(samples))


class CannotRun(SystemExit):
    """Something is not there that is needed; the message says what, and how to get it.

    It ends the program, unless that has something else to do.
    """


@attrs.frozen
class NotMeasured:
    """A line of the table that says why there are no figures."""

    what: str
    why: str


@attrs.frozen
class Row:
    """One line of the table.

    `ours` and `baseline` have a sample for each round. The ratio is formed within each
    round, so that what slows a whole round down leaves it alone. `target` bounds the ratio,
    or our own figure where there is no baseline: from below if higher is better. `stretch` is
    what would be better still.
    """

    what: str
    unit: str
    ours: Sequence[float]
    baseline: Sequence[float] | None = None
    target: float | None = None
    higher_is_better: bool = True
    stretch: float | None = None

    @property
    def ratio(self) -> Spread | None:
        """Ours to the baseline, None without one."""
        if self.baseline is None:
            return None
        return Spread.of([a / b for a, b in zip(self.ours, self.baseline, strict=True)])

    @property
    def met(self) -> bool | None:
        """Whether the target is met, None without one."""
        return None if self.target is None else self.reaches(self.target)

    def reaches(self, bound: float) -> bool:
        """Tell whether what the target is for is at least as good as `bound`."""
        judged = (self.ratio or Spread.of(self.ours)).middle
        return judged >= bound if self.higher_is_better else judged <= bound


def interleave(rounds: int, ways: Mapping[str, Callable[[], Round]]) -> dict[str, list[float]]:
    """Measure every way once in each round; return the samples as `way.name`.

    Every second round goes backwards, so that no way always follows the same other one.
    """
    samples: dict[str, list[float]] = {}
    for number in range(rounds):
        order = list(ways.items())
        for way, measure in order if number % 2 == 0 else reversed(order):
            for name, value in measure().items():
                samples.setdefault(f"{way}.{name}", []).append(value)
    return samples


def percentile(samples: Iterable[float], percent: float) -> float:
    """Return the sample that `percent` per cent of them do not exceed (nearest rank)."""
    ordered = sorted(samples)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]
