"""`daemon.interrupts`: which signal stops the daemon, and which ones hurry it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon.interrupts import Interrupts

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class InterruptsTests(SynchronousTestCase):
    """A reactor that notes what it would stop for, and in `hurried` what follows."""

    def setUp(self) -> None:
        self.stops: list[int] = []
        self.calls: list[Callable[[], object]] = []
        self.hurried: list[str] = []
        for number in NUMBERS:
            self.addCleanup(signal.signal, number, signal.getsignal(number))
            signal.signal(number, lambda number, frame: self.stops.append(number))
        self.reactor: Any = MemoryReactorClock()
        self.reactor.callFromThread = self.calls.append
        self.interrupts = Interrupts(lambda: self.hurried.append("in a hurry"), self.reactor)
        self.interrupts.startService()

    def run_reactor(self) -> None:
        """Let it run, by which its own handlers of signals are there."""
        for hook, arguments, options in self.reactor.whenRunningHooks:
            hook(*arguments, **options)

    def test_two_in_a_row(self) -> None:
        """The first alone stops; the second counts though the stop has not begun yet."""
        for first in NUMBERS:
            for second in NUMBERS:
                self.setUp()
                self.run_reactor()
                signal.raise_signal(first)
                signal.raise_signal(second)
                self.assertEqual(self.stops, [first])
                self.assertEqual((len(self.calls), self.hurried), (1, []), "in the reactor")
                self.calls[0]()
                self.assertEqual(self.hurried, ["in a hurry"])

    def test_stopped_otherwise(self) -> None:
        """While the daemon stops for another reason the first one counts as the second."""
        self.run_reactor()
        ((begin, arguments, options),) = self.reactor.triggers["before"]["shutdown"]
        begin(*arguments, **options)
        signal.raise_signal(signal.SIGTERM)
        self.assertEqual((self.stops, len(self.calls)), ([], 1))

    def test_afterwards(self) -> None:
        """They stay taken when the service has stopped: the reactor may not have ended yet."""
        self.run_reactor()
        signal.raise_signal(signal.SIGTERM)
        self.interrupts.stopService()
        signal.raise_signal(signal.SIGTERM)
        self.assertEqual(self.stops, [signal.SIGTERM])

    def test_before(self) -> None:
        """Until the reactor runs they are nobody's here."""
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        self.assertEqual((self.stops, self.calls), ([signal.SIGTERM] * 2, []))

    def test_ignored(self) -> None:
        """What is ignored, as SIGINT is by what a shell starts in the background, stays so."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.run_reactor()
        self.assertIs(signal.getsignal(signal.SIGINT), signal.SIG_IGN)
