"""`daemon.housekeeping`: all chores are done once a second, also after one that failed."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon.housekeeping import keep_house


class HousekeepingTests(SynchronousTestCase):
    """Chores that note that they were done, or fail."""

    def test_chores(self) -> None:
        """One that fails is logged, and neither ends the others nor is given up itself."""
        clock, done = Clock(), []

        def first() -> None:
            done.append("first")
            raise ZeroDivisionError

        def second() -> None:
            done.append("second")

        service = keep_house((first, second), clock)
        service.startService()
        for _ in range(2):
            clock.advance(1)
        self.assertEqual(done, ["first", "second"] * 3)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 3)
        service.stopService()
        clock.advance(5)
        self.assertEqual(len(done), 6)
        self.assertEqual(clock.getDelayedCalls(), [])
