"""GET /evaluation/{id}/events: negotiation, polls, and the choice of stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import attrs
from twisted.web.http import NO_CONTENT
from twisted.web.http_headers import Headers

from tawebeval.core.event_log import EventsEvicted
from tawebeval.core.framing import EVENT_STREAM, JSON_LINES
from tawebeval.core.pages import EventPage
from tawebeval.errors import (
    EvaluationExpired,
    HTTPVersionNotSupported,
    MalformedRequest,
    NotAcceptable,
)
from tawebeval.evaluations.archive_reader import EventSubscription, read_archived_or_raise
from tawebeval.evaluations.registry import EvaluationRegistry
from tawebeval.web.context import WebContext
from tawebeval.web.responses import (
    get_preferred_wait,
    get_query_argument,
    get_query_number,
    prepare_response,
)
from tawebeval.web.server.headers import set_headers
from tawebeval.web.server.request import ApiRequest
from tawebeval.web.server.request_headers import (
    get_header_values,
    parse_weights,
    split_elements,
)
from tawebeval.web.streams import HEARTBEAT_SECONDS, send_stream
from tawebeval.web.websockets import (
    is_websocket_request,
    prepare_handshake,
    send_websocket_messages,
)

PAGE_MEDIA_TYPE = "application/json"
STREAM_FRAMINGS = {
    "text/event-stream": EVENT_STREAM,
    "application/jsonl": JSON_LINES,
    "application/x-ndjson": JSON_LINES,
}
OFFERED_MEDIA_TYPES = (PAGE_MEDIA_TYPE, *STREAM_FRAMINGS)

# Media types whose end a client recognises without the end of the connection.
_COMPLETE = ", ".join(
    kind
    for kind in OFFERED_MEDIA_TYPES
    if kind == PAGE_MEDIA_TYPE or STREAM_FRAMINGS[kind].last_bytes
)
_POLL_AGAIN = b"1"  # seconds; Retry-After of an empty page if the client does not wait


async def send_events(context: WebContext, request: ApiRequest, identifier: str) -> bytes:
    """Answer GET /evaluation/{id}/events by a page, a stream or a WebSocket."""
    request.responseHeaders.addRawHeader(b"Vary", b"Accept")
    # A malformed parameter is refused even if this kind of response does not use it.
    skip, _, _, with_times = (
        get_query_number(request, "skip") or 0,
        get_query_number(request, "wait"),
        _page_limit(request),
        _wants_times(request),
    )
    if is_websocket_request(request):
        await context.stream_turns.wait(request.caller)  # a handshake takes 1 ms
        context.check_websocket_origin(request.requestHeaders)
        prepare_handshake(request)
        after = get_query_argument(request, "after")
        subscription = await _subscribe(context, request, identifier, after, skip)
        if subscription is not None:
            subscription.with_times = with_times
        request.waits_for_evaluation = True
        await send_websocket_messages(
            request, subscription, context.stream_turns, HEARTBEAT_SECONDS
        )
        return b""
    media_type = negotiate_media_type(request.requestHeaders, OFFERED_MEDIA_TYPES)
    if media_type == PAGE_MEDIA_TYPE:
        poll, page = await read_page(context, request, identifier)
        set_headers(request, poll.make_link_header(page, context.configuration.http.base_path))
        return prepare_response(request, page.encode_json())
    await context.stream_turns.wait(request.caller)
    await _send_stream(context, request, identifier, media_type, skip, with_times)
    return b""


async def read_page(
    context: WebContext, request: ApiRequest, identifier: str, default_wait_seconds: int = 0
) -> tuple[EventPoll, EventPage]:
    """Return the poll of a request and its page; set the headers that say when to poll again.

    `default_wait_seconds` is the wait in seconds if the client names none.
    """
    after, preferred_wait = get_query_argument(request, "after"), get_preferred_wait(request)
    max_wait = context.configuration.polls.wait
    limit, with_times = _page_limit(request), _wants_times(request)
    poll = EventPoll.create(
        request.caller,
        identifier,
        after,
        preferred_wait,
        max_wait,
        default_wait_seconds,
        limit,
        with_times,
        is_observer=request.is_read_only,
    )
    if request.method == b"HEAD":  # acknowledges nothing
        peek = attrs.evolve(poll, wait_seconds=0, is_observer=True)
        page = await peek.read_page(context.registry)
    else:
        now = poll.read_page_now(context.registry)
        request.waits_for_evaluation = now is None
        page = now or await poll.read_page(context.registry)
    set_headers(request, poll.make_polling_headers(page))
    return poll, page


def _page_limit(request: ApiRequest) -> int | None:
    """Return `?limit=N`, the maximum of bytes of events on a page. Raises: MalformedRequest."""
    limit = get_query_number(request, "limit")
    if limit == 0:
        raise MalformedRequest(
            "limit: 0 is too small; the minimum is 1 byte, which gives pages of one event"
        )
    return limit


def _wants_times(request: ApiRequest) -> bool:
    """Return whether `?times=1` asks for the times of events. Raises: MalformedRequest."""
    times = get_query_number(request, "times")
    if times not in (None, 0, 1):
        raise MalformedRequest(f"times: {times} is neither 0 nor 1")
    return times == 1


async def _send_stream(
    context: WebContext,
    request: ApiRequest,
    identifier: str,
    media_type: str,
    skip: int,
    with_times: bool,
) -> None:
    framing, after = STREAM_FRAMINGS[media_type], get_query_argument(request, "after")
    if not framing.last_bytes and request.clientproto == b"HTTP/1.0":
        # There the end of the connection ends the response, complete or not.
        raise HTTPVersionNotSupported(
            f"{media_type} needs HTTP/1.1: over HTTP/1.0 the end of this stream would look like a"
            f" broken connection; use HTTP/1.1, or accept {_COMPLETE}"
        )
    if media_type == "text/event-stream":
        # A browser that reconnects repeats the URL with its first cursor.
        last = _get_last_event_id(request)
        if last:
            after, skip = last, 0
    subscription = None
    if request.method == b"HEAD":
        ended = not await _can_subscribe(context, request, identifier, after, skip)
    else:
        subscription = await _subscribe(context, request, identifier, after, skip)
        ended = subscription is None
    if ended and media_type == "text/event-stream":
        request.setResponseCode(NO_CONTENT)  # an EventSource does not reconnect after it
        return
    request.setHeader(b"Content-Type", media_type.encode())
    request.setHeader(b"Cache-Control", b"no-store")
    request.setHeader(b"X-Accel-Buffering", b"no")  # or nginx would buffer them
    if subscription is not None:
        subscription.with_times = with_times
        request.waits_for_evaluation = True
        await send_stream(request, subscription, framing, context.stream_turns, HEARTBEAT_SECONDS)


async def _subscribe(
    context: WebContext, request: ApiRequest, identifier: str, after: str | None, skip: int
) -> EventSubscription | None:
    """Return a subscription, from the archive if the evaluation is gone from memory."""
    registry, caller = context.registry, request.caller
    try:
        return registry.events.subscribe(
            identifier, after, caller, skip, is_observer=request.is_read_only
        )
    except EvaluationExpired as error:
        archived = registry.archived.subscribe(identifier, after, caller, skip)
        return await read_archived_or_raise(archived, error)


async def _can_subscribe(
    context: WebContext, request: ApiRequest, identifier: str, after: str | None, skip: int
) -> bool:
    """Return whether `_subscribe` would return a subscription, without an acknowledgement."""
    registry, caller = context.registry, request.caller
    try:
        return registry.events.can_subscribe(identifier, after, caller, skip)
    except EvaluationExpired as error:
        await read_archived_or_raise(
            registry.archived.subscribe(identifier, after, caller, skip), error
        )
        return True


def _get_last_event_id(request: ApiRequest) -> str | None:
    values = get_header_values(request.requestHeaders, "Last-Event-ID")
    if len(values) > 1:
        raise MalformedRequest("Last-Event-ID: the header is repeated; send it once")
    return values[0].decode("utf-8", "replace") if values else None


def negotiate_media_type(headers: Headers, offered: Sequence[str]) -> str:
    """Return the media type of `offered` that the client prefers (RFC 9110, section 12.5.1).

    Without a header `Accept` it is the first one. For each type the most specific matching range
    counts; of equal types one that is named wins over one that a range includes, then the earlier.
    Parameters other than `q` are ignored. Raises: NotAcceptable, HeaderTooLarge.
    """
    return _find_preferred(b",".join(get_header_values(headers, "Accept")), tuple(offered))


@lru_cache(64)  # clients repeat a few values
def _find_preferred(accept: bytes, offered: Sequence[str]) -> str:
    weights = parse_weights(split_elements(accept))
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


@attrs.frozen
class EventPoll:
    """A request of `caller` for the events of `identifier` after the cursor `after_cursor`.

    If there are none, the response waits up to `wait_seconds` seconds. `is_wait_requested` is
    whether the client asked for that. `max_bytes` is the maximum of bytes of events on the page;
    None = the daemon's. If `with_times`, each event on it has its time. If `is_observer`, it
    acknowledges nothing.
    """

    caller: str
    identifier: str
    after_cursor: str | None
    wait_seconds: int = 0
    is_wait_requested: bool = False
    max_bytes: int | None = None
    with_times: bool = False
    is_observer: bool = False

    @classmethod
    def create(
        cls,
        caller: str,
        identifier: str,
        after_cursor: str | None,
        preferred_wait: int | None,
        max_wait: int,
        default_wait: int = 0,
        max_bytes: int | None = None,
        with_times: bool = False,
        *,
        is_observer: bool = False,
    ) -> EventPoll:
        """Return the poll of a client that would wait for `preferred_wait` seconds.

        None stands for `default_wait`. The poll waits for `max_wait` seconds at most.
        """
        wait = min(default_wait if preferred_wait is None else preferred_wait, max_wait)
        is_wait_requested = bool(wait and preferred_wait)
        return cls(
            caller,
            identifier,
            after_cursor,
            wait,
            is_wait_requested,
            max_bytes,
            with_times,
            is_observer,
        )

    def read_page_now(self, registry: EvaluationRegistry) -> EventPage | None:
        """Return the page; None if the poll has to wait for it. Raises: RequestError."""
        try:
            page = registry.events.read_page_now(
                self.identifier,
                self.after_cursor,
                self.caller,
                self.max_bytes,
                with_times=self.with_times,
                is_observer=self.is_observer,
            )
        except EventsEvicted:
            return None
        except EvaluationExpired:
            if registry.archived.is_enabled:
                return None
            raise
        return None if self.wait_seconds and not page.has_events_or_is_last else page

    async def read_page(self, registry: EvaluationRegistry) -> EventPage:
        """Return the page with new events, or when the time is over; an archived page at once.

        Raises: RequestError.
        """
        try:
            return await registry.events.read_page(
                self.identifier,
                self.after_cursor,
                self.caller,
                self.max_bytes,
                with_times=self.with_times,
                is_observer=self.is_observer,
                wait_seconds=self.wait_seconds,
            )
        except EvaluationExpired as error:
            archived = registry.archived.read_page(
                self.identifier,
                self.after_cursor,
                self.caller,
                registry.events.compute_max_page_bytes(self.max_bytes),
                with_times=self.with_times,
            )
            return await read_archived_or_raise(archived, error)

    def make_polling_headers(self, page: EventPage) -> dict[bytes, bytes]:
        """Return the headers that say when to poll again."""
        if self.is_wait_requested:
            return {b"Preference-Applied": b"wait=%d" % self.wait_seconds}
        if self.wait_seconds or page.has_events_or_is_last:
            return {}
        return {b"Retry-After": _POLL_AGAIN}

    def make_link_header(self, page: EventPage, base_path: str) -> dict[bytes, bytes]:
        """Return the header `Link` with the next page's target; empty after the last page."""
        if page.end_cursor is None:
            return {}
        limit = "" if self.max_bytes is None else f"&limit={self.max_bytes}"
        times = "&times=1" if self.with_times else ""
        target = (
            f"{base_path}/evaluation/{self.identifier}/events?after={page.end_cursor}{limit}{times}"
        )
        link = f'<{target}>; rel="next"'
        return {b"Link": link.encode()}
