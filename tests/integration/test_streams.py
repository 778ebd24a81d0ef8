"""Following a real evaluation over real connections: curl, treq, and WebSockets."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from typing import Any, ClassVar

import attrs
from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.internet.utils import getProcessOutputAndValue
from twisted.web.websocket import WebSocketClientEndpoint

from tests.event_source import EventSource
from tests.integration.client import failure, python, text
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until

CURL = shutil.which("curl")
COUNT = 60_000
LINES = f"""
import sys
for number in range({COUNT}):
    print("line", number, "of many, which are so long that they do not fit into any buffer")
"""
PRINTED = "".join(
    f"line {number} of many, which are so long that they do not fit into any buffer\n"
    for number in range(COUNT)
)


@attrs.define
class SocketReader:
    """A WebSocket's client, as Twisted has one."""

    messages: list[str] = attrs.field(factory=list)
    closed: Deferred[None] = attrs.field(factory=Deferred)

    def buildProtocol(self, url: str) -> SocketReader:
        return self

    def negotiationStarted(self, transport: object) -> None:
        pass

    def negotiationFinished(self) -> None:
        pass

    def textMessageReceived(self, message: str) -> None:
        self.messages.append(message)

    def bytesMessageReceived(self, data: bytes) -> None:
        raise AssertionError("events are text")

    def pongReceived(self, payload: bytes) -> None:
        pass

    def connectionLost(self, reason: object) -> None:
        self.closed.callback(None)


class StreamTestCase(DaemonTestCase):
    """Readers on every transport."""

    configuration: ClassVar[str] = (
        CONFIGURATION
        + """
[buffers]
evaluation = 1_048_576
[http]
window = 2
rate = 65_536
[streams]
heartbeat = 0.2
"""
    )

    def url(self, identifier: str, scheme: str = "http", query: str = "") -> str:
        """Return where the events of an evaluation are."""
        return f"{scheme}://127.0.0.1:{self.daemon.port}/evaluation/{identifier}/events{query}"

    async def curl(self, identifier: str, accept: str, query: str = "") -> bytes:
        """Return what curl reads, to the end of the stream."""
        assert CURL is not None, "these tests need curl: it is not installed"
        out, err, status = await getProcessOutputAndValue(
            CURL,
            [
                *("-NsS", "--noproxy", "*", "--max-time", "40"),
                *("--header", f"Accept: {accept}", self.url(identifier, query=query)),
            ],
        )
        self.assertEqual((status, err), (0, b""))
        return out

    async def lines(self, identifier: str) -> list[Any]:
        """Return what treq reads, piece by piece."""
        pieces: list[bytes] = []
        response = await self.client._http.get(
            self.url(identifier), headers={"Accept": "application/x-ndjson"}
        )
        await response.collect(pieces.append)
        return [json.loads(line) for line in b"".join(pieces).split(b"\n")[:-1]]

    async def socket(self, identifier: str) -> list[Any]:
        """Return what a WebSocket of Twisted's reads, until it is closed."""
        reader = SocketReader()
        endpoint = WebSocketClientEndpoint.new(reactor, self.url(identifier, "ws"))
        await endpoint.connect(reader)
        await reader.closed
        return [json.loads(message) for message in reader.messages]

    def server_sent(self, received: bytes) -> list[Any]:
        """Return the events of a stream that has come to its end."""
        source = EventSource()
        source.feed(received)
        *events, end = source.events
        self.assertEqual((end.type, end.last_event_id), ("end", "end"))
        for number, event in enumerate(events, 1):
            self.assertEqual(event.last_event_id, str(number))
        return [json.loads(event.data) for event in events]


