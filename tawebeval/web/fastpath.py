"""The fast path: plain polls answered from bytes, without a request object of Twisted.

Most requests are polls by clients that repeat the same few headers, and most of their cost would be
parsing and Klein's layers. A request that arrives in one piece and has nothing unusual is
recognised by regular expressions. The general path takes all others: requests in pieces or
pipelined, with a body or an unusual header, or that must be refused before their target is known.

The content of a response is not made here. The functions of the general path read the headers, once
for each connection and block of headers; `EventPoll` makes the page, `problems` the errors.
`tests/web/test_fastpath.py` compares the bytes of both paths.

`routes.make_site` injects `PollFastPath`. The connection knows only `server.interface.FastPath`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from http import HTTPStatus

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http_headers import Headers

from tawebeval.core.identifiers import IDENTIFIER_PATTERN
from tawebeval.core.pages import EventPage
from tawebeval.core.signed_links import find_bearer_link
from tawebeval.errors import RequestError
from tawebeval.web.auth import EVENTS_ROUTE
from tawebeval.web.context import WebContext
from tawebeval.web.events import (
    OFFERED_MEDIA_TYPES,
    PAGE_MEDIA_TYPE,
    EventPoll,
    negotiate_media_type,
)
from tawebeval.web.responses import NO_STORE_HEADERS, WHOLE_NUMBER_PATTERN, parse_prefer_wait
from tawebeval.web.server import error_responses
from tawebeval.web.server.channel import ApiChannel
from tawebeval.web.server.headers import (
    JSON_MEDIA_TYPE,
    encode_date_header,
    encode_headers,
    encode_status_line,
    make_content_headers,
    make_general_headers,
)
from tawebeval.web.server.interface import CLIENT_GONE_STATUS
from tawebeval.web.server.limits import RemoteAddress
from tawebeval.web.server.request_headers import get_header_values

_MAX_LENGTH = 4096  # bytes of a request; longer ones are not plain

_TARGET = (
    rb"/evaluation/(%b)/events"
    rb"(?:\?(?:after=([A-Za-z0-9_-]*)(?:&|(?= )))?(?:wait=(%b)(?:&|(?= )))?"
    rb"(?:limit=(?!0)(%b))?)?"
    % (IDENTIFIER_PATTERN.encode(), WHOLE_NUMBER_PATTERN.encode(), WHOLE_NUMBER_PATTERN.encode())
)
_HEADER = rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\0\r\n]*)\r\n"
_BLOCK = re.compile(rb"(?:%b)*\r\n" % _HEADER)
_HEADERS = re.compile(_HEADER)
_HOST = re.compile(rb"[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*(?::[0-9]{1,5})?")

# Requests with one of these need the checks of the general path.
_NOT_PLAIN = (b"Content-Length", b"Transfer-Encoding", b"Expect", b"Upgrade")

log = Logger()


@attrs.frozen
class PollHeaders:
    """The result of reading a plain poll's headers.

    `wait_seconds` is that of `Prefer`, in seconds. `lines_before_date` and `lines_after_date` are
    the response's header lines before and behind `Date`.
    """

    client: RemoteAddress
    authorization: Sequence[bytes] = attrs.field(repr=False)
    wait_seconds: int | None
    lines_before_date: bytes
    lines_after_date: bytes


class PollFastPath:
    """The fast path of one connection."""

    __slots__ = (
        "_block",
        "_channel",
        "_context",
        "_headers",
        "_line",
        "_longest",
    )

    def __init__(self, context: WebContext, channel: ApiChannel) -> None:
        limits = context.configuration.http
        self._channel = channel
        self._context = context
        self._line = _first_line_pattern(limits.base_path)
        self._longest = min(_MAX_LENGTH, limits.max_line_bytes, limits.max_header_bytes)
        self._block = b""  # the headers that came last, with the empty line
        self._headers: PollHeaders | None = None  # of `_block`; None if they are not plain

    def try_answer_poll(self, data: bytes) -> bool:
        """Answer `data` and return True if it is one plain poll; else do nothing.

        The connection must be between two requests.
        """
        if len(data) > self._longest:
            return False
        line, _, block = data.partition(b"\r\n")
        found = self._line.fullmatch(line)
        if found is None:
            return False
        if block != self._block:
            self._block = block
            self._headers = _read_headers(block, self._channel, self._context)
        headers = self._headers
        if headers is None:
            return False
        connections, group = self._channel.site.connection_limits, headers.client.address_group
        if group and not connections.add_proxied_request(group):
            return False
        try:
            token = self._context.authentication.authenticate_token(headers.authorization)
        except RequestError:
            connections.remove_proxied_request(group)
            return False  # not counted yet: the general path refuses it
        identifier, after, wait, limit = found.groups()
        poll = EventPoll.create(
            token.caller,
            identifier.decode(),
            None if after is None else after.decode(),
            headers.wait_seconds if wait is None else int(wait),
            self._context.configuration.polls.wait,
            max_bytes=None if limit is None else int(limit),
            is_observer=token.is_read_only,
        )
        PendingPoll(self._channel, self._context, headers, poll).start_response()
        return True


@attrs.define(eq=False)
class PendingPoll:
    """A plain poll while it is answered; takes the place of a request on its channel."""

    _channel: ApiChannel
    _context: WebContext
    _headers: PollHeaders
    _poll: EventPoll
    startedWriting: bool = False  # noqa: N815  (Twisted's name)
    _waiting: Deferred[EventPage] | None = None
    _started_at: float = attrs.field(init=False)

    def start_response(self) -> None:
        """Send the page now, or once it has events."""
        self._started_at = self._context.clock.seconds()
        self._channel.start_response(self)
        try:
            page = self._poll.read_page_now(self._context.registry)
        except Exception:  # noqa: BLE001  (silence is no answer)
            self._refuse(Failure())
            return
        if page is not None:
            self._send(page)
        else:
            self._waiting = Deferred.fromCoroutine(self._poll.read_page(self._context.registry))
            self._waiting.addCallbacks(self._send, self._refuse)

    def connectionLost(self, reason: Failure) -> None:
        """Stop waiting: the client has disconnected."""
        if self._waiting is not None:
            self._waiting.cancel()
        if not self.startedWriting:
            self._end()
            self._record(CLIENT_GONE_STATUS, 0)

    def _took(self) -> float:
        """Return the seconds since the poll arrived."""
        return self._context.clock.seconds() - self._started_at

    def _send(self, page: EventPage) -> None:
        headers = {
            **self._poll.make_polling_headers(page),
            **self._poll.make_link_header(page, self._channel.site.base_path.prefix),
        }
        body = page.encode_json()
        self._write(HTTPStatus.OK, headers, body)
        self._record(HTTPStatus.OK, len(body))

    def _refuse(self, failure: Failure) -> None:
        if failure.check(CancelledError):
            return
        if not failure.check(RequestError):
            log.failure("defect: a request failed", failure)
        problem = error_responses.make_error_response(failure.value)
        self._write(
            problem.status,
            problem.headers,
            problem.body,
            error_responses.PROBLEM_DETAILS_MEDIA_TYPE,
        )
        self._record(problem.status, len(problem.body))

    def _write(
        self,
        status: HTTPStatus,
        headers: dict[bytes, bytes],
        body: bytes,
        content_type: bytes = JSON_MEDIA_TYPE,
    ) -> None:
        self.startedWriting = True
        headers = {**headers, **NO_STORE_HEADERS}
        if self._channel.mark_last_response_if_draining():
            headers = {**headers, b"Connection": b"close"}
        self._channel.write(
            b"".join(
                (
                    encode_status_line(status),
                    encode_headers(make_content_headers(body, content_type)),
                    self._headers.lines_before_date,
                    encode_date_header(int(self._context.read_wall_clock())),
                    self._headers.lines_after_date,
                    encode_headers(headers),
                    b"\r\n",
                    body,
                )
            )
        )
        self._end()
        self._channel.requestDone(self)

    def _end(self) -> None:
        if self._headers.client.address_group:
            self._channel.site.connection_limits.remove_proxied_request(
                self._headers.client.address_group
            )

    def _record(self, status: int, size: int) -> None:
        """Count a response, and log it if the access log is enabled."""
        request_log = self._context.request_log
        request_log.record_response(
            "GET", EVENTS_ROUTE, status, self._took() if self._waiting is None else None
        )
        if request_log.is_enabled:
            request_log.write_line(
                self._headers.client.address,
                self._poll.caller,
                "GET",
                f"/evaluation/{self._poll.identifier}/events",
                status,
                size,
                self._took(),
            )


@cache
def _first_line_pattern(base_path: str) -> re.Pattern[bytes]:
    """Return the pattern of a plain poll's first line, with an optional base path."""
    return re.compile(rb"GET (?:%b)?%b HTTP/1\.1" % (re.escape(base_path.encode()), _TARGET))


