"""`evaluations.registry`: bounds of queue, memory and records; nothing is left at the end."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from signal import SIGTERM
from typing import Any

from twisted.internet.defer import CancelledError, Deferred

from tawebeval.config import Configuration, EvaluationSettings, EventBufferSettings, LimitSettings
from tawebeval.core.form import Repository
from tawebeval.errors import EvaluationExpired, ServerBusy
from tawebeval.evaluations import run
from tawebeval.evaluations.reading import Subscription
from tawebeval.evaluations.uploads import ReceivedForm
from tests.cases.evaluations import END, RegistryTestCase
from tests.fakes.children import FakeChild
from tests.fakes.world import UntidyThreads, make_request


class RetryTests(RegistryTestCase):
    """The time after which a client comes back that the full queue has refused."""

    running, queued = 1, 1
    configuration = Configuration(limits=LimitSettings(wall_clock=1000))

    def refuse(self) -> int:
        """Return the seconds that a refused client is to wait."""
        return self.assertRaises(ServerBusy, self.accept).retry_after

    def test_rate(self) -> None:
        """It follows from the rate of ends, and each client gets another time."""
        self.accept()
        for _ in range(40):
            self.accept()
            self.world.clock.advance(3)
            self.world.child.end()
            self.world.turn()
        self.accept()
        # A look that is no request, such as a proxy's, takes no client's time.
        for _ in range(9):
            with self.assertRaises(ServerBusy):
                self.registry.check_admission(should_schedule_retry=False)
        for expected in (3, 6, 9):
            self.assertLessEqual(abs(self.refuse() - expected), 1)
        self.world.clock.advance(100)
        self.assertGreater(self.refuse(), 5)


class IdleRetryTests(RegistryTestCase):
    """The same where slots were idle before."""

    running, queued = 2, 1
    configuration = Configuration(limits=LimitSettings(wall_clock=1000))

    def test_lone_evaluations(self) -> None:
        """Ends count only of times in which all slots were in use."""
        self.world.repositories.remote = True
        for _ in range(40):
            self.world.repositories.gate.shut = True
            self.accept()  # it waits, but not for a slot
            self.world.repositories.gate.open()
            self.world.clock.advance(60)
            self.world.child.end()
            self.world.turn()
        for _ in range(3):
            self.accept()
        error = self.assertRaises(ServerBusy, self.accept)
        self.assertLessEqual(error.retry_after, 6)  # two slots, each for 10 s as none was measured


class KeptTests(RegistryTestCase):
    """Evaluations that have ended and are not read to their end."""

    configuration = Configuration(
        evaluations=EvaluationSettings(max_retained=2, retention_seconds=600)
    )

    def fill(self) -> list[str]:
        """Let as many end as may be kept."""
        identifiers = []
        for _ in range(2):
            identifier, child = self.start(b"a\n")
            self.registry.check_admission()
            self.finish(child)
            identifiers.append(identifier)
        return identifiers

    def refuse(self) -> None:
        """Hold that no other is accepted, and that it is told when to come again."""
        error = self.assertRaises(ServerBusy, self.accept)
        self.assertGreater(error.retry_after, 0)

    def test_read(self) -> None:
        """When as many are kept as may be no new one is accepted, until one is read."""
        first, second = self.fill()
        self.refuse()
        self.page(first)
        self.refuse()
        self.page(first, END)
        self.accept()
        self.assertEqual(self.page(second)["data"], ["a", "\n"])

    def test_expired(self) -> None:
        """Or until one expires; none is thrown away before."""
        self.fill()
        self.expire(599)
        self.refuse()
        self.expire(1)
        self.accept()

    def stream(self, identifier: str, *, whole: bool = True) -> None:
        """Let a stream send all that there is, or be broken off just before the end."""
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        try:
            with subscription:
                subscription.read_events(10**6)
                if not whole:
                    raise ConnectionError
        except ConnectionError:
            pass

    def test_sent(self) -> None:
        """What a stream has sent to the end goes before a new one is refused, and not before."""
        first, second = self.fill()
        self.stream(second)
        self.stream(first)
        self.stream(second)
        self.page(second)
        self.world.clock.advance(30)
        self.accept()
        self.assert_refused(EvaluationExpired, second)
        self.page(first)
        self.accept()

    def test_sent_before_it_is_over(self) -> None:
        """A stream may end before its evaluation has been tidied up."""
        self.world.threads = threads = UntidyThreads()
        self.registry = self.make()
        threads.tidied.shut = True
        identifier, child = self.start(b"a\n")
        self.finish(child)
        self.stream(identifier)
        self.assertEqual(self.registry.records.ended_count, 0)
        threads.tidied.open()
        other, _ = self.fill()
        self.assert_refused(EvaluationExpired, identifier)
        self.page(other)

    def test_sent_in_part(self) -> None:
        """What was broken off stays, and so does what somebody is reading again."""
        first, second = self.fill()
        self.stream(first, whole=False)
        subscription = self.registry.events.subscribe(second, None)
        assert subscription is not None
        with subscription:
            subscription.read_events(1)
        self.refuse()
        self.stream(first)
        self.page(first)
        self.refuse()
        self.world.clock.advance(29.5)
        self.refuse()
        subscription = self.registry.events.subscribe(first, None)
        assert subscription is not None
        with subscription:
            self.world.clock.advance(0.5)
            self.refuse()
            self.page(second)
        self.accept()
        self.page(second)
        self.assert_refused(EvaluationExpired, first)

    def test_running_ones(self) -> None:
        """Those that wait or run do not count."""
        for _ in range(4):
            self.accept()

    def test_forgotten_while_it_ends(self) -> None:
        """One that is abandoned is never kept."""
        for _ in range(3):
            _, child = self.start()
            self.expire(900)
            self.finish(child)
        self.accept()


class RememberedTests(RegistryTestCase):
    """What is kept of ended evaluations besides events counts among the bytes of all."""

    configuration = Configuration(
        buffers=EventBufferSettings(max_total_bytes=16_384 * 4 // 3, max_evaluation_bytes=6000)
    )

    def test_forms_and_stderr(self) -> None:
        """With many URLs and much stderr no new one is accepted, until one is read to its end."""
        repository = Repository("https://example.org/" + "x" * 2028)
        identifiers = []
        for _ in range(2):
            identifiers.append(self.accept(repository=repository))
            self.world.child.complain(b"x" * 8192)
            self.finish(self.world.child)
        self.assertEqual(self.page(identifiers[0])["end"], END)
        self.assertRaises(ServerBusy, self.accept)
        self.page(identifiers[0], END)
        self.accept()
        self.page(identifiers[1], END)
        self.assertEqual(self.world.budget.used_bytes, 0)


class PausedTests(RegistryTestCase):
    """Places that are held by evaluators which wait for their readers; there is one place."""

    configuration = Configuration(
        buffers=EventBufferSettings(max_evaluation_bytes=4096, max_page_bytes=1024),
        evaluations=EvaluationSettings(),
    )
    running, queued = 1, 2

    def flood(self) -> tuple[str, FakeChild]:
        """Let an evaluator print until it has to wait."""
        self.world.spawn.obeys = (SIGTERM,)
        identifier, child = self.start(b"x\n" * 2000)
        self.assertTrue(child.paused)
        return identifier, child

    def poll(self, identifier: str, seconds: int) -> None:
        """Ask for the first page once a second, which acknowledges nothing."""
        for _ in range(seconds):
            self.page(identifier)
            self.expire(1)

    def reason(self, identifier: str) -> str | None:
        """Return why an evaluation has ended badly, None for one that has not."""
        error = self.registry.get_status(identifier)["error"]
        return error and error["reason"]

    def test_polls_acknowledge_nothing(self) -> None:
        """Who only looks does not hold a place for ever; what was printed is still there."""
        identifier, _ = self.flood()
        self.poll(identifier, 599)
        self.assertEqual(self.reason(identifier), None)
        self.poll(identifier, 1)
        self.assertEqual(self.reason(identifier), "unread")
        self.assertEqual(self.registry.get_status(identifier)["paused_seconds"], 600)
        events = self.consume(identifier)
        self.assertEqual((len(events), events[-1]), (4001, "unread"))

    def test_wanted(self) -> None:
        """While another waits for the place it is a quarter of that, and then it has the place."""
        identifier, _ = self.flood()
        self.poll(identifier, 149)
        other = self.accept()
        self.poll(identifier, 1)
        self.assertEqual(self.reason(identifier), "unread")
        self.assertEqual(self.registry.get_status(other)["state"], "running")

    def test_read(self) -> None:
        """Who reads now and then keeps it, also when others wait."""
        self.patch(run, "MIN_READ_BYTES_PER_SECOND", 6 * 1024)
        identifier, child = self.flood()
        self.accept()
        child.print(b"x\n" * 30_000)
        after = None
        for _ in range(20):
            self.poll_after(identifier, after, 10)
            for _ in range(70):  # 70 KiB
                after = self.page(identifier, after)["end"]
                self.world.turn()
        self.assertEqual(self.reason(identifier), None)
        self.assertEqual(self.registry.get_status(identifier)["paused_seconds"], 200)

    def test_read_by_a_stream(self) -> None:
        """What a stream takes counts at once, though much of it stays behind it."""
        self.patch(run, "MIN_READ_BYTES_PER_SECOND", 64)
        buffers = EventBufferSettings(max_evaluation_bytes=40_960, max_page_bytes=1024)
        self.configuration = Configuration(buffers=buffers)
        self.setUp()
        identifier, child = self.start(b"x" * 50 + b"\n")
        self.accept()
        child.print((b"x" * 50 + b"\n") * 3000)
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        with subscription:
            for _ in range(600):
                subscription.read_events(100)
                subscription.note_events_written()
                self.expire(1)
                self.assertEqual(child.signals, [])
            self.assertGreater(self.registry.get_status(identifier)["paused_seconds"], 500)
            self.expire(200)
            self.assertEqual(child.signals, [SIGTERM])

    def poll_after(self, identifier: str, after: str | None, seconds: int) -> None:
        """Ask for the same page once a second."""
        for _ in range(seconds):
            self.page(identifier, after)
            self.expire(1)


class TotalTests(RegistryTestCase):
    """The events of all evaluations together: 8 KiB are common, and the rest is the reserve."""

    configuration = Configuration(
        buffers=EventBufferSettings(
            max_total_bytes=8192 * 4 // 3, max_evaluation_bytes=6000, max_page_bytes=4096
        ),
        limits=LimitSettings(wall_clock=10**6),
    )

    def flood(self) -> tuple[str, Any]:
        """Let an evaluator print until it has to wait."""
        identifier, child = self.start()
        while not child.paused:
            child.print(b"x" * 50 + b"\n")
        return identifier, child

    def used(self) -> int:
        """Return how much is counted, which must be what there is."""
        used = self.world.budget.used_bytes
        known = [item["evaluation_id"] for item in self.list_all()]
        self.assertEqual(
            used,
            sum(self.registry.get_status(identifier)["buffered_bytes"] for identifier in known),
        )
        return used

    def test_shared(self) -> None:
        """The first may have half of it, the second half of the rest, and they say so."""
        first, _ = self.flood()
        self.assertLess(abs(self.used() - 4096), 200)
        self.flood()
        self.assertLess(abs(self.used() - 4096 - 2048), 300)
        self.assertTrue(self.registry.get_status(first)["state"], "running")

    def test_others_make_room(self) -> None:
        """What one reader takes lets another's evaluator go on, in the next turn."""
        first, _ = self.flood()
        _, second = self.flood()
        self.page(first, self.page(first)["end"])
        self.assertTrue(second.paused)
        self.world.turn()
        self.assertFalse(second.paused)

    def test_less_is_free(self) -> None:
        """Where others have taken the room meanwhile, one that gives some back waits, too."""
        identifier, child = self.start(b"x" * 50 + b"\n")
        while self.world.budget.used_bytes < 3000:
            child.print(b"x" * 50 + b"\n")
        _, other = self.flood()
        self.assertFalse(child.paused)
        rest = self.page(identifier, "1")
        self.assertTrue(child.paused)
        other.end()
        self.page(identifier, rest["end"])
        self.assertFalse(child.paused)

    def test_ended_ones_count(self) -> None:
        """What has ended holds its part, until it is read or forgotten; then it is free."""
        first, child = self.flood()
        self.finish(child)
        _, second = self.flood()
        self.assertTrue(second.paused)
        self.consume(first)
        self.world.turn()
        self.assertFalse(second.paused)
        self.assertLess(self.used(), 2500)

    def test_abandoned_ones_count(self) -> None:
        """What is forgotten while it runs counts until its process is gone."""
        _, child = self.flood()
        self.expire(900)
        self.assertGreater(self.world.budget.used_bytes, 4000)
        self.finish(child)
        self.assertEqual(self.world.budget.used_bytes, 0)

    def test_read_by_streams(self) -> None:
        """What a stream takes makes room also where little is free."""
        self.flood()
        identifier, child = self.flood()
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        with subscription:
            for _ in range(20):
                subscription.read_events(10**6)
                subscription.note_events_written()
                self.assertFalse(child.paused)
                while not child.paused:
                    child.print(b"x" * 50 + b"\n")

    def test_followed_from_its_newest_event(self) -> None:
        """A stream that begins with all of a full ring does not wait for what cannot come."""
        identifier, child = self.flood()
        newest = self.registry.get_status(identifier)["events"]["buffered"]
        subscription = self.registry.events.subscribe(identifier, str(newest))
        assert subscription is not None
        with subscription:
            self.assertFalse(child.paused)

    def test_without_an_event(self) -> None:
        """What makes no event does not stop an evaluator either whose reader has everything.

        Only then is it noted that others have taken the room, and no event tells the stream.
        """
        identifier, child = self.start()
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        with subscription:
            while self.world.budget.used_bytes < 3000:
                child.print(b"x" * 50 + b"\n")
            subscription.read_events(10**6)
            subscription.note_events_written()
            self.flood()
            child.print(child.environment["EVALUATION_DATA_BEGIN"].encode() + b"\n")
            self.assertFalse(child.paused)

    def test_pages_beside_a_stream(self) -> None:
        """Pages hold up a stream's evaluator until 30 s after the last, and no longer."""
        identifier, child = self.start()
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        with subscription:
            self.page(identifier)
            while not child.paused:
                child.print(b"x" * 50 + b"\n")
            subscription.read_events(10**6)
            subscription.note_events_written()
            self.world.clock.advance(20)
            self.page(identifier)
            for seconds in (10, 19.5):
                self.world.clock.advance(seconds)
                self.assertTrue(child.paused)
            self.world.clock.advance(0.5)
            self.assertFalse(child.paused)

    def test_polls_beside_a_stream(self) -> None:
        """As long after a poll: its answer, at once or in vain, or when its client has left."""
        identifier, child = self.start()
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        with subscription:
            in_vain = self.ask(identifier, None, 300)
            self.world.clock.advance(300)
            self.assertEqual(self.successResultOf(in_vain).events.count, 0)
            self.assert_held(subscription, child)
            newest = str(subscription.read_cursor)
            left = self.ask(identifier, newest, 300)
            self.world.clock.advance(200)
            left.cancel()
            self.failureResultOf(left, CancelledError)
            self.assert_held(subscription, child)
            child.print(b"a\n")
            at_once = self.ask(identifier, str(subscription.read_cursor), 300)
            self.assertGreater(self.successResultOf(at_once).events.count, 0)
            self.assert_held(subscription, child)

    def assert_held(self, subscription: Subscription, child: FakeChild) -> None:
        """Hold that pages hold up an evaluator for 30 s from now, whatever its stream takes."""
        for _ in range(200):  # over twice as much as there is room for
            if not child.paused:
                child.print(b"x" * 50 + b"\n")
                subscription.read_events(10**6)
                subscription.note_events_written()
        self.world.clock.advance(29.5)
        self.assertTrue(child.paused)
        self.world.clock.advance(0.5)
        self.assertFalse(child.paused)

    def test_pages_beside_a_stream_that_leaves(self) -> None:
        """When it has left there is nothing left to wait for."""
        identifier, _ = self.flood()
        self.page(identifier)
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        calls = len(self.world.clock.getDelayedCalls())
        with subscription:
            self.assertEqual(len(self.world.clock.getDelayedCalls()), calls + 1)
        self.assertEqual(len(self.world.clock.getDelayedCalls()), calls)

    def test_forgotten_while_it_is_followed(self) -> None:
        """What a stream still reads counts, although it is forgotten."""
        identifier, child = self.start(b"a\n")
        self.finish(child)
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        with subscription:
            self.page(identifier, END)
            self.assertGreater(self.world.budget.used_bytes, 0)
            self.assertEqual(subscription.read_events(1000).count, 2)
        self.assertEqual(self.world.budget.used_bytes, 0)

    def test_spent(self) -> None:
        """When nothing is free no new one is accepted, since it could only add to that."""
        first, child = self.start(b"x" * 20_000)
        self.world.clock.advance(1)
        error = self.assertRaises(ServerBusy, self.accept)
        self.assertGreater(error.retry_after, 0)
        self.finish(child)
        self.assertRaises(ServerBusy, self.accept)
        self.consume(first)
        self.accept()

    def test_spent_on_what_was_sent(self) -> None:
        """What a stream has sent to the end takes nobody's room when nothing is free."""
        identifier, child = self.start(b"x" * 20_000)
        self.world.clock.advance(1)
        self.assertRaises(ServerBusy, self.accept)
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        with subscription:
            self.finish(child)
            subscription.read_events(10**6)
            self.assertRaises(ServerBusy, self.accept)
        self.accept()
        self.assertEqual(self.used(), 0)

    def test_empty_ones_go_on(self) -> None:
        """Whoever was accepted is read from when all that it printed is read."""
        identifier, child = self.start()
        self.start(b"x" * 20_000)
        self.world.clock.advance(1)
        cursor = "0"
        for _ in range(5):
            child.print(b"some\n")
            self.assertTrue(child.paused)
            page = self.page(identifier, cursor)
            self.assertTrue(page["data"])
            cursor = page["end"]
            self.page(identifier, cursor)
            self.assertFalse(child.paused)


