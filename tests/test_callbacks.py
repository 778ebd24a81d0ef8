"""`webhooks.callbacks`: deliveries, one after another and many at once, under a Clock."""

from __future__ import annotations

import gc
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import CallbackSettings
from tawebeval.core.backoff import Verdict
from tawebeval.errors import ConfigurationError, ForbiddenHost, InvalidField
from tawebeval.webhooks.callback import Callback, CallbackState
from tawebeval.webhooks.callbacks import Callbacks, open_callbacks
from tawebeval.webhooks.sender import AttemptResult
from tawebeval.webhooks.signatures import parse_secrets
from tawebeval.webhooks.signing import Signing
from tests.fake_resolver import FakeResolver
from tests.fakes import EPOCH
from tests.test_signatures import NEW, OLD, written

URL = "https://receiver.example/hook?key=s3cret"
TAKEN = AttemptResult(Verdict.TAKEN, "the status 204")
BAD = AttemptResult(Verdict.AGAIN, "the status 500")
STOPPED = "the service was stopped"
NO = AttemptResult(Verdict.REFUSED, "the status 404")


class FakeSender:
    """Answers each attempt with the next of `results`, of which the last stays.

    With `held` attempts wait for `answer`; cancelling one counts as it does for the real one.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self.results: list[AttemptResult | Exception] = [TAKEN]
        self.held = False
        self.waiting: list[Deferred[AttemptResult]] = []
        self.posted: list[tuple[str, dict[str, str], bytes]] = []
        self.times: list[float] = []
        self.forbidden = False

    def check(self, url: str) -> None:
        """Forbid all, or nothing."""
        if self.forbidden:
            raise ForbiddenHost("the host is forbidden")

    async def post(self, url: str, headers: dict[str, str], body: bytes) -> AttemptResult:
        """Note it, and answer."""
        self.posted.append((url, headers, body))
        self.times.append(self._clock.seconds())
        if self.held:
            waiting: Deferred[AttemptResult] = Deferred()
            self.waiting.append(waiting)
            return await waiting
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return result

    def answer(self, result: AttemptResult) -> None:
        """Answer the attempt that has waited longest."""
        self.waiting.pop(0).callback(result)


class CallbacksTestCase(SynchronousTestCase):
    """Two callers with secrets; chance is always one half."""

    settings = CallbackSettings(
        enabled=True,
        attempts=4,
        first_delay=10,
        longest_delay=60,
        timeout=15,
        at_once=4,
        buffer=10**6,
    )
    alone = False

    def setUp(self) -> None:
        self.clock = Clock()
        self.sender = FakeSender(self.clock)
        self.signing = Signing({})
        self.signing.secrets = parse_secrets(f"alice {written(OLD)}\nbob {written(OLD)}")
        self.events = 0
        self.callbacks = self.make()

    def make(self) -> Callbacks:
        """Return what sends callbacks by the fake; after the test nothing is under way."""
        sender: Any = self.sender
        callbacks = Callbacks(
            self.settings,
            self.signing,
            lambda settings: sender,
            alone=self.alone,
            clock=self.clock,
            random=self.draw,
            time=lambda: EPOCH + self.clock.seconds(),
        )
        self.addCleanup(callbacks.hurry)
        return callbacks

    def draw(self, size: int) -> bytes:
        """Return half of what there is for a chance, and new identifiers."""
        if size == 4:
            return b"\x80\0\0\0"
        self.events += 1
        return self.events.to_bytes(size, "big")

    def send(self, caller: str = "alice", document: bytes = b"{}", name: str = "some") -> Callback:
        """Let an evaluation end."""
        callback = self.callbacks.expect(URL, caller)
        self.callbacks.send(callback, name, lambda: document)
        return callback

    def check(
        self, callback: Callback, state: CallbackState, attempts: int, error: str | None = None
    ) -> None:
        """Hold that a callback is so far."""
        found = (callback.state, callback.attempts, callback.last_error)
        self.assertEqual(found, (state, attempts, error))

    def change(self, **settings: Any) -> None:
        """Have the callbacks go by other settings."""
        self.callbacks.go_by(msgspec.structs.replace(self.settings, **settings))

    def close(self) -> Deferred[None]:
        """Let the daemon stop."""
        return Deferred.fromCoroutine(self.callbacks.close())

    def nothing_left(self) -> None:
        """Hold that nothing is under way, no timer is left, and no failure that nobody saw."""
        gc.collect()
        self.assertEqual(self.callbacks.pending, 0)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class ExpectTests(CallbacksTestCase):
    """Before an evaluation begins."""

    def test_accepted(self) -> None:
        """A callback waits for the end of its evaluation; nothing is sent."""
        self.check(self.callbacks.expect(URL, "alice"), CallbackState.WAITING, 0)
        self.assertEqual(self.sender.posted, [])

    def test_refused(self) -> None:
        """Without a secret, or to where it may not go, there is none: the field is at fault."""
        error = self.assertRaises(InvalidField, self.callbacks.expect, URL, "carol")
        self.assertIn("no secret of yours", error.detail)
        self.assertEqual(error.members, {"field": "callback_url"})
        self.sender.forbidden = True
        error = self.assertRaises(InvalidField, self.callbacks.expect, URL, "alice")
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
        self.assertEqual(headers, self.signing.secrets.sign("alice", event, int(EPOCH), body))
        self.assertEqual(self.callbacks.ended, {CallbackState.DELIVERED: 1})
        self.nothing_left()

    def test_document(self) -> None:
        """The document is made when the callback is on its way, and is the same each time."""
        self.sender.results = [BAD, TAKEN]
        callback = self.callbacks.expect(URL, "alice")
        self.callbacks.send(callback, "some", lambda: callback.state.value.encode())
        self.clock.advance(5)
        self.assertEqual([body for _, _, body in self.sender.posted], [b"pending"] * 2)

    def test_again(self) -> None:
        """What fails is tried again, later each time, under the same name and signed anew."""
        self.sender.results = [BAD, AttemptResult(Verdict.AGAIN, "no connection"), TAKEN]
        callback = self.send()
        self.check(callback, CallbackState.PENDING, 1, "the status 500")
        self.clock.advance(4.9)
        self.assertEqual(callback.attempts, 1)
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
        self.sender.results = [AttemptResult(Verdict.AGAIN, "the status 429", 30), TAKEN]
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
        self.assertEqual(self.callbacks.ended, {CallbackState.GIVEN_UP: 1})
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
        self.signing.secrets = parse_secrets(f"alice {written(NEW)}")
        self.clock.advance(5)
        _, headers, body = self.sender.posted[1]
        event, time = headers["Webhook-Id"], int(headers["Webhook-Timestamp"])
        self.assertEqual(headers, self.signing.secrets.sign("alice", event, time, body))
        self.signing.secrets = parse_secrets(f"bob {written(NEW)}")
        self.clock.advance(10)
        self.check(
            callback, CallbackState.REFUSED, 2, "the operator has removed the secret to sign with"
        )
        self.nothing_left()

    def test_defect(self) -> None:
        """A defect is logged, ends this callback, and no other."""
        self.sender.results = [ZeroDivisionError(), TAKEN]
        callback = self.send()
        self.check(callback, CallbackState.GIVEN_UP, 1, "the daemon could not send it")
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
                    f"one: {to}: pending, attempts: 1: the status 500; again in 5.0 s",
                ),
                (LogLevel.info, f"one: {to}: delivered, attempts: 2"),
                (
                    LogLevel.info,
                    f"two: {to}: pending, attempts: 1: the status 500; again in 5.0 s",
                ),
                (LogLevel.warn, f"two: {to}: refused, attempts: 2: the status 404"),
            ],
        )


class ManyTests(CallbacksTestCase):
    """Places to send."""

    settings = msgspec.structs.replace(CallbacksTestCase.settings, buffer=10**8)

    def test_at_once(self) -> None:
        """So many are sent at once; half of the places at most are one caller's."""
        self.sender.held = True
        for caller in ("alice",) * 4 + ("bob",):
            self.send(caller, b"")
        self.assertEqual(len(self.sender.waiting), 3)
        self.sender.answer(TAKEN)
        self.assertEqual(len(self.sender.posted), 4)

    def test_many_refused(self) -> None:
        """However many wait when nothing may be sent any more, each comes to its end."""
        self.sender.held = True
        callbacks = [self.send() for _ in range(sys.getrecursionlimit())]
        self.change(enabled=False)
        self.sender.answer(BAD)
        self.sender.answer(TAKEN)
        self.clock.advance(5)
        ends = {CallbackState.REFUSED: len(callbacks) - 1, CallbackState.DELIVERED: 1}
        self.assertEqual(self.callbacks.ended, ends)
        self.nothing_left()

    def ends(self) -> list[int]:
        """Return how many come to their end in each of the next turns, but for none."""
        counts = [self.callbacks.ended.total()]

        def look() -> None:
            counts.append(self.callbacks.ended.total())
            if len(counts) < 200:
                self.clock.callLater(0, look)

        look()
        self.clock.advance(0)
        return [after - before for before, after in pairwise(counts) if after > before]

    def test_many_turns(self) -> None:
        """Where nothing may be sent any more as many as have places end in a turn."""
        self.sender.held = True
        for _ in range(100):
            self.send()
        self.change(enabled=False)
        self.sender.answer(TAKEN)
        self.sender.answer(TAKEN)
        self.assertEqual(self.callbacks.ended, {CallbackState.DELIVERED: 2})
        self.assertEqual(self.ends(), [2] * 49)
        self.nothing_left()

    def test_many_turns_for_less_memory(self) -> None:
        """A few of those that pause are given up in a turn."""
        self.sender.results = [BAD]
        for _ in range(100):
            self.send(document=b"")
        self.change(buffer=10 * 4096)
        self.assertEqual(self.callbacks.ended, {CallbackState.GIVEN_UP: 16})
        self.assertEqual(self.ends(), [16] * 4 + [10])
        self.assertEqual(self.callbacks.pending, 10)

    def test_hurried_between_turns(self) -> None:
        """The daemon's end is not kept waiting by them."""
        self.sender.results = [BAD]
        callbacks = [self.send(document=b"") for _ in range(100)]
        self.change(buffer=10 * 4096)
        self.callbacks.hurry()
        self.assertEqual({one.state for one in callbacks}, {CallbackState.GIVEN_UP})
        self.nothing_left()

    def test_room_between_turns(self) -> None:
        """What is too much already makes room for what begins before it has ended."""
        self.sender.results = [BAD]
        for _ in range(100):
            self.send(document=b"")
        self.change(buffer=10 * 4096)
        bob = self.send("bob", b"")
        self.clock.advance(0)
        self.assertEqual(bob.state, CallbackState.PENDING)
        self.assertEqual(self.callbacks.pending, 10)

    def test_many_places_for_less_memory(self) -> None:
        """More places than before are for those that are not given up."""
        self.sender.held = True
        callbacks = [self.send(document=b"") for _ in range(100)]
        self.change(buffer=10 * 4096, at_once=100)
        self.assertEqual(self.callbacks.ended, {CallbackState.GIVEN_UP: 16})
        self.clock.advance(0)
        self.assertEqual({one.state for one in callbacks[:90]}, {CallbackState.GIVEN_UP})
        self.assertEqual([one.attempts for one in callbacks], [1] * 2 + [0] * 88 + [1] * 10)

    def test_a_pause_takes_no_place(self) -> None:
        """Who waits for the next attempt keeps nobody from sending."""
        self.sender.results = [BAD] * 4 + [TAKEN]
        callbacks = [self.send(document=b"") for _ in range(4)]
        self.check(self.send("bob", b""), CallbackState.DELIVERED, 1)
        self.assertEqual({one.state for one in callbacks}, {CallbackState.PENDING})


