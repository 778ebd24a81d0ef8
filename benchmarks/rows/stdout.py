"""From stdout to stored events: ours, a bare `ProcessProtocol`, and an asyncio program.

Each way runs in a fresh process, from the first bytes received to the last. The asyncio
program, far slower, gets fewer bytes. Lines of 100 bytes have no row: they lie between the others.

Tried without success: reads of 32 or 128 KiB in place of 64 (256 KiB: twice the time for short
lines); `in`, `re` or `translate` in place of `rfind` to find blank lines; `M_MMAP_THRESHOLD`
without `M_TRIM_THRESHOLD`.

Lines are found, encoded as JSON and kept. Lines of 10 bytes are two events for each 11 bytes, and
events cost more than bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.measure import Round, Row, interleave
from benchmarks.running import figures

_MB = 1_000_000
_TOTAL = {10: 60 * _MB, 1_000: 200 * _MB, 100_000: 200 * _MB}
_ASYNCIO_TOTAL = {10: 2 * _MB}
_BARE_TARGET = {10: 0.3, 1_000: 0.8, 100_000: 0.7}
_ASYNCIO_TARGET = 30
_UNIT = "MB/s"


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    samples: dict[str, list[float]] = {}
    for length, total in _TOTAL.items():
        ways: dict[str, Callable[[], Round]] = {
            f"{way}.{length}": partial(_figures, way, length, total) for way in ("ours", "bare")
        }
        if length in _ASYNCIO_TOTAL:
            ways[f"asyncio.{length}"] = partial(_figures, "asyncio", length, _ASYNCIO_TOTAL[length])
        samples |= interleave(rounds, ways)
    rows = []
    for baseline, name, targets in (
        ("bare", "bare `ProcessProtocol`", _BARE_TARGET),
        ("asyncio", "asyncio", dict.fromkeys(_ASYNCIO_TOTAL, _ASYNCIO_TARGET)),
    ):
        for length, target in targets.items():
            what = f"stdout to events, {length:,}-byte lines, to {name}"
            ours, other = f"ours.{length}", f"{baseline}.{length}"
            rows.append(Row(what, _UNIT, samples[f"{ours}.rate"], samples[f"{other}.rate"], target))
    return rows


def _figures(way: str, length: int, total: int) -> Round:
    measured = figures(f"stdout_{way}", length, total)
    return {name: rate / _MB for name, rate in measured.items()}
