"""`webhooks.deliveries`: one callback, many at once, the memory bound."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

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
from tawebeval.errors import ConfigurationError, ForbiddenURLHost, InvalidField
from tawebeval.webhooks import deliveries
from tawebeval.webhooks.deliveries import (
    DELIVERY_OVERHEAD_BYTES,
    AttemptResult,
    CallbackQueue,
    make_callback_queue,
)
from tawebeval.webhooks.records import CallbackRecord, CallbackState
from tawebeval.webhooks.signing import parse_secrets
from tawebeval_client.backoff import Backoff, RequestOutcome
from tests.cases.secrets import NEW, OLD, format_secret
from tests.fakes.resolver import FakeResolver
from tests.fakes.world import EPOCH

URL = "https://receiver.example/hook?key=s3cret"
TAKEN = AttemptResult(RequestOutcome.ACCEPTED, "the status 204")
BAD = AttemptResult(RequestOutcome.RETRY, "the status 500")
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
        if self.forbidden:
            raise ForbiddenURLHost("the host is forbidden")

    async def post_document(
        self, url: str, headers: dict[str, str], body: bytes, caller: str
    ) -> AttemptResult:
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
        self.waiting.pop(0).callback(result)


def end_all_deliveries(callbacks: CallbackQueue) -> None:
    """End all deliveries, none of which may wake another while the garbage is collected."""
    deliveries = list(callbacks._deliveries.values())
    for delivery in deliveries:
        callbacks._give_up(delivery, "the test has ended")
    for delivery in deliveries:
        if delivery.delivery_task is not None:
            delivery.delivery_task.cancel()


class CallbacksTestCase(SynchronousTestCase):
    """Two callers with secrets; chance is always one half."""

    pending_bytes = 10**6

    def setUp(self) -> None:
        self.patch(deliveries, "DELIVERY_BACKOFF", Backoff(4, 10, 60))
        self.patch(deliveries, "MAX_CONCURRENT_CALLBACKS", 4)
        self.patch(deliveries, "MAX_QUEUE_BYTES", self.pending_bytes)
        self.clock = Clock()
        self.sender = FakeSender(self.clock)
        self.secrets = Path(self.mktemp())
        self.secrets.write_text(f"alice {format_secret(OLD)}\nbob {format_secret(OLD)}")
        self.secrets.chmod(0o600)
        self.events = 0
        sender: Any = self.sender
        self.callbacks = CallbackQueue(
            self.secrets, sender, self.clock, self.draw, lambda: EPOCH + self.clock.seconds()
        )
        self.addCleanup(end_all_deliveries, self.callbacks)

    def draw(self, size: int) -> bytes:
        """Return half of what there is for a chance, and new identifiers."""
        if size == 4:
            return b"\x80\0\0\0"
        self.events += 1
        return self.events.to_bytes(size, "big")

    def send(
        self, caller: str = "alice", document: bytes = b"{}", name: str = "some"
    ) -> CallbackRecord:
        callback = self.callbacks.create_callback(URL, caller)
        callback.document = document
        self.callbacks.start_delivery(callback, name)
        return callback

    def check(
        self,
        callback: CallbackRecord,
        state: CallbackState,
        attempts: int,
        error: str | None = None,
    ) -> None:
        found = (callback.state, callback.attempt_count, callback.last_error)
        self.assertEqual(found, (state, attempts, error))

    def nothing_left(self) -> None:
        """Hold that nothing is under way, no timer is left, and no failure that nobody saw."""
        gc.collect()
        self.assertEqual(self.callbacks.pending_count, 0)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class ExpectTests(CallbacksTestCase):
    def test_first_attempt_waits_until_the_document_is_stored(self) -> None:
        callback = self.callbacks.create_callback(URL, "alice")
        self.check(callback, CallbackState.WAITING, 0)
        stored: Deferred[None] = Deferred()
        self.callbacks.start_delivery(callback, "some", store=lambda: stored)
        self.assertEqual((len(self.sender.posted), callback.state), (0, CallbackState.PENDING))
        stored.callback(None)
        self.assertEqual(len(self.sender.posted), 1)

    def test_callback_without_a_secret_or_to_a_forbidden_host_is_refused(self) -> None:
        error = self.assertRaises(InvalidField, self.callbacks.create_callback, URL, "carol")
        self.assertIn("ask the operator for a secret", error.detail)
        self.assertEqual(error.extra_members, {"field": "callback_url"})
        self.sender.forbidden = True
        error = self.assertRaises(InvalidField, self.callbacks.create_callback, URL, "alice")
        self.assertEqual(error.detail, "callback_url: the host is forbidden")


class DeliveryTests(CallbacksTestCase):
    def test_document_is_posted_once_and_signed(self) -> None:
        callback = self.send(document=b'{"a": 1}')
        self.check(callback, CallbackState.DELIVERED, 1)
        ((url, headers, body),) = self.sender.posted
        self.assertEqual((url, body), (URL, b'{"a": 1}'))
        event = f"evt_{1:032x}"
        self.assertEqual(
            headers, self.callbacks.secrets.sign_body("alice", event, int(EPOCH), body)
        )
        self.assertEqual(self.callbacks.ended_counts_by_state, {CallbackState.DELIVERED: 1})
        self.nothing_left()

    def test_failed_attempt_is_repeated_later_with_the_same_webhook_id(self) -> None:
        later = AttemptResult(RequestOutcome.RETRY, "no connection", 30)
        self.sender.results = [BAD, later, TAKEN]
        callback = self.send(document=b"[]")
        self.check(callback, CallbackState.PENDING, 1, "the status 500")
        self.clock.advance(4.9)
        self.assertEqual(callback.attempt_count, 1)
        self.clock.advance(0.1)
        self.check(callback, CallbackState.PENDING, 2, "no connection")
        self.clock.pump([39.9, 0.1])
        self.check(callback, CallbackState.DELIVERED, 3, "no connection")
        self.assertEqual(self.sender.times, [0, 5, 45])
        headers = [headers for _, headers, _ in self.sender.posted]
        self.assertEqual([body for _, _, body in self.sender.posted], [b"[]"] * 3)
        self.assertEqual(callback.document, b"")
        self.assertEqual(len({one["Webhook-Id"] for one in headers}), 1)
        stamps = [int(one["Webhook-Timestamp"]) - int(EPOCH) for one in headers]
        self.assertEqual(stamps, [0, 5, 45])
        self.assertEqual(len({one["Webhook-Signature"] for one in headers}), 3)
        self.nothing_left()

    def test_callback_is_given_up_after_the_last_attempt(self) -> None:
        self.sender.results = [BAD]
        callback = self.send()
        self.clock.pump([5, 10, 20])
        self.check(callback, CallbackState.GIVEN_UP, 4, "the status 500")
        self.assertEqual(self.sender.times, [0, 5, 15, 35])
        self.assertEqual(self.callbacks.ended_counts_by_state, {CallbackState.GIVEN_UP: 1})
        self.nothing_left()

    def test_refusal_of_the_receiver_is_final(self) -> None:
        self.sender.results = [BAD, NO]
        callback = self.send()
        self.clock.advance(5)
        self.check(callback, CallbackState.REFUSED, 2, "the status 404")
        self.nothing_left()

    def test_each_attempt_is_signed_with_the_present_secret(self) -> None:
        self.sender.results = [BAD]
        callback = self.send()
        self.callbacks.secrets = parse_secrets(f"alice {format_secret(NEW)}")
        self.clock.advance(5)
        _, headers, body = self.sender.posted[1]
        event, time = headers["Webhook-Id"], int(headers["Webhook-Timestamp"])
        self.assertEqual(headers, self.callbacks.secrets.sign_body("alice", event, time, body))
        self.callbacks.secrets = parse_secrets(f"bob {format_secret(NEW)}")
        self.clock.advance(10)
        self.check(
            callback,
            CallbackState.REFUSED,
            2,
            "the caller's secret was removed from callbacks.secrets",
        )
        self.nothing_left()

    def test_defect_is_logged_and_ends_its_callback_only(self) -> None:
        self.sender.results = [ZeroDivisionError(), TAKEN]
        callback = self.send()
        self.check(
            callback, CallbackState.GIVEN_UP, 1, "defect of the daemon; its log has the details"
        )
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.check(self.send(), CallbackState.DELIVERED, 1)
        self.nothing_left()

    def test_log_shows_neither_path_nor_query(self) -> None:
        self.sender.results = [BAD, TAKEN, BAD, NO]
        with capturedLogs() as logged:
            for name in ("one", "two"):
                self.send(name=name)
                self.clock.advance(5)
        to = "callback to https://receiver.example:443"
        again = "pending, attempts: 1: the status 500; next attempt in 5.0 s"
        expected = [
            (LogLevel.info, f"one: {to}: {again}"),
            (LogLevel.info, f"one: {to}: delivered, attempts: 2"),
            (LogLevel.info, f"two: {to}: {again}"),
            (LogLevel.warn, f"two: {to}: refused, attempts: 2: the status 404"),
        ]
        self.assertEqual([(each["log_level"], formatEvent(each)) for each in logged], expected)


class ConcurrentDeliveryTests(CallbacksTestCase):
    pending_bytes = 10**8

    def test_concurrent_attempts_are_limited_and_a_caller_gets_half_of_the_slots(self) -> None:
        self.sender.held = True
        for caller in ("alice",) * 4 + ("bob",):
            self.send(caller, b"")
        self.assertEqual(len(self.sender.waiting), 3)
        self.sender.answer(TAKEN)
        self.assertEqual(len(self.sender.posted), 4)

    def test_single_caller_may_take_all_slots(self) -> None:
        self.callbacks.secrets = parse_secrets(f"* {format_secret(OLD)}")
        self.sender.held = True
        for _ in range(6):
            self.send("")
        self.assertEqual(len(self.sender.waiting), 4)

    def test_callbacks_are_refused_over_several_turns_after_the_secret_is_removed(self) -> None:
        self.sender.held = True
        callbacks = [self.send() for _ in range(sys.getrecursionlimit())]
        self.callbacks.secrets = parse_secrets(f"bob {format_secret(NEW)}")
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

    def test_pause_between_attempts_holds_no_slot(self) -> None:
        self.sender.results = [BAD] * 4 + [TAKEN]
        callbacks = [self.send(document=b"") for _ in range(4)]
        self.check(self.send("bob", b""), CallbackState.DELIVERED, 1)
        self.assertEqual({one.state for one in callbacks}, {CallbackState.PENDING})


class PendingBytesTests(CallbacksTestCase):
    pending_bytes = 4 * (DELIVERY_OVERHEAD_BYTES + 300)

    @example_settings(max_examples=30)
    @given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30_000)), max_size=12))
    def test_oldest_callbacks_of_the_largest_caller_are_given_up_until_all_fit(
        self, drawn: list[tuple[str, int]]
    ) -> None:
        self.setUp()
        self.callbacks.secrets = parse_secrets(f"a {format_secret(OLD)}\nb {format_secret(OLD)}")
        self.sender.held = True
        left: list[tuple[CallbackRecord, int]] = []
        for caller, length in drawn:
            left.append((self.send(caller, bytes(length)), DELIVERY_OVERHEAD_BYTES + 3 * length))
            while sum(size for _, size in left) > self.pending_bytes:
                sizes: Counter[str] = Counter()
                for callback, size in left:
                    sizes[callback.caller] += size
                most = {one for one in sizes if sizes[one] == max(sizes.values())}
                oldest = [next(one for one in left if one[0].caller == name) for name in most]
                left.remove(next(one for one in oldest if one[0].state is CallbackState.GIVEN_UP))
            states = [callback.state for callback, _ in left]
            self.assertEqual(states, [CallbackState.PENDING] * len(left))
            self.assertEqual(self.callbacks.pending_count, len(left))

    def test_ended_callback_does_not_count_as_pending_bytes(self) -> None:
        for result, state in ((TAKEN, CallbackState.DELIVERED), (NO, CallbackState.REFUSED)):
            self.sender.results = [result]
            states = [self.send().state for _ in range(9)]
            self.assertEqual(states, [state] * 9)

    def test_callback_given_up_after_a_2xx_status_counts_as_delivered(self) -> None:
        why = "the caller's pending callbacks exceed 65.2 KiB; last error: the status 500"
        for result, state, error in (
            (TAKEN, CallbackState.DELIVERED, None),
            (BAD, CallbackState.GIVEN_UP, why),
        ):
            self.setUp()
            self.sender.held = True
            first = self.send("alice", b"")
            self.sender.late_result = result
            for _ in range(4):
                self.send("alice", b"")
            self.check(first, state, 1, error)


class OpenTests(SynchronousTestCase):
    def open(self, settings: CallbackSettings, **environment: str) -> CallbackQueue:
        reactor: Any = MemoryReactorClock()
        return make_callback_queue(settings, environment, FakeResolver(), reactor, bytes, lambda: 0)

    def test_callbacks_are_refused_without_a_file_of_secrets(self) -> None:
        callbacks = self.open(CallbackSettings())
        error = self.assertRaises(InvalidField, callbacks.create_callback, URL, "")
        self.assertIn("callbacks are disabled (callbacks.secrets)", error.detail)
        self.assertEqual(list(callbacks.list_reloadable_files()), [])

    def test_secrets_are_read_at_the_start_and_by_a_reload(self) -> None:
        secrets = Path(self.mktemp(), "callback-secrets")
        secrets.parent.mkdir()
        secrets.write_text(f"* {format_secret(OLD)}")
        callbacks = self.open(CallbackSettings(), CREDENTIALS_DIRECTORY=str(secrets.parent))
        self.assertEqual(callbacks.create_callback(URL, "").url, URL)
        secrets.write_text(f"alice {format_secret(OLD)}")
        (reloadable,) = callbacks.list_reloadable_files()
        reloadable.apply_content(reloadable.read_files())
        self.assertRaises(InvalidField, callbacks.create_callback, URL, "")

    def test_missing_secrets_stop_the_start(self) -> None:
        error = self.assertRaises(ConfigurationError, self.open, CallbackSettings("/nonexistent"))
        self.assertTrue(str(error).startswith("callbacks.secrets: "), str(error))


class CallbackTests(SynchronousTestCase):
    def test_url_is_shown_without_query_and_logged_without_path(self) -> None:
        for url, shown, origin in (
            ("https://Host/a/b?key=x", "https://Host/a/b", "https://host:443"),
            ("http://h:8080?key=x", "http://h:8080", "http://h:8080"),
            ("http://[2001:DB8::1]/x", "http://[2001:DB8::1]/x", "http://[2001:db8::1]:80"),
            ("https://8.8.8.8/x", "https://8.8.8.8/x", "https://8.8.8.8:443"),
        ):
            callback = CallbackRecord(url, "")
            self.assertEqual((callback.url_without_query, callback.url_origin), (shown, origin))
