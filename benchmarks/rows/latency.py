"""From the evaluator's `write` to the client's `read`: long poll, stream, and a raw forwarder.

A line each 5 ms, one client, nothing else to do. The client's parsing is not part of it: the
time is that at which the bytes were read.

Between the evaluator and the daemon are the starter, which moves stdout into the file, and inotify,
which reports it: one process and one wake-up more than in the raw forwarder.
"""

from __future__ import annotations

import re
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
                "poll": lambda: _percentiles(_by_long_poll(ours)),
                "stream": lambda: _percentiles(_by_stream(ours)),
                "raw": lambda: _percentiles(_by_socket(raw)),
            },
        )
    rows = []
    for way, name in (("poll", "a long poll's `read`"), ("stream", "`read` of server-sent events")):
        what = f"latency, `write` to {name}, to a raw forwarder"
        for percent, target in (("p50", _TARGET), ("p99", None)):
            ours_, raw_ = samples[f"{way}.{percent}"], samples[f"raw.{percent}"]
            named = f"{what}, p50" if percent == "p50" else "… p99"
            rows.append(Row(named, "ms", ours_, raw_, target, higher_is_better=False))
    return rows


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


def _by_stream(ours: Daemon) -> Iterator[float]:
    """Yield the latency of each line in milliseconds."""
    with Client(ours.port) as client:
        identifier = ours.evaluate(client, _COMMAND)
    head = f"GET /evaluation/{identifier}/events HTTP/1.1\r\nHost: localhost\r\n"
    head += "Accept: text/event-stream\r\n\r\n"
    with socket.create_connection(("127.0.0.1", ours.port), _TIMEOUT) as connection:
        connection.sendall(head.encode())
        while chunk := connection.recv(4096):
            received = time.monotonic_ns()
            for payload in re.findall(rb'"payload":"(\d+)"', chunk):
                yield (received - int(payload)) / 1e6
            if b"event: end" in chunk:
                return


def _by_socket(raw: Server) -> Iterator[float]:
    """Yield the latency of each line in milliseconds."""
    with socket.create_connection(("127.0.0.1", raw.port), _TIMEOUT) as connection:
        while chunk := connection.recv(4096):
            received = time.monotonic_ns()
            for line in chunk.split():
                yield (received - int(line)) / 1e6
