"""Ring buffer of one evaluation's events, from printing to acknowledgement.

Events are numbered from 0. A *cursor* is a place between two events: cursor n lies before event n.
The ring holds the events from `begin_cursor` to `end_cursor`, as batches of JSON Lines. It
grows at one end as the evaluator prints; at the other end `EventRetention` discards events that
readers have taken. Nothing else discards an event.

Reading has no visible effect. It splits a batch where a page or a piece ends inside it, so that
the reader's next call finds the place at once. It never leaves small batches: nothing would join
them again, and readers at different places would leave a batch for each event. Finding a place
near the end of a batch is cheap.

`EventRetention` knows two kinds of readers (contract, sections 3 and 7). A reader of *pages*
acknowledges by its next request: a request after a cursor acknowledges the events before the
cursor. A *stream* acknowledges nothing by itself: its connection shows the events that the
client's kernel has taken (`evaluations.readers`). So:

- Events that pages have acknowledged are discarded at once, except those that a live stream has
  yet to take.
- Events that streams have taken stay for a resume, up to three quarters of the capacity: a proxy
  may have taken them in place of the client. Beyond that the oldest go, in whole batches. Events
  that streams have yet to take do not count, so slow readers find as much behind them as quick
  ones.
- Otherwise no event is discarded that a live stream, or a stream that was cut a moment ago, has yet
  to take, nor, while a client reads pages, an event that the client has not acknowledged.

At least a quarter of the capacity is left for events that no client has taken. A ring whose
streams have taken everything is never full, so a reader that keeps up always gets more.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from tawebeval.core.event_times import EventTimes
from tawebeval.core.events import EMPTY_BATCH, EventBatch, measure_first_events

MAX_MERGED_BATCH_BYTES = 16 * 1024  # bytes up to which small batches are put together
MIN_BATCH_PART_BYTES = 4 * 1024  # bytes that a reader cuts off at least: some 10 µs to walk over
_TIMED = 32 * 1024  # bytes to which times are added at once: 1,000 events of as many times
_MAX_CUTS = 16  # cut streams of one evaluation; the clients of earlier ones are given up


@attrs.define
class EventRing:
    """Events from `begin_cursor` to `end_cursor`; `line_bytes` is the size of their JSON Lines.

    `discarded_bytes` is the size in bytes of the events discarded so far. `read_wall_clock()`
    returns the time of new events, in seconds since the epoch. `on_append(first, batch, time_ms)`
    is called with each new batch, the number of its first event and its time in milliseconds.
    """

    begin_cursor: int = 0
    end_cursor: int = 0
    line_bytes: int = 0
    discarded_bytes: int = 0
    has_ended: bool = False
    # Not a deque, which takes 600 bytes when it is empty: there are never too many to move.
    batches: list[EventBatch] = attrs.field(factory=list)
    read_wall_clock: Callable[[], float] = float
    on_append: Callable[[int, EventBatch, int], object] | None = None
    _times: EventTimes = attrs.field(factory=EventTimes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the events take with their times."""
        return self.line_bytes + self._times.memory_bytes

    def append_batch(self, batch: EventBatch, time_ms: int | None = None) -> None:
        """Append a batch of this time, or of now. The ring must not be closed."""
        assert not self.has_ended, "a closed ring takes no events"
        if not batch.count:
            return
        if time_ms is None:
            time_ms = int(self.read_wall_clock() * 1000)
        first = self.end_cursor
        self._times.record_time(first, time_ms)
        self.end_cursor += batch.count
        self.line_bytes += len(batch.lines)
        if (
            self.batches
            and len(self.batches[-1].lines) + len(batch.lines) <= MAX_MERGED_BATCH_BYTES
        ):
            self.batches[-1] += batch
        else:
            self.batches.append(batch)
        if self.on_append is not None:
            self.on_append(first, batch, time_ms)

    def mark_end(self) -> None:
        """Mark the end of events."""
        self.has_ended = True

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

    def list_times(self, begin_cursor: int, end_cursor: int) -> list[tuple[int, int]]:
        """Return the times of the events between two cursors, in milliseconds since the epoch.

        Each has the cursor before its first event there. The ring must have the events.
        """
        return self._times.list_times(begin_cursor, end_cursor)

    def acknowledge(self, before_cursor: int) -> None:
        """Discard the events before `before_cursor`; an older cursor changes nothing."""
        assert before_cursor <= self.end_cursor
        self.discard_batches(0, before_cursor)
        if self.begin_cursor < before_cursor:
            count = before_cursor - self.begin_cursor
            self._split(0, measure_first_events(self.batches[0], count), count)
            self._discard()

    def discard_batches(self, max_bytes: int, before_cursor: int) -> None:
        """Discard old events, in whole batches, until at most `max_bytes` are stored.

        Events after `before_cursor` are never discarded.
        """
        while (
            self.memory_bytes > max_bytes
            and self.begin_cursor + self.batches[0].count <= before_cursor
        ):
            self._discard()

    def measure_bytes_after(self, cursor: int) -> int:
        """Return the size in bytes of all batches with events after the cursor."""
        size, first = 0, self.end_cursor
        for batch in reversed(self.batches):
            if first <= cursor:
                break
            first -= batch.count
            size += len(batch.lines)
        return size

    def measure_bytes_before(self, cursor: int) -> int:
        """Return the size in bytes of all batches before the cursor, discarded ones included."""
        if cursor <= self.begin_cursor:
            return self.discarded_bytes
        return self.discarded_bytes + self.line_bytes - self.measure_bytes_after(cursor)

    def _discard(self) -> None:
        batch = self.batches.pop(0)
        self.begin_cursor += batch.count
        self._times.discard_times_before(self.begin_cursor)
        self.line_bytes -= len(batch.lines)
        self.discarded_bytes += len(batch.lines)

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


