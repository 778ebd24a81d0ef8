"""Readers of events that go on with what they have, however often the daemon ends meanwhile."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import attrs
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectError, ConnectionClosed
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.web.client import (
    PartialDownloadError,
    RequestTransmissionFailed,
    ResponseFailed,
    ResponseNeverReceived,
)
from twisted.web.websocket import WebSocketClientEndpoint

import tawebeval_client as library
from tawebeval_client.backoff import Backoff
from tests.cases.event_source import EventSource
from tests.integration.client import Answer, Client, Event, SocketReader

CUTS = (
    ConnectError,
    ConnectionClosed,
    PartialDownloadError,
    RequestTransmissionFailed,
    ResponseFailed,
    ResponseNeverReceived,
)
"""How a request fails whose daemon has ended."""
LAST = "end"
"""The cursor after the last event."""

_PAUSE = 0.2  # seconds until the next attempt
_LATER = (408, 429, 502, 503, 504)
_BACKOFF = Backoff(
    max_attempts=10_000, first_delay_seconds=0.1, max_delay_seconds=1, max_retry_after_seconds=600
)

T = TypeVar("T")


async def insist(attempt: Callable[[], Awaitable[T]]) -> T:
    """Return what an attempt returns that the end of a daemon has not cut short."""
    while True:
        try:
            return await attempt()
        except CUTS:
            await deferLater(reactor, _PAUSE)


async def insist_on_answer(attempt: Callable[[], Awaitable[Answer]]) -> Answer:
    """Return an answer that does not say "later"."""
    while (answer := await insist(attempt)).code in _LATER:
        await deferLater(reactor, _PAUSE)
    return answer


@attrs.define
class ResumingReader(ABC):
    """Reader of all events of one evaluation.

    `status` is the document of the ended evaluation, None if it was forgotten before that.
    """

    client: Client
    identifier: str
    events: list[Event] = attrs.field(factory=list)
    status: dict[str, Any] | None = None

    async def read(self) -> ResumingReader:
        await self.read_events()
        await self.take_status()
        answer = await insist_on_answer(lambda: self.client.ask(self.identifier, LAST))
        assert answer.code == 200, answer.body
        return self

    @abstractmethod
    async def read_events(self) -> None:
        """Read to the end."""

    async def take_status(self) -> None:
        path = f"/evaluation/{self.identifier}"
        answer = await insist_on_answer(lambda: self.client.get(path))
        if self.status is None and answer.code == 200:
            self.status = answer.json

    async def has_all(self) -> bool:
        """Tell whether there are no events after those that were read, nor ever will be."""
        after = str(len(self.events)) if self.events else None
        answer = await insist_on_answer(lambda: self.client.ask(self.identifier, after))
        assert answer.code == 200, (answer.code, answer.body, after)
        page = answer.json
        return page["end"] == LAST and not page["data"]


class PageReader(ResumingReader):
    """Reader of pages, which does not wait for more; `pause` in seconds, between two requests."""

    wait = 0
    pause = 0.0

    async def read_events(self) -> None:
        after: str | None = None
        while after != LAST:
            answer = await insist_on_answer(
                lambda after=after: self.client.ask(self.identifier, after, self.wait)
            )
            assert answer.code == 200, (answer.code, answer.body, after)
            page = answer.json
            self.events += page["data"]
            is_idle = after == page["end"] or not self.wait
            await deferLater(reactor, _PAUSE if is_idle else self.pause)
            after = page["end"]


class PollReader(PageReader):
    wait = 20


class StreamReader(ResumingReader):
    """Reader of streams; `read_stream` reads one, from where the last one was cut."""

    async def read_events(self) -> None:
        while True:
            with contextlib.suppress(*CUTS):
                await self.read_stream()
            if await self.has_all():
                return
            await deferLater(reactor, _PAUSE)

    @abstractmethod
    async def read_stream(self) -> None:
        """Read a stream. Raises: one of `CUTS`."""

    @property
    def path(self) -> str:
        """The path of a stream of what was not read yet."""
        after = f"?after={len(self.events)}" if self.events else ""
        return f"/evaluation/{self.identifier}/events{after}"


class LineReader(StreamReader):
    async def read_stream(self) -> None:
        received = bytearray()
        try:
            await self.client.stream(self.path, received.extend, {"Accept": "application/jsonl"})
        finally:
            self.events += map(json.loads, bytes(received).split(b"\n")[:-1])


@attrs.define
class ServerSentReader(StreamReader):
    """Reader of server-sent events, which resumes by Last-Event-ID."""

    source: EventSource = attrs.field(factory=EventSource)

    async def read_stream(self) -> None:
        headers = {"Accept": "text/event-stream"}
        if self.source.last_event_id:
            headers["Last-Event-ID"] = self.source.last_event_id
        self.source.reconnect()
        path = f"/evaluation/{self.identifier}/events"
        try:
            await self.client.stream(path, self.source.feed, headers)
        finally:
            found = self.source.events
            self.events = [json.loads(each.data) for each in found if each.type != "end"]


class WebSocketReader(StreamReader):
    async def read_stream(self) -> None:
        socket = SocketReader()
        url = f"ws{self.client.url.removeprefix('http')}{self.path}"
        endpoint = WebSocketClientEndpoint.new(reactor, url)
        connecting = Deferred.fromCoroutine(endpoint.connect(socket))  # may wait for ever
        connecting.addErrback(
            lambda failure: failure.check(ConnectError) and socket.closed.callback(None)
        )
        await socket.closed
        self.events += map(json.loads, socket.messages)


class LibraryReader(ResumingReader):
    async def read_events(self) -> None:
        await deferToThread(self._read_events)

    def _read_events(self) -> None:
        with library.Client(self.client.url, events_backoff=_BACKOFF) as client:
            for event in client.events(self.identifier):
                if isinstance(event, library.Text):
                    self.events.append({"type": "text", "payload": event.text})
                else:
                    self.events.append({"type": "data", "payload": json.loads(event.raw_json)})


READERS: tuple[type[ResumingReader], ...] = (
    PageReader,
    PollReader,
    LineReader,
    ServerSentReader,
    WebSocketReader,
    LibraryReader,
)
"""A reader of each kind."""
