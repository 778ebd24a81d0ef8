"""Many evaluations at once, each followed by a client of its own and checked exactly."""

from __future__ import annotations

import atexit
import os
import random
import shutil
from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from tests.integration.client import joined
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until
from tests.integration.raw import Connection
from tests.integration.unprivileged import temporary_folder

EVALUATIONS = 120

EVALUATOR = """
key=$(cat "$SUBMISSION_FILE_KEY")
: < "$GATE"
i=0
while [ $i -lt 30 ]; do
    echo "line $i of $key"
    printf 'partial '
    [ $((i % 10)) -ne 5 ] || sleep 0.05
    printf '\\n%s\\n{"key": "%s", "i": %d}\\n%s\\n' \\
        "$EVALUATION_DATA_BEGIN" "$key" $i "$EVALUATION_DATA_END"
    i=$((i + 1))
done
printf 'end of %s' "$key"
"""


def expected(key: str) -> list[Any]:
    """Return what the evaluator says, with text put together."""
    found: list[Any] = []
    for i in range(30):
        found += [f"line {i} of {key}\npartial ", [{"key": key, "i": i}]]
    return [*found, f"end of {key}"]


class LoadTests(DaemonTestCase):
    """All of them run at the same time."""

    # Where evaluators wait for one another: the sandbox shows it to them.
    gates = temporary_folder("tawebeval-gates-")
    atexit.register(shutil.rmtree, gates)
    configuration = (
        CONFIGURATION.replace("running = 4", f"running = {EVALUATIONS}")
        + f'[sandbox]\nreadable = ["{gates}"]\n'
    )

    async def read(self, identifier: str, dice: random.Random) -> list[Any]:
        """Follow an evaluation, with requests repeated and connections dropped at random."""
        events: list[Any] = []
        cursor: str | None = None
        while True:
            page = await self.client.page(identifier, cursor, wait=5)
            if dice.random() < 0.2:
                again = await self.client.page(identifier, cursor)
                count = len(page["data"])
                self.assertEqual(again["data"][:count], page["data"])
                page = again
            if dice.random() < 0.1:
                with Connection(self.daemon.port) as dropped:
                    query = f"?after={cursor}&wait=5" if cursor else ""
                    line = f"GET /evaluation/{identifier}/events{query} HTTP/1.1"
                    dropped.send(f"{line}\r\nHost: localhost\r\n\r\n".encode())
            events += page["data"]
            cursor = page["end"]
            if cursor is None:
                return events

    async def test_many_evaluations_at_once_are_told_apart(self) -> None:
        """Each of 120 streams has its own events, all of them, in order, and nothing else."""
        gate = self.gates / "gate"
        os.mkfifo(gate)
        self.repository.write("evaluator.sh", EVALUATOR)
        self.commit = self.repository.commit()
        keys = {}
        for number in range(EVALUATIONS):
            key = f"{number}-{random.Random(number).getrandbits(40):x}"
            identifier = await self.client.evaluate(
                self.repository.url,
                self.commit,
                f"GATE={gate} exec sh evaluator.sh",
                files=[("key", "key.txt", key.encode())],
            )
            keys[identifier] = key
        self.assertEqual(len(keys), EVALUATIONS)
        readers = [
            Deferred.fromCoroutine(self.read(identifier, random.Random(key)))
            for identifier, key in keys.items()
        ]
        states: list[str] = []
        while states.count("running") < EVALUATIONS:
            states = [(await self.client.status(identifier))["state"] for identifier in keys]
        self.assertEqual([reader.called for reader in readers].count(True), 0)
        with open(os.open(gate, os.O_RDWR), "wb"):  # what waits for a writer goes on
            for stream, key in zip(await gatherResults(readers), keys.values(), strict=True):
                self.assertEqual(joined(stream), expected(key))
        await until(lambda: self.daemon.leftovers() == [], "nothing is left")
