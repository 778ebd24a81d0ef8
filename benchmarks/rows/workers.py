"""What a second daemon on the machine would bring, and what the first one takes of it.

The daemon's part: 64 clients begin evaluations in the sandbox, warm, and read them to their ends,
as in `throughput`. What the daemon spends for each evaluation stands beside what evaluator and
sandbox spend. The evaluator is `/bin/echo`, so this is the most that the daemon's part can be.
What the kernel does in nobody's name, such as removing namespaces, counts for neither.

Two daemons: empty polls, of one daemon, and of two that each have an evaluation of their own.
First each is asked for what it has, as a proxy would that goes by identifiers. Then half of the
polls come to the other one, as they would on one port without a proxy. That one says 404, which
counts as an answer: to get the right one it would have to ask the first, and to hand on what that
says. What puts the load on shares the processors with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.daemon import MANY_CONNECTIONS, USUAL, Daemon, daemon
from benchmarks.measure import Round, Row, interleave
from benchmarks.programs.load import Target
from benchmarks.rows.polls import load_rows, silent_evaluation, spread_load
from benchmarks.rows.throughput import CLIENTS, EACH, rush
from benchmarks.running import Server

_CONNECTIONS = 16
_REQUESTS = 5000


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    return [*_measure_part(rounds), *_measure_second(rounds)]


def _measure_part(rounds: int) -> Sequence[Row]:
    with daemon(sandbox="auto", more=MANY_CONNECTIONS) as ours:
        samples = interleave(rounds, {"each": partial(_spent, ours)})
    return [
        Row(
            f"processor time for an evaluation, {CLIENTS} clients, the daemon's to the sandbox's",
            "ms",
            samples["each.daemon"],
            samples["each.rest"],
            higher_is_better=False,
        )
    ]


def _spent(ours: Daemon) -> Round:
    """Return the milliseconds of processor time that are spent for an evaluation."""
    begun = _own_time(ours), ours.descendants_time()
    rush(ours)
    spent = _own_time(ours) - begun[0], ours.descendants_time() - begun[1]
    own, rest = (seconds * 1e3 / (CLIENTS * EACH) for seconds in spent)
    return {"daemon": own, "rest": rest}


def _own_time(ours: Daemon) -> float:
    """Return the seconds that it has spent, with the child that mounts and lives as long."""
    children = [Server(pid, ours.port) for pid in ours.children()]
    return ours.processor_time() + sum(child.processor_time() for child in children)


def _measure_second(rounds: int) -> Sequence[Row]:
    with daemon(more=USUAL) as first, daemon(more=USUAL) as second:
        paths = {one: silent_evaluation(one) for one in (first, second)}
        own = [Target(one.port, one.pid, path) for one, path in paths.items()]
        others = [
            Target(one.port, one.pid, paths[other], 404)
            for one, other in ((first, second), (second, first))
        ]
        samples = interleave(
            rounds,
            {
                name: partial(spread_load, targets, _CONNECTIONS, _REQUESTS)
                for name, targets in (
                    ("one", own[:1]),
                    ("two", own),
                    ("mixed", [*own, *others]),
                )
            },
        )
    what = f"empty polls, {_CONNECTIONS} connections, two daemons to one"
    return [
        *load_rows(f"{what}, each asked for its own", samples, "two", "one", None),
        *load_rows(f"{what}, half asked of the wrong one", samples, "mixed", "one", None),
    ]
