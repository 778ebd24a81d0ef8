"""Rounds in which a process that writes to a store is killed in the middle of its commits.

    python -m tests.evaluations.store_crashes PATH ROUNDS SEED

In each round a child opens the store and makes changes, which are numbered. Through a pipe it tells
each change before it is made, and the number up to which all are committed. After the kill the
store has to be as after one of its changes, none before the last that was told as committed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from twisted.internet import epollreactor

from tawebeval.deferreds import WorkerThreads
from tawebeval.evaluations.store import (
    EvaluationDetails,
    EvaluationStore,
    pack,
)

State = dict[str, int]
"""The number of the last change of each evaluation that is not deleted."""


def make_row(identifier: str, number: int) -> EvaluationDetails:
    """Return the row of a change; its bytes prove that it is whole."""
    content = sha256(b"%d" % number).digest() * (number % 300)
    return EvaluationDetails(identifier, content, number % 2**31, number)


def write(path: Path, number: int, seed: int, pipe: int) -> None:
    """Make changes until the process is killed."""
    reactor: Any = epollreactor.EPollReactor()
    chance = random.Random(seed)
    thread = WorkerThreads.create(reactor, 1, "store")
    thread.start()
    store = EvaluationStore.open(path, thread, reactor)
    store.load_live()

    def tell(kind: str, number: int, identifier: str = "-") -> None:
        os.write(pipe, f"{kind} {number} {identifier}\n".encode())

    def change() -> None:
        nonlocal number
        for _ in range(chance.randrange(1, 20)):
            number += 1
            identifier = f"e{chance.randrange(40)}"
            if chance.random() < 0.3:
                tell("delete", number, identifier)
                store.delete(identifier)
            else:
                tell("save", number, identifier)
                row = make_row(identifier, number)
                if chance.random() < 0.3:
                    added = store.add(row)
                    added.addCallback(lambda _, number=number: tell("committed", number))
                else:
                    store.save(row)
        if chance.random() < 0.3:
            store.flush().addCallback(lambda _, number=number: tell("committed", number))
        reactor.callLater(chance.random() * 0.003, change)

    reactor.callWhenRunning(change)
    reactor.run(installSignalHandlers=False)


def read_state(path: Path) -> State:
    """Return what the store has."""
    store = EvaluationStore.open(path, *[None] * 2)  # type: ignore[arg-type]
    rows = store.load_live()
    store._disconnect()
    for row in rows:
        whole = make_row(row.identifier, row.sequence_number)
        assert pack(row) == pack(whole), f"{row.identifier} is torn"
    return {row.identifier: row.sequence_number for row in rows}


def check(before: State, told: list[list[str]], after: State) -> int:
    """Check that `after` is the state after one change; return how many were lost."""
    committed = max((int(number) for kind, number, _ in told if kind == "committed"), default=0)
    changes = [each for each in told if each[0] != "committed"]
    state, is_found, left = dict(before), not committed and before == after, len(changes)
    for index, (kind, number, identifier) in enumerate(changes, 1):
        if kind == "save":
            state[identifier] = int(number)
        else:
            state.pop(identifier, None)
        if int(number) >= committed and state == after:
            is_found, left = True, min(left, len(changes) - index)
    assert is_found, f"after change {committed}: {before} {told} {after}"
    return left


def main(path: Path, rounds: int, seed: int) -> None:
    """Kill a child in each round, and check what it has left."""
    chance = random.Random(seed)
    state: State = {}
    number = committed = lost = 0
    for _ in range(rounds):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(reading)
                write(path, number, chance.randrange(2**32), writing)
            finally:
                os._exit(1)
        os.close(writing)
        with open(reading, "rb") as pipe:
            first = pipe.readline()
            time.sleep(chance.random() * 0.05)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), "the child has ended by itself"
            *lines, _ = (first + pipe.read()).decode().split("\n")
        told = [line.split() for line in lines]
        after = read_state(path)
        lost += check(state, told, after)
        committed += sum(kind == "committed" for kind, *_ in told)
        number = max((int(each[1]) for each in told), default=number)
        state = after
    print(f"{number} changes, {committed} told as committed, {lost} others lost")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
