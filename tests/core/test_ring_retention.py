"""`core.ring.Retention`: events that are kept for pages and streams, in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core import ring
from tawebeval.core.events import EMPTY_BATCH, EventBatch, encode_data_event
from tawebeval.core.ring import EventRetention, EventRing, StreamPosition

LINE = len(encode_data_event(b"0000").lines)
CAPACITY = 40 * LINE
KEPT = 30  # events, three quarters, which may be behind what streams have taken
PRINTED = 8  # events at most at once
RESUME = 30  # seconds in which a stream that was cut is resumed


def numbers(first: int, count: int) -> EventBatch:
    """Return `count` events the payload of which is their number."""
    return sum(
        (encode_data_event(b"%04d" % number) for number in range(first, first + count)), EMPTY_BATCH
    )


class RetentionTestCase(SynchronousTestCase):
    """A ring of which each event is a batch, so that all can be cut off to the event."""

    def setUp(self) -> None:
        self.patch(ring, "MAX_MERGED_BATCH_BYTES", 0)
        self.ring = EventRing()
        self.retention = EventRetention(self.ring)

    def print(self, count: int) -> None:
        """Append events."""
        for _ in range(count):
            self.ring.append_batch(numbers(self.ring.end_cursor, 1))


class PageTests(RetentionTestCase):
    """Readers of pages."""

    def test_alone(self) -> None:
        """What pages acknowledge is discarded at once, and nothing else is, ever."""
        self.print(100)
        self.retention.discard_received_events(CAPACITY, now=0, has_page_reader=False)
        self.assertEqual(self.ring.begin_cursor, 0)
        for after, oldest, new in ((0, 0, False), (7, 7, True), (3, 7, False), (7, 7, False)):
            self.assertEqual(self.retention.acknowledge(after), new, after)
            self.assertEqual(self.ring.begin_cursor, oldest)

    def test_not_before_streams(self) -> None:
        """What a live stream has yet to take stays, and goes when it has, or has gone."""
        self.print(20)
        slow, fast = self.retention.add_stream(2), self.retention.add_stream(9)
        self.retention.acknowledge(15)
        self.assertEqual(self.ring.begin_cursor, 2)
        slow.received_cursor = 5
        self.retention.discard_received_events(CAPACITY, now=0, has_page_reader=True)
        self.assertEqual(self.ring.begin_cursor, 5)
        self.retention.remove_stream(slow)
        self.assertEqual(self.ring.begin_cursor, 9)
        self.retention.remove_stream(fast)
        self.assertEqual(self.ring.begin_cursor, 15)


class StreamTests(RetentionTestCase):
    """Streams."""

    def test_while_there_is_room(self) -> None:
        """What was taken stays for a resume, also when the stream has gone."""
        reader = self.retention.add_stream(0)
        self.print(KEPT)
        reader.received_cursor = KEPT
        self.retention.discard_received_events(CAPACITY, now=0, has_page_reader=False)
        self.assertEqual(self.ring.begin_cursor, 0)
        self.retention.remove_stream(reader)
        self.assertEqual(self.ring.begin_cursor, 0)

    def test_too_much(self) -> None:
        """The oldest of it goes, and three quarters of the capacity stay."""
        reader = self.retention.add_stream(0)
        self.print(KEPT + 8)
        reader.received_cursor = KEPT + 8
        self.retention.discard_received_events(CAPACITY, now=0, has_page_reader=False)
        self.assertEqual((self.ring.begin_cursor, self.ring.line_bytes), (8, CAPACITY * 3 // 4))

    def test_whatever_waits(self) -> None:
        """As much stays where the ring is full of what is yet to be taken."""
        reader = self.retention.add_stream(0)
        self.print(70)
        for taken, oldest in ((3, 0), (KEPT, 0), (KEPT + 1, 1), (60, 30), (70, 40)):
            reader.received_cursor = taken
            self.retention.discard_received_events(CAPACITY, now=0, has_page_reader=False)
            self.assertEqual(self.ring.begin_cursor, oldest)

    def test_slowest(self) -> None:
        """It is kept behind the slowest of all streams."""
        slow, fast = self.retention.add_stream(0), self.retention.add_stream(0)
        self.print(50)
        fast.received_cursor, slow.received_cursor = 50, KEPT + 3
        self.retention.discard_received_events(CAPACITY, now=0, has_page_reader=False)
        self.assertEqual(self.ring.begin_cursor, 3)
        self.retention.remove_stream(slow)
        self.retention.discard_received_events(CAPACITY, now=0, has_page_reader=False)
        self.assertEqual(self.ring.begin_cursor, 20)

    def test_next_to_nothing(self) -> None:
        """Where there is hardly any room nothing stays that all have: it could be in the way."""
        reader = self.retention.add_stream(0)
        self.print(2)
        reader.received_cursor = 2
        self.retention.discard_received_events(1, now=0, has_page_reader=False)
        self.assertEqual(self.ring.line_bytes, 0)

    def test_gone(self) -> None:
        """When no stream is left nothing more is discarded: its client may come back."""
        reader = self.retention.add_stream(0)
        self.print(20)
        reader.received_cursor = 20
        self.retention.remove_stream(reader)
        self.print(30)
        self.retention.discard_received_events(CAPACITY, now=0, has_page_reader=False)
        self.assertEqual((self.ring.begin_cursor, len(self.retention)), (0, 0))

    def test_cut(self) -> None:
        """What a stream that was cut has not shown to have stays for its client, for a time."""
        cut, fast = self.retention.add_stream(0), self.retention.add_stream(0)
        self.print(50)
        cut.received_cursor, fast.received_cursor = 5, 50
        self.retention.keep_events_for_resume(cut, 45, deadline=30)
        self.assertEqual(self.retention.resume_deadline, 30)
        self.retention.discard_received_events(CAPACITY, now=29.9, has_page_reader=False)
        self.assertEqual(self.ring.begin_cursor, 0)
        self.print(20)
        fast.received_cursor = 70
        self.retention.discard_received_events(CAPACITY, now=29.9, has_page_reader=False)
        self.assertEqual(self.ring.begin_cursor, 0)  # three quarters lie behind what it has
        self.retention.discard_received_events(CAPACITY, now=30, has_page_reader=False)
        self.assertEqual((self.ring.begin_cursor, self.retention.resume_deadline), (40, None))

    def test_resumed(self) -> None:
        """Nothing is kept any longer for a stream that was cut, when its client is back."""
        cut, fast = self.retention.add_stream(0), self.retention.add_stream(0)
        self.print(70)
        cut.received_cursor, fast.received_cursor = 5, 70
        self.retention.keep_events_for_resume(cut, 45, deadline=30)
        self.retention.remove_stream(
            self.retention.add_stream(46)
        )  # which that client was not sent
        self.assertEqual(self.retention.resume_deadline, 30)
        self.retention.add_stream(45)
        self.assertIsNone(self.retention.resume_deadline)
        self.retention.discard_received_events(CAPACITY, now=0, has_page_reader=False)
        self.assertEqual(self.ring.begin_cursor, 15)

    def test_resumed_by_one_of_several(self) -> None:
        """Of several streams that were cut that one is resumed that ended next to there."""
        self.print(50)
        readers = [self.retention.add_stream(0) for _ in range(3)]
        for number, reader in enumerate(readers):
            reader.received_cursor = 10 * number
            self.retention.keep_events_for_resume(reader, 45, deadline=number)
        for place, until in ((19, 0), (1, 1), (40, None)):
            self.retention.add_stream(place)
            self.assertEqual(self.retention.resume_deadline, until)

    def test_many_cut(self) -> None:
        """Whoever breaks off streams on and on has no more kept for it than for sixteen."""
        self.print(100)
        for number in range(20):
            self.retention.keep_events_for_resume(
                self.retention.add_stream(number), number, deadline=30 + number
            )
        self.assertEqual(self.retention.resume_deadline, 34)

    def test_cut_beside_pages(self) -> None:
        """What pages have acknowledged goes also where a stream was cut that had not taken it."""
        self.print(20)
        self.retention.keep_events_for_resume(self.retention.add_stream(2), 9, deadline=30)
        self.retention.acknowledge(15)
        self.assertEqual(self.ring.begin_cursor, 15)

    def test_beside_pages(self) -> None:
        """While pages are read, what they have not acknowledged stays."""
        reader = self.retention.add_stream(0)
        self.print(50)
        reader.received_cursor = 50
        self.retention.discard_received_events(CAPACITY, now=0, has_page_reader=True)
        self.assertEqual(self.ring.begin_cursor, 0)
        self.retention.acknowledge(4)
        self.retention.discard_received_events(CAPACITY, now=0, has_page_reader=True)
        self.assertEqual(self.ring.begin_cursor, 4)
        self.retention.discard_received_events(CAPACITY, now=0, has_page_reader=False)
        self.assertEqual(self.ring.begin_cursor, 20)


class Machine(RuleBasedStateMachine):
    """Streams and pages over one ring: each sees every event exactly once, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = EventRing()
        self.retention = EventRetention(self.ring)
        self.printed: list[bytes] = []
        self.acknowledged = 0
        # Live streams: where each stands, and all that its client has ever been given.
        self.streams: dict[StreamPosition, list[bytes]] = {}
        self.positions: dict[StreamPosition, int] = {}
        self.gone: list[list[bytes]] = []  # what those have who have left
        # Streams that were cut: when, what of it was taken, and what was sent.
        self.cuts: list[tuple[float, int, int]] = []
        self.now = 0.0
        self.page: list[bytes] = []  # what the reader of pages has
        self.paged = False

    def lines(self, batch: EventBatch) -> list[bytes]:
        lines = batch.lines.splitlines(keepends=True)
        assert len(lines) == batch.count
        return lines

    @precondition(lambda self: self.ring.line_bytes < CAPACITY)
    @rule(count=st.integers(1, PRINTED))
    def print(self, count: int) -> None:
        """Print some; whoever prints waits while the ring is full."""
        batch = numbers(len(self.printed), count)
        self.printed += self.lines(batch)
        self.ring.append_batch(batch)

    @precondition(lambda self: len(self.streams) < 4)
    @rule(back=st.integers(0, 10))
    def begin(self, back: int) -> None:
        """Let a new stream begin at the oldest event, or the client of one that was cut resume."""
        read = self.gone.pop(back) if back < len(self.gone) else None
        if read is None or len(read) < self.ring.begin_cursor:
            read = self.printed[: self.ring.begin_cursor]
        self.enter(read)

    @precondition(lambda self: self.cuts and len(self.streams) < 4)
    @rule(lost=st.integers(0, 40))
    def resume(self, lost: int) -> None:
        """Let the client resume whose stream was cut first; a part of what was sent got lost."""
        _, taken, sent = self.cuts[0]
        position = max(taken, sent - lost)
        if position >= self.ring.begin_cursor:  # otherwise pages have acknowledged it
            self.enter(self.printed[:position])

    def enter(self, read: list[bytes]) -> None:
        place = len(read)
        cuts = [cut for cut in self.cuts[-16:] if place <= cut[2]]
        if cuts:
            self.cuts.remove(min(cuts, key=lambda cut: abs(cut[1] - place)))
        reader = self.retention.add_stream(place)
        self.streams[reader] = read
        self.positions[reader] = place

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0, 9), limit=st.integers(0, 20 * LINE))
    def read(self, number: int, limit: int) -> None:
        """Let a stream read a piece; the one before has been taken."""
        reader = self.pick(number)
        self.took(reader)
        batch = self.ring.read_events(self.positions[reader], limit)
        self.positions[reader] += batch.count
        self.streams[reader] += self.lines(batch)

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0, 9), lost=st.integers(0, 20))
    def leave(self, number: int, lost: int) -> None:
        """Let a stream end; its client has not got the last of what was written."""
        reader = self.pick(number)
        self.retention.remove_stream(reader)
        self.retention.discard_received_events(CAPACITY, now=self.now, has_page_reader=self.paged)
        del self.positions[reader]
        read = self.streams.pop(reader)
        self.gone.append(read[: max(0, len(read) - lost)])

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0, 9))
    def cut(self, number: int) -> None:
        """Let a stream be cut, whose client is expected to resume."""
        reader = self.pick(number)
        sent = self.positions.pop(reader)
        del self.streams[reader]
        self.cuts.append((self.now + RESUME, reader.received_cursor, sent))
        self.retention.keep_events_for_resume(reader, sent, self.now + RESUME)

    @rule(seconds=st.integers(1, RESUME))
    def wait(self, seconds: int) -> None:
        """Let time pass: clients that are long gone are not expected any more."""
        self.now += seconds
        self.cuts = [cut for cut in self.cuts if cut[0] > self.now]
        self.retention.discard_received_events(CAPACITY, now=self.now, has_page_reader=self.paged)

    @rule(limit=st.integers(0, 20 * LINE), received=st.booleans())
    def ask(self, limit: int, received: bool) -> None:
        """Let the reader of pages ask for the next, if streams have left it."""
        if len(self.page) < self.ring.begin_cursor:
            self.page = self.printed[: self.ring.begin_cursor]  # it was refused, and begins there
        self.paged = True
        self.acknowledged = max(self.acknowledged, len(self.page))
        self.retention.acknowledge(len(self.page))
        self.retention.discard_received_events(CAPACITY, now=self.now, has_page_reader=True)
        batch = self.ring.read_events(len(self.page), limit)
        if received:
            self.page += self.lines(batch)

    @rule()
    def stop_asking(self) -> None:
        """Let it be long ago that a page was asked for."""
        self.paged = False

    def pick(self, number: int) -> StreamPosition:
        return list(self.streams)[number % len(self.streams)]

    def took(self, reader: StreamPosition) -> None:
        before = self.ring.begin_cursor
        reader.received_cursor = self.positions[reader]
        self.retention.discard_received_events(CAPACITY, now=self.now, has_page_reader=self.paged)
        taken = min(reader.received_cursor for reader in self.streams)
        if self.ring.begin_cursor > max(before, self.acknowledged):
            # It was too much, so nearly three quarters are left to come back to.
            assert taken - self.ring.begin_cursor > KEPT - PRINTED
        if not self.paged and not self.cuts:
            assert taken < self.ring.end_cursor or self.ring.line_bytes < CAPACITY, (
                "all wait for ever"
            )

    @invariant()
    def nobody_misses_anything(self) -> None:
        """Every reader has exactly what was printed, up to where it stands."""
        for read in (*self.streams.values(), *self.gone, self.page):
            assert read == self.printed[: len(read)]

    @invariant()
    def what_is_needed_is_there(self) -> None:
        """No live stream, and no reader of pages who asks, is behind the oldest event."""
        for reader in self.streams:
            assert self.ring.begin_cursor <= reader.received_cursor <= self.positions[reader]
        if self.paged:
            assert self.ring.begin_cursor <= max(self.acknowledged, len(self.page))

    @invariant()
    def cut_streams_can_be_resumed(self) -> None:
        """Hold that nothing is gone that a client may lack whose stream was cut a moment ago."""
        for _, taken, _ in self.cuts[-16:]:
            assert self.ring.begin_cursor <= max(taken, self.acknowledged)

    @invariant()
    def memory_is_bounded(self) -> None:
        """Hold that the ring has its capacity at most, and what was printed in one go."""
        assert self.ring.line_bytes < CAPACITY + PRINTED * LINE

    @invariant()
    def acknowledged_is_discarded(self) -> None:
        """Hold that what pages have acknowledged is kept for live streams only."""
        needed = min((reader.received_cursor for reader in self.streams), default=self.acknowledged)
        assert self.ring.begin_cursor >= min(self.acknowledged, needed)


class InterleavingTests(SynchronousTestCase):
    """Readers of all kinds at once."""

    def test_readers(self) -> None:
        """Each sees every event once and in order, and memory stays bounded."""
        self.patch(ring, "MAX_MERGED_BATCH_BYTES", 4 * LINE)
        self.patch(ring, "MIN_BATCH_PART_BYTES", 2 * LINE)
        run_state_machine_as_test(Machine, settings=settings(stateful_step_count=40))
