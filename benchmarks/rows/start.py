"""From `POST /evaluate` to the first event, the commit being known; and the command by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.client import Client
from benchmarks.daemon import Daemon, daemon
from benchmarks.measure import Round, Row, interleave, percentile
from benchmarks.programs.sandbox_start import run_by_hand
from benchmarks.running import figures

_COMMAND = "/bin/echo hello"
_STARTS = 30
_SETTLE = 0.01  # seconds, for the daemon to tidy up after the one before
_JUDGED = 50
_SHOWN = (10, 90)  # percentiles; the low one is what an undisturbed start takes
_WHAT = "`POST /evaluate` to the first event"
_SPAWN = "`posix_spawn` of the same command"
_BY_HAND = "the sandbox's command line by hand"


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with (
        daemon() as plain,
        daemon(sandbox="auto") as boxed,
        Client(plain.port) as plain_client,
        Client(boxed.port) as boxed_client,
    ):
        ways = {
            "plain": lambda: _evaluate(plain, plain_client),
            "boxed": lambda: _evaluate(boxed, boxed_client),
            "spawn": _spawn,
        }
        samples = interleave(
            rounds,
            {"start": lambda: _in_turn(ways), "hand": lambda: figures("sandbox_start", _STARTS)},
        )
    spawn, hand = "start.spawn", "hand.sandbox"
    return [
        *_rows(f"{_WHAT}, no sandbox, to {_SPAWN}", samples, "start.plain", spawn, 3.0),
        *_rows(f"{_WHAT}, in the sandbox, to {_SPAWN}", samples, "start.boxed", spawn, None),
        *_rows(f"{_WHAT}, in the sandbox, to {_BY_HAND}", samples, "start.boxed", hand, 1.5),
        *_rows(f"{_BY_HAND}, to {_SPAWN}", samples, hand, "hand.plain", None),
    ]


def _rows(
    what: str, samples: Mapping[str, Sequence[float]], ours: str, other: str, target: float | None
) -> Iterator[Row]:
    for percent in (_JUDGED, *_SHOWN):
        yield Row(
            f"{what}, p50" if percent == _JUDGED else f"… p{percent}",
            "ms",
            samples[f"{ours}{percent}"],
            samples[f"{other}{percent}"],
            target if percent == _JUDGED else None,
            higher_is_better=False,
        )


def _in_turn(ways: Mapping[str, Callable[[], float]]) -> Round:
    """Start in each way in turn, so that all see the same of a busy machine."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_STARTS):
        for way, start in ways.items():
            time.sleep(_SETTLE)
            times[way].append(start() * 1e3)
    return {
        f"{way}{percent}": percentile(samples, percent)
        for way, samples in times.items()
        for percent in (_JUDGED, *_SHOWN)
    }


def _evaluate(ours: Daemon, client: Client) -> float:
    begin = time.perf_counter()
    identifier = ours.evaluate(client, _COMMAND)
    page = client.page(identifier)
    end = time.perf_counter()
    assert page["data"][0]["payload"] == "hello", page
    ours.consume(client, identifier)
    return end - begin


def _spawn() -> float:
    """Run the command; return the seconds until its output has been read and it was waited for."""
    return run_by_hand(["/bin/sh", "-c", _COMMAND])
