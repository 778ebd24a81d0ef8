"""Connections: limits, malformed requests, WebSockets, draining.

A request whose end is ambiguous is refused: a proxy could see another end, and take two requests
for one (request smuggling).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from twisted.internet.interfaces import IProtocol, IReactorTime
from twisted.python.failure import Failure
from twisted.web.http_headers import Headers
from wsproto.utilities import LocalProtocolError

from tawebeval.config import HttpSettings
from tawebeval.errors import RequestTooSlow, ServerStopping, format_size
from tawebeval.web.server import error_responses
from tawebeval.web.server.headers import (
    encode_headers,
    encode_status_line,
    make_content_headers,
    make_general_headers,
    sort_content_headers_first,
)
from tawebeval.web.server.interface import ChannelSite, FastPath
from tawebeval.web.server.limits import RETRY_AFTER_SECONDS, ConnectionPeer
from tawebeval.web.server.timeouts import LINGER_SECONDS, ConnectionPhase, TimeoutChannel
from tawebeval.web.server.transport import unwrap_tls

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


class ApiChannel(TimeoutChannel):
    """A connection that speaks HTTP/1.1 only and answers protocol errors by problem documents."""

    site: ChannelSite
    fast_path: FastPath
    # This class applies the limits instead; Twisted would answer 400 without a reason.
    totalHeadersSize = 2**30
    maxHeaders = 2**30

    peer: ConnectionPeer
    _group: str | None = None  # None while the connection is not counted
    _is_refused = False
    _socket: Any = None  # the WebSocket that receives all bytes after the upgrade
    _socket_received = 0  # bytes
    _sends_close_frame = False  # while a close frame is being sent
    _awaits_close_frame = False  # until the client answers it
    _head_size = 0  # bytes of the head that is arriving

    @property
    def http_settings(self) -> HttpSettings:
        """The settings `[http]`."""
        return self.site.connection_limits.settings

    @property
    def clock(self) -> IReactorTime:
        """The clock of all deadlines."""
        return self.site.clock

    def get_request_line(self) -> tuple[bytes, bytes, bytes]:
        """Return method, target and version of the request whose body is arriving."""
        return self._command, self._path, self._version

    # Connections

    def connectionMade(self) -> None:
        """Count the connection and await a request; refuse it beyond the limits."""
        self.MAX_LENGTH = self.http_settings.max_line_bytes
        super().connectionMade()
        self._set_read_size(_READ_DEFAULT)
        self.site.open_connections.add_connection(self)
        assert self.transport is not None
        self.peer = self.site.address_resolver.identify_peer(self.transport.getPeer())
        connections = self.site.connection_limits
        if connections.add_connection(self.peer.address_group):
            self._group = self.peer.address_group
            self.await_first_request()
        elif connections.refusals_in_progress < _MAX_REFUSED:
            connections.refusals_in_progress += 1
            self._is_refused = True
            self.set_write_deadline(LINGER_SECONDS)
        else:
            self.forceAbortClient()

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        """Count one connection less."""
        self.site.open_connections.remove_connection(self)
        if self._group is not None:
            self.site.connection_limits.remove_connection(self._group)
            self._group = None
        if self._is_refused:
            self.site.connection_limits.refusals_in_progress -= 1
            self._is_refused = False
        super().connectionLost(reason)

    # What the client sends

    def dataReceived(self, data: bytes) -> None:
        """Take received bytes: of a WebSocket, for the fast path, or for Twisted."""
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
        if self._is_between_requests and self.fast_path.try_answer_poll(data):
            return
        super().dataReceived(data)
        if self._buffer:
            self.on_request_head_start()

    @property
    def _is_between_requests(self) -> bool:
        """Whether the last request is answered and nothing of the next has come."""
        # An empty line before a request begins no request, but counts in `_head_size`.
        return self._is_idle and not self._head_size

    def lineReceived(self, line: bytes) -> None:
        """Check and take a line of a request head."""
        if self.phase is ConnectionPhase.CLOSED:
            return
        if line:
            self.on_request_head_start()
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
        if self.phase is not ConnectionPhase.CLOSED:
            if self.length:  # which chunked bodies do not have
                self._set_read_size(_READ_BODY)
            super().allHeadersReceived()

    def rawDataReceived(self, data: bytes) -> None:
        """Take a part of a body, or what is pipelined behind an unanswered request."""
        if self.phase is not ConnectionPhase.CLOSED:
            super().rawDataReceived(data)

    def allContentReceived(self) -> None:
        """Take the end of a request."""
        if self.phase is not ConnectionPhase.CLOSED:
            self._set_read_size(_READ_DEFAULT)
            super().allContentReceived()

    def _set_read_size(self, size: int) -> None:
        """Set the maximum of bytes read in one turn of the reactor."""
        unwrap_tls(self.transport).bufferSize = size

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
            self.set_read_deadline(self._write_timeout(), self._end_websocket)

    def loseConnection(self) -> None:
        """Close the connection when the client has taken all that was written."""
        if self._socket is None:
            super().loseConnection()
        elif not self._sends_close_frame:
            self._end_websocket()

    def _end_websocket(self) -> None:
        self._socket = None
        self.stopProducing()  # stops the stream
        self.close_write_side(self._write_timeout())

    # The daemon's end

    def mark_last_response_if_draining(self) -> bool:
        """Tell whether the daemon drains; if so, this response is the last one."""
        if self.site.open_connections.is_draining:
            self.persistent = False
        return self.site.open_connections.is_draining

    def writeHeaders(self, version: bytes, code: bytes, reason: bytes, headers: Headers) -> None:
        """Write a response's head, with `Connection: close` if it is the last one."""
        if self.mark_last_response_if_draining() and not headers.hasHeader(b"Connection"):
            headers.setRawHeaders(b"Connection", [b"close"])
        super().writeHeaders(version, code, reason, sort_content_headers_first(headers))

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

    # Refusals

    def on_head_timeout(self) -> None:
        """Refuse a request whose head is incomplete at its deadline."""
        seconds = self.http_settings.head_timeout
        self._refuse(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the request's headers took over {seconds:g} s (http.head_deadline)",
        )

    def on_body_timeout(self) -> None:
        """Refuse a request whose body arrives too slowly."""
        settings = self.http_settings
        self.requests[-1].refuse_request(
            RequestTooSlow(
                "the request body arrives too slowly; the minimum is"
                f" {format_size(settings.min_bytes_per_second)} per second (http.rate), measured"
                f" over {settings.rate_window_seconds:g} s (http.window)"
            )
        )

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
            **make_general_headers(self.site.application.origins, []),
            b"Connection": b"close",
            **(more or {}),
        }
        self.write(b"".join((encode_status_line(status), encode_headers(headers), b"\r\n", body)))
        self.close_write_side()
