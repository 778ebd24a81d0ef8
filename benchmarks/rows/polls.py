"""Empty polls over keep-alive connections: the daemon, a bare Site, and Starlette.

The bare Site serves the same bytes from memory, Starlette builds the same page.
All of a way's connections are busy: each sends its next request when the last is answered. So the
rate with many of them is that of a server which always has something to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.client import Client
from benchmarks.daemon import MANY_CONNECTIONS, USUAL, Daemon, daemon
from benchmarks.measure import Round, Row, interleave
from benchmarks.programs.load import Target
from benchmarks.running import Server, figures, server

CONNECTIONS = (1, 256)
_REQUESTS = 2500  # at least, and two on each connection
_TARGET, _STRETCH = 0.6, 0.9  # to a bare Site


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with (
        daemon(more=USUAL + MANY_CONNECTIONS) as ours,
        server("static_site") as bare,
        server("starlette_site") as starlette,
    ):
        path = silent_evaluation(ours)
        ways: dict[str, Callable[[], Round]] = {}
        for connections in CONNECTIONS:
            for name, one, where in (
                ("ours", ours, path),
                ("bare", bare, "/poll"),
                ("starlette", starlette, "/poll"),
            ):
                ways[f"{name}.{connections}"] = partial(
                    under_load, one, where, connections, max(_REQUESTS, 2 * connections)
                )
        samples = interleave(rounds, ways)
    rows = []
    for connections in CONNECTIONS:
        what = f"empty polls, {connections:,} connection{'s' if connections > 1 else ''}"
        for baseline, rate, how, target, stretch in (
            ("bare", "rate", f"{what}, to a bare Site", _TARGET, _STRETCH),
            ("bare", "processor_rate", "… by processor time", _TARGET, _STRETCH),
            ("starlette", "processor_rate", "… to Starlette, by processor time", None, None),
        ):
            ours_, other = (samples[f"{way}.{connections}.{rate}"] for way in ("ours", baseline))
            rows.append(Row(how, "1/s", ours_, other, target, stretch=stretch))
    return rows


def silent_evaluation(ours: Daemon) -> str:
    """Begin an evaluation that prints nothing; return the path of a poll that is empty."""
    with Client(ours.port) as client:
        identifier = ours.evaluate(client, "exec sleep 600")
    return f"/evaluation/{identifier}/events?after=0"


def under_load(server: Server, path: str, connections: int, requests: int) -> Round:
    """Put a load on a server; return requests per second, and per second of its processor time."""
    return spread_load([Target(server.port, server.pid, path)], connections, requests)


def spread_load(targets: Sequence[Target], connections: int, requests: int) -> Round:
    """Put a load on several at once, each connection on one of them; return the same of all."""
    return figures("load", json.dumps(targets), connections, requests)
