"""Streams as their readers see them: what is asked for, and the events in what comes.

Each way of following is one class: `request` asks for a stream, and `feed` takes bytes that come
and returns the events that are whole, as JSON. `ended` tells whether the stream has said that it
is complete.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Protocol

_RECEIVED = 64 * 1024  # bytes: for the kernel, which makes twice as many, and read at once
_TIMEOUT = 60.0
_KEY = "dGhlIHNhbXBsZSBub25jZQ=="


class BrokenStreamError(Exception):
    """What comes is no stream, or not such a one."""


class Way(Protocol):
    """A way to follow an evaluation."""

    ended: bool

    def request(self, path: str, events: int) -> bytes:
        """Return the request for the stream that follows so many events."""

    def feed(self, received: bytes) -> list[bytes]:
        """Return the events that are whole by now. Raises BrokenStreamError."""


def _request(path: str, *headers: str) -> bytes:
    lines = (f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", "")
    return "\r\n".join(lines).encode()


class Chunks:
    """The body of an answer that comes in chunks."""

    def __init__(self) -> None:
        self.ended = False
        self._rest = b""

    def feed(self, received: bytes) -> bytes:
        """Return the part of the body that has come; half a chunk waits for the rest."""
        rest, found, at = self._rest + received, [], 0
        while not self.ended and (end := rest.find(b"\r\n", at)) > 0:
            size = int(rest[at:end], 16)
            if len(rest) < end + 2 + size + 2:
                break
            found.append(rest[end + 2 : end + 2 + size])
            at = end + 2 + size + 2
            self.ended = not size
        self._rest = rest[at:]
        return b"".join(found)


class Lines:
    """JSON Lines."""

    def __init__(self) -> None:
        self._chunks = Chunks()
        self._rest = b""

    @property
    def ended(self) -> bool:
        """Whether the answer has come to its end."""
        return self._chunks.ended

    def request(self, path: str, events: int) -> bytes:
        """Ask for what follows so many events."""
        return _request(f"{path}?skip={events}", "Accept: application/jsonl")

    def feed(self, received: bytes) -> list[bytes]:
        """Return the lines that are whole."""
        *lines, self._rest = (self._rest + self._chunks.feed(received)).split(b"\n")
        return lines


class ServerSent:
    """Server-sent events, of which each must have the cursor after it."""

    def __init__(self) -> None:
        self.ended = False
        self._chunks = Chunks()
        self._rest = b""
        self._events = 0

    def request(self, path: str, events: int) -> bytes:
        """Ask as a browser does that comes back."""
        self._events = events
        return _request(path, "Accept: text/event-stream", f"Last-Event-ID: {events or ''}")

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of messages that are whole."""
        *blocks, self._rest = (self._rest + self._chunks.feed(received)).split(b"\n\n")
        found = []
        for block in blocks:
            if block.startswith(b"event: end\n"):
                self.ended = True
            elif block.startswith(b"data: "):
                self._events += 1
                data, _, cursor = block[6:].partition(b"\nid: ")
                if cursor != b"%d" % self._events:
                    raise BrokenStreamError(f"{cursor!r} after {self._events} events")
                found.append(data)
        return found


class Messages:
    """A WebSocket."""

    def __init__(self) -> None:
        self.ended = False
        self._rest = b""

    def request(self, path: str, events: int) -> bytes:
        """Ask for what follows so many events."""
        return _request(
            f"{path}?skip={events}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {_KEY}",
        )

    def feed(self, received: bytes) -> list[bytes]:
        """Return the contents of text messages that are whole."""
        rest, found, at = self._rest + received, [], 0
        while len(rest) >= at + 2:
            length, begin = rest[at + 1], at + 2
            if length >= 126:
                begin += 2 if length == 126 else 8
                length = int.from_bytes(rest[at + 2 : begin], "big")
            end = begin + length
            if len(rest) < max(begin, end):
                break
            if rest[at] == 0x81:
                found.append(rest[begin:end])
            elif rest[at] == 0x88:
                self.ended = rest[begin : begin + 2] == (1000).to_bytes(2, "big")
            at = end
        self._rest = rest[at:]
        return found


def pieces(port: int, way: Way, path: str, events: int) -> Iterator[list[bytes]]:
    """Yield the events of one stream as they come, until it ends. Raises BrokenStreamError.

    Closing the iterator breaks the connection off.
    """
    with closing(socket.socket()) as connection:
        connection.settimeout(_TIMEOUT)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED)
        connection.connect(("127.0.0.1", port))
        connection.sendall(way.request(path, events))
        answer = b""
        while b"\r\n\r\n" not in answer:
            if not (some := connection.recv(_RECEIVED)):
                raise BrokenStreamError(f"closed after {answer!r}")
            answer += some
        head, _, body = answer.partition(b"\r\n\r\n")
        if head[9:12] not in (b"101", b"200"):
            raise BrokenStreamError(answer.decode("utf-8", "replace"))
        yield way.feed(body)
        while not way.ended and (some := connection.recv(_RECEIVED)):
            yield way.feed(some)
    if not way.ended:
        raise BrokenStreamError(f"broken off by the daemon after {events} events and some")