def _read_headers(block: bytes, channel: ApiChannel, context: WebContext) -> PollHeaders | None:
    """Return the result of a block of headers that ends with an empty line.

    None if the headers are not plain.
    """
    if not _BLOCK.fullmatch(block) or block.count(b"\r\n") > context.configuration.http.max_headers:
        return None
    headers = Headers()
    for name, value in _HEADERS.findall(block):
        headers.addRawHeader(name, value.strip(b" \t"))
    if any(map(headers.hasHeader, _NOT_PLAIN)) or not _keeps_connection(headers):
        return None
    hosts = headers.getRawHeaders(b"Host", [])
    if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
        return None
    try:
        authorization = get_header_values(headers, "Authorization")
        if find_bearer_link(authorization) is not None:  # it has bounds of its own
            return None
        client = channel.site.address_resolver.resolve_client(channel.peer, headers)
        context.check_origin(b"GET", headers)
        if negotiate_media_type(headers, OFFERED_MEDIA_TYPES) != PAGE_MEDIA_TYPE:
            return None
        preferred_wait = parse_prefer_wait(headers)
    except RequestError:
        return None
    origins = context.configuration.callers.origins
    answer = Headers()
    general = make_general_headers(origins, headers.getRawHeaders(b"Origin", []))
    for name, value in {**general, b"Date": b""}.items():
        answer.setRawHeaders(name, [value])
    answer.addRawHeader(b"Vary", b"Accept")
    return PollHeaders(
        client,
        authorization,
        preferred_wait,
        *_split_at_date(answer),
    )


def _keeps_connection(headers: Headers) -> bool:
    said = headers.getRawHeaders(b"Connection", [])
    return all(value.lower() == b"keep-alive" for value in said)


def _split_at_date(headers: Headers) -> tuple[bytes, bytes]:
    """Return the header lines before and behind `Date`."""
    pairs = [(name, value) for name, values in headers.getAllRawHeaders() for value in values]
    encoded = [b"%s: %s\r\n" % pair for pair in pairs]
    at = [name for name, _ in pairs].index(b"Date")
    return b"".join(encoded[:at]), b"".join(encoded[at + 1 :])
