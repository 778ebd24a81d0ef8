"""`daemon.process`: allocator, garbage collector, clock and signals."""

from __future__ import annotations

import ctypes
import gc
import signal
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from twisted.internet.base import ReactorBase
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon.assembly import ShutdownSignals
from tawebeval.daemon.process import (
    exempt_objects_from_gc,
    ignore_sighup_and_sigusr1,
    keep_freed_memory,
    use_monotonic_clock,
)


class AllocatorTests(SynchronousTestCase):
    def test_both_thresholds_of_malloc_are_set(self) -> None:
        options: list[tuple[int, int]] = []
        library = SimpleNamespace(mallopt=lambda *option: options.append(option) or 1)
        self.patch(ctypes, "CDLL", lambda name: library)
        keep_freed_memory()
        # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD: one without the other makes glibc slower.
        self.assertEqual(options, [(-1, 16 * 2**20), (-3, 2**20)])

    def test_c_library_without_mallopt_raises_nothing(self) -> None:
        self.patch(ctypes, "CDLL", lambda name: object())
        keep_freed_memory()


class _Node:
    def __init__(self) -> None:
        self.itself = self


class CollectorTests(SynchronousTestCase):
    """Everything is given back to the collector after each test."""

    def setUp(self) -> None:
        self.addCleanup(gc.unfreeze)

    def is_looked_at(self, node: _Node) -> bool:
        return any(each is node for each in gc.get_objects())

    def test_freezing_collects_garbage_and_exempts_other_objects_from_collection(self) -> None:
        self.addCleanup(gc.enable)
        gc.disable()
        kept, gone = _Node(), weakref.ref(_Node())
        self.assertIsNotNone(gone())
        self.assertTrue(self.is_looked_at(kept))
        exempt_objects_from_gc()
        self.assertIsNone(gone())
        self.assertFalse(self.is_looked_at(kept))


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
    def setUp(self) -> None:
        self.monotonic = 50.0
        self.patch(time, "monotonic", lambda: self.monotonic)
        self.reactor = Reactor()
        self.rung: list[str] = []

    def ring(self, name: str, after: float) -> None:
        self.reactor.callLater(after, self.rung.append, name)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            self.monotonic += 0.1
            self.reactor.runUntilCurrent()

    def check(self, *names: str) -> None:
        self.reactor.runUntilCurrent()
        self.assertEqual(self.rung, list(names))

    def test_timers_follow_the_monotonic_clock(self) -> None:
        use_monotonic_clock(self.reactor)
        self.ring("timer", 10)
        for jump in (DAY, -365 * DAY):
            self.reactor.time_of_day += jump
            self.check()
        self.wait(9.8)
        self.check()
        self.wait(0.4)
        self.check("timer")

    def test_long_suspension_advances_timers_by_two_seconds(self) -> None:
        use_monotonic_clock(self.reactor)
        self.ring("short", 1)
        self.ring("long", 10)
        self.wait(3)
        self.check("short")
        self.monotonic += DAY
        self.check("short")
        self.wait(4.8)
        self.check("short")
        self.wait(0.4)
        self.check("short", "long")

    def test_reactor_without_timers_wakes_each_second(self) -> None:
        use_monotonic_clock(self.reactor)
        for _ in range(3):
            self.assertEqual(self.reactor.timeout(), 1)
            self.monotonic += 1
            self.reactor.runUntilCurrent()


class HangupTests(SynchronousTestCase):
    def test_hangup_and_user_signal_do_nothing_and_children_inherit_the_default(self) -> None:
        numbers = (signal.SIGHUP, signal.SIGUSR1)
        for number in numbers:
            self.addCleanup(signal.signal, number, signal.signal(number, signal.SIG_DFL))
        ignore_sighup_and_sigusr1()
        for number in numbers:
            signal.raise_signal(number)
            self.assertIsNot(signal.getsignal(number), signal.SIG_IGN)


NUMBERS = (signal.SIGTERM, signal.SIGINT)


class ShutdownSignalsTests(SynchronousTestCase):
    """A reactor that notes what it would stop for, and in `stopped_now` what follows."""

    def setUp(self) -> None:
        self.stops: list[int] = []
        self.calls: list[Callable[[], object]] = []
        self.stopped_now: list[str] = []
        for number in NUMBERS:
            self.addCleanup(signal.signal, number, signal.getsignal(number))
            signal.signal(number, lambda number, frame: self.stops.append(number))
        self.reactor: Any = MemoryReactorClock()
        self.reactor.callFromThread = self.calls.append  # type: ignore[attr-defined]
        self.signals = ShutdownSignals(lambda: self.stopped_now.append("stop now"), self.reactor)
        self.signals.startService()

    def run_reactor(self) -> None:
        """Let it run, by which its own handlers of signals are there."""
        for hook, arguments, options in self.reactor.whenRunningHooks:
            hook(*arguments, **options)

    def test_second_signal_before_the_stop_begins_stops_the_daemon_at_once(self) -> None:
        for first in NUMBERS:
            for second in NUMBERS:
                self.setUp()
                self.run_reactor()
                signal.raise_signal(first)
                signal.raise_signal(second)
                self.assertEqual(self.stops, [first])
                self.assertEqual((len(self.calls), self.stopped_now), (1, []), "in the reactor")
                self.calls[0]()
                self.assertEqual(self.stopped_now, ["stop now"])

    def test_first_signal_during_the_stop_stops_the_daemon_at_once(self) -> None:
        self.run_reactor()
        ((begin, arguments, options),) = self.reactor.triggers["before"]["shutdown"]
        begin(*arguments, **options)
        signal.raise_signal(signal.SIGTERM)
        self.assertEqual((self.stops, len(self.calls)), ([], 1))

    def test_signal_after_the_stop_of_the_service_does_not_reach_the_reactor(self) -> None:
        self.run_reactor()
        signal.raise_signal(signal.SIGTERM)
        self.signals.stopService()
        signal.raise_signal(signal.SIGTERM)
        self.assertEqual(self.stops, [signal.SIGTERM])

    def test_signal_handlers_are_not_installed_until_the_reactor_runs(self) -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        self.assertEqual((self.stops, self.calls), ([signal.SIGTERM] * 2, []))

    def test_ignored_signals_stay_ignored(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.run_reactor()
        self.assertIs(signal.getsignal(signal.SIGINT), signal.SIG_IGN)
