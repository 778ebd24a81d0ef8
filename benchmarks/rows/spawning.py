"""How long the start of a git command blocks the reactor, with many open descriptors.

A program of its own does here what the daemon does. Evaluators are started by the starter, in a
thread. `reactor.spawnProcess` takes 10 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.measure import Row, interleave
from benchmarks.running import figures

_DESCRIPTORS = 5000
_TARGET = 2.0


def measure(rounds: int) -> Sequence[Row]:
    """Return the row."""
    samples = interleave(rounds, {"git": partial(figures, "spawn_block", _DESCRIPTORS)})
    what = (
        f"the start of a git command blocks the reactor, {_DESCRIPTORS:,} descriptors open, median"
    )
    return [Row(what, "ms", samples["git.middle"], None, _TARGET, False)]
