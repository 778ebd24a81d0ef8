"""The daemon and its sandbox beside isolate, which other judges use, and nsjail.

A run by isolate is `--init`, `--run` and `--cleanup`, without cgroups; one by nsjail has the system
read-only and namespaces of its own, without cgroups or a filter of system calls. Neither has a
form, commit, tree, events or limits of all processes together.

To build isolate: `make isolate` (libcap-dev, libseccomp-dev), and its configuration at the path
that was built in (`make isolate default.cf CONFIG=PATH BOXDIR=DIRECTORY`). To build nsjail: `make`
(bison, flex, libprotobuf-dev, protobuf-compiler, libnl-route-3-dev).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.client import Client
from benchmarks.daemon import MANY_CONNECTIONS, daemon
from benchmarks.measure import NotMeasured, Round, Row, interleave
from benchmarks.programs.peer_runs import RUNS, find_program
from benchmarks.rows.sandbox import time_runs
from benchmarks.rows.start import STARTS, WHAT, evaluate, in_turn
from benchmarks.rows.throughput import CLIENTS, rush
from benchmarks.running import figures

_RUN = "a run by the library for evaluators, to a run by"
_RUN_TARGET = 0.8
_START_TARGET = 2.0
_RATE_TARGET = 0.6


def measure(rounds: int) -> Sequence[Row | NotMeasured]:
    """Return the rows; those of a peer that is not installed say so."""
    peers = [peer for peer in RUNS if find_program(peer) is not None]
    samples = _sample(rounds, peers) if peers else {}
    rows: list[Row | NotMeasured] = []
    for what, ours, other, target in (
        (f"{_RUN} isolate, p50", "run.p50", "isolate.p50", _RUN_TARGET),
        (f"{_RUN} nsjail, p50", "run.p50", "nsjail.p50", None),
        (
            f"{WHAT}, in the sandbox, to a run by isolate, p50",
            *("start.ours", "isolate.p50", _START_TARGET),
        ),
        (
            f"evaluations in the sandbox, {CLIENTS} clients, to isolate, two at a time",
            *("rush.rate", "isolate.rate", _RATE_TARGET),
        ),
    ):
        peer, figure = other.split(".")
        if peer in peers:
            is_rate = figure == "rate"
            unit = "1/s" if is_rate else "ms"
            rows.append(Row(what, unit, samples[ours], samples[other], target, is_rate))
        else:
            how = f"install it, or name its program by {peer.upper()}=PATH"
            rows.append(NotMeasured(what, f"{peer} is not installed: {how}"))
    return rows


def _sample(rounds: int, peers: Sequence[str]) -> dict[str, list[float]]:
    with daemon("auto", MANY_CONNECTIONS) as ours, Client(ours.port) as client:
        ways: dict[str, Callable[[], Round]] = {
            "run": partial(time_runs, ours, client),
            "start": lambda: in_turn({"ours": partial(evaluate, ours, client)}),
            "rush": partial(rush, ours),
            **{peer: partial(figures, "peer_runs", peer, STARTS) for peer in peers},
        }
        return interleave(rounds, ways)
