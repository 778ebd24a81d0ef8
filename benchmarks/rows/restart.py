"""What a restart under load loses: `systemctl restart` of the installed service, systemd booted.

The machine is one of its own, as in the tests: the service as `make install` installs it, with its
socket. Clients of all kinds are there before, during and after the restart: some poll without a
pause or now and then on connections that they keep, some wait for events, some upload slowly, and
new ones come all the time. Evaluators go on meanwhile, and everybody should only have to
wait. What counts as lost is a connection that is refused or reset, and a request on a connection
that is closed without an answer: any status is an answer.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import orjson

from benchmarks import repositories
from benchmarks.booted import PORT, Machine, installed, missing
from benchmarks.client import evaluate, events, get
from benchmarks.measure import CannotRun, Round, Row, interleave
from benchmarks.visitors import LOST, Conversation, Slowly, Visitors

_SERVICE = "tawebeval.service"
_AROUND = 1.0  # seconds of load before a restart and after it
_PATIENCE = 60.0
_WAIT = 30
_RUNNING = 16
_IDLE_FOR = 5.0  # seconds, on average
_ARRIVALS = 100  # new connections in a second
_HEALTH = "/health"
_PROBLEM = "/srv/problem"
_CONFIGURATION = f"""\
[repositories]
protocols = ["file"]
[evaluations]
running = {_RUNNING}
[http]
connections_per_address = 0
[service]
drain = 1
"""
# Without tokens, as the other benchmarks; there is nobody else on that machine.
_DROP_IN = "[Service]\nLoadCredential=\n"

_POLLS, _IDLE = "polls that follow each other", "requests on connections that idle"
_WAITING, _UPLOADS, _NEW = "polls that wait", "uploads", "new connections"
_KINDS = {_POLLS: 16, _IDLE: 64, _WAITING: _RUNNING, _UPLOADS: 8}
_EVERYBODY = (*_KINDS, _NEW)


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with _machine() as machine:
        load = _Load(machine)
        try:
            samples = interleave(rounds, {"restart": load.restart})
        finally:
            load.end()
    # One that loses something is not made good by others that do not, so what counts is the sum.
    together = {name: [sum(values)] for name, values in samples.items()}
    lost = {kind: together[f"restart.{kind}"] for kind in _EVERYBODY}
    total = [sum(sum(counts) for counts in lost.values())]
    return [
        Row(f"{rounds} restarts under load, lost requests", "", total, None, 0.0, False),
        *(Row(f"… {kind}", "", counts) for kind, counts in lost.items() if any(counts)),
        Row("each: longest time to connect and be answered", "s", samples["restart.longest"]),
        Row("… `systemctl restart` takes", "s", samples["restart.took"]),
    ]


@contextmanager
def _machine() -> Iterator[Machine]:
    lacking = missing()
    if lacking:
        raise CannotRun(lacking)
    machine = installed()
    try:
        yield machine
    finally:
        machine.stop()
        installed.cache_clear()


class _Load:
    """All who come, on a machine on which the service runs."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._random = Random(1)
        with TemporaryDirectory(prefix="tawebeval-benchmark-") as folder:
            made = Path(folder, "problem")
            (commit,) = repositories.make(made, [repositories.tree(1)])
            machine.copy(made, _PROBLEM)
        machine.write("/etc/tawebeval/tawebeval.toml", _CONFIGURATION)
        machine.write(f"/run/systemd/system/{_SERVICE}.d/benchmark.conf", _DROP_IN)
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "start", _SERVICE)
        self._form = evaluate(f"file://{_PROBLEM}", commit, "echo ready; exec sleep 60")
        self._visitors = Visitors(self._connect)
        conversations: dict[str, Callable[[], Conversation]] = {
            _POLLS: lambda: _ask_after(lambda: 0.02),
            _IDLE: lambda: _ask_after(lambda: self._random.uniform(0, 2 * _IDLE_FOR)),
            _WAITING: self._follow,
            _UPLOADS: self._upload,
        }
        for kind, number in _KINDS.items():
            for one in range(number):
                # Not all at once, or they would stay together.
                begin = lambda kind=kind: self._visitors.begin(kind, conversations[kind]())  # noqa: E731
                self._visitors.later(one / number * 2, begin)
        self._arrive()
        self._pass(3 * _AROUND)

    def restart(self) -> Round:
        """Restart the service, with load before, meanwhile and after it."""
        self._pass(_AROUND)
        self._visitors.fates.clear()
        self._visitors.longest.clear()
        begin = time.monotonic()
        with self._machine.begin("systemctl", "restart", _SERVICE) as restarting:
            self._visitors.go_on(lambda: restarting.poll() is not None, _PATIENCE)
        assert restarting.returncode == 0, self._machine.journal()
        took = time.monotonic() - begin
        self._pass(_AROUND)
        fates, longest = self._visitors.fates, self._visitors.longest
        return {
            "took": took,
            "longest": longest[_NEW],
            **{kind: sum(fates[kind, fate] for fate in LOST) for kind in _EVERYBODY},
        }

    def end(self) -> None:
        """Have nobody there any more."""
        self._visitors.close()

    def _pass(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._visitors.go_on(lambda: time.monotonic() >= end, 2 * seconds + _PATIENCE)

    def _connect(self) -> socket.socket:
        with self._machine.network():
            connection = socket.create_connection(("127.0.0.1", PORT), _PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _arrive(self) -> None:
        self._visitors.begin(_NEW, _ask_once())
        self._visitors.later(1 / _ARRIVALS, self._arrive)

    def _follow(self) -> Conversation:
        """Begin evaluations, one after the other, and wait for their events."""
        while True:
            answer = yield self._form
            assert answer is not None
            if answer.status != 200:
                yield 0.2
                continue
            evaluation, after = orjson.loads(answer.body)["evaluation_id"], None
            while True:
                answer = yield events(evaluation, after, _WAIT)
                assert answer is not None
                after = orjson.loads(answer.body).get("end")
                if answer.status != 200 or after is None:
                    break

    def _upload(self) -> Conversation:
        """Send forms in pieces, and cancel what they begin."""
        size = len(self._form) // 10 + 1
        pieces = [self._form[at : at + size] for at in range(0, len(self._form), size)]
        while True:
            answer = yield Slowly(pieces, 0.1)
            assert answer is not None
            if answer.status == 200:
                identifier = orjson.loads(answer.body)["evaluation_id"]
                yield get(f"/evaluation/{identifier}").replace(b"GET", b"DELETE", 1)
            yield 0.1


def _ask_once() -> Conversation:
    yield get(_HEALTH)


def _ask_after(pause: Callable[[], float]) -> Conversation:
    while True:
        yield get(_HEALTH)
        yield pause()
