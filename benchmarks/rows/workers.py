"""What a second daemon on the machine would bring.

Empty polls, of one daemon, and of two that each have an evaluation of their own. Each is asked for
its own evaluation, as by a proxy that goes by identifiers. The program that puts the load on shares
the processors with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.daemon import USUAL, daemon
from benchmarks.measure import Row, interleave
from benchmarks.programs.load import Target
from benchmarks.rows.polls import silent_evaluation, spread_load

_CONNECTIONS = 16
_REQUESTS = 5000


def measure(rounds: int) -> Sequence[Row]:
    """Return the row."""
    with daemon(more=USUAL) as first, daemon(more=USUAL) as second:
        own = [Target(one.port, one.pid, silent_evaluation(one)) for one in (first, second)]
        samples = interleave(
            rounds,
            {
                name: partial(spread_load, targets, _CONNECTIONS, _REQUESTS)
                for name, targets in (("one", own[:1]), ("two", own))
            },
        )
    what = f"empty polls, {_CONNECTIONS} connections, two daemons to one, each asked for its own"
    return [Row(what, "1/s", samples["two.rate"], samples["one.rate"])]
