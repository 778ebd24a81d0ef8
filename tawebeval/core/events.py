r"""Events of one evaluation: encode them once, number them, keep them in memory, make pages.

An event is `{"type": "text"|"data", "payload": ...}`. From here on an event is bytes: a batch
has lines, each a complete JSON object that ends with `\n`. JSON escapes every other `\n`. So a
page is a join, a JSON Lines stream is the bytes as they are, and counting or cutting a batch is
`bytes.count` and `bytes.find`.

Text is encoded by the block and not by the line (docs/design/core.md). A `StreamFraming` frames a
batch as a whole, without parsing its events.

Events are numbered from 0. A *cursor* is a place between two events: cursor n lies before event n.
The log holds the events from `begin_cursor` to `end_cursor`; an acknowledgement discards those
before it, and nothing else discards an event.

A *ring* (`EventRing`) holds consecutive events as batches of JSON Lines, with their times. Small
batches are joined, so that there are few objects. A read cuts a batch where it begins and ends, so
that the next read finds its place at once, however often somebody asks. A mark for each change of
the time has the time and the cursor of its first event, so times cost little where events are
printed quickly.

A *segment* is a number of consecutive events, and their source: a checkpoint of the parser and the
place in stdout from which the parser went on there. `EventMemory` bounds the bytes of all logs
together. It evicts segments of the caller that has most. An evicted segment's events are parsed
again from the same bytes of stdout (`evaluations.eventlog`). They are the same events, one by one:
the parser depends on its bytes and on the places of flushes (`tawebeval.core.segi`). These places
and the times of the events are kept as marks beside stdout.

A segment has a checksum of its bytes of stdout: where the disk has damaged them, a reader gets an
error in place of other events.

A cursor in the API is a string of decimal digits, or `ALL_RECEIVED_CURSOR`, or null. As a page's
beginning, `null` is the beginning of all events; as a page's end, the end of all. The dummy end,
`ALL_RECEIVED_CURSOR`, stands between the last event and the end of all: a client that asks after it
has received every event, so from then on no event needs to be kept.
"""

from __future__ import annotations

import re
from array import array
from base64 import b64encode
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import attrs
import orjson

from tawebeval.core.budgets import Budget, SharedResource
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import DiscardedCursor, InvalidCursor

ALL_RECEIVED_CURSOR = "end"
"""The dummy end: the cursor of a client that has received every event."""

LINE_TERMINATOR = b"\n"
r"""The only line terminator: `\r`, U+2028 and the like are ordinary text."""

# Characters that JSON does not escape and text almost never has: DEL, Unicode's noncharacters.
_STAND_INS = (b"\x7f", *(chr(code).encode() for code in range(0xFDD0, 0xFDF0)))
_TEXT = b'{"type":"text","payload":'
_DATA = b'{"type":"data","payload":'
_TERMINATOR_EVENT = _TEXT + b'"\\n"}\n'
_EMPTY_EVENT = _TEXT + b'""}\n'
_BETWEEN_LINES = b'"}\n' + _TERMINATOR_EVENT + _TEXT + b'"'


@attrs.frozen
class EventBatch:
    r"""A number of consecutive events as JSON Lines.

    `count` is the number of events, which is the number of `\n` in `lines`.
    """

    count: int
    lines: bytes

    def __add__(self, other: EventBatch) -> EventBatch:
        return EventBatch(self.count + other.count, self.lines + other.lines)


EMPTY_BATCH = EventBatch(0, b"")


def count_bytes_of_first_events(batch: EventBatch, count: int) -> int:
    """Return the size in bytes of the first `count` events of a batch."""
    lines = batch.lines
    if count <= batch.count // 2:
        at = 0
        for _ in range(count):
            at = lines.index(b"\n", at) + 1
    else:
        at = len(lines)
        for _ in range(batch.count - count):
            at = lines.rindex(b"\n", 0, at - 1) + 1
    return at


def split_batch(batch: EventBatch, count: int) -> tuple[EventBatch, EventBatch]:
    """Return the first `count` events of a batch, and the others."""
    if count == batch.count:
        return batch, EMPTY_BATCH
    at = count_bytes_of_first_events(batch, count)
    return (
        EventBatch(count, batch.lines[:at]),
        EventBatch(batch.count - count, batch.lines[at:]),
    )


