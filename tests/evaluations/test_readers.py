"""`evaluations.readers`: what the client of a stream has read, as connection or client report."""

from __future__ import annotations

from tawebeval.config import Configuration, EvaluationSettings, EventBufferSettings
from tawebeval.evaluations.readers import AcknowledgingSubscription
from tests.cases.evaluations import RegistryTestCase
from tests.fakes.children import FakeChild

LIMIT = 40_000  # bytes in the ring
KEPT = 30_000
PIECE = 10_000


class FakeConnection:
    """A connection whose client reads when it is told to; `given` and `read` are bytes."""

    def __init__(self) -> None:
        self.given = 0
        self.read = 0
        self.probed = False
        self.acknowledged = 0
        self.allowed: list[int] = []  # bytes that may be unread, for each call

    def count_written_and_read_bytes(self) -> tuple[int, int]:
        """Return both."""
        return self.given, self.read

    def set_keepalive_probing(self, enabled: bool) -> None:
        """Note whether the client is asked."""
        self.probed = enabled

    def treat_acknowledged_as_read(self, max_unread_bytes: int) -> None:
        """Count what was acknowledged as read."""
        self.allowed.append(max_unread_bytes)
        self.read = max(self.read, self.acknowledged)


class SubscriptionTests(RegistryTestCase):
    """A stream on a connection that shows what its client has read."""

    configuration = Configuration(
        evaluations=EvaluationSettings(abandon_after_seconds=10**6),
        buffers=EventBufferSettings(max_evaluation_bytes=LIMIT),
    )
    child: FakeChild

    def setUp(self) -> None:
        super().setUp()
        self.identifier, self.child = self.start()
        self.connection = FakeConnection()
        self.subscription = self.follow()
        self.subscription.reader_connection = self.connection
        self.subscription.__enter__()

    def follow(self, after: str | None = None) -> AcknowledgingSubscription:
        """Return another stream."""
        subscription = self.registry.subscribe(self.identifier, after)
        assert isinstance(subscription, AcknowledgingSubscription)
        return subscription

    @property
    def oldest(self) -> int:
        """The cursor before the oldest event that is kept."""
        return self.registry.records[self.identifier].evaluation.ring.begin_cursor

    def fill(self) -> None:
        """Print until there is no room."""
        while not self.child.paused:
            self.child.print(b"x" * 900 + b"\n")

    def send(self) -> None:
        """Give the connection all that there is."""
        while (batch := self.subscription.read_events(PIECE)).count:
            self.connection.given += len(batch.lines)
            self.subscription.note_events_written()

    def test_not_read(self) -> None:
        """What the connection was given and the client has not read stays, however much that is."""
        for _ in range(5):
            self.fill()
            self.send()
        self.assertEqual(self.oldest, 0)
        self.assertTrue(self.child.paused)

    def test_read(self) -> None:
        """What it has read makes room, when room is needed."""
        self.fill()
        self.send()
        self.connection.read = self.connection.given // 2
        self.assertTrue(self.child.paused)
        self.subscription.note_events_written()
        self.assertEqual(self.oldest, 0)  # all of that is kept behind it
        self.assertTrue(self.child.paused)
        self.connection.read = self.connection.given
        self.subscription.note_events_written()
        self.assertGreater(self.oldest, 0)
        self.assertFalse(self.child.paused)

    def test_updated_for_other_readers(self) -> None:
        """What it has read is looked at when another stream has taken something, too."""
        other = self.follow()
        with other:
            self.fill()
            self.send()
            other.read_events(10**6)
            other.note_events_written()
            self.assertTrue(self.child.paused)
            self.connection.read = self.connection.given
            other.note_events_written()
            self.assertFalse(self.child.paused)

    def test_many_small_pieces(self) -> None:
        """As many places are noted as there are some kilobytes between, not one for each piece."""
        for _ in range(2000):
            self.child.print(b"x\n")
            self.send()
        self.assertLess(
            len(self.subscription.unread_write_positions), self.connection.given // 8192 + 3
        )
        self.connection.read = self.connection.given - 1
        self.subscription.infer_received_cursor()
        self.connection.read += 1
        self.subscription.infer_received_cursor()
        self.assertEqual(len(self.subscription.unread_write_positions), 0)

    def test_asks(self) -> None:
        """The client is asked what it has read while the evaluator may wait for that, no longer."""
        self.assertFalse(self.subscription.probe_client_if_evaluator_waits())
        self.fill()
        self.send()
        self.assertTrue(self.subscription.probe_client_if_evaluator_waits())
        self.assertTrue(self.connection.probed)
        self.connection.read = self.connection.given
        self.subscription.note_events_written()
        self.assertFalse(self.subscription.probe_client_if_evaluator_waits())
        self.assertFalse(self.connection.probed)

    def test_standstill(self) -> None:
        """After half a minute without progress acknowledged bytes count, up to half a ring."""
        self.fill()
        self.send()
        self.connection.acknowledged = self.connection.given
        self.assertTrue(self.subscription.probe_client_if_evaluator_waits())
        self.world.clock.advance(29)
        self.connection.read += 1  # progress: the time begins anew
        self.assertTrue(self.subscription.probe_client_if_evaluator_waits())
        self.world.clock.advance(29)
        self.assertTrue(self.subscription.probe_client_if_evaluator_waits())
        self.assertEqual(self.connection.allowed, [])
        self.world.clock.advance(1)
        self.assertTrue(self.subscription.probe_client_if_evaluator_waits())
        self.subscription.note_events_written()
        self.assertEqual(self.connection.allowed, [LIMIT // 2])
        self.assertFalse(self.child.paused)
        self.assertFalse(self.subscription.probe_client_if_evaluator_waits())

    def test_no_standstill_without_need(self) -> None:
        """The time is counted only while the evaluator may wait for what the connection shows."""
        self.fill()
        self.send()
        self.subscription.probe_client_if_evaluator_waits()
        self.connection.read = self.connection.given
        self.subscription.note_events_written()
        self.assertFalse(self.subscription.probe_client_if_evaluator_waits())
        self.fill()
        self.send()
        self.world.clock.advance(30)
        self.subscription.probe_client_if_evaluator_waits()
        self.subscription.acknowledge(1)
        self.world.clock.advance(30)
        self.subscription.probe_client_if_evaluator_waits()
        self.assertEqual(self.connection.allowed, [])

    def test_acknowledged(self) -> None:
        """What a client says counts from then on, and not what its connection shows."""
        self.fill()
        self.send()
        sent = self.subscription.read_cursor
        self.assertTrue(self.subscription.acknowledge(1))
        self.connection.read = self.connection.given
        self.subscription.note_events_written()
        self.assertTrue(self.child.paused)
        self.assertTrue(self.subscription.probe_client_if_evaluator_waits())
        self.assertFalse(self.connection.probed)
        self.assertFalse(self.subscription.acknowledge(sent + 1))
        self.assertTrue(self.child.paused)
        self.assertTrue(self.subscription.acknowledge(sent))
        self.assertFalse(self.child.paused)
        self.assertTrue(self.subscription.acknowledge(1))  # which it has said before

    def test_cut(self) -> None:
        """A stream that is cut has events kept for half a minute beside one that has them all."""
        other = self.follow()
        with other:
            self.fill()
            self.send()
            self.subscription.__exit__(ConnectionError, None, None)
            other.read_events(10**6)
            other.note_events_written()
            self.world.clock.advance(29.9)
            self.assertEqual((self.oldest, self.child.paused), (0, True))
            self.world.clock.advance(0.1)
            self.assertFalse(self.child.paused)
            self.assertGreater(self.oldest, 0)
