"""`core.expiry_clock`: a time of day that is set while a process runs, or between two."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.expiry_clock import CONFIRMATION_SECONDS, ExpiryClock

DAY = 86400.0
NOW = 20_000 * DAY


class ExpiryClockTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.booted, self.offset = 0.0, NOW
        self.clock = self.make()

    def make(self, earliest: float | None = None, ahead: float = 0.0) -> ExpiryClock:
        return ExpiryClock(lambda: self.booted + self.offset, lambda: self.booted, earliest, ahead)

    def check(self, wanted: float, passed: float = 0) -> None:
        """Hold that the clock shows `wanted` seconds more than at first after `passed` seconds."""
        self.booted += passed
        self.assertEqual(self.clock.read() - NOW, wanted)

    def test_step_forward_counts_after_a_day(self) -> None:
        self.check(10, passed=10)
        self.offset += 60
        self.check(70)
        self.offset += 100 * DAY
        self.check(70)
        self.check(70 + CONFIRMATION_SECONDS - 1, passed=CONFIRMATION_SECONDS - 1)
        self.check(70 + CONFIRMATION_SECONDS + 100 * DAY, passed=1)

    def test_step_back_counts_at_once(self) -> None:
        self.offset += 100 * DAY
        self.check(0)
        self.offset -= 100 * DAY
        self.check(5, passed=5)
        self.offset -= 7 * DAY
        self.check(5 - 7 * DAY)
        self.offset += 100 * DAY
        self.check(5 - 7 * DAY)
        self.check(6 - 7 * DAY, passed=1)  # the day begins again

    def test_step_during_a_restart_counts_as_without_it(self) -> None:
        self.booted, self.offset = 5.0, NOW + 100 * DAY
        self.clock = self.make(NOW)
        self.check(0)
        self.check(1, passed=1)
        self.offset = NOW - DAY
        self.clock = self.make(NOW)
        self.check(6 - DAY)

    def test_day_goes_on_after_a_restart(self) -> None:
        self.offset += 100 * DAY
        self.check(0)
        self.check(0.5 * DAY, passed=0.5 * DAY)
        ahead = self.clock.seconds_ahead
        self.assertEqual(ahead, 0.5 * DAY)
        self.clock = self.make(self.clock.read(), ahead)
        self.check(0.5 * DAY)
        self.check(101 * DAY, passed=0.5 * DAY)
        self.assertEqual(self.clock.seconds_ahead, 0)
        self.clock = self.make(NOW + 101 * DAY, ahead)
        self.check(101 * DAY)
        self.offset += 100 * DAY
        self.check(101.5 * DAY, passed=0.5 * DAY)
        self.check(102 * DAY, passed=0.5 * DAY)
