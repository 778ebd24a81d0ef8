"""`webhooks.deliveries`: one callback, many at once, the memory bound, the daemon's end."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import CallbackSettings
from tawebeval.core.backoff import Backoff, RequestOutcome
from tawebeval.errors import ConfigurationError, ForbiddenHost, InvalidField
from tawebeval.webhooks.callback import CallbackRecord, CallbackState
from tawebeval.webhooks.deliveries import CallbackQueue, DeliveryBounds, make_callback_queue
from tawebeval.webhooks.sender import AttemptResult
from tawebeval.webhooks.signing import SigningSecretsFile, parse_secrets
from tests.cases.secrets import NEW, OLD, format_secret
from tests.fakes.resolver import FakeResolver
from tests.fakes.world import EPOCH

URL = "https://receiver.example/hook?key=s3cret"
TAKEN = AttemptResult(RequestOutcome.ACCEPTED, "the status 204")
BAD = AttemptResult(RequestOutcome.RETRY, "the status 500")
STOPPED = "the daemon was stopped"
NO = AttemptResult(RequestOutcome.REFUSED, "the status 404")


class FakeSender:
    """Answers each attempt with the next of `results`, of which the last stays.

    With `held` attempts wait for `answer`; cancelling one counts as it does for the real one, or
    is too late: it has come to `late_result`.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self.results: list[AttemptResult | Exception] = [TAKEN]
        self.held = False
        self.late_result: AttemptResult | None = None
        self.waiting: list[Deferred[AttemptResult]] = []
        self.posted: list[tuple[str, dict[str, str], bytes]] = []
        self.times: list[float] = []
        self.forbidden = False

    def check_url(self, url: str) -> None:
        """Forbid all, or nothing."""
        if self.forbidden:
            raise ForbiddenHost("the host is forbidden")

    async def post_document(self, url: str, headers: dict[str, str], body: bytes) -> AttemptResult:
        """Note it, and answer."""
        self.posted.append((url, headers, body))
        self.times.append(self._clock.seconds())
        if self.held:
            waiting: Deferred[AttemptResult] = Deferred(self._cancel)
            self.waiting.append(waiting)
            return await waiting
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return result

    def _cancel(self, waiting: Deferred[AttemptResult]) -> None:
        if self.late_result is not None:
            waiting.callback(self.late_result)

    def answer(self, result: AttemptResult) -> None:
        """Answer the attempt that has waited longest."""
        self.waiting.pop(0).callback(result)


class CallbacksTestCase(SynchronousTestCase):
    """Two callers with secrets; chance is always one half."""

    bounds = DeliveryBounds(Backoff(4, 10, 60), concurrent_attempts=4, pending_bytes=10**6)
    has_one_caller = False

    def setUp(self) -> None:
        self.clock = Clock()
        self.sender = FakeSender(self.clock)
        self.secrets = SigningSecretsFile()
        self.secrets.path = Path("secrets")
        self.secrets.current_secrets = parse_secrets(
            f"alice {format_secret(OLD)}\nbob {format_secret(OLD)}"
        )
        self.events = 0
        self.callbacks = self.make()

    def make(self) -> CallbackQueue:
        """Return what sends callbacks by the fake; after the test nothing is under way."""
        sender: Any = self.sender
        callbacks = CallbackQueue(
            self.secrets,
            sender,
            has_one_caller=self.has_one_caller,
            clock=self.clock,
            random=self.draw,
            time=lambda: EPOCH + self.clock.seconds(),
            bounds=self.bounds,
        )
        self.addCleanup(callbacks.give_up_all_deliveries)
        return callbacks

    def draw(self, size: int) -> bytes:
        """Return half of what there is for a chance, and new identifiers."""
        if size == 4:
            return b"\x80\0\0\0"
        self.events += 1
        return self.events.to_bytes(size, "big")

    def send(
        self, caller: str = "alice", document: bytes = b"{}", name: str = "some"
    ) -> CallbackRecord:
        """Let an evaluation end."""
        callback = self.callbacks.create_callback(URL, caller)
        self.callbacks.start_delivery(callback, name, lambda: document)
        return callback

    def check(
        self,
        callback: CallbackRecord,
        state: CallbackState,
        attempts: int,
        error: str | None = None,
    ) -> None:
        """Hold that a callback is so far."""
        found = (callback.state, callback.attempt_count, callback.last_error)
        self.assertEqual(found, (state, attempts, error))

    def close(self) -> Deferred[None]:
        """Let the daemon stop."""
        return Deferred.fromCoroutine(self.callbacks.close())

    def nothing_left(self) -> None:
        """Hold that nothing is under way, no timer is left, and no failure that nobody saw."""
        gc.collect()
        self.assertEqual(self.callbacks.pending_count, 0)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class ExpectTests(CallbacksTestCase):
    """Before an evaluation begins."""

    def test_first_attempt_waits_until_the_document_is_stored(self) -> None:
        callback = self.callbacks.create_callback(URL, "alice")
        stored: Deferred[None] = Deferred()
        self.callbacks.start_delivery(
            callback, "some", lambda: b"{}", wait_until_stored=lambda: stored
        )
        self.assertEqual((len(self.sender.posted), callback.state), (0, CallbackState.PENDING))
        stored.callback(None)
        self.assertEqual(len(self.sender.posted), 1)

    def test_accepted(self) -> None:
        """A callback waits for the end of its evaluation; nothing is sent."""
        self.check(self.callbacks.create_callback(URL, "alice"), CallbackState.WAITING, 0)
        self.assertEqual(self.sender.posted, [])

    def test_refused(self) -> None:
        """Without a secret, or to where it may not go, there is none: the field is at fault."""
        error = self.assertRaises(InvalidField, self.callbacks.create_callback, URL, "carol")
        self.assertIn("ask the operator for a secret", error.detail)
        self.assertEqual(error.extra_members, {"field": "callback_url"})
        self.sender.forbidden = True
        error = self.assertRaises(InvalidField, self.callbacks.create_callback, URL, "alice")
        self.assertEqual(error.detail, "callback_url: the host is forbidden")


