"""Streams that are cut once, at any speed: the client resumes, and has every event exactly once.

Nothing is set: neither the daemon's buffers nor those of the kernel, which hold megabytes of what a
client has not read yet that was quick before.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from http.client import HTTPConnection
from typing import ClassVar

import orjson
from twisted.internet import reactor
from twisted.internet.defer import gatherResults
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.threads import deferToThread
from twisted.protocols.portforward import ProxyFactory
from wsproto import ConnectionType, WSConnection
from wsproto.events import CloseConnection, RejectConnection, Request, TextMessage

from tests.cases.event_source import EventSource
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


class Stream:
    """One connection, on which the events come that follow the first `events`.

    `over` tells whether it has come to its end.
    """

    over = False

    def __init__(self, port: int, path: str, events: int) -> None:
        raise NotImplementedError

    def read(self) -> list[str]:
        """Return the payloads of the events that have come whole. Blocks."""
        raise NotImplementedError

    def close(self) -> None:
        """Cut the connection: what was not read is lost."""
        raise NotImplementedError


class Answer(Stream):
    """A stream that is an answer of HTTP."""

    accept: ClassVar[str]

    def __init__(self, port: int, path: str, events: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=LONG_PATIENCE)
        self._connection.request("GET", f"{path}{self.query(events)}", headers=self.headers(events))
        self._answer = self._connection.getresponse()
        if self._answer.status != 200:
            raise AssertionError(f"{self._answer.status}: {self._answer.read()!r}")

    def query(self, events: int) -> str:
        """Return what follows the path."""
        return ""

    def headers(self, events: int) -> dict[str, str]:
        """Return the headers of the request."""
        return {"Accept": self.accept}

    def read(self) -> list[str]:
        data = self._answer.read1(READ)
        self.over = not data
        return self.feed(data)

    def feed(self, data: bytes) -> list[str]:
        """Return the payloads of the events that `data` makes whole."""
        raise NotImplementedError

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


class JSONLines(Answer):
    """JSON Lines."""

    accept = "application/jsonl"
    _rest = b""

    def query(self, events: int) -> str:
        return f"?skip={events}"

    def feed(self, data: bytes) -> list[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [orjson.loads(line)["payload"] for line in lines]


class ServerSent(Answer):
    """Server-sent events."""

    accept = "text/event-stream"

    def headers(self, events: int) -> dict[str, str]:
        self._source = EventSource(str(events))
        return {"Accept": self.accept, "Last-Event-ID": str(events) if events else ""}

    def feed(self, data: bytes) -> list[str]:
        self._source.feed(data)
        found = [event for event in self._source.events if event.type == "message"]
        self._source.events.clear()
        return [orjson.loads(event.data)["payload"] for event in found]


class WebSocket(Stream):
    """A WebSocket whose client says nothing."""

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


class Acknowledged(WebSocket):
    """A WebSocket whose client says which messages it has."""

    _count = 0

    def read(self) -> list[str]:
        found = super().read()
        self._count += len(found)
        if found and not self.over:
            said = TextMessage(json.dumps({"acknowledge": self._count}))
            with contextlib.suppress(ConnectionError):  # the daemon may have said the last word
                self._socket.sendall(self._client.send(said))
        return found


class Polled(JSONLines):
    """JSON Lines whose client says by pages what it has."""

    def __init__(self, port: int, path: str, events: int) -> None:
        super().__init__(port, path, events)
        self._page = HTTPConnection("127.0.0.1", port, timeout=LONG_PATIENCE)
        self._path, self._count, self._said = path, events, events

    def read(self) -> list[str]:
        found = super().read()
        self._count += len(found)
        if self._count - self._said > 100:
            self._said = self._count
            self._page.request("GET", f"{self._path}?after={self._count}")
            assert self._page.getresponse().read()
        return found

    def close(self) -> None:
        super().close()
        self._page.close()


def read(port: int, path: str, kind: type[Stream], speed: float) -> list[str]:
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

    async def check(self, port: int, *kinds: type[Stream]) -> None:
        """Hold that clients of these kinds miss nothing, at whatever speed they have read."""
        expected = "".join(f"{number:<9999}\n" for number in range(LINES))
        manners = [(kind, speed) for kind in kinds for speed in SPEEDS]
        readings = []
        for kind, speed in manners:
            path = f"/evaluation/{await self.begin(EVALUATOR)}/events"
            readings.append(deferToThread(read, port, path, kind, speed))
        found = await gatherResults(readings, consumeErrors=True)
        for (kind, speed), payloads in zip(manners, found, strict=True):
            # A line may come in parts.
            same = "".join(payloads) == expected
            self.assertTrue(same, f"{kind.__name__} at {speed} bytes a second")

    async def test_direct(self) -> None:
        """Nothing is lost, whatever the client had not read when its connection was cut."""
        await self.check(self.daemon.port, JSONLines, ServerSent, WebSocket)

    async def test_by_proxy(self) -> None:
        """Nor behind a proxy, which takes far more, if the client says what it has."""
        factory = ProxyFactory("127.0.0.1", self.daemon.port)
        factory.noisy = False
        port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(factory)
        self.addCleanup(port.stopListening)
        await self.check(port.getHost().port, Acknowledged, Polled)
