"""The longest that the reactor is held by a chunk of stdout, of all floods that are known.

In turns of one evaluation; what happens in between is not measured. A chunk has 64 KiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

from benchmarks.measure import Row, interleave
from benchmarks.running import figures

_TARGET = 10.0


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    samples = interleave(rounds, {"": partial(figures, "stdout_floods")})
    worst = max(samples, key=lambda name: median(samples[name]))
    what = f"worst chunk of stdout in the reactor, of {len(samples)} floods: {worst[1:]}"
    return [Row(what, "ms", samples[worst], None, _TARGET, higher_is_better=False)]
