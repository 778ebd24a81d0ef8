"""Pages and cursors: the ring as the wire shows it (contract, section 3).

On the wire a cursor is a string of decimal digits, or `DUMMY_END`, or null. `null` as the
beginning is the very beginning, `null` as the end is the very end. Between the last event
and the very end stands the dummy end: whoever asks after it has received every event, so
that then, and not before, nothing needs to be kept.
"""

from __future__ import annotations

import re

import attrs

from tawebeval.core.events import Batch
from tawebeval.core.ring import Ring
from tawebeval.errors import DiscardedCursor, InvalidCursor

DUMMY_END = "end"

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


@attrs.frozen
class Page:
    """A run of consecutive events and the cursors that it lies between.

    `final` tells that no page after this one will have events.
    """

    begin: str | None
    end: str | None
    events: Batch

    @property
    def final(self) -> bool:
        """Whether nothing follows: asking again gives no new event."""
        return self.end in (DUMMY_END, None)

    @property
    def has_news(self) -> bool:
        """Whether it tells something: events, or that none will follow."""
        return bool(self.events.count) or self.final

    def encode(self) -> bytes:
        """Return the page as JSON."""
        head = b'{"begin":%s,"end":%s,"data":[' % (
            _encode_cursor(self.begin),
            _encode_cursor(self.end),
        )
        # A view, for what is large is to be copied as seldom as can be.
        events = memoryview(self.events.lines.replace(b"\n", b","))[:-1]
        return b"".join((head, events, b"]}"))


def _encode_cursor(cursor: str | None) -> bytes:
    return b"null" if cursor is None else b'"%s"' % cursor.encode()


def after_the_end() -> Page:
    """Return the answer to the dummy end, the same for ever: empty, and with nothing after it."""
    return Page(DUMMY_END, None, Batch(0, b""))


def parse_cursor(after: str | None) -> str | None:
    """Return `after` with an empty one taken as absent. Raises InvalidCursor."""
    if not after:
        return None
    if after != DUMMY_END and not _NUMBER.fullmatch(after):
        raise InvalidCursor(
            f"after: {after[:80]!r} is no cursor of this server; "
            "use the `end` of the page that was read last"
        )
    return after


def place(ring: Ring, after: str | None, skip: int = 0) -> int:
    """Return where in the ring the place lies that is `skip` events after a cursor.

    The cursor itself may be that of what is discarded. Raises DiscardedCursor, and InvalidCursor
    for a place beyond the newest event.
    """
    begin = 0 if after is None else ring.newest + 1 if after == DUMMY_END else int(after)
    begin += skip
    if begin > ring.newest:
        skipped = f" with skip: {skip}" if skip else ""
        raise InvalidCursor(
            f"after: {after or ''!r}{skipped} lies beyond the newest event, {ring.newest}"
        )
    if begin < ring.oldest:
        raise DiscardedCursor(str(ring.oldest))
    return begin


def read_page(ring: Ring, after: str | None, limit: int) -> Page:
    """Return the page that begins at the cursor `after`; nothing is discarded.

    `limit` bounds its events in bytes. Raises as `place` does.
    """
    begin = place(ring, after)
    events = ring.read(begin, limit)
    end = begin + events.count
    return Page(after, DUMMY_END if ring.closed and end == ring.newest else str(end), events)
