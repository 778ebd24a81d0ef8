"""`daemon.retrial`: a sandbox that has failed is tried until it works, and only then."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.tally import EvaluationTally
from tawebeval.daemon.retrial import PERIOD, Retrial
from tawebeval.deferreds import Threads
from tawebeval.errors import Problem
from tests.fakes import InlineThreads, SlowThreads

FAULT = "the sandbox could not be started"


class RetrialTests(SynchronousTestCase):
    """The service, on a clock, with threads that take their time."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.tally = EvaluationTally()
        self.threads: Any = SlowThreads()
        self.outcome: Problem | Exception | None = None
        self.service = Retrial(self.tally, self.trial, self.threads, self.clock)
        self.service.startService()
        self.addCleanup(lambda: self.service.running and self.service.stopService())

    def trial(self) -> Problem | None:
        """End as the test wants."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def lose(self) -> None:
        """Have an evaluation lost."""
        self.tally.judge(FAULT, self.clock.seconds())

    def try_once(self) -> list[str]:
        """Let the time for a trial come, and the trial end; return what is logged."""
        with capturedLogs() as logged:
            self.clock.advance(PERIOD)
            self.assertEqual(len(self.threads.waiting), 1)
            self.threads.step()
        return [str(formatEvent(event)) for event in logged]

    def test_well(self) -> None:
        """As long as nothing is wrong nothing is tried."""
        self.clock.pump([PERIOD] * 3)
        self.assertEqual(self.threads.waiting, [])

    def test_mended(self) -> None:
        """A trial that succeeds shows that work can be taken again."""
        self.lose()
        (said,) = self.try_once()
        self.assertIn(FAULT, said)
        self.assertIsNone(self.tally.fault)
        self.clock.pump([PERIOD] * 3)
        self.assertEqual(self.threads.waiting, [])

    def test_broken(self) -> None:
        """One that fails changes nothing, is told once, and comes again."""
        self.lose()
        fault = self.tally.fault
        self.outcome = ("no bwrap", "install it")
        self.assertEqual(self.try_once(), ["the sandbox does not work: no bwrap; install it"])
        self.assertEqual(self.try_once(), [])
        self.assertIs(self.tally.fault, fault)
        self.outcome = None
        self.try_once()
        self.assertIsNone(self.tally.fault)
        self.lose()
        self.outcome = ("no bwrap", "install it")
        self.assertEqual(len(self.try_once()), 1)

    def test_one_at_a_time(self) -> None:
        """However long a trial takes, no other begins meanwhile."""
        self.lose()
        self.clock.pump([PERIOD] * 4)
        self.assertEqual(len(self.threads.waiting), 1)
        self.threads.step()
        self.assertIsNone(self.tally.fault)

    def test_overtaken(self) -> None:
        """An evaluation that ends while it is tried knows better, be it well or lost."""
        self.lose()
        self.clock.advance(PERIOD)
        self.lose()
        self.threads.step()
        self.assertIsNotNone(self.tally.fault)

    def test_defect(self) -> None:
        """A trial that cannot be made at all is logged, and comes again."""
        self.service.stopService()
        self.service = Retrial(self.tally, self.trial, cast(Threads, InlineThreads()), self.clock)
        self.service.startService()
        self.lose()
        self.outcome = ZeroDivisionError()
        self.clock.advance(PERIOD)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.outcome = None
        self.clock.advance(PERIOD)
        self.assertIsNone(self.tally.fault)

    def test_stopped(self) -> None:
        """After the stop nothing is tried."""
        self.lose()
        self.service.stopService()
        self.clock.pump([PERIOD] * 2)
        self.assertEqual((self.threads.waiting, self.clock.getDelayedCalls()), ([], []))