class RoomTests(CallbacksTestCase):
    """Memory for four."""

    settings = msgspec.structs.replace(CallbacksTestCase.settings, buffer=4 * (4096 + 100))

    def test_room(self) -> None:
        """Over the bound the caller who has most loses what has waited longest."""
        self.sender.results = [BAD]
        bob = self.send("bob", b"b" * 100)
        alices = [self.send("alice", b"a" * 100) for _ in range(3)]
        self.assertEqual(self.callbacks.pending, 4)
        alices.append(self.send("alice", b"a" * 100))
        why = "too many callbacks of this caller wait; before: the status 500"
        self.check(alices[0], CallbackState.GIVEN_UP, 1, why)
        self.assertEqual([one.state for one in alices[1:]], [CallbackState.PENDING] * 3)
        self.assertEqual(bob.state, CallbackState.PENDING)
        self.send("bob", b"b" * 100)
        self.assertEqual(alices[1].state, CallbackState.GIVEN_UP)
        self.assertEqual(self.callbacks.pending, 4)

    def test_room_for_none(self) -> None:
        """A document that is larger than all room is not sent, and takes no other's."""
        self.sender.results = [BAD]
        bob = self.send("bob", b"")
        alice = self.send("alice", b"a" * self.settings.buffer)
        self.check(alice, CallbackState.GIVEN_UP, 0, "too many callbacks of this caller wait")
        self.assertEqual(len(self.sender.posted), 1)
        self.assertEqual(bob.state, CallbackState.PENDING)

    def test_room_while_sending(self) -> None:
        """One that is just being sent can be given up, too, and gives back its place."""
        self.sender.held = True
        first = self.send("alice", b"")
        for _ in range(4):
            self.send("alice", b"")
        self.check(first, CallbackState.GIVEN_UP, 1, "too many callbacks of this caller wait")
        self.assertEqual(len(self.sender.posted), 3)

    def test_answered_at_last(self) -> None:
        """One that was given up while its status had come is as the status says."""
        for result, state in ((TAKEN, CallbackState.DELIVERED), (BAD, CallbackState.GIVEN_UP)):
            self.setUp()
            self.sender.held = True
            first = self.send("alice", b"")
            self.sender.waiting[0]._canceller = lambda found, one=result: found.callback(one)
            for _ in range(4):
                self.send("alice", b"")
            self.assertIs(first.state, state)
            self.assertEqual(first.attempts, 1)


