"""Streams that are cut once, at any speed: the client resumes, and has every event exactly once.

Nothing is set: neither the daemon's buffers nor those of the kernel, which hold megabytes of what a
client has not read yet that was quick before.
"""

from __future__ import annotations

import socket
import time
from http.client import HTTPConnection
from typing import ClassVar

import orjson
from twisted.internet.defer import gatherResults
from twisted.internet.threads import deferToThread
from wsproto import ConnectionType, WSConnection
from wsproto.events import CloseConnection, RejectConnection, Request, TextMessage

from tests.cases.patience import LONG_PATIENCE
from tests.integration.client import python
from tests.integration.harness import CONFIGURATION, DaemonTestCase

LINES = 1600  # of 10,000 bytes
EVALUATOR = python(
    r"""
import sys
for number in range(int(sys.argv[1])):
    sys.stdout.write(f"{number:<9999}\n")
""",
    str(LINES),
)
EVENT = 5000  # bytes of an event on the average: each line is two
SPEEDS = (0, 500_000, 2_000_000, 10_000_000, 10**10)  # bytes a second
QUICK = 6_000_000  # bytes that a client reads as fast as it can, before it keeps to its speed
SECONDS = 1.5  # that it does, until it is cut
READ = 65536


class JSONLines:
    """JSON Lines, on one connection, with the events that follow the first `events`.

    `over` tells whether it has come to its end.
    """

    over = False

    def __init__(self, port: int, path: str, events: int) -> None:
        self._rest = b""
        self._connection = HTTPConnection("127.0.0.1", port, timeout=LONG_PATIENCE)
        headers = {"Accept": "application/jsonl"}
        self._connection.request("GET", f"{path}?skip={events}", headers=headers)
        self._answer = self._connection.getresponse()
        if self._answer.status != 200:
            raise AssertionError(f"{self._answer.status}: {self._answer.read()!r}")

    def read(self) -> list[str]:
        """Return the payloads of the events that have come whole. Blocks."""
        data = self._answer.read1(READ)
        self.over = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [orjson.loads(line)["payload"] for line in lines]

    def close(self) -> None:
        """Cut the connection: what was not read is lost."""
        self._answer.close()
        self._connection.close()


class WebSocket:
    """The same with a WebSocket whose client says nothing."""

    over = False

    def __init__(self, port: int, path: str, events: int) -> None:
        self._begun = ""
        self._socket = socket.create_connection(("127.0.0.1", port), LONG_PATIENCE)
        self._client = WSConnection(ConnectionType.CLIENT)
        self._socket.sendall(self._client.send(Request("localhost", f"{path}?skip={events}")))

    def read(self) -> list[str]:
        self._client.receive_data(self._socket.recv(READ) or None)
        found = []
        for event in self._client.events():
            if isinstance(event, TextMessage):
                self._begun += event.data
                if event.message_finished:
                    found.append(orjson.loads(self._begun)["payload"])
                    self._begun = ""
            elif isinstance(event, RejectConnection):
                raise AssertionError(event.status_code)  # noqa: TRY004
            elif isinstance(event, CloseConnection):
                assert event.code == 1000, event
                self.over = True
        return found

    def close(self) -> None:
        self._socket.close()


def read(port: int, path: str, kind: type[JSONLines | WebSocket], speed: float) -> list[str]:
    """Return the payloads that a client has in the end that was cut once. Blocks."""
    first = kind(port, path, 0)
    found: list[str] = []
    while len(found) < QUICK // EVENT:
        found += first.read()
    began, before = time.monotonic(), len(found)
    while (passed := time.monotonic() - began) < SECONDS and not first.over:
        if (len(found) - before) * EVENT >= passed * speed:
            time.sleep(0.01)
        else:
            found += first.read()
    first.close()
    second = kind(port, path, len(found))
    while not second.over:
        found += second.read()
    second.close()
    return found


class CutStreamTests(DaemonTestCase):
    """Clients that come back once."""

    configuration: ClassVar[str] = CONFIGURATION.replace("running = 4", "running = 16")

    async def test_direct(self) -> None:
        """Nothing is lost, whatever the client had not read when its connection was cut."""
        expected = "".join(f"{number:<9999}\n" for number in range(LINES))
        manners = [(kind, speed) for kind in (JSONLines, WebSocket) for speed in SPEEDS]
        readings = []
        for kind, speed in manners:
            path = f"/evaluation/{await self.begin(EVALUATOR)}/events"
            readings.append(deferToThread(read, self.daemon.port, path, kind, speed))
        found = await gatherResults(readings, consumeErrors=True)
        for (kind, speed), payloads in zip(manners, found, strict=True):
            # A line may come in parts.
            same = "".join(payloads) == expected
            self.assertTrue(same, f"{kind.__name__} at {speed} bytes a second")
