"""The daemon and its sandbox beside isolate, which other judges use.

A run by isolate is `--init`, `--run` and `--cleanup`, without cgroups: no form, commit, tree,
events or limits of all processes together.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import partial

from benchmarks.client import Client
from benchmarks.daemon import MANY_CONNECTIONS, daemon
from benchmarks.measure import CannotRun, Row, interleave
from benchmarks.rows.sandbox import time_runs
from benchmarks.rows.start import STARTS, WHAT, evaluate, in_turn, start_row
from benchmarks.rows.throughput import CLIENTS, rush
from benchmarks.running import figures

_BY = "a run by isolate"
_RUN_TARGET = 0.8
_START_TARGET = 2.0
_RATE_TARGET = 0.6


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows. Raises CannotRun."""
    if shutil.which(os.environ.get("ISOLATE", "isolate")) is None:
        raise CannotRun("there is no isolate here: install it, or name it by ISOLATE=PATH")
    with daemon("auto", MANY_CONNECTIONS) as ours, Client(ours.port) as client:
        samples = interleave(
            rounds,
            {
                "run": partial(time_runs, ours, client),
                "start": lambda: in_turn({"ours": partial(evaluate, ours, client)}),
                "rush": partial(rush, ours),
                "isolate": lambda: figures("isolate_runs", STARTS),
            },
        )
    run, start = (
        f"a run by the library for evaluators, to {_BY}",
        f"{WHAT}, in the sandbox, to {_BY}",
    )
    return [
        start_row(run, samples, "run.p50", "isolate.p50", _RUN_TARGET),
        start_row(start, samples, "start.ours", "isolate.p50", _START_TARGET),
        Row(
            f"evaluations in the sandbox, {CLIENTS} clients, to isolate, two at a time",
            "1/s",
            samples["rush.rate"],
            samples["isolate.rate"],
            _RATE_TARGET,
        ),
    ]
