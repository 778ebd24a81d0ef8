"""From stdout to JSON Lines at an HTTP client, beside a forwarder in Go.

Both run the same command and answer with the same events, in one response. The client counts bytes
and events, and parses none. Time runs from the first bytes that the client receives to the last
ones, and is told per byte of stdout.

By perf(1) the kernel takes 20 % of the daemon's processor time, memmove(3) and the search for line
terminators and blank lines 22 %, orjson 1 %. The rest is the interpreter's, over everything that
happens to a chunk: pipe, parser, ring, stream and Twisted's transport. Tried without success:
pieces of 256 KiB in place of 64.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import programs
from benchmarks.client import Client
from benchmarks.daemon import Daemon, daemon
from benchmarks.measure import CannotRun, Round, Row, interleave
from benchmarks.rows.delivery import COMMAND, LENGTH, MB, SETTINGS, TOTAL, Stopwatch
from benchmarks.running import Server, serving

_SOURCE = Path(programs.__file__).with_name("lines_forwarder.go")
_TARGET = 1.5
_TIMEOUT = 60.0
_READ = 256 * 1024
_LINES = TOTAL // LENGTH
_EVENTS = 2 * _LINES  # one for each line, and one for its terminator
_PAYLOADS = TOTAL + _LINES  # bytes; JSON takes two for a terminator
_AROUND = len('{"type":"text","payload":""}\n')


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows. Raises CannotRun."""
    with _forwarder() as other, daemon(more=SETTINGS) as ours:
        samples = interleave(
            rounds,
            {
                "ours": partial(_deliver, ours, partial(_begin, ours)),
                "go": partial(_deliver, other, lambda: "/"),
            },
        )
    what = f"stdout to an HTTP client, JSON Lines, {LENGTH}-byte lines, to a forwarder in Go"
    ours_, go = (samples[f"{way}.processor_rate"] for way in ("ours", "go"))
    return [Row(f"{what}, by processor time", "MB/s", ours_, go, _TARGET)]


@contextmanager
def _forwarder() -> Iterator[Server]:
    """Build and run the baseline. Raises CannotRun."""
    go = shutil.which("go")
    if go is None:
        raise CannotRun("there is no go here: apt-get install golang-go")
    with TemporaryDirectory(prefix="tawebeval-benchmark-") as folder:
        program = f"{folder}/forwarder"
        # The standard library is all that it needs, so nothing may be downloaded.
        offline = {**os.environ, "GOPROXY": "off", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
        subprocess.run([go, "build", "-o", program, _SOURCE], cwd=folder, env=offline, check=True)
        with serving([program, COMMAND]) as started:
            yield started


def _begin(ours: Daemon) -> str:
    """Begin an evaluation; return the path of its events."""
    with Client(ours.port) as client:
        return f"/evaluation/{ours.evaluate(client, COMMAND)}/events"


def _deliver(served: Server, begin: Callable[[], str]) -> Round:
    """Read all events; return MB of stdout per second."""
    stopwatch = Stopwatch(served)
    connection = HTTPConnection("127.0.0.1", served.port, timeout=_TIMEOUT)
    connection.request("GET", begin(), headers={"Accept": "application/jsonl"})
    events = 0
    with connection.getresponse() as answer:
        while chunk := answer.read1(_READ):
            stopwatch.count(len(chunk))
            events += chunk.count(b"\n")
    connection.close()
    measured = stopwatch.stop(TOTAL / MB)
    # The daemon makes two events of a line that comes in two parts.
    assert events >= _EVENTS, "events were lost"
    assert stopwatch.received - events * _AROUND == _PAYLOADS, "bytes were lost"
    return measured