class AloneTests(CallbacksTestCase):
    """A daemon without tokens."""

    alone = True

    def test_all_places(self) -> None:
        """Its one caller has all places."""
        self.signing.secrets = parse_secrets(f"* {written(OLD)}")
        self.sender.held = True
        for _ in range(6):
            self.send("")
        self.assertEqual(len(self.sender.waiting), 4)
        self.change(at_once=5)
        self.assertEqual(len(self.sender.waiting), 5)


class ChangeTests(CallbacksTestCase):
    """Other settings while callbacks are on their way."""

    def test_disabled(self) -> None:
        """From then on nothing is sent, neither again nor for what ends later; then it is."""
        self.sender.results = [BAD]
        tried = self.send()
        later = self.callbacks.expect(URL, "alice")
        self.change(enabled=False)
        error = self.assertRaises(InvalidField, self.callbacks.expect, URL, "alice")
        self.assertEqual(
            error.detail, "callback_url: there are no callbacks here ([callbacks] enabled)"
        )
        self.callbacks.send(later, "later", lambda: b"{}")
        self.clock.advance(0)
        why = "the operator has disabled callbacks"
        self.check(later, CallbackState.REFUSED, 0, why)
        self.clock.advance(5)
        self.check(tried, CallbackState.REFUSED, 1, why)
        self.assertEqual(len(self.sender.posted), 1)
        self.assertEqual(self.callbacks.ended, {CallbackState.REFUSED: 2})
        self.nothing_left()
        self.sender.results = [TAKEN]
        self.change()
        self.check(self.send(), CallbackState.DELIVERED, 1)

    def test_disabled_for_a_moment(self) -> None:
        """What was just to be refused is sent; not so what has no room by now."""
        self.change(enabled=False, at_once=100)
        *others, last = [self.send_anyway() for _ in range(40)]
        self.change(buffer=4096 + 100)
        self.clock.advance(0)
        for callback in others:
            self.check(
                callback, CallbackState.GIVEN_UP, 0, "too many callbacks of this caller wait"
            )
        self.check(last, CallbackState.DELIVERED, 1)
        self.assertEqual(len(self.sender.posted), 1)

    def send_anyway(self) -> Callback:
        """Let an evaluation end that has begun while callbacks were enabled."""
        callback = Callback(URL, "alice")
        self.callbacks.send(callback, "some", lambda: b"{}")
        return callback

    def test_disabled_for_a_while(self) -> None:
        """What has paused meanwhile goes on."""
        self.sender.results = [BAD, TAKEN]
        callback = self.send()
        self.change(enabled=False)
        self.clock.advance(4)
        self.change()
        self.clock.advance(1)
        self.check(callback, CallbackState.DELIVERED, 2, "the status 500")

    def test_where_to(self) -> None:
        """An attempt that is being made ends as it began; the next one goes by what holds then."""
        posters = {0.0: self.sender, 1.0: FakeSender(self.clock)}
        asked = []

        def open_sender(settings: CallbackSettings) -> Any:
            asked.append(settings.deny_hosts)
            return posters[self.clock.seconds()]

        self.callbacks._open_sender = open_sender
        self.sender.held = True
        callback = self.send()
        self.clock.advance(1)
        self.change(deny_hosts=("other.example",))
        self.assertEqual(asked, [("other.example",)])
        posters[1.0].forbidden = True
        self.assertRaises(InvalidField, self.callbacks.expect, URL, "alice")
        self.check(callback, CallbackState.PENDING, 1)
        self.sender.answer(BAD)
        self.clock.advance(5)
        self.check(callback, CallbackState.DELIVERED, 2, "the status 500")
        self.assertEqual([len(one.posted) for one in posters.values()], [1, 1])

    def test_how_often(self) -> None:
        """A pause that has begun ends as it began; after it other delays and numbers count."""
        self.sender.results = [BAD]
        callback, more = self.send(), self.send()
        self.change(first_delay=40, attempts=3)
        self.clock.pump([4.9, 0.1])
        self.check(callback, CallbackState.PENDING, 2, "the status 500")
        self.clock.pump([29.9, 0.1])  # half of `longest_delay`, which is less than 80 seconds
        self.check(callback, CallbackState.GIVEN_UP, 3, "the status 500")
        self.assertEqual(self.sender.times, [0, 0, 5, 5, 35, 35])
        self.assertEqual(more.attempts, 3)
        self.nothing_left()

    def test_at_once(self) -> None:
        """With more places those who wait for one are sent; with fewer nobody loses one."""
        self.sender.held = True
        for caller in ("alice", "bob") * 4:
            self.send(caller, b"")
        self.assertEqual(len(self.sender.waiting), 4)
        self.change(at_once=6)
        self.assertEqual(len(self.sender.waiting), 6)
        self.change(at_once=2)
        for _ in range(4):
            self.sender.answer(TAKEN)
        self.assertEqual((len(self.sender.waiting), len(self.sender.posted)), (2, 6))
        self.sender.answer(TAKEN)
        self.assertEqual((len(self.sender.waiting), len(self.sender.posted)), (2, 7))

    def test_less_memory(self) -> None:
        """What does not fit any more is given up, and is not sent where a place becomes free."""
        self.sender.held = True
        callbacks = [self.send("alice", b"") for _ in range(4)]
        self.change(buffer=4096, at_once=100)
        why = "too many callbacks of this caller wait"
        for callback, attempts in zip(callbacks, (1, 1, 0), strict=False):
            self.check(callback, CallbackState.GIVEN_UP, attempts, why)
        self.check(callbacks[3], CallbackState.PENDING, 1)

    def test_less_of_everything(self) -> None:
        """Of those who are given up none is sent, nor are more at once than may be by now."""
        for buffer, left in ((1, 0), (2 * 4096 + 50, 2)):
            self.setUp()
            self.sender.held = True
            callers = ("alice", "alice", "bob", "bob", "alice", "bob", "alice", "bob")
            callbacks = [self.send(caller, b"") for caller in callers]
            self.change(buffer=buffer, at_once=1)
            attempts = [callback.attempts for callback in callbacks]
            self.assertEqual(attempts, [1] * 4 + [0] * (4 - left) + [1, 0][:left])
            self.assertEqual(self.callbacks.pending, left)

    def test_end(self) -> None:
        """The last attempts have the time of these settings, and none where there are none."""
        for settings, seconds in (({"timeout": 3}, 3), ({"enabled": False}, 0)):
            self.setUp()
            self.sender.held = True
            callback = self.send()
            self.change(**settings)
            closed = self.close()
            self.assertNoResult(closed)
            self.clock.advance(max(0, seconds - 0.1))
            self.clock.advance(seconds and 0.1)
            self.successResultOf(closed)
            self.assertEqual(self.clock.seconds(), seconds)
            self.check(callback, CallbackState.GIVEN_UP, 1, STOPPED)

    def test_while_it_ends(self) -> None:
        """The last attempts have no more time than there was when the stop began."""
        for before in ({}, {"enabled": False}):
            self.setUp()
            self.sender.held = True
            callback = self.send()
            self.change(**before)
            self.callbacks.hasten()
            self.change(timeout=60)
            closed = self.close()
            self.clock.advance(0 if before else 14.9)
            if not before:
                self.assertNoResult(closed)
                self.clock.advance(0.1)
            self.successResultOf(closed)
            self.check(callback, CallbackState.GIVEN_UP, 1, STOPPED)


