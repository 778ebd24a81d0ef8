"""Streams of events in one response: SSE and JSON Lines.

A stream has one piece of bounded size on its way, and reads the next one when the transport has
taken it. Each piece waits for another turn of the reactor, so many streams progress together.
"""

from __future__ import annotations

from collections.abc import Callable
from socket import AF_INET, AF_INET6, SO_SNDBUF, SOL_SOCKET, socket
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.interfaces import IPushProducer, IReactorTime, ISystemHandle
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.web.http import Request
from zope.interface import implementer

from tawebeval.core.framing import StreamFraming
from tawebeval.deferreds import Condition
from tawebeval.errors import DiscardedCursor
from tawebeval.evaluations.archive_reader import EventSubscription
from tawebeval.evaluations.readers import ReaderConnection, UnmeasuredConnection
from tawebeval.web.server.transport import ClientReadProgress, unwrap_tls

MAX_STREAM_WRITE_BYTES = 64 * 1024
"""Bytes of JSON Lines framed and written at once; a single larger event is written whole."""

_PROBE_INTERVAL = 0.25  # seconds between checks of a slow client, which holds back its evaluator
_SEND_BUFFER = 64 * 1024  # bytes; Linux doubles them, and half would stall loopback

log = Logger()


@implementer(IPushProducer)
@attrs.define(eq=False)
class StreamFlowControl:
    """The producer of a stream, which waits until the transport takes more."""

    clock: IReactorTime
    _is_paused: bool = False
    _is_stopped: bool = False
    _resumed: Condition = attrs.field(factory=Condition)

    def pauseProducing(self) -> None:
        """Pause: the transport's buffer is full."""
        self._is_paused = True

    def resumeProducing(self) -> None:
        """Resume: the transport's buffer is empty."""
        self._is_paused = self._is_stopped
        self._resumed.notify()

    def stopProducing(self) -> None:
        """Pause for good: the connection is about to end."""
        self._is_paused = self._is_stopped = True

    async def wait_until_ready(self) -> None:
        """Return in another turn of the reactor, once the transport takes more."""
        await deferLater(self.clock, 0)
        while self._is_paused:
            await self._resumed.wait()


async def write_events(
    subscription: EventSubscription,
    flow_control: StreamFlowControl,
    framing: StreamFraming,
    write: Callable[[bytes], object],
    send_heartbeat: Callable[[], object],
    heartbeat_seconds: float,
) -> None:
    """Write the events of `subscription`, from its position to the end of the evaluation.

    `send_heartbeat()` is called after each `heartbeat_seconds` seconds without an event. Raises:
    DiscardedCursor, if a reader has discarded events before an observer was sent them.
    """
    with subscription:
        write(framing.first_bytes)
        while not subscription.has_ended:
            batch = subscription.read_events(MAX_STREAM_WRITE_BYTES)
            if batch.count:
                write(framing.encode_events(subscription.read_cursor - batch.count, batch))
            elif subscription.probe_client_if_evaluator_waits():
                await _await_change(
                    subscription.wait_for_events().addTimeout(_PROBE_INTERVAL, flow_control.clock)
                )
            elif not await _await_change(
                subscription.wait_for_events().addTimeout(heartbeat_seconds, flow_control.clock)
            ):
                await flow_control.wait_until_ready()
                send_heartbeat()
            # Also right after a write: more output may arrive in the same turn.
            await flow_control.wait_until_ready()
            subscription.note_events_written()
        write(framing.last_bytes)


async def _await_change(change: Deferred[None]) -> bool:
    try:
        await change
    except DeferredTimeout:
        return False
    return True


async def send_stream(
    request: Request,
    subscription: EventSubscription,
    framing: StreamFraming,
    clock: IReactorTime,
    heartbeat_seconds: float,
) -> None:
    """Answer with the events in this framing; the response ends with the evaluation.

    The connection of an observer is closed at discarded events: resuming there is 410.
    """
    channel = request.channel
    subscription.reader_connection = prepare_reader_connection(channel.transport)
    flow = StreamFlowControl(clock)
    request.registerProducer(flow, True)
    try:
        await write_events(
            subscription,
            flow,
            framing,
            request.write,
            lambda: request.write(framing.heartbeat_bytes),
            heartbeat_seconds,
        )
    except CancelledError:  # the client has gone
        raise
    except Exception as error:  # noqa: BLE001  (a begun response can only be aborted)
        if not isinstance(error, DiscardedCursor):
            log.failure("defect: a stream failed")
        channel.forceAbortClient()
        await Deferred()
    request.unregisterProducer()


def prepare_reader_connection(transport: Any) -> ReaderConnection:
    """Return the connection's progress for a subscription; limit its send buffer.

    Bytes in the kernel's send buffer are lost if the connection breaks.
    """
    transport = unwrap_tls(transport)
    handle = transport.getHandle() if ISystemHandle.providedBy(transport) else None
    if not isinstance(handle, socket):
        return UnmeasuredConnection()
    handle.setsockopt(SOL_SOCKET, SO_SNDBUF, _SEND_BUFFER)
    return (
        ClientReadProgress(handle)
        if handle.family in (AF_INET, AF_INET6)
        else UnmeasuredConnection()
    )
