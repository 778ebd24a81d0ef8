"""`sandbox.limits`: the look at all cells, again and again, as long as there are any."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import MIB, LimitSettings
from tawebeval.errors import EvaluationFailure
from tawebeval.sandbox.limits import MAX_SHARED_THREAD_INSPECTIONS, LimitMonitor, TooManyInspections
from tests.fakes.sandbox import FakeRunLimits
from tests.fakes.world import InlineThreads, SlowThreads

PAUSE = 0.25
OVER = EvaluationFailure("disk", "too much")


def make_cell(over: EvaluationFailure | None = None) -> FakeRunLimits:
    """Return the limits of a cell."""
    return FakeRunLimits(LimitSettings(), over=over)


@contextlib.contextmanager
def over(
    watch: LimitMonitor, cell: Any, stop: Callable[[EvaluationFailure], object]
) -> Iterator[None]:
    """Have a cell looked at meanwhile."""
    watch.add_run(cell, stop)
    try:
        yield
    finally:
        watch.remove_run(cell)


class BrokenRun(FakeRunLimits):
    """A cell that cannot be looked at while it is `failing`."""

    error: Exception = OSError(2, "gone")
    failing = True

    def check(self, final: bool = False, work: float = inf) -> EvaluationFailure | None:
        over = super().check(final, work)
        if self.failing:
            raise self.error
        return over


class WatchTestCase(SynchronousTestCase):
    threads: Any = InlineThreads()
    others: Any = InlineThreads()

    def setUp(self) -> None:
        self.clock = Clock()
        self.watch = LimitMonitor(self.clock, self.threads, self.others)
        self.stopped: list[tuple[object, EvaluationFailure]] = []
        self.open = contextlib.ExitStack()
        self.addCleanup(self.open.close)

    def over(self, cell: Any) -> contextlib.AbstractContextManager[None]:
        return over(self.watch, cell, lambda error: self.stopped.append((cell, error)))

    def looks(self, *cells: Any) -> list[int]:
        return [len(cell.looks) for cell in cells]


class LookTests(WatchTestCase):
    def test_runs_are_checked_every_quarter_of_a_second(self) -> None:
        cell = make_cell()
        with self.over(cell):
            self.clock.advance(PAUSE - 0.001)
            self.assertEqual(self.looks(cell), [0])
            self.clock.advance(0.001)
            self.assertEqual(self.looks(cell), [1])
            self.clock.pump([PAUSE] * 5)
            self.assertEqual(cell.looks, [False] * 6)
        self.assertEqual(self.stopped, [])

    def test_all_runs_are_checked_in_one_look(self) -> None:
        cells = [make_cell(OVER if number % 2 else None) for number in range(6)]
        with contextlib.ExitStack() as entered:
            for cell in cells[:3]:
                entered.enter_context(self.over(cell))
            self.clock.advance(PAUSE / 2)
            for cell in cells[3:]:
                entered.enter_context(self.over(cell))
            self.assertEqual(len(self.clock.getDelayedCalls()), 1)
            self.clock.advance(PAUSE / 2)
            self.assertEqual(self.looks(*cells), [1] * 6)
            self.assertEqual(self.stopped, [(cell, OVER) for cell in cells[1::2]])

    def test_stopped_run_is_checked_until_it_has_ended(self) -> None:
        cell = make_cell(OVER)
        with self.over(cell):
            self.clock.pump([PAUSE] * 2)
            self.assertEqual(self.stopped, [(cell, OVER)] * 2)

    def test_nothing_is_done_without_runs(self) -> None:
        self.assertEqual(self.clock.getDelayedCalls(), [])
        one, two = make_cell(), make_cell()
        with contextlib.suppress(ZeroDivisionError), self.over(one):
            with self.over(two):
                pass
            self.assertEqual(len(self.clock.getDelayedCalls()), 1, "one of two is left")
            raise ZeroDivisionError
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.clock.advance(PAUSE)
        self.assertEqual(self.looks(one, two), [0, 0])

    def test_monitor_begins_anew_after_a_time_without_runs(self) -> None:
        for _ in range(2):
            cell = make_cell()
            with self.over(cell):
                self.clock.advance(PAUSE)
            self.assertEqual(self.looks(cell), [1])
            self.clock.advance(PAUSE / 2)

    def test_run_that_ends_by_the_stop_of_another_is_not_stopped(self) -> None:
        one, two = make_cell(OVER), make_cell(OVER)
        self.open.enter_context(over(self.watch, one, lambda error: entered.close()))
        with contextlib.ExitStack() as entered:
            entered.enter_context(self.over(two))
            self.clock.advance(PAUSE)
            self.assertEqual(self.looks(one, two), [1, 1])
            self.assertEqual(self.stopped, [])

    def test_failed_stop_does_not_end_the_looks(self) -> None:
        cell = make_cell(OVER)
        with over(self.watch, cell, lambda error: 1 / 0):
            self.clock.advance(PAUSE)
            self.clock.advance(PAUSE)
            self.assertEqual(self.looks(cell), [2])
        gc.collect()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)


class SlowTests(WatchTestCase):
    def setUp(self) -> None:
        self.threads = SlowThreads()
        super().setUp()

    def test_pause_begins_at_the_end_of_a_look(self) -> None:
        cell = make_cell()
        with self.over(cell):
            self.clock.pump([PAUSE] * 9)
            self.assertEqual(len(self.threads.waiting), 1)
            self.open.enter_context(self.over(make_cell()))
            self.clock.pump([PAUSE] * 9)
            self.assertEqual(len(self.threads.waiting), 1, "nor does another cell begin one")
            self.threads.step()
            self.assertEqual(self.looks(cell), [1])
            self.assertEqual(self.threads.waiting, [])
            self.clock.advance(PAUSE - 0.001)
            self.assertEqual(self.threads.waiting, [])
            self.clock.advance(0.001)
            self.assertEqual(len(self.threads.waiting), 1)

    def test_run_that_ends_during_a_look_is_not_stopped(self) -> None:
        cell = make_cell(OVER)
        with self.over(cell):
            self.clock.advance(PAUSE)
        self.threads.step()
        self.assertEqual(self.looks(cell), [1])
        self.assertEqual(self.stopped, [])
        self.assertEqual(self.clock.getDelayedCalls(), [])


class MuchWorkTests(WatchTestCase):
    def setUp(self) -> None:
        self.others = SlowThreads()
        super().setUp()
        self.large, self.small = make_cell(), make_cell()
        self.large.needed, self.small.needed = (
            MAX_SHARED_THREAD_INSPECTIONS + 1,
            MAX_SHARED_THREAD_INSPECTIONS,
        )
        self.open.enter_context(self.over(self.small))

    def test_large_count_moves_to_another_thread(self) -> None:
        with self.over(self.large):
            self.clock.pump([PAUSE] * 5)
            self.assertEqual(self.looks(self.small), [5])
            self.assertEqual(len(self.others.waiting), 1)
            before = len(self.large.looks)
            self.others.step()
            self.assertEqual(len(self.large.looks), before + 1)
            self.assertEqual(self.others.waiting, [])
            self.clock.advance(PAUSE)
            self.assertEqual(len(self.others.waiting), 1)
            self.others.step()
        self.assertEqual(self.stopped, [])

    def test_large_run_is_counted_once_at_a_time(self) -> None:
        works: list[float] = []
        self.patch(
            FakeRunLimits, "check", lambda cell, work: works.append(work) or self.judge(work)
        )
        self.watch.remove_run(self.small)
        with self.over(self.large):
            self.clock.pump([PAUSE] * 3)
            self.others.step()
            self.clock.advance(PAUSE)
            self.others.step()
        self.assertEqual(
            works, [MAX_SHARED_THREAD_INSPECTIONS, 0, 0, inf, MAX_SHARED_THREAD_INSPECTIONS, inf]
        )
        self.watch.add_run(self.small, self.stopped.append)

    def judge(self, work: float) -> None:
        if work <= MAX_SHARED_THREAD_INSPECTIONS:
            raise TooManyInspections

    def test_result_of_the_other_thread_stops_a_run(self) -> None:
        self.large.over = OVER
        with self.over(self.large):
            self.clock.advance(PAUSE)
            self.assertEqual(self.stopped, [])
            self.others.step()
            self.assertEqual(self.stopped, [(self.large, OVER)])
            self.clock.advance(PAUSE)
            self.large.needed = 0
            self.clock.advance(PAUSE)
            self.assertEqual(self.stopped, [(self.large, OVER)] * 2)
            self.others.step()

    def test_run_that_ends_during_a_large_count_is_not_stopped(self) -> None:
        self.large.over = OVER
        with self.over(self.large):
            self.clock.advance(PAUSE)
        self.others.step()
        self.assertEqual((self.stopped, self.others.waiting), ([], []))


class NearlyFullTests(WatchTestCase):
    """A disk of which too little is free. The limit is 100 MiB."""

    def setUp(self) -> None:
        super().setUp()
        self.cells = [make_cell() for _ in range(3)]
        for number, cell in enumerate(self.cells):
            cell.settings = LimitSettings(free_disk=100 * MIB)
            cell.disk_bytes = (number + 1) * 10 * MIB
            self.open.enter_context(self.over(cell))
        self.small, self.medium, self.large = self.cells
        self.free(101)

    def free(self, mib: float) -> None:
        for cell in self.cells:
            cell.free_disk_bytes = mib * MIB

    def end(self, cell: Any) -> None:
        self.watch.remove_run(cell)
        self.addCleanup(self.watch.add_run, cell, self.stopped.append)
        self.cells.remove(cell)

    def stops(self, *cells: Any, looks: int = 1) -> None:
        self.stopped.clear()
        self.clock.pump([PAUSE] * looks)
        self.assertEqual([cell for cell, _ in self.stopped], [*cells])
        self.assertTrue(all(why.reason == "disk" for _, why in self.stopped))

    def test_nobody_is_stopped_while_enough_is_free(self) -> None:
        self.free(100)
        self.large.disk_bytes = 10**12
        self.stops(looks=20)

    def test_run_with_most_bytes_is_stopped_first(self) -> None:
        self.free(99)
        self.stops(self.large)
        self.stops(looks=4)
        self.end(self.large)
        self.free(129)
        self.stops(looks=20)

    def test_next_run_is_stopped_after_a_second(self) -> None:
        self.free(50)
        self.stops(self.large)
        self.stops(looks=4)
        self.stops(self.medium)
        self.stops(looks=4)
        self.stops(self.small)
        self.stops(looks=20)

    def test_next_run_is_stopped_at_once_while_the_disk_fills_up(self) -> None:
        self.free(50)
        self.stops(self.large)
        self.free(48)
        self.stops(self.medium)
        self.free(46)
        self.stops(self.small)

    def test_run_with_less_than_a_mebibyte_is_not_stopped(self) -> None:
        self.free(50)
        for cell in self.cells:
            cell.disk_bytes = MIB - 1
        self.stops(looks=20)
        self.small.disk_bytes = MIB
        self.stops(self.small)

    def test_run_that_hides_its_files_is_stopped_while_the_disk_fills_up(self) -> None:
        self.free(50)
        for cell in self.cells:
            cell.disk_bytes = 1000
        self.stops()
        stopped: list[object] = []
        for step in range(9):
            self.free(50 - (step + 1) / 4)
            self.stopped.clear()
            self.clock.advance(PAUSE)
            stopped += [cell for cell, _ in self.stopped]
        self.assertEqual(stopped, [self.large], "which has begun last")

    def test_relief_begins_anew_after_there_was_enough(self) -> None:
        self.free(50)
        self.stops(self.large)
        self.end(self.large)
        self.free(200)
        self.stops()
        self.free(50)
        self.stops(self.medium)


class BlindTests(WatchTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.broken = BrokenRun(LimitSettings())

    def test_run_is_lost_after_eight_failed_looks(self) -> None:
        words = "the run's limits could not be checked"
        for error, message, logged in (
            (OSError(24, "Too many open files"), f"{words}: Too many open files", 0),
            (ValueError("x"), f"defect of the daemon: {words}", 1),
        ):
            self.broken.error = error
            self.stopped.clear()
            other = make_cell()
            with self.over(self.broken), self.over(other):
                self.clock.pump([PAUSE] * 7)
                self.assertEqual(self.stopped, [])
                self.clock.pump([PAUSE] * 20)
            (cell, why), *more = self.stopped
            self.assertEqual((cell, why.reason, more), (self.broken, "lost", []))
            self.assertEqual(str(why), message)
            self.assertEqual(len(self.flushLoggedErrors(type(error))), logged)
            self.assertEqual(self.looks(other), [27])

    def test_successful_look_resets_the_count_of_failures(self) -> None:
        for between in (None, OVER):
            self.stopped.clear()
            self.broken.failing = True
            with self.over(self.broken):
                for _ in range(4):
                    self.broken.failing, self.broken.over = True, None
                    self.clock.pump([PAUSE] * 7)
                    self.broken.failing, self.broken.over = False, between
                    self.clock.advance(PAUSE)
            self.assertEqual([why for _, why in self.stopped], [between] * 4 if between else [])
