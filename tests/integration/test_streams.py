"""Streams of evaluations, read by curl and by a foreign WebSocket client to their ends."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.threads import deferToThread
from twisted.internet.utils import getProcessOutputAndValue
from websockets.asyncio.client import connect

from tests.cases.event_source import EventSource
from tests.cases.patience import LONG_PATIENCE, PATIENCE
from tests.integration.client import failure, python, text
from tests.integration.harness import DaemonTestCase, until

CURL = shutil.which("curl")
COUNT = 60_000
PRINTED = "".join(
    f"line {number} of many, which are so long that they do not fit into any buffer\n"
    for number in range(COUNT)
)
# Begins when somebody writes to the pipe `gate` in its home.
WAITING_LINES = f"""
import os
os.mkfifo(os.environ["HOME"] + "/gate")
open(os.environ["HOME"] + "/gate").read()
for number in range({COUNT}):
    print("line", number, "of many, which are so long that they do not fit into any buffer")
"""


class StreamTests(DaemonTestCase):
    def url(self, identifier: str, scheme: str = "http") -> str:
        return f"{scheme}://127.0.0.1:{self.daemon.port}/evaluation/{identifier}/events"

    async def curl(self, identifier: str, accept: str) -> bytes:
        assert CURL is not None, "these tests need curl: it is not installed"
        options = ("-NsS", "--noproxy", "*", "--max-time", f"{LONG_PATIENCE:g}")
        out, err, status = await getProcessOutputAndValue(
            CURL, [*options, "--header", f"Accept: {accept}", self.url(identifier)]
        )
        self.assertEqual((status, err), (0, b""))
        return out

    async def read_source(self, identifier: str) -> list[Any]:
        """Return the server-sent events of a stream, read to its end."""
        source = EventSource()
        source.feed(await self.curl(identifier, "text/event-stream"))
        *events, end = source.events
        self.assertEqual((end.type, end.last_event_id), ("end", "end"))
        numbers = [str(number) for number in range(1, len(events) + 1)]
        self.assertEqual([event.last_event_id for event in events], numbers)
        return [json.loads(event.data) for event in events]

    async def read_lines(self, identifier: str) -> list[Any]:
        lines = await self.curl(identifier, "application/x-ndjson")
        return [json.loads(line) for line in lines.split(b"\n")[:-1]]

    async def read_socket(self, identifier: str) -> list[Any]:
        """Return what a WebSocket brings until the server closes it, whose client pings it."""
        options: dict[str, Any] = {
            "max_size": None,
            "ping_interval": 0.1,
            "proxy": None,
            **dict.fromkeys(("open_timeout", "ping_timeout", "close_timeout"), PATIENCE),
        }

        async def read() -> tuple[list[Any], int | None]:
            async with connect(self.url(identifier, "ws"), **options) as connection:
                messages = [json.loads(message) async for message in connection]
                await connection.wait_closed()
                return messages, connection.close_code

        messages, code = await deferToThread(lambda: asyncio.run(read()))
        self.assertEqual(code, 1000)
        return messages

    async def follow_by_all(self, identifier: str) -> Deferred[list[list[Any]]]:
        """Begin to read on every transport; return what the readers get."""
        readers = (self.read_source, self.read_lines, self.read_socket)
        reading = [Deferred.fromCoroutine(read(identifier)) for read in readers]

        async def have_begun() -> bool:
            return await self.client.streams() >= len(reading)

        await until(have_begun, "all streams have begun")
        return gatherResults(reading)

    async def test_readers_on_each_transport_get_everything(self) -> None:
        identifier = await self.begin(python(WAITING_LINES))
        (gate,) = await until(lambda: self.daemon.find_in_homes("gate"), "it waits")
        reading = await self.follow_by_all(identifier)
        gate.write_text("go")
        for events in await reading:
            self.assertTrue(text(events) == PRINTED, "not what was printed")
        self.assertIsNone((await self.client.page(identifier, "end"))["end"])

    async def test_readers_on_each_transport_get_an_error_event_at_shutdown(self) -> None:
        identifier = await self.begin_and_wait("printf ready; exec sleep 600")
        reading = await self.follow_by_all(identifier)
        self.daemon.interrupt()
        for events in await reading:
            failure(events, "shutdown")
        await until(lambda: not self.daemon.running, "the daemon stops")
