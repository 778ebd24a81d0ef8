"""`deferreds`: waiting in coroutines."""

from __future__ import annotations

import errno
import gc
import threading
import weakref

from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase

from tawebeval.deferreds import Condition, OneShot, WorkerThreads, wait_shielded
from tests.cases.own_python import run_script
from tests.cases.patience import PATIENCE


class SignalTests(SynchronousTestCase):
    """What happens again and again."""

    def test_wakes_all_in_order(self) -> None:
        """Whoever waits is woken, the first first, and with the value."""
        signal: Condition[int] = Condition()
        woken: list[tuple[str, int]] = []
        for name in "abc":
            signal.wait().addCallback(lambda value, name=name: woken.append((name, value)))
        signal.notify(5)
        self.assertEqual(woken, [("a", 5), ("b", 5), ("c", 5)])
        self.assertEqual(len(signal), 0)

    def test_wakes_once(self) -> None:
        """A firing is for those who wait at that moment, not for later ones or those of before."""
        signal: Condition[int] = Condition()
        first = signal.wait()
        signal.notify(1)
        second = signal.wait()
        self.assertNoResult(second)
        signal.notify(2)
        self.assertEqual((self.successResultOf(first), self.successResultOf(second)), (1, 2))

    def test_wait_again_when_woken(self) -> None:
        """Who waits again as soon as it is woken waits for the next firing."""
        signal: Condition[int] = Condition()
        again: list[Deferred[int]] = []
        signal.wait().addCallback(lambda _: again.append(signal.wait()))
        signal.notify(1)
        self.assertNoResult(again[0])
        self.assertEqual(len(signal), 1)

    def test_cancel(self) -> None:
        """A cancelled wait leaves nothing behind and disturbs nobody."""
        signal: Condition[int] = Condition()
        cancelled, other = signal.wait(), signal.wait()
        cancelled.cancel()
        self.failureResultOf(cancelled, CancelledError)
        self.assertEqual(len(signal), 1)
        signal.notify(3)
        self.assertEqual(self.successResultOf(other), 3)

    def test_cancel_by_one_woken_before(self) -> None:
        """Who is cancelled by another one who was just woken is not woken, too."""
        for event in (Condition[int](), OneShot[int]()):
            first, second = event.wait(), event.wait()
            second.addErrback(lambda failure: str(failure.trap(CancelledError).__name__))
            first.addCallback(lambda _, second=second: second.cancel())
            (event.notify if isinstance(event, Condition) else event.set)(1)
            self.assertEqual(self.successResultOf(second), "CancelledError")


class LatchTests(SynchronousTestCase):
    """What happens once."""

    def test_cancel(self) -> None:
        """A cancelled wait leaves nothing behind and disturbs nobody."""
        latch: OneShot[int] = OneShot()
        cancelled, other = latch.wait(), latch.wait()
        cancelled.cancel()
        self.failureResultOf(cancelled, CancelledError)
        kept = weakref.ref(cancelled)
        del cancelled
        gc.collect()
        self.assertIsNone(kept())
        latch.set(3)
        self.assertEqual(self.successResultOf(other), 3)
        self.assertEqual(self.successResultOf(latch.wait()), 3)

    def test_waiting(self) -> None:
        """Those who wait before and those who wait after get the same value."""
        latch: OneShot[str] = OneShot()
        before = [latch.wait(), latch.wait()]
        self.assertFalse(latch.is_set)
        latch.set("x")
        self.assertTrue(latch.is_set)
        for waiter in (*before, latch.wait()):
            self.assertEqual(self.successResultOf(waiter), "x")

    def test_first_value_stays(self) -> None:
        """To set it again changes nothing."""
        latch: OneShot[str] = OneShot()
        latch.set("x")
        latch.set("y")
        self.assertEqual(self.successResultOf(latch.wait()), "x")

    def test_none_is_a_value(self) -> None:
        """A latch of None is set all the same."""
        latch: OneShot[None] = OneShot()
        latch.set(None)
        self.assertTrue(latch.is_set)
        self.assertIsNone(self.successResultOf(latch.wait()))

    def test_own_deferred(self) -> None:
        """What one waiter makes of its value is not seen by another one."""
        latch: OneShot[int] = OneShot()
        first, second = latch.wait(), latch.wait()
        first.addCallback(lambda value: value + 1)
        latch.set(1)
        self.assertEqual((self.successResultOf(first), self.successResultOf(second)), (2, 1))


class TellTests(SynchronousTestCase):
    """Being told without a Deferred."""

    def test_told_once(self) -> None:
        """Who is to be told is told when it happens, once, with its value."""
        latch: OneShot[str] = OneShot()
        told: list[str] = []
        latch.add_callback(told.append)
        self.assertEqual(told, [])
        latch.set("x")
        latch.set("y")
        self.assertEqual(told, ["x"])

    def test_told_late(self) -> None:
        """Who asks when it has happened is told at once."""
        latch: OneShot[str] = OneShot()
        latch.set("x")
        told: list[str] = []
        latch.add_callback(told.append)
        self.assertEqual(told, ["x"])

    def test_order(self) -> None:
        """In the order in which they asked, those with a Deferred among them."""
        latch: OneShot[str] = OneShot()
        told: list[str] = []
        latch.add_callback(lambda value: told.append(f"first {value}"))
        latch.wait().addCallback(lambda value: told.append(f"second {value}"))
        latch.add_callback(lambda value: told.append(f"third {value}"))
        latch.set("x")
        self.assertEqual(told, ["first x", "second x", "third x"])

    def test_cancels_another(self) -> None:
        """Who is told may cancel who waits after it."""
        latch: OneShot[str] = OneShot()
        latch.add_callback(lambda value: waiting.cancel())
        waiting = latch.wait()
        latch.set("x")
        self.failureResultOf(waiting, CancelledError)


