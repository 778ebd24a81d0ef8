"""`evaluations.stdout_pump`: the pump, from chunks of stdout to events in the ring."""

from __future__ import annotations

from itertools import cycle
from typing import NoReturn

from hypothesis import given
from hypothesis import strategies as st

from tawebeval.core import segi
from tawebeval.core.budget import RingAllocation
from tawebeval.core.ring import EventRing
from tawebeval.core.segi import SegiParser
from tawebeval.evaluations.stdout_pump import PARTIAL_LINE_DELAY, StdoutPump
from tawebeval.sandbox.workspace import FileRefused
from tests.cases import reference_segi
from tests.cases.evaluations import PumpTestCase
from tests.cases.strategies import (
    MARKERS,
    MAX_FILE,
    MAX_VALUE,
    Chunk,
    ErrorEvent,
    chunkings,
    chunks_of,
    classify,
    decode,
    join_text,
    read_file,
    stdouts,
)


class TextTests(PumpTestCase):
    """Text, and lines that are not whole yet."""

    def test_whole_lines(self) -> None:
        """Lines are delivered at once; each delivery is told once."""
        self.pump.feed(b"one\ntwo\nthree\n")
        self.assertEqual(self.events(), ["one", "\n", "two", "\n", "three"])
        self.assertEqual(self.changes, 1)

    def test_partial_line(self) -> None:
        """A partial line waits for its rest for 20 ms, and then no longer."""
        self.assertEqual(PARTIAL_LINE_DELAY, 0.02)
        self.pump.feed(b"one\nhalf a li")
        self.assertEqual(self.events(), ["one"])
        self.clock.advance(0.0199)
        self.assertEqual((self.events(), self.changes), (["one"], 1))
        self.clock.advance(0.0001)
        self.assertEqual(self.events(), ["one", "\n", "half a li"])
        self.assertEqual(self.changes, 2)
        self.pump.feed(b"ne\n")
        self.end()
        self.assertEqual(join_text(self.events()), ["one\nhalf a line\n"])

    def test_partial_line_in_small_pieces(self) -> None:
        """The waiting is counted from the first piece, so that it ends while more come."""
        for _ in range(4):
            self.pump.feed(b".")
            self.clock.advance(0.005)
        self.assertEqual("".join(map(str, self.events())), "....")

    def test_rest_in_time(self) -> None:
        """A line whose rest comes in time is one event."""
        self.pump.feed(b"half a li")
        self.clock.advance(0.01)
        self.pump.feed(b"ne\nnext\n")
        self.clock.advance(1)
        self.assertEqual(self.events(), ["half a line", "\n", "next"])

    def test_held_back(self) -> None:
        """What may yet be a marker waits as long as it takes, and nothing is told of it."""
        self.pump.feed(b"one")
        self.clock.advance(1)
        self.pump.feed(b"\n" + MARKERS.data_begin)
        self.clock.advance(1000)
        self.assertEqual((self.events(), self.changes), (["one"], 1))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_end(self) -> None:
        """The end of stdout delivers what is left, and stops the waiting."""
        self.pump.feed(b"half a li")
        self.end()
        self.assertEqual((self.events(), self.changes), (["half a li"], 1))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_nothing(self) -> None:
        """A stdout without a byte has no event."""
        self.end()
        self.assertEqual((self.events(), self.changes), ([], 0))

    def test_end_twice(self) -> None:
        """The end is taken once."""
        self.pump.feed(MARKERS.data_begin + b"\n")
        self.end()
        self.pump.on_stdout_end()
        self.assertEqual(self.events(), [ErrorEvent()])