class CloseTests(CallbacksTestCase):
    """The daemon's end."""

    settings = msgspec.structs.replace(CallbacksTestCase.settings, at_once=2)

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
        why = "the service was stopped; before: the status 500"
        self.check(other, CallbackState.GIVEN_UP, 2, why)
        self.assertEqual(self.sender.times, [0] * 4)
        (warning,) = (event for event in logged if event["log_level"] is LogLevel.warn)
        self.assertIn(f"given_up, attempts: 2: {why}", formatEvent(warning))
        self.nothing_left()

    def test_while_evaluations_end(self) -> None:
        """What waits is tried at once; what comes until all is closed has one attempt, too."""
        self.sender.results = [BAD, TAKEN, TAKEN, BAD]
        callback = self.send("alice")
        self.callbacks.hasten()
        self.assertIs(callback.state, CallbackState.DELIVERED)
        self.assertIs(self.send("alice").state, CallbackState.DELIVERED)
        self.check(
            self.send("alice"), CallbackState.GIVEN_UP, 1, f"{STOPPED}; before: the status 500"
        )
        self.successResultOf(self.close())
        self.nothing_left()

    def test_hurried(self) -> None:
        """In a hurry nothing is waited for, and nothing more is sent."""
        self.sender.held = True
        callback = self.send("alice")
        closed = self.close()
        self.callbacks.hurry()
        self.successResultOf(closed)
        self.check(callback, CallbackState.GIVEN_UP, 1, STOPPED)
        self.check(self.send("bob"), CallbackState.GIVEN_UP, 0, STOPPED)
        self.nothing_left()

    def test_hurried_with_others_waiting(self) -> None:
        """Nor is anything sent that waits for a place: none gets that of another."""
        self.sender.held = True
        callbacks = [self.send(caller) for caller in ("alice", "bob") * 3]
        self.callbacks.hurry()
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
        self.check(callbacks[1], CallbackState.GIVEN_UP, 1, "the service was stopped")
        self.check(callbacks[2], CallbackState.GIVEN_UP, 1, "the service was stopped")
        self.assertEqual(self.callbacks.ended, {CallbackState.GIVEN_UP: 4})
        self.nothing_left()


