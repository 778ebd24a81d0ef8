"""`web.server.deadlines`: what is to be done in time, with as few timers as can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.web.server.deadlines import Deadline

# None is `never`; so many seconds pass after each step.
STEPS = st.lists(st.tuples(st.none() | st.integers(1, 30), st.integers(0, 40)), max_size=20)


class DeadlineTests(SynchronousTestCase):
    """One deadline."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.deadline = Deadline(self.clock)
        self.late: list[float] = []

    def pass_by(self) -> None:
        """Note when the deadline has passed."""
        self.late.append(self.clock.seconds())

    @given(STEPS)
    def test_as_a_timer_that_is_cancelled(self, steps: list[tuple[int | None, int]]) -> None:
        """It calls when a timer would that each step cancels and makes anew."""
        self.setUp()
        expected: list[float] = []
        model = Clock()
        timer: IDelayedCall | None = None
        for seconds, pause in steps:
            if timer is not None and timer.active():
                timer.cancel()
            if seconds is None:
                self.deadline.never()
            else:
                self.deadline.within(seconds, self.pass_by)
                timer = model.callLater(seconds, lambda: expected.append(model.seconds()))
            for _ in range(pause):
                model.advance(1)
                self.clock.advance(1)
                self.assertEqual(self.deadline.set, timer is not None and bool(timer.active()))
                self.assertLessEqual(len(self.clock.getDelayedCalls()), 1)
        self.assertEqual(self.late, expected)
        self.deadline.end()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_timers(self) -> None:
        """While it is put off again and again, a timer is made only when the last one was due."""
        made = []
        start = self.clock.callLater

        def count(*arguments: object) -> IDelayedCall:
            made.append(arguments)
            return start(*arguments)  # type: ignore[arg-type]

        self.patch(self.clock, "callLater", count)
        for _ in range(1000):
            for seconds in (60, 20, 30):
                self.deadline.within(seconds, self.pass_by)
            self.deadline.never()
            self.clock.advance(0.1)
        self.assertLess(len(made), 20)
        self.assertEqual(self.late, [])

    def test_what_comes_last(self) -> None:
        """What was asked for last is called, and may ask for more."""
        self.deadline.within(5, self.pass_by)
        self.deadline.within(5, lambda: self.deadline.within(7, self.pass_by))
        self.clock.pump([1] * 30)
        self.assertEqual(self.late, [12])

    def test_end(self) -> None:
        """At the end nothing is called, and no timer is left."""
        self.deadline.within(5, self.pass_by)
        self.deadline.end()
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.clock.advance(10)
        self.assertEqual(self.late, [])
