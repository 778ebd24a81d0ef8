"""`sandbox.base`: which limits a run has gone over, what it has used, and who looks when."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import GIB, MIB, LimitSettings
from tawebeval.errors import EvaluationFailure, format_size
from tawebeval.linux.cgroups import ResourceUsage
from tawebeval.sandbox import base as module
from tawebeval.sandbox.base import LARGE_INSPECTED_ENTRY_COUNT, LimitMonitor, RunLimits
from tawebeval.sandbox.disk import DiskUsage
from tests.cases.sandbox import LIMITS, CellTestCase
from tests.fakes.children import NO_PROCESS, FakeChild
from tests.fakes.sandbox import FakeRunLimits
from tests.fakes.world import InlineThreads, SlowThreads


class LimitTests(CellTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.limits = self.make()
        self.limits.make_cgroup("word")
        self.child: Any = FakeChild(Clock(), ProcessProtocol())
        self.limits.first_process = self.child

    def make(self) -> RunLimits:
        return RunLimits(LIMITS, self.cgroups, self.workspace, self.checkout.commit)

    def check(self, reason: str, limit: str, words: str, *, final: bool = False) -> None:
        error = self.limits.find_limit_failure(final)
        assert isinstance(error, EvaluationFailure)
        self.assertEqual(error.reason, reason)
        value = getattr(LIMITS, limit)
        self.assertEqual(error.extra_members, {"limit": f"limits.{limit}", "value": value})
        shown = format_size(value) if value >= MIB else value
        self.assertIn(words.format(shown), error.message)

    def check_none(self, *, final: bool = False) -> None:
        self.assertIsNone(self.limits.find_limit_failure(final))

    def test_final_check_of_limits_measures_cgroup_and_disk_again(self) -> None:
        self.check_none()
        self.check_none(final=True)
        self.assertEqual(self.cgroups.group.patience, [1, 0])
        self.assertEqual(self.disk.looks, [False, True])
        self.assertEqual(self.disk.directory, self.workspace.root)
        self.assertEqual((self.disk.size, self.disk.max_files), (GIB + 5000 + 10 * 4096, 1010))

    def test_limits_of_the_cgroup_are_reported(self) -> None:
        group = self.cgroups.group
        group.over = frozenset({"processes"})
        self.check("processes", "processes", "{} processes")
        group.over = frozenset({"processes", "memory"})
        self.check("memory", "memory", "{} of memory")
        group.submission_peak_memory_bytes = 3 * MIB
        self.check("memory", "memory", "it and the submission's programs (3 MiB) used over {}")

    def test_processor_time_of_the_cgroup_over_the_limit_is_reported(self) -> None:
        self.cgroups.group.used = ResourceUsage(30.0, None)
        self.check_none()
        self.cgroups.group.used = ResourceUsage(30.01, None)
        self.check("cpu", "cpu", "{} seconds of processor time")

    def test_processor_time_is_measured_without_a_cgroup(self) -> None:
        measured = {self.child.pid: 30.01}
        self.patch(module, "measure_cpu_seconds", measured.get)
        self.check("cpu", "cpu", "{} seconds of processor time")
        self.child.exit()
        self.check_none()

    def test_cgroup_of_an_exited_run_is_read_at_the_final_check_only(self) -> None:
        self.cgroups.group.over = frozenset({"memory"})
        self.check("memory", "memory", "{} of memory")
        self.child.exit()
        self.check_none()
        self.check("memory", "memory", "{} of memory", final=True)
        self.disk.last_usage = DiskUsage(file_count=1011)
        self.check("disk", "disk_files", "{} files and directories")

    def test_bytes_of_the_checkout_do_not_count(self) -> None:
        allowed = GIB + 5000 + 10 * 4096
        self.disk.last_usage = DiskUsage(disk_bytes=allowed)
        self.check_none()
        self.disk.last_usage = DiskUsage(disk_bytes=allowed + 1)
        self.check("disk", "disk", "{} to the disk")

    def test_too_deep_directories_are_over_the_limit(self) -> None:
        self.disk.last_usage = DiskUsage(has_uncounted_deep_directories=True)
        self.check("disk", "disk_files", "{} files and directories")

    def test_too_large_file_is_reported_only_at_the_final_check(self) -> None:
        self.disk.last_usage = DiskUsage(largest_file_bytes=5 * MIB - 1)
        self.check_none(final=True)
        self.disk.last_usage = DiskUsage(largest_file_bytes=5 * MIB)
        self.check_none()
        self.check("file_size", "file_size", "wrote a file of {}", final=True)

    def test_nearly_full_disk_explains_a_failure(self) -> None:
        self.assertFalse(self.limits.is_disk_nearly_full)
        self.disk.last_usage = DiskUsage(disk_bytes=MIB)
        for free in (LIMITS.free_disk, LIMITS.free_disk - 1):
            self.disk.free_bytes = free
            self.check_none()
            self.assertIs(self.limits.is_disk_nearly_full, free < LIMITS.free_disk)
        error = self.limits.find_limit_failure(final=True)
        assert isinstance(error, EvaluationFailure)
        self.assertEqual(error.reason, "disk")
        value = LIMITS.free_disk
        self.assertEqual(error.extra_members, {"limit": "limits.free_disk", "value": value})
        self.assertIn(f"under {format_size(value)} (limits.free_disk)", error.message)
        self.assertIn("files take 1 MiB", error.message)

    def test_disk_below_1_mib_free_explains_the_failure_of_a_small_run(self) -> None:
        self.disk.last_usage = DiskUsage(disk_bytes=MIB - 1)
        self.disk.free_bytes = MIB
        self.check_none(final=True)
        self.disk.free_bytes = MIB - 1
        error = self.limits.find_limit_failure(final=True)
        self.assertEqual(error and error.reason, "disk")

    def test_open_files_of_descendants_are_measured_until_the_exit(self) -> None:
        self.patch(module, "list_descendant_pids", lambda pid: [pid + 1, pid + 2])
        self.assertEqual(list(self.disk.pids()), [NO_PROCESS + 1, NO_PROCESS + 2])
        self.child.exit()
        self.assertEqual(list(self.disk.pids()), [], "its number may be another's by now")

    def test_cpu_time_and_files_of_submissions_count(self) -> None:
        self.child.broker_pid = 70
        self.patch(module, "list_descendant_pids", lambda pid: [pid + 1])
        self.assertEqual(list(self.disk.pids()), [NO_PROCESS + 1, 71])
        measured = {NO_PROCESS: 15.01, 70: 15.0}
        self.patch(module, "measure_cpu_seconds", measured.get)
        self.check("cpu", "cpu", "{} seconds of processor time")

    def test_usage_is_read_from_the_cgroup_and_unknown_once_the_limits_are_closed(self) -> None:
        self.cgroups.group.used = ResourceUsage(1.5, 4096)
        self.assertEqual(self.limits.read_usage(None), ResourceUsage(1.5, 4096))
        self.limits.close()
        self.assertEqual(self.limits.read_usage(None), ResourceUsage(None, None))

    def test_resumed_run_keeps_its_cgroup_and_start_time(self) -> None:
        self.disk.run_start_time = 7.5
        described = self.limits.make_resume_data()
        self.disks.clear()
        resumed = self.make()
        resumed.apply_resume_data(described)
        self.assertIs(resumed.cgroup, self.cgroups.group)
        self.assertEqual(self.disk.run_start_time, 7.5)


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


class LimitMonitorTests(WatchTestCase):
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

    def test_stopped_run_is_checked_until_it_has_ended(self) -> None:
        cell = make_cell(OVER)
        with self.over(cell):
            self.clock.pump([PAUSE] * 2)
            self.assertEqual(self.stopped, [(cell, OVER)] * 2)

    def test_no_check_is_scheduled_without_runs(self) -> None:
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

    def test_run_that_ends_while_another_is_stopped_is_not_stopped(self) -> None:
        one, two = make_cell(OVER), make_cell(OVER)
        self.open.enter_context(over(self.watch, one, lambda error: entered.close()))
        with contextlib.ExitStack() as entered:
            entered.enter_context(self.over(two))
            self.clock.advance(PAUSE)
            self.assertEqual(self.looks(one, two), [1, 1])
            self.assertEqual(self.stopped, [])

    def test_failed_stop_does_not_end_the_checks(self) -> None:
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

    def test_pause_begins_at_the_end_of_a_check(self) -> None:
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

    def test_run_that_ends_during_a_check_is_not_stopped(self) -> None:
        cell = make_cell(OVER)
        with self.over(cell):
            self.clock.advance(PAUSE)
        self.threads.step()
        self.assertEqual(self.looks(cell), [1])
        self.assertEqual(self.stopped, [])
        self.assertEqual(self.clock.getDelayedCalls(), [])


class LargeCountTests(WatchTestCase):
    def setUp(self) -> None:
        self.others = SlowThreads()
        super().setUp()
        self.large, self.small = make_cell(), make_cell()
        self.large.inspected_entry_count = LARGE_INSPECTED_ENTRY_COUNT + 1
        self.small.inspected_entry_count = LARGE_INSPECTED_ENTRY_COUNT
        self.open.enter_context(self.over(self.small))

    def test_large_count_moves_to_another_thread(self) -> None:
        with self.over(self.large):
            self.clock.advance(PAUSE)
            self.large.inspected_entry_count = 0
            self.clock.pump([PAUSE] * 4)
            self.assertEqual(self.looks(self.large, self.small), [5, 5])
            self.assertEqual((self.large.counts, self.small.counts), (1, 5))
            self.assertEqual(len(self.others.waiting), 1, "one count at a time")
            self.others.step()
            self.assertEqual(self.large.counts, 2)
            self.clock.advance(PAUSE)
            self.assertEqual(len(self.others.waiting), 1)
            self.large.over = OVER
            self.others.step()
            self.assertEqual(self.stopped, [(self.large, OVER)])

    def test_run_that_ends_during_a_large_count_is_not_stopped(self) -> None:
        with self.over(self.large):
            self.clock.pump([PAUSE] * 2)
        self.large.over = OVER
        self.others.step()
        self.clock.advance(PAUSE)
        self.assertEqual((self.stopped, self.others.waiting), ([], []))

    def test_large_run_is_lost_after_repeated_failed_counts(self) -> None:
        broken = make_cell()
        broken.fault, broken.fails_to_count = OSError(24, "Too many open files"), True
        broken.inspected_entry_count = LARGE_INSPECTED_ENTRY_COUNT + 1
        with self.over(broken):
            self.clock.advance(PAUSE)
            for _ in range(7):
                self.clock.advance(PAUSE)
                self.others.step()
            ((_, why),) = self.stopped
            self.assertEqual(why.reason, "lost")


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

    def test_largest_remaining_run_is_stopped_when_the_disk_fills_up_a_second_time(self) -> None:
        self.free(50)
        self.stops(self.large)
        self.end(self.large)
        self.free(200)
        self.stops()
        self.free(50)
        self.stops(self.medium)


class FailedCheckTests(WatchTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.broken = make_cell()

    def test_run_is_lost_after_eight_failed_checks(self) -> None:
        words = "the run's limits could not be checked"
        for error, message, logged in (
            (OSError(24, "Too many open files"), f"{words}: Too many open files", 0),
            (ValueError("x"), f"defect of the daemon: {words}", 1),
        ):
            self.broken.fault = error
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

    def test_successful_check_resets_the_count_of_failures(self) -> None:
        for between in (None, OVER):
            self.stopped.clear()
            with self.over(self.broken):
                for _ in range(4):
                    self.broken.fault, self.broken.over = OSError(2, "gone"), None
                    self.clock.pump([PAUSE] * 7)
                    self.broken.fault, self.broken.over = None, between
                    self.clock.advance(PAUSE)
            self.assertEqual([why for _, why in self.stopped], [between] * 4 if between else [])
