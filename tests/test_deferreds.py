"""`deferreds`: coroutines that wait, threads and single-flight."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from functools import partial
from unittest.mock import Mock

from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from tawebeval.deferreds import Condition, OneShotEvent, WorkerThreads, wait_despite_cancellation
from tests.cases.own_python import run_script
from tests.cases.patience import PATIENCE


class ConditionTests(SynchronousTestCase):
    """`Condition`: an event that happens again and again."""

    def test_waiters_are_woken_in_order(self) -> None:
        condition = Condition()
        woken: list[str] = []
        for name in "abc":
            condition.wait().addCallback(lambda _, name=name: woken.append(name))
        condition.notify()
        self.assertEqual((woken, len(condition)), (["a", "b", "c"], 0))

    def test_woken_waiter_waits_for_the_next_notification(self) -> None:
        condition = Condition()
        again: list[Deferred[None]] = []
        condition.wait().addCallback(lambda _: again.append(condition.wait()))
        condition.notify()
        self.assertNoResult(again[0])
        self.assertEqual(len(condition), 1)

    def test_cancelled_wait_leaves_nothing_behind(self) -> None:
        condition = Condition()
        cancelled, other = condition.wait(), condition.wait()
        cancelled.cancel()
        self.failureResultOf(cancelled, CancelledError)
        self.assertEqual(len(condition), 1)
        condition.notify()
        self.successResultOf(other)

    def test_wait_ends_by_a_notification_or_after_its_time(self) -> None:
        condition, clock = Condition(), Clock()
        woken, late, cancelled = (condition.wait_up_to(2, clock) for _ in range(3))
        cancelled.cancel()
        self.failureResultOf(cancelled, CancelledError)
        condition.notify()
        self.assertIs(self.successResultOf(woken), True)
        self.assertIs(self.successResultOf(late), True)
        self.assertEqual(clock.getDelayedCalls(), [])
        late = condition.wait_up_to(2, clock)
        clock.advance(1)
        self.assertNoResult(late)
        clock.advance(1)
        self.assertIs(self.successResultOf(late), False)
        self.assertEqual(len(condition), 0)

    def test_waiter_cancelled_by_an_earlier_callback_is_not_woken(self) -> None:
        condition, one_shot = Condition(), OneShotEvent[None]()
        for event, wake in (
            (condition, condition.notify),
            (one_shot, partial(one_shot.set_value, None)),
        ):
            first, second = event.wait(), event.wait()
            second.addErrback(lambda failure: str(failure.trap(CancelledError).__name__))
            first.addCallback(lambda _, second=second: second.cancel())
            wake()
            self.assertEqual(self.successResultOf(second), "CancelledError")


class OneShotTests(SynchronousTestCase):
    """`OneShotEvent`: an event that happens once."""

    def test_cancelled_wait_leaves_nothing_behind(self) -> None:
        event: OneShotEvent[int] = OneShotEvent()
        cancelled, other = event.wait(), event.wait()
        cancelled.cancel()
        self.failureResultOf(cancelled, CancelledError)
        kept = weakref.ref(cancelled)
        del cancelled
        gc.collect()
        self.assertIsNone(kept())
        event.set_value(3)
        self.assertEqual(self.successResultOf(other), 3)
        self.assertEqual(self.successResultOf(event.wait()), 3)

    def test_callback_of_one_waiter_does_not_change_the_value_of_another(self) -> None:
        event: OneShotEvent[int] = OneShotEvent()
        first, second = event.wait(), event.wait()
        first.addCallback(lambda value: value + 1)
        event.set_value(1)
        self.assertEqual((self.successResultOf(first), self.successResultOf(second)), (2, 1))


class CallbackTests(SynchronousTestCase):
    """`OneShotEvent.add_callback`: callbacks without a Deferred."""

    def test_callbacks_are_called_in_order(self) -> None:
        event: OneShotEvent[str] = OneShotEvent()
        told: list[str] = []
        event.add_callback(lambda value: told.append(f"first {value}"))
        event.wait().addCallback(lambda value: told.append(f"second {value}"))
        event.add_callback(lambda value: told.append(f"third {value}"))
        event.set_value("x")
        event.set_value("y")
        self.assertEqual(told, ["first x", "second x", "third x"])
        event.add_callback(told.append)
        self.assertEqual(told[3:], ["x"])


class WaitDespiteCancellationTests(SynchronousTestCase):
    """`wait_despite_cancellation`: waiting in spite of cancellations."""

    def setUp(self) -> None:
        self.event: OneShotEvent[str] = OneShotEvent()
        self.cancels = 0

    def start(self) -> Deferred[str]:
        """Start a wait that counts the calls of `cancel`."""

        def cancel() -> None:
            self.cancels += 1

        return Deferred.fromCoroutine(wait_despite_cancellation(self.event, cancel))

    def test_wait_despite_cancellation_calls_cancel_once(self) -> None:
        waiting = self.start()
        for _ in range(3):
            waiting.cancel()
        self.assertNoResult(waiting)
        self.assertEqual(self.cancels, 1)
        self.event.set_value("x")
        self.failureResultOf(waiting, CancelledError)


class ThreadsTests(TestCase):
    """`WorkerThreads`: calls in real threads."""

    def setUp(self) -> None:
        self.threads = WorkerThreads.create(reactor, 2, "test")
        self.threads.start()
        self.addCleanup(self.threads.stop)

    async def test_call_before_the_threads_start_runs_after_the_start(self) -> None:
        before = threading.active_count()
        early = WorkerThreads.create(reactor, 1, "early")
        waiting = Deferred.fromCoroutine(early.run_in_thread(threading.get_ident))
        self.assertEqual(threading.active_count(), before)
        self.assertNoResult(waiting)
        early.start()
        await waiting
        early.stop()
        self.assertEqual(threading.active_count(), before)

    async def test_thread_runs_the_next_call_if_a_result_cannot_be_delivered(self) -> None:
        def fail(*_: object) -> None:
            raise MemoryError

        threads = WorkerThreads.create(Mock(callFromThread=fail), 1, "one")
        threads.start()
        calls: list[int] = []
        for number in range(2):
            Deferred.fromCoroutine(threads.run_in_thread(calls.append, number))
        threads.stop()
        self.assertEqual(calls, [0, 1])
        self.assertEqual(len(self.flushLoggedErrors(MemoryError)), 2)

    async def test_start_makes_all_threads(self) -> None:
        self.patch(threading.Thread, "start", self.refuse)
        both = threading.Barrier(2, timeout=PATIENCE)
        calls = [Deferred.fromCoroutine(self.threads.run_in_thread(both.wait)) for _ in range(2)]
        self.assertEqual({await call for call in calls}, {0, 1})

    def refuse(self, *_: object) -> None:
        """Fail to start a thread, with Python's exception."""
        raise RuntimeError("can't start new thread")

    def test_start_without_enough_threads_fails_and_ends_them(self) -> None:
        before = threading.active_count()
        begin, made = threading.Thread.start, []

        def start(thread: threading.Thread) -> None:
            if made:
                self.refuse()
            made.append(thread)
            begin(thread)

        self.patch(threading.Thread, "start", start)
        others = WorkerThreads.create(reactor, 2, "others")
        with self.assertRaises(OSError) as caught:
            others.start()
        self.assertEqual(caught.exception.errno, errno.EAGAIN)
        self.assertEqual(caught.exception.strerror, "threads: can't start new thread")
        others.stop()
        self.assertEqual(threading.active_count(), before)

    def test_process_ends_without_a_stop(self) -> None:
        script = (
            "from twisted.internet import reactor\n"
            "from tawebeval.deferreds import WorkerThreads\n"
            "WorkerThreads.create(reactor, 2, 'work').start()\n"
            "raise SystemExit('a later part has failed')\n"
        )
        done = run_script(script)
        self.assertEqual((done.returncode, done.stderr), (1, "a later part has failed\n"))

    async def test_cancelled_call_raises_only_after_the_thread_succeeds_or_fails(self) -> None:
        for error in (None, OSError()):
            may_go_on, went_on = threading.Event(), threading.Event()

            def call(
                may_go_on: threading.Event = may_go_on,
                went_on: threading.Event = went_on,
                error: OSError | None = error,
            ) -> None:
                may_go_on.wait(PATIENCE)
                went_on.set()
                if error is not None:
                    raise error

            running = Deferred.fromCoroutine(self.threads.run_in_thread(call))
            running.cancel()
            self.assertNoResult(running)
            may_go_on.set()
            with self.assertRaises(CancelledError):
                await running
            self.assertTrue(went_on.is_set())

    async def test_result_comes_from_another_thread(self) -> None:
        def call(a: int, *, b: int) -> tuple[int, int]:
            return a + b, threading.get_ident()

        total, thread = await self.threads.run_in_thread(call, 1, b=2)
        self.assertEqual(total, 3)
        self.assertNotEqual(thread, threading.get_ident())