class BackPressureTests(PumpTestCase):
    """The ring's capacity."""

    capacity = 200

    def fill(self) -> None:
        """Print until the ring is just full."""
        while self.ring.line_bytes < self.capacity:
            self.assertEqual((self.producer.calls, self.held), ([], []))
            self.pump.feed(b"line\n")

    def test_full(self) -> None:
        """A full ring pauses the producer and says so, once."""
        self.fill()
        self.assertEqual((self.producer.calls, self.held), (["pause"], [True]))
        self.pump.feed(b"what was read already\n")
        self.assertEqual((self.producer.calls, self.held), (["pause"], [True]))
        self.assertIn("what was read already", self.events())

    def test_just_below(self) -> None:
        """It is full at its capacity and not one byte before."""
        self.pump.feed(b"x\n")
        line = self.ring.line_bytes
        self.pump.feed(b"y" * (self.capacity - self.ring.line_bytes - line - 35))
        self.clock.advance(1)
        size = self.ring.line_bytes
        self.assertLess(size, self.capacity)
        self.assertEqual(self.producer.calls, [])
        self.pump.feed(b"z" * 200)
        self.clock.advance(1)
        self.assertGreaterEqual(self.ring.line_bytes, self.capacity)
        self.assertEqual(self.producer.calls, ["pause"])

    def test_acknowledged(self) -> None:
        """An acknowledgement that makes room resumes; one that makes too little does not."""
        self.fill()
        self.pump.feed(b"more\n" * 10)
        self.ring.acknowledge(1)
        self.pump.on_acknowledge()
        self.assertGreaterEqual(self.ring.line_bytes, self.capacity)
        self.assertEqual((self.producer.calls, self.held), (["pause"], [True]))
        self.ring.acknowledge(self.ring.end_cursor)
        self.pump.on_acknowledge()
        self.assertEqual((self.producer.calls, self.held), (["pause", "resume"], [True, False]))
        self.pump.on_acknowledge()
        self.assertEqual((self.producer.calls, self.held), (["pause", "resume"], [True, False]))

    def test_again(self) -> None:
        """It may become full any number of times."""
        for turn in range(1, 4):
            self.pump.feed(b"line\n" * 20)
            self.assertTrue(self.producer.paused)
            self.ring.acknowledge(self.ring.end_cursor)
            self.pump.on_acknowledge()
            self.assertFalse(self.producer.paused)
            self.assertEqual(self.held, [True, False] * turn)

    def test_release(self) -> None:
        """Released, it takes what comes however full the ring is."""
        self.fill()
        self.pump.accept_remaining_output()
        self.assertEqual((self.producer.calls, self.held), (["pause", "resume"], [True, False]))
        self.pump.feed(b"line\n" * 1000)
        self.assertFalse(self.producer.paused)
        self.end()
        self.assertGreater(self.ring.end_cursor, 2000)

    def test_room_taken_by_others(self) -> None:
        """A turn that comes when others have taken the room waits for room like any."""
        self.capacity = 2**22
        self.setUp()
        self.pump.feed(b"\n" * 40_000)
        size = self.ring.line_bytes
        self.assertFalse(self.share.is_full)
        other = self.budget.allocate_ring()
        other.set_used_bytes(2**41)
        self.turn(3)
        self.assertEqual((self.ring.line_bytes, self.held), (size, [True]))
        other.set_used_bytes(0)
        self.turn(3)
        self.assertEqual(self.held, [True, False])
        self.assertEqual(self.ring.end_cursor, 40_000 - 1)

    def test_end_when_full(self) -> None:
        """The end of stdout is taken into a full ring as well."""
        self.fill()
        self.pump.feed(b"the end")
        self.end()
        self.assertEqual(self.events()[-1], "the end")


class HoldTests(PumpTestCase):
    """A ring that another taker of its events holds back, such as the archive."""

    def test_held(self) -> None:
        """Stdout is not read meanwhile; what was read is in the ring, and then all goes on."""
        self.ring.on_append = lambda *_: self.share.set_archive_behind(True)
        self.pump.feed(b"one\n")
        self.assertTrue(self.producer.paused)
        self.assertEqual(self.held, [True])
        self.ring.on_append = None
        self.share.set_archive_behind(False)
        self.assertFalse(self.producer.paused)
        self.pump.feed(b"two\n")
        self.pump.accept_remaining_output()
        self.end()
        self.assertEqual(self.events(), ["one", "\n", "two", "\n"])

    def test_ended(self) -> None:
        """The end of the processes does not wait for the other taker."""
        self.ring.on_append = lambda *_: self.share.set_archive_behind(True)
        self.pump.feed(b"one\n")
        self.pump.accept_remaining_output()
        self.end()
        self.assertEqual(self.events(), ["one", "\n"])


