"""Connections that break at random places: who repeats the last request loses nothing."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from json import loads
from typing import Any, ClassVar, TypeVar

import attrs
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.error import ConnectionClosed
from twisted.internet.protocol import Protocol
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from twisted.web.client import ResponseFailed
from twisted.web.iweb import IResponse
from wsproto import ConnectionType, WSConnection
from wsproto.events import CloseConnection, RejectConnection, Request, TextMessage

from tests.cases.event_source import EventSource
from tests.integration.client import Client, Event, joined
from tests.integration.cutting_proxy import CuttingProxy, Place
from tests.integration.harness import CONFIGURATION, DaemonTestCase
from tests.integration.numbered_lines import EVALUATOR, printed

_LITTLE_MEMORY = """
[buffers]
evaluation = 1_048_576
page = 32_768
"""

# A stream that came to an end is not cut any more, so it has to be cut before.
UNFINISHED = (Place.WITHIN_REQUEST, Place.BEFORE_RESPONSE, Place.WITHIN_RESPONSES)
CUT_OFF = (ConnectionClosed, ResponseFailed)
_Found = TypeVar("_Found")


async def repeated(attempt: Callable[[], Awaitable[_Found]]) -> _Found:
    """Return what the first attempt returns that is not cut off."""
    while True:
        try:
            return await attempt()
        except CUT_OFF:
            continue


class Messages(Protocol):
    """One WebSocket: the messages that have come whole, and with which code it was closed."""

    def __init__(self, target: str) -> None:
        self.messages: list[str] = []
        self.code: int | None = None
        self.refused: int | None = None
        self.closed: Deferred[None] = Deferred()
        self._target = target
        self._socket = WSConnection(ConnectionType.CLIENT)
        self._begun = ""

    def connectionMade(self) -> None:
        self.transport.write(self._socket.send(Request("localhost", self._target)))

    def dataReceived(self, received: bytes) -> None:
        self._socket.receive_data(received)
        for event in self._socket.events():
            if isinstance(event, TextMessage):
                self._begun += event.data
                if event.message_finished:
                    self.messages.append(self._begun)
                    self._begun = ""
            elif isinstance(event, CloseConnection):
                self.code = event.code
                self.transport.loseConnection()
            elif isinstance(event, RejectConnection):
                self.refused = event.status_code
                self.transport.loseConnection()

    def connectionLost(self, reason: Failure) -> None:
        self.closed.callback(None)


@attrs.define
class Reader:
    """Reads one evaluation through the proxy that is at `port`."""

    client: Client
    port: int
    identifier: str
    events: list[Event] = attrs.field(factory=list)

    async def stream(
        self, accept: str, take: Callable[[bytes], None], query: str, last: str = ""
    ) -> IResponse:
        """Hand over what comes of a stream, also where that breaks off."""
        headers = {"Accept": accept, **({"Last-Event-ID": last} if last else {})}
        url = f"{self.client.url}/evaluation/{self.identifier}/events{query}"
        response = await self.client.http.get(url, headers=headers)
        if response.code not in (200, 204):
            raise AssertionError(f"{response.code}: {await response.content()!r}")
        await response.collect(take)
        return response

    async def lines(self) -> None:
        """Take a stream of JSON Lines from where the last one broke off, up to the end."""
        start = 0

        async def attempt() -> None:
            nonlocal start
            query = f"?after={start or ''}&skip={len(self.events) - start}"
            start = len(self.events)
            pieces: list[bytes] = []
            try:
                await self.stream("application/jsonl", pieces.append, query)
            finally:
                self.events += map(loads, b"".join(pieces).split(b"\n")[:-1])

        await repeated(attempt)

    async def server_sent(self) -> None:
        """Take server-sent events as a browser does, up to their end."""
        last = ""

        async def attempt() -> bool:
            nonlocal last
            source = EventSource(last)
            try:
                await self.stream("text/event-stream", source.feed, "", last)
            finally:
                last = source.last_event_id
                messages = [event for event in source.events if event.type == "message"]
                self.events += (loads(message.data) for message in messages)
            return source.events[-1:] != messages[-1:]

        assert await repeated(attempt), "the stream has ended without its end"

    async def messages(self) -> None:
        """Take messages of WebSockets, up to the close code that tells that these are all."""
        start = 0
        while True:
            query = f"?after={start or ''}&skip={len(self.events) - start}"
            start = len(self.events)
            protocol = Messages(f"/evaluation/{self.identifier}/events{query}")
            endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", self.port)
            await connectProtocol(endpoint, protocol)
            await protocol.closed
            assert protocol.refused is None, protocol.refused
            self.events += map(loads, protocol.messages)
            if protocol.code == 1000:
                return


class CutTestCase(DaemonTestCase):
    """A client whose every connection is cut, sooner or later."""

    async def through(
        self, seed: int, longest: int, places: tuple[Place, ...] = tuple(Place)
    ) -> Reader:
        """Return who reads a new evaluation through a proxy."""
        self.proxy = CuttingProxy(self.daemon.port, seed, places, longest)
        self.addCleanup(self.proxy.stop)
        port = await self.proxy.listen()
        client = Client(f"http://127.0.0.1:{port}")
        self.addCleanup(client.close)
        return Reader(client, port, await self.begin(EVALUATOR))

    async def check(self, reader: Reader, places: tuple[Place, ...] = tuple(Place)) -> None:
        """Hold that a reader has everything, though there were cuts at all these places."""
        self.assertTrue(joined(reader.events) == printed(), "not what was printed")
        for place in places:
            self.assertGreater(self.proxy.cuts[place], 1, place)
        page = await self.client.page(reader.identifier, "end")
        self.assertIsNone(page["end"])


class LittleMemoryTests(CutTestCase):
    """With less memory than is printed, so that the evaluator waits for its reader."""

    configuration: ClassVar[str] = CONFIGURATION + _LITTLE_MEMORY

    async def pages(self, seed: int, wait: int) -> None:
        """Read pages to the end, some of them once more."""
        chance, reader, after = random.Random(seed), await self.through(seed, 100_000), None

        def ask() -> Any:
            return reader.client.page(reader.identifier, after, wait)

        while True:
            page = await repeated(ask)
            if chance.random() < 0.3:  # all of it came, but its reader died before it was noted
                again = await repeated(ask)
                self.assertEqual(again["data"][: len(page["data"])], page["data"])
            reader.events += page["data"]
            after = page["end"]
            if after is None:
                break
            if not page["data"]:
                await deferLater(reactor, 0.005)
        await self.check(reader)

    async def test_pages(self) -> None:
        """Pages, asked for again and again."""
        await self.pages(1, 0)

    async def test_long_polls(self) -> None:
        """Pages that are waited for."""
        await self.pages(2, 10)

    async def test_evaluate(self) -> None:
        """A form that is sent until it is answered begins one evaluation, by its key."""
        reader = await self.through(6, 50_000)
        await self.client.cancel(reader.identifier)
        known = await self.listed()
        begun = set()
        for number in range(20):
            post = partial(self._post, reader.client, f"key-{number}")
            identifier = await repeated(post)
            self.assertEqual(await repeated(post), identifier)
            begun.add(identifier)
        self.client.evaluations += begun
        self.assertEqual(await self.listed() - known, begun)
        self.assertEqual(len(begun), 20)
        for place in Place:
            self.assertGreater(self.proxy.cuts[place], 1, place)

    async def _post(self, client: Client, key: str) -> str:
        return await client.evaluate(
            self.repository.url,
            self.commit,
            "printf ran",
            files=[("solution", "solution.txt", b"42\n" * 10_000)],
            headers={"Idempotency-Key": key},
        )

    async def test_server_sent_events(self) -> None:
        """What a stream has taken last is there for the next, also when as much waits."""
        reader = await self.through(7, 200_000, UNFINISHED)
        await reader.server_sent()
        await self.check(reader, UNFINISHED)

    async def test_json_lines(self) -> None:
        """The same with JSON Lines, of which more get lost: nothing is between them."""
        reader = await self.through(8, 200_000, UNFINISHED)
        await reader.lines()
        await self.check(reader, UNFINISHED)

    async def listed(self) -> set[str]:
        """Return the identifiers of all evaluations that the daemon knows."""
        listing = (await self.client.get("/evaluations")).json
        self.assertIsNone(listing["end"])
        return {entry["evaluation_id"] for entry in listing["data"]}


class CutStreamTests(CutTestCase):
    """Streams, with the memory that is usual."""

    async def test_server_sent_events(self) -> None:
        """`Last-Event-ID`, and once more after the end, as a browser would that missed it."""
        reader = await self.through(3, 200_000, UNFINISHED)
        await reader.server_sent()
        await self.check(reader, UNFINISHED)

        async def once_more() -> int:
            return (await reader.stream("text/event-stream", self.fail, "", "end")).code

        self.assertEqual(await repeated(once_more), 204)

    async def test_json_lines(self) -> None:
        """`after` and `skip`, and once more after the last line, as if the end were lost."""
        reader = await self.through(4, 200_000, UNFINISHED)
        await reader.lines()
        before = len(reader.events)
        query = f"?skip={before}"
        await repeated(lambda: reader.stream("application/jsonl", self.fail, query))
        await self.check(reader, UNFINISHED)

    async def test_web_sockets(self) -> None:
        """The same with messages."""
        reader = await self.through(5, 200_000, UNFINISHED)
        await reader.messages()
        await reader.messages()
        await self.check(reader, UNFINISHED)
