"""Requests, whose forms are parsed while they arrive.

A form is refused at its first wrong header, field or byte. The response is written immediately. The
rest of the body is read and dropped for a few seconds: closing a connection with unread data would
reset it, and the client would lose the response.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType

from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.server import Request
from werkzeug.exceptions import HTTPException

from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import RequestError, RequestTooLarge, format_size
from tawebeval.web.server import messages
from tawebeval.web.server.channel import (
    CLIENT_GONE_STATUS,
    LINGER_SECONDS,
    ApiChannel,
    BodyReceiver,
)
from tawebeval.web.server.limits import (
    RemoteAddress,
)
from tawebeval.web.server.messages import (
    MAX_PATH_BYTES,
    PREFLIGHT_HEADERS,
    check_hosts,
    check_method_and_path,
    collapse_slashes,
    get_header_values,
    parse_query,
    set_headers,
    strip_scheme_and_host,
)

_BODY = 64 * 1024  # bytes that are read where no body is expected

log = Logger()


class ApiRequest(Request):
    """A request; its form, if it has one, is in `form` before the request is processed.

    `route` is the method and the route of the request if they are known without a search for them.
    `query` has the parameters of the query by name, and `raw_query` the query as it was sent;
    Twisted's `args` are empty. `encoded_headers` are the headers of a page, which is written at
    once: several times as fast as `responseHeaders`, which may have further ones.
    `waits_for_evaluation` is whether the response waits for events or for the end of an evaluation.
    `permitted_problems` are the problems to which the token is restricted; None: it is not.
    `uses_link` is whether the request has a link, `is_read_only` whether it has a link or a token
    that only reads.
    """

    channel: ApiChannel
    form: BodyReceiver | None = None
    route: tuple[str, str] | None = None
    raw_query = b""
    query: Mapping[bytes, Sequence[bytes]] = MappingProxyType({})
    encoded_headers = b""
    caller = ANONYMOUS_CALLER
    permitted_problems: Collection[str] | None = None
    is_read_only = False
    uses_link = False
    waits_for_evaluation = False
    remote_address: RemoteAddress
    _group = ""  # as whose this request counts besides its connection
    _started_at: float | None = None  # when there was something to answer, in seconds of the clock
    _is_refused = False
    _discarded = 0
    _linger: IDelayedCall | None = None

    def parseCookies(self) -> None:  # noqa: N802  (Twisted's name)
        """Parse no cookies: the daemon has none, and Twisted takes 40 ms for 32 KiB."""

    def gotLength(self, length: int | None) -> None:
        """Check the headers: Twisted calls this between head and body."""
        self._started_at = self.channel.site.clock.seconds()
        site = self.channel.site
        self.method, target, self.clientproto = self.channel.get_request_line()
        target = strip_scheme_and_host(target)
        # First of all, for whatever is refused is counted and logged by its path, too.
        path, _, self.raw_query = site.base_path.strip_prefix(target).partition(b"?")
        self.path = collapse_slashes(path)
        peer = self.channel.peer
        self.remote_address = peer.direct_client or RemoteAddress(peer.address)
        try:
            if peer.direct_client is None:  # a proxy names the client
                client = site.address_resolver.resolve_client(peer, self.requestHeaders)
                self.remote_address = client
                self._group = site.connection_limits.count_request(client)
            site.base_path.require_trailing_slash(target)
            check_method_and_path(self.method, self.path)
            check_hosts(get_header_values(self.requestHeaders, "Host"), self.clientproto)
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

    def handleContentChunk(self, data: bytes) -> None:
        """Parse a part of the body."""
        self.channel.body_rate.count(len(data))
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
        if not body_follows:
            self._write_problem(error)
            return
        # A client that waits for leave to send its body does not get it.
        self.requestHeaders.removeHeader(b"Expect")
        self.channel.persistent = False
        self.setHeader(b"Connection", b"close")
        self._write_problem(error)
        self._linger = self.channel.callLater(LINGER_SECONDS, self.channel.forceAbortClient)

    def _write_problem(self, error: BaseException | None) -> None:
        body = messages.set_error_response(self, error)
        self.setHeader(b"Content-Length", b"%d" % len(body))
        self.write(body)

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
                self.channel.site.resource.render(self)
            except Exception:  # noqa: BLE001  (silence is no answer)
                self.processingFailed(Failure())

    def processingFailed(self, reason: Failure) -> Failure:
        """Answer an exception that no route handles: a malformed host, or a defect."""
        if not isinstance(reason.value, HTTPException):
            log.failure("defect: a request failed", reason)
        if not self.startedWriting:
            self._write_problem(reason.value)
        self.finish()
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
        if self.form is not None or self._linger is not None:
            self._drop_form()
        self._record(self.code)
        super().finish()

    def _record(self, status: int) -> None:
        """Count the request, unless it has no complete head."""
        if self._group:
            self.channel.site.connection_limits.remove_proxied_request(self._group)
            self._group = ""
        if self._started_at is None:
            return
        took = self.channel.site.clock.seconds() - self._started_at
        self.channel.site.application.record_response(self, status, took)

    def connectionLost(self, reason: Failure) -> None:
        """Release the request: the client has disconnected."""
        self._drop_form()
        answered = self.startedWriting or self.code == HTTPStatus.SWITCHING_PROTOCOLS
        self._record(self.code if answered else CLIENT_GONE_STATUS)
        super().connectionLost(reason)

    def _drop_form(self) -> None:
        """Remove an unfinished form from disk; an accepted one belongs to its evaluation."""
        if self._linger is not None and self._linger.active():
            self._linger.cancel()
        form, self.form = self.form, None
        if form is not None:
            self.channel.resume_body()
            form.abandon()


def _make_body_error() -> RequestTooLarge:
    return RequestTooLarge(
        f"request body is over {format_size(_BODY)}; this request needs none", limit=_BODY
    )