class DeliveryTests(CallbacksTestCase):
    """One callback."""

    def test_delivered(self) -> None:
        """The document is posted once, signed with the caller's secret."""
        callback = self.send(document=b'{"a": 1}')
        self.check(callback, CallbackState.DELIVERED, 1)
        ((url, headers, body),) = self.sender.posted
        self.assertEqual((url, body), (URL, b'{"a": 1}'))
        event = f"evt_{1:032x}"
        self.assertEqual(
            headers, self.secrets.current_secrets.sign_body("alice", event, int(EPOCH), body)
        )
        self.assertEqual(self.callbacks.ended_counts_by_state, {CallbackState.DELIVERED: 1})
        self.nothing_left()

    def test_document(self) -> None:
        """The document is made when the callback is on its way, and is the same each time."""
        self.sender.results = [BAD, TAKEN]
        callback = self.callbacks.create_callback(URL, "alice")
        self.callbacks.start_delivery(callback, "some", lambda: callback.state.value.encode())
        self.clock.advance(5)
        self.assertEqual([body for _, _, body in self.sender.posted], [b"pending"] * 2)

    def test_again(self) -> None:
        """What fails is tried again, later each time, under the same name and signed anew."""
        self.sender.results = [BAD, AttemptResult(RequestOutcome.RETRY, "no connection"), TAKEN]
        callback = self.send()
        self.check(callback, CallbackState.PENDING, 1, "the status 500")
        self.clock.advance(4.9)
        self.assertEqual(callback.attempt_count, 1)
        self.clock.advance(0.1)
        self.check(callback, CallbackState.PENDING, 2, "no connection")
        self.clock.advance(10)
        self.check(callback, CallbackState.DELIVERED, 3, "no connection")
        self.assertEqual(self.sender.times, [0, 5, 15])
        headers = [headers for _, headers, _ in self.sender.posted]
        self.assertEqual(len({one["Webhook-Id"] for one in headers}), 1)
        stamps = [int(one["Webhook-Timestamp"]) - int(EPOCH) for one in headers]
        self.assertEqual(stamps, [0, 5, 15])
        self.assertEqual(len({one["Webhook-Signature"] for one in headers}), 3)
        self.nothing_left()

    def test_asked_to_wait(self) -> None:
        """A receiver that says how long to leave it alone is left alone."""
        self.sender.results = [AttemptResult(RequestOutcome.RETRY, "the status 429", 30), TAKEN]
        self.send()
        self.clock.pump([34.9, 0.1])
        self.assertEqual(self.sender.times, [0, 35])

    def test_too_often(self) -> None:
        """After the last attempt it is given up."""
        self.sender.results = [BAD]
        callback = self.send()
        self.clock.pump([5, 10, 20])
        self.check(callback, CallbackState.GIVEN_UP, 4, "the status 500")
        self.assertEqual(self.sender.times, [0, 5, 15, 35])
        self.assertEqual(self.callbacks.ended_counts_by_state, {CallbackState.GIVEN_UP: 1})
        self.nothing_left()

    def test_refused(self) -> None:
        """A no is a no."""
        self.sender.results = [BAD, NO]
        callback = self.send()
        self.clock.advance(5)
        self.check(callback, CallbackState.REFUSED, 2, "the status 404")
        self.nothing_left()

    def test_secrets_change(self) -> None:
        """Each attempt is signed with the secret of then; without one it is not made."""
        self.sender.results = [BAD]
        callback = self.send()
        self.secrets.current_secrets = parse_secrets(f"alice {format_secret(NEW)}")
        self.clock.advance(5)
        _, headers, body = self.sender.posted[1]
        event, time = headers["Webhook-Id"], int(headers["Webhook-Timestamp"])
        self.assertEqual(
            headers, self.secrets.current_secrets.sign_body("alice", event, time, body)
        )
        self.secrets.current_secrets = parse_secrets(f"bob {format_secret(NEW)}")
        self.clock.advance(10)
        self.check(
            callback,
            CallbackState.REFUSED,
            2,
            "the caller's secret was removed from callbacks.secrets",
        )
        self.nothing_left()

    def test_defect(self) -> None:
        """A defect is logged, ends this callback, and no other."""
        self.sender.results = [ZeroDivisionError(), TAKEN]
        callback = self.send()
        self.check(
            callback, CallbackState.GIVEN_UP, 1, "defect of the daemon; its log has the details"
        )
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.check(self.send(), CallbackState.DELIVERED, 1)
        self.nothing_left()

    def test_log(self) -> None:
        """The log tells of each step, and shows neither path nor query of the URL."""
        self.sender.results = [BAD, TAKEN, BAD, NO]
        with capturedLogs() as logged:
            for name in ("one", "two"):
                self.send(name=name)
                self.clock.advance(5)
        lines = [(event["log_level"], formatEvent(event)) for event in logged]
        to = "callback to https://receiver.example:443"
        self.assertEqual(
            lines,
            [
                (
                    LogLevel.info,
                    f"one: {to}: pending, attempts: 1: the status 500; next attempt in 5.0 s",
                ),
                (LogLevel.info, f"one: {to}: delivered, attempts: 2"),
                (
                    LogLevel.info,
                    f"two: {to}: pending, attempts: 1: the status 500; next attempt in 5.0 s",
                ),
                (LogLevel.warn, f"two: {to}: refused, attempts: 2: the status 404"),
            ],
        )


