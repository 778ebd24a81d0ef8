"""How soon a daemon serves the evaluations that outlive the daemon before it.

After SIGKILL a daemon takes over evaluations that sleep; time runs from its start to the first page
of the last of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from benchmarks.client import Client
from benchmarks.conversations import Conversation, Conversations, identifier
from benchmarks.daemon import MANY_CONNECTIONS, Daemon, daemon
from benchmarks.measure import Round, Row, interleave

_RUNNING = 500
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
    samples = interleave(rounds, {"restart": _restart})
    return [
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
