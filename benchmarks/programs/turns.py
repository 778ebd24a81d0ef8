"""The daemon, with the longest turn of its reactor: `python turns.py SOCKET ARGUMENT...`.

The arguments are those of twistd. Whoever connects to the UNIX socket is sent a JSON object with
the most seconds of processor time that the reactor's thread has used since the last connection: in
one `turn`, without full garbage collections, and in one such `collection`.
"""

import gc
import json
import sys
import time
from typing import Any

from twisted.internet import reactor
from twisted.internet.protocol import Factory, Protocol
from twisted.scripts.twistd import run

_longest = {"turn": 0.0, "collection": 0.0}


class Longest(Protocol):
    """Says it, and no more."""

    def connectionMade(self) -> None:
        """Say it, and measure anew."""
        self.transport.write(json.dumps(_longest).encode())
        _longest.update(turn=0.0, collection=0.0)
        self.transport.loseConnection()


def measure_turns() -> None:
    """Note the processor time of each turn: timed calls, and whatever can be read or written."""
    iterate = reactor.doIteration  # type: ignore[attr-defined]
    begin = collecting = time.thread_time()

    def turn(delay: float) -> None:
        nonlocal begin
        iterate(delay)
        end = time.thread_time()
        _longest["turn"] = max(_longest["turn"], end - begin)
        begin = end

    def note_collection(phase: str, details: dict[str, Any]) -> None:
        nonlocal begin, collecting
        if details["generation"] < 2:
            return
        if phase == "start":
            collecting = time.thread_time()
        else:
            took = time.thread_time() - collecting
            _longest["collection"] = max(_longest["collection"], took)
            begin += took

    reactor.doIteration = turn  # type: ignore[attr-defined]
    gc.callbacks.append(note_collection)


def main() -> None:
    """Run twistd."""
    path = sys.argv.pop(1)
    factory = Factory.forProtocol(Longest)
    factory.noisy = False
    reactor.callWhenRunning(reactor.listenUNIX, path, factory)  # type: ignore[attr-defined]
    reactor.callWhenRunning(measure_turns)  # type: ignore[attr-defined]
    run()


if __name__ == "__main__":
    main()
