"""`python -m benchmarks.soak [--evaluators N] [--size MB] [--seconds N] [--sandbox KIND]`.

Many evaluators print numbered lines to clients of which a third are slow, a third break off
and resume at random, and a third never come back; a quarter each read by pages, JSON Lines,
server-sent events and WebSocket. What each was sent is compared with what was printed; the
daemon's peak memory is shown beside its bound; at the end nothing may be left, not even an
object. The exit status is 0 only if all of that holds.

It takes a few minutes; nobody reads for longer than `--seconds`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import attrs
import orjson

from benchmarks import machine
from benchmarks.client import Client, HTTPError
from benchmarks.daemon import PYTHON, Daemon, daemon
from benchmarks.programs import numbered
from benchmarks.readers import WAYS, Manner, Reader, WrongStreamError
from benchmarks.rows.throughput import rush
from benchmarks.streams import BrokenStreamError

_MB = 1_000_000
_TOTAL = 256 * 2**20  # bytes: the default, which is less than 100 full rings of 8 MiB
_CONFIGURATION = f"""\
[evaluations]
running = 100
retain = 10
[buffers]
total = {_TOTAL}
[http]
connections_per_address = 0
"""
_FORGETTING = 40.0  # seconds until everything is gone, of which 10 to 20 are to be expected


@attrs.frozen
class Leavings:
    """What there is of evaluations; `objects` are counted by class."""

    known: int
    processes: int
    directories: int
    descriptors: int | None
    objects: dict[str, int]

    @classmethod
    def of(cls, subject: Daemon) -> Leavings:
        """Look at a daemon; its descriptors are seen by root alone."""
        with Client(subject.port) as client:
            known = len(orjson.loads(client.get("/evaluations"))["data"])
        folders = [subject.state / name for name in ("evaluations", "uploads")]
        directories = sum(1 for folder in folders for _ in folder.glob("*"))
        counted = objects(subject)
        return cls(known, len(subject.children()), directories, at_rest(subject), counted)

    def beyond(self, before: Leavings) -> dict[str, int]:
        """Return what there is more than there was, by name."""
        found = {
            name: getattr(self, name) - getattr(before, name)
            for name in ("known", "processes", "directories")
        }
        if self.descriptors is not None and before.descriptors is not None:
            found["descriptors"] = self.descriptors - before.descriptors
        for name, count in self.objects.items():
            found[name] = count - before.objects.get(name, 0)
        return {name: count for name, count in found.items() if count > 0}


def objects(subject: Daemon) -> dict[str, int]:
    """Return how many instances of its own classes a daemon has."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(subject.socket))
        with connection.makefile("rb") as file:
            found: dict[str, int] = orjson.loads(file.read())
    return found


def at_rest(subject: Daemon) -> int | None:
    """Return the descriptors of a daemon that has nothing to do, None where nobody may look."""
    looks = []
    for _ in range(5):  # a connection that has just been closed may still be there
        try:
            looks.append(len(os.listdir(f"/proc/{subject.pid}/fd")))
        except PermissionError:
            return None
        time.sleep(0.1)
    return min(looks)


def begin(subject: Daemon, name: str, size: int, deadline: float) -> str:
    """Begin an evaluation, as soon as there is room for it; return its identifier."""
    program = Path(numbered.__file__).read_text()
    command = "exec " + shlex.join([PYTHON, "-I", "-S", "-c", program, name, str(size)])
    while True:
        try:
            with Client(subject.port) as client:  # which an early refusal closes
                return subject.evaluate(client, command)
        except HTTPError as error:
            if " 503 " not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def soak(subject: Daemon, options: argparse.Namespace) -> list[Reader | str]:
    """Let everybody read; return those who are content, and what the others say."""
    deadline = time.monotonic() + options.seconds
    size = int(options.size * _MB) // 1000 * 1000
    manners, ways = list(Manner), list(WAYS)
    under_way: list[tuple[Reader, Future[None]]] = []
    with ThreadPoolExecutor(options.evaluators) as threads:
        for number in range(options.evaluators):
            name = f"evaluator-{number}"
            identifier = begin(subject, name, size, deadline)
            manner = manners[number % len(manners)]
            way = ways[number // len(manners) % len(ways)]
            reader = Reader(subject.port, identifier, name, size, manner, way, deadline)
            under_way.append((reader, threads.submit(reader.read)))
    found: list[Reader | str] = []
    for reader, future in under_way:
        error = future.exception()
        if error is None:
            found.append(reader)
        elif isinstance(error, WrongStreamError | BrokenStreamError | OSError | HTTPError):
            found.append(f"{reader.way}, {reader.manner.value}: {type(error).__name__}: {error}")
        else:
            raise error
    return found


def settle(subject: Daemon, before: Leavings) -> dict[str, int]:
    """Return what is left that was not there before, when that is nothing, or after a time."""
    deadline = time.monotonic() + _FORGETTING
    while (left := Leavings.of(subject).beyond(before)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def tell(found: Sequence[Reader | str], seconds: float, options: argparse.Namespace) -> None:
    """Print what the readers have found."""
    planned = options.evaluators * options.size / 1000
    print(f"{options.evaluators} evaluators of {options.size:g} MB, {planned:.2f} GB to print,")
    print(f"were read in {seconds:.0f} s")
    for manner in Manner:
        content = [one for one in found if isinstance(one, Reader) and one.manner is manner]
        received = sum(reader.received for reader in content) / _MB
        breaks = sum(reader.breaks for reader in content)
        print(
            f"  {len(content)} {manner.value}: {received:,.0f} MB, as they were printed"
            + (f"; {breaks} connections broken off" if breaks else "")
        )
    gone = sum(" 410 " in one for one in found if isinstance(one, str))
    print(f"  {gone} refused because what was lost on the way was not there any more (410)")
    for complaint in found:
        if isinstance(complaint, str):
            print(f"  WRONG: {complaint[:400]}")


def main() -> int:
    """Soak it; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Soak.")
    parser.add_argument("--evaluators", type=int, default=200, help="default: 200")
    parser.add_argument("--size", type=float, default=10.0, help="MB of each; default: 10")
    parser.add_argument("--seconds", type=float, default=240.0, help="at most; default: 240")
    parser.add_argument("--sandbox", default="auto", help="`sandbox.kind`; default: auto")
    options = parser.parse_args()
    print(*machine.describe(), sep="\n", end="\n\n")
    with daemon(sandbox=options.sandbox, more=_CONFIGURATION, program="counted") as subject:
        rush(subject)  # so that what is kept for the next evaluations is there
        small, before = subject.memory("VmHWM") / _MB, Leavings.of(subject)
        started = time.monotonic()
        found = soak(subject, options)
        tell(found, time.monotonic() - started, options)
        left = settle(subject, before)
        peak, now = subject.memory("VmHWM") / _MB, subject.memory("VmRSS") / _MB
        log = subject.log.read_text(errors="replace")
    print(f"peak memory {peak:,.0f} MB, {small:,.0f} before, {now:,.0f} when all had gone;")
    print(f"buffers.total is {_TOTAL / _MB:,.0f} MB")
    print(f"LEFT: {left}" if left else "nothing is left, not an object")
    if before.descriptors is None:
        print("(but root alone can count its descriptors)")
    defects = sum(log.count(word) for word in ("Traceback", "Unhandled"))
    if defects:
        print(f"DEFECTS in the log: {defects}")
    wrong = any(isinstance(one, str) for one in found)
    return 1 if wrong or defects or left else 0


if __name__ == "__main__":
    sys.exit(main())
