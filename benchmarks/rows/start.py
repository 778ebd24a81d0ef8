"""From `POST /evaluate` to the first event, the commit being known; and the command by itself.

Without a sandbox: `sandbox` is the same in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.client import Client
from benchmarks.daemon import SMALL, Daemon, daemon
from benchmarks.measure import Round, Row, interleave, percentile
from benchmarks.programs.sandbox_start import COMMAND, run_by_hand

STARTS = 30
WHAT = "`POST /evaluate` to the first event"
SPAWN = "`posix_spawn`"
_SETTLE = 0.05  # seconds, for the daemon to tidy up after the one before
_JUDGED = 50
_SHOWN = (10, 90)  # percentiles; the low one is what an undisturbed start takes
_TARGET = 3.0


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon() as plain, Client(plain.port) as client:
        ways = {"ours": lambda: evaluate(plain, client), "spawn": _spawn}
        samples = interleave(rounds, {"start": lambda: in_turn(ways)})
    what = f"{WHAT}, no sandbox, to {SPAWN}"
    return list(start_rows(what, samples, "start.ours", "start.spawn", _TARGET))


def start_rows(
    what: str, samples: Mapping[str, Sequence[float]], ours: str, other: str, target: float | None
) -> Iterator[Row]:
    """Yield the rows for two ways of which there are percentiles, as of `in_turn`."""
    for percent in (_JUDGED, *_SHOWN):
        yield Row(
            f"{what}, p50" if percent == _JUDGED else f"… p{percent}",
            "ms",
            samples[f"{ours}.{percent}"],
            samples[f"{other}.{percent}"],
            target if percent == _JUDGED else None,
            higher_is_better=False,
        )


def in_turn(ways: Mapping[str, Callable[[], float]]) -> Round:
    """Start in each way in turn, so that all see the same of a busy machine."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(STARTS):
        for way, start in ways.items():
            time.sleep(_SETTLE)
            times[way].append(start() * 1e3)
    return {
        f"{way}.{percent}": percentile(samples, percent)
        for way, samples in times.items()
        for percent in (_JUDGED, *_SHOWN)
    }


def evaluate(ours: Daemon, client: Client, files: int = SMALL) -> float:
    """Evaluate the commit with a tree of so many files; return the seconds to the first event."""
    begin = time.perf_counter()
    identifier = ours.evaluate(client, COMMAND, files)
    page = client.page(identifier)
    end = time.perf_counter()
    assert page["data"][0]["payload"] == "hello", page
    ours.consume(client, identifier)
    return end - begin


def _spawn() -> float:
    """Run the command; return the seconds until its output has been read and it was waited for."""
    return run_by_hand(["/bin/sh", "-c", COMMAND])
