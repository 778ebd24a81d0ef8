"""`sandbox.limits`: which limits a run has gone over, and what it has used."""

from __future__ import annotations

from math import inf
from typing import Any

from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock

from tawebeval.config import GIB, MIB
from tawebeval.errors import EvaluationFailure, format_size
from tawebeval.linux.cgroups import ResourceUsage
from tawebeval.sandbox import limits as module
from tawebeval.sandbox.limits import DiskUsage, LocalRunLimits, TooManyInspections
from tests.cases.sandbox import LIMITS, CellTestCase
from tests.fakes.children import NO_PROCESS, FakeChild


class LimitTests(CellTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.limits = self.make()
        self.limits.make_cgroup("word")
        self.child: Any = FakeChild(Clock(), ProcessProtocol())
        self.limits.first_process = self.child

    def make(self) -> LocalRunLimits:
        return LocalRunLimits(LIMITS, self.cgroups, self.workspace, self.checkout.commit)

    def check(self, reason: str, limit: str, words: str, *, final: bool = False) -> None:
        error = self.limits.check(final)
        assert isinstance(error, EvaluationFailure)
        self.assertEqual(error.reason, reason)
        value = getattr(LIMITS, limit)
        self.assertEqual(error.extra_members, {"limit": f"limits.{limit}", "value": value})
        shown = format_size(value) if value >= MIB else value
        self.assertIn(words.format(shown), error.message)

    def check_none(self, *, final: bool = False) -> None:
        self.assertIsNone(self.limits.check(final))

    def test_run_that_used_nothing_is_within_its_limits(self) -> None:
        self.check_none()
        self.check_none(final=True)

    def test_limits_of_the_cgroup_are_reported(self) -> None:
        group = self.cgroups.group
        group.over = frozenset({"processes"})
        self.check("processes", "processes", "{} processes")
        group.over = frozenset({"processes", "memory"})
        self.check("memory", "memory", "{} of memory")
        group.submission_peak_memory_bytes = 3 * MIB
        self.check("memory", "memory", "it and the submission's programs (3 MiB) used over {}")

    def test_limits_of_the_kernel_are_looked_up_once_a_second(self) -> None:
        self.check_none()
        self.check_none(final=True)
        self.assertEqual(self.cgroups.group.patience, [1, 0])

    def test_processor_time_of_the_cgroup_counts_with_a_second_allowed(self) -> None:
        self.cgroups.group.used = ResourceUsage(30.0, None)
        self.check_none()
        self.cgroups.group.used = ResourceUsage(30.01, None)
        self.check("cpu", "cpu", "{} seconds of processor time")

    def test_processor_time_is_measured_without_a_group(self) -> None:
        measured = {self.child.pid: 30.01}
        self.patch(module, "measure_cpu_seconds", measured.get)
        self.check("cpu", "cpu", "{} seconds of processor time")
        self.child.exit()
        self.check_none()

    def test_cgroup_of_an_exited_run_is_asked_for_the_failure_alone(self) -> None:
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

    def test_files_of_the_checkout_do_not_count(self) -> None:
        self.disk.last_usage = DiskUsage(file_count=1010)
        self.check_none()
        self.disk.last_usage = DiskUsage(file_count=1011)
        self.check("disk", "disk_files", "{} files and directories")

    def test_too_deep_directories_are_over_the_limit(self) -> None:
        self.disk.last_usage = DiskUsage(has_uncounted_deep_directories=True)
        self.check("disk", "disk_files", "{} files and directories")

    def test_largest_file_explains_a_failure_alone(self) -> None:
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
        error = self.limits.check(final=True)
        assert isinstance(error, EvaluationFailure)
        self.assertEqual(error.reason, "disk")
        value = LIMITS.free_disk
        self.assertEqual(error.extra_members, {"limit": "limits.free_disk", "value": value})
        self.assertIn(f"under {format_size(value)} (limits.free_disk)", error.message)
        self.assertIn("files take 1 MiB", error.message)

    def test_nearly_full_disk_explains_a_small_run_if_nothing_is_free(self) -> None:
        self.disk.last_usage = DiskUsage(disk_bytes=MIB - 1)
        self.disk.free_bytes = MIB
        self.check_none(final=True)
        self.disk.free_bytes = MIB - 1
        error = self.limits.check(final=True)
        self.assertEqual(error and error.reason, "disk")

    def test_large_count_hides_no_other_limit(self) -> None:
        self.disk.last_usage = DiskUsage(inspection_count=8)
        self.assertRaises(TooManyInspections, self.limits.check, work=7)
        self.assertIsNone(self.limits.check(work=8))
        self.cgroups.group.over = frozenset({"memory"})
        error = self.limits.check(work=0)
        self.assertEqual(error and error.reason, "memory")

    def test_disk_is_measured_without_cgroups(self) -> None:
        self.limits.close()
        self.disk.last_usage = DiskUsage(disk_bytes=2 * GIB)
        self.check("disk", "disk", "{} to the disk")

    def test_count_is_bounded_by_the_limits_and_new_at_the_end(self) -> None:
        self.check_none()
        self.check_none(final=True)
        self.assertEqual(self.disk.looks, [(False, inf), (True, inf)])
        self.assertEqual(self.disk.directory, self.workspace.root)
        self.assertEqual(self.disk.size, GIB + 5000 + 10 * 4096)
        self.assertEqual(self.disk.max_files, 1010)

    def test_open_files_of_the_processes_count(self) -> None:
        self.patch(module, "list_descendants", lambda pid: [pid + 1, pid + 2])
        self.assertEqual(list(self.disk.pids()), [NO_PROCESS + 1, NO_PROCESS + 2])
        self.child.exit()
        self.assertEqual(list(self.disk.pids()), [], "its number may be another's by now")

    def test_programs_of_submissions_count(self) -> None:
        self.child.broker_pid = 70
        self.patch(module, "list_descendants", lambda pid: [pid + 1])
        self.assertEqual(list(self.disk.pids()), [NO_PROCESS + 1, 71])
        measured = {NO_PROCESS: 15.01, 70: 15.0}
        self.patch(module, "measure_cpu_seconds", measured.get)
        self.check("cpu", "cpu", "{} seconds of processor time")

    def test_usage_is_that_of_the_cgroup(self) -> None:
        self.cgroups.group.used = ResourceUsage(1.5, 4096)
        self.assertEqual(self.limits.read_usage(None), ResourceUsage(1.5, 4096))
        self.limits.close()
        self.assertEqual(self.limits.read_usage(None), ResourceUsage(None, None))

    def test_another_process_of_the_daemon_goes_on_with_the_limits(self) -> None:
        self.disk.device_numbers, self.disk.run_start_time = frozenset({40, 39}), 7.5
        described = self.limits.describe_for_resume()
        self.disks.clear()
        resumed = self.make()
        resumed.resume(described)
        self.assertIs(resumed.cgroup, self.cgroups.group)
        self.assertEqual((self.disk.device_numbers, self.disk.run_start_time), ({39, 40}, 7.5))