def encode_text_events(block: bytes, may_have_blank_lines: bool = True) -> EventBatch:
    """Encode stdout as text events: one for each line and one for each line terminator.

    Bytes that are not UTF-8 become U+FFFD. `block` must end between two characters and have no
    line over the limit of one event. The caller may know that no two line terminators in it are
    adjacent: then they are not looked for.
    """
    if not block:
        return EMPTY_BATCH
    stand_in = next((one for one in _STAND_INS if one not in block), None) or _absent(block)
    if block[0] == LINE_TERMINATOR[0]:
        # The usual block begins with the terminator that was held back before it.
        head, count = _TERMINATOR_EVENT, 1
        block = block[1:]
        if not block:
            return EventBatch(count, head)
    else:
        head, count = b"", 0
    string = orjson.dumps(block.replace(LINE_TERMINATOR, stand_in).decode("utf-8", "replace"))
    # Joined before the replacement, which makes it several times as long.
    framed = b"".join((head, _TEXT, string, b"}\n"))
    lines = framed.replace(stand_in, _BETWEEN_LINES)
    # Each terminator became two events. (Counting terminators costs more than this division.)
    terminators = (len(lines) - len(framed)) // (len(_BETWEEN_LINES) - len(stand_in))
    count += 1 + 2 * terminators
    blank_lines = may_have_blank_lines and has_blank_line(block)
    if blank_lines or LINE_TERMINATOR[0] in (block[0], block[-1]):
        # Blank lines left text events with nothing in them. No payload can contain
        # the bytes of such an event, for a payload's quotes are escaped.
        length = len(lines)
        lines = lines.replace(_EMPTY_EVENT, b"")
        count -= (length - len(lines)) // len(_EMPTY_EVENT)
    return EventBatch(count, lines)


def _absent(block: bytes) -> bytes:
    """Return a character beyond the Basic Multilingual Plane that `block` does not contain.

    The planes have a million characters of four bytes each, more than any block can hold.
    """
    present = set(block.decode("utf-8", "replace"))
    return next(one for one in map(chr, range(0x10000, 0x110000)) if one not in present).encode()


def has_blank_line(block: bytes) -> bool:
    """Return whether two line terminators in `block` are adjacent."""
    place, hops = block.find(LINE_TERMINATOR), 0
    # Where lines are long, going from one terminator to the next takes half of the time.
    while place + 2048 >= 512 * hops:
        last, place = place, block.find(LINE_TERMINATOR, place + 1)
        if place < 0:
            return False
        if place == last + 1:
            return True
        hops += 1
    # For two equal bytes, `rfind` takes a third of the time of `in`.
    return block.rfind(LINE_TERMINATOR * 2, place) >= 0


def encode_data_event(value: bytes) -> EventBatch:
    """Encode a data event; `value`, one line of valid JSON, is the payload as it stands."""
    return EventBatch(1, b"%b%b}\n" % (_DATA, value))


def encode_file_event(filename: str, content_type: str, content: bytes) -> EventBatch:
    """Encode a file block as its data event (docs/evaluators.md; base64 of RFC 4648)."""
    head = orjson.dumps({"type": "file", "filename": filename, "content_type": content_type})
    # Joined once, because it is long.
    parts = (_DATA, head[:-1], b',"content_base64":"', b64encode(content), b'"}}\n')
    return EventBatch(1, b"".join(parts))


def compute_base64_size(size: int) -> int:
    """Return the size in bytes of the base64 encoding of `size` bytes."""
    return (size + 2) // 3 * 4


def encode_error_event(
    reason: str, message: str, members: Mapping[str, Any] | None = None
) -> EventBatch:
    """Encode the data event `evaluation_error` (docs/api.md)."""
    payload = {"type": "evaluation_error", "reason": reason, "message": message}
    return encode_data_event(orjson.dumps({**payload, **(members or {})}))


SSE_RETRY_MILLISECONDS = 2000
"""Milliseconds after which a browser asks again when a stream has broken off."""

_TEXT_MESSAGE = 0x81  # FIN, and the opcode of a text frame
_SHORT = [bytes((_TEXT_MESSAGE, length)) for length in range(126)]
_TWO_BYTES = bytes((_TEXT_MESSAGE, 126))
_EIGHT_BYTES = bytes((_TEXT_MESSAGE, 127))


@attrs.frozen
class StreamFraming:
    """Format of a stream: its beginning, events, end and heartbeat.

    `encode_events(begin_cursor, batch)` frames a batch.
    """

    first_bytes: bytes
    encode_events: Callable[[int, EventBatch], bytes]
    last_bytes: bytes
    heartbeat_bytes: bytes


