"""From `POST /evaluate` to the first event, the commit being known; and the command by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from benchmarks.client import Client
from benchmarks.daemon import Daemon, daemon
from benchmarks.measure import Round, Row, interleave, percentile

_COMMAND = "/bin/echo hello"
_STARTS = 30
_SETTLE = 0.01  # seconds, for the daemon to tidy up after the one before
_TARGET = 3.0
_JUDGED = 50
_SHOWN = (10, 90)  # percentiles; the low one is what an undisturbed start takes


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon() as ours, Client(ours.port) as client:
        samples = interleave(rounds, {"both": lambda: _pairs(ours, client)})
    what = "`POST /evaluate` to the first event, to `posix_spawn` of the same command"
    return [
        Row(
            f"{what}, p50" if percent == _JUDGED else f"… p{percent}",
            "ms",
            samples[f"both.ours{percent}"],
            samples[f"both.spawn{percent}"],
            _TARGET if percent == _JUDGED else None,
            higher_is_better=False,
        )
        for percent in (_JUDGED, *_SHOWN)
    ]


def _pairs(ours: Daemon, client: Client) -> Round:
    """Start ours and the command in turn, so that both see the same of a busy machine."""
    times: dict[str, list[float]] = {"ours": [], "spawn": []}
    for _ in range(_STARTS):
        time.sleep(_SETTLE)
        times["ours"].append(_evaluate(ours, client) * 1e3)
        time.sleep(_SETTLE)
        times["spawn"].append(_spawn() * 1e3)
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
    begin = time.perf_counter()
    reading, writing = os.pipe()
    argv = ["/bin/sh", "-c", _COMMAND]
    actions = [(os.POSIX_SPAWN_DUP2, writing, 1)]
    pid = os.posix_spawn(argv[0], argv, {}, file_actions=actions)
    os.close(writing)
    while os.read(reading, 4096):
        pass
    os.close(reading)
    os.waitpid(pid, 0)
    return time.perf_counter() - begin