class ManyTests(CallbacksTestCase):
    """Places to send."""

    bounds = attrs.evolve(CallbacksTestCase.bounds, pending_bytes=10**8)

    def test_at_once(self) -> None:
        """So many are sent at once; half of the places at most are one caller's."""
        self.sender.held = True
        for caller in ("alice",) * 4 + ("bob",):
            self.send(caller, b"")
        self.assertEqual(len(self.sender.waiting), 3)
        self.sender.answer(TAKEN)
        self.assertEqual(len(self.sender.posted), 4)

    def test_many_refused(self) -> None:
        """However many wait when their secret is removed, each ends: as many in a turn as slots."""
        self.sender.held = True
        callbacks = [self.send() for _ in range(sys.getrecursionlimit())]
        self.secrets.current_secrets = parse_secrets(f"bob {format_secret(NEW)}")
        self.sender.answer(TAKEN)
        self.sender.answer(TAKEN)
        self.assertEqual(self.callbacks.ended_counts_by_state, {CallbackState.DELIVERED: 2})
        refused: list[int] = []
        self.clock.callLater(
            0, lambda: refused.append(self.callbacks.ended_counts_by_state[CallbackState.REFUSED])
        )
        self.clock.advance(0)
        self.assertEqual(refused, [2])
        ends = {CallbackState.REFUSED: len(callbacks) - 2, CallbackState.DELIVERED: 2}
        self.assertEqual(self.callbacks.ended_counts_by_state, ends)
        self.nothing_left()

    def test_a_pause_takes_no_place(self) -> None:
        """Who waits for the next attempt keeps nobody from sending."""
        self.sender.results = [BAD] * 4 + [TAKEN]
        callbacks = [self.send(document=b"") for _ in range(4)]
        self.check(self.send("bob", b""), CallbackState.DELIVERED, 1)
        self.assertEqual({one.state for one in callbacks}, {CallbackState.PENDING})