class TurnTests(PumpTestCase):
    """Stdout that is too much work for one turn of the reactor."""

    flood = MARKERS.data_begin + b"\n" + b"1\n" * 32_000

    def test_turns(self) -> None:
        """It is parsed in several turns, and the producer is paused meanwhile, not the clock."""
        self.pump.feed(self.flood)
        sizes = [self.ring.end_cursor]
        while self.producer.paused:
            self.turn()
            sizes.append(self.ring.end_cursor)
        self.assertEqual(sizes[-1], 32_000)
        self.assertGreater(len(sizes), 10)
        self.assertEqual(sizes, sorted(set(sizes)))
        self.assertEqual((self.producer.calls, self.held), (["pause", "resume"], []))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_others_in_between(self) -> None:
        """Between two turns the reactor does what else is due: the events of others come, too."""
        ring = EventRing()
        other = StdoutPump(self.clock, SegiParser(MARKERS), ring, self.budget.allocate_ring(), self)
        self.pump.feed(self.flood)
        for count in range(1, 6):
            before = self.ring.end_cursor
            self.clock.callLater(0, other.feed, b"line\n")
            self.turn()
            self.assertEqual(ring.end_cursor, 2 * count - 1)
            self.assertLess(before, self.ring.end_cursor)
        self.assertTrue(self.producer.paused)

    def test_full(self) -> None:
        """No turn begins while the ring is full."""
        self.capacity = 1000
        self.setUp()
        self.pump.feed(self.flood)
        turns = 1
        while self.producer.paused:
            size = self.ring.line_bytes
            self.turn(5)
            self.assertEqual(self.ring.line_bytes, size)
            self.read_all()
            self.turn()
            turns += 1
        self.assertGreater(turns, 10)
        self.assertEqual(self.ring.end_cursor, 32_000)

    def test_end(self) -> None:
        """The end of stdout waits for all that came before it, and for room."""
        self.capacity = 1000
        self.setUp()
        self.pump.feed(self.flood + MARKERS.data_end + b"\nhalf a line")
        self.pump.on_stdout_end()
        turns = 0
        while not self.pump.output_stored_event.is_set:
            self.turn(2)
            self.read_all()
            turns += 1
        self.assertGreater(turns, 10)
        self.assertEqual(self.ring.end_cursor, 32_001)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_release(self) -> None:
        """Released, the rest is taken without a reader, still turn by turn."""
        self.capacity = 1000
        self.setUp()
        self.pump.feed(self.flood)
        self.pump.on_stdout_end()
        self.pump.accept_remaining_output()
        self.assertFalse(self.pump.output_stored_event.is_set)
        self.turn(100)
        self.assertTrue(self.pump.output_stored_event.is_set)
        self.assertEqual(self.events()[-1], ErrorEvent())
        self.assertEqual(self.ring.end_cursor, 32_001)


