"""What 10,000 ended evaluations cost, beside 1,000: kept, which nobody has read, and archived.

Two daemons have them, and are measured in turn. Memory and the processor time of a start of the
daemon are slopes between the two. A start of an evaluation is `POST /evaluate` to the first event
of one more, without a sandbox, which would only add the same time to both. A list is the first page
of all evaluations.

Of 10,000 to be archived some 9,000 still waited: 55 ended a second, and 20 were archived. A list
encoded all that waited, which took 58 ms. Since then the archive takes four at once, and a list
encodes only what it shows. A ratio of 1.31 of a start with 10,000 archived was the ruler's: it
measured 1,000 minutes before 10,000, in one daemon.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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
    with daemon(more=more) as few, daemon(more=more) as many, ExitStack() as stack:
        daemons = {"few": few, "many": many}
        counts = {"few": _FEW, "many": _MANY}
        for way, count in counts.items():
            _evaluate_many(daemons[way], count, archived)
        clients = {way: stack.enter_context(Client(each.port)) for way, each in daemons.items()}
        assert all(_count_listed(clients[way]) >= count for way, count in counts.items())
        time.sleep(_SETTLE)
        memory = (many.memory("RssAnon") - few.memory("RssAnon")) / 1024
        starts = {way: partial(evaluate, each, clients[way]) for way, each in daemons.items()}
        ways = {"start": partial(in_turn, starts)}
        ways |= {way: partial(_list, client) for way, client in clients.items()}
        samples = interleave(rounds, ways)
        restarts = {way: partial(measure_restart, each) for way, each in daemons.items()}
        samples |= interleave(rounds, restarts)
    what = f"{_MANY:,} evaluations {which}"
    times = zip(samples["many.time"], samples["few.time"], strict=True)
    slopes = (
        (f"memory for each of {what}", "KiB", [memory / (_MANY - _FEW)]),
        (
            f"processor time of the daemon's start for each of {what}",
            *("ms", [(more - less) * 1e3 / (_MANY - _FEW) for more, less in times]),
        ),
    )
    for (name, unit, each), target in zip(slopes, (_MEMORY_TARGET, None), strict=True):
        yield Row(name, unit, each, target=target, higher_is_better=False)
    for name, key in (
        (f"{WHAT}, no sandbox, {what}, to {_FEW:,}, p50", "start.{}"),
        (f"a page of the list, {what}, to {_FEW:,}, p50", "{}.p50"),
    ):
        ours, other = (samples[key.format(way)] for way in ("many", "few"))
        yield Row(name, "ms", ours, other, _TARGET, higher_is_better=False)


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
