"""Starts in the sandbox, with a small and a large tree, and its command line by hand; runs in it.

The evaluator begins in a tree of its own, whose size should make no difference. By hand the same
bwrap is run with an empty tree: the command line, and nothing of what leads to it. A run is that of
a submission's program, by the library for evaluators.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.client import Client
from benchmarks.daemon import LARGE, SMALL, Daemon, daemon
from benchmarks.measure import Round, Row, interleave, percentile
from benchmarks.rows.start import SPAWN, STARTS, WHAT, evaluate, in_turn, start_rows
from benchmarks.running import figures

_TARGET = 1.5
_LARGE_TARGET = 1.2
_BY_HAND = "bwrap by hand"
_PERCENTILES = (10, 50, 90)
_RUNS = f"""
import json, os, sys, time
sys.path.insert(0, os.environ["EVALUATION_TOOLS"] + "/lib")
import segi
times = []
for _ in range(1 + {STARTS}):
    begin = time.perf_counter()
    assert segi.run(["/bin/echo", "hello"]).stdout
    times.append((time.perf_counter() - begin) * 1e3)
print(json.dumps(times[1:]))  # the first run starts what makes the others
"""


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon(sandbox="auto") as boxed, Client(boxed.port) as client:
        ways: dict[str, Callable[[], float]] = {
            str(files): partial(evaluate, boxed, client, files) for files in (SMALL, LARGE)
        }
        samples = interleave(
            rounds,
            {
                "start": lambda: in_turn(ways),
                "run": lambda: _run(boxed, client),
                "hand": lambda: figures("sandbox_start", STARTS),
            },
        )
    small, large, hand = f"start.{SMALL}", f"start.{LARGE}", "hand.sandbox"
    what = f"{WHAT}, in the sandbox, tree of"
    return [
        *start_rows(f"{what} {SMALL} files, to {_BY_HAND}", samples, small, hand, _TARGET),
        *start_rows(f"{what} {LARGE} files, to {_BY_HAND}", samples, large, hand, _TARGET),
        *start_rows(f"{what} {LARGE} files, to {SMALL}", samples, large, small, _LARGE_TARGET),
        *start_rows(
            f"a run by the library for evaluators, to {_BY_HAND}", samples, "run", hand, _TARGET
        ),
        *start_rows(f"{_BY_HAND}, to {SPAWN}", samples, hand, "hand.plain", None),
    ]


def _run(ours: Daemon, client: Client) -> Round:
    """Return percentiles of the milliseconds of runs in one evaluation."""
    identifier = ours.evaluate(client, f"python3 -c {shlex.quote(_RUNS)}")
    times = json.loads(client.page(identifier)["data"][0]["payload"])
    ours.consume(client, identifier)
    return {f"{percent}": percentile(times, percent) for percent in _PERCENTILES}
