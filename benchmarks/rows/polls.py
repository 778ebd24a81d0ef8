"""Empty polls over keep-alive connections: the daemon and a bare Site with a static resource."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.client import Client
from benchmarks.daemon import Daemon, daemon
from benchmarks.measure import Round, Row, interleave
from benchmarks.running import Server, figures, server

CONNECTIONS = (1, 16)
_REQUESTS = 3000
_TARGET = 0.95


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon() as ours, server("static_site", "/dev/null") as bare:
        path = _silent_evaluation(ours)
        ways: dict[str, Callable[[], Round]] = {}
        for connections in CONNECTIONS:
            for name, one, where in (("ours", ours, path), ("bare", bare, "/poll")):
                ways[f"{name}.{connections}"] = partial(
                    under_load, one, where, connections, _REQUESTS
                )
        samples = interleave(rounds, ways)
    rows = []
    for connections in CONNECTIONS:
        what = f"empty polls, {connections} connection{'s' if connections > 1 else ''}"
        rows += load_rows(what, samples, f".{connections}", _TARGET)
    return rows


def _silent_evaluation(ours: Daemon) -> str:
    """Begin an evaluation that prints nothing; return the path of a poll that is empty."""
    with Client(ours.port) as client:
        identifier = ours.evaluate(client, "exec sleep 600")
    return f"/evaluation/{identifier}/events?after=0"


def under_load(server: Server, path: str, connections: int, requests: int) -> Round:
    """Put a load on a server; return requests per second, and per second of its processor time."""
    before = server.processor_time()
    rate = figures("load", server.port, path, connections, requests)["rate"]
    spent = server.processor_time() - before
    return {"rate": rate, "processor_rate": requests / spent}


def load_rows(
    what: str, samples: dict[str, list[float]], way: str, target: float | None
) -> list[Row]:
    """Return the rows for a way that was measured by `under_load` as ours and as bare."""
    return [
        Row(
            f"{what}, {how}",
            "1/s",
            samples[f"ours{way}.{name}"],
            samples[f"bare{way}.{name}"],
            target,
        )
        for name, how in (
            ("rate", "to a bare Site"),
            ("processor_rate", "by the server's processor time"),
        )
    ]
