"""Starts in the sandbox, with a small and a large tree, and its command line by hand.

The evaluator begins in a tree of its own, whose size should make no difference. By hand the same
bwrap is run with an empty tree: the command line, and nothing of what leads to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.client import Client
from benchmarks.daemon import LARGE, SMALL, daemon
from benchmarks.measure import Row, interleave
from benchmarks.rows.start import SPAWN, STARTS, WHAT, evaluate, in_turn, start_rows
from benchmarks.running import figures

_TARGET = 1.5
_LARGE_TARGET = 1.2
_BY_HAND = "bwrap by hand"


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon(sandbox="auto") as boxed, Client(boxed.port) as client:
        ways: dict[str, Callable[[], float]] = {
            str(files): partial(evaluate, boxed, client, files) for files in (SMALL, LARGE)
        }
        samples = interleave(
            rounds,
            {"start": lambda: in_turn(ways), "hand": lambda: figures("sandbox_start", STARTS)},
        )
    small, large, hand = f"start.{SMALL}", f"start.{LARGE}", "hand.sandbox"
    what = f"{WHAT}, in the sandbox, tree of"
    return [
        *start_rows(f"{what} {SMALL} files, to {_BY_HAND}", samples, small, hand, _TARGET),
        *start_rows(f"{what} {LARGE} files, to {_BY_HAND}", samples, large, hand, _TARGET),
        *start_rows(f"{what} {LARGE} files, to {SMALL}", samples, large, small, _LARGE_TARGET),
        *start_rows(f"{_BY_HAND}, to {SPAWN}", samples, hand, "hand.plain", None),
    ]
