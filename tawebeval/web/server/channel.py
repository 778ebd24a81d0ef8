"""Connections: deadlines, limits, malformed requests, WebSockets, draining.

A connection awaits a request, receives its head, receives its body, or is answered. Each phase but
the last has a deadline for what the client sends; a long poll may be answered as late as it likes.
In every phase the client has a deadline to take what was written.

A request whose end is ambiguous is refused: a proxy could see another end, and take two requests
for one (request smuggling).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from http import HTTPStatus
from typing import Any

from twisted.internet.interfaces import (
    IDelayedCall,
    IHalfCloseableDescriptor,
    IProtocol,
    IReactorTime,
    IReadDescriptor,
)
from twisted.protocols.policies import ProtocolWrapper
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel, Request
from twisted.web.http_headers import Headers
from wsproto.utilities import LocalProtocolError

from tawebeval.config import HttpSettings
from tawebeval.errors import RequestTooSlow, ServerStopping, format_size
from tawebeval.web.server import error_responses
from tawebeval.web.server.headers import (
    encode_general_headers,
    encode_headers,
    encode_response_headers,
    make_content_headers,
)
from tawebeval.web.server.interface import ChannelSite
from tawebeval.web.server.limits import RETRY_AFTER_SECONDS, ConnectionPeer

TWISTED_PRIVATE_NAMES = (
    "_buffer",
    "_command",
    "_dataBuffer",
    "_networkProducer",
    "_path",
    "_protocolUpgradeForWebsockets",
    "_receivedHeaderCount",
    "_respondToBadRequestAndDisconnect",
    "_send100Continue",
    "_version",
    "_waitingForTransport",
)
"""Private names of Twisted's channel that this module uses; no other module uses any."""

LINGER_SECONDS = 5.0  # seconds for which bytes of a refused client are read and dropped
_IN_FLIGHT = 0.5  # seconds for a request that was sent before the client knew of the drain
_TRANSPORT_BUFFER = 2**16  # bytes that a transport may hold before it asks to pause
_MAX_REFUSED = 64  # connections over the limit that are answered at the same time
_SOCKET_BYTES = 64 * 1024  # of messages without meaning from the client of a WebSocket
_SHORT_FRAME = 6  # overhead of a short client frame, in bytes
_TOO_BIG = 1009  # close code beyond _SOCKET_BYTES
_GOING_AWAY = 1001  # close code of a draining daemon
# Maximum of bytes read from a connection in a turn of the reactor: few where a byte can cost much
# (frames, chunks), many for a body of known length. (TLS passes on whole records.)
_READ_FRAMES, _READ_DEFAULT, _READ_BODY = 1024, 4096, 64 * 1024
_TLS_RECORD = b"\x16"  # the first byte of a ClientHello (RFC 8446), and of no HTTP request
_DIGITS = 18  # of a Content-Length at most


class ConnectionPhase(Enum):
    """The phases of a connection."""

    NEW = "the first byte at all"
    IDLE = "the next request"
    HEAD = "the end of a head"
    BODY = "the end of a body"
    RESPONSE = "a response, and the client to take it"
    CLOSED = "the end"  # received bytes are dropped