class SpoolTests(RegistryTestCase):
    """The uploads on the disk."""

    def send(self, size: int, **settings: Any) -> str:
        """Begin an evaluation with an upload of that size."""
        self.registry.submissions.budget.add_stored_bytes(size)
        return self.registry.accept_form(
            ReceivedForm(make_request(), Path("/uploads/some"), upload_bytes=size, **settings)
        )

    def test_until_it_is_over(self) -> None:
        """An upload counts until its evaluation is over and its directories are removed."""
        identifiers = [self.send(100) for _ in range(3)]
        self.assertEqual(self.registry.submissions.budget.stored_bytes, 300)
        self.finish(self.world.spawn.children[0])
        self.assertEqual(self.registry.submissions.budget.stored_bytes, 200)
        Deferred.fromCoroutine(self.registry.cancel_evaluation(identifiers[1]))
        self.assertEqual(self.registry.submissions.budget.stored_bytes, 200)
        self.finish(self.world.spawn.children[1])
        self.assertEqual(self.registry.submissions.budget.stored_bytes, 100)

    def test_repeated(self) -> None:
        """A form that begins nothing is removed, and does not count any more."""
        self.send(100, idempotency_key="k", form_digest=b"1")
        self.send(100, idempotency_key="k", form_digest=b"1")
        self.assertEqual(self.registry.submissions.budget.stored_bytes, 100)


