"""How long a program took from the first bytes that it received to the last ones."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

WRITER = Path(__file__).with_name("writer.py")


class Stopwatch:
    """Counts bytes, by the clock and in processor time, from the first of them on."""

    def __init__(self) -> None:
        self._total = 0
        self._clock = 0.0
        self._processor = 0.0

    def count(self, size: int) -> None:
        """Note that so many bytes were received."""
        if not self._total:
            self._clock = time.perf_counter()
            self._processor = time.process_time()
        self._total += size

    def report(self, expected: int) -> None:
        """Print what was measured as JSON."""
        clock = time.perf_counter() - self._clock
        processor = time.process_time() - self._processor
        assert self._total == expected, f"{self._total} bytes instead of {expected}"
        figures = {"rate": self._total / clock, "processor_rate": self._total / processor}
        print(json.dumps(figures))


def arguments() -> tuple[list[str], int]:
    """Return the writer's command line as the program's own arguments give it, and the total."""
    length, total = sys.argv[1:]
    return [sys.executable, "-I", "-S", str(WRITER), length, total], int(total)
