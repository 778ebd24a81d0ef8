"""`core.events`: rings, their times, segments that are parsed again, cursors and pages."""

from __future__ import annotations

import json
import zlib

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core import events as core_events
from tawebeval.core.events import (
    ALL_RECEIVED_CURSOR,
    EMPTY_BATCH,
    EventBatch,
    EventLog,
    EventMemory,
    EventPage,
    EventRing,
    EventsEvicted,
    SegmentSource,
    encode_data_event,
    encode_text_events,
    make_empty_last_page,
    make_page,
    parse_cursor,
    resolve_cursor,
)
from tawebeval.errors import DiscardedCursor, InvalidCursor

PLENTY = 10**9


def batch_of(number: int) -> EventBatch:
    """Return a batch of so many events, some of which resemble the end of an event."""
    return sum(
        (encode_data_event(b'"}"' if n % 2 else b"{}") for n in range(number)), EventBatch(0, b"")
    )


def timed(lines: bytes) -> list[str]:
    """Return the time of each event, and hold that it is the last member."""
    events = [json.loads(line) for line in lines.splitlines()]
    for event in events:
        assert list(event) == ["type", "payload", "time"]
    return [event["time"] for event in events]


def to_ms(seconds: float) -> str:
    """Format a time as the milliseconds that were recorded."""
    return f"{seconds * 1000:.0f}"


class TimeTests(SynchronousTestCase):
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 5), st.integers(-2, 3), st.integers(0, 10), st.integers(1, 400)
            )
        )
    )
    def test_events_in_a_ring_keep_their_times(
        self, steps: list[tuple[int, int, int, int]]
    ) -> None:
        now = 0
        ring = EventRing()
        expected: list[str] = []
        for number, passed, acknowledged, limit in steps:
            now += passed
            ring.append_batch(batch_of(number), now * 125)
            expected += [str(now / 8)] * number
            ring.acknowledge(min(ring.begin_cursor + acknowledged, ring.end_cursor))
            batch = ring.read_events(ring.begin_cursor, limit, str)
            plain = ring.read_events(ring.begin_cursor, limit)
            assert batch.count == plain.count
            assert timed(batch.lines) == expected[ring.begin_cursor :][: batch.count]
            assert ring.total_line_bytes <= ring.memory_bytes <= ring.total_line_bytes * 2
            if ring.begin_cursor == ring.end_cursor:
                assert ring.memory_bytes == 0

    def test_times_are_added_to_a_bounded_number_of_events(self) -> None:
        ring = EventRing()
        for number in range(5000):
            ring.append_batch(encode_data_event(b"1"), 1000 * number)
        batch = ring.read_events(7, PLENTY, str)
        self.assertEqual(timed(batch.lines), [str(7.0 + n) for n in range(batch.count)])
        self.assertLess(batch.count, 1500)
        self.assertGreater(batch.count, 1000)


def numbers(first: int, count: int) -> EventBatch:
    """Return `count` events, each of 31 bytes, the payload of which is its number."""
    batch = EMPTY_BATCH
    for number in range(first, first + count):
        batch += encode_data_event(b"%04d" % number)
    return batch


LINE = len(numbers(0, 1).lines)


def filled(*counts: int) -> EventRing:
    """Return a ring to which batches of so many events were appended."""
    ring = EventRing()
    for count in counts:
        ring.append_batch(numbers(ring.end_cursor, count), 0)
    return ring


class AppendTests(SynchronousTestCase):
    def test_small_batches_are_merged(self) -> None:
        ring = filled(*[1] * 1000)
        self.assertEqual(ring.read_events(0, PLENTY), numbers(0, 1000))
        self.assertLess(len(ring.batches), 10)