def encode_server_sent_events(begin_cursor: int, batch: EventBatch) -> bytes:
    """Return a batch as server-sent events, each with the cursor after it as its `id`.

    Server-sent events (HTML standard, section 9.2) also end a line at a carriage return, which JSON
    has only between values.
    """
    if not batch.count:
        return b""
    lines = batch.lines[:-1].replace(b"\r", b" ").replace(b"%", b"%%")
    template = b"data: %s\nid: %%d\n\n" % lines.replace(b"\n", b"\nid: %d\n\ndata: ")
    return template % tuple(range(begin_cursor + 1, begin_cursor + batch.count + 1))


def encode_websocket_messages(begin_cursor: int, batch: EventBatch) -> bytes:
    """Return a batch as text messages of a WebSocket server, one for each event (RFC 6455)."""
    frames = []
    for event in batch.lines.split(b"\n")[: batch.count]:
        length = len(event)
        if length < len(_SHORT):
            frames.append(_SHORT[length])
        elif length < 2**16:
            frames.append(_TWO_BYTES + length.to_bytes(2, "big"))
        else:
            frames.append(_EIGHT_BYTES + length.to_bytes(8, "big"))
        frames.append(event)
    return b"".join(frames)


JSON_LINES_FRAMING = StreamFraming(b"", lambda first, batch: batch.lines, b"", b"")
"""JSON Lines, which have neither an end nor a heartbeat."""

EVENT_STREAM_FRAMING = StreamFraming(
    b"retry: %d\n\n" % SSE_RETRY_MILLISECONDS,
    encode_server_sent_events,
    b"event: end\ndata: null\nid: %s\n\n" % ALL_RECEIVED_CURSOR.encode(),
    b":\n\n",
)
"""`text/event-stream`."""

WEBSOCKET_FRAMING = StreamFraming(b"", encode_websocket_messages, b"", b"")
"""Messages of a WebSocket; its connection sends the end and the heartbeat (a ping)."""


BYTES_PER_TIMESTAMP = 16
"""Bytes of memory that a mark takes."""

_JOINED = 16 * 1024  # bytes up to which batches are joined: some 20 µs to walk over
_LEAST_CUT = 4 * 1024  # bytes that a reader cuts off at least: some 10 µs to walk over
_TIMED = 32 * 1024  # bytes to which times are added at once: 1,000 events of as many times


