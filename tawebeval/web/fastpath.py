"""A shortcut for plain polls: they are answered without a request of Twisted's being made.

Most of what the daemon is asked is for a page, by a client that repeats the same few headers,
and most of what that costs would be taking the request apart and calling each of the layers
above. So a request that has come in one piece, and in which nothing is out of the ordinary,
is recognised by its bytes. Everything else takes the usual road: other requests, those that
come in pieces or have others behind them, those with a body or a header that is not plain,
and those to be refused before it is known what they ask for.

What the answer says is not made here: headers are read by the functions of the usual road,
once for each connection, since clients repeat them; a `Poll` makes the page; `problems` has
the errors. `tests/web/test_fastpath.py` holds the bytes of both roads against each other.
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

from tawebeval.core.identifiers import IDENTIFIER
from tawebeval.core.pages import EventPage
from tawebeval.errors import RequestError
from tawebeval.web.access_log import EVENTS
from tawebeval.web.context import WebContext
from tawebeval.web.events import OFFERED, PAGE, Poll, negotiate
from tawebeval.web.responses import NO_STORE, NUMBER, preference_of
from tawebeval.web.server import problems
from tawebeval.web.server.channel import ApiChannel
from tawebeval.web.server.headers import (
    JSON,
    date_line,
    framing_headers,
    general_headers,
    lines,
    status_line,
)
from tawebeval.web.server.interface import GONE
from tawebeval.web.server.limits import RemoteAddress

_LONGEST = 4096  # bytes of a request; longer ones are not plain

_TARGET = (
    rb"/evaluation/(%b)/events"
    rb"(?:\?(?:after=([A-Za-z0-9_-]*)(?:&|(?= )))?(?:wait=(%b)(?:&|(?= )))?"
    rb"(?:limit=(?!0)(%b))?)?" % (IDENTIFIER.encode(), NUMBER.encode(), NUMBER.encode())
)
_HEADER = rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\0\r\n]*)\r\n"
_BLOCK = re.compile(rb"(?:%b)*\r\n" % _HEADER)
_HEADERS = re.compile(_HEADER)
_HOST = re.compile(rb"[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*(?::[0-9]{1,5})?")

# Where these begin, other things are to be judged than what a page needs.
_NOT_PLAIN = (b"Content-Length", b"Transfer-Encoding", b"Expect", b"Upgrade")

log = Logger()


@attrs.frozen
class Fields:
    """What the headers of a plain poll come to.

    `client` is who asks, `authorization` what such headers say, `wait` the seconds that `Prefer`
    asks for. The answer has the lines `before` its date, and those `behind` it.
    """

    client: RemoteAddress
    authorization: Sequence[bytes] = attrs.field(repr=False)
    wait: int | None
    before: bytes
    behind: bytes


class PollFastPath:
    """The shortcut on one connection."""

    __slots__ = ("_api", "_block", "_channel", "_configuration", "_fields", "_line", "_longest")

    def __init__(self, api: WebContext, channel: ApiChannel) -> None:
        limits = api.configuration.http
        self._channel = channel
        self._api = api
        self._line = _line_below(limits.base_path)
        self._longest = min(_LONGEST, limits.line, limits.header_bytes)
        self._configuration = api.configuration  # by which the fields were made
        self._block = b""  # the headers that came last, with the empty line
        self._fields: Fields | None = None  # what these come to, None if they are not plain

    def take(self, data: bytes) -> bool:
        """Answer what has come, and return True, if it is one plain poll and nothing else.

        Otherwise nothing has been done. No request may have begun before.
        """
        if len(data) > self._longest:
            return False
        line, _, block = data.partition(b"\r\n")
        found = self._line.fullmatch(line)
        if found is None:
            return False
        if block != self._block or self._api.configuration is not self._configuration:
            self._block, self._configuration = block, self._api.configuration
            self._fields = read_fields(block, self._channel, self._api)
        fields = self._fields
        if fields is None:
            return False
        connections, group = self._channel.site.connections, fields.client.group
        if group and not connections.begin(group):
            return False
        try:
            caller = self._api.access.admit(fields.authorization)
        except RequestError:
            connections.end(group)
            return False  # it has not been counted, and is refused on the usual road
        identifier, after, wait, limit = found.groups()
        poll = Poll.of(
            caller,
            identifier.decode(),
            None if after is None else after.decode(),
            fields.wait if wait is None else int(wait),
            self._api.configuration.polls.wait,
            limit=None if limit is None else int(limit),
        )
        PlainRequest(self._channel, self._api, fields, poll).begin()
        return True


class PlainRequest:
    """A plain poll while it is answered, in the place that a request has on its channel."""

    __slots__ = ("_api", "_begun", "_channel", "_fields", "_poll", "_waiting", "startedWriting")

    def __init__(self, channel: ApiChannel, api: WebContext, fields: Fields, poll: Poll) -> None:
        self.startedWriting = False
        self._api = api
        self._channel = channel
        self._fields = fields
        self._poll = poll
        self._waiting: Deferred[EventPage] | None = None

    def begin(self) -> None:
        """Answer, now or when there is something to say."""
        self._begun = self._api.clock.seconds()
        self._channel.whole_request_received(self)
        try:
            page = self._poll.page(self._api.registry)
        except Exception:  # noqa: BLE001  (silence is no answer)
            self._refuse(Failure())
            return
        if page is not None:
            self._send(page)
        else:
            self._waiting = Deferred.fromCoroutine(self._poll.later(self._api.registry))
            self._waiting.addCallbacks(self._send, self._refuse)

    def connectionLost(self, reason: Failure) -> None:
        """Wait no longer: the client has gone."""
        if self._waiting is not None:
            self._waiting.cancel()
        if not self.startedWriting:
            self._end()
            self._note(GONE, 0)

    def _took(self) -> float:
        """Return the seconds since there was something to answer."""
        return self._api.clock.seconds() - self._begun

    def _send(self, page: EventPage) -> None:
        headers = {
            **self._poll.headers(page),
            **self._poll.link(page, self._channel.site.mount.path),
        }
        body = page.encode()
        self._write(HTTPStatus.OK, headers, body)
        traffic = self._api.traffic
        traffic.plain_page(self._took() if self._waiting is None else None)
        if traffic.logged:
            self._log(HTTPStatus.OK, len(body))

    def _refuse(self, failure: Failure) -> None:
        if failure.check(CancelledError):
            return
        if not failure.check(RequestError):
            log.failure("a request failed", failure)
        problem = problems.find_problem(failure.value)
        self._write(problem.status, problem.headers, problem.body, problems.CONTENT_TYPE)
        self._note(problem.status, len(problem.body))

    def _write(
        self,
        status: HTTPStatus,
        headers: dict[bytes, bytes],
        body: bytes,
        content_type: bytes = JSON,
    ) -> None:
        self.startedWriting = True
        headers = {**headers, **NO_STORE}
        if self._channel.note_last_answer():
            headers = {**headers, b"Connection": b"close"}
        self._channel.write(
            b"".join(
                (
                    status_line(status),
                    lines(framing_headers(body, content_type)),
                    self._fields.before,
                    date_line(int(self._api.time())),
                    self._fields.behind,
                    lines(headers),
                    b"\r\n",
                    body,
                )
            )
        )
        self._end()
        self._channel.requestDone(self)

    def _end(self) -> None:
        if self._fields.client.group:
            self._channel.site.connections.end(self._fields.client.group)

    def _note(self, status: int, size: int) -> None:
        """Count an answer without a page, and log it where that is wanted."""
        traffic = self._api.traffic
        traffic.answered("GET", EVENTS, status, self._took() if self._waiting is None else None)
        if traffic.logged:
            self._log(status, size)

    def _log(self, status: int, size: int) -> None:
        path = f"/evaluation/{self._poll.identifier}/events"
        self._api.traffic.write_line(
            self._fields.client.address,
            self._poll.caller,
            "GET",
            path,
            status,
            size,
            self._took(),
        )


@cache
def _line_below(base_path: str) -> re.Pattern[bytes]:
    """Return what the first line of a plain poll is, where the API is below that path."""
    return re.compile(rb"GET (?:%b)?%b HTTP/1\.1" % (re.escape(base_path.encode()), _TARGET))


def read_fields(block: bytes, channel: ApiChannel, api: WebContext) -> Fields | None:
    """Return what headers on `channel` come to, with the empty line behind them.

    None if they are not plain.
    """
    if not _BLOCK.fullmatch(block) or block.count(b"\r\n") > api.configuration.http.headers:
        return None
    headers = Headers()
    for name, value in _HEADERS.findall(block):
        headers.addRawHeader(name, value.strip(b" \t"))
    if any(map(headers.hasHeader, _NOT_PLAIN)) or not _keeps_alive(headers):
        return None
    hosts = headers.getRawHeaders(b"Host", [])
    if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
        return None
    try:
        client = channel.site.clients.asking(channel.peer, headers)
        api.check_origin(b"GET", headers)
        if negotiate(headers, OFFERED) != PAGE:
            return None
    except RequestError:
        return None
    origins = api.configuration.callers.origins
    answer = Headers()
    general = general_headers(origins, headers.getRawHeaders(b"Origin", []))
    for name, value in {**general, b"Date": b""}.items():
        answer.setRawHeaders(name, [value])
    answer.addRawHeader(b"Vary", b"Accept")
    return Fields(
        client,
        headers.getRawHeaders(b"Authorization", []),
        preference_of(headers),
        *_around_date(answer),
    )


def _keeps_alive(headers: Headers) -> bool:
    said = headers.getRawHeaders(b"Connection", [])
    return all(value.lower() == b"keep-alive" for value in said)


def _around_date(headers: Headers) -> tuple[bytes, bytes]:
    """Return the lines of headers before and behind `Date`."""
    pairs = [(name, value) for name, values in headers.getAllRawHeaders() for value in values]
    encoded = [b"%s: %s\r\n" % pair for pair in pairs]
    at = [name for name, _ in pairs].index(b"Date")
    return b"".join(encoded[:at]), b"".join(encoded[at + 1 :])
