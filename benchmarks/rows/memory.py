"""What buffered events take in memory, beside the bytes of their JSON Lines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.measure import Row, interleave
from benchmarks.running import figures

_READ = 65536
_TARGET = 1.2
_MB = 1e6


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    samples = interleave(rounds, {"ring": partial(figures, "ring_memory", _READ)})
    return [
        Row(
            "memory of 1,000,000 events of 10-byte lines, read 64 KiB at a time, to JSON Lines",
            "MB",
            [size / _MB for size in samples["ring.memory"]],
            [size / _MB for size in samples["ring.payload"]],
            _TARGET,
            higher_is_better=False,
        )
    ]
