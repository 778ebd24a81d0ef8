"""The benchmarks by name. Each measures a number of rounds and returns rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.measure import Row
from benchmarks.rows import delivery, latency, memory, pages, polls, spawning, start, stdout

Benchmark = Callable[[int], Sequence[Row]]

BENCHMARKS: dict[str, Benchmark] = {
    "stdout": stdout.measure,
    "delivery": delivery.measure,
    "polls": polls.measure,
    "pages": pages.measure,
    "start": start.measure,
    "latency": latency.measure,
    "memory": memory.measure,
    "spawning": spawning.measure,
}
