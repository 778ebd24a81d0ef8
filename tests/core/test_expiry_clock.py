"""`core.expiry_clock`: a time of day that is set while a process runs."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.expiry_clock import CONFIRMATION_SECONDS, ExpiryClock

DAY = 86400.0
NOW = 20_000 * DAY


class ExpiryClockTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.booted, self.offset = 0.0, NOW
        self.clock = ExpiryClock(lambda: self.booted + self.offset, lambda: self.booted)

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
