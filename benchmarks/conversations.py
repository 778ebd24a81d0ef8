"""Many clients in one thread, each a generator that yields requests and is sent their answers."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Generator

import attrs
import orjson

from benchmarks.client import HTTPError, content_length, events

_READ = 64 * 1024
_TIMEOUT = 30.0
_TOGETHER = 1024  # events of epoll that are taken at once

Conversation = Generator[bytes, bytes, None]
"""Yields a request and is sent the body of its answer, again and again."""


@attrs.define
class _Connection:
    socket: socket.socket
    conversation: Conversation
    answer: bytes = b""


class Conversations:
    """Holds them with one server, each on a connection of its own; a context manager."""

    received = 0
    """When the bytes of the answer were read that is being handed over (time.monotonic_ns)."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._poll = select.epoll()
        self._connections: dict[int, _Connection] = {}

    def __enter__(self) -> Conversations:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections.values():
            connection.socket.close()
        self._poll.close()

    def __len__(self) -> int:
        """Return how many are under way."""
        return len(self._connections)

    def begin(self, conversation: Conversation) -> None:
        """Connect, and send the first request."""
        connected = socket.create_connection(("127.0.0.1", self._port), _TIMEOUT)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[connected.fileno()] = _Connection(connected, conversation)
        self._poll.register(connected, select.EPOLLIN)
        connected.sendall(next(conversation))

    def go_on(self, until: Callable[[], bool], seconds: float) -> None:
        """Let them go on until that is so. Raises TimeoutError, and HTTPError for a bad answer."""
        deadline = time.monotonic() + seconds
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"not within {seconds:g} s; {len(self)} conversations")
            for descriptor, _ in self._poll.poll(left, _TOGETHER):
                self._read(self._connections[descriptor])

    def finish(self, seconds: float) -> None:
        """Let all come to their ends. Raises as `go_on` does."""
        self.go_on(lambda: not self._connections, seconds)

    def _read(self, connection: _Connection) -> None:
        chunk = connection.socket.recv(_READ)
        self.received = time.monotonic_ns()
        if not chunk:
            raise HTTPError("the server closed a connection")
        connection.answer += chunk
        head, separator, body = connection.answer.partition(b"\r\n\r\n")
        if not separator or len(body) < content_length(head):
            return
        if not head.startswith(b"HTTP/1.1 2"):
            raise HTTPError(connection.answer.decode("utf-8", "replace"))
        connection.answer = b""
        try:
            request = connection.conversation.send(body)
        except StopIteration:
            del self._connections[connection.socket.fileno()]
            connection.socket.close()
        else:
            connection.socket.sendall(request)


def identifier(answer: bytes) -> str:
    """Return the identifier of the evaluation that has been begun."""
    found: str = orjson.loads(answer)["evaluation_id"]
    return found


def read_to_the_end(
    evaluation: str,
    wait: int,
    after: str | None = None,
    take: Callable[[bytes], object] = len,
) -> Conversation:
    """Follow an evaluation by long polls, from a cursor on; hand each page over as it came."""
    while True:
        page = yield events(evaluation, after, wait)
        take(page)
        after = orjson.loads(page)["end"]
        if after is None:
            return
