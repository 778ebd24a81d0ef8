"""What buffered events take in memory, beside the bytes of their JSON Lines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.measure import Row, interleave
from benchmarks.running import figures

_READS = {65536: "64 KiB", 10: "a line"}
_TARGET = 1.2
_MB = 1e6


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    samples = interleave(
        rounds, {str(read): partial(figures, "ring_memory", read) for read in _READS}
    )
    return [
        Row(
            f"memory of 1,000,000 events of 10-byte lines, read {name} at a time, to JSON Lines",
            "MB",
            [size / _MB for size in samples[f"{read}.memory"]],
            [size / _MB for size in samples[f"{read}.payload"]],
            _TARGET,
            higher_is_better=False,
        )
        for read, name in _READS.items()
    ]
