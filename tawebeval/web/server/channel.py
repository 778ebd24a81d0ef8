"""Connections and their site: deadlines, malformed requests, WebSockets, draining.

A connection awaits a request, receives its head, receives its body, or is answered. Each phase but
the last has a deadline for what the client sends; a long poll may be answered as late as it likes.
In every phase the client has a deadline to take what was written.

A request whose end is ambiguous is refused: a proxy could see another end, and take two requests
for one (request smuggling).

`Application` and `BodyReceiver` are the Protocols of the API, which this package does not import.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from enum import Enum
from http import HTTPStatus
from typing import Any, Protocol

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import (
    IDelayedCall,
    IHalfCloseableDescriptor,
    IProtocol,
    IReactorTime,
    IReadDescriptor,
)
from twisted.logger import Logger
from twisted.protocols.policies import ProtocolWrapper
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel, Request
from twisted.web.http_headers import Headers, InvalidHeaderName
from twisted.web.resource import IResource
from twisted.web.server import Site
from wsproto.utilities import LocalProtocolError

from tawebeval.config import HttpSettings
from tawebeval.errors import RequestTooSlow, ServerStopping, format_size
from tawebeval.web.server.limits import (
    RETRY_AFTER_SECONDS,
    ClientAddressResolver,
    ConnectionLimits,
    ConnectionPeer,
    OpenConnections,
)
from tawebeval.web.server.messages import BasePath, encode_head, encode_refusal

log = Logger()

CLIENT_GONE_STATUS = 499
"""Status for the log where the client disconnected before the response (as nginx has it)."""


class BodyReceiver(Protocol):
    """Receiver of a body that is parsed while it arrives. Methods raise RequestError."""

    def feed(self, chunk: bytes) -> None:
        """Parse a part of the body."""

    def abandon(self) -> None:
        """Store nothing more, and remove what is stored."""


class Application(Protocol):
    """The API. It refuses requests, which are `request.ApiRequest`, by RequestError."""

    @property
    def origins(self) -> Collection[str]:
        """Origins whose pages may read responses; `*` = any."""

    def identify_caller(self, request: Any) -> str:
        """Return the caller of a request, and count the request."""

    def make_form_receiver(self, request: Any, length: int | None) -> BodyReceiver | None:
        """Return the receiver of a body; None if none is expected.

        `length` is that of the body in bytes, None if unknown.
        """

    def check_not_stopping(self) -> None:
        """Raise ServerStopping if the daemon accepts no more forms."""

    def record_response(self, request: Any, status: int, seconds: float) -> None:
        """Count and log a request; `status` may be GONE, `seconds` is its duration."""

    def record_refusal(self, status: int, address: str) -> None:
        """Count and log the refusal of a connection or of a malformed request."""


class ConnectionPhase(Enum):
    """The phases of a connection."""

    NEW = "the first byte at all"
    IDLE = "the next request"
    HEAD = "the end of a head"
    BODY = "the end of a body"
    RESPONSE = "a response, and the client to take it"
    CLOSED = "the end"  # received bytes are dropped

    def __init__(self, _: str) -> None:
        # Whether nothing of a request has arrived. No property, for each line of a head asks.
        self.is_idle = self.name in ("NEW", "IDLE")


@attrs.define(eq=False)
class Deadline:
    """A call that is due unless something happens before; a new one replaces it.

    A call of the reactor stays when its deadline is cancelled, and serves the next one: each
    request has two.
    """

    clock: IReactorTime
    _call: IDelayedCall | None = None
    _on_timeout: Callable[[], object] | None = None

    @property
    def is_set(self) -> bool:
        """Whether a call is due."""
        return self._on_timeout is not None

    def is_for(self, on_timeout: Callable[[], object]) -> bool:
        """Whether that call is due."""
        return self._on_timeout == on_timeout

    def set(self, seconds: float, on_timeout: Callable[[], object]) -> None:
        """Call `on_timeout` in `seconds` seconds."""
        self._on_timeout = on_timeout
        if self._call is None:
            self._call = self.clock.callLater(seconds, self._on_due)
        else:
            self._call.reset(seconds)

    def cancel(self) -> None:
        """Call nothing."""
        self._on_timeout = None

    def close(self) -> None:
        """Call nothing, and leave nothing to the reactor."""
        self._on_timeout = None
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _on_due(self) -> None:
        self._call = None
        on_timeout, self._on_timeout = self._on_timeout, None
        if on_timeout is not None:
            on_timeout()


@attrs.define(eq=False)
class BodyRate:
    """The least rate at which a body has to arrive, measured over a window.

    `deadline` is that of the connection. `on_too_slow(error)` is called once too little has
    arrived. No time passes while `is_paused`; after a pause the rest of the window goes on.
    """

    _settings: HttpSettings
    _deadline: Deadline
    _on_too_slow: Callable[[RequestTooSlow], object]
    is_paused: bool = False
    _size: int = 0  # bytes that have arrived in this window
    _end: float = 0.0  # of the window, in seconds of the clock; its rest in a pause

    def begin(self) -> None:
        """Begin with a body."""
        self._size = 0
        self._begin_window(self._settings.rate_window_seconds)

    def count(self, size: int) -> None:
        """Count received bytes of the body, without its chunked framing."""
        self._size += size

    def pause(self) -> None:
        """Let no time pass."""
        self.is_paused = True
        self._end -= self._deadline.clock.seconds()
        self._deadline.cancel()

    def resume(self, *, is_complete: bool) -> None:
        """Go on after a pause, unless the body is complete."""
        self.is_paused = False
        if not is_complete:
            self._begin_window(self._end)

    def _begin_window(self, seconds: float) -> None:
        self._end = self._deadline.clock.seconds() + seconds
        self._deadline.set(seconds, self._check)

    def _check(self) -> None:
        settings = self._settings
        if self._size >= settings.rate_window_seconds * settings.min_bytes_per_second:
            self.begin()
        else:
            self._on_too_slow(
                RequestTooSlow(
                    "the request body arrives too slowly; the minimum is"
                    f" {format_size(settings.min_bytes_per_second)} per second, measured"
                    f" over {settings.rate_window_seconds:g} s"
                )
            )


@attrs.define(eq=False)
class WebSocketInput:
    """The bytes that the client of a WebSocket sends; `protocol` is Twisted's WebSocket.

    `wait_for_turn()` fires when the bytes that have arrived may be parsed. `sends_close_frame` is
    true while a close frame is being sent, `awaits_close_frame` from then on until the client
    answers.
    """

    _protocol: Any
    wait_for_turn: Callable[[], Deferred[None]] = lambda: succeed(None)
    _received: int = 0  # bytes
    sends_close_frame: bool = False
    awaits_close_frame: bool = False

    def receive(self, data: bytes) -> bool:
        """Pass bytes to the WebSocket; return False if too much has come after the close frame.

        Answers to pings count too; they take a week to reach the limit.
        """
        self._received += len(data)
        if self._received > _WEBSOCKET_BYTES:
            if self.awaits_close_frame:
                return False
            self._protocol.loseConnection(_TOO_BIG)
            return True
        try:
            self._protocol.dataReceived(data)
        except LocalProtocolError:
            # Twisted answers pings even after the close frame, which RFC 6455 forbids.
            if not self.awaits_close_frame:
                raise
        return True

    def send_close_frame(self, code: int) -> bool:
        """Send a close frame; return False if one was sent before."""
        if self.awaits_close_frame:
            return False
        self.sends_close_frame = True
        self._protocol.loseConnection(code)
        self.sends_close_frame, self.awaits_close_frame = False, True
        return True


TWISTED_PRIVATE_NAMES = (
    "_buffer",
    "_command",
    "_dataBuffer",
    "_maybeChooseTransferDecoder",
    "_networkProducer",
    "_path",
    "_protocolUpgradeForWebsockets",
    "_respondToBadRequestAndDisconnect",
    "_send100Continue",
    "_version",
    "_waitingForTransport",
)
"""Private names of Twisted's channel that this module uses; no other module uses any."""

