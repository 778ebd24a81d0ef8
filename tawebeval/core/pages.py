"""Pages and cursors: a ring as the API shows it (contract, section 3).

A cursor in the API is a string of decimal digits, or `ALL_RECEIVED_CURSOR`, or null. As a page's
beginning, `null` is the beginning of all events; as a page's end, the end of all. The dummy end,
`ALL_RECEIVED_CURSOR`, stands between the last event and the end of all: a client that asks after it
has received every event, so from then on no event needs to be kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import attrs

from tawebeval.core.events import EventBatch
from tawebeval.core.ring import EventRing
from tawebeval.errors import DiscardedCursor, InvalidCursor

ALL_RECEIVED_CURSOR = "end"

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


@attrs.frozen
class EventPage:
    """Consecutive events, and the cursors before and after them.

    `is_last_page` says that no later page has events.
    """

    begin_cursor: str | None
    end_cursor: str | None
    events: EventBatch

    @property
    def is_last_page(self) -> bool:
        """Whether no new event can follow."""
        return self.end_cursor in (ALL_RECEIVED_CURSOR, None)

    @property
    def has_events_or_is_last(self) -> bool:
        """Whether the page has events or is the last one."""
        return bool(self.events.count) or self.is_last_page

    def encode_json(self) -> bytes:
        """Return the page as JSON."""
        head = b'{"begin":%s,"end":%s,"data":[' % (
            _encode_cursor(self.begin_cursor),
            _encode_cursor(self.end_cursor),
        )
        # A view, which saves a copy of the page.
        events = memoryview(self.events.lines.replace(b"\n", b","))[:-1]
        return b"".join((head, events, b"]}"))


def _encode_cursor(cursor: str | None) -> bytes:
    return b"null" if cursor is None else b'"%s"' % cursor.encode()


def make_empty_last_page() -> EventPage:
    """Return the answer to the dummy end: an empty page with no next page."""
    return EventPage(ALL_RECEIVED_CURSOR, None, EventBatch(0, b""))


def parse_cursor(text: str | None) -> str | None:
    """Return the cursor of a query, None for an empty or absent one. Raises InvalidCursor."""
    if not text:
        return None
    if text != ALL_RECEIVED_CURSOR and not _NUMBER.fullmatch(text):
        raise InvalidCursor(
            f"after: {text[:80]!r} is not a cursor of this server; send the `end` of the last page"
        )
    return text


def resolve_cursor(ring: EventRing, after_cursor: str | None, skip_count: int = 0) -> int:
    """Return the sequence number `skip_count` events after a cursor.

    The cursor itself may precede discarded events. Raises DiscardedCursor if the result does, and
    InvalidCursor if the result is beyond the newest event.
    """
    begin = (
        0
        if after_cursor is None
        else ring.end_cursor + 1
        if after_cursor == ALL_RECEIVED_CURSOR
        else int(after_cursor)
    )
    begin += skip_count
    if begin > ring.end_cursor:
        skipped = f" with skip: {skip_count}" if skip_count else ""
        raise InvalidCursor(
            f"after: {after_cursor or ''!r}{skipped} is after the newest event, {ring.end_cursor}"
        )
    if begin < ring.begin_cursor:
        raise DiscardedCursor(str(ring.begin_cursor))
    return begin


def read_page(
    ring: EventRing,
    after_cursor: str | None,
    max_bytes: int,
    format_time: Callable[[float], str] | None = None,
) -> EventPage:
    """Return the page that begins at `after_cursor`; discards nothing.

    `max_bytes` bounds the events. With `format_time` each event has its time, on top of the bound.
    Raises DiscardedCursor and InvalidCursor.
    """
    begin = resolve_cursor(ring, after_cursor)
    if format_time is None:
        events = ring.read_events(begin, max_bytes)
    else:
        events = ring.read_timed_events(begin, max_bytes, format_time)
    end = begin + events.count
    return EventPage(
        after_cursor,
        ALL_RECEIVED_CURSOR if ring.has_ended and end == ring.end_cursor else str(end),
        events,
    )
