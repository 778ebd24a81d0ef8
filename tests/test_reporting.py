"""`daemon.reporting`: what systemd is told, and when, over the life of the daemon."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import CallbackSettings, Configuration, Evaluations, Service
from tawebeval.daemon.reporting import Reporting, longest_stop
from tawebeval.daemon.systemd import Supervisor


@attrs.frozen
class FakeSupervisor(Supervisor):
    """Keeps what it is told."""

    told: list[str] = attrs.field(factory=list)

    def tell(self, *notices: str) -> None:
        self.told.append(" ".join(notices))


class ReportingTests(SynchronousTestCase):
    """The service, on a reactor in memory."""

    def setUp(self) -> None:
        self.reactor: Any = MemoryReactorClock()
        self.counts = (0, 0)
        self.obstacles: list[str] = []
        self.longest = 20.0

    def start(self, **changes: Any) -> list[str]:
        """Start the service; return what it tells, to be emptied by the test."""
        supervisor = FakeSupervisor(**{"address": "/notify", "watchdog": 30, **changes})
        self.service = Reporting(
            supervisor,
            lambda: self.counts,
            lambda: self.obstacles,
            lambda: self.longest,
            self.reactor,
        )
        self.service.startService()
        return supervisor.told

    def run_reactor(self) -> None:
        """Let the reactor begin to turn."""
        for call, args, kwargs in self.reactor.whenRunningHooks:
            call(*args, **kwargs)

    def take(self, told: list[str]) -> list[str]:
        """Return what was told since the last time."""
        taken = told.copy()
        told.clear()
        return taken

    def test_ready(self) -> None:
        """Ready is what serves: nothing is told before the reactor runs."""
        told = self.start()
        self.assertEqual(told, [])
        self.run_reactor()
        self.assertEqual(told, ["READY=1", "WATCHDOG=1 STATUS=0 running, 0 queued"])

    def test_life(self) -> None:
        """Each second there is a sign of life, and what has changed beside it."""
        told = self.start()
        self.run_reactor()
        self.take(told)
        self.reactor.advance(1)
        self.assertEqual(self.take(told), ["WATCHDOG=1"])
        self.counts = (2, 5)
        self.reactor.pump([1, 1])
        self.assertEqual(self.take(told), ["WATCHDOG=1 STATUS=2 running, 5 queued", "WATCHDOG=1"])

    def test_not_ready(self) -> None:
        """Why no work would be taken is told with the rest, until it is over."""
        told = self.start(watchdog=None)
        self.run_reactor()
        self.take(told)
        self.obstacles = ["the disk is full", "the queue is full"]
        self.reactor.pump([1, 1])
        not_ready = "STATUS=0 running, 0 queued; not ready: the disk is full; the queue is full"
        self.assertEqual(self.take(told), [not_ready])
        self.obstacles = []
        self.reactor.advance(1)
        self.assertEqual(self.take(told), ["STATUS=0 running, 0 queued"])

    def test_impatient(self) -> None:
        """A watchdog that waits for less than two seconds is told in half of its time."""
        told = self.start(watchdog=0.4)
        self.run_reactor()
        self.take(told)
        self.reactor.pump([0.2, 0.2])
        self.assertEqual(self.take(told), ["WATCHDOG=1"] * 2)

    def test_no_watchdog(self) -> None:
        """Where nobody watches only changes are told."""
        told = self.start(watchdog=None)
        self.run_reactor()
        self.assertEqual(self.take(told), ["READY=1", "STATUS=0 running, 0 queued"])
        self.reactor.pump([1, 1])
        self.assertEqual(told, [])

    def test_stop(self) -> None:
        """The stop is told before anything is stopped, with its time, and life goes on until."""
        told = self.start()
        self.run_reactor()
        self.longest = 44.0
        self.counts = (3, 0)
        self.obstacles = ["the service is about to stop"]
        self.take(told)
        for call, args, kwargs in self.reactor.triggers["before"]["shutdown"]:
            call(*args, **kwargs)
        self.assertEqual(
            self.take(told),
            [
                "STOPPING=1 EXTEND_TIMEOUT_USEC=44000000",
                "WATCHDOG=1 STATUS=stopping: 3 running, 0 queued",
            ],
        )
        self.reactor.advance(1)
        self.assertEqual(self.take(told), ["WATCHDOG=1"])
        self.service.stopService()
        self.reactor.advance(5)
        self.assertEqual(told, [])
        self.assertFalse(self.service.running)

    def test_stopped_early(self) -> None:
        """It can be stopped before the reactor has run."""
        self.start()
        self.service.stopService()
        self.assertFalse(self.service.running)

    def test_nobody(self) -> None:
        """Without systemd nothing is done at all."""
        told = self.start(address=None)
        self.run_reactor()
        self.reactor.advance(5)
        self.assertEqual((told, self.reactor.triggers), ([], {}))
        self.service.stopService()


class LongestStopTests(SynchronousTestCase):
    """How long a stop may take."""

    def test_settings(self) -> None:
        """All that is waited for by configuration, and some seconds for readers."""
        settings = Configuration(
            service=Service(drain=100),
            evaluations=Evaluations(grace=7),
            callbacks=CallbackSettings(timeout=20),
        )
        self.assertEqual(longest_stop(settings), 118)

    def test_callbacks(self) -> None:
        """Their last attempts are waited for, where there are any."""
        without = longest_stop(Configuration())
        settings = CallbackSettings(enabled=True, timeout=20)
        self.assertEqual(longest_stop(Configuration(callbacks=settings)), without + 20)
