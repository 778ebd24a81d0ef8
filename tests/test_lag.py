"""`daemon.lag`: how late the reactor is."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon.lag import Lag


class LagTests(SynchronousTestCase):
    """Looks at a clock."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.lag = Lag(self.clock)

    @property
    def looks(self) -> int:
        """How often it has looked."""
        return list(self.lag.seconds.cumulative())[-1][1]

    def test_in_time(self) -> None:
        """A reactor in time is not late, twice a second."""
        self.lag.startService()
        self.clock.pump([0.5] * 4)
        self.assertEqual((self.looks, self.lag.seconds.sum), (4, 0))

    def test_late(self) -> None:
        """What blocks the reactor shows in full."""
        self.lag.startService()
        self.clock.advance(2.0)
        self.assertEqual((self.looks, self.lag.seconds.sum), (1, 1.5))

    def test_put_back(self) -> None:
        """A clock that is put back does not make it early."""
        self.lag.startService()
        self.clock.rightNow = -10.0
        (call,) = self.clock.getDelayedCalls()
        call.func(*call.args)
        self.assertEqual((self.looks, self.lag.seconds.sum), (1, 0))

    def test_stop(self) -> None:
        """After its end it looks no more."""
        self.lag.startService()
        self.lag.stopService()
        self.assertEqual(self.clock.getDelayedCalls(), [])
        Lag(self.clock).stopService()  # also if it never began
