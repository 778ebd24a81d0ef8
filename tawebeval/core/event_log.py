"""Event log of one evaluation: a ring of segments in memory, behind which its stdout stands.

Events are numbered from 0. A *cursor* is a place between two events: cursor n lies before event n.
The log holds the events from `begin_cursor` to `end_cursor`; an acknowledgement discards those
before it, and nothing else discards an event.

A *segment* is a number of consecutive events, and their source: a checkpoint of the parser and the
place in stdout from which the parser went on there. `EventMemory` bounds the bytes of all logs
together. It evicts segments of the caller that has most. An evicted segment's events are parsed
again from the same bytes of stdout (`evaluations.eventlog`). They are the same events, one by one:
the parser depends on its bytes and on the places of flushes (`tawebeval.core.segi`). These places
and the times of the events are kept as marks beside stdout.

A segment has a checksum of its bytes of stdout: where the disk has damaged them, a reader gets an
error in place of other events.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence

import attrs

from tawebeval.core.events import EMPTY_BATCH, EventBatch, encode_error_event
from tawebeval.core.ring import EventRing
from tawebeval.core.shares import Share, SharedResource
from tawebeval.core.tokens import ANONYMOUS_CALLER

MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 4 * 1024, 256 * 1024
"""Bytes of events from which a segment may end: with very many logs, and with few."""

LOST_EVENT = encode_error_event(
    "lost",
    "the events that follow are lost: the stored output of the evaluation is damaged; the daemon's"
    " log has the reason",
)
"""Event in place of those that cannot be read or parsed again; no event follows it."""


class EventsEvicted(Exception):
    """The events after a cursor have left memory; `segment` is to be parsed again."""

    def __init__(self, segment: EventSegment) -> None:
        super().__init__(segment)
        self.segment = segment


class StdoutChanged(Exception):
    """Stdout is not what it was when the segment was parsed first."""


@attrs.frozen
class Mark:
    """Note on the events before `end_cursor`, after those of the mark before.

    `time_ms` is the events' time in milliseconds since the
    epoch. `flushed_at` is the number of bytes of stdout after which a flush delivered a partial
    line, None if no flush did. `is_last` says that the end of stdout brought the events.
    """

    end_cursor: int
    time_ms: int
    flushed_at: int | None = None
    is_last: bool = False


@attrs.frozen
class SegmentSource:
    """Source of a segment that has ended.

    - `stdout_begin`, `stdout_end`: the bytes of stdout from the checkpoint to the last read.
    - `checkpoint`: the state of the parser at `stdout_begin`; b"" at the start of stdout.
    - `checksum`: CRC-32 of these bytes.
    - `first_mark`, `end_mark`: the marks of the segment, counted from the first mark of the log.
    - `first_file`: the number of files that stdout named before the segment.
    - `is_last`: whether stdout ends there.
    """

    stdout_begin: int
    stdout_end: int
    checkpoint: bytes
    checksum: int
    first_mark: int
    end_mark: int
    first_file: int
    is_last: bool = False


@attrs.define(eq=False)
class EventSegment:
    """Consecutive events; `source` is None for the newest ones, `ring` for evicted ones."""

    begin_cursor: int
    end_cursor: int
    ring: EventRing | None
    source: SegmentSource | None = None
    caller: str = ANONYMOUS_CALLER


class EventMemory:
    """Bound of the bytes of events in the memory of all logs.

    Beyond it the caller that has most loses the segments that were read or written least recently.
    The newest segment of each log stays in memory, and so does an error event behind it:
    `fixed_share` counts both, and no evaluation is accepted or started beyond it. `on_room()` is
    called when a caller no longer uses up its part of `fixed_share`. The more logs there are, the
    smaller a segment may end (`min_segment_bytes`).
    """

    def __init__(self, max_bytes: int) -> None:
        self.share = Share(SharedResource.EVENT_MEMORY, max_bytes)
        self.fixed_share = Share(
            SharedResource.FIXED_EVENT_MEMORY,
            max_bytes,
            max_bytes // 2,
            "the newest events of your evaluations use up your part of the memory (buffers.total);"
            " read them, or discard those of finished evaluations by"
            " GET /evaluation/ID/events?after=end",
            "the newest events of all evaluations use up the memory (buffers.total); try again"
            " later",
        )
        self.on_room: Callable[[], object] = lambda: None
        self._newest: dict[EventSegment, int] = {}
        # By caller; the next to evict is first.
        self._ended: dict[str, OrderedDict[EventSegment, int]] = {}

    @property
    def min_segment_bytes(self) -> int:
        """Bytes of events from which a segment may end.

        A segment ends with a call of the parser, so it may have a few MiB more.
        """
        share = self.share.total // (4 * max(1, len(self._newest)))
        return min(max(share, MIN_SEGMENT_BYTES), MAX_SEGMENT_BYTES)

    def note_use(self, segment: EventSegment) -> None:
        """Count a segment's bytes, as the last one to evict; evict others beyond the bound."""
        assert segment.ring is not None, "it is in memory"
        was_used_up = self.fixed_share.is_part_used_up(segment.caller)
        self._uncount(segment)
        size = segment.ring.memory_bytes
        self.share.take(size, segment.caller)
        if segment.source is None:
            self._newest[segment] = size
            self.fixed_share.take(size, segment.caller)
        else:
            self._ended.setdefault(segment.caller, OrderedDict())[segment] = size
        while self.share.used > self.share.total:
            evicted = self._find_segment_to_evict(segment)
            if evicted is None:
                break
            evicted.ring = None
            self._uncount(evicted)
        self._tell_room(segment.caller, was_used_up=was_used_up)

    def _find_segment_to_evict(self, kept: EventSegment) -> EventSegment | None:
        """Return a segment of the caller that has most, but not the one in use."""
        callers = (name for name, ended in self._ended.items() if len(ended) > (kept in ended))
        caller = max(callers, key=self.share.used_by_caller.__getitem__, default=None)
        if caller is None:
            return None
        return next(segment for segment in self._ended[caller] if segment is not kept)

    def release(self, segment: EventSegment) -> None:
        """Count a segment no longer: it has left its log."""
        was_used_up = self.fixed_share.is_part_used_up(segment.caller)
        self._uncount(segment)
        self._tell_room(segment.caller, was_used_up=was_used_up)

    def _tell_room(self, caller: str, *, was_used_up: bool) -> None:
        if was_used_up and not self.fixed_share.is_part_used_up(caller):
            self.on_room()

    def _uncount(self, segment: EventSegment) -> None:
        size, ended = self._newest.pop(segment, 0), self._ended.get(segment.caller)
        self.fixed_share.give_back(size, segment.caller)
        if ended is not None:
            size += ended.pop(segment, 0)
            if not ended:
                del self._ended[segment.caller]
        self.share.give_back(size, segment.caller)


