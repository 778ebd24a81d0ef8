"""A writer whose readers are killed, one after the other: `python -m tests.cases.restarts SEED`.

This process holds the descriptors, as the keeper does. Each reader is a fork of it with a reactor
of its own, and a `KeeperOwnedProcess` on the same descriptors. It records in a file what it was
delivered, and from where the next one is to go on; up to there it discards the output. Two of three
readers are killed by SIGKILL at a random moment, and of the others the reactor is stopped. The last
one reads to the end.

What all have recorded is compared with what was printed; the figures are printed as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from typing import Any

from tawebeval.linux.keeper_owned_process import KeeperOwnedDescriptors, KeeperOwnedProcess

# Before the forks, but not the reactor, which each of them installs.
from twisted.internet import epollreactor
from twisted.internet.defer import succeed
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

_KILLS = 30
_LONGEST = 0.06  # seconds that a reader lives
_LAG = 200_000  # bytes that the next reader is given again at most
_HEAD = struct.Struct("=cQQ")  # what is recorded, the offset, and the length
_LINE = 16

_WRITER = """
import os, random, select, sys, time
chance = random.Random(int(sys.argv[1]))
printed = 0
rest = b""
number = 0
while not select.select([0], [], [], 0)[0]:
    while len(rest) < 300_000:
        rest += b"".join(b"%015d\\n" % i for i in range(number, number + 10_000))
        number += 10_000
    size = chance.choice([1, 100, 4096, 65536, chance.randrange(1, 300_000)])
    while size:
        written = os.write(1, rest[:size])
        rest = rest[written:]
        printed += written
        size -= written
    if chance.random() < 0.1:
        time.sleep(chance.random() * 0.005)
os.write(2, b"%d" % printed)
"""


def printed(begin: int, end: int) -> bytes:
    """Return what the writer prints between two offsets."""
    first = begin // _LINE
    text = b"".join(b"%015d\n" % number for number in range(first, end // _LINE + 1))
    return text[begin - first * _LINE : end - first * _LINE]


class Reader(ProcessProtocol):
    """Records what is delivered, and ends at a random moment, unless it is the last one."""

    process: KeeperOwnedProcess

    def __init__(self, reactor: Any, records: int, begin: int, chance: random.Random) -> None:
        self._reactor = reactor
        self._begin = begin
        self._records = records
        self._chance = chance

    def makeConnection(self, transport: Any) -> None:
        self.process = transport
        super().makeConnection(transport)

    def outReceived(self, data: bytes) -> None:
        """Record the chunk, then where to go on, and discard what is before that."""
        end = self.process.delivered_bytes
        os.write(self._records, _HEAD.pack(b"o", end - len(data), len(data)) + data)
        self._begin = max(end - self._chance.randrange(_LAG), self._begin)
        os.write(self._records, _HEAD.pack(b"c", self._begin, 0))
        self.process.release_output_memory(self._begin)
        if self._chance.random() < 0.2:
            self.process.pauseProducing()
            self._reactor.callLater(self._chance.random() * 0.002, self.process.resumeProducing)

    def errReceived(self, data: bytes) -> None:
        """Record what the writer says at its end."""
        os.write(self._records, _HEAD.pack(b"e", 0, len(data)) + data)

    def childConnectionLost(self, childFD: int) -> None:
        """Record an end."""
        os.write(self._records, _HEAD.pack(b"l", childFD, 0))

    def processEnded(self, reason: Failure) -> None:
        """End."""
        self._reactor.stop()


def read(
    run: KeeperOwnedDescriptors, records: int, chance: random.Random, seconds: float | None
) -> None:
    """Read in a process of its own, to the end or until its reactor is stopped."""
    epollreactor.install()
    from twisted.internet import reactor as installed

    reactor: Any = installed
    reader = Reader(reactor, records, run.stdout_offset, chance)
    KeeperOwnedProcess(reactor, reader, run, lambda: succeed((0, None)))
    if seconds is not None:
        reactor.callLater(seconds, reactor.stop)
    reactor.run(installSignalHandlers=False)


class Restarts:
    """What the readers have recorded, checked."""

    def __init__(self) -> None:
        self.begin = 0  # where the next reader goes on
        self.read_up_to = 0
        self.delivered = 0  # bytes, repeated ones included
        self.chunks = 0
        self.ends: list[int] = []

    def check(self, records: bytes) -> bytes:
        """Check one reader's records, of which the last may be cut off; return its stderr."""
        at, end, stderr = 0, self.begin, b""
        while at + _HEAD.size <= len(records):
            kind, offset, size = _HEAD.unpack_from(records, at)
            data = records[at + _HEAD.size : at + _HEAD.size + size]
            at += _HEAD.size + size
            if len(data) < size:
                break
            if kind == b"o":
                assert offset == end, f"{offset} follows {end}"
                end += size
                assert data == printed(offset, end), f"wrong bytes from {offset} to {end}"
                self.delivered += size
                self.chunks += 1
            elif kind == b"c":
                assert offset <= end
                self.begin = offset
            elif kind == b"e":
                stderr += data
            else:
                self.ends.append(offset)
        self.read_up_to = max(self.read_up_to, end)
        return stderr


def main() -> None:
    """Let readers follow one another, and check."""
    seed = int(sys.argv[1])
    chance = random.Random(seed)
    writer = subprocess.Popen(
        [sys.executable, "-IS", "-c", _WRITER, str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert writer.stdin is not None and writer.stdout is not None and writer.stderr is not None
    pipes = writer.stdout.fileno(), writer.stderr.fileno()
    for pipe in pipes:
        os.set_blocking(pipe, False)
    pidfd = os.pidfd_open(writer.pid)
    memfds = os.memfd_create("output"), os.memfd_create("errors")
    checked = Restarts()
    most, stderr = 0, b""
    for number in range(_KILLS + 1):
        is_last = number == _KILLS
        if is_last:
            writer.stdin.close()
        records = os.memfd_create("records")
        seconds = chance.random() * _LONGEST
        is_killed = not is_last and number % 3 != 0
        reader = os.fork()
        if not reader:
            run = KeeperOwnedDescriptors(writer.pid, pidfd, *pipes, *memfds, checked.begin)
            read(run, records, chance, None if is_killed or is_last else seconds)
            os._exit(0)
        if is_killed:
            time.sleep(seconds)
            os.kill(reader, signal.SIGKILL)
        status = os.waitpid(reader, 0)[1]
        assert status == (signal.SIGKILL if is_killed else 0), f"a reader's status: {status}"
        stderr = checked.check(os.pread(records, os.fstat(records).st_size, 0))
        os.close(records)
        assert is_last or not checked.ends, "an end before the end"
        most = max(most, os.fstat(memfds[0]).st_blocks * 512)
    writer.wait()
    assert sorted(checked.ends) == [1, 2], checked.ends
    assert checked.read_up_to == int(stderr), f"{checked.read_up_to} of {stderr!r}"
    figures = {
        "printed": checked.read_up_to,
        "delivered": checked.delivered,
        "chunks": checked.chunks,
        "memory": most,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
