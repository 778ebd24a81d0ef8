"""Streams of events in one response: SSE, JSON Lines and WebSockets (RFC 6455).

A stream has one piece of bounded size on its way, and reads the next one when the transport has
taken it. Each piece, the start of a stream, and what a WebSocket receives wait for another turn of
the reactor, and those of one turn take at most `MAX_STREAM_TURN_SECONDS`, so that other requests
are served in between (`StreamScheduler`). Readers at the same place share the frames of a piece
(`FrameCache`).

On a WebSocket each event is a message; what the client sends has no meaning. Twisted has the
protocol. This module and `server.channel` add: problem documents for failed handshakes, a limit for
what a client sends, and a close after which the last messages arrive.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from time import perf_counter

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IPushProducer, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http_headers import Headers
from twisted.web.server import Request
from twisted.web.websocket import WebSocketResource, WebSocketTransport
from wsproto.handshake import WEBSOCKET_UPGRADE, WEBSOCKET_VERSION
from zope.interface import implementer

from tawebeval.core.events import WEBSOCKET_FRAMING, EventBatch, StreamFraming
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.deferreds import Condition
from tawebeval.errors import (
    DiscardedCursor,
    MalformedRequest,
    RequestError,
    ServerBusy,
    UnsupportedWebSocketVersion,
)
from tawebeval.evaluations.reading import Subscription
from tawebeval.web.server.channel import ApiRequest
from tawebeval.web.server.messages import get_header_elements, get_header_values, set_headers

MAX_STREAM_WRITE_BYTES = 64 * 1024
"""Bytes of JSON Lines framed and written at once; a single larger event is written whole."""

MAX_CACHED_BATCHES = 8
"""Batches that are kept, with their frames, for other readers: some 150 KiB each."""

MAX_STREAM_TURN_SECONDS = 0.005
"""Seconds in which streams go on in one turn of the reactor; one stream may exceed them."""

log = Logger()


HEARTBEAT_SECONDS = 15
"""Seconds of silence before a heartbeat: proxies close silent connections, often after 60."""


@attrs.define
class FrameCache:
    """A cache of the batches that were framed last, for other readers at the same place."""

    # By encoder, cursor and size: the lines, and their frames.
    _framed: dict[tuple[object, int, int], tuple[bytes, bytes]] = attrs.field(factory=dict)

    def frame_batch(self, framing: StreamFraming, begin_cursor: int, batch: EventBatch) -> bytes:
        """Return a batch, which begins at a cursor, in a framing."""
        key = (framing.encode_events, begin_cursor, len(batch.lines))
        found = self._framed.get(key)
        if found is not None and found[0] == batch.lines:  # of the same evaluation
            return found[1]
        framed = framing.encode_events(begin_cursor, batch)
        if len(batch.lines) <= MAX_STREAM_WRITE_BYTES:
            while len(self._framed) >= MAX_CACHED_BATCHES:
                del self._framed[next(iter(self._framed))]
            self._framed[key] = batch.lines, framed
        return framed


@attrs.define(eq=False)
class StreamScheduler:
    """The scheduler of streams: each turn of the reactor has some milliseconds for those that wait.

    The callers take turns: however many streams one has, a stream of another comes next.
    """

    clock: IReactorTime
    frame_cache: FrameCache = attrs.field(factory=FrameCache)
    # By caller; those that begin to wait in a turn have to wait for the next.
    _waiting: dict[str, dict[Deferred[None], None]] = attrs.field(factory=dict)
    _arrived: dict[str, dict[Deferred[None], None]] = attrs.field(factory=dict)
    _is_due: bool = False

    def wait_for_turn(self, caller: str) -> Deferred[None]:
        """Return a Deferred of another turn. It can be cancelled."""
        turn: Deferred[None] = Deferred(lambda turn: self._forget(caller, turn))
        self._arrived.setdefault(caller, {})[turn] = None
        self._plan()
        return turn

    def _forget(self, caller: str, turn: Deferred[None]) -> None:
        for group in (self._waiting, self._arrived):
            group.get(caller, {}).pop(turn, None)

    def _plan(self) -> None:
        if not self._is_due:
            self._is_due = True
            self.clock.callLater(0, self._run)

    def _run(self) -> None:
        arrived, self._arrived = self._arrived, {}
        for caller, turns in arrived.items():
            self._waiting.setdefault(caller, {}).update(turns)
        end = perf_counter() + MAX_STREAM_TURN_SECONDS
        while self._waiting and perf_counter() < end:
            caller = next(iter(self._waiting))
            turns = self._waiting.pop(caller)
            if not turns:  # cancelled
                continue
            turn = next(iter(turns))
            del turns[turn]
            if turns:
                self._waiting[caller] = turns
            turn.callback(None)
        self._is_due = False
        if self._waiting or self._arrived:
            self._plan()


@implementer(IPushProducer)
@attrs.define(eq=False)
class StreamFlowControl:
    """The producer of a stream of `caller`, which waits until the transport takes more."""

    scheduler: StreamScheduler
    caller: str = ANONYMOUS_CALLER
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
        await self.scheduler.wait_for_turn(self.caller)
        while self._is_paused:
            await self._resumed.wait()
            await self.scheduler.wait_for_turn(self.caller)  # many may be resumed in one turn


async def write_events(
    subscription: Subscription,
    flow_control: StreamFlowControl,
    framing: StreamFraming,
    write: Callable[[bytes], object],
    send_heartbeat: Callable[[], object],
) -> None:
    """Write the events of `subscription`, from its position to the end of the evaluation.

    `send_heartbeat()` is called after each `HEARTBEAT_SECONDS` without an event. Raises:
    DiscardedCursor, if an acknowledgement has discarded events before they were sent; ServerBusy.
    """
    with subscription.reader_context:
        write(framing.first_bytes)
        while not subscription.has_ended:
            batch = await subscription.read_events(MAX_STREAM_WRITE_BYTES)
            if batch.count:
                begin = subscription.last_read_cursor - batch.count
                write(flow_control.scheduler.frame_cache.frame_batch(framing, begin, batch))
            else:
                clock = flow_control.scheduler.clock
                if not await subscription.wait_for_events(HEARTBEAT_SECONDS, clock):
                    await flow_control.wait_until_ready()
                    send_heartbeat()
            # Also right after a write: more output may arrive in the same turn.
            await flow_control.wait_until_ready()
        write(framing.last_bytes)


async def send_stream(
    request: ApiRequest,
    subscription: Subscription,
    framing: StreamFraming,
    scheduler: StreamScheduler,
) -> None:
    """Answer with the events in this framing; the response ends with the evaluation.

    At discarded events the connection is closed: resuming there is 410.
    """
    channel = request.channel
    flow = StreamFlowControl(scheduler, request.caller)
    request.registerProducer(flow, True)
    try:
        beat = partial(request.write, framing.heartbeat_bytes)
        await write_events(subscription, flow, framing, request.write, beat)
    except CancelledError:  # the client has gone
        raise
    except Exception as error:  # noqa: BLE001  (a begun response can only be aborted)
        if not isinstance(error, RequestError):
            log.failure("defect: a stream failed")
        channel.forceAbortClient()
        await Deferred()
    request.unregisterProducer()


async def send_body(request: ApiRequest, body: bytes, scheduler: StreamScheduler) -> bytes:
    """Return a body for the response, or write a large one in parts, and return the empty rest.

    A client that takes none of it has one part in memory.
    """
    if request.method != b"GET" or len(body) <= MAX_STREAM_WRITE_BYTES:
        return body
    flow = StreamFlowControl(scheduler, request.caller)
    request.registerProducer(flow, True)
    for begin in range(0, len(body), MAX_STREAM_WRITE_BYTES):
        request.write(body[begin : begin + MAX_STREAM_WRITE_BYTES])
        await flow.wait_until_ready()
    request.unregisterProducer()
    return b""


# Close codes: after the last event; of a defect of the daemon; if events cannot be read now (IANA's
# registry of close codes); if an acknowledgement has discarded events before they were sent.
_COMPLETE, _FAILED, _TRY_AGAIN, _DISCARDED = 1000, 1011, 1013, 4410
_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")  # RFC 6455, section 4.1


@attrs.define
class EventWebSocket:
    """The receiver of one WebSocket, as Twisted drives it."""

    transport: WebSocketTransport = attrs.field(init=False)

    def buildProtocol(self, request: Request) -> EventWebSocket:
        """Return this receiver."""
        return self

    def negotiationStarted(self, transport: WebSocketTransport) -> None:
        """Keep the transport."""
        self.transport = transport

    def negotiationFinished(self) -> None:
        """Do nothing: `send_websocket_messages` goes on."""

    def pongReceived(self, payload: bytes) -> None:
        """Ignore the answer to a ping, which only keeps the connection open."""

    def textMessageReceived(self, message: str) -> None:
        """Ignore a message of text."""

    def bytesMessageReceived(self, data: bytes | bytearray) -> None:
        """Ignore a binary message."""

    def connectionLost(self, reason: Failure) -> None:
        """Do nothing: the request is notified, too."""


def is_websocket_request(request: Request) -> bool:
    """Tell whether the client asks for an upgrade to WebSocket. Raises: HeaderTooLarge."""
    offered = get_header_elements(request.requestHeaders, "Upgrade")
    if not offered or (request.method, request.clientproto) != (b"GET", b"HTTP/1.1"):
        return False
    return any(protocol.lower() == WEBSOCKET_UPGRADE.decode() for protocol in offered)


def check_websocket_handshake(request: Request) -> None:
    """Check a handshake, which Twisted would refuse in plain text; keep no other headers.

    Raises: UnsupportedWebSocketVersion, MalformedRequest, HeaderTooLarge.
    """
    headers = request.requestHeaders
    version, key = (
        b", ".join(get_header_values(headers, name))
        for name in ("Sec-WebSocket-Version", "Sec-WebSocket-Key")
    )
    supported = {b"Sec-WebSocket-Version": WEBSOCKET_VERSION}
    if version != WEBSOCKET_VERSION:
        # RFC 9110, section 15.5.22: 426 names the protocol.
        upgrade = {b"Upgrade": WEBSOCKET_UPGRADE, b"Connection": b"Upgrade"}
        set_headers(request, {**supported, **upgrade})
        raise UnsupportedWebSocketVersion(
            f"Sec-WebSocket-Version: {version[:80].decode('latin-1')!r} is not supported; "
            f"supported: {WEBSOCKET_VERSION.decode()}"
        )
    wrong = ""
    if not _KEY.fullmatch(key):  # wsproto does not check it
        wrong = (
            f"the Sec-WebSocket-Key {key[:80].decode('latin-1')!r} is not the base64 of 16 bytes"
            " (24 characters that end in '==')"
        )
    elif "upgrade" not in map(str.lower, get_header_elements(headers, "Connection")):
        wrong = "the header Connection has no `Upgrade`"
    if wrong:
        set_headers(request, supported)
        raise MalformedRequest(f"malformed WebSocket handshake: {wrong}")
    # wsproto reads only the last line of each, and decodes the host, which nothing needs.
    request.requestHeaders = Headers(
        {
            b"Host": [b"localhost"],
            b"Upgrade": [WEBSOCKET_UPGRADE],
            b"Connection": [b"Upgrade"],
            b"Sec-WebSocket-Version": [version],
            b"Sec-WebSocket-Key": [key],
        }
    )


async def send_websocket_messages(
    request: ApiRequest, subscription: Subscription | None, scheduler: StreamScheduler
) -> None:
    """Upgrade the connection to a WebSocket and send the events until the client is gone.

    `subscription` is None after the last event: then only a close frame is sent. The handshake must
    have been prepared.
    """
    channel = request.channel
    events = EventWebSocket()
    WebSocketResource(events).render_GET(request)
    channel.wait_for_websocket_turn = partial(scheduler.wait_for_turn, request.caller)
    request.setResponseCode(HTTPStatus.SWITCHING_PROTOCOLS)  # as it has answered by itself
    code = _COMPLETE
    if subscription is not None:
        flow = StreamFlowControl(scheduler, request.caller)
        request.registerProducer(flow, True)
        try:
            ping = events.transport.ping
            await write_events(subscription, flow, WEBSOCKET_FRAMING, channel.write, ping)
        except CancelledError:  # the client has gone
            raise
        except DiscardedCursor:
            code = _DISCARDED
        except ServerBusy:
            code = _TRY_AGAIN
        except Exception:  # noqa: BLE001  (a client learns of every end)
            log.failure("defect: a stream failed")
            code = _FAILED
    channel.close_websocket(code)
    await Deferred()
