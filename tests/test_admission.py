"""`tawebeval.admission`: places to run, and the queue for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.admission import Queue


class QueueTests(SynchronousTestCase):
    """Two places to run, two to wait."""

    def setUp(self) -> None:
        self.queue = Queue(2, 2)

    def test_places(self) -> None:
        """As many as there are places are let in at once, and the others when one leaves."""
        entered = [self.queue.enter(name) for name in "abcd"]
        self.successResultOf(entered[0])
        self.successResultOf(entered[1])
        self.assertNoResult(entered[2])
        self.queue.leave("b")
        self.successResultOf(entered[2])
        self.assertNoResult(entered[3])
        self.queue.leave("c")
        self.successResultOf(entered[3])

    def test_full(self) -> None:
        """It is full when nobody more can run or wait, and only then."""
        for name in "abcd":
            self.assertFalse(self.queue.full())
            self.queue.enter(name)
        self.assertTrue(self.queue.full())
        self.queue.leave("a")
        self.assertFalse(self.queue.full())

    def test_nobody_may_wait(self) -> None:
        """Where none may wait it is full when all places are taken, not before."""
        queue = Queue(1, 0)
        self.assertFalse(queue.full())
        self.successResultOf(queue.enter("a"))
        self.assertTrue(queue.full())
        queue.leave("a")
        self.assertFalse(queue.full())

    def test_place(self) -> None:
        """The place of one who waits is the number of those before; others have none."""
        for name in "abcd":
            self.queue.enter(name)
        places = [self.queue.place(name) for name in ("a", "c", "d", "x")]
        self.assertEqual(places, [None, 0, 1, None])
        self.queue.leave("a")
        self.assertEqual((self.queue.place("c"), self.queue.place("d")), (None, 0))

    def test_give_up(self) -> None:
        """Who gives up waiting makes room, and is not let in later."""
        _, _, third, fourth = [self.queue.enter(name) for name in "abcd"]
        third.cancel()
        self.failureResultOf(third, CancelledError)
        self.assertEqual((self.queue.full(), self.queue.place("d")), (False, 0))
        self.queue.leave("a")
        self.successResultOf(fourth)
        self.queue.leave("b")
        self.queue.leave("d")
        self.assertEqual(self.queue.place("c"), None)

    def test_leave_at_once(self) -> None:
        """One who leaves as soon as it is let in lets the next one in."""
        for name in "ab":
            self.queue.enter(name)
        third = self.queue.enter("c").addCallback(lambda _: self.queue.leave("c"))
        fourth = self.queue.enter("d")
        self.queue.leave("a")
        self.successResultOf(third)
        self.successResultOf(fourth)

    @given(
        st.integers(1, 3), st.lists(st.tuples(st.sampled_from(["leave", "give up"]), st.booleans()))
    )
    def test_order(self, running: int, steps: list[tuple[str, bool]]) -> None:
        """Whoever comes and goes: first come, first let in, and never too many."""
        queue = Queue(running, 100)
        inside: list[str] = []
        waiting: dict[str, Deferred[None]] = {}

        def enter(name: str) -> None:
            place = queue.enter(name).addCallback(lambda _: inside.append(name))
            place.addErrback(lambda failure: failure.trap(CancelledError))
            if name not in inside:
                waiting[name] = place

        for number, (step, first) in enumerate(steps):
            enter(str(number))
            if step == "leave" and inside:
                queue.leave(inside.pop(0 if first else -1))
                if waiting:
                    name = next(iter(waiting))
                    self.assertEqual(inside[-1], name)
                    del waiting[name]
            elif waiting:
                waiting.pop(list(waiting)[0 if first else -1]).cancel()
            self.assertLessEqual(len(inside), running)
            self.assertEqual(len(inside) < running and bool(waiting), False)
            self.assertEqual([queue.place(name) for name in waiting], list(range(len(waiting))))
