"""`core.ring`: the buffer by itself; test_pages has the properties of it in use."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core import ring as module
from tawebeval.core.events import EMPTY_BATCH, EventBatch, encode_data_event, encode_text_events
from tawebeval.core.ring import EventRing


def numbers(first: int, count: int) -> EventBatch:
    """Return `count` events, each of 31 bytes, the payload of which is its number."""
    batch = EMPTY_BATCH
    for number in range(first, first + count):
        batch += encode_data_event(b"%04d" % number)
    return batch


LINE = len(numbers(0, 1).lines)
PLENTY = 10**9


def filled(*counts: int) -> EventRing:
    """Return a ring to which batches of so many events were appended."""
    ring = EventRing()
    for count in counts:
        ring.append_batch(numbers(ring.end_cursor, count), 0)
    return ring


class AppendTests(SynchronousTestCase):
    def test_batch_without_events_changes_nothing(self) -> None:
        ring = filled(1)
        ring.append_batch(EMPTY_BATCH, 0)
        self.assertEqual((ring.end_cursor, ring.read_events(0, PLENTY)), (1, numbers(0, 1)))

    def test_small_batches_are_put_together(self) -> None:
        ring = filled(*[1] * 1000)
        self.assertEqual(ring.read_events(0, PLENTY), numbers(0, 1000))
        self.assertLess(len(ring.batches), 10)

    def test_large_batches_are_left_alone(self) -> None:
        ring = filled(1, 1)
        large = encode_text_events(b"x" * 20_000)
        ring.append_batch(large, 0)
        ring.append_batch(numbers(0, 1), 0)
        self.assertIs(ring.batches[1], large)
        self.assertEqual(len(ring.batches), 3)


class ReadTests(SynchronousTestCase):
    def test_as_many_events_as_fit_to_the_byte_wherever_the_batches_are_cut(self) -> None:
        for counts in ((6,), (1,) * 6, (2, 4), (4, 2)):
            for limit in range(LINE, 7 * LINE):
                ring = filled(*counts)
                self.assertEqual(ring.read_events(0, limit), numbers(0, min(limit // LINE, 6)))
                self.assertEqual(ring.read_events(2, limit), numbers(2, min(limit // LINE, 4)))

    def test_first_event_of_a_page_may_exceed_the_limit(self) -> None:
        for limit in (0, 1, LINE - 1):
            for counts in ((3,), (1, 2)):
                self.assertEqual(filled(*counts).read_events(1, limit), numbers(1, 1))
        ring = filled(1)
        large = encode_text_events(b"x" * 20_000)
        ring.append_batch(large, 0)
        ring.append_batch(numbers(2, 1), 0)
        self.assertEqual(ring.read_events(0, LINE + 1), numbers(0, 1))
        self.assertEqual(ring.read_events(1, LINE + 1), large)
        for limit in (0, LINE + 1):
            self.assertEqual(ring.read_events(2, limit), numbers(2, 1))

    def test_what_is_not_there_cannot_be_asked_for(self) -> None:
        ring = filled(4)
        ring.acknowledge(2)
        self.assertRaises(AssertionError, ring.read_events, 1, PLENTY)
        self.assertRaises(AssertionError, ring.read_events, 5, PLENTY)

    def test_reading_each_event_as_it_comes_leaves_few_batches(self) -> None:
        ring = EventRing()
        for number in range(1000):
            ring.append_batch(numbers(number, 1), 0)
            self.assertEqual(ring.read_events(number, PLENTY), numbers(number, 1))
        self.assertLess(len(ring.batches), 10)
        self.assertEqual(ring.read_events(0, PLENTY), numbers(0, 1000))

    def test_page_that_ends_within_a_batch_cuts_it(self) -> None:
        self.patch(module, "MIN_BATCH_PART_BYTES", 2 * LINE)
        ring = filled(6)
        self.assertEqual(ring.read_events(1, 2 * LINE), numbers(1, 2))
        self.assertEqual([batch.count for batch in ring.batches], [3, 3])
        self.assertEqual(ring.read_events(3, PLENTY), numbers(3, 3))
        self.assertEqual(ring.read_events(0, PLENTY), numbers(0, 6))

    def test_nothing_is_cut_off_that_is_small_at_neither_end(self) -> None:
        self.patch(module, "MIN_BATCH_PART_BYTES", 2 * LINE)
        for after, limit, counts in ((0, 1, [6]), (0, 2, [2, 4]), (1, 3, [4, 2]), (1, 4, [6])):
            ring = filled(6)
            self.assertEqual(ring.read_events(after, limit * LINE), numbers(after, limit))
            self.assertEqual([batch.count for batch in ring.batches], counts)

    def test_readers_at_many_places_leave_few_batches(self) -> None:
        ring = EventRing()
        while ring.line_bytes < 2**18:
            ring.append_batch(encode_text_events(b"\n" * 400), 0)
        for first in range(300):
            after = first
            while after < ring.end_cursor:
                after += ring.read_events(after, 2**14).count
        self.assertLessEqual(len(ring.batches), 2**18 // (4 * 1024) + 1)
        self.assertEqual(ring.read_events(0, PLENTY), encode_text_events(b"\n" * ring.end_cursor))


class AcknowledgeTests(SynchronousTestCase):
    def test_events_before_the_cursor_are_discarded(self) -> None:
        for counts in ((6,), (1,) * 6, (2, 4)):
            for after in range(7):
                ring = filled(*counts)
                ring.acknowledge(after)
                self.assertEqual((ring.begin_cursor, ring.end_cursor), (after, 6))
                self.assertEqual(ring.line_bytes, (6 - after) * LINE)
                self.assertEqual(ring.read_events(after, PLENTY), numbers(after, 6 - after))

    def test_nobody_acknowledges_what_was_never_there(self) -> None:
        self.assertRaises(AssertionError, filled(2).acknowledge, 3)

    def test_append_after_all_was_acknowledged(self) -> None:
        ring = filled(3)
        ring.acknowledge(3)
        self.assertEqual((ring.begin_cursor, ring.end_cursor, ring.line_bytes), (3, 3, 0))
        ring.append_batch(numbers(3, 1), 0)
        ring.append_batch(numbers(4, 1), 0)
        self.assertEqual(ring.read_events(3, PLENTY), numbers(3, 2))
