"""Starts in the sandbox, with a small and a large tree, and runs in it.

The evaluator begins in a tree of its own, whose size should make no difference. A run is that of a
submission's program, by the library for evaluators. The same bwrap by hand is no baseline: it gets
faster with the sandbox.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.client import Client
from benchmarks.daemon import LARGE, SMALL, Daemon, daemon
from benchmarks.measure import Round, Row, interleave, percentile
from benchmarks.rows.start import WHAT, evaluate, in_turn, start_row

_LARGE_TARGET = 1.2
_RUN_COUNT = 200
_DAEMON_TARGET = 1.0  # ms
_TOGETHER_TARGET = 1.1
_RUNS = f"""
import json, os, sys, time
sys.path.insert(0, os.environ["EVALUATION_TOOLS"] + "/lib")
import segi
times = []
for _ in range(1 + {_RUN_COUNT}):
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
                "run": lambda: time_runs(boxed, client),
            },
        )
    small, large = f"start.{SMALL}", f"start.{LARGE}"
    what = f"{WHAT}, in the sandbox, tree of {LARGE} files, to {SMALL}"
    return [
        start_row(what, samples, large, small, _LARGE_TARGET),
        Row(
            f"the daemon's processor time for one of {_RUN_COUNT} runs of an evaluation",
            "ms",
            samples["run.daemon"],
            target=_DAEMON_TARGET,
            higher_is_better=False,
        ),
        Row(
            f"an evaluation of {_RUN_COUNT} runs, to {_RUN_COUNT} times their median",
            "s",
            samples["run.all"],
            samples["run.runs"],
            target=_TOGETHER_TARGET,
            higher_is_better=False,
        ),
    ]


def time_runs(ours: Daemon, client: Client) -> Round:
    """Return the milliseconds of runs in one evaluation, their median and the daemon's for each.

    And the seconds of the evaluation, and of so many medians. The start of the evaluation is
    counted with the runs.
    """
    begin, before = time.perf_counter(), ours.processor_time()
    identifier = ours.evaluate(client, f"python3 -c {shlex.quote(_RUNS)}")
    times = json.loads(client.page(identifier)["data"][0]["payload"])
    ours.consume(client, identifier)
    whole = time.perf_counter() - begin
    spent = (ours.processor_time() - before) * 1e3 / _RUN_COUNT
    middle = percentile(times, 50)
    return {"daemon": spent, "p50": middle, "all": whole, "runs": middle * _RUN_COUNT / 1e3}
