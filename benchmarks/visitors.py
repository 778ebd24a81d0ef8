"""Clients in one thread who come through a restart as good ones do, and count what befalls them.

Each is a generator: it yields a request, as bytes or `Slowly`, and is sent the answer, or it yields
seconds, for which it does nothing. It keeps its connection, unless an answer says that it was the
last, and looks before it sends whether the server has closed the connection meanwhile. What gets no
answer is counted and sent once more.
"""

from __future__ import annotations

import heapq
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from enum import Enum
from http import HTTPStatus
from itertools import count

import attrs

from benchmarks.client import content_length

_READ = 64 * 1024
_TOGETHER = 1024  # events of epoll that are taken at once
_AGAIN = 0.05  # seconds until what got no answer is sent once more


class Fate(Enum):
    """What befalls a request, or a connection without one."""

    ANSWERED = "answered"
    REFUSED = "refused"  # there was no connection to be had
    RESET = "reset"
    UNANSWERED = "closed without an answer"
    CLOSED = "closed while idle"


LOST = (Fate.REFUSED, Fate.RESET, Fate.UNANSWERED)
"""Those after which a client knows no more than before."""


@attrs.frozen
class Slowly:
    """A request that is sent in pieces, with a pause of so many seconds before each but the first.

    When it has its answer the rest is not sent.
    """

    pieces: Sequence[bytes]
    pause: float


@attrs.frozen
class Answer:
    """What came: the status, and the body."""

    status: int
    body: bytes


Conversation = Generator[bytes | Slowly | float, Answer | None, None]


@attrs.define(eq=False)
class _Visitor:
    kind: str
    conversation: Conversation
    request: bytes | Slowly | None = None  # that is not answered yet
    attempt: int = 0
    asked: float = 0.0
    connection: socket.socket | None = None
    received: bytes = b""


@attrs.define
class Visitors:
    """All of them. `connect` returns a connection with the server, or raises OSError.

    `fates` counts by kind of visitor; `longest` is the longest time to an answer, in seconds, by
    kind.
    """

    connect: Callable[[], socket.socket]
    fates: Counter[tuple[str, Fate]] = attrs.field(factory=Counter)
    longest: dict[str, float] = attrs.field(factory=dict)
    _poll: select.epoll = attrs.field(factory=select.epoll)
    _connected: dict[int, _Visitor] = attrs.field(factory=dict)
    _timers: list[tuple[float, int, Callable[[], object]]] = attrs.field(factory=list)
    _number: Callable[[], int] = attrs.field(factory=lambda: count().__next__)

    def begin(self, kind: str, conversation: Conversation) -> None:
        """Have one more visitor."""
        self._go_on(_Visitor(kind, conversation), None)

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call something in so many seconds, if they go on until then."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._number(), call))

    def go_on(self, until: Callable[[], bool], seconds: float) -> None:
        """Let them go on until that is so. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while not until():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(f"not within {seconds:g} s")
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            next_timer = self._timers[0][0] if self._timers else deadline
            wait = max(0.0, min(next_timer, now + _AGAIN) - time.monotonic())
            for descriptor, _ in self._poll.poll(wait, _TOGETHER):
                if descriptor in self._connected:
                    self._read(self._connected[descriptor])

    def close(self) -> None:
        """Have no visitors any more."""
        for visitor in list(self._connected.values()):
            self._disconnect(visitor)
        self._poll.close()

    def _go_on(self, visitor: _Visitor, answer: Answer | None) -> None:
        try:
            step = visitor.conversation.send(answer)
        except StopIteration:
            self._disconnect(visitor)
            return
        if isinstance(step, float):
            self.later(step, lambda: self._go_on(visitor, None))
        else:
            visitor.request, visitor.asked = step, time.monotonic()
            self._ask(visitor)

    def _ask(self, visitor: _Visitor) -> None:
        if visitor.connection is not None and self._has_ended(visitor):
            self._disconnect(visitor)
        if visitor.connection is None:
            try:
                visitor.connection = self.connect()
            except OSError:
                self._lose(visitor, Fate.REFUSED)
                return
            visitor.connection.setblocking(False)  # what is sent at once is little
            self._connected[visitor.connection.fileno()] = visitor
            self._poll.register(visitor.connection, select.EPOLLIN)
        request = visitor.request
        assert request is not None, "it was set before"
        visitor.attempt += 1
        if isinstance(request, bytes):
            self._send(visitor, visitor.attempt, [request], 0.0)
        else:
            self._send(visitor, visitor.attempt, request.pieces, request.pause)

    def _has_ended(self, visitor: _Visitor) -> bool:
        """Whether the server has closed a connection on which nothing is asked."""
        assert visitor.connection is not None
        try:
            ended = not visitor.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            self._note(visitor, Fate.RESET)
            return True
        self._note(visitor, Fate.CLOSED)
        return ended

    def _send(self, visitor: _Visitor, attempt: int, pieces: Sequence[bytes], pause: float) -> None:
        connection = visitor.connection
        if connection is None or visitor.request is None or visitor.attempt != attempt:
            return  # answered, or lost, before all of it was sent
        try:
            connection.sendall(pieces[0])
        except OSError:
            return  # its end tells what has become of it
        if pieces[1:]:
            self.later(pause, lambda: self._send(visitor, attempt, pieces[1:], pause))

    def _read(self, visitor: _Visitor) -> None:
        assert visitor.connection is not None
        try:
            chunk = visitor.connection.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            self._lose(visitor, Fate.RESET)
            return
        if not chunk:
            self._lose(visitor, Fate.CLOSED if visitor.request is None else Fate.UNANSWERED)
            return
        visitor.received += chunk
        head, separator, body = visitor.received.partition(b"\r\n\r\n")
        if not separator:
            return
        status = int(head.split(maxsplit=2)[1])
        if status != HTTPStatus.NO_CONTENT and len(body) < content_length(head):
            return
        took = time.monotonic() - visitor.asked
        self.longest[visitor.kind] = max(self.longest.get(visitor.kind, 0.0), took)
        self._note(visitor, Fate.ANSWERED)
        visitor.request, visitor.received = None, b""
        if b"\r\nconnection: close" in head.lower():
            self._disconnect(visitor)
        self._go_on(visitor, Answer(status, body))

    def _lose(self, visitor: _Visitor, fate: Fate) -> None:
        """Note the end of a connection; what was asked on it is asked once more."""
        self._note(visitor, fate)
        self._disconnect(visitor)
        if visitor.request is not None:
            self.later(_AGAIN, lambda: self._ask(visitor))

    def _note(self, visitor: _Visitor, fate: Fate) -> None:
        self.fates[visitor.kind, fate] += 1

    def _disconnect(self, visitor: _Visitor) -> None:
        connection, visitor.connection = visitor.connection, None
        visitor.received = b""
        if connection is not None:
            del self._connected[connection.fileno()]
            self._poll.unregister(connection)
            connection.close()
