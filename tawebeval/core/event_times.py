r"""Times of the events in a ring, which a reader may ask for.

A mark is the cursor before the first event of a write of stdout, and the time of the write in
milliseconds since the epoch. Events of the same millisecond share one. So marks cost 16 bytes for
each write (64 KiB at most), not for each event, and count in the memory for events.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable

from tawebeval.core.events import EventBatch

BYTES_PER_TIMESTAMP = 16
"""Bytes of memory that a mark takes."""


class EventTimes:
    """Times of the events of one ring."""

    __slots__ = ("_cursors", "_discarded", "_times")

    def __init__(self) -> None:
        self._cursors = array("Q")
        self._times = array("q")
        self._discarded = 0  # marks at the front that no event has any more

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that all marks take, except the last: an empty ring has one, too."""
        return BYTES_PER_TIMESTAMP * max(0, len(self._cursors) - 1)

    def record_time(self, cursor: int, time: int) -> None:
        """Add the time of the events after `cursor`, the newest."""
        if not self._times or self._times[-1] != time:
            self._cursors.append(cursor)
            self._times.append(time)

    def discard_times_before(self, cursor: int) -> None:
        """Forget the times of the events before `cursor`."""
        self._discarded = self._find_mark(cursor)
        if 2 * self._discarded >= len(self._cursors):  # else each discard would move all marks
            del self._cursors[: self._discarded]
            del self._times[: self._discarded]
            self._discarded = 0

    def add_times_to_lines(
        self, begin_cursor: int, batch: EventBatch, format_time: Callable[[int], str]
    ) -> bytes:
        r"""Return the lines of a batch that begins at `begin_cursor`, each with its `time`.

        `format_time` gets milliseconds. Only the end of a line has `}` before `\n`.
        """
        lines, at = batch.lines, 0
        first, end = begin_cursor, begin_cursor + batch.count
        mark = self._find_mark(first)
        parts = []
        while first < end:
            is_last = mark + 1 == len(self._cursors) or self._cursors[mark + 1] >= end
            start = at
            if is_last:
                at, first = len(lines), end
            else:
                for _ in range(self._cursors[mark + 1] - first):
                    at = lines.index(b"\n", at) + 1
                first = self._cursors[mark + 1]
            time = format_time(self._times[mark]).encode()
            parts.append(lines[start:at].replace(b"}\n", b',"time":"%b"}\n' % time))
            mark += 1
        return b"".join(parts)

    def _find_mark(self, cursor: int) -> int:
        """Return the index of the mark of the event after `cursor`; 0 if there are no events."""
        return max(0, bisect_right(self._cursors, cursor, lo=self._discarded) - 1)
