"""The longest turn of the daemon's reactor with 200 streams of each kind, by processor time.

All streams follow one evaluation, of one caller. They connect at once; then the evaluator prints
2,000 lines of 100 bytes a second. Other requests wait for the end of a turn. What other programs
take of the processors is not counted. A full garbage collection of Python is measured by itself:
it looks at each object of each stream.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from benchmarks.client import Client
from benchmarks.daemon import MANY_CONNECTIONS, PYTHON, USUAL, Daemon, daemon
from benchmarks.measure import Round, Row, interleave
from benchmarks.streams import BrokenStreamError, Lines, Messages, ServerSent, Way

STREAMS = 200
_WAYS: Sequence[Callable[[], Way]] = (ServerSent, Lines, Messages)
_TARGET = 20.0  # ms
_TIMEOUT = 60.0
_CONNECTED = 3.0  # seconds, from the last request on
_EVALUATOR = """\
import time
for number in range(100):
    print(*[f"{number:<99}"] * 100, sep=chr(10), flush=True)
    time.sleep(.05)
"""


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    samples = interleave(rounds, {"turn": _round})
    what = f"longest turn of the reactor, {STREAMS} streams of each kind"
    return [
        *(
            Row(f"{what}, {state}", "ms", samples[f"turn.{state}"], None, _TARGET, False)
            for state in ("connecting", "open")
        ),
        Row("… and full garbage collection", "ms", samples["turn.collection"], None, None, False),
    ]


def _round() -> Round:
    with daemon(more=USUAL + MANY_CONNECTIONS, program="turns") as ours, ExitStack() as stack:
        go = ours.state.parent / "go"
        wait = f"while [ ! -e {go} ]; do sleep 0.1; done"
        with Client(ours.port) as client:
            identifier = ours.evaluate(client, f"{wait}; exec {PYTHON} -c '{_EVALUATOR}'")
        _read_longest(ours)
        poll = stack.enter_context(selectors.DefaultSelector())
        for number in range(STREAMS * len(_WAYS)):
            way = _WAYS[number % len(_WAYS)]()
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", ours.port)))
            connection.sendall(way.request(f"/evaluation/{identifier}/events", 0))
            poll.register(connection, selectors.EVENT_READ, way)
        time.sleep(_CONNECTED)
        connecting = _read_longest(ours)
        go.touch()
        _read_all(poll)
        streaming = _read_longest(ours)
        return {
            "connecting": connecting["turn"],
            "open": streaming["turn"],
            "collection": max(connecting["collection"], streaming["collection"]),
        }


def _read_all(poll: selectors.BaseSelector) -> None:
    """Read all streams to their end. Raises BrokenStreamError."""
    heads: set[object] = set()
    while poll.get_map():
        ready = poll.select(_TIMEOUT)
        if not ready:
            raise TimeoutError("the streams do not end")
        for key, _ in ready:
            connection, way = key.fileobj, key.data
            assert isinstance(connection, socket.socket)
            received = connection.recv(256 * 1024)
            if connection not in heads:
                heads.add(connection)
                head, _, received = received.partition(b"\r\n\r\n")
                if head[9:12] not in (b"101", b"200"):
                    raise BrokenStreamError(head.decode("utf-8", "replace"))
            elif not received:
                raise BrokenStreamError("broken off by the daemon")
            way.feed(received)
            if way.ended:
                poll.unregister(connection)


def _read_longest(ours: Daemon) -> Mapping[str, float]:
    """Return the longest turn and collection since the last call, in milliseconds."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT)
        connection.connect(str(ours.socket))
        found = json.loads(connection.recv(1000))
    return {name: seconds * 1000 for name, seconds in found.items()}
