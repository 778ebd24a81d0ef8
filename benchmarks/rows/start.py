"""From `POST /evaluate` to the first event, the commit being known, on a machine that is busy.

Eight processes spin beside, at the usual priority. The baseline is the command alone, started by
posix_spawn(3).

Tried without success: directories of an upload one by one; cheaper arguments, markers and parser (3
to 25 µs each); a switch interval of 0.2
ms in Python.
Each file or directory that bwrap shows costs 0.25 ms of processor time. A whole prepared root in
place of a prepared /etc saves 2 % of bwrap's processor time; bwrap's own first process in place of
/init 5 %, but its user could read it.

Measured, and not worth their code:

- A pool of directories. To make and remove four takes 0.2 ms of processor time, and only those that
  an evaluator has not touched may be used again.
- One change of thread in place of two. One takes 0.1 ms of processor time, and the answer to `POST`
  has to wait for the upload's files.
- A cgroup that is made ahead. To make one with its limits takes 0.2 ms, in four hierarchies.
- `POST` past Klein, which takes 6 % of the reactor's time and 3 % of the daemon's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from benchmarks.client import Client
from benchmarks.daemon import COMMAND, SMALL, Daemon, daemon
from benchmarks.measure import Round, Row, interleave, percentile
from benchmarks.running import running

STARTS = 30
WHAT = "`POST /evaluate` to the first event"
_SETTLE = 0.05  # seconds, for the daemon to tidy up after the one before
_SPINNING = 8
_SPIN = "while True: pass"


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon(sandbox="auto") as ours, Client(ours.port) as client, _spinning():
        ways: dict[str, Callable[[], float]] = {
            "ours": partial(evaluate, ours, client),
            "spawn": _spawn,
        }
        samples = interleave(rounds, {"start": partial(in_turn, ways, 2 * STARTS)})
    what = f"{WHAT}, in the sandbox, {_SPINNING} processes spin, to `posix_spawn`"
    return [start_row(what, samples, "start.ours", "start.spawn", None)]


@contextmanager
def _spinning() -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(_SPINNING):
            stack.enter_context(running([sys.executable, "-I", "-S", "-c", _SPIN]))
        yield


def start_row(
    what: str, samples: Mapping[str, Sequence[float]], ours: str, other: str, target: float | None
) -> Row:
    """Return the row for two ways of which there are medians, as of `in_turn`."""
    return Row(f"{what}, p50", "ms", samples[ours], samples[other], target, higher_is_better=False)


def in_turn(ways: Mapping[str, Callable[[], float]], starts: int = STARTS) -> Round:
    """Return the median of the milliseconds that a start takes in each way."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(starts):
        for way, start in ways.items():  # in turn, so that all see the same of a busy machine
            time.sleep(_SETTLE)
            times[way].append(start() * 1e3)
    return {way: percentile(samples, 50) for way, samples in times.items()}


def evaluate(
    ours: Daemon, client: Client, files: int = SMALL, environment: str = "default"
) -> float:
    """Evaluate the commit with a tree of so many files; return the seconds to the first event."""
    return time_evaluation(ours, client, lambda: ours.evaluate(client, COMMAND, files, environment))


def time_evaluation(ours: Daemon, client: Client, evaluate: Callable[[], str]) -> float:
    """Begin an evaluation of `COMMAND` by `evaluate`; return the seconds to the first event."""
    begin = time.perf_counter()
    identifier = evaluate()
    page = client.page(identifier)
    end = time.perf_counter()
    assert page["data"][0]["payload"] == "hello", page
    ours.consume(client, identifier)
    return end - begin


def _spawn() -> float:
    """Run the command; return the seconds until its output has been read and it was waited for."""
    begin = time.perf_counter()
    reading, writing = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, writing, 1)]
    pid = os.posix_spawn("/bin/sh", ["/bin/sh", "-c", COMMAND], {}, file_actions=actions)
    os.close(writing)
    while os.read(reading, 4096):
        pass
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    return time.perf_counter() - begin