class ReadTests(SynchronousTestCase):
    def test_read_returns_as_many_events_as_fit_to_the_byte(self) -> None:
        for counts in ((6,), (1,) * 6, (2, 4), (4, 2)):
            for limit in range(7 * LINE):
                ring, count = filled(*counts), max(limit // LINE, 1)
                self.assertEqual(ring.read_events(0, limit), numbers(0, min(count, 6)))
                self.assertEqual(ring.read_events(2, limit), numbers(2, min(count, 4)))

    def test_read_splits_a_batch_at_the_ends_of_the_page_unless_a_part_is_small(self) -> None:
        page = 300 * LINE  # some 9 KiB
        for first, end, counts in (
            (0, 1000, [300, 700]),
            (200, 1000, [200, 300, 500]),
            (200, 510, [200, 310]),
            (10, 320, [320]),
        ):
            ring = filled(end)
            for _ in range(2):
                self.assertEqual(ring.read_events(first, page), numbers(first, 300))
                self.assertEqual([batch.count for batch in ring.batches], counts)
            self.assertEqual(ring.read_events(0, PLENTY), numbers(0, end))

    def test_first_event_of_a_page_may_exceed_the_limit(self) -> None:
        ring = filled(1)
        large = encode_text_events(b"x" * 20_000)
        ring.append_batch(large, 0)
        ring.append_batch(numbers(2, 1), 0)
        self.assertEqual(ring.read_events(0, LINE + 1), numbers(0, 1))
        self.assertEqual(ring.read_events(1, LINE + 1), large)
        for limit in (0, LINE + 1):
            self.assertEqual(ring.read_events(2, limit), numbers(2, 1))


def number(value: int) -> EventBatch:
    """Return a batch of one event of 100 bytes."""
    return encode_data_event(b"%73d" % value)


def source_of(stdout: bytes, mark_count: int = 1, **changes: object) -> SegmentSource:
    """Return the source of a segment at the start of stdout."""
    return SegmentSource(0, len(stdout), b"", zlib.crc32(stdout), 0, mark_count, 0, **changes)


def ended(log: EventLog, *values: int) -> None:
    """Append a segment with these numbers that has ended."""
    for value in values:
        log.append_batch(number(value), 0)
    log.end_segment(source_of(b""))


class LogTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(core_events, "MIN_SEGMENT_BYTES", 100)
        self.log = EventLog(EventMemory(PLENTY))

    def test_closed_log_takes_no_events(self) -> None:
        self.log.mark_end()
        self.assertRaises(AssertionError, self.log.append_batch, number(0), 0)

    def test_segment_with_enough_bytes_can_be_ended_once(self) -> None:
        self.assertEqual(self.log.read_events(0, PLENTY, str), EMPTY_BATCH)
        self.log.append_batch(EMPTY_BATCH, 0)
        self.assertFalse(self.log.segments or self.log.can_end_segment)
        self.log.append_batch(number(0), 0)
        self.assertFalse(EventLog(EventMemory(PLENTY)).can_end_segment)
        self.patch(core_events, "MAX_SEGMENT_BYTES", 100)
        self.assertTrue(self.log.can_end_segment)
        self.log.end_segment(source_of(b""))
        self.assertFalse(self.log.can_end_segment)

    def test_acknowledged_events_are_discarded(self) -> None:
        ended(self.log, 0, 1)
        ended(self.log, 2, 3)
        self.log.append_batch(number(4), 0)
        newest = 0
        for cursor, kept in ((1, 400), (1, 400), (0, 400), (2, 300), (4, 100), (5, 0)):
            newest = max(newest, cursor)
            self.log.acknowledge(cursor)
            self.assertEqual(self.log.begin_cursor, newest)
            self.assertEqual(self.log._memory.budget.used, kept)
        self.assertEqual((self.log.begin_cursor, self.log.end_cursor), (5, 5))
        self.log.append_batch(number(5), 0)
        self.assertEqual(self.log.read_events(5, PLENTY), number(5))

    def test_stdout_is_discarded_up_to_the_first_segment_that_is_kept(self) -> None:
        for begin in (10, 20):
            self.log.append_batch(number(0), 0)
            self.log.end_segment(SegmentSource(begin, begin + 12, b"", 0, 0, 1, 0))
        self.log.acknowledge(1)
        self.assertEqual(self.log.discarded_stdout_bytes, 20)
        self.log.acknowledge(2)
        self.assertEqual(self.log.discarded_stdout_bytes, 20)


class MemoryTests(SynchronousTestCase):
    def test_segment_read_least_recently_is_evicted(self) -> None:
        memory = EventMemory(250)
        logs = [EventLog(memory) for _ in range(3)]
        ended(logs[0], 0)
        ended(logs[1], 1)
        logs[0].read_events(0, PLENTY)
        ended(logs[2], 2)
        self.assertEqual(memory.budget.used, 200)
        self.assertRaises(EventsEvicted, logs[1].read_events, 0, PLENTY)
        self.assertEqual(logs[0].read_events(0, PLENTY), number(0))

    def test_segments_of_the_caller_with_most_memory_are_evicted_first(self) -> None:
        memory = EventMemory(400)
        greedy = [EventLog(memory, caller="alice") for _ in range(9)]
        modest = EventLog(memory, caller="bob")
        ended(modest, 0)
        for number_of_log, log in enumerate(greedy):
            ended(log, number_of_log)
        for log in greedy[-3:]:
            self.assertEqual(log.read_events(0, PLENTY).count, 1)
        self.assertRaises(EventsEvicted, greedy[0].read_events, 0, PLENTY)
        self.assertEqual(modest.read_events(0, PLENTY), number(0))
        self.assertEqual(dict(memory.budget.used_by_caller), {"alice": 300, "bob": 100})

    def test_discarded_log_frees_the_quota_of_newest_events(self) -> None:
        told: list[bool] = []
        memory = EventMemory(400)
        memory.pinned_budget.on_quota_freed = lambda: told.append(
            memory.pinned_budget.is_quota_used_up("alice")
        )
        log = EventLog(memory, caller="alice")
        for value in range(9):
            log.append_batch(number(value), 0)
        self.assertTrue(memory.pinned_budget.is_quota_used_up("alice"))
        log.discard()
        self.assertEqual(told, [False])

    def test_minimum_segment_size_falls_with_the_number_of_logs(self) -> None:
        memory = EventMemory(4 * 2**20)
        self.assertEqual(memory.min_segment_bytes, core_events.MAX_SEGMENT_BYTES)
        for _ in range(8):
            EventLog(memory).append_batch(number(0), 0)
        self.assertEqual(memory.min_segment_bytes, 2**20 // 8)
        for _ in range(10_000):
            EventLog(memory).append_batch(number(0), 0)
        self.assertEqual(memory.min_segment_bytes, core_events.MIN_SEGMENT_BYTES)

    def test_loaded_segment_is_readable_and_evicts_the_segment_loaded_earlier(self) -> None:
        memory = EventMemory(150)
        log = EventLog(memory)
        log.restore_segment(7, 8, source_of(b""))
        log.restore_segment(8, 9, source_of(b""))
        self.assertEqual((log.begin_cursor, log.end_cursor), (7, 9))
        for cursor in (7, 8, 7):
            evicted = self.assertRaises(EventsEvicted, log.read_events, cursor, 1).segment
            log.load_segment(evicted, ring_of(cursor))
            self.assertEqual(log.read_events(cursor, 1), number(cursor))
            self.assertEqual(memory.budget.used, 100)

    def test_segment_loaded_after_its_acknowledgement_is_dropped(self) -> None:
        log = EventLog(EventMemory(0))
        log.restore_segment(0, 2, source_of(b""))
        log.restore_segment(2, 3, source_of(b""))
        evicted = self.assertRaises(EventsEvicted, log.read_events, 0, 1).segment
        log.acknowledge(1)
        log.load_segment(evicted, ring_of(0, 1))
        self.assertEqual(log.read_events(1, PLENTY), number(1))
        log.load_segment(evicted, ring_of(0, 1))
        log.acknowledge(2)
        log.load_segment(evicted, ring_of(0, 1))
        self.assertEqual(log._memory.budget.used, 0)


def ring_of(*values: int) -> EventRing:
    """Return a ring with these numbers, at their cursors."""
    ring = EventRing(values[0], values[0])
    for value in values:
        ring.append_batch(number(value), 0)
    return ring


def make_log() -> EventLog:
    """Return an empty log."""
    return EventLog(EventMemory(PLENTY))


def log_of(*payloads: bytes, closed: bool = False) -> EventLog:
    """Return a log of data events, one batch each."""
    log = make_log()
    for payload in payloads:
        log.append_batch(encode_data_event(payload), 0)
    if closed:
        log.mark_end()
    return log


def read_page(log: EventLog, after: str | None, limit: int) -> EventPage:
    """Return the page after a cursor."""
    return make_page(log, after, log.read_events(resolve_cursor(log, after), limit))


def ask(log: EventLog, after: str | None, limit: int) -> EventPage:
    """Return a page as one who reads page by page gets it: asking acknowledges."""
    log.acknowledge(resolve_cursor(log, after))
    return read_page(log, after, limit)


class PageTests(SynchronousTestCase):
    def check(
        self, log: EventLog, after: str | None, end: str | None, data: list[object]
    ) -> EventPage:
        """Hold the page after a cursor against what it must say, as JSON."""
        page = ask(log, after, PLENTY)
        self.assertEqual(
            json.loads(page.encode_json()),
            {"begin": after, "end": end, "data": [{"type": "data", "payload": p} for p in data]},
        )
        return page

    def test_page_has_its_cursor_its_events_and_the_next_cursor(self) -> None:
        end = ALL_RECEIVED_CURSOR
        for payloads, closed, after, expected_end, data in (
            ((b"1", b"2"), False, None, "2", [1, 2]),
            ((), False, None, "0", []),  # null would stop every client
            ((b"1",), False, "0", "1", [1]),
            ((b"1", b"2", b"3"), False, "2", "3", [3]),
            ((b"1",), False, "1", "1", []),
            ((b"1", b"2"), True, None, end, [1, 2]),
            ((b"1", b"2"), True, "1", end, [2]),
            ((b"1",), True, "1", end, []),
            ((), True, None, end, []),
        ):
            page = self.check(log_of(*payloads, closed=closed), after, expected_end, list(data))
            self.assertIs(page.is_last_page, closed)
            self.assertIs(page.has_events_or_is_last, closed or bool(data))

    def test_empty_last_page_begins_at_the_all_received_cursor_and_ends_at_null(self) -> None:
        page = make_empty_last_page()
        self.assertEqual(
            json.loads(page.encode_json()), {"begin": ALL_RECEIVED_CURSOR, "end": None, "data": []}
        )
        self.assertTrue(page.is_last_page)
        self.assertEqual(page, make_empty_last_page())

    def test_reading_a_page_at_any_cursor_discards_no_events(self) -> None:
        log = log_of(b"1", b"2", b"3")
        for after in ("2", None, "3", "1"):
            self.assertEqual(read_page(log, after, PLENTY).begin_cursor, after)
            self.assertEqual(log.begin_cursor, 0)
        self.assertRaises(InvalidCursor, read_page, log, "4", PLENTY)


class CursorTests(SynchronousTestCase):
    def test_valid_cursor_is_parsed_unchanged_and_an_empty_one_as_none(self) -> None:
        for after in ("0", "1", "10", "9" * 18, ALL_RECEIVED_CURSOR, None):
            self.assertEqual(parse_cursor(after), after)
        self.assertIs(parse_cursor(""), None)

    def test_cursor_that_the_server_never_sent_is_refused(self) -> None:
        for after in (
            "00", "01", "-1", "+1", "1.0", "1e3", " 1", "1 ", "1\n", "1_0", "0x1", "x", "END",
            "end ", "null", "None", "\u0661", "\xb2", "\uff11", "9" * 19, "9" * 5000, "\0",
            "\ud800",
        ):  # fmt: skip
            self.assertRaises(InvalidCursor, parse_cursor, after)
        error = self.assertRaises(InvalidCursor, parse_cursor, "\0\ud800" + "x" * 10_000)
        self.assertTrue(str(error).isprintable() and len(str(error)) < 300, str(error))


class SkipTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.log = make_log()
        self.log.append_batch(EventBatch(4, b"1\n2\n3\n4\n"), 0)

    def test_skipped_events_are_counted_from_the_cursor(self) -> None:
        for after, skip, expected in ((None, 0, 0), (None, 3, 3), ("1", 2, 3), ("4", 0, 4)):
            self.assertEqual(resolve_cursor(self.log, after, skip), expected)

    def test_skip_may_lead_from_a_discarded_cursor_to_a_kept_event(self) -> None:
        self.log.acknowledge(2)
        self.assertEqual(resolve_cursor(self.log, "0", 2), 2)
        self.assertRaises(DiscardedCursor, resolve_cursor, self.log, "0", 1)

    def test_skip_beyond_the_newest_event_is_refused(self) -> None:
        for after, skip, said in (
            ("3", 2, "after: '3' with skip: 2 is after the newest event, 4"),
            (None, 5, "after: '' with skip: 5 is after the newest event, 4"),
            (ALL_RECEIVED_CURSOR, 1, "after: 'end' with skip: 1 is after the newest event, 4"),
            ("5", 0, "after: '5' is after the newest event, 4"),
        ):
            error = self.assertRaises(InvalidCursor, resolve_cursor, self.log, after, skip)
            self.assertEqual(error.detail, said)
