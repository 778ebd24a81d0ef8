"""Pages and cursors: a ring as the API shows it (contract, section 3).

A cursor in the API is a string of decimal digits, or `DUMMY_END_CURSOR`, or null. As a page's
beginning, `null` is the beginning of all events; as a page's end, the end of all. The dummy end
stands between the last event and the end of all: a client that asks after it has received every
event, so from then on no event needs to be kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import attrs

from tawebeval.core.events import EventBatch
from tawebeval.core.ring import EventRing
from tawebeval.errors import DiscardedCursor, InvalidCursor

DUMMY_END_CURSOR = "end"

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


@attrs.frozen
class EventPage:
    """Consecutive events, and the cursors before and after them.

    `is_final` says that no later page has events.
    """

    begin: str | None
    end: str | None
    events: EventBatch

    @property
    def is_final(self) -> bool:
        """Whether no new event can follow."""
        return self.end in (DUMMY_END_CURSOR, None)

    @property
    def is_worth_sending(self) -> bool:
        """Whether the page has events or is the last one."""
        return bool(self.events.count) or self.is_final

    def encode_json(self) -> bytes:
        """Return the page as JSON."""
        head = b'{"begin":%s,"end":%s,"data":[' % (
            _encode_cursor(self.begin),
            _encode_cursor(self.end),
        )
        # A view, which saves a copy of the page.
        events = memoryview(self.events.lines.replace(b"\n", b","))[:-1]
        return b"".join((head, events, b"]}"))


def _encode_cursor(cursor: str | None) -> bytes:
    return b"null" if cursor is None else b'"%s"' % cursor.encode()


def make_dummy_end_page() -> EventPage:
    """Return the answer to the dummy end: an empty page with no next page."""
    return EventPage(DUMMY_END_CURSOR, None, EventBatch(0, b""))


def parse_cursor(after: str | None) -> str | None:
    """Return the cursor of a query, None for an empty or absent one. Raises InvalidCursor."""
    if not after:
        return None
    if after != DUMMY_END_CURSOR and not _NUMBER.fullmatch(after):
        raise InvalidCursor(
            f"after: {after[:80]!r} is not a cursor of this server; send the `end` of the last page"
        )
    return after


def locate_cursor(ring: EventRing, after: str | None, skip: int = 0) -> int:
    """Return the sequence number `skip` events after a cursor.

    The cursor itself may precede discarded events. Raises DiscardedCursor if the result does, and
    InvalidCursor if the result is beyond the newest event.
    """
    begin = 0 if after is None else ring.newest + 1 if after == DUMMY_END_CURSOR else int(after)
    begin += skip
    if begin > ring.newest:
        skipped = f" with skip: {skip}" if skip else ""
        raise InvalidCursor(
            f"after: {after or ''!r}{skipped} is after the newest event, {ring.newest}"
        )
    if begin < ring.oldest:
        raise DiscardedCursor(str(ring.oldest))
    return begin


def read_page(
    ring: EventRing,
    after: str | None,
    limit: int,
    format_time: Callable[[float], str] | None = None,
) -> EventPage:
    """Return the page that begins at the cursor `after`; discards nothing.

    `limit` bounds the events in bytes. With `format_time` each event has its time, on top of the
    limit. Raises DiscardedCursor and InvalidCursor.
    """
    begin = locate_cursor(ring, after)
    if format_time is None:
        events = ring.read_events(begin, limit)
    else:
        events = ring.read_timed_events(begin, limit, format_time)
    end = begin + events.count
    return EventPage(
        after, DUMMY_END_CURSOR if ring.is_closed and end == ring.newest else str(end), events
    )
