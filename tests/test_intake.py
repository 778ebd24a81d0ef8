"""`tawebeval.intake`: the inward road, from chunks of stdout to events in the ring."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.budget import Budget
from tawebeval.fileblock import WantedFile
from tawebeval.intake import PARTIAL_LINE, Intake
from tawebeval.ring import Ring
from tawebeval.segi import Parser
from tests.strategies import MARKERS, Broken, Event, joined, read, seen


class FakeProducer:
    """Counts nothing, remembers whether it is paused, and how often that changed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @property
    def paused(self) -> bool:
        """Whether stdout is not read now."""
        return self.calls[-1:] == ["pause"]

    def pauseProducing(self) -> None:
        self.calls.append("pause")

    def resumeProducing(self) -> None:
        self.calls.append("resume")


class IntakeTestCase(SynchronousTestCase):
    """An intake of which the test supplies wanted files: `files` are those asked for."""

    capacity = 2**40

    def setUp(self) -> None:
        self.clock = Clock()
        self.ring = Ring()
        self.budget = Budget(2**41, self.capacity, 1, lambda call: self.clock.callLater(0, call))
        self.share = self.budget.enter()
        self.changes = 0
        self.held: list[bool] = []
        self.files: list[tuple[WantedFile, Deferred[bytes]]] = []
        self.producer = FakeProducer()
        self.intake = Intake(
            self.clock,
            Parser(MARKERS, max_file=1000),
            self.ring,
            self.share,
            self,
        )
        self.intake.start(self.producer)

    def printed(self) -> None:
        """Count that there are new events."""
        self.changes += 1

    def hold(self, held: bool) -> None:
        """Note that the ring is full, or is not any more."""
        self.held.append(held)

    def read_file(self, wanted: WantedFile) -> Deferred[bytes]:
        """Let the test supply the file."""
        content: Deferred[bytes] = Deferred()
        self.files.append((wanted, content))
        return content

    def events(self) -> list[Event]:
        """Return the events in the ring."""
        return seen(read(self.ring.read(self.ring.oldest, 10**9)))

    def end(self) -> None:
        """End stdout, and hold that all is done then."""
        self.assertFalse(self.intake.done.is_set)
        self.intake.ended()
        self.assertTrue(self.intake.done.is_set)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class TextTests(IntakeTestCase):
    """Text, and lines that are not whole yet."""

    def test_whole_lines(self) -> None:
        """Lines are delivered at once; each delivery is told once."""
        self.intake.received(b"one\ntwo\nthree\n")
        self.assertEqual(self.events(), ["one", "\n", "two", "\n", "three"])
        self.assertEqual(self.changes, 1)

    def test_partial_line(self) -> None:
        """A partial line waits for its rest for 20 ms, and then no longer."""
        self.assertEqual(PARTIAL_LINE, 0.02)
        self.intake.received(b"one\nhalf a li")
        self.assertEqual(self.events(), ["one"])
        self.clock.advance(0.0199)
        self.assertEqual((self.events(), self.changes), (["one"], 1))
        self.clock.advance(0.0001)
        self.assertEqual(self.events(), ["one", "\n", "half a li"])
        self.assertEqual(self.changes, 2)
        self.intake.received(b"ne\n")
        self.end()
        self.assertEqual(joined(self.events()), ["one\nhalf a line\n"])

    def test_partial_line_in_small_pieces(self) -> None:
        """The waiting is counted from the first piece, so that it ends while more come."""
        for _ in range(4):
            self.intake.received(b".")
            self.clock.advance(0.005)
        self.assertEqual("".join(map(str, self.events())), "....")

    def test_rest_in_time(self) -> None:
        """A line whose rest comes in time is one event."""
        self.intake.received(b"half a li")
        self.clock.advance(0.01)
        self.intake.received(b"ne\nnext\n")
        self.clock.advance(1)
        self.assertEqual(self.events(), ["half a line", "\n", "next"])

    def test_held_back(self) -> None:
        """What may yet be a marker waits as long as it takes, and nothing is told of it."""
        self.intake.received(b"one")
        self.clock.advance(1)
        self.intake.received(b"\n" + MARKERS.data_begin)
        self.clock.advance(1000)
        self.assertEqual((self.events(), self.changes), (["one"], 1))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_end(self) -> None:
        """The end of stdout delivers what is left, and stops the waiting."""
        self.intake.received(b"half a li")
        self.end()
        self.assertEqual((self.events(), self.changes), (["half a li"], 1))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_nothing(self) -> None:
        """A stdout without a byte has no event."""
        self.end()
        self.assertEqual((self.events(), self.changes), ([], 0))

    def test_end_twice(self) -> None:
        """The end is taken once."""
        self.intake.received(MARKERS.data_begin + b"\n")
        self.end()
        self.intake.ended()
        self.assertEqual(self.events(), [Broken()])