class RoomTests(CallbacksTestCase):
    """Memory for four."""

    bounds = attrs.evolve(CallbacksTestCase.bounds, pending_bytes=4 * (4096 + 100))

    def test_room(self) -> None:
        """Over the bound the caller who has most loses what has waited longest."""
        self.sender.results = [BAD]
        bob = self.send("bob", b"b" * 100)
        alices = [self.send("alice", b"a" * 100) for _ in range(3)]
        self.assertEqual(self.callbacks.pending_count, 4)
        alices.append(self.send("alice", b"a" * 100))
        why = "the caller's pending callbacks exceed 16.4 KiB; last error: the status 500"
        self.check(alices[0], CallbackState.GIVEN_UP, 1, why)
        self.assertEqual([one.state for one in alices[1:]], [CallbackState.PENDING] * 3)
        self.assertEqual(bob.state, CallbackState.PENDING)
        self.send("bob", b"b" * 100)
        self.assertEqual(alices[1].state, CallbackState.GIVEN_UP)
        self.assertEqual(self.callbacks.pending_count, 4)

    @example_settings(max_examples=30)
    @given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9000)), max_size=12))
    def test_any(self, drawn: list[tuple[str, int]]) -> None:
        """One after another goes the oldest of the caller with most bytes, until the rest fits."""
        self.setUp()
        self.secrets.current_secrets = parse_secrets(
            f"a {format_secret(OLD)}\nb {format_secret(OLD)}"
        )
        self.sender.held = True
        left: list[tuple[CallbackRecord, int]] = []
        for caller, length in drawn:
            left.append((self.send(caller, bytes(length)), 4096 + length))
            while sum(size for _, size in left) > self.bounds.pending_bytes:
                sizes: Counter[str] = Counter()
                for callback, size in left:
                    sizes[callback.caller] += size
                most = {one for one in sizes if sizes[one] == max(sizes.values())}
                oldest = [next(one for one in left if one[0].caller == name) for name in most]
                left.remove(next(one for one in oldest if one[0].state is CallbackState.GIVEN_UP))
            states = [callback.state for callback, _ in left]
            self.assertEqual(states, [CallbackState.PENDING] * len(left))
            self.assertEqual(self.callbacks.pending_count, len(left))

    def test_room_again(self) -> None:
        """A callback that has ended takes no room, however it has."""
        for result, state in ((TAKEN, CallbackState.DELIVERED), (NO, CallbackState.REFUSED)):
            self.sender.results = [result]
            states = [self.send().state for _ in range(9)]
            self.assertEqual(states, [state] * 9)

    def test_room_for_none(self) -> None:
        """A document that is larger than all room is not sent, and takes no other's."""
        self.sender.results = [BAD]
        bob = self.send("bob", b"")
        alice = self.send("alice", b"a" * self.bounds.pending_bytes)
        self.check(
            alice,
            CallbackState.GIVEN_UP,
            0,
            "the caller's pending callbacks exceed 16.4 KiB",
        )
        self.assertEqual(len(self.sender.posted), 1)
        self.assertEqual(bob.state, CallbackState.PENDING)

    def test_room_while_sending(self) -> None:
        """One that is just being sent can be given up, too, and gives back its place."""
        self.sender.held = True
        first = self.send("alice", b"")
        for _ in range(4):
            self.send("alice", b"")
        self.check(
            first,
            CallbackState.GIVEN_UP,
            1,
            "the caller's pending callbacks exceed 16.4 KiB",
        )
        self.assertEqual(len(self.sender.posted), 3)

    def test_answered_at_last(self) -> None:
        """One that was given up while its status had come is as the status says."""
        for result, state in ((TAKEN, CallbackState.DELIVERED), (BAD, CallbackState.GIVEN_UP)):
            self.setUp()
            self.sender.held = True
            first = self.send("alice", b"")
            self.sender.late_result = result
            for _ in range(4):
                self.send("alice", b"")
            self.assertIs(first.state, state)
            self.assertEqual(first.attempt_count, 1)


class AloneTests(CallbacksTestCase):
    """A daemon without tokens."""

    has_one_caller = True

    def test_all_places(self) -> None:
        """Its one caller has all places."""
        self.secrets.current_secrets = parse_secrets(f"* {format_secret(OLD)}")
        self.sender.held = True
        for _ in range(6):
            self.send("")
        self.assertEqual(len(self.sender.waiting), 4)


