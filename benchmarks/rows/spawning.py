"""How long the start of a child blocks the reactor in a process with many open descriptors.

What the daemon does for it is done here by a program of its own. An evaluator is started in a
thread, so what counts is that it is taken over from there. `reactor.spawnProcess` takes 10 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.measure import Row, interleave
from benchmarks.running import figures

_DESCRIPTORS = 5000
_TARGET = 2.0


_WAYS = {"evaluator": "an evaluator's start", "git": "the start of a git command"}


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    samples = interleave(
        rounds, {way: partial(figures, "spawn_block", way, _DESCRIPTORS) for way in _WAYS}
    )
    what = f"blocks the reactor, {_DESCRIPTORS:,} descriptors open, median"
    return [
        Row(f"{name} {what}", "ms", samples[f"{way}.middle"], None, _TARGET, False)
        for way, name in _WAYS.items()
    ]
