"""Connections: those that are too many, and what on them is no request.

Requests whose end is not plain are refused, for a proxy might see another end than we do, and
take for one request what is two.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from twisted.internet.interfaces import IProtocol, IReactorTime
from twisted.python.failure import Failure
from twisted.web.http_headers import Headers
from wsproto.utilities import LocalProtocolError

from tawebeval.config import HttpSettings
from tawebeval.errors import Stopping, TooSlow
from tawebeval.web.server import problems
from tawebeval.web.server.headers import (
    framing_headers,
    general_headers,
    lines,
    put_framing_first,
    status_line,
)
from tawebeval.web.server.interface import FastPath, Host
from tawebeval.web.server.limits import RETRY_AFTER, Peer
from tawebeval.web.server.timeouts import LINGER, Phase, TimeoutChannel
from tawebeval.web.server.transport import below_tls

_TURNED_AWAY = 64  # connections over the limit that are told so at the same time
_SOCKET_BYTES = 64 * 1024  # that the client of a WebSocket may send for nothing
_SHORT_FRAME = 6  # bytes that a client's short message has besides its content
_TOO_BIG = 1009  # the close code for that
_GOING_AWAY = 1001  # that of a daemon that stops
# Bytes that a turn of the reactor reads of a connection: few where each of them can cost much, as
# those of frames and chunks do, and many of a body of known length. (TLS hands on whole records.)
_READ_FRAMES, _READ_USUALLY, _READ_BODY = 1024, 4096, 64 * 1024
_DIGITS = 18  # of a Content-Length; more are no length of anything


class ApiChannel(TimeoutChannel):
    """A connection, speaking HTTP/1.1 only, on which also the protocol's errors are problems."""

    site: Host
    fast_path: FastPath
    # Counted here, in bytes of lines and in lines; Twisted would answer 400 and not say why.
    totalHeadersSize = 2**30
    maxHeaders = 2**30

    peer: Peer
    _group: str | None = None  # None while the connection is not counted
    _turned_away = False
    _socket: Any = None  # what takes the connection's bytes when it has become a WebSocket
    _socket_received = 0  # bytes
    _socket_closes = False  # a close frame is being sent
    _socket_waits = False  # for the client's answer to that
    _head_size = 0  # bytes of the head that is arriving

    @property
    def limits(self) -> HttpSettings:
        """The settings."""
        return self.site.connections.limits

    @property
    def clock(self) -> IReactorTime:
        """The clock of all deadlines."""
        return self.site.clock

    def request_line(self) -> tuple[bytes, bytes, bytes]:
        """Return method, target and version of the request whose body is arriving."""
        return self._command, self._path, self._version

    # Connections

    def connectionMade(self) -> None:
        """Count the connection, and wait for a head; where there are too many, see it off."""
        self.MAX_LENGTH = self.limits.line
        super().connectionMade()
        self._read_in_a_turn(_READ_USUALLY)
        self.site.presence.enter(self)
        assert self.transport is not None
        self.peer = self.site.clients.peer(self.transport.getPeer())
        connections = self.site.connections
        if connections.enter(self.peer.group):
            self._group = self.peer.group
            self.connection_begins()
        elif connections.turned_away < _TURNED_AWAY:
            connections.turned_away += 1
            self._turned_away = True
            self.take_within(LINGER)
        else:
            self.forceAbortClient()

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        """Count one less."""
        self.site.presence.leave(self)
        if self._group is not None:
            self.site.connections.leave(self._group)
            self._group = None
        if self._turned_away:
            self.site.connections.turned_away -= 1
            self._turned_away = False
        super().connectionLost(reason)

    # What the client sends

    def dataReceived(self, data: bytes) -> None:
        """Take what has come."""
        if self._turned_away and self.phase is not Phase.CLOSED:
            # Not before the client has said something: few expect an answer to nothing.
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "there are as many connections as there may be; try again later",
                {b"Retry-After": b"%d" % RETRY_AFTER},
            )
        if self.phase is Phase.CLOSED:
            return
        if self._socket is not None:
            self._socket_receives(data)
            return
        if self._at_rest and self.fast_path.take(data):
            return
        super().dataReceived(data)
        if self._buffer:
            self.head_begins()

    @property
    def _at_rest(self) -> bool:
        """Whether nothing has come since the last request, and that is answered."""
        # An empty line, which may precede a request, begins none, but is counted.
        return self._waits and not self._head_size

    def lineReceived(self, line: bytes) -> None:
        """Take a line of a head."""
        if self.phase is Phase.CLOSED:
            return
        if line:
            self.head_begins()
        self._head_size += len(line) + 2
        if self._head_size > self.limits.header_bytes:
            self._too_large(f"the head of the request has over {self.limits.header_bytes} bytes")
        elif line[:1] in (b" ", b"\t"):
            self._bad_request("a line of the head begins with a space")  # RFC 9112, 5.2
        else:
            super().lineReceived(line)

    def headerReceived(self, line: bytes) -> bool:
        """Take a header; return whether it can be taken."""
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if self.phase is Phase.CLOSED:
            return False
        if self._receivedHeaderCount >= self.limits.headers:
            self._too_large(f"the request has over {self.limits.headers} headers")
        elif name == b"content-length" and len(value) > _DIGITS:
            self._bad_request("Content-Length: is no length")
        elif name == b"transfer-encoding" and (
            # Twisted passes over "identity", which RFC 9112 does not have any more.
            value.lower() != b"chunked" or self._version != b"HTTP/1.1"
        ):
            self._bad_request("Transfer-Encoding: only chunked is known, in HTTP/1.1")
        else:
            return bool(super().headerReceived(line))
        return False

    def allHeadersReceived(self) -> None:
        """Take the end of a head."""
        self._head_size = 0
        if self.phase is not Phase.CLOSED:
            if self.length:  # which chunked bodies do not have
                self._read_in_a_turn(_READ_BODY)
            super().allHeadersReceived()

    def rawDataReceived(self, data: bytes) -> None:
        """Take a part of a body, or what is sent while an answer is made."""
        if self.phase is not Phase.CLOSED:
            super().rawDataReceived(data)

    def allContentReceived(self) -> None:
        """Take the end of a request."""
        if self.phase is not Phase.CLOSED:
            self._read_in_a_turn(_READ_USUALLY)
            super().allContentReceived()

    def _read_in_a_turn(self, size: int) -> None:
        """Have each turn of the reactor read so many bytes at most."""
        below_tls(self.transport).bufferSize = size

    # WebSockets

    def _protocolUpgradeForWebsockets(self, protocol: IProtocol) -> None:
        """Let a WebSocket have what comes.

        It writes and closes through this channel, so that all that holds of connections holds
        of it. (Twisted would give it the bare transport, and take `connectionLost` from us.)
        """
        self._socket = protocol
        self._read_in_a_turn(_READ_FRAMES)
        protocol.makeConnection(self)

    def _socket_receives(self, data: bytes) -> None:
        """Take what a WebSocket's client sends, up to a limit for what has no meaning here.

        Answers to pings count, too, and take a week to get there.
        """
        self._socket_received += len(data)
        if self._socket_received > _SOCKET_BYTES:
            if self._socket_waits:
                self._end_socket()
            else:
                self._socket.loseConnection(_TOO_BIG)
            return
        try:
            self._socket.dataReceived(data)
        except LocalProtocolError:
            # Twisted answers pings, also after the close frame, where that is no longer allowed.
            if not self._socket_waits:
                raise

    def socket_was_understood(self, size: int) -> None:
        """Take that a message of `size` bytes has a meaning: it does not count."""
        self._socket_received -= _SHORT_FRAME + size

    def close_socket(self, code: int) -> None:
        """Send a close frame, and close the connection when the client has answered it.

        The answer shows that all has arrived (RFC 6455, 7.1.1). Earlier a proxy would learn of the
        end while it still has messages to pass on, and many drop these when the client speaks.
        """
        if self._socket is not None and not self._socket_waits:
            self._socket_closes = True
            self._socket.loseConnection(code)
            self._socket_closes, self._socket_waits = False, True
            self.stopProducing()  # what writes events
            self.read_within(self._patience(), self._end_socket)

    def loseConnection(self) -> None:
        """Close the connection when the client has taken all; that of a WebSocket with care."""
        if self._socket is None:
            super().loseConnection()
        elif not self._socket_closes:
            self._end_socket()

    def _end_socket(self) -> None:
        self._socket = None
        self.stopProducing()  # what writes events
        self.end_our_side(self._patience())

    # The daemon's end

    def note_last_answer(self) -> bool:
        """Tell whether the answer that begins now is the last one, because the daemon stops."""
        if self.site.presence.leaving:
            self.persistent = False
        return self.site.presence.leaving

    def writeHeaders(self, version: bytes, code: bytes, reason: bytes, headers: Headers) -> None:
        """Begin an answer, which says so if it is the last one."""
        if self.note_last_answer() and not headers.hasHeader(b"Connection"):
            headers.setRawHeaders(b"Connection", [b"close"])
        super().writeHeaders(version, code, reason, put_framing_first(headers))

    def go_away(self) -> None:
        """Answer what is asked, and then end, because the daemon does."""
        if self.phase is Phase.HEAD:
            end = Stopping()
            again = {b"Retry-After": b"%d" % end.retry_after}
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, end.detail, again)
        elif self.phase is Phase.BODY:
            self.requests[-1].refuse(Stopping())
        elif self._socket is not None:
            self.close_socket(_GOING_AWAY)
        elif self.phase is Phase.ANSWER:
            self.persistent = False  # the answer is the last one

    # Refusals

    def head_late(self) -> None:
        """Refuse a request whose head has not come."""
        seconds = self.limits.head_deadline
        self._refuse(
            HTTPStatus.REQUEST_TIMEOUT, f"the head of the request has not come within {seconds:g} s"
        )

    def body_late(self) -> None:
        """Refuse a request whose body comes too slowly."""
        self.requests[-1].refuse(
            TooSlow(
                f"the body comes too slowly: {self.limits.rate} bytes per second are expected,"
                f" reckoned over {self.limits.window:g} s"
            )
        )

    def lineLengthExceeded(self, line: bytes) -> None:
        """Refuse a request with too long a line, which Twisted would drop without a word."""
        if hasattr(self, "_command"):  # which Twisted has while headers come
            self._too_large(f"a header has over {self.limits.line} bytes")
        elif self.phase is not Phase.CLOSED:
            self._refuse(
                HTTPStatus.REQUEST_URI_TOO_LONG,
                f"the first line of the request has over {self.limits.line} bytes",
            )

    def _too_large(self, detail: str) -> None:
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, detail)

    def _bad_request(self, detail: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, detail)

    def _respondToBadRequestAndDisconnect(self) -> None:
        self._bad_request("this is no request of HTTP/1.1 that can be understood")

    def _refuse(
        self, status: HTTPStatus, detail: str, more: dict[bytes, bytes] | None = None
    ) -> None:
        """Answer what is no request, and close the connection so that the answer arrives."""
        if self.phase is Phase.CLOSED:
            return
        if any(request.startedWriting for request in self.requests):
            self.loseConnection()  # it has its answer: the rest of its body is broken
            return
        self.site.application.refused(status.value, self.peer.address)
        body = problems.document(status, detail)
        headers = {
            **framing_headers(body, problems.CONTENT_TYPE),
            **general_headers(self.site.application.origins, []),
            b"Connection": b"close",
            **(more or {}),
        }
        self.write(b"".join((status_line(status), lines(headers), b"\r\n", body)))
        self.end_our_side()
