"""From the evaluator's `write` to the client's `read`: long polls, and a raw forwarder."""

from __future__ import annotations

import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import programs
from benchmarks.client import Client
from benchmarks.daemon import PYTHON, Daemon, daemon
from benchmarks.measure import Round, Row, interleave, percentile
from benchmarks.running import Server, server

_LINES = 200
_WARM_UP = 20
_TARGET = 3.5
_TIMEOUT = 30.0

_CLOCK = Path(programs.__file__).with_name("clock.py")
_COMMAND = shlex.join([PYTHON, "-I", "-S", str(_CLOCK), str(_LINES)])


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon() as ours, server("forwarder", _COMMAND) as raw:
        samples = interleave(
            rounds,
            {
                "ours": lambda: _percentiles(_by_long_poll(ours)),
                "raw": lambda: _percentiles(_by_socket(raw)),
            },
        )
    what = "latency, `write` to a long poll's `read`, to a raw forwarder"
    return [
        Row(f"{what}, p50", "ms", samples["ours.p50"], samples["raw.p50"], _TARGET, False),
        Row("… p99", "ms", samples["ours.p99"], samples["raw.p99"], None, False),
    ]


def _percentiles(latencies: Iterator[float]) -> Round:
    measured = list(latencies)[_WARM_UP:]
    assert len(measured) == _LINES - _WARM_UP, "lines were lost"
    return {"p50": percentile(measured, 50), "p99": percentile(measured, 99)}


def _by_long_poll(ours: Daemon) -> Iterator[float]:
    """Yield the latency of each line in milliseconds."""
    with Client(ours.port) as client:
        identifier = ours.evaluate(client, _COMMAND)
        after: str | None = None
        while True:
            page = client.page(identifier, after)
            for event in page["data"]:
                if event["payload"].isdigit():
                    yield (client.received - int(event["payload"])) / 1e6
            after = page["end"]
            if after is None:
                return


def _by_socket(raw: Server) -> Iterator[float]:
    """Yield the latency of each line in milliseconds."""
    with socket.create_connection(("127.0.0.1", raw.port), _TIMEOUT) as connection:
        while chunk := connection.recv(4096):
            received = time.monotonic_ns()
            for line in chunk.split():
                yield (received - int(line)) / 1e6
