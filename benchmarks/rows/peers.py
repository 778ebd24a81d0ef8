"""The daemon and its sandbox beside isolate, which other judges use.

A run by isolate is `--init`, `--run` and `--cleanup`, without cgroups. It has no form, commit,
tree, events or limits of all processes together.

To build isolate: `make isolate` (libcap-dev, libseccomp-dev), and its configuration at the path
that was built in (`make isolate default.cf CONFIG=PATH BOXDIR=DIRECTORY`).

isolate is one program; bwrap, the first process and the shell are three, and each exec of a dynamic
program takes 0.7 ms. In a run by the library bwrap takes some 60 %, the request's process 35 %.
Tried and not kept: limits of that run by prlimit(2) from outside in place of prlimit(1), an exec
less. But bwrap does not tell a program that is missing (127) or cannot be executed (126) from one
that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.client import Client
from benchmarks.daemon import MANY_CONNECTIONS, daemon
from benchmarks.measure import CannotRun, Round, Row, interleave
from benchmarks.programs.isolate_runs import find_isolate
from benchmarks.rows.sandbox import time_runs
from benchmarks.rows.start import STARTS, WHAT, evaluate, in_turn
from benchmarks.rows.throughput import CLIENTS, rush
from benchmarks.running import figures

_RUN_TARGET = 1.5
_START_TARGET = 1.5
_RATE_TARGET = 0.6


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows. Raises CannotRun."""
    if find_isolate() is None:
        raise CannotRun("isolate is not installed: install it, or name its program by ISOLATE=PATH")
    with daemon("auto", MANY_CONNECTIONS) as ours, Client(ours.port) as client:
        ways: dict[str, Callable[[], Round]] = {
            "run": partial(time_runs, ours, client),
            "start": lambda: in_turn({"ours": partial(evaluate, ours, client)}),
            "rush": partial(rush, ours),
            "isolate": partial(figures, "isolate_runs", STARTS),
        }
        samples = interleave(rounds, ways)
    times, rates = samples["isolate.p50"], samples["isolate.rate"]
    return [
        Row(
            "a run by the library for evaluators, to a run by isolate, p50",
            "ms",
            samples["run.p50"],
            times,
            _RUN_TARGET,
            higher_is_better=False,
        ),
        Row(
            f"{WHAT}, in the sandbox, to a run by isolate, p50",
            "ms",
            samples["start.ours"],
            times,
            _START_TARGET,
            higher_is_better=False,
        ),
        Row(
            f"evaluations in the sandbox, {CLIENTS} clients, to isolate, two at a time",
            "1/s",
            samples["rush.rate"],
            rates,
            _RATE_TARGET,
        ),
    ]
