"""Following a real evaluation over real connections: curl, treq, and WebSockets."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.internet.utils import getProcessOutputAndValue
from twisted.web.websocket import WebSocketClientEndpoint

from tests.cases.event_source import EventSource
from tests.cases.patience import LONG_PATIENCE, PATIENCE
from tests.integration.client import SocketReader, failure, python, text
from tests.integration.harness import DaemonTestCase, until
from tests.integration.raw import Connection

CURL = shutil.which("curl")
COUNT = 60_000
LINES = f"""
for number in range({COUNT}):
    print("line", number, "of many, which are so long that they do not fit into any buffer")
"""
# Begins when somebody writes to the pipe `gate` in its home.
WAITING_LINES = f"""
import os
os.mkfifo(os.environ["HOME"] + "/gate")
open(os.environ["HOME"] + "/gate").read()
{LINES}"""
PRINTED = "".join(
    f"line {number} of many, which are so long that they do not fit into any buffer\n"
    for number in range(COUNT)
)


class StreamCase(DaemonTestCase):
    def url(self, identifier: str, scheme: str = "http", query: str = "") -> str:
        return f"{scheme}://127.0.0.1:{self.daemon.port}/evaluation/{identifier}/events{query}"

    async def curl(self, identifier: str, accept: str, query: str = "") -> bytes:
        """Return what curl reads, to the end of the stream."""
        assert CURL is not None, "these tests need curl: it is not installed"
        out, err, status = await getProcessOutputAndValue(
            CURL,
            [
                *("-NsS", "--noproxy", "*", "--max-time", f"{LONG_PATIENCE:g}"),
                *("--header", f"Accept: {accept}", self.url(identifier, query=query)),
            ],
        )
        self.assertEqual((status, err), (0, b""))
        return out

    async def lines(self, identifier: str) -> list[Any]:
        """Return what treq reads, piece by piece."""
        pieces: list[bytes] = []
        response = await self.client.http.get(
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

    async def followed(self, count: int) -> None:
        """Wait until there are so many streams: what is printed from now on is kept for each."""
        while await self.client.streams() < count:
            await deferLater(reactor, 0.01)

    def read_by_all(self, identifier: str) -> list[Deferred[Any]]:
        """Begin to read on every transport; return what the readers get."""
        readers = (
            self.curl(identifier, "text/event-stream"),
            self.lines(identifier),
            self.socket(identifier),
        )
        return [Deferred.fromCoroutine(one) for one in readers]

    def server_sent(self, received: bytes) -> list[Any]:
        """Return the events of a stream that has come to its end."""
        source = EventSource()
        source.feed(received)
        *events, end = source.events
        self.assertEqual((end.type, end.last_event_id), ("end", "end"))
        for number, event in enumerate(events, 1):
            self.assertEqual(event.last_event_id, str(number))
        return [json.loads(event.data) for event in events]


class TransportCase(StreamCase):
    async def test_readers_on_each_transport_get_everything(self) -> None:
        identifier = await self.begin(python(WAITING_LINES))
        (gate,) = await until(lambda: self.daemon.find_in_homes("gate"), "it waits")
        reading = self.read_by_all(identifier)
        await self.followed(len(reading))
        gate.write_text("go")
        found = await gatherResults(reading)
        events, lines, messages = self.server_sent(found[0]), found[1], found[2]
        for read in (events, lines, messages):
            self.assertTrue(text(read) == PRINTED, "not what was printed")
        self.assertIsNone((await self.client.page(identifier, "end"))["end"])

    async def test_quiet_streams_have_heartbeats_and_a_final_event(self) -> None:
        identifier = await self.begin_and_wait("printf ready; exec sleep 600")
        readers = self.read_by_all(identifier)
        with Connection(self.daemon.port) as connection:
            head = f"GET /evaluation/{identifier}/events HTTP/1.0\r\nHost: localhost\r\n"
            connection.send(f"{head}Accept: text/event-stream\r\n\r\n".encode())
            connection.read_until(b":\n")
        await self.client.cancel(identifier)
        received, lines, messages = await gatherResults(readers)
        for events in (self.server_sent(received), lines, messages):
            failure(events, "cancelled")

    async def test_foreign_websocket_client_reads_to_the_close(self) -> None:
        try:
            from websockets.asyncio.client import connect
        except ImportError:
            self.skipTest("this test needs the package websockets")
        identifier = await self.begin(python(LINES))
        url = self.url(identifier, "ws")

        options: dict[str, Any] = {
            "max_size": None,
            "ping_interval": 0.1,
            "proxy": None,
            **dict.fromkeys(("open_timeout", "ping_timeout", "close_timeout"), PATIENCE),
        }

        async def read() -> tuple[list[Any], int | None]:
            async with connect(url, **options) as connection:
                messages = [json.loads(message) async for message in connection]
                await connection.wait_closed()
                return messages, connection.close_code

        messages, code = await deferToThread(lambda: asyncio.run(read()))
        self.assertTrue(text(messages) == PRINTED, "not what was printed")
        self.assertEqual(code, 1000)
