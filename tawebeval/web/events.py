"""Which of the offered media types a client is given (RFC 9110, section 12.5.1)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from twisted.web.http import NO_CONTENT
from twisted.web.http_headers import Headers
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from tawebeval.core.framing import EVENT_STREAM, JSON_LINES
from tawebeval.core.pages import EventPage
from tawebeval.errors import HTTPVersionNotSupported, MalformedRequest, NotAcceptable
from tawebeval.evaluations.registry import Registry
from tawebeval.web.context import WebContext
from tawebeval.web.responses import argument, number, preferred_wait, send
from tawebeval.web.server.headers import set_headers
from tawebeval.web.server.request import ApiRequest
from tawebeval.web.streams import send_stream
from tawebeval.web.websockets import send_messages, take_handshake, wants_websocket


def negotiate(headers: Headers, offered: Sequence[str]) -> str:
    """Return the media type that the client likes best; the first one if it does not care.

    For each type the most specific range that matches it counts. Of types that are liked
    equally the one that is named wins over those that are only included, then the earlier.
    Parameters other than `q` make no difference. Raises NotAcceptable.
    """
    ranges = parse_accept_header(
        ", ".join(value.decode("latin-1") for value in headers.getRawHeaders(b"Accept", []))
    )
    if not ranges:
        return offered[0]
    plain = [(media_range.partition(";")[0].strip(), quality) for media_range, quality in ranges]
    found = MIMEAccept(plain).best_match(offered)
    if found is None:
        raise NotAcceptable(
            f"nothing that the request accepts is offered here; there is {', '.join(offered)}",
            offered=", ".join(offered),
        )
    return found


_POLL_AGAIN = b"1"  # seconds after an empty page, for those who do not wait


@attrs.frozen
class Poll:
    """A question of `caller` for the events of `identifier` that follow the cursor `after`.

    While there are none the answer comes up to `wait` seconds later; `asked_to` is whether it
    was the client who has said so. `limit` is the most bytes of events that the client wants on a
    page, None if it has not said so.
    """

    caller: str
    identifier: str
    after: str | None
    wait: int = 0
    asked_to: bool = False
    limit: int | None = None

    @classmethod
    def of(
        cls,
        caller: str,
        identifier: str,
        after: str | None,
        preferred: int | None,
        most: int,
        usual: int = 0,
        limit: int | None = None,
    ) -> Poll:
        """Return the poll of a client that would wait for `preferred` seconds, and may for `most`.

        None stands for `usual` ones.
        """
        wait = min(usual if preferred is None else preferred, most)
        return cls(caller, identifier, after, wait, bool(wait and preferred), limit)

    def page(self, registry: Registry) -> EventPage | None:
        """Return the page; None where it is still to be waited for. Raises RequestErrors."""
        page = registry.read_page(self.identifier, self.after, self.caller, self.limit)
        return None if self.wait and not page.has_news else page

    async def later(self, registry: Registry) -> EventPage:
        """Return the page that was to be waited for: with news, or when the time is over.

        Raises RequestErrors.
        """
        return await registry.wait_for_page(
            self.identifier, self.after, self.wait, self.caller, self.limit
        )

    def headers(self, page: EventPage) -> dict[bytes, bytes]:
        """Return the headers that tell when to ask again."""
        if self.asked_to:
            return {b"Preference-Applied": b"wait=%d" % self.wait}
        if self.wait or page.has_news:
            return {}
        return {b"Retry-After": _POLL_AGAIN}

    def link(self, page: EventPage, base_path: str) -> dict[bytes, bytes]:
        """Return the header that tells for what to ask then, if anything."""
        if page.end is None:
            return {}
        limit = "" if self.limit is None else f"&limit={self.limit}"
        target = f"{base_path}/evaluation/{self.identifier}/events?after={page.end}{limit}"
        link = f'<{target}>; rel="next"'
        return {b"Link": link.encode()}


STREAMS = {
    "text/event-stream": EVENT_STREAM,
    "application/jsonl": JSON_LINES,
    "application/x-ndjson": JSON_LINES,
}

PAGE = "application/json"
OFFERED = (PAGE, *STREAMS)

# What a client knows to be whole by itself, whatever ends the connection.
_COMPLETE = ", ".join(kind for kind in OFFERED if kind == PAGE or STREAMS[kind].end)


async def send_events(api: WebContext, request: ApiRequest, identifier: str) -> bytes:
    """Answer `GET /evaluation/{id}/events` with what its headers ask for."""
    request.responseHeaders.addRawHeader(b"Vary", b"Accept")
    # What is of no use to the kind that is asked for is refused all the same where it is wrong.
    skip, _, _ = number(request, "skip") or 0, number(request, "wait"), _page_limit(request)
    if wants_websocket(request):
        api.check_websocket(request.requestHeaders)
        take_handshake(request)
        following = api.registry.subscribe(
            identifier, argument(request, "after"), request.caller, skip
        )
        heartbeat = api.configuration.streams.heartbeat
        request.waits = True
        await send_messages(request, following, api.clock, heartbeat)
        return b""
    media_type = negotiate(request.requestHeaders, OFFERED)
    if media_type == PAGE:
        poll, page = await read_page(api, request, identifier)
        set_headers(request, poll.link(page, api.configuration.http.base_path))
        return send(request, page.encode())
    await _send_stream(api, request, identifier, media_type, skip)
    return b""


async def read_page(
    api: WebContext, request: ApiRequest, identifier: str, usual_wait: int = 0
) -> tuple[Poll, EventPage]:
    """Return what a request asks for, and the page; set the headers that tell when to ask again.

    `usual_wait` is for those who do not say how many seconds they would wait.
    """
    after, preferred = argument(request, "after"), preferred_wait(request)
    most = api.configuration.polls.wait
    limit = _page_limit(request)
    poll = Poll.of(request.caller, identifier, after, preferred, most, usual_wait, limit)
    if request.method == b"HEAD":  # which shows what there is, and acknowledges nothing
        page = api.registry.peek_page(identifier, after, request.caller, limit)
    else:
        now = poll.page(api.registry)
        request.waits = now is None
        page = now or await poll.later(api.registry)
    set_headers(request, poll.headers(page))
    return poll, page


def _page_limit(request: ApiRequest) -> int | None:
    """Return the bytes of events that a page may have by `?limit=N`. Raises MalformedRequest."""
    limit = number(request, "limit")
    if limit == 0:
        raise MalformedRequest("limit: is 0; the least is 1 byte, with which a page has one event")
    return limit


async def _send_stream(
    api: WebContext, request: ApiRequest, identifier: str, media_type: str, skip: int
) -> None:
    framing, after = STREAMS[media_type], argument(request, "after")
    if not framing.end and request.clientproto == b"HTTP/1.0":
        # There an answer of unknown length ends with its connection, as one that is cut off does.
        raise HTTPVersionNotSupported(
            f"{media_type}: over HTTP/1.0 the end of this stream would look like a broken"
            f" connection; use HTTP/1.1, or ask for {_COMPLETE}"
        )
    if media_type == "text/event-stream":
        # A browser that comes back repeats the URL, in which the first cursor stands.
        last = _last_event(request)
        if last:
            after, skip = last, 0
    following = None
    if request.method == b"HEAD":
        ended = not api.registry.can_subscribe(identifier, after, request.caller, skip)
    else:
        following = api.registry.subscribe(identifier, after, request.caller, skip)
        ended = following is None
    if ended and media_type == "text/event-stream":
        request.setResponseCode(NO_CONTENT)  # which tells a browser not to come back
        return
    request.setHeader(b"Content-Type", media_type.encode())
    request.setHeader(b"Cache-Control", b"no-store")
    request.setHeader(b"X-Accel-Buffering", b"no")  # nginx would keep them back
    if following is not None:
        request.waits = True
        heartbeat = api.configuration.streams.heartbeat
        await send_stream(request, following, framing, api.clock, heartbeat)


def _last_event(request: ApiRequest) -> str | None:
    values = request.requestHeaders.getRawHeaders(b"Last-Event-ID", [])
    if len(values) > 1:
        raise MalformedRequest("Last-Event-ID: stands in the request more than once")
    return values[0].decode("utf-8", "replace") if values else None
