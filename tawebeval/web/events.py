"""The events of an evaluation, in the ways in which a client may want them.

A page is an answer of its own; a stream goes on to the end of the evaluation. Everything
that is wrong with a request is answered before a stream begins.
"""

from __future__ import annotations

from twisted.web.http import NO_CONTENT

from tawebeval.core.framing import EVENT_STREAM, LINES
from tawebeval.core.pages import Page
from tawebeval.errors import HTTPVersionNotSupported, MalformedRequest
from tawebeval.web.context import Api
from tawebeval.web.negotiation import negotiate
from tawebeval.web.polls import Poll
from tawebeval.web.responses import argument, number, preferred_wait, send
from tawebeval.web.server.headers import set_headers
from tawebeval.web.server.request import ApiRequest
from tawebeval.web.streams import send_stream
from tawebeval.web.websockets import send_messages, take_handshake, wants_websocket

STREAMS = {
    "text/event-stream": EVENT_STREAM,
    "application/jsonl": LINES,
    "application/x-ndjson": LINES,
}

PAGE = "application/json"
OFFERED = (PAGE, *STREAMS)

# What a client knows to be whole by itself, whatever ends the connection.
_COMPLETE = ", ".join(kind for kind in OFFERED if kind == PAGE or STREAMS[kind].end)


async def send_events(api: Api, request: ApiRequest, identifier: str) -> bytes:
    """Answer `GET /evaluation/{id}/events` with what its headers ask for."""
    request.responseHeaders.addRawHeader(b"Vary", b"Accept")
    # What is of no use to the kind that is asked for is refused all the same where it is wrong.
    skip, _, _ = number(request, "skip") or 0, number(request, "wait"), _page_limit(request)
    if wants_websocket(request):
        api.check_websocket(request.requestHeaders)
        take_handshake(request)
        following = api.registry.follow(
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
    api: Api, request: ApiRequest, identifier: str, usual_wait: int = 0
) -> tuple[Poll, Page]:
    """Return what a request asks for, and the page; set the headers that tell when to ask again.

    `usual_wait` is for those who do not say how many seconds they would wait.
    """
    after, preferred = argument(request, "after"), preferred_wait(request)
    most = api.configuration.polls.wait
    limit = _page_limit(request)
    poll = Poll.of(request.caller, identifier, after, preferred, most, usual_wait, limit)
    if request.method == b"HEAD":  # which shows what there is, and acknowledges nothing
        page = api.registry.peek(identifier, after, request.caller, limit)
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
    api: Api, request: ApiRequest, identifier: str, media_type: str, skip: int
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
        ended = not api.registry.can_follow(identifier, after, request.caller, skip)
    else:
        following = api.registry.follow(identifier, after, request.caller, skip)
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
