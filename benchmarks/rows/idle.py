"""The daemon's own memory for each evaluation that does nothing, and each poll that waits.

Of a fresh daemon in each round, without a sandbox: `sleep` in 250 and in 1,000 evaluations, then a
poll of 250 of them and of all. What each takes is the slope between the two, so what there is once
does not count, nor what the first few make the allocator reserve. Not counted are the evaluators'
processes, and what the kernel holds for sockets and pipes.

By tracemalloc 11 KiB for each evaluation that runs are some 150 Python objects, none over 0.5 KiB.
The rest is room between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import orjson

from benchmarks.client import events
from benchmarks.conversations import Conversation, Conversations, identifier
from benchmarks.daemon import MANY_CONNECTIONS, Daemon, daemon
from benchmarks.measure import Round, Row, interleave
from benchmarks.running import Server

_FEW, _MANY = 250, 1000
_AT_ONCE = 16  # requests that begin evaluations
_TARGETS = {"evaluation": 8, "poll": 12}
_WHAT = {"evaluation": "evaluation that runs `sleep`", "poll": "poll that waits"}
_KIB = 1024
_PATIENCE = 120.0
_SETTLE = 1.0  # seconds, for what has been sent last
_WAIT = 30  # ... that a poll waits
_CONFIGURATION = f"""\
[evaluations]
running = {_MANY}
{MANY_CONNECTIONS}
"""


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    samples = interleave(rounds, {"each": _round})
    return [
        Row(
            f"memory for each {_WHAT[what]}, {_MANY:,} at once",
            "KiB",
            samples[f"each.{what}"],
            target=target,
            higher_is_better=False,
        )
        for what, target in _TARGETS.items()
    ]


def _round() -> Round:
    with daemon(more=_CONFIGURATION) as ours, Conversations(ours.port) as clients:
        known: list[str] = []
        waiting: list[str] = []

        def begin(number: int) -> None:
            numbers = iter(range(len(known), number))
            for _ in range(_AT_ONCE):
                clients.begin(_evaluations(ours, numbers, known))
            clients.finish(_PATIENCE)
            _wait_for_evaluators(ours, number)

        def poll(number: int) -> None:
            for evaluation in known[len(waiting) : number]:
                clients.begin(_polls(evaluation, waiting))
            clients.go_on(lambda: len(waiting) == number, _PATIENCE)

        return {"evaluation": _slope(ours, begin), "poll": _slope(ours, poll)}


def _slope(ours: Daemon, come_to: Callable[[int], None]) -> float:
    """Return the KiB that each more takes."""
    taken = []
    for number in (_FEW, _MANY):
        come_to(number)
        time.sleep(_SETTLE)
        taken.append(ours.memory("RssAnon"))
    return (taken[1] - taken[0]) / (_MANY - _FEW) / _KIB


def _evaluations(ours: Daemon, numbers: Iterator[int], known: list[str]) -> Conversation:
    """Begin as many as there are numbers left, of which others take, too."""
    for _ in numbers:
        answer = yield ours.request("exec sleep 600")
        known.append(identifier(answer))


def _polls(evaluation: str, waiting: list[str]) -> Conversation:
    """Wait for an event that never comes, after an answer that shows: the daemon is there."""
    beginning = orjson.loads((yield events(evaluation, wait=0)))["end"]
    waiting.append(evaluation)
    while True:
        yield events(evaluation, beginning, _WAIT)


def _wait_for_evaluators(ours: Daemon, number: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    # Those of the starter; git may clean up, too.
    while (run := max(len(Server(pid, ours.port).children()) for pid in ours.children())) < number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run} of {number} evaluators run")
        time.sleep(0.1)
