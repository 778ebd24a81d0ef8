"""Connections, their requests and their site: deadlines, limits, malformed requests, draining.

A connection awaits a request, receives its head, receives its body, or is answered. Each phase but
the last has a deadline for what the client sends; a long poll may be answered as late as it likes.
In every phase the client has a deadline to take what was written.

A request whose end is ambiguous is refused: a proxy could see another end, and take two requests
for one (request smuggling). A form is refused at its first wrong header, field or byte. The
response is written immediately. The rest of the body is read and dropped for a few seconds: closing
a connection with unread data would reset it, and the client would lose the response.

`Application` is the Protocol of the API, which this package does not import.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from enum import Enum
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Protocol

import attrs
from twisted.internet.address import UNIXAddress
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import (
    IAddress,
    IDelayedCall,
    IHalfCloseableDescriptor,
    IProtocol,
    IReactorTime,
    IReadDescriptor,
)
from twisted.logger import Logger
from twisted.protocols.basic import LineReceiver
from twisted.protocols.policies import ProtocolWrapper
from twisted.protocols.tls import TLSMemoryBIOProtocol
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel
from twisted.web.http_headers import Headers
from twisted.web.server import Request, Site
from werkzeug.exceptions import HTTPException
from wsproto.utilities import LocalProtocolError

from tawebeval.config import Configuration
from tawebeval.core.hosts import (
    FORWARDED_FOR_HEADER,
    TrustedProxies,
    canonicalize_address,
    compute_address_group,
)
from tawebeval.core.tokens import ANONYMOUS_CALLER, ANONYMOUS_TOKEN
from tawebeval.deferreds import Condition, wait_until_true
from tawebeval.errors import (
    HeaderTooLarge,
    MalformedRequest,
    RequestError,
    RequestTooLarge,
    RequestTooSlow,
    ResourceMoved,
    ServerBusy,
    ServerStopping,
    TargetTooLong,
    format_size,
)
from tawebeval.web.server import messages
from tawebeval.web.server.messages import (
    ERROR_STATUSES,
    MAX_PATH_BYTES,
    PREFLIGHT_HEADERS,
    RequestLog,
    check_host_headers,
    check_method_and_path,
    encode_head,
    encode_refusal,
    get_header_values,
    parse_query,
    set_headers,
    split_target,
)

log = Logger()

CLIENT_GONE_STATUS = 499
"""Status for the log where the client disconnected before the response (as nginx has it)."""

DRAIN_TIMEOUT = 5.0
"""Seconds for all clients to take their responses."""


class Application(Protocol):
    """The API, which is the root resource, too. It refuses an `ApiRequest` by RequestError."""

    def identify_caller(self, request: Any) -> str:
        """Return the caller of a request, and count the request."""

    def make_form_receiver(self, request: Any, length: int | None) -> Any:
        """Return the receiver of a body; None if none is expected.

        `length` is that of the body in bytes, None if unknown. `feed(chunk)` of the receiver parses
        a part of the body, and raises RequestError; `abandon()` removes what is stored.
        """

    def check_not_stopping(self) -> None:
        """Raise ServerStopping if the daemon accepts no more forms."""

    def match_route(self, method: bytes, path: bytes) -> tuple[str, str, Any]:
        """Return the names of method and route by which a request is counted, and parameters."""

    def render(self, request: Any) -> Any:
        """Answer a request."""


class ConfigurationOwner(Protocol):
    """Owner of the configuration, which a reload replaces."""

    configuration: Configuration


class ConnectionPhase(Enum):
    """What a connection waits for."""

    IDLE = "a request"
    HEAD = "the end of a head"
    BODY = "the end of a body"
    RESPONSE = "a response, and the client to take it"
    CLOSED = "the end"  # received bytes are dropped


@attrs.define(eq=False)
class Deadline:
    """A call in some seconds, unless it is cancelled before; a new one replaces it."""

    clock: IReactorTime
    _call: IDelayedCall | None = None

    @property
    def is_set(self) -> bool:
        """Whether the call is to come."""
        return self._call is not None

    def set(self, seconds: float, on_timeout: Callable[[], object]) -> None:
        """Call `on_timeout` in `seconds` seconds."""
        self.cancel()
        self._call = self.clock.callLater(seconds, self._on_due, on_timeout)

    def cancel(self) -> None:
        """Call nothing."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _on_due(self, on_timeout: Callable[[], object]) -> None:
        self._call = None
        on_timeout()