class CloseTests(CallbacksTestCase):
    """The daemon's end."""

    bounds = attrs.evolve(CallbacksTestCase.bounds, concurrent_attempts=2)

    def test_nothing(self) -> None:
        """Where nothing waits nothing is waited for."""
        self.successResultOf(self.close())
        self.nothing_left()

    def test_last_attempt(self) -> None:
        """What waits for its next attempt has it now, and it is the last."""
        self.sender.results = [BAD, BAD, TAKEN, BAD]
        one, other = self.send("alice"), self.send("bob")
        with capturedLogs() as logged:
            self.successResultOf(self.close())
        self.check(one, CallbackState.DELIVERED, 2, "the status 500")
        why = "the daemon was stopped; last error: the status 500"
        self.check(other, CallbackState.GIVEN_UP, 2, why)
        self.assertEqual(self.sender.times, [0] * 4)
        (warning,) = (event for event in logged if event["log_level"] is LogLevel.warn)
        self.assertIn(f"given_up, attempts: 2: {why}", formatEvent(warning))
        self.nothing_left()

    def test_end_pauses(self) -> None:
        """What waits is tried at once; what comes until all is closed has one attempt, too."""
        self.sender.results = [BAD, TAKEN, TAKEN, BAD]
        callback = self.send("alice")
        self.callbacks.start_last_attempts()
        self.assertIs(callback.state, CallbackState.DELIVERED)
        self.assertIs(self.send("alice").state, CallbackState.DELIVERED)
        self.check(
            self.send("alice"), CallbackState.GIVEN_UP, 1, f"{STOPPED}; last error: the status 500"
        )
        self.successResultOf(self.close())
        self.nothing_left()

    def test_stop_now(self) -> None:
        """`give_up_all_deliveries` waits for nothing and sends nothing more."""
        self.sender.held = True
        callback = self.send("alice")
        closed = self.close()
        self.callbacks.give_up_all_deliveries()
        self.successResultOf(closed)
        self.check(callback, CallbackState.GIVEN_UP, 1, STOPPED)
        self.check(self.send("bob"), CallbackState.GIVEN_UP, 0, STOPPED)
        self.nothing_left()

    def test_stop_now_with_others_waiting(self) -> None:
        """Nor is anything sent that waits for a place: none gets that of another."""
        self.sender.held = True
        callbacks = [self.send(caller) for caller in ("alice", "bob") * 3]
        self.callbacks.give_up_all_deliveries()
        for callback, attempts in zip(callbacks, (1, 1, 0, 0, 0, 0), strict=True):
            self.check(callback, CallbackState.GIVEN_UP, attempts, STOPPED)
        self.nothing_left()

    def test_out_of_time(self) -> None:
        """What has no answer within the time is given up: under way, or without a place yet."""
        self.sender.held = True
        callbacks = [self.send(caller) for caller in ("alice", "bob", "alice")]
        closed = self.close()
        self.sender.answer(BAD)
        self.assertIs(callbacks[0].state, CallbackState.GIVEN_UP)
        self.assertEqual(len(self.sender.posted), 3)
        self.send("bob")
        self.clock.advance(14.9)
        self.assertNoResult(closed)
        self.clock.advance(0.1)
        self.successResultOf(closed)
        self.check(callbacks[1], CallbackState.GIVEN_UP, 1, "the daemon was stopped")
        self.check(callbacks[2], CallbackState.GIVEN_UP, 1, "the daemon was stopped")
        self.assertEqual(self.callbacks.ended_counts_by_state, {CallbackState.GIVEN_UP: 4})
        self.nothing_left()


class OpenTests(SynchronousTestCase):
    """From settings."""

    def open(self, settings: CallbackSettings) -> CallbackQueue:
        """Return the callbacks of a daemon with these settings."""
        reactor: Any = MemoryReactorClock()
        return make_callback_queue(
            settings, {}, FakeResolver(), reactor, bytes, lambda: 0, has_one_caller=True
        )

    def test_disabled(self) -> None:
        """Without a file of secrets nobody can have one."""
        callbacks = self.open(CallbackSettings())
        error = self.assertRaises(InvalidField, callbacks.create_callback, URL, "")
        self.assertIn("callbacks are disabled (callbacks.secrets)", error.detail)
        self.assertEqual(list(callbacks.list_reloadable_files()), [])

    def test_secrets(self) -> None:
        """What stands in the file counts from the start, and again once it is reloaded."""
        secrets = Path(self.mktemp())
        secrets.write_text(f"* {format_secret(OLD)}")
        callbacks = self.open(CallbackSettings(str(secrets)))
        self.assertEqual(callbacks.create_callback(URL, "").url, URL)
        secrets.write_text(f"alice {format_secret(OLD)}")
        (reloadable,) = callbacks.list_reloadable_files()
        reloadable.apply_content(reloadable.read_files())
        self.assertRaises(InvalidField, callbacks.create_callback, URL, "")

    def test_without_secrets(self) -> None:
        """Callbacks that cannot be signed stop the start."""
        error = self.assertRaises(ConfigurationError, self.open, CallbackSettings("/nonexistent"))
        self.assertTrue(str(error).startswith("callbacks.secrets: "), str(error))