class CompletedTests(SynchronousTestCase):
    """Waiting come what may."""

    def setUp(self) -> None:
        self.latch: OneShot[str] = OneShot()
        self.cancels = 0

    def start(self) -> Deferred[str]:
        """Begin to wait, counting how often the cancellation is passed on."""

        def cancel() -> None:
            self.cancels += 1

        return Deferred.fromCoroutine(wait_shielded(self.latch, cancel))

    def test_value(self) -> None:
        """Left alone, it is the latch's value."""
        waiting = self.start()
        self.assertNoResult(waiting)
        self.latch.set("x")
        self.assertEqual(self.successResultOf(waiting), "x")
        self.assertEqual(self.cancels, 0)

    def test_cancel(self) -> None:
        """A cancellation is passed on at once, and raised when the latch is set, not before."""
        waiting = self.start()
        waiting.cancel()
        self.assertEqual(self.cancels, 1)
        self.assertNoResult(waiting)
        self.latch.set("x")
        self.failureResultOf(waiting, CancelledError)

    def test_cancel_repeatedly(self) -> None:
        """Impatience shortens nothing, and is passed on once."""
        waiting = self.start()
        for _ in range(3):
            waiting.cancel()
        self.assertNoResult(waiting)
        self.assertEqual(self.cancels, 1)
        self.latch.set("x")
        self.failureResultOf(waiting, CancelledError)

    def test_set_by_the_cancellation(self) -> None:
        """The latch may be set by what the cancellation is passed on to."""
        waiting = Deferred.fromCoroutine(wait_shielded(self.latch, lambda: self.latch.set("x")))
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)


class ThreadsTests(TestCase):
    """Calls in real threads."""

    def setUp(self) -> None:
        self.threads = WorkerThreads.create(reactor, 2, "test")
        self.threads.start()
        self.addCleanup(self.threads.stop)

    async def test_result(self) -> None:
        """The call's result comes back, and it was made in another thread."""

        def call(a: int, *, b: int) -> tuple[int, int]:
            return a + b, threading.get_ident()

        total, thread = await self.threads.run(call, 1, b=2)
        self.assertEqual(total, 3)
        self.assertNotEqual(thread, threading.get_ident())

    async def test_own(self) -> None:
        """A pool whose threads are all held up keeps no other one from its work, just its own."""
        may_go_on = threading.Event()
        other = WorkerThreads.create(reactor, 1, "other")
        other.start()
        self.addCleanup(other.stop)
        at_work: set[int] = set()

        def work() -> bool:
            at_work.add(threading.get_ident())
            return may_go_on.wait(PATIENCE)

        busy = [Deferred.fromCoroutine(self.threads.run(work)) for _ in range(3)]
        try:
            self.assertNotEqual(await other.run(threading.get_ident), threading.get_ident())
            self.assertEqual([one.called for one in busy], [False] * 3)
        finally:
            may_go_on.set()
        for one in busy:
            self.assertTrue(await one)
        self.assertLessEqual(len(at_work), 2)

    async def test_before_the_start(self) -> None:
        """What is called before waits; no thread is there before, or after the end."""
        before = threading.active_count()
        early = WorkerThreads.create(reactor, 1, "early")
        waiting = Deferred.fromCoroutine(early.run(threading.get_ident))
        self.assertEqual(threading.active_count(), before)
        self.assertNoResult(waiting)
        early.start()
        await waiting
        early.stop()
        self.assertEqual(threading.active_count(), before)

    async def test_no_more_threads(self) -> None:
        """Where no more can be made all that were wanted are there: they were made at the start."""
        self.patch(threading.Thread, "start", self.refuse)
        both = threading.Barrier(2, timeout=PATIENCE)
        calls = [Deferred.fromCoroutine(self.threads.run(both.wait)) for _ in range(2)]
        self.assertEqual({await call for call in calls}, {0, 1})

    def refuse(self, *_: object) -> None:
        """Make no thread, as Python says it."""
        raise RuntimeError("can't start new thread")

    def test_too_few_threads(self) -> None:
        """A start without them fails, and what it has made ends."""
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

    def test_never_stopped(self) -> None:
        """A process whose start has failed after theirs ends all the same."""
        script = (
            "from twisted.internet import reactor\n"
            "from tawebeval.deferreds import WorkerThreads\n"
            "WorkerThreads.create(reactor, 2, 'work').start()\n"
            "raise SystemExit('a later part has failed')\n"
        )
        done = run_script(script)
        self.assertEqual((done.returncode, done.stderr), (1, "a later part has failed\n"))

    async def test_error(self) -> None:
        """So does what it raises."""
        with self.assertRaises(ZeroDivisionError):
            await self.threads.run(lambda: 1 // 0)

    async def test_cancel(self) -> None:
        """A cancellation is raised only when the call has returned."""
        may_go_on, returned = threading.Event(), threading.Event()

        def call() -> None:
            may_go_on.wait(PATIENCE)
            returned.set()

        running = Deferred.fromCoroutine(self.threads.run(call))
        running.cancel()
        self.assertNoResult(running)
        may_go_on.set()
        with self.assertRaises(CancelledError):
            await running
        self.assertTrue(returned.is_set())

    async def test_cancel_what_fails(self) -> None:
        """Who has cancelled a call learns of that, also when the call fails after all."""
        may_go_on = threading.Event()

        def call() -> None:
            may_go_on.wait(PATIENCE)
            raise OSError

        running = Deferred.fromCoroutine(self.threads.run(call))
        running.cancel()
        may_go_on.set()
        with self.assertRaises(CancelledError):
            await running
