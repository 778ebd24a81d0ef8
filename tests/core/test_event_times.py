"""`core.event_times`: the times of the events in a ring."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.event_times import BYTES_PER_TIMESTAMP, EventTimes
from tawebeval.core.events import EventBatch, encode_data_event, encode_text_events
from tawebeval.core.ring import EventRing

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


class EventTimesTests(SynchronousTestCase):
    def test_each_event_has_the_time_of_its_write(self) -> None:
        times = EventTimes()
        for cursor, time in ((0, 5), (2, 5), (3, 7), (4, 6)):
            times.record_time(cursor, time)
        expected = ["5", "5", "5", "7", "6", "6"]
        for first in range(6):
            for last in range(first, 7):
                lines = times.add_times_to_lines(first, batch_of(last - first), str)
                self.assertEqual(timed(lines), expected[first:last])

    def test_apart_from_its_time_an_event_stays_as_it_is_byte_by_byte(self) -> None:
        times = EventTimes()
        times.record_time(0, 1)
        batch = encode_data_event(b'{"a" : 1.50}') + encode_text_events(b'}\n"}\n')
        lines = times.add_times_to_lines(0, batch, str)
        self.assertEqual(lines.replace(b',"time":"1"', b""), batch.lines)
        self.assertEqual(lines.count(b',"time":"1"'), batch.count)

    def test_marks_count_but_for_one(self) -> None:
        times = EventTimes()
        self.assertEqual(times.memory_bytes, 0)
        for cursor in range(100):
            times.record_time(cursor, cursor)
            self.assertEqual(times.memory_bytes, cursor * BYTES_PER_TIMESTAMP)
        for oldest in range(99):
            times.discard_times_before(oldest)
            self.assertLessEqual(times.memory_bytes, 2 * (99 - oldest) * BYTES_PER_TIMESTAMP)
            self.assertEqual(timed(times.add_times_to_lines(99, batch_of(1), str)), ["99"])
        times.discard_times_before(100)
        self.assertEqual(times.memory_bytes, 0)

    @given(
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 10), st.integers(1, 400))
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
            batch = ring.read_timed_events(ring.begin_cursor, limit, str)
            plain = ring.read_events(ring.begin_cursor, limit)
            assert batch.count == plain.count
            assert timed(batch.lines) == expected[ring.begin_cursor :][: batch.count]
            assert ring.line_bytes <= ring.memory_bytes <= ring.line_bytes * 2
            if ring.begin_cursor == ring.end_cursor:
                assert ring.memory_bytes == 0

    def test_ring_with_times_can_always_be_emptied(self) -> None:
        ring = EventRing()
        for number in range(1000):
            ring.append_batch(encode_data_event(b"1"), 1000 * number)
        self.assertEqual(ring.memory_bytes, ring.line_bytes + 999 * BYTES_PER_TIMESTAMP)
        ring.acknowledge(ring.end_cursor)
        self.assertEqual((ring.memory_bytes, ring.begin_cursor), (0, 1000))

    def test_times_are_added_to_a_bounded_number_of_events(self) -> None:
        ring = EventRing()
        for number in range(5000):
            ring.append_batch(encode_data_event(b"1"), 1000 * number)
        batch = ring.read_timed_events(7, PLENTY, str)
        self.assertEqual(timed(batch.lines), [str(7.0 + n) for n in range(batch.count)])
        self.assertLess(batch.count, 1500)
        self.assertGreater(batch.count, 1000)
