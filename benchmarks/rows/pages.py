"""Pages of 1,000 events: the daemon, a bare Site that serves the same bytes, and Starlette.

Starlette has the events as a list of dicts and builds the page with orjson.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.client import Client
from benchmarks.daemon import Daemon, daemon
from benchmarks.measure import Row, interleave
from benchmarks.rows.polls import load_rows, under_load
from benchmarks.running import server

_REQUESTS = 1000
_CONNECTIONS = 16
_EVENTS = 1000
_TARGET = 2.5
# A terminator, and 500 lines with their terminators save the last, which is held back.
_COMMAND = "echo; seq -f 'this is line number %04.0f' 1 500; exec sleep 600"


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon() as ours, TemporaryDirectory(prefix="tawebeval-benchmark-") as directory:
        path, page = _full_evaluation(ours)
        file = Path(directory, "page")
        file.write_bytes(page)
        with server("static_site", file) as bare, server("starlette_site", file) as starlette:
            samples = interleave(
                rounds,
                {
                    "ours": partial(under_load, ours, path, _CONNECTIONS, _REQUESTS),
                    "bare": partial(under_load, bare, "/page", _CONNECTIONS, _REQUESTS),
                    "starlette": partial(under_load, starlette, "/page", _CONNECTIONS, _REQUESTS),
                },
            )
    what = f"pages of {_EVENTS:,} events ({len(page):,} bytes), {_CONNECTIONS} connections"
    return [
        *load_rows(f"{what}, to Starlette", samples, "ours", "starlette", _TARGET),
        *load_rows(f"{what}, to a bare Site", samples, "ours", "bare", None),
    ]


def _full_evaluation(ours: Daemon) -> tuple[str, bytes]:
    """Begin an evaluation that prints so many events; return their page and its path."""
    with Client(ours.port) as client:
        path = f"/evaluation/{ours.evaluate(client, _COMMAND)}/events"
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            page = client.get(path)
            if len(json.loads(page)["data"]) == _EVENTS:
                return path, page
            time.sleep(0.05)
    raise TimeoutError(f"the evaluation does not come to {_EVENTS} events")
