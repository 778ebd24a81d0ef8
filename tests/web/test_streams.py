"""`web.streams`: following by each transport, in memory, under a Clock."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.events import EVENT_STREAM_FRAMING, EventBatch
from tawebeval.evaluations.reading import Subscription
from tawebeval.web import streams
from tests.cases.web import END, StreamTestCase
from tests.fakes.streams import FOLLOWERS, Follower, LineFollower


class FollowTests(StreamTestCase):
    def test_stream_sends_each_event_at_once_and_ends_with_the_evaluation(self) -> None:
        for kind in FOLLOWERS:
            identifier = self.evaluate()
            follower = self.follow(kind, identifier)
            self.assertEqual((follower.events, follower.complete), ([], False))
            for text, payloads in (
                (b"a\n", ["a"]),
                (b"b\n", ["a", "\n", "b"]),
                ("ü\u2028%d\r\n".encode(), ["a", "\n", "b", "\n", "ü\u2028%d\r"]),
            ):
                self.print(text)
                self.assertEqual(follower.payloads, payloads)
            self.finish()
            self.assertEqual(follower.payloads, ["a", "\n", "b", "\n", "ü\u2028%d\r", "\n"])
            self.assertTrue(follower.complete, kind)
            self.check_nothing_left(identifier)

    def test_queued_evaluation_can_be_followed(self) -> None:
        identifiers = [self.evaluate() for _ in range(3)]
        followers = [self.follow(kind, identifiers[2]) for kind in FOLLOWERS]
        self.service.world.spawn.children[0].end()
        self.turn()
        self.print(b"a\n")
        for follower in followers:
            self.assertEqual(follower.payloads, ["a"])

    def test_refusal_comes_before_the_stream_as_a_problem(self) -> None:
        identifier = self.evaluate(b"a\nb\n")
        self.page(identifier, "?after=2")
        for kind in FOLLOWERS:
            for target, query, status in (
                ("unknown", "", 404),
                (identifier, "", 410),
                (identifier, "?after=1", 410),
                (identifier, "?after=x", 400),
                (identifier, "?after=9", 400),
                (identifier, "?skip=9&after=2", 400),
                (identifier, "?skip=x", 400),
                (identifier, f"?after={END}", 400),
                (identifier, f"?after={END}&skip=1", 400),
            ):
                follower = self.follow(kind, target, query)
                self.assertEqual(follower.answer.status, status, (kind, query))
                self.check_problem(follower.answer)
                self.assertTrue(Follower.complete.fget(follower))  # type: ignore[attr-defined]
                self.check_nothing_left(identifier, follower)

    def test_reader_in_the_middle_gets_the_rest_of_a_forgotten_evaluation(self) -> None:
        for kind in FOLLOWERS:
            identifier = self.evaluate(b"a\n" * 500)
            follower = self.follow(kind, identifier)
            follower.full = True
            self.print(b"b\n")
            follower.connection.channel.pauseProducing()
            self.print(b"b\n")
            self.finish()
            self.page(identifier, f"?after={END}")
            self.assertFalse(follower.complete)
            follower.take()
            self.assertEqual("".join(follower.payloads), "a\n" * 500 + "b\nb\n")
            self.assertTrue(follower.complete)


class SlowReaderTests(StreamTestCase):
    text = b"".join(b"line %d\n" % number for number in range(4_000))

    def test_client_that_reads_nothing_gets_no_second_batch(self) -> None:
        for kind in FOLLOWERS:
            identifier = self.evaluate()
            follower = self.follow(kind, identifier)
            follower.full, follower.sizes[:] = True, []
            self.print(self.text[:40_000])
            self.service.reactor.pump([0] * 50)
            self.assertLess(sum(follower.sizes), 4 * 4096)
            follower.lose()
            self.finish()

    def test_slow_reader_delays_neither_the_evaluator_nor_another_reader(self) -> None:
        for kind in FOLLOWERS:
            identifier = self.evaluate()
            slow, quick = (self.follow(each, identifier) for each in (kind, LineFollower))
            slow.full = True
            for at in range(0, len(self.text), 10_000):
                self.print(self.text[at : at + 10_000])
                self.assertFalse(self.child.paused)
            self.finish()
            self.assertEqual("".join(quick.payloads), self.text.decode())
            slow.take()
            self.assertEqual("".join(slow.payloads), self.text.decode())
            self.assertTrue(slow.complete)

    def test_client_that_reads_nothing_is_cut_off_after_a_minute(self) -> None:
        for kind in FOLLOWERS:
            identifier = self.evaluate()
            follower = self.follow(kind, identifier)
            self.service.reactor.advance(1000)
            self.assertFalse(follower.connection.aborted)
            follower.full = True
            self.print(self.text[:8000])
            for _ in range(60):
                self.service.reactor.advance(1)
            self.assertTrue(follower.connection.aborted)
            self.check_nothing_left(identifier, follower)
            again = self.follow(LineFollower, identifier, f"?after={len(follower.events)}")
            text = "".join(follower.payloads + again.payloads)
            self.assertEqual(text, self.text[:8000].decode().rstrip("\n"))
            again.lose()
            self.finish()

    def test_bytes_taken_long_ago_do_not_extend_the_deadline(self) -> None:
        identifier = self.evaluate()
        follower = self.follow(LineFollower, identifier)
        for at in range(0, len(self.text), 1000):
            self.print(self.text[at : at + 1000])
        follower.full = True
        self.print(self.text[:8000])
        for _ in range(120):
            self.service.reactor.advance(1)
        self.assertTrue(follower.connection.aborted)
        follower.lose()

    def test_streams_read_their_batches_in_turns(self) -> None:
        identifier = self.evaluate()
        followers = [self.follow(LineFollower, identifier) for _ in range(3)]
        read, turns = Subscription.read_events, []

        async def watched(following: Subscription, limit: int) -> EventBatch:
            turns.append(id(following))
            return await read(following, limit)

        self.patch(Subscription, "read_events", watched)
        self.print(self.text[:20_000])
        for follower in followers:
            self.assertGreater(len(follower.answer.body), 100_000)
        for at in range(0, len(turns), 3):
            self.assertEqual(len(set(turns[at : at + 3])), 3)
        self.assertGreater(len(turns), 100)


class ClientGoneTests(StreamTestCase):
    def test_client_that_goes_leaves_no_timer_waiter_or_reference(self) -> None:
        for kind in FOLLOWERS:
            for full in (False, True):
                identifier = self.evaluate()
                calls = self.calls
                follower = self.follow(kind, identifier)
                follower.full = full
                self.print(b"a\n" * 300)
                self.assertEqual(len(self.service.registry.events.subscriptions), 1)
                (following,) = self.service.registry.events.subscriptions
                gone: weakref.ref[Subscription] = weakref.ref(following)
                del following
                follower.lose()
                self.turn()
                self.check_nothing_left(identifier)
                self.assertEqual(self.calls, calls)
                gc.collect()
                self.assertIsNone(gone())
                self.assertEqual(len(self.page(identifier)["data"]) > 10, True)
                self.finish()

    def test_client_that_goes_right_after_a_write_leaves_nothing(self) -> None:
        identifier = self.evaluate()
        for kind in FOLLOWERS:
            follower = self.follow(kind, identifier)
            self.child.print(b"a\n")
            follower.lose()
            self.turn()
            self.check_nothing_left(identifier)


class TurnTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.scheduler = streams.StreamScheduler(self.clock)
        self.seconds = 0.0
        self.patch(streams, "perf_counter", lambda: self.seconds)
        self.went_on: list[str] = []

    def wait(self, caller: str) -> Deferred[None]:
        def go_on(_: None) -> None:
            self.seconds += 0.002
            self.went_on.append(caller)

        return self.scheduler.wait_for_turn(caller).addCallback(go_on)

    def test_turns_of_streams_alternate_between_callers(self) -> None:
        gone = self.wait("eve")
        gone.cancel()
        self.failureResultOf(gone, CancelledError)
        waiting = [self.wait("alice") for _ in range(150)]
        waiting.append(self.wait("bob"))
        call = self.scheduler._run
        call()
        self.assertEqual(self.went_on, ["alice", "bob", "alice"])
        self.wait("bob")
        call()
        self.assertEqual(self.went_on[3:], ["alice", "bob", "alice"])
        self.clock.advance(0)
        self.assertEqual(len(self.went_on), 152)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_paused_stream_waits_for_a_turn_when_it_resumes(self) -> None:
        flow = streams.StreamFlowControl(self.scheduler, "alice")
        flow.pauseProducing()
        ready = Deferred.fromCoroutine(flow.wait_until_ready())
        self.clock.advance(0)
        flow.resumeProducing()
        self.assertNoResult(ready)
        flow.pauseProducing()
        self.clock.advance(0)
        self.assertNoResult(ready)
        flow.resumeProducing()
        self.clock.advance(0)
        self.successResultOf(ready)


class StartTests(StreamTestCase):
    def test_stream_that_waits_for_its_turn_sends_events_printed_meanwhile(self) -> None:
        identifier = self.evaluate()
        for kind in FOLLOWERS:
            self.patch(Follower, "turn", lambda follower: None)
            followers = [kind(self.service, identifier) for _ in range(3)]
            self.assertEqual([each.connection.received for each in followers], [b""] * 3)
            self.assertEqual(len(self.service.registry.events.subscriptions), 0)
            self.print(b"a\n")
            for follower in followers:
                self.assertEqual(follower.payloads[0], "a")
                follower.lose()

    def test_stream_of_a_client_that_is_gone_does_not_begin(self) -> None:
        identifier = self.evaluate()
        for kind in FOLLOWERS:
            self.patch(Follower, "turn", lambda follower: None)
            kind(self.service, identifier).lose()
            self.turn()
            self.check_nothing_left(identifier)


class FramingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.encoded: list[int] = []
        self.framing = attrs.evolve(EVENT_STREAM_FRAMING, encode_events=self.encode)
        self.batches = streams.FrameCache()

    def encode(self, begin_cursor: int, batch: EventBatch) -> bytes:
        self.encoded.append(begin_cursor)
        return EVENT_STREAM_FRAMING.encode_events(begin_cursor, batch)

    def frame(self, begin_cursor: int, lines: bytes) -> None:
        batch = EventBatch(lines.count(b"\n"), lines)
        framed = self.batches.frame_batch(self.framing, begin_cursor, batch)
        self.assertEqual(framed, EVENT_STREAM_FRAMING.encode_events(begin_cursor, batch))

    def test_batch_is_framed_once_for_all_readers_at_the_same_place(self) -> None:
        for _ in range(150):
            for begin_cursor in (0, 1):
                for lines in (b"1\n2\n", b"1\n22\n"):
                    self.frame(begin_cursor, lines)
        self.assertEqual(self.encoded, [0, 0, 1, 1])

    def test_equal_cursors_of_two_evaluations_share_no_framed_batch(self) -> None:
        for lines in (b"1\n2\n", b"1\n3\n"):
            self.frame(0, lines)
        self.assertEqual(self.encoded, [0, 0])

    def test_few_batches_of_bounded_size_are_kept(self) -> None:
        self.frame(0, b"x" * streams.MAX_STREAM_WRITE_BYTES + b"\n")
        self.assertEqual(self.batches._framed, {})
        for begin_cursor in range(100):
            self.frame(begin_cursor, b"1\n")
        self.assertEqual(len(self.batches._framed), streams.MAX_CACHED_BATCHES)


class DefectTests(StreamTestCase):
    def test_stream_is_aborted_and_logged_after_an_exception(self) -> None:
        for kind in FOLLOWERS:
            identifier = self.evaluate()
            follower = self.follow(kind, identifier)
            with mock.patch.object(Subscription, "read_events", side_effect=ZeroDivisionError):
                self.print(b"a\n")
            self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
            self.check_cut(follower, 1011)
            self.check_nothing_left(identifier, follower)
            self.finish()
