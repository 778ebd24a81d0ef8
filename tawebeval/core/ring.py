"""Ring buffer of consecutive events in memory, as batches of JSON Lines.

Events are numbered from 0. A *cursor* is a place between two events: cursor n lies before event n.
The ring holds the events from `begin_cursor` to `end_cursor`. It grows at one end; at the other end
an acknowledgement discards events. A segment of the event log (`core.event_log`) has a ring.

Reading has no visible effect. It splits a batch where a page or a piece ends inside it, so that
the reader's next call finds the place at once. It never leaves small batches: nothing would join
them again, and readers at different places would leave a batch for each event. Finding a place
near the end of a batch is cheap.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from tawebeval.core.event_times import EventTimes
from tawebeval.core.events import EMPTY_BATCH, EventBatch, measure_first_events

MAX_MERGED_BATCH_BYTES = 16 * 1024  # bytes up to which small batches are put together
MIN_BATCH_PART_BYTES = 4 * 1024  # bytes that a reader cuts off at least: some 10 µs to walk over
_TIMED = 32 * 1024  # bytes to which times are added at once: 1,000 events of as many times


@attrs.define
class EventRing:
    """Events from `begin_cursor` to `end_cursor`; `line_bytes` is the size of their JSON Lines."""

    begin_cursor: int = 0
    end_cursor: int = 0
    line_bytes: int = 0
    # Not a deque, which takes 600 bytes when it is empty: there are never too many to move.
    batches: list[EventBatch] = attrs.field(factory=list)
    _times: EventTimes = attrs.field(factory=EventTimes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the events take with their times."""
        return self.line_bytes + self._times.memory_bytes

    def append_batch(self, batch: EventBatch, time_ms: int) -> None:
        """Append a batch of this time, in milliseconds since the epoch."""
        if not batch.count:
            return
        self._times.record_time(self.end_cursor, time_ms)
        self.end_cursor += batch.count
        self.line_bytes += len(batch.lines)
        if (
            self.batches
            and len(self.batches[-1].lines) + len(batch.lines) <= MAX_MERGED_BATCH_BYTES
        ):
            self.batches[-1] += batch
        else:
            self.batches.append(batch)

    def read_events(self, after_cursor: int, max_bytes: int) -> EventBatch:
        """Return the events after a cursor, `begin_cursor <= after_cursor <= end_cursor`.

        The result has at most `max_bytes`, but at least one event if there is one.
        """
        assert self.begin_cursor <= after_cursor <= self.end_cursor
        if after_cursor == self.end_cursor:
            return EMPTY_BATCH
        count = 0
        taken: list[bytes] = []
        index, first = self._find(after_cursor)
        while index < len(self.batches):
            batch = self.batches[index]
            start = measure_first_events(batch, after_cursor - first) if after_cursor > first else 0
            if len(batch.lines) - start > max_bytes:
                end = batch.lines.rfind(b"\n", start, start + max_bytes) + 1
                if not end and not taken:
                    end = batch.lines.index(b"\n", start) + 1
                if end:
                    taken.append(batch.lines[start:end])
                    count += taken[-1].count(b"\n")
                    if min(end, len(batch.lines) - end) >= MIN_BATCH_PART_BYTES:
                        self._split(index, end, after_cursor + count - first)
                break
            max_bytes -= len(batch.lines) - start
            taken.append(batch.lines[start:])
            first += batch.count
            count = first - after_cursor
            index += 1
        return EventBatch(count, b"".join(taken))

    def read_timed_events(
        self, after_cursor: int, max_bytes: int, format_time: Callable[[float], str]
    ) -> EventBatch:
        """Return what `read_events` returns, or its beginning, each event with its `time`.

        `max_bytes` does not count the times. `format_time` gets seconds since the epoch.
        """
        batch = self.read_events(after_cursor, min(max_bytes, _TIMED))
        lines = self._times.add_times_to_lines(
            after_cursor, batch, lambda time: format_time(time / 1000)
        )
        return EventBatch(batch.count, lines)

    def acknowledge(self, before_cursor: int) -> None:
        """Discard the events before `before_cursor`; an older cursor changes nothing."""
        assert before_cursor <= self.end_cursor
        while self.batches and self.begin_cursor + self.batches[0].count <= before_cursor:
            self._discard()
        if self.begin_cursor < before_cursor:
            count = before_cursor - self.begin_cursor
            self._split(0, measure_first_events(self.batches[0], count), count)
            self._discard()

    def _discard(self) -> None:
        batch = self.batches.pop(0)
        self.begin_cursor += batch.count
        self._times.discard_times_before(self.begin_cursor)
        self.line_bytes -= len(batch.lines)

    def _find(self, cursor: int) -> tuple[int, int]:
        """Return the index and first cursor of the batch that has the event after `cursor`.

        Most readers are near one of the ends, so the search begins at the nearer one.
        """
        if cursor - self.begin_cursor <= self.end_cursor - cursor:
            index, first = 0, self.begin_cursor
            while cursor >= first + self.batches[index].count:
                first += self.batches[index].count
                index += 1
            return index, first
        index, first = len(self.batches), self.end_cursor
        while cursor < first:
            index -= 1
            first -= self.batches[index].count
        return index, first

    def _split(self, index: int, at: int, count: int) -> None:
        """Split a batch after its first `count` events, `at` bytes; neither part is empty."""
        batch = self.batches[index]
        self.batches[index] = EventBatch(count, batch.lines[:at])
        self.batches.insert(index + 1, EventBatch(batch.count - count, batch.lines[at:]))
