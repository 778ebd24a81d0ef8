"""What a second daemon on the machine would bring.

Empty polls, of one daemon, and of two that each have an evaluation of their own.
First each is asked for what it has, as a proxy would that goes by identifiers. Then half of the
polls come to the other one, as they would on one port without a proxy. That one says 404, which
counts as an answer: to get the right one it would have to ask the first, and to hand on what that
says. What puts the load on shares the processors with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.daemon import USUAL, daemon
from benchmarks.measure import Row, interleave
from benchmarks.programs.load import Target
from benchmarks.rows.polls import load_rows, silent_evaluation, spread_load

_CONNECTIONS = 16
_REQUESTS = 5000


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
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