TWISTED_PRIVATE_NAMES = (
    "_buffer",
    "_command",
    "_dataBuffer",
    "_networkProducer",
    "_path",
    "_protocolUpgradeForWebsockets",
    "_respondToBadRequestAndDisconnect",
    "_version",
    "_waitingForTransport",
)
"""Private names of Twisted's channel that this module uses; no other module uses any."""

_LINGER = 5.0  # seconds for which bytes of a refused client are read and dropped
_IN_FLIGHT = 0.5  # seconds for a request that was sent before the client knew of the drain
_REQUEST_GRACE = 1.0  # seconds for an idle connection to begin its last request
_RETRY_AFTER = 5  # seconds, where a limit of connections or requests is reached
_MAX_REFUSED = 64  # connections over the limit that are answered at the same time
_TRANSPORT_BUFFER = 2**16  # bytes that a transport may hold before it asks to pause
_GOING_AWAY = 1001  # close code of a draining daemon
# Maximum of bytes read from a connection in a turn of the reactor: few where a byte can cost much
# (frames, chunks), many for a body of known length. (TLS passes on whole records.)
_READ_FRAMES, _READ_DEFAULT, _READ_BODY = 1024, 4096, 64 * 1024
_TLS_RECORD = b"\x16"  # the first byte of a ClientHello (RFC 8446), and of no HTTP request
_DIGITS = 18  # of a Content-Length at most
_BODY = 64 * 1024  # bytes that are read where no body is expected
_WEBSOCKET_BYTES = 64 * 1024  # that the client of a WebSocket may send
_TOO_BIG = 1009  # close code beyond them
# RFC 9112, section 3. Later versions of HTTP have no such line.
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-\xb0]+) (HTTP/1\.[01])")
_HEADER_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\0\r\n]*")
_FRAMING_HEADERS = (b"content-length", b"transfer-encoding")


