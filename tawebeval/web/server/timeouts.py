"""Phases of a connection and their deadlines.

A connection awaits a request, receives its head, receives its body, or is answered. Each phase but
the last has a deadline for what the client sends; a long poll may be answered as late as it likes.
In every phase the client has a deadline to take what was written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from twisted.internet.interfaces import (
    IDelayedCall,
    IHalfCloseableDescriptor,
    IReactorTime,
    IReadDescriptor,
)
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel

from tawebeval.config import HttpSettings

LINGER_SECONDS = 5.0  # seconds for which bytes of a refused client are read and dropped
_IN_FLIGHT = 0.5  # seconds for a request that was sent before the client knew of the drain
_TRANSPORT_BUFFER = 2**16  # bytes that a transport may hold before it asks to pause


class ConnectionPhase(Enum):
    """The phases of a connection."""

    NEW = "the first byte at all"
    IDLE = "the next request"
    HEAD = "the end of a head"
    BODY = "the end of a body"
    RESPONSE = "a response, and the client to take it"
    CLOSED = "the end"  # received bytes are dropped


class PendingRequest(Protocol):
    """A request while it is answered: Twisted's, or one of the fast path."""

    startedWriting: bool  # noqa: N815  (the name that Twisted gave it)

    def connectionLost(self, reason: Failure) -> None:
        """Stop: the client has disconnected."""


