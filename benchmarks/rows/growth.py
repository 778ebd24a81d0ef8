"""What 10,000 ended evaluations cost, beside 1,000: kept, which nobody has read, and archived.

Memory is the slope between the two, so it tells what each takes; and so does the processor time of
a start of the daemon with all of them, beside a start with none. A start of an evaluation is `POST
/evaluate` to the first event of one more, without a sandbox, which would only add the same time to
both. A list is the first page of all evaluations.

Of 10,000 to be archived some 9,000 still waited: 55 ended a second, and 20 were archived. A list
encoded all that waited, which took 58 ms. Since then the archive takes four at once, and a list
encodes only what it shows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import orjson

from benchmarks.client import Client, events
from benchmarks.conversations import Conversation, Conversations, identifier, read_to_the_end
from benchmarks.daemon import COMMAND, MANY_CONNECTIONS, Daemon, daemon
from benchmarks.measure import Round, Row, interleave, percentile
from benchmarks.rows.lasting import measure_restart
from benchmarks.rows.start import WHAT, evaluate, in_turn

_FEW, _MANY = 1000, 10_000
_TARGET = 1.1
_MEMORY_TARGET = 16.0  # KiB
_AT_ONCE = 16  # clients
_LISTS = 50  # in each round
_PATIENCE = 600.0
_SETTLE = 1.0  # seconds, for what has been sent last
_WAIT = 30  # ... that a poll waits
_CONFIGURATION = f"""\
[evaluations]
kept = {_MANY + 100}
retain = 7200
running = 8
{MANY_CONNECTIONS}
[archive]
enabled = """


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    return [row for archived in (False, True) for row in _measure(rounds, archived)]


def _measure(rounds: int, archived: bool) -> Iterator[Row]:
    which = "archived" if archived else "kept"
    more = f"{_CONFIGURATION}{str(archived).lower()}\n"
    with daemon(more=more) as ours:
        empty = measure_restart(ours)["time"]
    with daemon(more=more) as ours:
        taken, samples, done = [], [], 0
        for count in (_FEW, _MANY):
            _evaluate_many(ours, count - done, archived)
            done = count
            time.sleep(_SETTLE)
            taken.append(ours.memory("RssAnon"))
            with Client(ours.port) as client:
                assert _count_listed(client) >= count
                ways = {
                    "start": partial(in_turn, {"ours": partial(evaluate, ours, client)}),
                    "list": partial(_list, client),
                }
                samples.append(interleave(rounds, ways))
        full = [measure_restart(ours)["time"] for _ in range(rounds)]
    few, many = samples
    what = f"{_MANY:,} evaluations {which}"
    slopes = (
        (f"memory for each of {what}", "KiB", [(taken[1] - taken[0]) / (_MANY - _FEW) / 1024]),
        (
            f"processor time of the daemon's start for each of {what}",
            *("ms", [(seconds - empty) * 1e3 / _MANY for seconds in full]),
        ),
    )
    for (name, unit, each), target in zip(slopes, (_MEMORY_TARGET, None), strict=True):
        yield Row(name, unit, each, target=target, higher_is_better=False)
    for name, key in (
        (f"{WHAT}, no sandbox, {what}, to {_FEW:,}, p50", "start.ours"),
        (f"a page of the list, {what}, to {_FEW:,}, p50", "list.p50"),
    ):
        yield Row(name, "ms", many[key], few[key], _TARGET, higher_is_better=False)


def _evaluate_many(ours: Daemon, count: int, archived: bool) -> None:
    """Let so many evaluations end; read all of each for the archive, and else its first event."""
    numbers = iter(range(count))
    with Conversations(ours.port) as clients:
        for _ in range(_AT_ONCE):
            clients.begin(_evaluations(ours, numbers, archived))
        clients.finish(_PATIENCE)


def _evaluations(ours: Daemon, numbers: Iterator[int], archived: bool) -> Conversation:
    """Begin as many as there are numbers left, of which others take, too."""
    for _ in numbers:
        evaluation = identifier((yield ours.request(COMMAND)))
        if archived:
            yield from read_to_the_end(evaluation, _WAIT)
        else:
            yield events(evaluation)


def _count_listed(client: Client) -> int:
    """Return how many evaluations the list has."""
    count, end = 0, ""
    while end is not None:
        page = orjson.loads(client.get(f"/evaluations?after={end}" if end else "/evaluations"))
        count, end = count + len(page["data"]), page["end"]
    return count


def _list(client: Client) -> Round:
    times = []
    for _ in range(_LISTS):
        begin = time.perf_counter()
        client.get("/evaluations")
        times.append((time.perf_counter() - begin) * 1e3)
    return {"p50": percentile(times, 50)}
