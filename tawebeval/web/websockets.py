"""WebSockets (RFC 6455): each event of one evaluation is a message.

A client may acknowledge events by a text message `{"acknowledge": N}` for N messages received.
Twisted has the protocol. This module and `server.channel` add: problem documents for failed
handshakes, a limit for what a client sends, and a close after which the last messages arrive.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated

import attrs
import msgspec
from h11 import LocalProtocolError as NotHTTP
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http_headers import Headers
from twisted.web.server import Request
from twisted.web.websocket import WebSocketResource, WebSocketTransport
from wsproto import ConnectionType
from wsproto.handshake import WEBSOCKET_UPGRADE, WEBSOCKET_VERSION, H11Handshake
from wsproto.utilities import ProtocolError

from tawebeval.core.framing import WEBSOCKET_MESSAGES
from tawebeval.errors import (
    DiscardedCursor,
    MalformedRequest,
    ServerBusy,
    UnsupportedWebSocketVersion,
)
from tawebeval.evaluations.archive_reader import EventSubscription
from tawebeval.web.server.request import ApiRequest
from tawebeval.web.server.request_headers import get_header_elements, get_header_values
from tawebeval.web.streams import (
    StreamFlowControl,
    StreamTurns,
    write_events,
)

_COMPLETE = 1000
"""Close code after the last event."""

_FAILED = 1011
"""Close code of a defect of the daemon."""

_NOT_SENT = 1008
"""Close code for an acknowledgement of messages that were not sent."""

_TRY_AGAIN = 1013
"""Close code if events cannot be read now (IANA's registry of close codes)."""

_DISCARDED = 4410
"""Close code if an acknowledgement has discarded events before they were sent."""

_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")  # RFC 6455, section 4.1

log = Logger()


class _Acknowledgement(msgspec.Struct):
    """A client's message: the number of messages it has received on this WebSocket."""

    acknowledge: Annotated[int, msgspec.Meta(ge=0)]


_decode = msgspec.json.Decoder(_Acknowledgement).decode


def _ignore(number: int) -> bool:
    """Ignore a message or an acknowledgement: no events are being sent."""
    return True


@attrs.define
class EventWebSocket:
    """The receiver of one WebSocket, as Twisted drives it.

    `acknowledge_events(n)` acknowledges n messages, and returns False if fewer were sent.
    `on_message(size)` is called before it with the size of the client's message in bytes.
    """

    on_message: Callable[[int], object] = _ignore
    acknowledge_events: Callable[[int], bool] = _ignore
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
        """Acknowledge events; ignore any other message."""
        try:
            count = _decode(message).acknowledge
        except (msgspec.DecodeError, RecursionError):
            return
        self.on_message(len(message))
        if not self.acknowledge_events(count):
            self.transport.loseConnection(_NOT_SENT)

    def bytesMessageReceived(self, data: bytes | bytearray) -> None:
        """Ignore a binary message."""

    def connectionLost(self, reason: Failure) -> None:
        """Do nothing: the request is notified, too."""


def is_websocket_request(request: Request) -> bool:
    """Tell whether the client asks for an upgrade to WebSocket. Raises: HeaderTooLarge."""
    offered = get_header_elements(request.requestHeaders, "Upgrade")
    return (
        request.method == b"GET"
        and request.clientproto == b"HTTP/1.1"
        and any(protocol.lower() == WEBSOCKET_UPGRADE.decode() for protocol in offered)
    )


def prepare_handshake(request: Request) -> None:
    """Check a handshake, and keep of its request only the headers that a handshake needs.

    Raises: UnsupportedWebSocketVersion, MalformedRequest, HeaderTooLarge.
    """
    version = _join_header(request.requestHeaders, "Sec-WebSocket-Version")
    if version and version != WEBSOCKET_VERSION:
        _set_version(request)
        # RFC 9110, section 15.5.22: 426 names the protocol.
        request.setHeader(b"Upgrade", WEBSOCKET_UPGRADE)
        request.setHeader(b"Connection", b"Upgrade")
        raise UnsupportedWebSocketVersion(
            f"Sec-WebSocket-Version: {version[:80].decode('latin-1')!r} is not supported; "
            f"supported: {WEBSOCKET_VERSION.decode()}"
        )
    key = _join_header(request.requestHeaders, "Sec-WebSocket-Key")
    if not _KEY.fullmatch(key):  # wsproto does not check it
        raise _refuse_handshake(
            request,
            f"the Sec-WebSocket-Key {key[:80].decode('latin-1')!r} is not the base64 of 16"
            " bytes (24 characters that end in '==')",
        )
    # Twisted and wsproto read only the last line of each, only one protocol, and all other headers.
    pairs = [
        (b"Host", _join_header(request.requestHeaders, "Host")),
        (b"Upgrade", WEBSOCKET_UPGRADE),
        (b"Connection", _join_header(request.requestHeaders, "Connection")),
        (b"Sec-WebSocket-Version", version),
        (b"Sec-WebSocket-Key", key),
    ]
    request.requestHeaders = Headers({name: [value] for name, value in pairs})
    try:
        H11Handshake(ConnectionType.SERVER).initiate_upgrade_connection(pairs, request.path)
    except UnicodeError:  # whose message speaks of codecs
        raise _refuse_handshake(
            request, "the host is not a name, or a header is not ASCII"
        ) from None
    except (ProtocolError, NotHTTP) as error:
        raise _refuse_handshake(request, str(error)) from None


def _refuse_handshake(request: Request, wrong: str) -> MalformedRequest:
    """Return the refusal of a handshake; set the header with the supported version."""
    _set_version(request)
    return MalformedRequest(f"malformed WebSocket handshake: {wrong}")


def _join_header(headers: Headers, name: str) -> bytes:
    """Return a list header, whether it is sent in one line or in several."""
    return b", ".join(get_header_values(headers, name))


def _set_version(request: Request) -> None:
    request.setHeader(b"Sec-WebSocket-Version", WEBSOCKET_VERSION)


async def send_websocket_messages(
    request: ApiRequest,
    subscription: EventSubscription | None,
    turns: StreamTurns,
    heartbeat_seconds: float,
) -> None:
    """Upgrade the connection to a WebSocket and send the events until the client is gone.

    `subscription` is None after the last event: then only a close frame is sent. The handshake must
    have been prepared. `heartbeat_seconds` is the pause between pings, in seconds.
    """
    channel = request.channel
    events = EventWebSocket()
    WebSocketResource(events).render_GET(request)
    assert channel.websocket is not None, "the handshake was prepared"
    events.on_message = channel.websocket.exempt_message_from_limit
    request.setResponseCode(HTTPStatus.SWITCHING_PROTOCOLS)  # as it has answered by itself
    code = _COMPLETE
    if subscription is not None:
        begin = subscription.read_cursor
        events.acknowledge_events = lambda count: subscription.acknowledge(begin + count)
        flow = StreamFlowControl(turns.clock, turns, request.caller)
        request.registerProducer(flow, True)
        try:
            ping = events.transport.ping
            await write_events(
                subscription, flow, WEBSOCKET_MESSAGES, channel.write, ping, heartbeat_seconds
            )
        except CancelledError:  # the client has gone
            raise
        except DiscardedCursor:
            code = _DISCARDED
        except ServerBusy:
            code = _TRY_AGAIN
        except Exception:  # noqa: BLE001  (a client learns of every end)
            log.failure("defect: a stream failed")
            code = _FAILED
        finally:
            events.acknowledge_events = _ignore
    channel.close_websocket(code)
    await Deferred()