class TimeoutChannel(HTTPChannel):
    """A connection with a phase and deadlines.

    It does not use Twisted's `TimeoutMixin`, whose timeout any received byte extends.
    """

    phase = ConnectionPhase.NEW
    _body_size = 0  # bytes of the body that have come since the last look
    _window_end = 0.0  # when the next look is due, in seconds of the clock
    _paused_at: float | None = None  # since when the body is not read, in seconds of the clock
    _unsent = 0  # bytes at most that the client has yet to take of the answer
    _read_deadline: IDelayedCall | None = None  # for bytes that the client sends
    _write_deadline: IDelayedCall | None = None  # for bytes that the client takes
    _answered: PendingRequest | None = None  # answered, but not yet taken by the client

    @property
    @abstractmethod
    def http_settings(self) -> HttpSettings:
        """The settings `[http]`."""

    @property
    @abstractmethod
    def clock(self) -> IReactorTime:
        """The clock of all deadlines."""

    @abstractmethod
    def on_head_timeout(self) -> None:
        """Answer a request whose head is incomplete at its deadline."""

    @abstractmethod
    def on_body_timeout(self) -> None:
        """Answer a request whose body arrives too slowly."""

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        """Cancel all deadlines; drop the answered request."""
        self.phase = ConnectionPhase.CLOSED
        self._cancel_read_deadline()
        self._cancel_write_deadline()
        if self._answered is not None:
            self.requests.remove(self._answered)
            self._answered = None
        super().connectionLost(reason)

    def loseConnection(self) -> None:
        """Close when the client has taken all; abort if that takes too long."""
        self.phase = ConnectionPhase.CLOSED
        self._cancel_read_deadline()
        if self._write_deadline is None or not self._write_deadline.active():
            self.set_write_deadline(self._write_timeout())
        super().loseConnection()

    def close_write_side(self, timeout: float = LINGER_SECONDS) -> None:
        """Close the sending half and drop what arrives; abort after `timeout` seconds.

        Closing both halves with unread data would reset the connection.
        """
        if self._can_half_close:
            self._cancel_read_deadline()
            self.set_write_deadline(timeout)
            self._close_write_side()
        else:
            self.loseConnection()

    def close_if_idle(self) -> None:
        """Close a connection without a request, but answer one that is on its way.

        A request sent after the sending half is closed gets no response. It gets no reset either,
        which the client could take for a failure of its previous request.
        """
        if self._is_idle:
            self.set_read_deadline(_IN_FLIGHT, self._close_idle)

    @property
    def _is_idle(self) -> bool:
        """Whether nothing of a request has arrived."""
        return self.phase is ConnectionPhase.NEW or self.phase is ConnectionPhase.IDLE

    def _close_idle(self) -> None:
        if IReadDescriptor.providedBy(self.transport):
            # Bytes in the socket by now arrived in time, however late the reactor is.
            self.transport.doRead()
        if not self._is_idle:
            return
        if self._can_half_close:
            # Nothing is unsent, so an orderly close follows.
            self.set_read_deadline(_IN_FLIGHT, self.transport.loseConnection)  # type: ignore[union-attr]
            self._close_write_side()
        else:
            self.loseConnection()

    @property
    def _can_half_close(self) -> bool:
        """Whether the sending half can be closed alone, which TLS does not support."""
        return bool(IHalfCloseableDescriptor.providedBy(self.transport))

    def _close_write_side(self) -> None:
        """Close the sending half and drop what arrives."""
        self.phase = ConnectionPhase.CLOSED
        self.clearLineBuffer()
        self._networkProducer.unregisterProducer()  # type: ignore[attr-defined]
        self._networkProducer.resumeProducing()
        self.transport.loseWriteConnection()  # type: ignore[union-attr]

    def forceAbortClient(self) -> None:
        """Abort the connection and drop what is unsent."""
        self.phase = ConnectionPhase.CLOSED
        self._cancel_read_deadline()
        # All transports have it, though ITransport does not.
        self.transport.abortConnection()  # type: ignore[union-attr]

    # What the client sends

    def await_first_request(self) -> None:
        """Set the deadline of the first head."""
        self.set_read_deadline(self.http_settings.head_timeout, self._on_head_deadline)

    def on_request_head_start(self) -> None:
        """Enter the phase HEAD, if nothing of a head has arrived before."""
        if self.phase is ConnectionPhase.IDLE:
            self.phase = ConnectionPhase.HEAD
            self.set_read_deadline(self.http_settings.head_timeout, self._on_head_deadline)
        elif self.phase is ConnectionPhase.NEW:
            self.phase = ConnectionPhase.HEAD  # with the deadline that the connection began with

    def allHeadersReceived(self) -> None:
        """Enter the phase BODY."""
        self.phase = ConnectionPhase.BODY
        self._body_size = 0
        self._unsent = 0
        self._begin_window(self.http_settings.rate_window_seconds)
        super().allHeadersReceived()

    def start_response(self, request: PendingRequest) -> None:
        """Enter the phase RESPONSE for a request of the fast path.

        `request` stays in `requests` until `requestDone`, and Twisted holds back pipelined bytes as
        it does behind its own requests.
        """
        self.phase = ConnectionPhase.RESPONSE
        self._unsent = 0
        self._cancel_read_deadline()
        self.requests.append(request)
        self._handlingRequest = True
        self.setRawMode()

    def count_body_bytes(self, count: int) -> None:
        """Count received bytes of the body, without its chunked framing."""
        self._body_size += count

    def pause_body(self) -> None:
        """Stop reading until `resume_body`. The deadline of the body stops too."""
        if self._paused_at is None and self.phase is ConnectionPhase.BODY:
            self._paused_at = self.clock.seconds()
            self._cancel_read_deadline()
            self._networkProducer.pauseProducing()

    def resume_body(self) -> None:
        """Read again; the deadline of the body goes on."""
        if self._paused_at is not None:
            left, self._paused_at = self._window_end - self._paused_at, None
            self._networkProducer.resumeProducing()
            if self.phase is ConnectionPhase.BODY:
                self._begin_window(left)

    def _begin_window(self, seconds: float) -> None:
        self._window_end = self.clock.seconds() + seconds
        self.set_read_deadline(seconds, self._check_rate)

    def allContentReceived(self) -> None:
        """Enter the phase RESPONSE."""
        self.phase = ConnectionPhase.RESPONSE
        self.resume_body()  # or a disconnect would go unnoticed
        self._cancel_read_deadline()
        super().allContentReceived()

    # What the client takes

    def write(self, data: bytes) -> None:
        """Write a part of a response."""
        self._count(len(data))
        super().write(data)

    def writeSequence(self, iovec: Any) -> None:
        """Write parts of a response in one piece."""
        self.write(b"".join(iovec))

    def _count(self, size: int) -> None:
        if not self._waitingForTransport:
            # A stream goes on for long, and it has hardly anything of all that was before.
            self._unsent = min(self._unsent, _TRANSPORT_BUFFER)
        self._unsent += size

    def pauseProducing(self) -> None:
        """Set the deadline for the client: the transport's buffer is full."""
        super().pauseProducing()
        self.set_write_deadline(self._write_timeout())

    def resumeProducing(self) -> None:
        """Cancel that deadline: the client has taken all that was written."""
        self._unsent = 0
        self._cancel_write_deadline()
        super().resumeProducing()
        self._finish_answered()

    def requestDone(self, request: PendingRequest) -> None:
        """Continue with the next request once the client has taken most of this response.

        Otherwise pipelined requests would pile up responses in memory. If the next request is
        already here, it waits for another turn of the reactor: one read can bring 2,000 requests.
        """
        self._answered = request
        if self.persistent and self._waitingForTransport:
            return
        if self.persistent and (self._buffer or any(self._dataBuffer)):
            self.set_read_deadline(0, self._finish_answered)
        else:
            self._finish_answered()

    def _finish_answered(self) -> None:
        """Finish the answered request and take the next, unless the client is slow."""
        if self._answered is None or (self.persistent and self._waitingForTransport):
            return
        request, self._answered = self._answered, None
        if self.persistent:
            self.phase = ConnectionPhase.IDLE
            self.set_read_deadline(self.http_settings.idle_timeout, self.loseConnection)
        super().requestDone(request)

    # Deadlines

    def set_read_deadline(self, seconds: float, on_timeout: Callable[[], object]) -> None:
        """Call `on_timeout` in `seconds` in place of the previous deadline for received bytes."""
        self._cancel_read_deadline()
        self._read_deadline = self.clock.callLater(seconds, on_timeout)

    def _cancel_read_deadline(self) -> None:
        _cancel(self._read_deadline)
        self._read_deadline = None

    def _cancel_write_deadline(self) -> None:
        _cancel(self._write_deadline)
        self._write_deadline = None

    def set_write_deadline(self, seconds: float) -> None:
        """Abort in `seconds`, unless the client takes all before that."""
        self._cancel_write_deadline()
        self._write_deadline = self.clock.callLater(seconds, self.forceAbortClient)

    def _write_timeout(self) -> float:
        """Return the seconds in which the client has to take what was written."""
        return (
            self.http_settings.rate_window_seconds
            + self._unsent / self.http_settings.min_bytes_per_second
        )

    def _check_rate(self) -> None:
        """Check that enough of the body has arrived since the last check."""
        if (
            self._body_size
            >= self.http_settings.rate_window_seconds * self.http_settings.min_bytes_per_second
        ):
            self._body_size = 0
            self._begin_window(self.http_settings.rate_window_seconds)
        else:
            self.on_body_timeout()

    def _on_head_deadline(self) -> None:
        if self.phase is ConnectionPhase.NEW:
            self.loseConnection()
        else:
            self.on_head_timeout()


def _cancel(call: IDelayedCall | None) -> None:
    if call is not None and call.active():
        call.cancel()
