"""Clients that follow an evaluation in memory, each by another transport."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from twisted.internet.testing import StringTransport

from tests.cases.event_source import EventSource
from tests.fakes.clients import Answer, Connection, Service, head

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": KEY,
}


class Follower:
    """A stream on a connection of its own; `full` is whether its transport takes no more.

    A transport that is full pauses whoever writes into it, as real ones do.
    """

    accept = ""

    def __init__(self, service: Service, identifier: str, query: str = "", **headers: str) -> None:
        self.service = service
        self.connection: Connection = service.connect()
        self.full = False
        self.sizes: list[int] = []
        self._body = b""
        self._watch(self.connection.transport)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.send(
            head(f"GET /evaluation/{identifier}/events{query}", {**self.hello(), **names})
        )
        self.turn()

    def hello(self) -> dict[str, str]:
        return {"Accept": self.accept}

    def _watch(self, transport: StringTransport) -> None:
        write: Callable[[bytes], None] = transport.write

        def watched(data: bytes) -> None:
            write(data)
            self.sizes.append(len(data))
            if self.full:
                self.connection.channel.pauseProducing()

        transport.write = watched  # type: ignore[method-assign]
        transport.writeSequence = lambda data: watched(b"".join(data))  # type: ignore[method-assign]

    def turn(self) -> None:
        """Let happen what is due now, and what follows from it."""
        self.service.reactor.pump([0] * 6)

    def take(self) -> None:
        """Take all that was sent; the transport has room again."""
        self.full = False
        if not self.connection.closed:  # as real transports, of which we are no producer then
            self.connection.channel.resumeProducing()
        self.turn()

    def step(self) -> None:
        """Take what was sent, once: the transport becomes full again with the next piece."""
        self.full = True
        self.connection.channel.resumeProducing()
        self.turn()

    @property
    def answer(self) -> Answer:
        """The answer so far, without the framing of its body."""
        answer, _ = parse(self.connection.received)
        return answer

    @property
    def complete(self) -> bool:
        """Whether the answer has come to its end."""
        return parse(self.connection.received)[1]

    @property
    def events(self) -> list[Any]:
        raise NotImplementedError

    @property
    def payloads(self) -> list[Any]:
        return [event["payload"] for event in self.events]

    def lose(self) -> None:
        self.connection.lose()


class LineFollower(Follower):
    """Follows by JSON Lines."""

    accept = "application/jsonl"

    @property
    def events(self) -> list[Any]:
        return [json.loads(line) for line in self.answer.body.split(b"\n")[:-1]]


class SourceFollower(Follower):
    """Follows by server-sent events."""

    accept = "text/event-stream"

    @property
    def source(self) -> EventSource:
        source = EventSource()
        source.feed(self.answer.body)
        return source

    @property
    def events(self) -> list[Any]:
        return [json.loads(e.data) for e in self.source.events if e.type == "message"]

    @property
    def complete(self) -> bool:
        last = self.source.events[-1:]
        return super().complete and bool(last) and last[0].type == "end"


class SocketFollower(Follower):
    """Follows by WebSocket, of which it reads the frames of the server."""

    def hello(self) -> dict[str, str]:
        return UPGRADE

    @property
    def frames(self) -> list[tuple[int, bytes]]:
        """The opcodes and contents of what has come."""
        upgrade, _, rest = self.connection.received.partition(b"\r\n\r\n")
        assert upgrade.startswith(b"HTTP/1.1 101 "), upgrade
        found = []
        while rest:
            length, at = rest[1], 2
            if length == 126:
                length, at = int.from_bytes(rest[2:4], "big"), 4
            elif length == 127:
                length, at = int.from_bytes(rest[2:10], "big"), 10
            assert rest[0] & 0xF0 == 0x80
            assert len(rest) >= at + length, "half a frame"
            found.append((rest[0] & 0x0F, rest[at : at + length]))
            rest = rest[at + length :]
        return found

    @property
    def events(self) -> list[Any]:
        return [json.loads(content) for opcode, content in self.frames if opcode == 1]

    @property
    def code(self) -> int | None:
        closes = [content for opcode, content in self.frames if opcode == 8]
        return int.from_bytes(closes[0][:2], "big") if closes else None

    @property
    def complete(self) -> bool:
        return self.code == 1000

    def send(self, opcode: int, content: bytes = b"", final: bool = True) -> None:
        """Send a frame, masked as those of clients have to be."""
        assert len(content) < 2**16
        length = len(content)
        size = bytes([0x80 | length]) if length < 126 else b"\xfe" + length.to_bytes(2, "big")
        self.connection.send(bytes([0x80 * final | opcode]) + size + b"\0\0\0\0" + content)
        self.turn()


FOLLOWERS: list[type[Follower]] = [LineFollower, SourceFollower, SocketFollower]


def parse(received: bytes) -> tuple[Answer, bool]:
    """Return an answer of which the body may still be coming, and whether it is complete."""
    start, _, rest = received.partition(b"\r\n\r\n")
    lines = start.decode().split("\r\n")
    headers: Any = {}
    for line in lines[1:]:
        name, _, value = line.partition(": ")
        headers[name.lower()] = ", ".join(filter(None, (headers.get(name.lower()), value)))
    status = int(lines[0].split()[1])
    if headers.get("transfer-encoding") != "chunked":
        length = int(headers.get("content-length", len(rest)))
        return Answer(status, headers, rest), len(rest) == length
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        if not length:
            return Answer(status, headers, body), rest == b"\r\n"
        body, rest = body + rest[:length], rest[length + 2 :]
    return Answer(status, headers, body), False