class ApiChannel(HTTPChannel):
    """A connection that speaks HTTP/1.1 only and answers protocol errors by problem documents.

    It does not use Twisted's `TimeoutMixin`, whose timeout any received byte extends.
    """

    site: ChannelSite
    # This class applies the limits instead; Twisted would answer 400 without a reason.
    totalHeadersSize = 2**30
    maxHeaders = 2**30

    clock: IReactorTime
    http_settings: HttpSettings
    peer: ConnectionPeer
    phase = ConnectionPhase.NEW
    _group: str | None = None  # None while the connection is not counted
    _is_refused = False
    _socket: Any = None  # the WebSocket that receives all bytes after the upgrade
    _socket_received = 0  # bytes
    _sends_close_frame = False  # while a close frame is being sent
    _awaits_close_frame = False  # until the client answers it
    _head_size = 0  # bytes of the head that is arriving
    _body_size = 0  # bytes of the body that have come since the last look
    _window_end = 0.0  # when the next look is due, in seconds of the clock
    _paused_at: float | None = None  # since when the body is not read, in seconds of the clock
    _unsent = 0  # bytes at most that the client has yet to take of the answer
    _is_idle_timed = False  # whether the read deadline is that of an idle connection
    _read_deadline: IDelayedCall | None = None  # for bytes that the client sends
    _write_deadline: IDelayedCall | None = None  # for bytes that the client takes
    _answered: Request | None = None  # answered, but not yet taken by the client

    def get_request_line(self) -> tuple[bytes, bytes, bytes]:
        """Return method, target and version of the request whose body is arriving."""
        return self._command, self._path, self._version

    # Connections

    def connectionMade(self) -> None:
        """Count the connection and await a request; refuse it beyond the limits."""
        connections = self.site.connection_limits
        self.clock, self.http_settings = self.site.clock, connections.settings
        self.MAX_LENGTH = self.http_settings.max_line_bytes
        super().connectionMade()
        self._set_read_size(_READ_DEFAULT)
        self.site.open_connections.add_connection(self)
        assert self.transport is not None
        self.peer = self.site.address_resolver.identify_peer(self.transport.getPeer())
        if connections.add_connection(self.peer.address_group):
            self._group = self.peer.address_group
            self._set_read_deadline(self.http_settings.head_timeout, self._on_head_deadline)
        elif connections.refusals_in_progress < _MAX_REFUSED:
            connections.refusals_in_progress += 1
            self._is_refused = True
            self._set_write_deadline(LINGER_SECONDS)
        else:
            self.forceAbortClient()

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        """Count one connection less, cancel its deadlines and drop the answered request."""
        self.site.open_connections.remove_connection(self)
        if self._group is not None:
            self.site.connection_limits.remove_connection(self._group)
            self._group = None
        if self._is_refused:
            self.site.connection_limits.refusals_in_progress -= 1
            self._is_refused = False
        self.phase = ConnectionPhase.CLOSED
        self._cancel_read_deadline()
        self._cancel_write_deadline()
        if self._answered is not None:
            self.requests.remove(self._answered)
            self._answered = None
        super().connectionLost(reason)

    def loseConnection(self) -> None:
        """Close when the client has taken all; abort if that takes too long."""
        if self._socket is not None:  # whose close frame is not the end
            if not self._sends_close_frame:
                self._end_websocket()
            return
        self.phase = ConnectionPhase.CLOSED
        self._cancel_read_deadline()
        if self._write_deadline is None or not self._write_deadline.active():
            self._set_write_deadline(self._compute_write_timeout())
        super().loseConnection()

    def forceAbortClient(self) -> None:
        """Abort the connection and drop what is unsent."""
        self.phase = ConnectionPhase.CLOSED
        self._cancel_read_deadline()
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
        self._cancel_read_deadline()
        self._set_write_deadline(timeout, on_timeout)
        self.phase = ConnectionPhase.CLOSED
        self.clearLineBuffer()
        self._networkProducer.unregisterProducer()
        self._networkProducer.resumeProducing()
        self.transport.loseWriteConnection()

    # What the client sends

    def dataReceived(self, data: bytes) -> None:
        """Take received bytes: of a WebSocket, or of requests."""
        if self._is_refused and self.phase is not ConnectionPhase.CLOSED:
            # Not before the first bytes: few clients expect a response without a request.
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"all {self.http_settings.connections} connections (http.connections), or those"
                " of this client (http.connections_per_address), are in use; try again later",
                {b"Retry-After": b"%d" % RETRY_AFTER_SECONDS},
            )
        if self.phase is ConnectionPhase.NEW and data.startswith(_TLS_RECORD):
            # Plain text, which TLS clients report at once as a wrong version of TLS.
            self._bad_request("this port speaks plain HTTP; use http:// in place of https://")
        if self.phase is ConnectionPhase.CLOSED:
            return
        if self._socket is not None:
            self._receive_frames(data)
            return
        super().dataReceived(data)
        self._limit_head_time()

    def _limit_head_time(self) -> None:
        """Set the deadline of a head that is not complete."""
        if self._buffer and self._is_idle:
            self.phase = ConnectionPhase.HEAD
        if self.phase is ConnectionPhase.HEAD and self._is_idle_timed:
            self._set_read_deadline(self.http_settings.head_timeout, self._on_head_deadline)

    def lineReceived(self, line: bytes) -> None:
        """Check and take a line of a request head."""
        if self.phase is ConnectionPhase.CLOSED:
            return
        if line and self._is_idle:
            self.phase = ConnectionPhase.HEAD
        self._head_size += len(line) + 2
        if self._head_size > self.http_settings.max_header_bytes:
            limit = format_size(self.http_settings.max_header_bytes)
            self._too_large(f"the request's headers are over {limit} (http.header_bytes)")
        elif line[:1] in (b" ", b"\t"):
            self._bad_request("a header begins with a space (RFC 9112, section 5.2)")
        else:
            super().lineReceived(line)

    def headerReceived(self, line: bytes) -> bool:
        """Check and take a header; return False if it is refused."""
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if self.phase is ConnectionPhase.CLOSED:
            return False
        if self._receivedHeaderCount >= self.http_settings.max_headers:
            self._too_large(
                f"the request has over {self.http_settings.max_headers} headers (http.headers)"
            )
        elif name == b"content-length" and len(value) > _DIGITS:
            self._bad_request("Content-Length: not a length")
        elif name == b"transfer-encoding" and (
            # Twisted passes over "identity", which RFC 9112 does not have any more.
            value.lower() != b"chunked" or self._version != b"HTTP/1.1"
        ):
            self._bad_request("Transfer-Encoding: only chunked is supported, in HTTP/1.1")
        else:
            return bool(super().headerReceived(line))
        return False

    def allHeadersReceived(self) -> None:
        """Take the end of a request head."""
        self._head_size = 0
        if self.phase is ConnectionPhase.CLOSED:
            return
        self.phase = ConnectionPhase.BODY
        self._unsent = 0
        if self.length != 0:
            if self.length:  # which chunked bodies do not have
                self._set_read_size(_READ_BODY)
            self._body_size = 0
            self._begin_window(self.http_settings.rate_window_seconds)
        super().allHeadersReceived()

    def checkPersistence(  # noqa: N802  (Twisted's name)
        self, request: Request, version: bytes
    ) -> bool:
        """Return whether the connection stays open after the response to `request`.

        Twisted overlooks `close` before a comma, and in a second line.
        """
        options = b",".join(request.requestHeaders.getRawHeaders(b"Connection", [])).lower()
        if version != b"HTTP/1.1":
            return False
        if b"close" in (option.strip(b" \t") for option in options.split(b",")):
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

    def allContentReceived(self) -> None:
        """Take the end of a request."""
        if self.phase is ConnectionPhase.CLOSED:
            return
        self.phase = ConnectionPhase.RESPONSE
        self.resume_body()  # or a disconnect would go unnoticed
        self._cancel_read_deadline()
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
        """Write a response's head, with `Connection: close` if it is the last one."""
        if self.site.open_connections.is_draining:
            self.persistent = False
            if not headers.hasHeader(b"Connection"):
                headers.setRawHeaders(b"Connection", [b"close"])
        origins = self.requests[-1].requestHeaders.getRawHeaders(b"Origin", ())
        self.transport.write(  # type: ignore[union-attr]
            b"%b %b %b\r\n%b%b\r\n"
            % (
                version,
                code,
                reason,
                encode_response_headers(headers),
                encode_general_headers(self.site.application.origins, origins),
            )
        )

    def pauseProducing(self) -> None:
        """Set the deadline for the client: the transport's buffer is full."""
        super().pauseProducing()
        self._set_write_deadline(self._compute_write_timeout())

    def resumeProducing(self) -> None:
        """Cancel that deadline: the client has taken all that was written."""
        self._unsent = 0
        self._cancel_write_deadline()
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
            self._set_read_deadline(0, self._finish_answered)
        else:
            self._finish_answered()

    def _finish_answered(self) -> None:
        """Finish the answered request and take the next, unless the client is slow."""
        if self._answered is None or (self.persistent and self._waitingForTransport):
            return
        request, self._answered = self._answered, None
        if self.persistent:
            self.phase = ConnectionPhase.IDLE
            self._set_read_deadline(self.http_settings.idle_timeout, self.loseConnection)
            self._is_idle_timed = True
        super().requestDone(request)
        self._limit_head_time()

    # WebSockets

    def _protocolUpgradeForWebsockets(self, protocol: IProtocol) -> None:
        """Pass all further bytes to the WebSocket `protocol`.

        It writes and closes through this channel, so deadlines and limits apply to it. (Twisted
        would give it the bare transport and take `connectionLost` from the channel.)
        """
        self._socket = protocol
        self._set_read_size(_READ_FRAMES)
        protocol.makeConnection(self)

    def _receive_frames(self, data: bytes) -> None:
        """Pass bytes to the WebSocket, up to a limit for messages without meaning.

        Answers to pings count too; they take a week to reach the limit.
        """
        self._socket_received += len(data)
        if self._socket_received > _SOCKET_BYTES:
            if self._awaits_close_frame:
                self._end_websocket()
            else:
                self._socket.loseConnection(_TOO_BIG)
            return
        try:
            self._socket.dataReceived(data)
        except LocalProtocolError:
            # Twisted answers pings even after the close frame, which RFC 6455 forbids.
            if not self._awaits_close_frame:
                raise

    def exempt_message_from_limit(self, size: int) -> None:
        """Do not count a meaningful message of `size` bytes against the limit."""
        self._socket_received -= _SHORT_FRAME + size

    def close_websocket(self, code: int) -> None:
        """Send a close frame; close the connection when the client has answered it.

        The answer shows that all messages have arrived (RFC 6455, section 7.1.1). If the connection
        closed earlier, many proxies would drop the messages they still hold.
        """
        if self._socket is not None and not self._awaits_close_frame:
            self._sends_close_frame = True
            self._socket.loseConnection(code)
            self._sends_close_frame, self._awaits_close_frame = False, True
            self.stopProducing()  # stops the stream
            self._set_read_deadline(self._compute_write_timeout(), self._end_websocket)

    def _end_websocket(self) -> None:
        self._socket = None
        self.stopProducing()  # stops the stream
        self._close_write_side(self._compute_write_timeout())

    # The daemon's end

    def close_if_idle(self) -> None:
        """Close a connection without a request, but answer one that is on its way.

        A request sent after the sending half is closed gets no response. It gets no reset either,
        which the client could take for a failure of its previous request.
        """
        if self._is_idle:
            self._set_read_deadline(_IN_FLIGHT, self._close_idle)

    @property
    def _is_idle(self) -> bool:
        """Whether nothing of a request has arrived."""
        return self.phase is ConnectionPhase.NEW or self.phase is ConnectionPhase.IDLE

    def _close_idle(self) -> None:
        if IReadDescriptor.providedBy(self.transport):
            # Bytes in the socket by now arrived in time, however late the reactor is.
            self.transport.doRead()
        if self._is_idle:
            # Nothing is unsent, so an orderly close follows the half-close.
            self._close_write_side(_IN_FLIGHT, self.transport.loseConnection)  # type: ignore[union-attr]

    def drain_connection(self) -> None:
        """Refuse an unfinished request, or close after the current response."""
        if self.phase is ConnectionPhase.HEAD:
            end = ServerStopping()
            again = {b"Retry-After": b"%d" % end.retry_after}
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, end.detail, again)
        elif self.phase is ConnectionPhase.BODY:
            self.requests[-1].refuse_request(ServerStopping())
        elif self._socket is not None:
            self.close_websocket(_GOING_AWAY)
        elif self.phase is ConnectionPhase.RESPONSE:
            self.persistent = False  # the answer is the last one

    # Deadlines

    def _set_read_deadline(self, seconds: float, on_timeout: Callable[[], object]) -> None:
        """Call `on_timeout` in `seconds` in place of the previous deadline for received bytes."""
        self._cancel_read_deadline()
        self._read_deadline = self.clock.callLater(seconds, on_timeout)

    def _cancel_read_deadline(self) -> None:
        self._is_idle_timed = False
        if self._read_deadline is not None and self._read_deadline.active():
            self._read_deadline.cancel()

    def _set_write_deadline(
        self, seconds: float, on_timeout: Callable[[], object] | None = None
    ) -> None:
        """Abort in `seconds`, or call `on_timeout`, unless the client takes all before that."""
        self._cancel_write_deadline()
        self._write_deadline = self.clock.callLater(seconds, on_timeout or self.forceAbortClient)

    def _cancel_write_deadline(self) -> None:
        if self._write_deadline is not None and self._write_deadline.active():
            self._write_deadline.cancel()

    def _compute_write_timeout(self) -> float:
        """Return the seconds in which the client has to take what was written."""
        settings = self.http_settings
        return settings.rate_window_seconds + self._unsent / settings.min_bytes_per_second

    def _begin_window(self, seconds: float) -> None:
        self._window_end = self.clock.seconds() + seconds
        self._set_read_deadline(seconds, self._check_rate)

    def _check_rate(self) -> None:
        """Refuse a request of whose body too little has arrived since the last check."""
        settings = self.http_settings
        if self._body_size >= settings.rate_window_seconds * settings.min_bytes_per_second:
            self._body_size = 0
            self._begin_window(settings.rate_window_seconds)
            return
        self.requests[-1].refuse_request(
            RequestTooSlow(
                "the request body arrives too slowly; the minimum is"
                f" {format_size(settings.min_bytes_per_second)} per second (http.rate), measured"
                f" over {settings.rate_window_seconds:g} s (http.window)"
            )
        )

    def _on_head_deadline(self) -> None:
        """Refuse a request whose head is incomplete at its deadline."""
        if self.phase is ConnectionPhase.NEW:
            self.loseConnection()
            return
        seconds = self.http_settings.head_timeout
        self._refuse(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the request's headers took over {seconds:g} s (http.head_deadline)",
        )

    # Refusals

    def lineLengthExceeded(self, line: bytes) -> None:
        """Refuse a request with too long a line, which Twisted would drop silently."""
        limit = format_size(self.http_settings.max_line_bytes)
        if hasattr(self, "_command"):  # which Twisted has while headers come
            self._too_large(f"a header is over {limit} (http.line)")
        elif self.phase is not ConnectionPhase.CLOSED:
            self._refuse(
                HTTPStatus.REQUEST_URI_TOO_LONG,
                f"the request line is over {limit} (http.line)",
            )

    def _too_large(self, detail: str) -> None:
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, detail)

    def _bad_request(self, detail: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, detail)

    def _respondToBadRequestAndDisconnect(self) -> None:
        self._bad_request("malformed HTTP/1.1 request")

    def _refuse(
        self, status: HTTPStatus, detail: str, more: dict[bytes, bytes] | None = None
    ) -> None:
        """Answer a malformed request, and close so that the answer arrives."""
        if self.phase is ConnectionPhase.CLOSED:
            return
        if any(request.startedWriting for request in self.requests):
            self.loseConnection()  # it has its answer: the rest of its body is broken
            return
        self.site.application.record_refusal(status.value, self.peer.address)
        body = error_responses.make_problem_details(status, detail)
        headers = {
            **make_content_headers(body, error_responses.PROBLEM_DETAILS_MEDIA_TYPE),
            b"Connection": b"close",
            **(more or {}),
        }
        general = encode_general_headers(self.site.application.origins, ())
        line = b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode())
        self.write(b"".join((line, encode_headers(headers), general, b"\r\n", body)))
        self._close_write_side()
