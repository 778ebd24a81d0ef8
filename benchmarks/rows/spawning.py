"""How long one spawn blocks the reactor in a process with many open descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.measure import Row, interleave
from benchmarks.running import figures

_DESCRIPTORS = 5000
_TARGET = 2.0


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows; Twisted's own way is shown for comparison, and is no target."""
    samples = interleave(
        rounds,
        {way: partial(figures, "spawn_block", way, _DESCRIPTORS) for way in ("ours", "twisted")},
    )
    what = f"one spawn blocks the reactor, {_DESCRIPTORS:,} descriptors open"
    return [
        Row(f"{what}, median", "ms", samples["ours.middle"], None, _TARGET, False),
        Row("… longest of 60", "ms", samples["ours.worst"], None, None, False),
        Row(
            "… median, to `reactor.spawnProcess`",
            "ms",
            samples["ours.middle"],
            samples["twisted.middle"],
            None,
            False,
        ),
    ]