class StreamTests(StreamTestCase):
    """A daemon that goes on."""

    async def test_all_transports_at_once(self) -> None:
        """Each of several readers sees all that was printed: more than all buffers hold."""
        identifier = await self.begin(python(LINES))
        found = await gatherResults(
            [
                Deferred.fromCoroutine(one)
                for one in (
                    self.curl(identifier, "text/event-stream"),
                    self.lines(identifier),
                    self.socket(identifier),
                )
            ]
        )
        events, lines, messages = self.server_sent(found[0]), found[1], found[2]
        for read in (events, lines, messages):
            self.assertTrue(text(read) == PRINTED, "not what was printed")
        self.assertIsNone((await self.client.page(identifier, "end"))["end"])

    async def test_resume(self) -> None:
        """Who loses the connection again and again goes on where the last one ended."""
        identifier = await self.begin(python(LINES))
        source, times = EventSource(), 0
        while not source.events or source.events[-1].type != "end":
            times += 1
            source.feed(await self._some(identifier, source.last_event_id))
            source._rest, source._data, source._type = b"", "", ""  # what a browser drops
        read = [json.loads(event.data) for event in source.events[:-1]]
        self.assertTrue(text(read) == PRINTED, "not what was printed")
        self.assertGreater(times, 3)

    async def _some(self, identifier: str, last: str) -> bytes:
        """Return the beginning of what follows an event, from a connection that is cut."""

        def read() -> bytes:
            with socket.create_connection(("127.0.0.1", self.daemon.port), 10) as connection:
                connection.sendall(
                    f"GET /evaluation/{identifier}/events HTTP/1.0\r\nHost: localhost\r\n"
                    f"Accept: text/event-stream\r\nLast-Event-ID: {last}\r\n\r\n".encode()
                )
                received = b""
                while len(received) < 3_000_000 and (some := connection.recv(65536)):
                    received += some
            start, _, body = received.partition(b"\r\n\r\n")
            assert b" 200 OK" in start, start
            return body

        received: bytes = await deferToThread(read)
        return received

    async def test_a_reader_who_takes_nothing_is_cut_off(self) -> None:
        """Its connection ends; the evaluation goes on, and others read all of it."""
        identifier = await self.begin(python(LINES))
        with socket.create_connection(("127.0.0.1", self.daemon.port), 30) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(
                f"GET /evaluation/{identifier}/events HTTP/1.1\r\nHost: localhost\r\n"
                "Accept: application/jsonl\r\n\r\n".encode()
            )
            await until(lambda: self._connections() == 0, "the connection is cut off", seconds=40)
        self.assertEqual((await self.client.status(identifier))["state"], "running")

    def _connections(self) -> int:
        """Return how many connections of evaluations' readers the daemon has, save treq's own."""
        kept = len(self.client._pool._connections)
        port = f":{self.daemon.port:04X}"
        with open("/proc/net/tcp", encoding="ascii") as table:
            lines = [line.split() for line in table]
        found = [line for line in lines if line[1].endswith(port) and line[3] == "01"]
        return max(0, len(found) - kept)

    async def test_cancel_and_signs_of_life(self) -> None:
        """A quiet stream shows that it lives, and a cancel ends it with the final event."""
        identifier = await self.begin_and_wait("printf ready; exec sleep 60")
        reading = Deferred.fromCoroutine(self.curl(identifier, "text/event-stream"))
        socket = Deferred.fromCoroutine(self.socket(identifier))
        await deferLater(reactor, 0.7)
        await self.client.cancel(identifier)
        received = await reading
        self.assertGreaterEqual(received.count(b"\n:\n"), 2)
        failure(self.server_sent(received), "cancelled")
        failure(await socket, "cancelled")

    async def test_other_peoples_websockets(self) -> None:
        """The client `websockets` reads it to the close of 1000, with pings and compression."""
        try:
            from websockets.asyncio.client import connect
        except ImportError:
            self.skipTest("this test needs the package websockets")
        identifier = await self.begin(python(LINES))
        url = self.url(identifier, "ws")

        async def read() -> tuple[list[Any], int | None]:
            async with connect(url, max_size=None, ping_interval=0.1, proxy=None) as connection:
                messages = [json.loads(message) async for message in connection]
                await connection.wait_closed()
                return messages, connection.close_code

        messages, code = await deferToThread(lambda: asyncio.run(read()))
        self.assertTrue(text(messages) == PRINTED, "not what was printed")
        self.assertEqual(code, 1000)


class ShutdownTests(StreamTestCase):
    """The daemon's end."""

    async def test_everybody_is_told(self) -> None:
        """Readers on every transport get the final event and the end."""
        identifier = await self.begin_and_wait("printf ready; exec sleep 60")
        reading = [
            Deferred.fromCoroutine(one)
            for one in (
                self.curl(identifier, "text/event-stream"),
                self.lines(identifier),
                self.socket(identifier),
            )
        ]
        await deferLater(reactor, 0.3)
        self.daemon.interrupt()
        received, lines, messages = await gatherResults(reading)
        for events in (self.server_sent(received), lines, messages):
            failure(events, "shutdown")
        await until(lambda: not self.daemon.running, "the daemon stops")
