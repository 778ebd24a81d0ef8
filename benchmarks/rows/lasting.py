"""What it costs that evaluations outlive the daemon, and how soon it serves them again.

The same daemon, in the sandbox, with a starter and without one: stdout to an HTTP client, page by
page, and starts in turn. After SIGKILL a daemon takes over evaluations that sleep; time runs from
its start to the first page of the last of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.client import Client
from benchmarks.conversations import Conversation, Conversations, identifier
from benchmarks.daemon import MANY_CONNECTIONS, Daemon, daemon
from benchmarks.measure import Round, Row, interleave
from benchmarks.rows.delivery import SETTINGS, command, deliver_lines, read_pages
from benchmarks.rows.start import WHAT, evaluate, in_turn

_RUNNING = 500
_VALUES = 200_000
_PRINTING = command("values", _VALUES)
_SMALLEST = len('{"type":"data","payload":{}},')
_TARGET = 0.8
_ADDED = 0.5  # ms
_RESTART = 2.0  # s
_AT_ONCE = 16  # requests that begin evaluations
_PATIENCE = 300.0
_SETTLE = 0.5  # seconds, for what the daemon does after its start
_READY = "ready"
_MANY = f"""\
[evaluations]
running = {_RUNNING}
{MANY_CONNECTIONS}
"""


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon("auto", SETTINGS, lasting=True) as lasting, daemon("auto", SETTINGS) as plain:
        samples = interleave(
            rounds,
            {
                "lines.lasting": partial(deliver_lines, lasting),
                "lines.plain": partial(deliver_lines, plain),
                "values.lasting": partial(_deliver_values, lasting),
                "values.plain": partial(_deliver_values, plain),
                "start": partial(_start, lasting, plain),
            },
        )
    samples |= interleave(rounds, {"restart": _restart})
    rows = []
    for what, unit, name in (
        ("100-byte lines", "MB/s", "lines"),
        ("data values", "1/s", "values"),
    ):
        ours, others = f"{name}.lasting", f"{name}.plain"
        rows += [
            Row(
                f"stdout to an HTTP client, {what}, with a starter, to without",
                unit,
                samples[f"{ours}.rate"],
                samples[f"{others}.rate"],
                _TARGET,
            ),
            Row(
                "… by processor time",
                unit,
                samples[f"{ours}.processor_rate"],
                samples[f"{others}.processor_rate"],
            ),
        ]
    starts = zip(samples["start.lasting"], samples["start.plain"], strict=True)
    return [
        *rows,
        Row(
            f"{WHAT}, with a starter, to without, p50",
            "ms",
            samples["start.lasting"],
            samples["start.plain"],
            higher_is_better=False,
        ),
        Row(
            "… difference",
            "ms",
            [ours - other for ours, other in starts],
            target=_ADDED,
            higher_is_better=False,
        ),
        Row(
            f"`kill -9` with {_RUNNING} evaluations that sleep, from the start to a page",
            "s",
            samples["restart.page"],
            target=_RESTART,
            higher_is_better=False,
        ),
        Row(
            "… the same without evaluations",
            "s",
            samples["restart.empty"],
            higher_is_better=False,
        ),
    ]


def _start(lasting: Daemon, plain: Daemon) -> Round:
    with Client(lasting.port) as one, Client(plain.port) as other:
        return in_turn(
            {
                "lasting": partial(evaluate, lasting, one),
                "plain": partial(evaluate, plain, other),
            }
        )


def _deliver_values(ours: Daemon) -> Round:
    measured, received = read_pages(ours, _PRINTING, _VALUES)
    assert received >= _VALUES * _SMALLEST, "values were lost"
    return measured


def _restart() -> Round:
    with daemon("auto", _MANY, lasting=True) as ours:
        empty = time_restart(ours, "/health")
        known: list[str] = []
        with Conversations(ours.port) as clients:
            numbers = iter(range(_RUNNING))
            for _ in range(_AT_ONCE):
                clients.begin(_evaluations(ours, numbers, known))
            clients.finish(_PATIENCE)
        with Client(ours.port) as client:
            for evaluation in known:
                assert client.page(evaluation)["data"][0]["payload"] == _READY
        page = time_restart(ours, f"/evaluation/{known[-1]}/events?wait=0")
        return {"empty": empty, "page": page}


def _evaluations(ours: Daemon, numbers: Iterator[int], known: list[str]) -> Conversation:
    """Begin as many as there are numbers left, of which others take, too."""
    for _ in numbers:
        answer = yield ours.request(f"echo {_READY}; exec sleep 3600")
        known.append(identifier(answer))


def measure_restart(ours: Daemon) -> Round:
    """Start the daemon again; return its seconds of processor time, and its MiB of memory then.

    The time is that until its first answer.
    """
    time_restart(ours, "/health")
    seconds = ours.processor_time()
    time.sleep(_SETTLE)
    return {"time": seconds, "memory": ours.memory("RssAnon") / 2**20}


def time_restart(ours: Daemon, path: str) -> float:
    """Return the seconds from the start of a new daemon to its answer."""
    ours.kill_and_start()
    begin = time.perf_counter()
    while time.perf_counter() - begin < _PATIENCE:
        try:
            with Client(ours.port) as client:
                client.get(path)
                return time.perf_counter() - begin
        except OSError:
            time.sleep(0.005)
    raise TimeoutError("the daemon does not serve after a restart")
