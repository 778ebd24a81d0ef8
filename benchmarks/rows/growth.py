"""What 10,000 ended evaluations cost that nobody has read, beside 1,000.

Memory is the slope between the two, so it tells what each takes. A start is `POST /evaluate` to the
first event of one more evaluation, without a sandbox, which would only add the same time to both. A
list is the first page of all evaluations.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.client import Client, events
from benchmarks.conversations import Conversation, Conversations, identifier
from benchmarks.daemon import COMMAND, MANY_CONNECTIONS, Daemon, daemon
from benchmarks.measure import Round, Row, interleave, percentile
from benchmarks.rows.start import WHAT, evaluate, in_turn

_FEW, _MANY = 1000, 10_000
_TARGET = 1.1
_MEMORY_TARGET = 16.0  # KiB
_AT_ONCE = 16  # clients
_LISTS = 50  # in each round
_PATIENCE = 600.0
_SETTLE = 1.0  # seconds, for what has been sent last
_CONFIGURATION = f"""\
[evaluations]
kept = {_MANY + 100}
retain = 7200
running = 8
{MANY_CONNECTIONS}
"""


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon(more=_CONFIGURATION) as ours:
        taken, samples, kept = [], [], 0
        for count in (_FEW, _MANY):
            _keep(ours, count - kept)
            kept = count
            time.sleep(_SETTLE)
            taken.append(ours.memory("RssAnon"))
            with Client(ours.port) as client:
                ways = {
                    "start": partial(in_turn, {"ours": partial(evaluate, ours, client)}),
                    "list": partial(_list, client),
                }
                samples.append(interleave(rounds, ways))
    few, many = samples
    what = f"{_MANY:,} evaluations kept, to {_FEW:,}"
    return [
        Row(
            f"memory for each of {_MANY:,} evaluations kept",
            "KiB",
            [(taken[1] - taken[0]) / (_MANY - _FEW) / 1024],
            target=_MEMORY_TARGET,
            higher_is_better=False,
        ),
        *(
            Row(name, "ms", many[key], few[key], _TARGET, higher_is_better=False)
            for name, key in (
                (f"{WHAT}, no sandbox, {what}, p50", "start.ours"),
                (f"a page of the list, {what}, p50", "list.p50"),
            )
        ),
    ]


def _keep(ours: Daemon, count: int) -> None:
    """Let so many evaluations end; none is read further than its first event."""
    numbers = iter(range(count))
    with Conversations(ours.port) as clients:
        for _ in range(_AT_ONCE):
            clients.begin(_evaluations(ours, numbers))
        clients.finish(_PATIENCE)


def _evaluations(ours: Daemon, numbers: Iterator[int]) -> Conversation:
    """Begin as many as there are numbers left, of which others take, too."""
    for _ in numbers:
        yield events(identifier((yield ours.request(COMMAND))))


def _list(client: Client) -> Round:
    times = []
    for _ in range(_LISTS):
        begin = time.perf_counter()
        client.get("/evaluations")
        times.append((time.perf_counter() - begin) * 1e3)
    return {"p50": percentile(times, 50)}
