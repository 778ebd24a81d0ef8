"""`daemon.monotonic`: timers are not moved when somebody sets the time of day."""

from __future__ import annotations

import time

from twisted.internet.base import ReactorBase
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon.monotonic import count_monotonically

DAY = 86400.0


class Reactor(ReactorBase):
    """One of Twisted's own that nothing wakes, at a time of day that a test sets."""

    def __init__(self) -> None:
        self.time_of_day = 1e9
        self.seconds = lambda: self.time_of_day  # type: ignore[method-assign]
        super().__init__()

    def installWaker(self) -> None:
        """Install none."""


class MonotonicTests(SynchronousTestCase):
    """Timers of a reactor while clocks are moved."""

    def setUp(self) -> None:
        self.monotonic = 50.0
        self.patch(time, "monotonic", lambda: self.monotonic)
        self.reactor = Reactor()
        self.rung: list[str] = []

    def ring(self, name: str, after: float) -> None:
        """Let `name` be noted in so many seconds."""
        self.reactor.callLater(after, self.rung.append, name)

    def check(self, *names: str) -> None:
        """Hold that just these timers have come by now."""
        self.reactor.runUntilCurrent()
        self.assertEqual(self.rung, list(names))

    def test_time_of_day(self) -> None:
        """Neither a day forward nor a year back moves a timer; the monotonic clock does."""
        count_monotonically(self.reactor)
        self.ring("timer", 10)
        for jump in (DAY, -365 * DAY):
            self.reactor.time_of_day += jump
            self.check()
            self.assertEqual(self.reactor.timeout(), 10)
        self.monotonic += 9.9
        self.check()
        self.monotonic += 0.2
        self.check("timer")

    def test_pending(self) -> None:
        """Timers that were set before keep what is left of their time, in their order."""
        self.ring("second", 20)
        self.ring("first", 10)
        self.reactor.time_of_day += 5
        count_monotonically(self.reactor)
        self.reactor.time_of_day += DAY
        self.check()
        self.monotonic += 5.1
        self.check("first")
        self.monotonic += 10
        self.check("first", "second")

    def test_overdue(self) -> None:
        """One that was due already comes at once."""
        self.ring("late", 1)
        self.reactor.time_of_day += 5
        count_monotonically(self.reactor)
        self.check("late")

    def test_again(self) -> None:
        """To do it twice changes nothing."""
        count_monotonically(self.reactor)
        self.ring("timer", 10)
        count_monotonically(self.reactor)
        self.check()
        self.monotonic += 10.1
        self.check("timer")
