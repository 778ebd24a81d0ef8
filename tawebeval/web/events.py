"""GET /evaluation/{id}/events: negotiation, polls, and the choice of stream."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import lru_cache
from typing import Any

import attrs
from twisted.web.http import NO_CONTENT
from twisted.web.http_headers import Headers

from tawebeval.core.events import (
    EVENT_STREAM_FRAMING,
    JSON_LINES_FRAMING,
    EventPage,
    EventsEvicted,
)
from tawebeval.errors import (
    EvaluationExpired,
    HTTPVersionNotSupported,
    MalformedRequest,
    NotAcceptable,
)
from tawebeval.evaluations.reading import Subscription
from tawebeval.evaluations.service import EvaluationRegistry
from tawebeval.web.auth import CROSS_ORIGIN_READ_REFUSAL, check_origin
from tawebeval.web.server.channel import ApiRequest
from tawebeval.web.server.messages import (
    cache_short_queries,
    get_header,
    get_header_values,
    get_query_argument,
    get_query_number,
    parse_prefer_wait,
    parse_query,
    parse_qvalues,
    split_header_elements,
)
from tawebeval.web.streams import (
    StreamScheduler,
    check_websocket_handshake,
    is_websocket_request,
    send_stream,
    send_websocket_messages,
)

PAGE_MEDIA_TYPE = "application/json"
STREAM_FRAMINGS = {
    "text/event-stream": EVENT_STREAM_FRAMING,
    "application/jsonl": JSON_LINES_FRAMING,
    "application/x-ndjson": JSON_LINES_FRAMING,
}
OFFERED_MEDIA_TYPES = (PAGE_MEDIA_TYPE, *STREAM_FRAMINGS)

# Media types whose end a client recognises without the end of the connection.
_COMPLETE = ", ".join(
    kind
    for kind in OFFERED_MEDIA_TYPES
    if kind == PAGE_MEDIA_TYPE or STREAM_FRAMINGS[kind].last_bytes
)
_POLL_AGAIN = b"Retry-After: 1\r\n"  # seconds; of an empty page if the client does not wait
# The headers of a page: its length, and those that not all pages have.
_PAGE_HEADERS = (
    b"Content-Length: %d\r\nContent-Type: application/json\r\n"
    b"%bCache-Control: no-store\r\nVary: Accept\r\n"
)


@attrs.frozen
class EventQuery:
    """The query of a request for events.

    `max_bytes` is the maximum of bytes of events on a page, None = the daemon's. `wait_seconds` is
    None if the query has none. If `includes_times`, each event has its time.
    """

    after_cursor: str | None
    skip_count: int = 0
    wait_seconds: int | None = None
    max_bytes: int | None = None
    includes_times: bool = False


@cache_short_queries
def parse_event_query(raw_query: bytes) -> EventQuery:
    """Return the query of a request. Raises: MalformedRequest, also for unused parameters."""
    query = parse_query(raw_query)
    limit, times = get_query_number(query, "limit"), get_query_number(query, "times")
    if limit == 0:
        raise MalformedRequest(
            "limit: 0 is too small; the minimum is 1 byte, which gives pages of one event"
        )
    if times not in (None, 0, 1):
        raise MalformedRequest(f"times: {times} is neither 0 nor 1")
    return EventQuery(
        get_query_argument(query, "after"),
        get_query_number(query, "skip") or 0,
        get_query_number(query, "wait"),
        limit,
        times == 1,
    )


def send_events(
    registry: EvaluationRegistry, scheduler: StreamScheduler, request: ApiRequest, identifier: str
) -> bytes | Coroutine[Any, Any, bytes]:
    """Answer GET /evaluation/{id}/events by a page, a stream or a WebSocket.

    Return a page that is at hand; else a coroutine that returns what is left to be sent. Raises:
    RequestError, as the coroutine.
    """
    query = parse_event_query(request.raw_query)
    if is_websocket_request(request):
        return _send_websocket_messages(registry, scheduler, request, identifier, query)
    media_type = negotiate_media_type(request.requestHeaders, OFFERED_MEDIA_TYPES)
    if media_type != PAGE_MEDIA_TYPE:
        return _send_stream(registry, scheduler, request, identifier, media_type, query)
    path = f"{registry.context.configuration.http.base_path}/evaluation/{identifier}/events"
    return prepare_event_page(registry, request, identifier, query, next_path=path)


def prepare_event_page(
    registry: EvaluationRegistry,
    request: ApiRequest,
    identifier: str,
    query: EventQuery,
    default_wait_seconds: int = 0,
    next_path: str = "",
) -> bytes | Coroutine[Any, Any, bytes]:
    """Return the page of a request, or a coroutine that waits for it. Raises: RequestError.

    The response waits for `default_wait_seconds` seconds if the client names no wait. It has a
    link to the next page at `next_path`, none if that is empty.
    """
    preferred = query.wait_seconds
    if preferred is None:
        preferred = parse_prefer_wait(request.requestHeaders)
    wait = default_wait_seconds if preferred is None else preferred
    if wait:
        wait = min(wait, registry.context.configuration.polls.wait)
    is_head = request.method == b"HEAD"  # which acknowledges nothing
    is_observer = is_head or request.is_read_only
    is_wait_told = bool(wait and preferred)
    page = None
    arguments = identifier, query.after_cursor, request.caller, query.max_bytes
    try:
        page = registry.events.read_page_now(
            *arguments, includes_times=query.includes_times, is_observer=is_observer
        )
    except EventsEvicted:
        pass
    except EvaluationExpired:
        if not registry.archive_reader.is_enabled:
            raise
    if page is not None and (is_head or not wait or page.has_events_or_is_last):
        return _prepare_page(request, page, query, wait, is_wait_told, next_path)
    request.waits_for_evaluation = not is_head

    async def wait_for_page() -> bytes:
        seconds = 0 if is_head else wait
        page = await registry.events.read_page(
            *arguments,
            includes_times=query.includes_times,
            is_observer=is_observer,
            wait_seconds=seconds,
        )
        return _prepare_page(request, page, query, wait, is_wait_told, next_path)

    return wait_for_page()


def _prepare_page(
    request: ApiRequest,
    page: EventPage,
    query: EventQuery,
    wait: int,
    is_wait_told: bool,
    next_path: str,
) -> bytes:
    """Set the headers of the response with a page, and return its body."""
    body = page.encode_json()
    headers = b""
    if is_wait_told:
        headers = b"Preference-Applied: wait=%d\r\n" % wait
    elif not (wait or page.has_events_or_is_last):
        headers = _POLL_AGAIN
    if next_path and page.end_cursor is not None:
        limit = "" if query.max_bytes is None else f"&limit={query.max_bytes}"
        times = "&times=1" if query.includes_times else ""
        link = f'Link: <{next_path}?after={page.end_cursor}{limit}{times}>; rel="next"\r\n'
        headers += link.encode()
    request.encoded_headers = _PAGE_HEADERS % (len(body), headers)
    return body


async def _send_websocket_messages(
    registry: EvaluationRegistry,
    scheduler: StreamScheduler,
    request: ApiRequest,
    identifier: str,
    query: EventQuery,
) -> bytes:
    await scheduler.wait_for_turn(request.caller)  # a handshake takes 1 ms
    origins = registry.context.configuration.callers.origins
    if "*" not in origins:
        # Browsers enforce CORS for other requests, but not for WebSockets (RFC 6455, section 10.2).
        check_origin(request.requestHeaders, origins, CROSS_ORIGIN_READ_REFUSAL)
    check_websocket_handshake(request)
    subscription = await _subscribe(registry, request, identifier, query)
    request.waits_for_evaluation = True
    await send_websocket_messages(request, subscription, scheduler)
    return b""


async def _send_stream(
    registry: EvaluationRegistry,
    scheduler: StreamScheduler,
    request: ApiRequest,
    identifier: str,
    media_type: str,
    query: EventQuery,
) -> bytes:
    request.responseHeaders.addRawHeader(b"Vary", b"Accept")
    await scheduler.wait_for_turn(request.caller)
    framing = STREAM_FRAMINGS[media_type]
    if not framing.last_bytes and request.clientproto == b"HTTP/1.0":
        # There the end of the connection ends the response, complete or not.
        raise HTTPVersionNotSupported(
            f"{media_type} needs HTTP/1.1: over HTTP/1.0 the end of this stream would look like a"
            f" broken connection; use HTTP/1.1, or accept {_COMPLETE}"
        )
    if media_type == "text/event-stream":
        # A browser that reconnects repeats the URL with its first cursor.
        last = get_header(request.requestHeaders, "Last-Event-ID")
        if last:
            query = attrs.evolve(query, after_cursor=last, skip_count=0)
    subscription = await _subscribe(registry, request, identifier, query)
    if subscription is None and media_type == "text/event-stream":
        request.setResponseCode(NO_CONTENT)  # an EventSource does not reconnect after it
        return b""
    request.setHeader(b"Content-Type", media_type.encode())
    request.setHeader(b"Cache-Control", b"no-store")
    request.setHeader(b"X-Accel-Buffering", b"no")  # or nginx would buffer them
    if subscription is not None and request.method != b"HEAD":
        request.waits_for_evaluation = True
        await send_stream(request, subscription, framing, scheduler)
    return b""


async def _subscribe(
    registry: EvaluationRegistry, request: ApiRequest, identifier: str, query: EventQuery
) -> Subscription | None:
    """Return a subscription, from the archive if the evaluation is gone from memory."""
    subscription = await registry.events.open_subscription(
        identifier,
        query.after_cursor,
        request.caller,
        query.skip_count,
        # HEAD acknowledges nothing.
        is_observer=request.is_read_only or request.method == b"HEAD",
    )
    if subscription is not None:
        subscription.includes_times = query.includes_times
    return subscription


def negotiate_media_type(headers: Headers, offered: Sequence[str]) -> str:
    """Return the media type of `offered` that the client prefers (RFC 9110, section 12.5.1).

    Without a header `Accept` it is the first one. For each type the most specific matching range
    counts; of equal types one that is named wins over one that a range includes, then the earlier.
    Parameters other than `q` are ignored. Raises: NotAcceptable, HeaderTooLarge.
    """
    values = get_header_values(headers, "Accept")
    return _find_preferred(b",".join(values), tuple(offered)) if values else offered[0]


@lru_cache(64)  # clients repeat a few values
def _find_preferred(accept: bytes, offered: Sequence[str]) -> str:
    weights = parse_qvalues(split_header_elements(accept))
    if not weights:
        return offered[0]

    def rank(media_type: str) -> tuple[float, bool]:
        # `*` alone is what Java's HttpURLConnection means by `*/*`.
        ranges = (media_type, f"{media_type.partition('/')[0]}/*", "*/*", "*")
        weight = next((weights[each] for each in ranges if each in weights), 0.0)
        return weight, media_type in weights

    found = max(offered, key=rank)
    if not rank(found)[0]:
        raise NotAcceptable(
            f"no media type of the header Accept is available; available: {', '.join(offered)}",
            offered=", ".join(offered),
        )
    return found
