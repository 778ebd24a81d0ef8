"""What one evaluation with very many processes takes from others.

An honest evaluation needs 0.1 s of processor time in one process, from `POST /evaluate` to its
first event. Another evaluation has 120 processes that spin, within all limits. Where evaluations
share the processors, by cgroups, the honest one takes about twice as long as alone.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.client import Client, get
from benchmarks.daemon import PYTHON, Daemon, daemon
from benchmarks.measure import CannotRun, Round, Row, interleave, percentile

_SPINNING = 120
_EVALUATIONS = 5
_TARGET = 3.0
_MORE = f"""\
[evaluations]
running = 8
[limits]
processes = {_SPINNING + 40}
cpu = 36000
"""
_HONEST = """
import time
while time.process_time() < 0.1:
    pass
print("done", flush=True)
"""
# Each in a session of its own, by which kernels without groups would share.
_ATTACK = f"""
import os
for _ in range({_SPINNING}):
    if os.fork() == 0:
        os.setsid()
        while True:
            pass
print("ready", flush=True)
os.wait()
"""


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows. Raises: CannotRun."""
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        raise CannotRun("evaluations share the processors by cgroups of version 2: none are here")
    with daemon(sandbox="auto", more=_MORE) as ours, Client(ours.port) as client:
        samples = interleave(
            rounds, {"alone": lambda: _look(ours, client), "beside": lambda: _beside(ours, client)}
        )
    beside = f"beside {_SPINNING} spinning processes of another"
    return [
        Row(
            f"an evaluation of 0.1 s of processor time, {beside}, to alone, median",
            "s",
            samples["beside.evaluation"],
            samples["alone.evaluation"],
            _TARGET,
            higher_is_better=False,
        ),
    ]


def _beside(ours: Daemon, client: Client) -> Round:
    with _attack(ours, client):
        return _look(ours, client)


@contextmanager
def _attack(ours: Daemon, client: Client) -> Iterator[None]:
    identifier = ours.evaluate(client, _python(_ATTACK))
    assert client.page(identifier)["data"][0]["payload"] == "ready"
    try:
        yield
    finally:
        client.exchange(get(f"/evaluation/{identifier}").replace(b"GET", b"DELETE", 1))


def _look(ours: Daemon, client: Client) -> Round:
    return {"evaluation": percentile([_evaluate(ours, client) for _ in range(_EVALUATIONS)], 50)}


def _evaluate(ours: Daemon, client: Client) -> float:
    begin = time.perf_counter()
    identifier = ours.evaluate(client, _python(_HONEST))
    page = client.page(identifier)
    end = time.perf_counter()
    assert page["data"][0]["payload"] == "done", page
    ours.consume(client, identifier)
    return end - begin


def _python(program: str) -> str:
    return shlex.join([PYTHON, "-I", "-S", "-c", program])
