"""`core.event_log`: segments in memory, evicted, and parsed again."""

from __future__ import annotations

import zlib

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core import event_log
from tawebeval.core.event_log import (
    EventLog,
    EventMemory,
    EventsEvicted,
    SegmentSource,
)
from tawebeval.core.events import EMPTY_BATCH, EventBatch, encode_data_event
from tawebeval.core.ring import EventRing

PLENTY = 2**20


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
        self.patch(event_log, "MIN_SEGMENT_BYTES", 100)
        self.log = EventLog(EventMemory(PLENTY))

    def test_new_log_has_no_events(self) -> None:
        self.assertEqual(self.log.read_events(0, PLENTY), EMPTY_BATCH)
        self.assertEqual(self.log.read_timed_events(0, PLENTY, str), EMPTY_BATCH)
        self.assertFalse(self.log.can_end_segment)
        self.assertFalse(self.log.segments)

    def test_empty_batch_begins_no_segment(self) -> None:
        self.log.append_batch(EMPTY_BATCH, 0)
        self.assertFalse(self.log.can_end_segment)

    def test_closed_log_takes_no_events(self) -> None:
        self.log.mark_end()
        self.assertRaises(AssertionError, self.log.append_batch, number(0), 0)

    def test_events_of_any_segment_are_read(self) -> None:
        ended(self.log, 0, 1)
        ended(self.log, 2)
        self.log.append_batch(number(3), 4000)
        for cursor in range(4):
            self.assertEqual(self.log.read_events(cursor, 1), number(cursor))
        timed = self.log.read_timed_events(3, PLENTY, str)
        self.assertEqual(timed.lines, number(3).lines.replace(b"}\n", b',"time":"4.0"}\n'))

    def test_only_the_newest_segment_ends_and_only_once(self) -> None:
        self.log.append_batch(number(0), 0)
        self.assertFalse(EventLog(EventMemory(PLENTY)).can_end_segment)
        self.patch(event_log, "MAX_SEGMENT_BYTES", 100)
        self.assertTrue(self.log.can_end_segment)
        self.log.end_segment(source_of(b""))
        self.assertFalse(self.log.can_end_segment)

    def test_acknowledged_events_are_discarded(self) -> None:
        ended(self.log, 0, 1)
        ended(self.log, 2, 3)
        self.log.append_batch(number(4), 0)
        for cursor, kept in ((1, 400), (1, 400), (0, 400), (2, 300), (4, 100), (5, 0)):
            self.log.acknowledge(cursor)
            self.assertEqual(self.log._memory.share.used, kept)
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

    def test_discard_frees_all_memory(self) -> None:
        ended(self.log, 0)
        self.log.append_batch(number(1), 0)
        self.log.discard()
        self.assertEqual(self.log._memory.share.used, 0)
        self.assertEqual(self.log.begin_cursor, 2)


class MemoryTests(SynchronousTestCase):
    def test_segment_read_least_recently_is_evicted(self) -> None:
        memory = EventMemory(250)
        logs = [EventLog(memory) for _ in range(3)]
        ended(logs[0], 0)
        ended(logs[1], 1)
        logs[0].read_events(0, PLENTY)
        ended(logs[2], 2)
        self.assertEqual(memory.share.used, 200)
        self.assertRaises(EventsEvicted, logs[1].read_events, 0, PLENTY)
        self.assertEqual(logs[0].read_events(0, PLENTY), number(0))

    def test_caller_that_has_most_loses_its_segments_whoever_reads(self) -> None:
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
        self.assertEqual(dict(memory.share.used_by_caller), {"alice": 300, "bob": 100})

    def test_newest_segments_stay(self) -> None:
        memory = EventMemory(0)
        log = EventLog(memory)
        log.append_batch(number(0), 0)
        log.append_batch(number(1), 0)
        self.assertEqual(log.read_events(0, PLENTY).count, 2)

    def test_caller_whose_newest_segments_leave_has_room_again(self) -> None:
        told: list[bool] = []
        memory = EventMemory(400)
        memory.on_room = lambda: told.append(memory.fixed_share.is_part_used_up("alice"))
        log = EventLog(memory, caller="alice")
        for value in range(9):
            log.append_batch(number(value), 0)
        self.assertTrue(memory.fixed_share.is_part_used_up("alice"))
        log.discard()
        self.assertEqual(told, [False])

    def test_many_logs_have_smaller_segments(self) -> None:
        memory = EventMemory(4 * 2**20)
        self.assertEqual(memory.min_segment_bytes, event_log.MAX_SEGMENT_BYTES)
        for _ in range(8):
            EventLog(memory).append_batch(number(0), 0)
        self.assertEqual(memory.min_segment_bytes, 2**20 // 8)
        for _ in range(10_000):
            EventLog(memory).append_batch(number(0), 0)
        self.assertEqual(memory.min_segment_bytes, event_log.MIN_SEGMENT_BYTES)

    def test_loaded_segment_is_read_and_evicts_another(self) -> None:
        memory = EventMemory(150)
        log = EventLog(memory)
        log.restore_segment(7, 8, source_of(b""))
        log.restore_segment(8, 9, source_of(b""))
        self.assertEqual((log.begin_cursor, log.end_cursor), (7, 9))
        for cursor in (7, 8, 7):
            evicted = self.assertRaises(EventsEvicted, log.read_events, cursor, 1).segment
            log.load_segment(evicted, ring_of(cursor))
            self.assertEqual(log.read_events(cursor, 1), number(cursor))
            self.assertEqual(memory.share.used, 100)

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
        self.assertEqual(log._memory.share.used, 0)


def ring_of(*values: int) -> EventRing:
    """Return a ring with these numbers, at their cursors."""
    ring = EventRing(values[0], values[0])
    for value in values:
        ring.append_batch(number(value), 0)
    return ring