class ApiChannel(HTTPChannel):
    """A connection that speaks HTTP/1.1 only and answers protocol errors by problem documents.

    `peer_address` is the address of the other end, empty if unknown; `is_from_proxy` is whether
    that is a trusted proxy, which names the client in each request. `wait_for_websocket_turn()`
    fires when the bytes that a WebSocket has received may be parsed.

    It does not use Twisted's `TimeoutMixin`, whose timeout any received byte extends.
    """

    # With the attributes of Twisted's channel there are too many for one compact dictionary.
    __slots__ = (
        "_host",
        "_peer",
        "_read_deadline",
        "_settings",
        "_write_deadline",
        "is_from_proxy",
        "peer_address",
    )

    site: ApiSite
    peer_address: str
    is_from_proxy: bool
    delimiter = b"\r\n\r\n"  # of heads
    phase = ConnectionPhase.IDLE
    wait_for_websocket_turn: Callable[[], Deferred[None]] = staticmethod(lambda: succeed(None))
    _read_deadline: Deadline  # for bytes that the client sends
    _write_deadline: Deadline  # for bytes that the client takes
    _address_group: str | None = None  # that the connection counts for; None over the limits
    _body_size = 0  # bytes of the body that have arrived in this window
    _window_end = 0.0  # of the window, in seconds of the clock; its rest in a pause
    _is_body_paused = False
    _unsent = 0  # bytes at most that the client has yet to take of the answer
    _answered: Request | None = None  # answered, but not yet taken by the client
    # Twisted's WebSocket, which gets all bytes after the upgrade. A close frame is being sent, and
    # from then on awaited until the client answers.
    _websocket: Any = None
    _websocket_size = 0  # bytes that have arrived
    _sends_close_frame = _awaits_close_frame = False

    # Connections

    def connectionMade(self) -> None:
        """Count the connection and await a request; refuse it beyond the limits."""
        site = self.site
        self._settings = site.settings
        self._read_deadline = Deadline(site.clock)
        self._write_deadline = Deadline(site.clock)
        self.MAX_LENGTH = self._settings.max_header_bytes - len(self.delimiter)
        super().connectionMade()
        self._set_read_size(_READ_DEFAULT)
        assert self.transport is not None
        self._host = self.transport.getHost()
        self._peer = self.transport.getPeer()
        self.peer_address, self.is_from_proxy = site.identify_peer(self._peer)
        # A proxy has all the connections it needs: its clients are counted by their requests.
        group = "" if self.is_from_proxy else compute_address_group(self.peer_address)
        if site.add_connection(self, group):
            self._address_group = group
            self._read_deadline.set(self._settings.head_timeout, self.loseConnection)
        elif site.refused_connection_count <= _MAX_REFUSED:
            self._write_deadline.set(_LINGER, self.forceAbortClient)
        else:
            self.forceAbortClient()

    def getHost(self) -> Any:
        """Return the daemon's address, without a system call for each request."""
        return self._host

    def getPeer(self) -> Any:
        """Return the address of the other end, without a new object for each request."""
        return self._peer

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        """Count one connection less, cancel its deadlines and drop the answered request."""
        self.site.remove_connection(self, self._address_group)
        self.phase = ConnectionPhase.CLOSED
        self._read_deadline.cancel()
        self._write_deadline.cancel()
        if self._answered is not None:
            self.requests.remove(self._answered)
            self._answered = None
        super().connectionLost(reason)

    def loseConnection(self) -> None:
        """Close when the client has taken all; abort if that takes too long."""
        if self._websocket is not None:  # whose close frame is not the end
            if not self._sends_close_frame:
                self._end_websocket()
            return
        self.phase = ConnectionPhase.CLOSED
        self._read_deadline.cancel()
        if not self._write_deadline.is_set:
            self._write_deadline.set(self._compute_write_timeout(), self.forceAbortClient)
        super().loseConnection()

    def forceAbortClient(self) -> None:
        """Abort the connection and drop what is unsent."""
        self.phase = ConnectionPhase.CLOSED
        self._read_deadline.cancel()
        # All transports have it, though ITransport does not.
        self.transport.abortConnection()  # type: ignore[union-attr]

    def _close_write_side(
        self, timeout: float = _LINGER, on_timeout: Callable[[], object] | None = None
    ) -> None:
        """Close the sending half and drop what arrives; abort after `timeout` seconds.

        Closing both halves with unread data would reset the connection. TLS has no halves: its
        transport passes the call on to that of TCP, which does not know what TLS has yet to write.
        """
        is_tls = any(isinstance(each, TLSMemoryBIOProtocol) for each in self._list_transports())
        if is_tls or not IHalfCloseableDescriptor.providedBy(self.transport):
            self.loseConnection()
            return
        self._read_deadline.cancel()
        self._write_deadline.set(timeout, on_timeout or self.forceAbortClient)
        self.phase = ConnectionPhase.CLOSED
        self.clearLineBuffer()
        self._networkProducer.unregisterProducer()
        self._networkProducer.resumeProducing()
        self.transport.loseWriteConnection()

    # What the client sends

    def dataReceived(self, data: bytes) -> None:
        """Take received bytes: of a WebSocket, or of requests."""
        if self.phase is ConnectionPhase.IDLE:
            if self._address_group is None:
                # Not before the first bytes: few clients expect a response without a request.
                self._refuse(
                    ServerBusy(
                        f"all {self._settings.connections} connections (http.connections), or those"
                        " of this client (http.connections_per_address), are in use; try again"
                        " later",
                        _RETRY_AFTER,
                    )
                )
            elif data.startswith(_TLS_RECORD):
                # Plain text, which TLS clients report at once as a wrong version of TLS.
                wrong = "this port speaks plain HTTP; use http:// in place of https://"
                self._refuse(MalformedRequest(wrong))
        if self.phase is ConnectionPhase.CLOSED:
            return
        if self._websocket is not None:
            self._networkProducer.pauseProducing()
            turn = self.wait_for_websocket_turn()
            turn.addCallback(lambda _: self._take_frames(data)).addErrback(self._abort_websocket)
            return
        LineReceiver.dataReceived(self, data)  # HTTPChannel only adds a deadline
        if self._buffer and self.phase is ConnectionPhase.IDLE and self._buffer.lstrip(b"\r\n"):
            self.phase = ConnectionPhase.HEAD
            self._read_deadline.set(self._settings.head_timeout, self._on_head_deadline)

    def lineReceived(self, line: bytes) -> None:
        """Check and take a request head, which is a line up to its `delimiter`.

        Twisted would take line by line, in several times the time, and refuse without a reason.
        """
        if self.phase is ConnectionPhase.CLOSED:
            return
        first, *headers = line.removeprefix(b"\r\n").split(b"\r\n")
        limit, most = self._settings.max_line_bytes, self._settings.max_headers
        found = _REQUEST_LINE.fullmatch(first)
        if len(first) > limit:
            self.lineLengthExceeded(line)
        elif found is None:
            self._respondToBadRequestAndDisconnect()
        elif len(headers) > most:
            self._refuse(HeaderTooLarge(f"the request has over {most} headers"))
        elif max(map(len, headers), default=0) > limit:
            self._refuse(HeaderTooLarge(f"a header is over {format_size(limit)}"))
        else:
            self._command, self._path, self._version = found.groups()
            self.requests.append(self.requestFactory(self))
            if all(map(self.headerReceived, headers)):
                self.allHeadersReceived()
                if self.length == 0:
                    self.allContentReceived()
                else:
                    self.setRawMode()

    def lineLengthExceeded(self, line: bytes) -> None:
        """Refuse a request with too long a head, which Twisted would drop silently."""
        settings = self._settings
        if len(line.removeprefix(b"\r\n").partition(b"\r\n")[0]) > settings.max_line_bytes:
            limit = format_size(settings.max_line_bytes)
            self._refuse(TargetTooLong(f"the request line is over {limit}"))
        else:
            limit = format_size(settings.max_header_bytes)
            self._refuse(HeaderTooLarge(f"the request's headers are over {limit}"))

    def headerReceived(self, line: bytes) -> bool:
        """Take a header; return False if it is refused.

        Twisted has the framing of bodies and the odd lines; it would take a length of any digits,
        and "identity", which RFC 9112 does not have any more. The other lines would take it longer.
        """
        name, _, value = line.partition(b":")
        value, kind = value.strip(b" \t"), name.lower()
        if kind not in _FRAMING_HEADERS and _HEADER_LINE.fullmatch(line):
            self.requests[-1].requestHeaders.addRawHeader(name, value)
            return True
        coding = value.lower(), self._version
        if kind == b"content-length" and len(value) > _DIGITS:
            self._refuse(MalformedRequest("Content-Length: not a length"))
        elif kind == b"transfer-encoding" and coding != (b"chunked", b"HTTP/1.1"):
            wrong = "Transfer-Encoding: only chunked is supported, in HTTP/1.1"
            self._refuse(MalformedRequest(wrong))
        else:
            return bool(super().headerReceived(line))
        return False

    def allHeadersReceived(self) -> None:
        """Take the end of a request head."""
        request = self.requests[-1]
        self.phase = ConnectionPhase.BODY
        self._unsent = self._body_size = 0
        self.persistent = self.checkPersistence(request, self._version)
        if self.length == 0:
            request.gotLength(0)
            return
        if self.length:  # which chunked bodies do not have
            self._set_read_size(_READ_BODY)
        self._begin_window(self._settings.rate_window_seconds)
        request.gotLength(self.length)
        expected = request.requestHeaders.getRawHeaders(b"Expect", (b"",))[0].lower()
        is_awaited = expected == b"100-continue" and self._version == b"HTTP/1.1"
        if is_awaited and not request.startedWriting:  # or it is refused
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # type: ignore[union-attr]

    def checkPersistence(  # noqa: N802  (Twisted's name)
        self, request: Request, version: bytes
    ) -> bool:
        """Return whether the connection stays open after the response to `request`.

        Twisted overlooks `close` before a comma, and in a second line (RFC 9112, section 9.6).
        """
        values = request.requestHeaders.getRawHeaders(b"Connection", ())
        if values and b"close" in map(bytes.strip, b",".join(values).lower().split(b",")):
            request.responseHeaders.setRawHeaders(b"Connection", [b"close"])
            return False
        return version == b"HTTP/1.1"

    def count_body_bytes(self, size: int) -> None:
        """Count received bytes of the body, without its chunked framing."""
        self._body_size += size

    def _begin_window(self, seconds: float) -> None:
        """Let the client send the least of a body that is allowed in a window."""
        self._window_end = self.site.clock.seconds() + seconds
        self._read_deadline.set(seconds, self._check_body_rate)

    def _check_body_rate(self) -> None:
        """Refuse a body of which too little has arrived in the window."""
        settings = self._settings
        window, least = settings.rate_window_seconds, settings.min_bytes_per_second
        if self._body_size >= window * least:
            self._body_size = 0
            self._begin_window(window)
            return
        self.requests[-1].refuse_request(
            RequestTooSlow(
                f"the request body arrives too slowly; the minimum is {format_size(least)} per"
                f" second, measured over {window:g} s"
            )
        )

    def pause_body(self) -> None:
        """Stop reading until `resume_body`. The deadline of the body stops too."""
        if self.phase is ConnectionPhase.BODY and not self._is_body_paused:
            self._is_body_paused = True
            self._window_end -= self.site.clock.seconds()
            self._read_deadline.cancel()
            self._networkProducer.pauseProducing()

    def resume_body(self) -> None:
        """Read again; the deadline of the body goes on."""
        if self._is_body_paused:
            self._is_body_paused = False
            if self.phase is ConnectionPhase.BODY:
                self._begin_window(max(0.0, self._window_end))  # its end may have been overdue
            self._networkProducer.resumeProducing()

    def close_after_response(self) -> None:
        """Close after this response; abort if the body takes longer than some seconds."""
        self.persistent = False
        self._read_deadline.set(_LINGER, self.forceAbortClient)

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
        self._list_transports()[-1].bufferSize = size

    def _list_transports(self) -> list[Any]:
        """Return the transport, and those below it: of TLS, of TCP."""
        found: list[Any] = [self.transport]
        while isinstance(found[-1], ProtocolWrapper):
            found.append(found[-1].transport)
        return found

    # What the client takes

    def write(self, data: bytes) -> None:
        """Write a part of a response."""
        if self._unsent > _TRANSPORT_BUFFER and not self._waitingForTransport:
            # A stream goes on for long, and it has hardly anything of all that was before.
            self._unsent = _TRANSPORT_BUFFER
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
        if self.site.is_draining:
            self.persistent = False
            if not request.responseHeaders.hasHeader(b"Connection"):
                request.responseHeaders.setRawHeaders(b"Connection", [b"close"])
        return encode_head(request, request.encoded_headers, self.site.allowed_origins)

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
            self._read_deadline.set(self._settings.idle_timeout, self.loseConnection)
        super().requestDone(request)

    # WebSockets

    def _protocolUpgradeForWebsockets(self, protocol: IProtocol) -> None:
        """Pass all further bytes to the WebSocket `protocol`.

        It writes and closes through this channel, so deadlines and limits apply to it. (Twisted
        would give it the bare transport and take `connectionLost` from the channel.)
        """
        self._websocket = protocol
        self._set_read_size(_READ_FRAMES)
        protocol.makeConnection(self)

    def _take_frames(self, data: bytes) -> None:
        """Pass bytes to the WebSocket; close it after too many.

        Answers to pings count too; they take a week to reach the limit.
        """
        if self._websocket is None or self.phase is ConnectionPhase.CLOSED:
            return
        self._networkProducer.resumeProducing()
        self._websocket_size += len(data)
        if self._websocket_size > _WEBSOCKET_BYTES:
            if self._awaits_close_frame:
                self._end_websocket()
            else:
                self._websocket.loseConnection(_TOO_BIG)
            return
        try:
            self._websocket.dataReceived(data)
        except LocalProtocolError:
            # Twisted answers pings even after the close frame, which RFC 6455 forbids.
            if not self._awaits_close_frame:
                raise

    def _abort_websocket(self, failure: Failure) -> None:
        log.failure("defect: a WebSocket failed", failure)
        self.forceAbortClient()

    def close_websocket(self, code: int) -> None:
        """Send a close frame; close the connection when the client has answered it.

        The answer shows that all messages have arrived (RFC 6455, section 7.1.1). If the connection
        closed earlier, many proxies would drop the messages they still hold.
        """
        if self._websocket is not None and not self._awaits_close_frame:
            self._sends_close_frame = True
            self._websocket.loseConnection(code)
            self._sends_close_frame, self._awaits_close_frame = False, True
            self.stopProducing()  # stops the stream
            self._read_deadline.set(self._compute_write_timeout(), self._end_websocket)

    def _end_websocket(self) -> None:
        self._websocket = None
        self.stopProducing()  # stops the stream
        self._close_write_side(self._compute_write_timeout())

    # The daemon's end

    def close_if_idle(self) -> None:
        """Close a connection without a request, but answer one that is on its way.

        A request sent after the sending half is closed gets no response. It gets no reset either,
        which the client could take for a failure of its previous request.
        """
        if self.phase is ConnectionPhase.IDLE:
            self._read_deadline.set(_IN_FLIGHT, self._close_idle)

    def _close_idle(self) -> None:
        if IReadDescriptor.providedBy(self.transport):
            # Bytes in the socket by now arrived in time, however late the reactor is.
            self.transport.doRead()
        if self.phase is ConnectionPhase.IDLE:
            # Nothing is unsent, so an orderly close follows the half-close.
            self._close_write_side(_IN_FLIGHT, self.transport.loseConnection)  # type: ignore[union-attr]

    def drain_connection(self) -> None:
        """Refuse an unfinished request, or close after the current response."""
        if self.phase is ConnectionPhase.HEAD:
            self._refuse(ServerStopping())
        elif self.phase is ConnectionPhase.BODY:
            self.requests[-1].refuse_request(ServerStopping())
        elif self._websocket is not None:
            self.close_websocket(_GOING_AWAY)
        elif self.phase is ConnectionPhase.RESPONSE:
            self.persistent = False  # the answer is the last one

    # Refusals

    def _compute_write_timeout(self) -> float:
        """Return the seconds in which the client has to take what was written."""
        settings = self._settings
        return settings.rate_window_seconds + self._unsent / settings.min_bytes_per_second

    def _on_head_deadline(self) -> None:
        """Refuse a request whose head is incomplete at its deadline."""
        seconds = self._settings.head_timeout
        self._refuse(RequestTooSlow(f"the request's headers took over {seconds:g} s"))

    def _respondToBadRequestAndDisconnect(self) -> None:
        self._refuse(MalformedRequest("malformed HTTP/1.1 request"))

    def _refuse(self, error: RequestError) -> None:
        """Answer a malformed request, and close so that the answer arrives."""
        if self.phase is ConnectionPhase.CLOSED:
            return
        if any(request.startedWriting for request in self.requests):
            self.loseConnection()  # it has its answer: the rest of its body is broken
            return
        status = ERROR_STATUSES[type(error)].value
        self.site.request_log.record_refusal(status, self.peer_address)
        self.write(encode_refusal(self.site.allowed_origins, error))
        self._close_write_side()