LINGER_SECONDS = 5.0  # seconds for which bytes of a refused client are read and dropped
_IN_FLIGHT = 0.5  # seconds for a request that was sent before the client knew of the drain
_TRANSPORT_BUFFER = 2**16  # bytes that a transport may hold before it asks to pause
_GOING_AWAY = 1001  # close code of a draining daemon
# Maximum of bytes read from a connection in a turn of the reactor: few where a byte can cost much
# (frames, chunks), many for a body of known length. (TLS passes on whole records.)
_READ_FRAMES, _READ_DEFAULT, _READ_BODY = 1024, 4096, 64 * 1024
_TLS_RECORD = b"\x16"  # the first byte of a ClientHello (RFC 8446), and of no HTTP request
_BAD_REQUEST = HTTPStatus.BAD_REQUEST
_TOO_LARGE = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
_DIGITS = 18  # of a Content-Length at most
_WEBSOCKET_BYTES = 64 * 1024  # that the client of a WebSocket may send
_TOO_BIG = 1009  # close code beyond them
# RFC 9112, section 3. Later versions of HTTP have no such line.
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-\xb0]+) (HTTP/1\.[01])")


class ApiChannel(HTTPChannel):
    """A connection that speaks HTTP/1.1 only and answers protocol errors by problem documents.

    It does not use Twisted's `TimeoutMixin`, whose timeout any received byte extends.
    """

    site: ApiSite
    http_settings: HttpSettings
    peer: ConnectionPeer
    body_rate: BodyRate
    _read_deadline: Deadline  # for bytes that the client sends
    _write_deadline: Deadline  # for bytes that the client takes
    phase = ConnectionPhase.NEW
    _is_counted = False
    _is_refused = False  # whether it only gets the answer that all connections are in use
    websocket: WebSocketInput | None = None  # which receives all bytes after the upgrade
    _in_headers = False  # whether the request line has arrived, and not all headers
    _head_size = _header_count = 0  # bytes and headers of the head that is arriving
    _unsent = 0  # bytes at most that the client has yet to take of the answer
    _answered: Request | None = None  # answered, but not yet taken by the client

    def get_request_line(self) -> tuple[bytes, bytes, bytes]:
        """Return method, target and version of the request whose body is arriving."""
        return self._command, self._path, self._version

    # Connections

    def connectionMade(self) -> None:
        """Count the connection and await a request; refuse it beyond the limits."""
        connections = self.site.connection_limits
        self.http_settings = connections.settings
        self._read_deadline = Deadline(self.site.clock)
        self._write_deadline = Deadline(self.site.clock)
        self.body_rate = BodyRate(
            self.http_settings,
            self._read_deadline,
            lambda error: self.requests[-1].refuse_request(error),
        )
        self.MAX_LENGTH = self.http_settings.max_line_bytes
        super().connectionMade()
        self._set_read_size(_READ_DEFAULT)
        self.site.open_connections.add_connection(self)
        assert self.transport is not None
        self._host = self.transport.getHost()
        self._peer_address = self.transport.getPeer()
        self.peer = self.site.address_resolver.identify_peer(self._peer_address)
        self._is_counted = connections.add_connection(self.peer.address_group)
        self._is_refused = not self._is_counted and connections.add_refusal()
        if self._is_counted:
            self._read_deadline.set(self.http_settings.head_timeout, self._on_head_deadline)
        elif self._is_refused:
            self._write_deadline.set(LINGER_SECONDS, self.forceAbortClient)
        else:
            self.forceAbortClient()

    def getHost(self) -> Any:
        """Return the daemon's address, without a system call for each request."""
        return self._host

    def getPeer(self) -> Any:
        """Return the address of the other end, without a new object for each request."""
        return self._peer_address

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        """Count one connection less, cancel its deadlines and drop the answered request."""
        self.site.open_connections.remove_connection(self)
        if self._is_counted:
            self.site.connection_limits.remove_connection(self.peer.address_group)
        elif self._is_refused:
            self.site.connection_limits.remove_refusal()
        self.phase = ConnectionPhase.CLOSED
        self._read_deadline.close()
        self._write_deadline.close()
        if self._answered is not None:
            self.requests.remove(self._answered)
            self._answered = None
        super().connectionLost(reason)

    def loseConnection(self) -> None:
        """Close when the client has taken all; abort if that takes too long."""
        if self.websocket is not None:  # whose close frame is not the end
            if not self.websocket.sends_close_frame:
                self._end_websocket()
            return
        self.phase = ConnectionPhase.CLOSED
        self._read_deadline.close()
        if not self._write_deadline.is_set:
            self._write_deadline.set(self._compute_write_timeout(), self.forceAbortClient)
        super().loseConnection()

    def forceAbortClient(self) -> None:
        """Abort the connection and drop what is unsent."""
        self.phase = ConnectionPhase.CLOSED
        self._read_deadline.close()
        # All transports have it, though ITransport does not.
        self.transport.abortConnection()  # type: ignore[union-attr]

    def _close_write_side(
        self,
        timeout: float = LINGER_SECONDS,
        on_timeout: Callable[[], object] | None = None,
    ) -> None:
        """Close the sending half and drop what arrives; abort after `timeout` seconds.

        Closing both halves with unread data would reset the connection. TLS has no halves.
        """
        if not IHalfCloseableDescriptor.providedBy(self.transport):
            self.loseConnection()
            return
        self._read_deadline.close()
        self._write_deadline.set(timeout, on_timeout or self.forceAbortClient)
        self.phase = ConnectionPhase.CLOSED
        self.clearLineBuffer()
        self._networkProducer.unregisterProducer()
        self._networkProducer.resumeProducing()
        self.transport.loseWriteConnection()

    # What the client sends

    def dataReceived(self, data: bytes) -> None:
        """Take received bytes: of a WebSocket, or of requests."""
        if self._is_refused:
            # Not before the first bytes: few clients expect a response without a request.
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"all {self.http_settings.connections} connections (http.connections), or those"
                " of this client (http.connections_per_address), are in use; try again later",
                RETRY_AFTER_SECONDS,
            )
        if self.phase is ConnectionPhase.NEW and data.startswith(_TLS_RECORD):
            # Plain text, which TLS clients report at once as a wrong version of TLS.
            self._refuse(
                _BAD_REQUEST, "this port speaks plain HTTP; use http:// in place of https://"
            )
        if self.phase is ConnectionPhase.CLOSED:
            return
        if self.websocket is not None:
            self._networkProducer.pauseProducing()
            turn = self.websocket.wait_for_turn()
            turn.addCallback(lambda _: self._take_frames(data)).addErrback(self._abort_websocket)
            return
        super().dataReceived(data)
        self._limit_head_time()

    def _limit_head_time(self) -> None:
        """Set the deadline of a head that is not complete."""
        if self._buffer and self.phase.is_idle:
            self.phase = ConnectionPhase.HEAD
        on_timeout = self._on_head_deadline
        if self.phase is ConnectionPhase.HEAD and not self._read_deadline.is_for(on_timeout):
            self._read_deadline.set(self.http_settings.head_timeout, on_timeout)

    def lineReceived(self, line: bytes) -> None:
        """Check and take a line of a request head.

        Twisted's method takes twice the time, and refuses without a reason.
        """
        if self.phase is ConnectionPhase.CLOSED:
            return
        self._head_size += len(line) + 2
        if self._head_size > self.http_settings.max_header_bytes:
            limit = format_size(self.http_settings.max_header_bytes)
            self._refuse(_TOO_LARGE, f"the request's headers are over {limit}")
        elif not self._in_headers:
            if line or self._head_size > len(b"\r\n"):  # one empty line may precede a request
                self._begin_request(line)
        elif line:
            self.headerReceived(line)
        else:
            self.allHeadersReceived()
            if self.length == 0:
                self.allContentReceived()
            else:
                self.setRawMode()

    def _begin_request(self, line: bytes) -> None:
        self.phase = ConnectionPhase.HEAD
        found = _REQUEST_LINE.fullmatch(line)
        if found is None:
            self._respondToBadRequestAndDisconnect()
            return
        self._in_headers = True
        self._command, self._path, self._version = found.groups()
        self.requests.append(self.requestFactory(self))

    def headerReceived(self, line: bytes) -> bool:
        """Check and take a header; return False if it is refused."""
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        self._header_count += 1
        if self._header_count > self.http_settings.max_headers:
            self._refuse(
                _TOO_LARGE,
                f"the request has over {self.http_settings.max_headers} headers",
            )
        elif line[:1] in (b" ", b"\t"):
            self._refuse(_BAD_REQUEST, "a header begins with a space (RFC 9112, section 5.2)")
        elif not colon or len(value.translate(None, b"\0\r\n")) < len(value):
            self._respondToBadRequestAndDisconnect()
        elif self._take_body_length(name.lower(), value):
            try:
                self.requests[-1].requestHeaders.addRawHeader(name, value)
            except InvalidHeaderName:
                self._respondToBadRequestAndDisconnect()
            else:
                return True
        return False

    def _take_body_length(self, name: bytes, value: bytes) -> bool:
        """Take the length of the body if this header has it; return False if it is refused."""
        if name == b"content-length":
            if len(value) <= _DIGITS:
                return bool(self._maybeChooseTransferDecoder(b"Content-Length", value))
            self._refuse(_BAD_REQUEST, "Content-Length: not a length")
            return False
        if name != b"transfer-encoding":
            return True
        # Twisted passes over "identity", which RFC 9112 does not have any more.
        if value.lower() == b"chunked" and self._version == b"HTTP/1.1":
            return bool(self._maybeChooseTransferDecoder(b"Transfer-Encoding", value))
        self._refuse(_BAD_REQUEST, "Transfer-Encoding: only chunked is supported, in HTTP/1.1")
        return False

    def allHeadersReceived(self) -> None:
        """Take the end of a request head."""
        self._in_headers, self._head_size, self._header_count = False, 0, 0
        self.phase = ConnectionPhase.BODY
        self._unsent = 0
        if self.length != 0:
            if self.length:  # which chunked bodies do not have
                self._set_read_size(_READ_BODY)
            self.body_rate.begin()
        super().allHeadersReceived()

    def checkPersistence(  # noqa: N802  (Twisted's name)
        self, request: Request, version: bytes
    ) -> bool:
        """Return whether the connection stays open after the response to `request`.

        Twisted overlooks `close` before a comma, and in a second line.
        """
        values = request.requestHeaders.getRawHeaders(b"Connection")
        if values is None or version != b"HTTP/1.1":
            return version == b"HTTP/1.1"
        options = b",".join(values).lower().split(b",")
        if b"close" in (option.strip(b" \t") for option in options):
            request.responseHeaders.setRawHeaders(b"Connection", [b"close"])
            return False
        return True

    def _send100Continue(self) -> None:  # noqa: N802  (Twisted's name)
        """Send leave to send the body, unless there is none or the request is refused."""
        if self.length != 0 and not self.requests[-1].startedWriting:
            super()._send100Continue()

    def rawDataReceived(self, data: bytes) -> None:
        """Take a part of a body, or what is pipelined behind an unanswered request."""
        if self.phase is not ConnectionPhase.CLOSED:
            super().rawDataReceived(data)

    def pause_body(self) -> None:
        """Stop reading until `resume_body`. The deadline of the body stops too."""
        if self.phase is ConnectionPhase.BODY and not self.body_rate.is_paused:
            self.body_rate.pause()
            self._networkProducer.pauseProducing()

    def resume_body(self) -> None:
        """Read again; the deadline of the body goes on."""
        if self.body_rate.is_paused:
            self.body_rate.resume(is_complete=self.phase is not ConnectionPhase.BODY)
            self._networkProducer.resumeProducing()

    def allContentReceived(self) -> None:
        """Take the end of a request."""
        if self.phase is ConnectionPhase.CLOSED:
            return
        self.phase = ConnectionPhase.RESPONSE
        self.resume_body()  # or a disconnect would go unnoticed
        self._read_deadline.cancel()
        if self.length:
            self._set_read_size(_READ_DEFAULT)
        super().allContentReceived()

    def _set_read_size(self, size: int) -> None:
        """Set the maximum of bytes read in one turn of the reactor."""
        transport: Any = self.transport
        while isinstance(transport, ProtocolWrapper):  # TLS
            transport = transport.transport
        transport.bufferSize = size

    # What the client takes

    def write(self, data: bytes) -> None:
        """Write a part of a response."""
        if not self._waitingForTransport:
            # A stream goes on for long, and it has hardly anything of all that was before.
            self._unsent = min(self._unsent, _TRANSPORT_BUFFER)
        self._unsent += len(data)
        super().write(data)

    def writeSequence(self, iovec: Any) -> None:
        """Write parts of a response in one piece."""
        self.write(b"".join(iovec))

    def writeHeaders(self, version: bytes, code: bytes, reason: bytes, headers: Headers) -> None:
        """Write a response's head."""
        self.transport.write(self.encode_head(self.requests[-1]))  # type: ignore[union-attr]

    def encode_head(self, request: Any) -> bytes:
        """Return a response's head, with `Connection: close` if it is the last one."""
        if self.site.open_connections.is_draining:
            self.persistent = False
            if not request.responseHeaders.hasHeader(b"Connection"):
                request.responseHeaders.setRawHeaders(b"Connection", [b"close"])
        return encode_head(request, request.encoded_headers, self.site.application.origins)

    def pauseProducing(self) -> None:
        """Set the deadline for the client: the transport's buffer is full."""
        super().pauseProducing()
        self._write_deadline.set(self._compute_write_timeout(), self.forceAbortClient)

    def resumeProducing(self) -> None:
        """Cancel that deadline: the client has taken all that was written."""
        self._unsent = 0
        self._write_deadline.cancel()
        super().resumeProducing()
        self._finish_answered()

    def requestDone(self, request: Request) -> None:
        """Continue with the next request once the client has taken most of this response.

        Otherwise pipelined requests would pile up responses in memory. If the next request is
        already here, it waits for another turn of the reactor: one read can bring 2,000 requests.
        """
        self._answered = request
        if self.persistent and self._waitingForTransport:
            return
        if self.persistent and (self._buffer or any(self._dataBuffer)):
            self._read_deadline.set(0, self._finish_answered)
        else:
            self._finish_answered()

    def _finish_answered(self) -> None:
        """Finish the answered request and take the next, unless the client is slow."""
        if self._answered is None or (self.persistent and self._waitingForTransport):
            return
        request, self._answered = self._answered, None
        if self.persistent:
            self.phase = ConnectionPhase.IDLE
            self._read_deadline.set(self.http_settings.idle_timeout, self.loseConnection)
        super().requestDone(request)

    # WebSockets

    def _protocolUpgradeForWebsockets(self, protocol: IProtocol) -> None:
        """Pass all further bytes to the WebSocket `protocol`.

        It writes and closes through this channel, so deadlines and limits apply to it. (Twisted
        would give it the bare transport and take `connectionLost` from the channel.)
        """
        self.websocket = WebSocketInput(protocol)
        self._set_read_size(_READ_FRAMES)
        protocol.makeConnection(self)

    def _take_frames(self, data: bytes) -> None:
        if self.websocket is not None and self.phase is not ConnectionPhase.CLOSED:
            self._networkProducer.resumeProducing()
            if not self.websocket.receive(data):
                self._end_websocket()

    def _abort_websocket(self, failure: Failure) -> None:
        log.failure("defect: a WebSocket failed", failure)
        self.forceAbortClient()

    def close_websocket(self, code: int) -> None:
        """Send a close frame; close the connection when the client has answered it.

        The answer shows that all messages have arrived (RFC 6455, section 7.1.1). If the connection
        closed earlier, many proxies would drop the messages they still hold.
        """
        if self.websocket is not None and self.websocket.send_close_frame(code):
            self.stopProducing()  # stops the stream
            self._read_deadline.set(self._compute_write_timeout(), self._end_websocket)

    def _end_websocket(self) -> None:
        self.websocket = None
        self.stopProducing()  # stops the stream
        self._close_write_side(self._compute_write_timeout())

    # The daemon's end

    def close_if_idle(self) -> None:
        """Close a connection without a request, but answer one that is on its way.

        A request sent after the sending half is closed gets no response. It gets no reset either,
        which the client could take for a failure of its previous request.
        """
        if self.phase.is_idle:
            self._read_deadline.set(_IN_FLIGHT, self._close_idle)

    def _close_idle(self) -> None:
        if IReadDescriptor.providedBy(self.transport):
            # Bytes in the socket by now arrived in time, however late the reactor is.
            self.transport.doRead()
        if self.phase.is_idle:
            # Nothing is unsent, so an orderly close follows the half-close.
            self._close_write_side(_IN_FLIGHT, self.transport.loseConnection)  # type: ignore[union-attr]

    def drain_connection(self) -> None:
        """Refuse an unfinished request, or close after the current response."""
        if self.phase is ConnectionPhase.HEAD:
            end = ServerStopping()
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, end.detail, end.retry_after)
        elif self.phase is ConnectionPhase.BODY:
            self.requests[-1].refuse_request(ServerStopping())
        elif self.websocket is not None:
            self.close_websocket(_GOING_AWAY)
        elif self.phase is ConnectionPhase.RESPONSE:
            self.persistent = False  # the answer is the last one

    # Deadlines

    def _compute_write_timeout(self) -> float:
        """Return the seconds in which the client has to take what was written."""
        settings = self.http_settings
        return settings.rate_window_seconds + self._unsent / settings.min_bytes_per_second

    def _on_head_deadline(self) -> None:
        """Refuse a request whose head is incomplete at its deadline."""
        if self.phase is ConnectionPhase.NEW:
            self.loseConnection()
            return
        seconds = self.http_settings.head_timeout
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the request's headers took over {seconds:g} s")

    # Refusals

    def lineLengthExceeded(self, line: bytes) -> None:
        """Refuse a request with too long a line, which Twisted would drop silently."""
        limit = format_size(self.http_settings.max_line_bytes)
        if self._in_headers:
            self._refuse(_TOO_LARGE, f"a header is over {limit}")
        elif self.phase is not ConnectionPhase.CLOSED:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG, f"the request line is over {limit}")

    def _respondToBadRequestAndDisconnect(self) -> None:
        self._refuse(_BAD_REQUEST, "malformed HTTP/1.1 request")

    def _refuse(self, status: HTTPStatus, detail: str, retry_after: int | None = None) -> None:
        """Answer a malformed request, and close so that the answer arrives."""
        if self.phase is ConnectionPhase.CLOSED:
            return
        if any(request.startedWriting for request in self.requests):
            self.loseConnection()  # it has its answer: the rest of its body is broken
            return
        self.site.application.record_refusal(status.value, self.peer.address)
        self.write(encode_refusal(self.site.application.origins, status, detail, retry_after))
        self._close_write_side()


class ApiSite(Site):
    """What all connections share; `root` is the resource of `application`."""

    # Not Twisted's own, which would speak HTTP/2 where it can: that calls `gotLength` too early.
    protocol = ApiChannel  # type: ignore[assignment]
    displayTracebacks = False
    noisy = False  # `Daemon` logs the URL

    def __init__(
        self,
        root: IResource,
        application: Application,
        settings: HttpSettings,
        reactor: Any,
        request_factory: Callable[[HTTPChannel], Request],
    ) -> None:
        super().__init__(
            root,
            requestFactory=request_factory,
            timeout=None,  # the channel has deadlines of its own
            reactor=reactor,
            parsePOSTFormSubmission=False,
        )
        self.application = application
        self.address_resolver = ClientAddressResolver.from_settings(settings)
        self.clock = reactor
        self.connection_limits = ConnectionLimits(settings)
        self.base_path = BasePath(settings.base_path)
        self.open_connections = OpenConnections(reactor)

    def log(self, request: object) -> None:
        """Do nothing: `Application.record_response` logs requests."""

    def acceptableProtocols(self) -> list[bytes]:
        """Return the protocols that TLS may negotiate."""
        return [b"http/1.1"]
