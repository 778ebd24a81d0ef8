"""The daemon's own process, under the names that Prometheus's clients give to such figures.

Its client for Python would list all descriptors for it, which with some thousands of them holds
up the reactor for a while; Linux tells their number (since 6.2).
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_DESCRIPTORS = Path("/proc/self/fd")


@attrs.frozen(eq=False)
class Vitals(Collector):
    """Reads them; `time` is in seconds since the epoch, and `descriptors` how many are open."""

    _descriptors: Callable[[], int] = attrs.field(default=lambda: open_descriptors(_DESCRIPTORS))
    _started: float = attrs.field(factory=time.time)

    def describe(self) -> list[Metric]:
        """Return nothing: what there is shows when it is collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all of them."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        page = resource.getpagesize()
        virtual, resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[:2]
        yield CounterMetricFamily(
            "process_cpu_seconds", "Processor time.", used.ru_utime + used.ru_stime
        )
        for name, help_, value in (
            ("open_fds", "File descriptors that are open.", self._descriptors()),
            ("max_fds", "File descriptors that may be.", limit),
            ("virtual_memory_bytes", "Memory, with what is not there yet.", int(virtual) * page),
            ("resident_memory_bytes", "Memory that is there.", int(resident) * page),
            ("start_time_seconds", "When it was started, since the epoch.", self._started),
        ):
            yield GaugeMetricFamily(f"process_{name}", help_, value)


def open_descriptors(directory: Path) -> int:
    """Return how many descriptors such a directory of `/proc` shows."""
    # An older kernel says 0, and has to be asked for each.
    return directory.stat().st_size or len(os.listdir(directory))
