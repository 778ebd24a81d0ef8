"""1,000 evaluations that print a line a second each, and 2,000 clients that wait for those.

Two clients follow each evaluation by long polls. The time from the `write` to the `read` of every
line at both is taken, and the daemon's processor time with 250 and 1,000 evaluations. The
daemon goes up and down between these: what is over has ended and is forgotten. Evaluators
are `cat`, without a sandbox, and get their lines from one process that writes them: 1,000 that
sleep and print by themselves would load the machine more than the daemon does. What all of these
take of the processors is felt in the latency, as it would be in earnest.

Tried without success: open descriptors of the cgroups' files take a tenth of the time, but two
descriptors and a page of the kernel for each evaluation.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from benchmarks.client import Client, events
from benchmarks.conversations import Conversation, Conversations, identifier, read_to_the_end
from benchmarks.daemon import MANY_CONNECTIONS, Daemon, daemon
from benchmarks.measure import Round, Row, interleave, percentile
from benchmarks.programs import drummer

LEVELS = (250, 1000)
_CLIENTS = 2  # of each evaluation
_SECONDS = 3
_TARGET = 1000.0  # ms
_PATIENCE = 60.0
_WAIT = 30
_LINE = re.compile(rb'"payload":"(\d+)"')
_CONFIGURATION = f"""\
[evaluations]
running = {max(LEVELS)}
{MANY_CONNECTIONS}
"""


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with _crowd() as crowd:
        samples = interleave(rounds, {str(level): partial(crowd.at, level) for level in LEVELS})
    few, most = LEVELS
    lines = f"{most:,} evaluations print a line a second, {most * _CLIENTS:,} long polls"
    cost = "the daemon's processor time for a line"
    return [
        Row(f"{lines}, `write` to `read`, p99", "ms", samples[f"{most}.p99"], None, _TARGET, False),
        Row(
            f"{cost}, {most:,} evaluations to {few}",
            "ms",
            samples[f"{most}.cost"],
            samples[f"{few}.cost"],
            1.0,
            higher_is_better=False,
        ),
    ]


@contextmanager
def _crowd() -> Iterator[Crowd]:
    with (
        TemporaryDirectory(prefix="tawebeval-benchmark-") as name,
        daemon(more=_CONFIGURATION) as ours,
        Conversations(ours.port) as clients,
    ):
        folder = Path(name)
        folder.chmod(0o755)
        crowd = Crowd(ours, clients, folder)
        try:
            yield crowd
        finally:
            crowd.end()


class Crowd:
    """Evaluations, and who follows them."""

    def __init__(self, ours: Daemon, clients: Conversations, folder: Path) -> None:
        self._ours = ours
        self._clients = clients
        self._folder = folder
        self._fifos: list[int] = []  # open for writing, so that no `cat` comes to an end
        self._latencies: list[float] = []  # ms
        self._joined = 0

    def at(self, level: int) -> Round:
        """Measure with so many evaluations."""
        self._shrink(level)
        self._grow(level)
        spent = self._ours.processor_time()
        self._drum(_SECONDS)
        spent = self._ours.processor_time() - spent
        return {
            "cost": spent * 1e3 / (level * _SECONDS),
            "p99": percentile(self._latencies, 99),
        }

    def end(self) -> None:
        """Let all evaluations end."""
        while self._fifos:
            os.close(self._fifos.pop())

    def _shrink(self, level: int) -> None:
        # All polls have been sent; once another request is answered the daemon has read them. For
        # of two clients the first to learn of the end has the evaluation forgotten.
        with Client(self._ours.port) as client:
            client.get("/health")
        while len(self._fifos) > level:
            os.close(self._fifos.pop())
        self._clients.go_on(lambda: len(self._clients) <= level * _CLIENTS, _PATIENCE)

    def _grow(self, level: int) -> None:
        clients = (level - len(self._fifos)) * _CLIENTS
        self._joined = 0
        while len(self._fifos) < level:
            fifo = self._folder / str(len(self._fifos))
            if not fifo.exists():
                os.mkfifo(fifo)
                fifo.chmod(0o644)
            self._fifos.append(os.open(fifo, os.O_RDWR))
            self._clients.begin(self._first(fifo))
        self._clients.go_on(lambda: self._joined >= clients, _PATIENCE)
        if clients:
            self._drum(1)  # when that has come all are well under way

    def _first(self, fifo: Path) -> Conversation:
        """Begin an evaluation, and follow it; another client does, too."""
        evaluation = identifier((yield self._ours.request(f"exec cat {fifo}")))
        for _ in range(_CLIENTS - 1):
            self._clients.begin(self._following(evaluation))
        yield from self._following(evaluation)

    def _following(self, evaluation: str) -> Conversation:
        # Nobody may come too late for the first line, which another's poll could acknowledge.
        beginning = orjson.loads((yield events(evaluation, wait=0)))["end"]
        self._joined += 1
        yield from read_to_the_end(evaluation, _WAIT, beginning, self._take)

    def _take(self, page: bytes) -> None:
        for written in _LINE.findall(page):
            self._latencies.append((self._clients.received - int(written)) / 1e6)

    def _drum(self, seconds: int) -> None:
        """Let each evaluation print so many lines, and all its clients receive them."""
        self._latencies.clear()
        count = len(self._fifos)
        lines = count * seconds * _CLIENTS
        arguments = [str(self._folder), str(count), str(seconds)]
        command = [sys.executable, "-I", "-S", drummer.__file__, *arguments]
        with subprocess.Popen(command) as drumming:
            self._clients.go_on(lambda: len(self._latencies) >= lines, _PATIENCE)
        assert drumming.returncode == 0
        assert len(self._latencies) == lines, "lines have come twice"
