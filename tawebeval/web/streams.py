"""Streams: the events of one evaluation on one connection, as fast as it takes them.

A stream has a piece of bounded size on its way, and asks for the next one when the
connection has taken that. Each gets its turn of the reactor for a piece, so that many
streams go forward together.
"""

from __future__ import annotations

from collections.abc import Callable
from socket import AF_INET, AF_INET6, SO_SNDBUF, SOL_SOCKET, socket
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as NothingHappened
from twisted.internet.interfaces import IPushProducer, IReactorTime, ISystemHandle
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.web.http import Request
from zope.interface import implementer

from tawebeval.core.framing import Framing
from tawebeval.deferreds import Condition
from tawebeval.evaluations.records import Connection, Subscription, UnprobedConnection
from tawebeval.web.server.transport import SocketProgress, below_tls

PIECE = 64 * 1024
"""Bytes of JSON Lines that are framed and written at once, save that one event always is."""

_LOOK = 0.25  # seconds between two looks at what a client has read that holds its evaluator
_SEND_BUFFER = 64 * 1024  # bytes, of which Linux makes twice as many; half would stall loopback

log = Logger()


@implementer(IPushProducer)
@attrs.define(eq=False)
class Flow:
    """Tells when a connection takes more, which after its end it never does."""

    clock: IReactorTime
    _paused: bool = False
    _stopped: bool = False
    _resumed: Condition[None] = attrs.field(factory=Condition)

    def pauseProducing(self) -> None:
        """Wait: the connection has enough."""
        self._paused = True

    def resumeProducing(self) -> None:
        """Go on: the connection has taken what it was given."""
        self._paused = self._stopped
        self._resumed.notify(None)

    def stopProducing(self) -> None:
        """Wait for ever: the connection is about to end, and that is told in another way."""
        self._paused = self._stopped = True

    async def ready(self) -> None:
        """Return in another turn of the reactor, when the connection takes more."""
        await deferLater(self.clock, 0)
        while self._paused:
            await self._resumed.wait()


async def stream(
    following: Subscription,
    flow: Flow,
    framing: Framing,
    write: Callable[[bytes], object],
    beat: Callable[[], object],
    heartbeat: float,
) -> None:
    """Write all events, from where `following` stands to the end of the evaluation.

    Whenever there was none for `heartbeat` seconds, `beat()` is called to show that the
    connection is alive.
    """
    with following:
        write(framing.begin)
        while not following.has_ended:
            batch = following.read(PIECE)
            if batch.count:
                write(framing.events(following.position - batch.count, batch))
            elif following.probe_client():
                await _happens(following.wait_for_events().addTimeout(_LOOK, flow.clock))
            elif not await _happens(following.wait_for_events().addTimeout(heartbeat, flow.clock)):
                await flow.ready()
                beat()
            # Also when something has just been printed: more may come in the same turn.
            await flow.ready()
            following.note_written()
        write(framing.end)


async def _happens(change: Deferred[None]) -> bool:
    try:
        await change
    except NothingHappened:
        return False
    return True


async def send_stream(
    request: Request,
    following: Subscription,
    framing: Framing,
    clock: IReactorTime,
    heartbeat: float,
) -> None:
    """Answer with the events, framed so; the answer ends with the evaluation."""
    channel = request.channel
    following.connection = connection_of(channel.transport)
    flow = Flow(clock)
    request.registerProducer(flow, True)
    try:
        await stream(
            following,
            flow,
            framing,
            request.write,
            lambda: request.write(framing.heartbeat),
            heartbeat,
        )
    except CancelledError:  # the client has gone
        raise
    except Exception:  # noqa: BLE001  (what was begun can only be broken off)
        log.failure("a stream failed")
        channel.forceAbortClient()
        await Deferred()
    request.unregisterProducer()


def connection_of(transport: Any) -> Connection:
    """Return what shows how far the client of a stream reads on this transport.

    The kernel is to keep little of what is sent: it is lost when the connection breaks.
    """
    transport = below_tls(transport)
    handle = transport.getHandle() if ISystemHandle.providedBy(transport) else None
    if not isinstance(handle, socket):
        return UnprobedConnection()
    handle.setsockopt(SOL_SOCKET, SO_SNDBUF, _SEND_BUFFER)
    return SocketProgress(handle) if handle.family in (AF_INET, AF_INET6) else UnprobedConnection()
