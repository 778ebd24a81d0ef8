"""How slow a connection may be.

A connection is in one of a few phases: it waits for a request, its head arrives, its body
arrives, or it is being answered. Each but the last has a deadline for what the client sends;
in the last a long poll may wait as long as it likes. Besides, there is one for the client to
take what is written.
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

LINGER = 5.0  # seconds for which what a refused client still sends is read
_ON_ITS_WAY = 0.5  # seconds in which a request arrives that was sent when the end was not known
_TRANSPORT_BUFFER = 2**16  # bytes that a transport may hold before it asks to pause


class Phase(Enum):
    """What a connection is waiting for."""

    NEW = "the first byte at all"
    IDLE = "the next request"
    HEAD = "the end of a head"
    BODY = "the end of a body"
    ANSWER = "an answer, and the client to take it"
    CLOSED = "the end"  # what still comes is thrown away


class Answered(Protocol):
    """A request as far as its channel knows it while it is answered: Twisted's, or another."""

    startedWriting: bool  # noqa: N815  (the name that Twisted gave it)

    def connectionLost(self, reason: Failure) -> None:
        """Take that there is nobody to answer any more."""


class TimeoutChannel(HTTPChannel):
    """A connection with deadlines, which knows in what phase it is.

    `TimeoutMixin`, from which Twisted's own comes, is not used: any byte puts that off.
    """

    phase = Phase.NEW
    _body_size = 0  # bytes of the body that have come since the last look
    _window_end = 0.0  # when the next look is due, in seconds of the clock
    _paused: float | None = None  # since when the body is not read, in seconds of the clock
    _unsent = 0  # bytes at most that the client has yet to take of the answer
    _reading: IDelayedCall | None = None  # the deadline for what the client sends
    _writing: IDelayedCall | None = None  # the deadline for what it has to take
    _answered: Answered | None = None  # is done, save that the client has yet to take it

    @property
    @abstractmethod
    def limits(self) -> HttpSettings:
        """The settings."""

    @property
    @abstractmethod
    def clock(self) -> IReactorTime:
        """The clock of all deadlines."""

    @abstractmethod
    def head_late(self) -> None:
        """Answer a client whose request has begun, but does not come to its body."""

    @abstractmethod
    def body_late(self) -> None:
        """Answer a client whose body comes too slowly."""

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        """Forget all deadlines, and the request that was answered."""
        self.phase = Phase.CLOSED
        self._stop_reading_deadline()
        self._stop_writing_deadline()
        if self._answered is not None:
            self.requests.remove(self._answered)
            self._answered = None
        super().connectionLost(reason)

    def loseConnection(self) -> None:
        """Close it when the client has taken all; abort it when that takes too long."""
        self.phase = Phase.CLOSED
        self._stop_reading_deadline()
        if self._writing is None or not self._writing.active():
            self.take_within(self._patience())
        super().loseConnection()

    def end_our_side(self, patience: float = LINGER) -> None:
        """Close our half, and throw away what comes: unread data would reset the connection.

        Abort it after so many seconds.
        """
        if self._has_halves:
            self._stop_reading_deadline()
            self.take_within(patience)
            self._close_half()
        else:
            self.loseConnection()

    def take_last_request(self) -> None:
        """Close a connection that waits for a request, unless one is on its way to it.

        That one is answered. What is sent after our half is closed gets no answer, but no reset
        either, which the client could take for a failure of what it had asked before.
        """
        if self._waits:
            self.read_within(_ON_ITS_WAY, self._end_idle)

    @property
    def _waits(self) -> bool:
        """Whether nothing of a request has come."""
        return self.phase is Phase.NEW or self.phase is Phase.IDLE

    def _end_idle(self) -> None:
        if IReadDescriptor.providedBy(self.transport):
            # What has come by now has come in time, however late the reactor is.
            self.transport.doRead()
        if not self._waits:
            return
        if self._has_halves:
            # Nothing of ours is on its way, so in the end it is closed in good order.
            self.read_within(_ON_ITS_WAY, self.transport.loseConnection)  # type: ignore[union-attr]
            self._close_half()
        else:
            self.loseConnection()

    @property
    def _has_halves(self) -> bool:
        """Whether our side can be closed alone, as it cannot below TLS."""
        return bool(IHalfCloseableDescriptor.providedBy(self.transport))

    def _close_half(self) -> None:
        """Write nothing more, and throw away what comes."""
        self.phase = Phase.CLOSED
        self.clearLineBuffer()
        self._networkProducer.unregisterProducer()  # type: ignore[attr-defined]
        self._networkProducer.resumeProducing()
        self.transport.loseWriteConnection()  # type: ignore[union-attr]

    def forceAbortClient(self) -> None:
        """End it now, whatever is on its way."""
        self.phase = Phase.CLOSED
        self._stop_reading_deadline()
        # All transports have it, though ITransport does not.
        self.transport.abortConnection()  # type: ignore[union-attr]

    # What the client sends

    def connection_begins(self) -> None:
        """Wait for the first head."""
        self.read_within(self.limits.head_deadline, self._head_late)

    def head_begins(self) -> None:
        """Note that something of a head has come."""
        if self.phase is Phase.IDLE:
            self.phase = Phase.HEAD
            self.read_within(self.limits.head_deadline, self._head_late)
        elif self.phase is Phase.NEW:
            self.phase = Phase.HEAD  # with the deadline that the connection began with

    def allHeadersReceived(self) -> None:
        """Take the end of a head."""
        self.phase = Phase.BODY
        self._body_size = 0
        self._unsent = 0
        self._begin_window(self.limits.window)
        super().allHeadersReceived()

    def whole_request_received(self, request: Answered) -> None:
        """Take a request without a body, whose head has come at once.

        It is in `requests` until `requestDone`, and Twisted keeps what else comes as it does
        behind its own.
        """
        self.phase = Phase.ANSWER
        self._unsent = 0
        self._stop_reading_deadline()
        self.requests.append(request)
        self._handlingRequest = True
        self.setRawMode()

    def body_received(self, count: int) -> None:
        """Note that so many bytes of the body have come, without what frames them."""
        self._body_size += count

    def pause_body(self) -> None:
        """Read nothing until `resume_body`. That time is ours: it counts for no deadline."""
        if self._paused is None and self.phase is Phase.BODY:
            self._paused = self.clock.seconds()
            self._stop_reading_deadline()
            self._networkProducer.pauseProducing()

    def resume_body(self) -> None:
        """Read on, and wait for the rest of the body as long as was left when it was paused."""
        if self._paused is not None:
            left, self._paused = self._window_end - self._paused, None
            self._networkProducer.resumeProducing()
            if self.phase is Phase.BODY:
                self._begin_window(left)

    def _begin_window(self, seconds: float) -> None:
        self._window_end = self.clock.seconds() + seconds
        self.read_within(seconds, self._look_at_rate)

    def allContentReceived(self) -> None:
        """Take the end of a request."""
        self.phase = Phase.ANSWER
        self.resume_body()  # or nobody would see the client go away
        self._stop_reading_deadline()
        super().allContentReceived()

    # What the client takes

    def write(self, data: bytes) -> None:
        """Write a part of an answer."""
        self._count(len(data))
        super().write(data)

    def writeSequence(self, iovec: Any) -> None:
        """Write parts of an answer, which are sent together."""
        self.write(b"".join(iovec))

    def _count(self, size: int) -> None:
        if not self._waitingForTransport:
            # A stream goes on for long, and it has hardly anything of all that was before.
            self._unsent = min(self._unsent, _TRANSPORT_BUFFER)
        self._unsent += size

    def pauseProducing(self) -> None:
        """Wait for the client to take what was written: the transport has enough."""
        super().pauseProducing()
        self.take_within(self._patience())

    def resumeProducing(self) -> None:
        """Go on: the client has taken all that was written."""
        self._unsent = 0
        self._stop_writing_deadline()
        super().resumeProducing()
        self._end_answered()

    def requestDone(self, request: Answered) -> None:
        """Go on to the next request, once the client has taken most of this one's answer.

        Otherwise requests that were sent together would pile up answers in memory. If the next
        request is here already, it waits for another turn of the reactor: one read can bring
        2,000 requests.
        """
        self._answered = request
        if self.persistent and self._waitingForTransport:
            return
        if self.persistent and (self._buffer or any(self._dataBuffer)):
            self.read_within(0, self._end_answered)
        else:
            self._end_answered()

    def _end_answered(self) -> None:
        """End the request that is answered, and take the next one, unless the client is slow."""
        if self._answered is None or (self.persistent and self._waitingForTransport):
            return
        request, self._answered = self._answered, None
        if self.persistent:
            self.phase = Phase.IDLE
            self.read_within(self.limits.idle, self.loseConnection)
        super().requestDone(request)

    # Deadlines

    def read_within(self, seconds: float, late: Callable[[], object]) -> None:
        """Set the deadline for what the client sends: call `late` when it has passed."""
        self._stop_reading_deadline()
        self._reading = self.clock.callLater(seconds, late)

    def _stop_reading_deadline(self) -> None:
        _cancel(self._reading)
        self._reading = None

    def _stop_writing_deadline(self) -> None:
        _cancel(self._writing)
        self._writing = None

    def take_within(self, seconds: float) -> None:
        """Abort in so many seconds, unless the client has taken all before."""
        self._stop_writing_deadline()
        self._writing = self.clock.callLater(seconds, self.forceAbortClient)

    def _patience(self) -> float:
        """Return for how many seconds a client may take what was written."""
        return self.limits.window + self._unsent / self.limits.rate

    def _look_at_rate(self) -> None:
        """See whether enough of the body has come since the last look."""
        if self._body_size >= self.limits.window * self.limits.rate:
            self._body_size = 0
            self._begin_window(self.limits.window)
        else:
            self.body_late()

    def _head_late(self) -> None:
        if self.phase is Phase.NEW:
            self.loseConnection()
        else:
            self.head_late()


def _cancel(call: IDelayedCall | None) -> None:
    if call is not None and call.active():
        call.cancel()