@attrs.define(eq=False)
class EventLog:
    """Events of an evaluation of `caller`, from `begin_cursor` to `end_cursor`.

    `has_ended` says that no event follows. `discarded_stdout_bytes` is the number of bytes at the
    beginning of stdout that no segment needs any more, `discarded_files` that of the first files
    that stdout named.
    """

    _memory: EventMemory
    begin_cursor: int = 0
    end_cursor: int = 0
    has_ended: bool = False
    discarded_stdout_bytes: int = 0
    discarded_files: int = 0
    caller: str = attrs.field(default=ANONYMOUS_CALLER, kw_only=True)
    _segments: list[EventSegment] = attrs.field(factory=list)

    def append_batch(self, batch: EventBatch, time_ms: int) -> None:
        """Append a batch to the newest segment. The log must not be closed."""
        assert not self.has_ended, "a closed log takes no events"
        if not batch.count:
            return
        if not self._segments or self._segments[-1].source is not None:
            ring = EventRing(self.end_cursor, self.end_cursor)
            newest = EventSegment(self.end_cursor, self.end_cursor, ring, caller=self.caller)
            self._segments.append(newest)
        segment = self._segments[-1]
        assert segment.ring is not None, "the newest segment stays in memory"
        segment.ring.append_batch(batch, time_ms)
        segment.end_cursor = self.end_cursor = self.end_cursor + batch.count
        self._memory.note_use(segment)

    @property
    def segments(self) -> Sequence[EventSegment]:
        """The segments with the events of the log."""
        return self._segments

    @property
    def can_end_segment(self) -> bool:
        """Whether the newest segment is large enough to end."""
        ring = self._segments[-1].ring if self._segments else None
        return (
            ring is not None
            and self._segments[-1].source is None
            and ring.memory_bytes >= self._memory.min_segment_bytes
        )

    def end_segment(self, source: SegmentSource) -> None:
        """End the newest segment, whose events come from `source`."""
        segment = self._segments[-1]
        segment.source = source
        self._memory.note_use(segment)

    def restore_segment(self, begin_cursor: int, end_cursor: int, source: SegmentSource) -> None:
        """Append an evicted segment, which an earlier process of the daemon has ended."""
        if not self._segments:
            self.begin_cursor = begin_cursor
        self._segments.append(EventSegment(begin_cursor, end_cursor, None, source, self.caller))
        self.end_cursor = end_cursor

    def mark_end(self) -> None:
        """Mark the end of events."""
        self.has_ended = True

    def load_segment(self, segment: EventSegment, ring: EventRing) -> None:
        """Put an evicted segment's events, which were parsed again, back into memory."""
        if segment.end_cursor > self.begin_cursor and segment.ring is None:
            ring.acknowledge(max(self.begin_cursor, segment.begin_cursor))
            segment.ring = ring
            self._memory.note_use(segment)

    def read_events(self, after_cursor: int, max_bytes: int) -> EventBatch:
        """Return events after a cursor, `begin_cursor <= after_cursor <= end_cursor`.

        The result has at most `max_bytes`, but at least one event if there is one, and may end
        where a segment does. Raises: EventsEvicted.
        """
        ring = self._find_ring(after_cursor)
        return EMPTY_BATCH if ring is None else ring.read_events(after_cursor, max_bytes)

    def read_timed_events(
        self, after_cursor: int, max_bytes: int, format_time: Callable[[float], str]
    ) -> EventBatch:
        """Return what `read_events` returns, or its beginning, each event with its `time`.

        `max_bytes` does not count the times. `format_time` gets seconds since the epoch. Raises:
        EventsEvicted.
        """
        ring = self._find_ring(after_cursor)
        if ring is None:
            return EMPTY_BATCH
        return ring.read_timed_events(after_cursor, max_bytes, format_time)

    def _find_ring(self, after_cursor: int) -> EventRing | None:
        assert self.begin_cursor <= after_cursor <= self.end_cursor
        if after_cursor == self.end_cursor:
            return None
        begins_at = bisect_right(self._segments, after_cursor, key=lambda each: each.begin_cursor)
        segment = self._segments[begins_at - 1]
        if segment.ring is None:
            raise EventsEvicted(segment)
        self._memory.note_use(segment)
        return segment.ring

    def acknowledge(self, before_cursor: int) -> None:
        """Discard the events before `before_cursor`; an older cursor changes nothing."""
        assert before_cursor <= self.end_cursor
        if before_cursor <= self.begin_cursor:
            return
        self.begin_cursor = before_cursor
        while self._segments and self._segments[0].end_cursor <= before_cursor:
            segment = self._segments[0]
            if segment.source is None:
                break  # it goes on
            # Not its end: the next segment may begin before that.
            self._discard_source(segment.source)
            self._memory.release(self._segments.pop(0))
        if self._segments:
            first = self._segments[0]
            if first.source is not None:
                self._discard_source(first.source)
            if first.ring is not None and first.begin_cursor < before_cursor:
                first.ring.acknowledge(before_cursor)
                self._memory.note_use(first)

    def _discard_source(self, before: SegmentSource) -> None:
        self.discarded_stdout_bytes, self.discarded_files = before.stdout_begin, before.first_file

    def discard(self) -> None:
        """Discard all events: nobody reads the log any more."""
        for segment in self._segments:
            self._memory.release(segment)
        self._segments.clear()
        self.begin_cursor = self.end_cursor