class NothingLeftTests(RegistryTestCase):
    """What is left in memory of one that is forgotten."""

    def watch(self, identifier: str) -> list[weakref.ref[Any]]:
        """Return references that keep nothing."""
        record = self.registry.records[identifier]
        return [
            weakref.ref(one)
            for one in (record, record.evaluation, record.evaluation.ring_allocation)
        ]

    def assert_nothing_left(self, references: list[weakref.ref[Any]]) -> None:
        """Hold that nothing is left."""
        self.world.spawn.children.clear()
        self.world.sandbox.cells.clear()
        gc.collect()
        self.assertEqual([reference() for reference in references], [None] * len(references))
        self.assertEqual(
            (self.world.budget.used_bytes, self.registry.submissions.budget.stored_bytes), (0, 0)
        )
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_drained(self) -> None:
        """One that was read to its end leaves nothing, also when others waited and followed."""
        identifier, child = self.start(b"a line\n" * 100)
        references = self.watch(identifier)
        self.ask(identifier, "0", 20)
        subscription = self.registry.events.subscribe(identifier, "0")
        assert subscription is not None
        with subscription:
            subscription.read_events(100)
        self.finish(child)
        del child, subscription
        self.consume(identifier)
        self.assert_nothing_left(references)

    def test_sent(self) -> None:
        """Nor does one that a stream has sent to the end, whether it is read or not."""
        for way in (self.consume, lambda _: self.world.clock.advance(900)):
            identifier, child = self.start(b"a line\n")
            references = self.watch(identifier)
            self.finish(child)
            subscription = self.registry.events.subscribe(identifier, None)
            assert subscription is not None
            with subscription:
                subscription.read_events(100)
            del child, subscription
            way(identifier)
            self.registry.expire_evaluations()
            self.assert_nothing_left(references)

    def test_expired(self) -> None:
        """Nor does one that was abandoned."""
        identifier, child = self.start(b"a line\n" * 100)
        references = self.watch(identifier)
        self.world.clock.advance(200)
        self.page(identifier)
        self.world.clock.advance(90)
        self.finish(child)
        del child
        self.expire(900)
        self.assert_nothing_left(references)

    def test_full(self) -> None:
        """Nor one that waited for room when it was abandoned."""
        identifier, child = self.start(b"a line\n" * 1000)
        references = self.watch(identifier)
        self.assertTrue(child.paused)
        self.expire(900)
        self.finish(child)
        del child
        self.assert_nothing_left(references)