class ApiRequest(Request):
    """A request; its form, if it has one, is in `form` before the request is processed.

    `route` is the method and the route of the request if they are known without a search for them.
    `query` has the parameters of the query by name, and `raw_query` the query as it was sent;
    Twisted's `args` are empty. `encoded_headers` are the headers of a page, which is written at
    once: several times as fast as `responseHeaders`, which may have further ones.
    `waits_for_evaluation` is whether the response waits for events or for the end of an evaluation.
    `caller` owns what the request reads and begins: the caller of its `token`, or a member of a
    group that the token supervises. `uses_link` is whether the request has a link, `is_read_only`
    whether it has a link, a token that only reads, or one of a supervisor who reads what a member
    owns. `client_address` is empty if unknown.
    """

    # With the attributes of Twisted's request there are too many for one compact dictionary.
    __slots__ = (
        "_address_group",
        "_discarded",
        "_is_refused",
        "_started_at",
        "caller",
        "client_address",
        "encoded_headers",
        "form",
        "is_read_only",
        "query",
        "raw_query",
        "route",
        "token",
        "uses_link",
        "waits_for_evaluation",
    )

    channel: ApiChannel
    client_address: str

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.form: Any = None  # of `Application.make_form_receiver`
        self.route: tuple[str, str] | None = None
        self.raw_query = b""
        self.query: Mapping[bytes, Sequence[bytes]] = MappingProxyType({})
        self.encoded_headers = b""
        self.caller = ANONYMOUS_CALLER
        self.token = ANONYMOUS_TOKEN
        self.is_read_only = self.uses_link = self.waits_for_evaluation = False
        self._address_group = ""  # as whose connection this request counts, too
        # When there was something to answer, in seconds of the clock.
        self._started_at: float | None = None
        self._is_refused = False
        self._discarded = 0

    def gotLength(self, length: int | None) -> None:
        """Check the headers: the channel calls this between head and body."""
        channel = self.channel
        site = channel.site
        self._started_at = site.clock.seconds()
        self.method, self.clientproto = channel._command, channel._version
        # First of all, for whatever is refused is counted and logged by its path, too.
        self.path, self.raw_query = split_target(channel._path, site.base_path)
        self.client_address = channel.peer_address
        try:
            if channel.is_from_proxy:
                self._count_for_client()
            if self.path and self.path == site.base_path:
                # Without a slash relative links of a page there would lead out of it.
                raise ResourceMoved(f"{site.settings.base_path}/")
            check_method_and_path(self.method, self.path)
            check_host_headers(get_header_values(self.requestHeaders, "Host"), self.clientproto)
            if self.raw_query:
                self.query = parse_query(self.raw_query)
            if self.method != b"OPTIONS":
                self.caller = site.application.identify_caller(self)
            self.form = site.application.make_form_receiver(self, length)
            if self.form is None and (length or 0) > _BODY:
                raise _make_body_error()
        except Exception as error:  # noqa: BLE001  (silence is no answer)
            self.path = self.path[:MAX_PATH_BYTES]
            self.refuse_request(error, body_follows=length != 0)

    def _count_for_client(self) -> None:
        """Count the request of a client whose connection is that of a proxy.

        Raises: MalformedRequest, HeaderTooLarge; ServerBusy, if the client has too many.
        """
        site = self.channel.site
        values = get_header_values(self.requestHeaders, FORWARDED_FOR_HEADER)
        client = site.proxies.find_client_address([value.decode("latin-1") for value in values])
        if client is None:
            return
        self.client_address, group = client, compute_address_group(client)
        if not site.take_client_slot(group):
            raise ServerBusy(
                "too many requests of this client at the same time (http.connections_per_address);"
                " try again later",
                _RETRY_AFTER,
            )
        self._address_group = group

    def handleContentChunk(self, data: bytes) -> None:
        """Parse a part of the body."""
        self.channel.count_body_bytes(len(data))
        try:
            if self._is_refused:
                return
            if self.form is not None:
                self.channel.site.application.check_not_stopping()
                self.form.feed(data)
            else:
                self._discarded += len(data)
                if self._discarded > _BODY:
                    raise _make_body_error()
        except Exception as error:  # noqa: BLE001  (silence is no answer)
            self.refuse_request(error)

    def pause_body(self) -> None:
        """Read no more of the body until `resume_body`: the disk is too slow."""
        self.channel.pause_body()

    def resume_body(self) -> None:
        """Read the body again."""
        self.channel.resume_body()

    def refuse_request(self, error: Exception, body_follows: bool = True) -> None:
        """Answer now, while the body may still arrive; later refusals are ignored."""
        if self._is_refused:
            return
        if isinstance(error, OSError):
            error = messages.report_storage_error(error)
        if not isinstance(error, RequestError):
            log.failure("defect: a request failed", Failure(error))
        self._is_refused = True
        self._drop_form()
        if body_follows:
            self.setHeader(b"Connection", b"close")
            self.channel.close_after_response()
        self.write(messages.prepare_error_response(self, error))

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """Take the end of the request, of which `gotLength` has parsed the target."""
        self.uri, self.args = self.path, {}
        self.process()

    def process(self) -> None:
        """Answer the request; its whole body has arrived."""
        self._started_at = self.channel.site.clock.seconds()
        if self._is_refused:
            self.finish()
        elif self.method == b"OPTIONS":
            set_headers(self, PREFLIGHT_HEADERS)
            self.setResponseCode(HTTPStatus.NO_CONTENT)
            self.finish()
        else:
            try:
                self.channel.site.application.render(self)
            except Exception:  # noqa: BLE001  (silence is no answer)
                self.processingFailed(Failure())

    def send_response(self, body: bytes | Coroutine[Any, Any, bytes]) -> None:
        """Send a response of this body, of a coroutine when it returns the body.

        A client that leaves cancels the coroutine.
        """
        if isinstance(body, bytes):
            self._send_body(body)
            return
        waiting = Deferred.fromCoroutine(body)
        waiting.addErrback(self.prepare_failure_response).addCallback(self._send_body)
        if not waiting.called:
            self.notifyFinish().addErrback(lambda _: waiting.cancel())

    def _send_body(self, body: bytes | None) -> None:
        if body is not None:
            self.write(body)
            self.finish()

    def prepare_failure_response(self, failure: Failure) -> bytes | None:
        """Set the response to an exception, and return its body; None if the client has gone.

        A response that has begun can only end.
        """
        error = failure.value
        if isinstance(error, CancelledError):
            return None
        if not isinstance(error, RequestError | HTTPException):
            log.failure("defect: a request failed", failure)
        return b"" if self.startedWriting else messages.prepare_error_response(self, error)

    def processingFailed(self, reason: Failure) -> Failure:
        """Answer an exception that no route handles: a malformed host, or a defect."""
        self._send_body(self.prepare_failure_response(reason))
        return reason

    def write(self, data: bytes) -> None:
        """Write a part of the response, a page with its head."""
        if self.startedWriting or not self.encoded_headers or self.channel is None:
            super().write(data)
            return
        body = b"" if self.method == b"HEAD" else data
        self.startedWriting, self.sentLength = 1, len(body)
        self.channel.write(self.channel.encode_head(self) + body)

    def finish(self) -> None:
        """End the response."""
        self._drop_form()
        self._record(self.code)
        super().finish()

    def _record(self, status: int) -> None:
        """Count the request, unless it has no complete head."""
        site = self.channel.site
        site.release_client_slot(self._address_group)
        self._address_group = ""
        if self._started_at is not None:
            took = site.clock.seconds() - self._started_at
            known = self.route or site.application.match_route(self.method, self.path)
            site.request_log.record_response(self, known[0], known[1], status, took)

    def connectionLost(self, reason: Failure) -> None:
        """Release the request: the client has disconnected."""
        self._drop_form()
        answered = self.startedWriting or self.code == HTTPStatus.SWITCHING_PROTOCOLS
        self._record(self.code if answered else CLIENT_GONE_STATUS)
        super().connectionLost(reason)

    def _drop_form(self) -> None:
        """Remove an unfinished form from disk; an accepted one belongs to its evaluation."""
        form, self.form = self.form, None
        if form is not None:
            self.channel.resume_body()
            form.abandon()