class DefectTests(PumpTestCase):
    """A defect on the road from stdout to the ring loses events: the run is told so, and ends."""

    wanted = MARKERS.file_begin + b"\nX-SEGI-As: path\n\na\n" + MARKERS.file_end + b"\n"

    def break_(self, owner: object, name: str) -> None:
        """Let a method raise."""

        def fail(*_: object) -> NoReturn:
            raise RuntimeError("a defect")

        self.patch(owner, name, fail)

    def assert_lost(self) -> None:
        """Hold that the loss is told once and logged, and that nothing hinders the end."""
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.assertEqual((self.loss_counts_by_reason, self.pump.has_lost_events), (1, True))
        self.pump.feed(b"more\n")
        self.turn(5)
        self.assertFalse(self.producer.paused)
        self.pump.on_stdout_end()
        self.assertTrue(self.pump.output_stored_event.is_set)
        self.pump.accept_remaining_output()
        self.assertEqual((self.loss_counts_by_reason, self.clock.getDelayedCalls()), (1, []))

    def test_feed(self) -> None:
        """In parsing what was read."""
        self.pump.feed(b"good\n")
        self.break_(SegiParser, "feed")
        self.pump.feed(b"bad\n")
        self.assert_lost()
        self.assertEqual(self.events(), ["good"])

    def test_proceed(self) -> None:
        """In a later turn."""
        self.break_(SegiParser, "parse_pending")
        self.pump.feed(TurnTests.flood)
        self.turn()
        self.assert_lost()

    def test_flush(self) -> None:
        """In delivering a partial line."""
        self.break_(SegiParser, "flush_partial_line")
        self.pump.feed(b"a")
        self.clock.advance(PARTIAL_LINE_DELAY)
        self.assert_lost()

    def test_supply(self) -> None:
        """In taking a file."""
        self.break_(SegiParser, "supply_file")
        self.pump.feed(self.wanted)
        self.turn()
        self.files[0][1].callback(b"content")
        self.assert_lost()

    def test_refuse(self) -> None:
        """In refusing a file."""
        self.break_(SegiParser, "refuse_file")
        self.pump.feed(self.wanted)
        self.turn()
        self.files[0][1].errback(FileRefused("no"))
        self.assert_lost()

    def test_finish(self) -> None:
        """In taking the end of stdout."""
        self.break_(SegiParser, "finish")
        self.pump.feed(b"a\nb")
        self.pump.on_stdout_end()
        self.assertTrue(self.pump.output_stored_event.is_set)
        self.assert_lost()

    def test_finish_later(self) -> None:
        """So it is where the end had to wait for a turn."""
        self.break_(SegiParser, "finish")
        self.pump.feed(TurnTests.flood)
        self.pump.on_stdout_end()
        self.assertFalse(self.pump.output_stored_event.is_set)
        self.turn(100)
        self.assertTrue(self.pump.output_stored_event.is_set)
        self.assert_lost()

    def test_ring(self) -> None:
        """In the ring."""
        self.break_(EventRing, "append_batch")
        self.pump.feed(b"a\n")
        self.assert_lost()

    def test_share(self) -> None:
        """In the share of the buffers."""
        real = RingAllocation.set_used_bytes
        self.break_(RingAllocation, "set_used_bytes")
        self.pump.feed(b"a\n")
        self.patch(RingAllocation, "set_used_bytes", real)
        self.assert_lost()

    def test_on_events(self) -> None:
        """In telling that there are events."""
        self.break_(self, "on_new_events")
        self.pump.feed(b"a\n")
        self.assert_lost()

    def test_on_pause(self) -> None:
        """In telling that the ring is full."""
        self.capacity = 100
        self.setUp()
        self.break_(self, "on_pause_change")
        self.pump.feed(b"line\n" * 100)
        self.assert_lost()

    def test_on_room(self) -> None:
        """In going on when a reader has made room; the reader is told nothing of it."""
        self.capacity = 1000
        self.setUp()
        self.pump.feed(TurnTests.flood)
        self.break_(self, "on_pause_change")
        self.read_all()
        self.assert_lost()

    def test_read_file(self) -> None:
        """In reading a file: nobody knows what it was."""
        self.break_(self, "read_referenced_file")
        self.pump.feed(self.wanted)
        self.turn()
        self.assert_lost()

    def test_while_a_file_is_read(self) -> None:
        """A file that is read meanwhile is not waited for, and thrown away."""
        self.pump.feed(self.wanted)
        self.turn()
        self.break_(EventRing, "append_batch")
        self.pump.feed(b"a\n")
        self.pump.on_acknowledge()
        self.break_(SegiParser, "feed")
        self.pump.feed(b"a\n")
        self.assert_lost()
        self.files[0][1].callback(b"content")
        self.assertEqual(self.ring.end_cursor, 0)

    def test_readers_go_on(self) -> None:
        """What was printed before can be read, and what is read is given back."""
        self.pump.feed(b"good\n")
        self.break_(SegiParser, "feed")
        self.pump.feed(b"bad\n")
        self.assert_lost()
        self.assertEqual(self.budget.used_bytes, self.ring.line_bytes)
        self.read_all()
        self.assertEqual(self.budget.used_bytes, 0)


class PropertyTests(PumpTestCase):
    """Whatever is printed, and however it is read."""

    max_value, max_file = MAX_VALUE, MAX_FILE

    def setUp(self) -> None:
        super().setUp()
        self.patch(segi, "MAX_BYTES_PARSED_PER_CALL", 300)

    @given(stdouts, chunkings, st.lists(st.booleans(), min_size=1), st.integers(1, 2000))
    def test_reference(
        self, stdout: bytes, chunking: list[Chunk], reads: list[bool], capacity: int
    ) -> None:
        """The events are those of the reference, through a ring of any size, by any reader."""
        self.capacity = capacity
        self.setUp()
        chunks = (chunk for chunk, _ in chunks_of(stdout, chunking))
        reading = cycle(reads)
        events: list[str | bytes] = []
        idle = 0
        while not self.pump.output_stored_event.is_set:
            if self.files and not self.files[-1][1].called:
                wanted, content = self.files[-1]
                found = read_file(wanted.path.encode("utf-8", "surrogateescape"))
                content.errback(FileRefused("no")) if found is None else content.callback(found)
            elif not self.producer.paused:
                chunk = next(chunks, None)
                self.pump.on_stdout_end() if chunk is None else self.pump.feed(chunk)
            self.turn()
            idle += 1
            if next(reading) or idle > 20:
                idle = 0
                events += decode(self.ring.read_events(self.ring.begin_cursor, 10**9))
                self.read_all()
        events += decode(self.ring.read_events(self.ring.begin_cursor, 10**9))
        expected = reference_segi.parse_events(
            stdout, MARKERS, max_value=MAX_VALUE, max_file=MAX_FILE, files=read_file
        )
        assert join_text(classify(events)) == expected
        self.assertEqual((self.loss_counts_by_reason, self.clock.getDelayedCalls()), (0, []))
