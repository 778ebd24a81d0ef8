"""Pages and cursors: the events of an evaluation as the API shows them.

A cursor in the API is a string of decimal digits, or `ALL_RECEIVED_CURSOR`, or null. As a page's
beginning, `null` is the beginning of all events; as a page's end, the end of all. The dummy end,
`ALL_RECEIVED_CURSOR`, stands between the last event and the end of all: a client that asks after it
has received every event, so from then on no event needs to be kept.
"""

from __future__ import annotations

import re

import attrs

from tawebeval.core.event_log import EventLog
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


def resolve_cursor(
    log: EventLog | EventRing,
    after_cursor: str | None,
    skip_count: int = 0,
    *,
    may_be_ahead: bool = False,
) -> int:
    """Return the sequence number `skip_count` events after a cursor.

    The cursor itself may precede discarded events. Raises DiscardedCursor if the result does, and
    InvalidCursor if the result is beyond the newest event, unless a client may have received events
    that the log does not have.
    """
    begin = (
        0
        if after_cursor is None
        else log.end_cursor + 1
        if after_cursor == ALL_RECEIVED_CURSOR
        else int(after_cursor)
    )
    begin += skip_count
    if begin > log.end_cursor and not may_be_ahead:
        skipped = f" with skip: {skip_count}" if skip_count else ""
        raise InvalidCursor(
            f"after: {after_cursor or ''!r}{skipped} is after the newest event, {log.end_cursor}"
        )
    if begin < log.begin_cursor:
        raise DiscardedCursor(str(log.begin_cursor))
    return begin


def make_page(log: EventLog, after_cursor: str | None, events: EventBatch) -> EventPage:
    """Return the page with these events, which `log` has after a cursor that can be resolved."""
    end = (0 if after_cursor is None else int(after_cursor)) + events.count
    is_last = log.has_ended and end == log.end_cursor
    return EventPage(after_cursor, ALL_RECEIVED_CURSOR if is_last else str(end), events)
