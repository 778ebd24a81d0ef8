"""From stdout to an HTTP client: pages that are acknowledged, and a raw forwarder.

The client asks for each page as soon as it has the one before, and looks at its cursor only.
Time runs from the first bytes that it receives to the last ones, and is told per byte of stdout.

stdout goes through a file, so that a restart loses nothing: the kernel moves each byte into the
file, and the daemon reads it from there. Then lines are found, encoded as JSON and kept.
"""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from benchmarks import programs
from benchmarks.client import Client
from benchmarks.daemon import PYTHON, Daemon, daemon
from benchmarks.measure import Round, Row, interleave
from benchmarks.running import Server, server

MB = 1_000_000
LENGTH = 100
TOTAL = 150 * MB
_TARGET = 0.3
_TIMEOUT = 60.0
_READ = 256 * 1024


def command(program: str, *arguments: int) -> str:
    """Return a command line with the text of a program: the sandbox hides its file."""
    text = Path(programs.__file__).with_name(f"{program}.py").read_text()
    return shlex.join([PYTHON, "-I", "-S", "-c", text, *map(str, arguments)])


COMMAND = command("writer", LENGTH, TOTAL)
SETTINGS = f"""\
[limits]
output = {TOTAL}
"""
# An event for each line, and one for its terminator.
_SMALLEST = len('{"type":"text","payload":""},' * 2 + r"\n") + LENGTH - 1


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon(more=SETTINGS) as ours, server("forwarder", COMMAND) as raw:
        samples = interleave(
            rounds,
            {"ours": lambda: deliver_lines(ours), "raw": lambda: _by_socket(raw)},
        )
    what = f"stdout to an HTTP client, pages, {LENGTH}-byte lines"
    return [
        Row(
            f"{what}, to a raw forwarder",
            "MB/s",
            samples["ours.rate"],
            samples["raw.rate"],
            _TARGET,
        ),
    ]


@attrs.define
class Stopwatch:
    """From the first bytes of an answer to the last ones, in processor time of the server, too."""

    _server: Server
    received: int = 0
    _clock: float = 0.0
    _processor: float = 0.0

    def count(self, size: int) -> None:
        """Note that so many bytes were received."""
        if not self.received:
            self._clock = time.perf_counter()
            self._processor = self._server.processor_time()
        self.received += size

    def stop(self, total: float) -> Round:
        """Return the rate of `total`, per second and per second of processor time."""
        clock = time.perf_counter() - self._clock
        processor = self._server.processor_time() - self._processor
        return {"rate": total / clock, "processor_rate": total / processor}


def deliver_lines(ours: Daemon) -> Round:
    """Read the events of all lines; return MB of stdout per second."""
    measured, received = read_pages(ours, COMMAND, TOTAL / MB)
    assert received >= TOTAL // LENGTH * _SMALLEST, "events were lost"
    return measured


def read_pages(ours: Daemon, printing: str, total: float) -> tuple[Round, int]:
    """Read all events of a command that prints `total`; return the rates, and bytes of pages."""
    stopwatch = Stopwatch(ours)
    with Client(ours.port) as client:
        path = f"/evaluation/{ours.evaluate(client, printing)}/events?wait=30"
        after: str | None = ""
        while after is not None:
            page = client.get(f"{path}&after={after}")
            stopwatch.count(len(page))
            after = json.loads(page[: page.index(b',"data":')] + b"}")["end"]
    return stopwatch.stop(total), stopwatch.received


def _by_socket(raw: Server) -> Round:
    stopwatch = Stopwatch(raw)
    with socket.create_connection(("127.0.0.1", raw.port), _TIMEOUT) as connection:
        while chunk := connection.recv(_READ):
            stopwatch.count(len(chunk))
    measured = stopwatch.stop(TOTAL / MB)
    assert stopwatch.received == TOTAL, "bytes were lost"
    return measured