@attrs.define
class EventRing:
    """Events from `begin_cursor` to `end_cursor`, whose JSON Lines have `total_line_bytes`."""

    begin_cursor: int = 0
    end_cursor: int = 0
    total_line_bytes: int = 0
    # Not a deque, which takes 600 bytes when it is empty: there are never too many to move.
    batches: list[EventBatch] = attrs.field(factory=list)
    # A mark for each change of the time: the cursor of its first event, and the time.
    _mark_cursors: array[int] = attrs.field(factory=partial(array, "Q"))
    _mark_times: array[int] = attrs.field(factory=partial(array, "q"))

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the events take with their times, but the last time."""
        return self.total_line_bytes + BYTES_PER_TIMESTAMP * max(0, len(self._mark_times) - 1)

    def append_batch(self, batch: EventBatch, time_ms: int) -> None:
        """Append a batch of this time, in milliseconds since the epoch."""
        if not batch.count:
            return
        if not self._mark_times or self._mark_times[-1] != time_ms:
            self._mark_cursors.append(self.end_cursor)
            self._mark_times.append(time_ms)
        self.end_cursor += batch.count
        self.total_line_bytes += len(batch.lines)
        if self.batches and len(self.batches[-1].lines) + len(batch.lines) <= _JOINED:
            self.batches[-1] += batch
        else:
            self.batches.append(batch)

    def read_events(
        self,
        after_cursor: int,
        max_bytes: int,
        format_time: Callable[[float], str] | None = None,
    ) -> EventBatch:
        """Return the events after a cursor, `begin_cursor <= after_cursor <= end_cursor`.

        The result has at most `max_bytes`, but at least one event if there is one. With
        `format_time`, which gets seconds since the epoch, each event has its `time`, which
        `max_bytes` does not count; then the result may end before `max_bytes`.
        """
        assert self.begin_cursor <= after_cursor <= self.end_cursor
        if format_time is not None:
            batch = self.read_events(after_cursor, min(max_bytes, _TIMED))
            return self._add_times(after_cursor, batch, format_time)
        if after_cursor == self.end_cursor:
            return EMPTY_BATCH
        index, skipped = 0, after_cursor - self.begin_cursor
        while skipped >= self.batches[index].count:
            skipped -= self.batches[index].count
            index += 1
        start = count_bytes_of_first_events(self.batches[index], skipped)
        if self._cut_batch(index, skipped, start):
            index, skipped, start = index + 1, 0, 0
        taken: list[bytes] = []
        count = 0
        for batch in self.batches[index:]:
            lines = batch.lines
            if len(lines) - start > max_bytes:
                end = lines.rfind(b"\n", start, start + max_bytes) + 1
                if not end and not taken:
                    end = lines.index(b"\n", start) + 1
                if end:
                    taken.append(lines[start:end])
                    taken_count = taken[-1].count(b"\n")
                    count += taken_count
                    self._cut_batch(index, skipped + taken_count, end)
                break
            taken.append(lines[start:])
            count += batch.count - skipped
            max_bytes -= len(lines) - start
            index, skipped, start = index + 1, 0, 0
        return EventBatch(count, b"".join(taken))

    def _cut_batch(self, index: int, count: int, at: int) -> bool:
        """Cut a batch after its first `count` events, `at` bytes, unless a part would be small."""
        batch = self.batches[index]
        if min(at, len(batch.lines) - at) < _LEAST_CUT:
            return False
        rest = EventBatch(batch.count - count, batch.lines[at:])
        self.batches[index : index + 1] = EventBatch(count, batch.lines[:at]), rest
        return True

    def acknowledge(self, before_cursor: int) -> None:
        """Discard the events before `before_cursor`; an older cursor changes nothing."""
        assert before_cursor <= self.end_cursor
        while self.begin_cursor < before_cursor:
            first = self.batches.pop(0)
            count = min(before_cursor - self.begin_cursor, first.count)
            discarded, rest = split_batch(first, count)
            self.begin_cursor += discarded.count
            self.total_line_bytes -= len(discarded.lines)
            if rest.count:
                self.batches.insert(0, rest)
        mark = self._find_mark(self.begin_cursor)
        del self._mark_cursors[:mark]
        del self._mark_times[:mark]

    def _add_times(
        self, begin_cursor: int, batch: EventBatch, format_time: Callable[[float], str]
    ) -> EventBatch:
        r"""Return a batch that begins at `begin_cursor`, each event with its `time`.

        Only the end of a line has `}` before `\n`.
        """
        lines, at = batch.lines, 0
        first, end = begin_cursor, begin_cursor + batch.count
        mark = self._find_mark(first)
        parts = []
        while first < end:
            start, marks = at, self._mark_cursors
            if mark + 1 == len(marks) or marks[mark + 1] >= end:
                at, first = len(lines), end
            else:
                for _ in range(marks[mark + 1] - first):
                    at = lines.index(b"\n", at) + 1
                first = marks[mark + 1]
            time = format_time(self._mark_times[mark] / 1000).encode()
            parts.append(lines[start:at].replace(b"}\n", b',"time":"%b"}\n' % time))
            mark += 1
        return EventBatch(batch.count, b"".join(parts))

    def _find_mark(self, cursor: int) -> int:
        """Return the index of the mark of the event after `cursor`; 0 if there are no events."""
        return max(0, bisect_right(self._mark_cursors, cursor) - 1)


MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 4 * 1024, 256 * 1024
"""Bytes of events from which a segment may end: with very many logs, and with few."""

EVENTS_LOST_ERROR = encode_error_event(
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
class BatchMark:
    """Note on the events before `end_cursor`, after those of the mark before.

    `time_ms` is the events' time in milliseconds since the epoch. `flush_offset` is the number of
    bytes of stdout after which a flush delivered a partial line, None if no flush did.
    `is_from_stdout_end` says that the end of stdout brought the events.
    """

    end_cursor: int
    time_ms: int
    flush_offset: int | None = None
    is_from_stdout_end: bool = False


@attrs.frozen
class SegmentSource:
    """Source of a segment that has ended.

    - `stdout_begin_offset`, `stdout_end_offset`: of the checkpoint, and after the last read.
    - `checkpoint`: the state of the parser at `stdout_begin_offset`; b"" at the start of stdout.
    - `checksum`: CRC-32 of the bytes of stdout between them.
    - `first_mark_index`, `end_mark_index`: of the segment's marks, from the first mark of the log.
    - `earlier_file_count`: the number of files that stdout named before the segment.
    - `has_stdout_end`: whether stdout ends there.
    """

    stdout_begin_offset: int
    stdout_end_offset: int
    checkpoint: bytes
    checksum: int
    first_mark_index: int
    end_mark_index: int
    earlier_file_count: int
    has_stdout_end: bool = False


@attrs.define(eq=False)
class EventSegment:
    """Consecutive events; `source` is None for the newest ones, `ring` for evicted ones.

    `EventMemory` counts it with `counted_bytes`, of which `pinned_bytes` have to stay in memory.
    """

    begin_cursor: int
    end_cursor: int
    ring: EventRing | None
    source: SegmentSource | None = None
    caller: str = ANONYMOUS_CALLER
    counted_bytes: int = 0
    pinned_bytes: int = 0


class EventMemory:
    """Bound of the bytes of events in the memory of all logs.

    Beyond it the caller that has most loses the segments that were read or written least recently.
    The newest segment of each log stays in memory, and so does an error event behind it:
    `pinned_budget` counts both, and no evaluation is accepted or started beyond it. The more logs
    there are, the smaller a segment may end (`min_segment_bytes`).
    """

    def __init__(self, max_bytes: int) -> None:
        self.budget = Budget(SharedResource.EVENT_MEMORY, max_bytes)
        self.pinned_budget = Budget(
            SharedResource.PINNED_EVENT_MEMORY,
            max_bytes,
            max_bytes // 2,
            "the newest events of your evaluations use up your part of the memory (buffers.total);"
            " read them, or discard those of finished evaluations by"
            " GET /evaluation/ID/events?after=end",
            "the newest events of all evaluations use up the memory (buffers.total); try again"
            " later",
        )
        self._newest: set[EventSegment] = set()
        # By caller; the next to evict is first.
        self._ended: dict[str, OrderedDict[EventSegment, None]] = {}

    @property
    def min_segment_bytes(self) -> int:
        """Bytes of events from which a segment may end.

        A segment ends with a call of the parser, so it may have a few MiB more.
        """
        share = self.budget.total // (4 * max(1, len(self._newest)))
        return min(max(share, MIN_SEGMENT_BYTES), MAX_SEGMENT_BYTES)

    def record_segment_use(self, segment: EventSegment) -> None:
        """Count a segment's bytes, as the last one to evict; evict others beyond the bound."""
        assert segment.ring is not None, "it is in memory"
        size = segment.ring.memory_bytes
        if segment.source is None:
            self._newest.add(segment)
            self._count(segment, size, size)
        else:
            self._newest.discard(segment)
            ended = self._ended.setdefault(segment.caller, OrderedDict())
            ended[segment] = None
            ended.move_to_end(segment)
            self._count(segment, size, 0)
        while self.budget.used > self.budget.total:
            evicted = self._find_segment_to_evict(segment)
            if evicted is None:
                break
            evicted.ring = None
            self.remove_segment(evicted)

    def _find_segment_to_evict(self, kept: EventSegment) -> EventSegment | None:
        """Return a segment of the caller that has most, but not the one in use."""
        callers = (name for name, ended in self._ended.items() if len(ended) > (kept in ended))
        caller = max(callers, key=self.budget.used_by_caller.__getitem__, default=None)
        if caller is None:
            return None
        return next(segment for segment in self._ended[caller] if segment is not kept)

    def remove_segment(self, segment: EventSegment) -> None:
        """Count a segment no longer: it has left its log, or memory."""
        self._newest.discard(segment)
        ended = self._ended.get(segment.caller)
        if ended is not None:
            ended.pop(segment, None)
            if not ended:
                del self._ended[segment.caller]
        self._count(segment, 0, 0)

    def _count(self, segment: EventSegment, size: int, pinned: int) -> None:
        """Count a segment with so many bytes in place of those before."""
        if size != segment.counted_bytes:
            self.budget.record_usage(size - segment.counted_bytes, segment.caller)
            segment.counted_bytes = size
        if pinned != segment.pinned_bytes:
            self.pinned_budget.record_usage(pinned - segment.pinned_bytes, segment.caller)
            segment.pinned_bytes = pinned