class BackPressureTests(IntakeTestCase):
    """The ring's capacity."""

    capacity = 200

    def fill(self) -> None:
        """Print until the ring is just full."""
        while self.ring.size < self.capacity:
            self.assertEqual((self.producer.calls, self.held), ([], []))
            self.intake.received(b"line\n")

    def test_full(self) -> None:
        """A full ring pauses the producer and says so, once."""
        self.fill()
        self.assertEqual((self.producer.calls, self.held), (["pause"], [True]))
        self.intake.received(b"what was read already\n")
        self.assertEqual((self.producer.calls, self.held), (["pause"], [True]))
        self.assertIn("what was read already", self.events())

    def test_just_below(self) -> None:
        """It is full at its capacity and not one byte before."""
        self.intake.received(b"x\n")
        line = self.ring.size
        self.intake.received(b"y" * (self.capacity - self.ring.size - line - 35))
        self.clock.advance(1)
        size = self.ring.size
        self.assertLess(size, self.capacity)
        self.assertEqual(self.producer.calls, [])
        self.intake.received(b"z" * 200)
        self.clock.advance(1)
        self.assertGreaterEqual(self.ring.size, self.capacity)
        self.assertEqual(self.producer.calls, ["pause"])

    def test_acknowledged(self) -> None:
        """An acknowledgement that makes room resumes; one that makes too little does not."""
        self.fill()
        self.intake.received(b"more\n" * 10)
        self.ring.acknowledge(1)
        self.intake.acknowledged()
        self.assertGreaterEqual(self.ring.size, self.capacity)
        self.assertEqual((self.producer.calls, self.held), (["pause"], [True]))
        self.ring.acknowledge(self.ring.newest)
        self.intake.acknowledged()
        self.assertEqual((self.producer.calls, self.held), (["pause", "resume"], [True, False]))
        self.intake.acknowledged()
        self.assertEqual((self.producer.calls, self.held), (["pause", "resume"], [True, False]))

    def test_again(self) -> None:
        """It may become full any number of times."""
        for turn in range(1, 4):
            self.intake.received(b"line\n" * 20)
            self.assertTrue(self.producer.paused)
            self.ring.acknowledge(self.ring.newest)
            self.intake.acknowledged()
            self.assertFalse(self.producer.paused)
            self.assertEqual(self.held, [True, False] * turn)

    def test_release(self) -> None:
        """Released, it takes what comes however full the ring is."""
        self.fill()
        self.intake.release()
        self.assertEqual((self.producer.calls, self.held), (["pause", "resume"], [True, False]))
        self.intake.received(b"line\n" * 1000)
        self.assertFalse(self.producer.paused)
        self.end()
        self.assertGreater(self.ring.newest, 2000)

    def test_end_when_full(self) -> None:
        """The end of stdout is taken into a full ring as well."""
        self.fill()
        self.intake.received(b"the end")
        self.end()
        self.assertEqual(self.events()[-1], "the end")
