"""WebSockets (RFC 6455): the events of one evaluation, each a message.

In the other direction a client may say what it has: a text message `{"acknowledge": N}` for N of
the messages. The protocol is Twisted's. What it leaves to others is here and in the channel:
handshakes that fail are answered with problem documents, what a client may send is bounded, and
the connection is closed in such a way that the last messages arrive.
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
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http_headers import Headers
from twisted.web.server import Request
from twisted.web.websocket import WebSocketResource, WebSocketTransport
from wsproto import ConnectionType
from wsproto.handshake import WEBSOCKET_UPGRADE, WEBSOCKET_VERSION, H11Handshake
from wsproto.utilities import ProtocolError

from tawebeval.core.framing import MESSAGES
from tawebeval.errors import MalformedRequest, UnsupportedVersion
from tawebeval.evaluations.records import Subscription
from tawebeval.web.server.request import ApiRequest
from tawebeval.web.streams import Flow, connection_of, stream

COMPLETE = 1000
"""The close code after the last event."""

FAILED = 1011
"""That of a defect of ours."""

NOT_SENT = 1008
"""That of an acknowledgement of messages that were not sent."""

_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")  # RFC 6455, section 4.1

log = Logger()


class Acknowledgement(msgspec.Struct):
    """What a client says of the messages of this WebSocket: it has so many."""

    acknowledge: Annotated[int, msgspec.Meta(ge=0)]


_decode = msgspec.json.Decoder(Acknowledgement).decode


def _pass_over(count: int) -> bool:
    """Take an acknowledgement of which nothing follows: nobody sends any more, or yet."""
    return True


@attrs.define
class EventSocket:
    """One WebSocket, as Twisted drives it.

    `acknowledge(n)` takes from the client that it has n of the messages, and tells whether that
    many were sent. `understood(size)` is called before, with the size of what the client said.
    """

    understood: Callable[[int], object]
    acknowledge: Callable[[int], bool] = _pass_over
    transport: WebSocketTransport = attrs.field(init=False)

    def buildProtocol(self, request: Request) -> EventSocket:
        """Return what drives the WebSocket of this request: this."""
        return self

    def negotiationStarted(self, transport: WebSocketTransport) -> None:
        """Take the transport."""
        self.transport = transport

    def negotiationFinished(self) -> None:
        """Do nothing: the coroutine that has begun it goes on."""

    def pongReceived(self, payload: bytes) -> None:
        """Pass over the answer to a ping, which was to keep the connection open."""

    def textMessageReceived(self, message: str) -> None:
        """Take an acknowledgement, and pass over what is none."""
        try:
            count = _decode(message).acknowledge
        except (msgspec.DecodeError, RecursionError):
            return
        self.understood(len(message))
        if not self.acknowledge(count):
            self.transport.loseConnection(NOT_SENT)

    def bytesMessageReceived(self, data: bytes | bytearray) -> None:
        """Pass over what a client says."""

    def connectionLost(self, reason: Failure) -> None:
        """Do nothing: the request is told, too."""


def wants_websocket(request: Request) -> bool:
    """Tell whether the client asks for a WebSocket instead of an answer."""
    offered = _list(request.requestHeaders, b"Upgrade").lower().split(b",")
    return (
        request.method == b"GET"
        and request.clientproto == b"HTTP/1.1"
        and any(protocol.strip() == WEBSOCKET_UPGRADE for protocol in offered)
    )


def take_handshake(request: Request) -> None:
    """Make of what asks for a WebSocket, among other protocols maybe, what asks for nothing else.

    Raises UnsupportedVersion and MalformedRequest for a handshake that would fail.
    """
    headers: Headers = request.requestHeaders
    version = _list(headers, b"Sec-WebSocket-Version")
    if version and version != WEBSOCKET_VERSION:
        _tell_version(request)
        # RFC 9110, 15.5.22: so that it is known to what to upgrade.
        request.setHeader(b"Upgrade", WEBSOCKET_UPGRADE)
        request.setHeader(b"Connection", b"Upgrade")
        raise UnsupportedVersion(
            f"Sec-WebSocket-Version: {version[:80].decode('latin-1')!r} is not known here; "
            f"there is {WEBSOCKET_VERSION.decode()}"
        )
    key = _list(headers, b"Sec-WebSocket-Key")
    if not _KEY.fullmatch(key):  # which what follows does not look at
        raise _broken(
            request,
            f"the Sec-WebSocket-Key {key[:80].decode('latin-1')!r} is not 16 bytes in base64,"
            " which are 24 characters that end in '=='",
        )
    # What follows takes the last line of each for all there is, and one protocol only.
    headers.setRawHeaders(b"Upgrade", [WEBSOCKET_UPGRADE])
    headers.setRawHeaders(b"Connection", [_list(headers, b"Connection")])
    pairs = [(name, value) for name, values in headers.getAllRawHeaders() for value in values]
    try:
        H11Handshake(ConnectionType.SERVER).initiate_upgrade_connection(pairs, request.path)
    except UnicodeError:  # which speaks of codecs
        raise _broken(request, "its host is no name, or a header of it is not ASCII") from None
    except (ProtocolError, NotHTTP) as error:
        raise _broken(request, str(error)) from None


def _broken(request: Request, wrong: str) -> MalformedRequest:
    """Return the refusal of a handshake, with the version that there is."""
    _tell_version(request)
    return MalformedRequest(f"this is no handshake of a WebSocket: {wrong}")


def _list(headers: Headers, name: bytes) -> bytes:
    """Return a header that is a list, whether it stands in one line or in several."""
    return b", ".join(headers.getRawHeaders(name, []))


def _tell_version(request: Request) -> None:
    request.setHeader(b"Sec-WebSocket-Version", WEBSOCKET_VERSION)


async def send_messages(
    request: ApiRequest, following: Subscription | None, clock: IReactorTime, heartbeat: float
) -> None:
    """Make a WebSocket of the connection, and send the events; only its end ends this.

    Without anybody who follows there are none. The handshake must have been taken.
    """
    channel = request.channel
    events = EventSocket(channel.socket_was_understood)
    connection = connection_of(channel.transport)
    WebSocketResource(events).render_GET(request)
    request.setResponseCode(HTTPStatus.SWITCHING_PROTOCOLS)  # as it has answered by itself
    code = COMPLETE
    if following is not None:
        following.connection = connection
        begin = following.position
        events.acknowledge = lambda count: following.acknowledge(begin + count)
        flow = Flow(clock)
        request.registerProducer(flow, True)
        try:
            ping = events.transport.ping
            await stream(following, flow, MESSAGES, channel.write, ping, heartbeat)
        except CancelledError:  # the client has gone
            raise
        except Exception:  # noqa: BLE001  (a client learns of every end)
            log.failure("a stream failed")
            code = FAILED
        finally:
            events.acknowledge = _pass_over
    channel.close_socket(code)
    await Deferred()