class OpenTests(SynchronousTestCase):
    """From settings."""

    def open(self, settings: CallbackSettings) -> Callbacks:
        """Return what a daemon with these settings has."""
        reactor: Any = MemoryReactorClock()
        return open_callbacks(settings, {}, FakeResolver(), reactor, bytes, lambda: 0, alone=True)

    def test_disabled(self) -> None:
        """Without being enabled nobody can have one, whatever else is set, and nothing is read."""
        callbacks = self.open(CallbackSettings(secrets="/nonexistent"))
        self.assertRaises(InvalidField, callbacks.expect, URL, "")
        self.assertEqual(list(callbacks.rereadings(CallbackSettings())), [])

    def test_secrets(self) -> None:
        """What stands in the file counts from the start."""
        secrets = Path(self.mktemp())
        secrets.write_text(f"* {written(OLD)}")
        callbacks = self.open(CallbackSettings(True, str(secrets)))
        self.assertEqual(callbacks.expect(URL, "").url, URL)

    def test_without_secrets(self) -> None:
        """Callbacks that cannot be signed stop the start."""
        for settings in (CallbackSettings(True), CallbackSettings(True, "/nonexistent")):
            error = self.assertRaises(ConfigurationError, self.open, settings)
            self.assertTrue(str(error).startswith("callbacks.secrets: "), str(error))
