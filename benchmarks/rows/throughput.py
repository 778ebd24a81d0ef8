"""Evaluations per second in the sandbox, warm, 64 clients at once; and `xargs -P2` by hand.

Each client begins an evaluation, reads it to its end, and begins the next one. As many run at once
as there are processors, which is the default. xargs does nothing but start and wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.conversations import Conversation, Conversations, identifier, read_to_the_end
from benchmarks.daemon import MANY_CONNECTIONS, Daemon, daemon
from benchmarks.measure import Round, Row, interleave
from benchmarks.programs.sandbox_start import COMMAND
from benchmarks.running import figures

CLIENTS = 64
EACH = 2
"""Evaluations of each client, one after the other."""

_TARGET = 0.7
_PATIENCE = 60.0
_WAIT = 30


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon(sandbox="auto", more=MANY_CONNECTIONS) as ours:
        samples = interleave(
            rounds,
            {
                "ours": lambda: rush(ours),
                "xargs": lambda: figures("sandbox_xargs", CLIENTS * EACH),
            },
        )
    what = f"evaluations in the sandbox, {CLIENTS} clients, to `xargs -P2`"
    return [Row(what, "1/s", samples["ours.rate"], samples["xargs.rate"], _TARGET)]


def rush(ours: Daemon) -> Round:
    """Let all clients do what they do; return evaluations per second."""
    with Conversations(ours.port) as clients:
        begin = time.perf_counter()
        for _ in range(CLIENTS):
            clients.begin(_evaluations(ours))
        clients.finish(_PATIENCE)
        return {"rate": CLIENTS * EACH / (time.perf_counter() - begin)}


def _evaluations(ours: Daemon) -> Conversation:
    for _ in range(EACH):
        yield from read_to_the_end(identifier((yield ours.request(COMMAND))), _WAIT)