@attrs.define(eq=False)
class StreamPosition:
    """Live stream whose client has taken the events before the cursor `received_cursor`."""

    received_cursor: int


@attrs.frozen
class _Cut:
    """Stream that was cut; its client may resume at a cursor from `taken` to `sent`.

    `until` is the last time for that, in seconds of the caller's clock.
    """

    taken: int
    sent: int
    until: float


@attrs.define
class EventRetention:
    """Readers of a ring, and the rule that discards the events that none of them needs."""

    _ring: EventRing
    _acknowledged: int = 0  # by pages
    _readers: dict[StreamPosition, None] = attrs.field(factory=dict)
    _cuts: list[_Cut] = attrs.field(factory=list)  # in the order of their times

    def __len__(self) -> int:
        """Return the number of live streams."""
        return len(self._readers)

    @property
    def resume_deadline(self) -> float | None:
        """Time until which the client of the earliest cut stream may resume; None without one."""
        return self._cuts[0].until if self._cuts else None

    def add_stream(self, received_cursor: int) -> StreamPosition:
        """Return a new stream, whose client has all events before the cursor `received_cursor`.

        The new stream replaces a cut stream that may have the same client: the one cut nearest to
        `received_cursor`, since a client may have read more than it has processed.
        """
        cuts = [cut for cut in self._cuts if received_cursor <= cut.sent]
        if cuts:
            self._cuts.remove(min(cuts, key=lambda cut: abs(cut.taken - received_cursor)))
        reader = StreamPosition(received_cursor)
        self._readers[reader] = None
        return reader

    def remove_stream(self, stream: StreamPosition) -> None:
        """Remove a stream that has ended, and discard the events that only it still needed."""
        del self._readers[stream]
        self._discard_acknowledged()

    def keep_events_for_resume(
        self, stream: StreamPosition, sent_cursor: int, deadline: float
    ) -> None:
        """Replace a stream that broke off by the expectation that its client resumes.

        The events before the cursor `sent_cursor` were sent. `deadline` is the time up to which the
        client may resume, not before that of an earlier call.
        """
        del self._readers[stream]
        self._cuts.append(_Cut(stream.received_cursor, sent_cursor, deadline))
        del self._cuts[:-_MAX_CUTS]
        self._discard_acknowledged()

    def acknowledge(self, before_cursor: int) -> bool:
        """Acknowledge the events before `before_cursor`; return whether any of them is new."""
        if before_cursor <= self._acknowledged:
            return False
        self._acknowledged = before_cursor
        self._discard_acknowledged()
        return True

    def discard_received_events(self, capacity: int, *, now: float, has_page_reader: bool) -> None:
        """Discard events that streams have taken, beyond those that are kept for a resume.

        `capacity` is the size of the ring in bytes at which its evaluator is paused. `now` is in
        seconds. `has_page_reader` says whether a client reads pages.
        """
        while self._cuts and self._cuts[0].until <= now:
            del self._cuts[0]
        self._discard_acknowledged()
        kept = capacity * 3 // 4
        if self._readers and not has_page_reader and self._ring.memory_bytes > kept:
            before = min([self._taken_by_all(), *(cut.taken for cut in self._cuts)])
            self._ring.discard_batches(kept + self._ring.measure_bytes_after(before), before)

    def _discard_acknowledged(self) -> None:
        if self._acknowledged > self._ring.begin_cursor:
            self._ring.acknowledge(min(self._acknowledged, self._taken_by_all()))

    def _taken_by_all(self) -> int:
        return min(
            (reader.received_cursor for reader in self._readers), default=self._ring.end_cursor
        )