@attrs.define(eq=False)
class EventLog:
    """Events of an evaluation of `caller`, from `begin_cursor` to `end_cursor`.

    `segments` have them. `has_ended` says that no event follows. `discarded_stdout_bytes` is the
    number of bytes at the beginning of stdout that no segment needs any more,
    `discarded_file_count` that of the first files that stdout named.
    """

    _memory: EventMemory
    begin_cursor: int = 0
    end_cursor: int = 0
    has_ended: bool = False
    discarded_stdout_bytes: int = 0
    discarded_file_count: int = 0
    caller: str = attrs.field(default=ANONYMOUS_CALLER, kw_only=True)
    segments: list[EventSegment] = attrs.field(factory=list)

    def append_batch(self, batch: EventBatch, time_ms: int) -> None:
        """Append a batch to the newest segment. The log must not be closed."""
        assert not self.has_ended, "a closed log takes no events"
        if not batch.count:
            return
        if not self.segments or self.segments[-1].source is not None:
            ring = EventRing(self.end_cursor, self.end_cursor)
            newest = EventSegment(self.end_cursor, self.end_cursor, ring, caller=self.caller)
            self.segments.append(newest)
        segment = self.segments[-1]
        assert segment.ring is not None, "the newest segment stays in memory"
        segment.ring.append_batch(batch, time_ms)
        segment.end_cursor = self.end_cursor = self.end_cursor + batch.count
        self._memory.record_segment_use(segment)

    @property
    def can_end_segment(self) -> bool:
        """Whether the newest segment is large enough to end."""
        ring = self.segments[-1].ring if self.segments else None
        return (
            ring is not None
            and self.segments[-1].source is None
            and ring.memory_bytes >= self._memory.min_segment_bytes
        )

    def end_segment(self, source: SegmentSource) -> None:
        """End the newest segment, whose events come from `source`."""
        segment = self.segments[-1]
        segment.source = source
        self._memory.record_segment_use(segment)

    def restore_segment(self, begin_cursor: int, end_cursor: int, source: SegmentSource) -> None:
        """Append an evicted segment, which an earlier process of the daemon has ended."""
        if not self.segments:
            self.begin_cursor = begin_cursor
        self.segments.append(EventSegment(begin_cursor, end_cursor, None, source, self.caller))
        self.end_cursor = end_cursor

    def mark_end(self) -> None:
        """Mark the end of events."""
        self.has_ended = True

    def load_segment(self, segment: EventSegment, ring: EventRing) -> None:
        """Put an evicted segment's events, which were parsed again, back into memory."""
        if segment.end_cursor > self.begin_cursor and segment.ring is None:
            ring.acknowledge(max(self.begin_cursor, segment.begin_cursor))
            segment.ring = ring
            self._memory.record_segment_use(segment)

    def read_events(
        self,
        after_cursor: int,
        max_bytes: int,
        format_time: Callable[[float], str] | None = None,
    ) -> EventBatch:
        """Return events after a cursor, as `EventRing.read_events`.

        The result may end where a segment does. Raises: EventsEvicted.
        """
        assert self.begin_cursor <= after_cursor <= self.end_cursor
        if after_cursor == self.end_cursor:
            return EMPTY_BATCH
        begins_at = bisect_right(self.segments, after_cursor, key=lambda each: each.begin_cursor)
        segment = self.segments[begins_at - 1]
        if segment.ring is None:
            raise EventsEvicted(segment)
        self._memory.record_segment_use(segment)
        return segment.ring.read_events(after_cursor, max_bytes, format_time)

    def acknowledge(self, before_cursor: int) -> None:
        """Discard the events before `before_cursor`; an older cursor changes nothing."""
        assert before_cursor <= self.end_cursor
        if before_cursor <= self.begin_cursor:
            return
        self.begin_cursor = before_cursor
        while self.segments and self.segments[0].end_cursor <= before_cursor:
            segment = self.segments[0]
            if segment.source is None:
                break  # it goes on
            # Not its end: the next segment may begin before that.
            self._discard_source(segment.source)
            self._memory.remove_segment(self.segments.pop(0))
        if self.segments:
            first = self.segments[0]
            if first.source is not None:
                self._discard_source(first.source)
            if first.ring is not None and first.begin_cursor < before_cursor:
                first.ring.acknowledge(before_cursor)
                self._memory.record_segment_use(first)

    def _discard_source(self, before: SegmentSource) -> None:
        self.discarded_stdout_bytes = before.stdout_begin_offset
        self.discarded_file_count = before.earlier_file_count

    def discard(self) -> None:
        """Discard all events: nobody reads the log any more."""
        for segment in self.segments:
            self._memory.remove_segment(segment)
        self.segments.clear()
        self.begin_cursor = self.end_cursor


_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


class EventPage(NamedTuple):
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
    return EventPage(ALL_RECEIVED_CURSOR, None, EMPTY_BATCH)


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