def _make_body_error() -> RequestTooLarge:
    return RequestTooLarge(
        f"request body is over {format_size(_BODY)}; this request needs none", limit=_BODY
    )


class ApiSite(Site):
    """The application over all connections, and the counts that their limits are for.

    `connection_count` is the number of connections within the limits. `counts_by_address` has, for
    each address group, its connections, and its requests that proxies have passed on. While
    `is_draining`, each response is the last one on its connection and says so.
    """

    # Not Twisted's own, which would speak HTTP/2 where it can: that calls `gotLength` too early.
    protocol = ApiChannel  # type: ignore[assignment]
    displayTracebacks = False
    noisy = False  # `Daemon` logs the URL
    connection_count = 0
    is_draining = False

    def __init__(self, application: Application, owner: ConfigurationOwner, reactor: Any) -> None:
        super().__init__(
            application,
            requestFactory=ApiRequest,
            timeout=None,  # the channel has deadlines of its own
            reactor=reactor,
            parsePOSTFormSubmission=False,
        )
        self.application = application
        self.request_log = RequestLog(owner.configuration.log.access)
        self._owner = owner
        self.settings = settings = owner.configuration.http
        self.clock = reactor
        self.base_path = settings.base_path.encode()
        self.proxies = TrustedProxies.parse(settings.trusted_proxies)
        self.counts_by_address: Counter[str] = Counter()
        self._connections: dict[ApiChannel, None] = {}
        self._removed = Condition()

    def log(self, request: object) -> None:
        """Do nothing: `request_log` logs requests."""

    def acceptableProtocols(self) -> list[bytes]:
        """Return the protocols that TLS may negotiate."""
        return [b"http/1.1"]

    def identify_peer(self, address: IAddress | None) -> tuple[str, bool]:
        """Return the other end's address as text, and whether it is a trusted proxy."""
        host = str(getattr(address, "host", ""))
        try:
            host = canonicalize_address(host)
        except ValueError:
            return host, self.proxies.trusts_unix_sockets and isinstance(address, UNIXAddress)
        return host, self.proxies.is_trusted(host)

    @property
    def allowed_origins(self) -> Collection[str]:
        """Origins whose pages may read responses; `*` = any."""
        return self._owner.configuration.callers.origins

    @property
    def refused_connection_count(self) -> int:
        """The open connections over the limits."""
        return len(self._connections) - self.connection_count

    def add_connection(self, connection: ApiChannel, group: str) -> bool:
        """Add a connection of an address group; return False, without counting, at a limit."""
        self._connections[connection] = None
        if self.connection_count >= self.settings.connections or not self.take_client_slot(group):
            return False
        self.connection_count += 1
        return True

    def remove_connection(self, connection: ApiChannel, group: str | None) -> None:
        """Remove a closed connection; `group` is None if it was not counted."""
        del self._connections[connection]
        if group is not None:
            self.connection_count -= 1
            self.release_client_slot(group)
        self._removed.notify()

    def take_client_slot(self, group: str) -> bool:
        """Count a connection or request of a group; return False at the limit.

        An empty group has no limit.
        """
        most = self.settings.connections_per_address
        if group:
            if most and self.counts_by_address[group] >= most:
                return False
            self.counts_by_address[group] += 1
        return True

    def release_client_slot(self, group: str) -> None:
        """Count a connection or request of a group no more."""
        if group:
            self.counts_by_address[group] -= 1
            if not self.counts_by_address[group]:
                del self.counts_by_address[group]

    def close_idle_connections(self) -> None:
        """Close idle connections, so clients connect anew while somebody still listens."""
        self.is_draining = True
        for connection in list(self._connections):
            connection.close_if_idle()

    def abort_requests_unless(self, is_permitted: Callable[[ApiRequest], bool]) -> None:
        """Close the connections of requests that are not permitted any more."""
        for connection in list(self._connections):
            if not all(map(is_permitted, connection.requests)):
                connection.forceAbortClient()

    async def drain_connections(self, timeout: float = DRAIN_TIMEOUT) -> None:
        """Close all connections; abort those that take longer than `timeout` seconds."""
        self.close_idle_connections()
        first = min(_REQUEST_GRACE, timeout / 2)
        for seconds in (first, timeout - first):
            for connection in list(self._connections):
                connection.drain_connection()
            await wait_until_true(lambda: not self._connections, self._removed, seconds, self.clock)
        for connection in list(self._connections):
            connection.forceAbortClient()
