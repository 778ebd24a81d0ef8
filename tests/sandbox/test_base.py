"""`sandbox.base`: what all cells hold, and the cell that is none."""

from __future__ import annotations

import itertools
import resource
import signal
from math import inf
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock

from tawebeval.config import GIB, MIB
from tawebeval.core.evaluator_environment import add_tools_to_path
from tawebeval.errors import EvaluationFailure, format_size
from tawebeval.linux.cgroups.manager import ResourceUsage
from tawebeval.sandbox import base as module
from tawebeval.sandbox.base import (
    EvaluatorExit,
    NoSandbox,
    UnsandboxedRun,
)
from tawebeval.sandbox.disk_usage import DiskUsage, TooManyInspections
from tests.cases.sandbox import ENVIRONMENT, LIMITS, TOOLS, CellTestCase
from tests.fakes.children import NO_PROCESS, FakeChild
from tests.fakes.sandbox import FakeDisk

ALL = ("memory", "processes", "cpu")


class ProcessLimitTests(CellTestCase):
    """The limits of each single process."""

    def test_to_the_letter(self) -> None:
        """Memory by process where no group limits it; never processes, which the daemon has too."""
        for count in range(len(ALL) + 1):
            for enforced in itertools.combinations(ALL, count):
                self.cgroups.enforced_resources = frozenset(enforced)
                launch = self.no_cell().make_launch_spec(
                    "./it --now", ENVIRONMENT, Path("/some/where")
                )
                expected = {
                    resource.RLIMIT_CPU: (61, -1),
                    resource.RLIMIT_FSIZE: (5 * MIB, 5 * MIB),
                    resource.RLIMIT_NOFILE: (99, 99),
                    resource.RLIMIT_CORE: (1, -1),
                    resource.RLIMIT_AS: (-1, -1),
                    resource.RLIMIT_STACK: (8 * MIB, -1),
                    resource.RLIMIT_MSGQUEUE: (0, 0),
                    resource.RLIMIT_SIGPENDING: (1024, 1024),
                    resource.RLIMIT_NICE: (0, 0),
                    resource.RLIMIT_RTPRIO: (0, 0),
                }
                if "memory" not in enforced:
                    expected[resource.RLIMIT_DATA] = (64 * MIB, 64 * MIB)
                self.assertEqual(launch.rlimits, expected, enforced)
                self.assertEqual(launch.argv, ["/bin/sh", "-c", "./it --now"])
                self.assertEqual(
                    launch.environment,
                    add_tools_to_path(ENVIRONMENT, str(TOOLS)),
                )
                self.assertEqual(launch.directory, "/some/where")
                self.assertEqual(launch.descriptors, ())

    def test_hard_limits_of_the_daemon(self) -> None:
        """What cannot be unlimited is as high as the daemon's own."""
        self.cgroups.enforced_resources = frozenset({"cpu"})
        self.hard = 77
        limits = self.no_cell().make_launch_spec("./it", ENVIRONMENT, Path("/")).rlimits
        self.assertEqual(limits[resource.RLIMIT_CORE], (1, 77))
        self.assertEqual(limits[resource.RLIMIT_CPU], (61, 77))
        self.assertEqual(limits[resource.RLIMIT_AS], (77, 77))
        self.assertEqual(limits[resource.RLIMIT_STACK], (77, 77))

    def test_daemon_without_core_dumps(self) -> None:
        """The soft limit of core dumps is 0 where the daemon's hard limit is 0."""
        self.hard = 0
        limits = self.no_cell().make_launch_spec("./it", ENVIRONMENT, Path("/")).rlimits
        self.assertEqual(limits[resource.RLIMIT_CORE], (0, 0))


class GroupTests(CellTestCase):
    """The groups of a run."""

    def test_make(self) -> None:
        """A group has the workspace's name, and the limits; it is removed once."""
        self.cgroups.group.entries = ["/cgroup/a", "/cgroup/b"]
        cell = self.started()
        self.assertEqual(self.cgroups.made, [("word", LIMITS)])
        (launch,) = self.trees.launched
        self.assertEqual(launch.cgroup_procs_files, ["/cgroup/a", "/cgroup/b"])
        cell.close()
        cell.close()
        self.assertEqual(self.cgroups.group.removed, 1)

    def test_stays(self) -> None:
        """While a group cannot be removed that is an error; then it is removed once."""
        cell = self.started()
        self.cgroups.group.stays = OSError(16, "Device or resource busy")
        for _ in range(2):
            self.assertRaises(OSError, cell.close)
        self.cgroups.group.stays = None
        for _ in range(2):
            cell.close()
        self.assertEqual(self.cgroups.group.removed, 3)

    def test_cannot_be_started(self) -> None:
        """The group of what cannot be started is removed all the same, and nobody is expected."""
        self.trees.error = OSError(28, "No space left on device")
        cell = self.no_cell()
        with self.assertRaises(OSError):
            cell.start_evaluator("x", ENVIRONMENT, Path("/"))
        self.assertEqual(self.orphans.told, [])
        cell.close()
        self.assertEqual(self.cgroups.group.removed, 1)

    def test_known(self) -> None:
        """From its first moment the child is known as one that is no orphan."""
        self.started()
        self.assertEqual(self.orphans.told, [NO_PROCESS])

    def test_never_started(self) -> None:
        """A cell in which nothing was started has nothing to remove."""
        self.no_cell().close()
        self.assertEqual(self.cgroups.group.removed, 0)

    def test_usage(self) -> None:
        """The group knows what was used; without one nobody does."""
        self.cgroups.group.used = ResourceUsage(1.5, 4096)
        cell = self.no_cell()
        self.assertEqual(cell.read_usage(None), ResourceUsage(None, None))
        cell.start_evaluator("x", ENVIRONMENT, Path("/"))
        self.assertEqual(cell.read_usage(None), ResourceUsage(1.5, 4096))
        cell.close()
        self.assertEqual(cell.read_usage(None), ResourceUsage(None, None))


class ExceededTests(CellTestCase):
    """Which limit a run has gone over."""

    def setUp(self) -> None:
        super().setUp()
        self.cell = self.started()
        self.child = FakeChild(Clock(), ProcessProtocol())
        self.cell.set_first_process(self.child)  # type: ignore[arg-type]

    def check(self, reason: str, limit: str, words: str, *, final: bool = False) -> None:
        """Hold that it is this one."""
        error = self.cell.check_limits(final)
        assert isinstance(error, EvaluationFailure)
        self.assertEqual(error.reason, reason)
        value = getattr(LIMITS, limit)
        self.assertEqual(error.extra_members, {"limit": f"limits.{limit}", "value": value})
        shown = format_size(value) if value >= MIB else value
        self.assertIn(words.format(shown), error.message)

    def test_memory_of_a_good_run(self) -> None:
        """A run that has succeeded was over its memory if a process was killed for it."""
        self.assertIsNone(self.cell.check_memory())
        self.cgroups.group.over = frozenset({"memory", "processes"})
        error = self.cell.check_memory()
        assert error is not None
        self.assertEqual((error.reason, error.extra_members["value"]), ("memory", LIMITS.memory))
        self.assertNotIn("programs", error.message)
        self.cgroups.group.submission_peak_memory_bytes = 3 * MIB
        error = self.cell.check_memory()
        assert error is not None
        self.assertIn("it and the submission's programs (3 MiB) used over ", error.message)
        self.assertIsNone(self.no_cell().check_memory())

    def check_none(self, *, final: bool = False) -> None:
        """Hold that it is none."""
        self.assertIsNone(self.cell.check_limits(final))

    def test_none(self) -> None:
        """A run that has used nothing."""
        self.check_none()
        self.check_none(final=True)

    def test_group(self) -> None:
        """What the kernel has stopped; where there were both, memory is told."""
        group = self.cgroups.group
        group.over = frozenset({"processes"})
        self.check("processes", "processes", "{} processes")
        group.over = frozenset({"processes", "memory"})
        self.check("memory", "memory", "{} of memory")

    def test_patience(self) -> None:
        """What the kernel stops by itself is looked for once a second, and at the end."""
        self.check_none()
        self.check_none(final=True)
        self.assertEqual(self.cgroups.group.patience, [1, 0])

    def test_cpu(self) -> None:
        """The processor time of the whole group counts, and the last second is allowed."""
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

    def test_exited(self) -> None:
        """The group of a run that has exited is asked only why it failed; the disk counts on."""
        self.cgroups.group.over = frozenset({"memory"})
        self.check("memory", "memory", "{} of memory")
        self.child.exit()
        self.check_none()
        self.check("memory", "memory", "{} of memory", final=True)
        self.disk.last_usage = DiskUsage(file_count=1011)
        self.check("disk", "disk_files", "{} files and directories")

    def test_disk_bytes(self) -> None:
        """What is checked out is not counted: its bytes, and a block for each of its files."""
        allowed = GIB + 5000 + 10 * 4096
        self.disk.last_usage = DiskUsage(disk_bytes=allowed)
        self.check_none()
        self.disk.last_usage = DiskUsage(disk_bytes=allowed + 1)
        self.check("disk", "disk", "{} to the disk")

    def test_disk_files(self) -> None:
        """Nor are the files that are checked out."""
        self.disk.last_usage = DiskUsage(file_count=1010)
        self.check_none()
        self.disk.last_usage = DiskUsage(file_count=1011)
        self.check("disk", "disk_files", "{} files and directories")

    def test_deep(self) -> None:
        """Too deep directories cannot be counted, and so are too many."""
        self.disk.last_usage = DiskUsage(has_uncounted_deep_directories=True)
        self.check("disk", "disk_files", "{} files and directories")

    def test_file_size(self) -> None:
        """A file as large as any may be tells why a run failed, and nothing before."""
        self.disk.last_usage = DiskUsage(largest_file_bytes=5 * MIB - 1)
        self.check_none(final=True)
        self.disk.last_usage = DiskUsage(largest_file_bytes=5 * MIB)
        self.check_none()
        self.check("file_size", "file_size", "wrote a file of {}", final=True)

    def test_nearly_full(self) -> None:
        """Where the disk is nearly full a run that has failed may have failed of that."""
        self.assertFalse(self.cell.is_disk_nearly_full)
        self.disk.last_usage = DiskUsage(disk_bytes=MIB)
        self.disk.free_bytes = LIMITS.free_disk
        self.assertFalse(self.cell.is_disk_nearly_full)
        self.disk.free_bytes -= 1
        self.assertTrue(self.cell.is_disk_nearly_full)
        self.check_none()
        error = self.cell.check_limits(final=True)
        assert isinstance(error, EvaluationFailure)
        self.assertEqual(error.reason, "disk")
        value = LIMITS.free_disk
        self.assertEqual(error.extra_members, {"limit": "limits.free_disk", "value": value})
        self.assertIn(f"under {format_size(value)} (limits.free_disk)", error.message)
        self.assertIn("files take 1 MiB", error.message)

    def test_nearly_full_of_others(self) -> None:
        """One that has next to nothing there has failed of it only where nothing is free."""
        self.disk.last_usage = DiskUsage(disk_bytes=MIB - 1)
        self.disk.free_bytes = MIB
        self.check_none(final=True)
        self.disk.free_bytes = MIB - 1
        error = self.cell.check_limits(final=True)
        self.assertEqual(error and error.reason, "disk")

    def test_much_work(self) -> None:
        """A count that takes more work than it may is none; the other limits are known without."""
        self.disk.last_usage = DiskUsage(inspection_count=8)
        self.assertRaises(TooManyInspections, self.cell.check_limits, work=7)
        self.assertIsNone(self.cell.check_limits(work=8))
        self.cgroups.group.over = frozenset({"memory"})
        error = self.cell.check_limits(work=0)
        self.assertEqual(error and error.reason, "memory")

    def test_without_groups(self) -> None:
        """The disk is looked at without groups, too."""
        self.cell.close()
        self.disk.last_usage = DiskUsage(disk_bytes=2 * GIB)
        self.check("disk", "disk", "{} to the disk")

    def test_held(self) -> None:
        """A quota directory is watched in the place of the workspace."""
        watched: list[tuple[Path, bool]] = []

        def watch(directory: Path, *_: object, held: bool, **more: object) -> FakeDisk:
            watched.append((directory, held))
            return self.disk

        self.patch(module, "DiskMeter", watch)
        self.workspace = attrs.evolve(self.workspace, quota_directory=Path("/state/quotas/0"))
        self.no_cell()
        self.assertEqual(watched, [(Path("/state/quotas/0"), True)])

    def test_count(self) -> None:
        """The workspace is counted, within what is allowed; anew at the end."""
        self.check_none()
        self.check_none(final=True)
        self.assertEqual(self.disk.looks, [(False, inf), (True, inf)])
        self.assertEqual(self.disk.directory, self.workspace.root)
        self.assertEqual(self.disk.size, GIB + 5000 + 10 * 4096)
        self.assertEqual(self.disk.max_files, 1010)

    def test_processes(self) -> None:
        """The files that its processes have open are counted, as long as there are any."""
        self.patch(module, "list_descendants", lambda pid: [pid + 1, pid + 2])
        self.assertEqual(list(self.disk.pids()), [NO_PROCESS + 1, NO_PROCESS + 2])
        self.child.exit()
        self.assertEqual(list(self.disk.pids()), [], "its number may be another's by now")


class UnsandboxedRunTests(CellTestCase):
    """Without a sandbox."""

    def setUp(self) -> None:
        super().setUp()
        self.child: Any = FakeChild(Clock(), ProcessProtocol())

    def test_cell(self) -> None:
        """It is made for each evaluation, and shows the workspace as it is."""
        cell = NoSandbox(LIMITS, self.cgroups, self.orphans, TOOLS, self.trees).make_run(
            self.workspace, self.checkout, LIMITS
        )
        self.assertIsInstance(cell, UnsandboxedRun)
        self.assertEqual(cell.workspace_view, self.workspace.make_unsandboxed_view())
        self.assertEqual((cell.limits, cell.workspace), (LIMITS, self.workspace))
        cell.start_evaluator("x", ENVIRONMENT, Path("/"))
        self.assertEqual(self.cgroups.made, [("word", LIMITS)])

    def test_signal(self) -> None:
        """A signal is for the group and for who has left it, looked for while they have parents."""
        done: list[object] = []
        self.patch(module, "list_descendants", lambda pid: done.append(pid) or [31, 32])
        self.patch(module, "send_signal", lambda pid, number: done.append((pid, number)))
        self.child.signal_group = done.append
        self.no_cell().send_signal(self.child, signal.SIGTERM)
        self.assertEqual(done, [NO_PROCESS, signal.SIGTERM, (31, 15), (32, 15)])

    def test_end(self) -> None:
        """The group is killed, and the orphans by the run's own secret and workspace."""
        cell = self.no_cell()
        cell.make_launch_spec("x", ENVIRONMENT, Path("/"))
        cell.set_first_process(self.child)
        self.child.exit(0)
        self.successResultOf(Deferred.fromCoroutine(cell.kill_remaining_processes()))
        self.assertEqual(self.child.group_signals, [signal.SIGKILL])
        self.assertEqual(self.orphans.asked, [(b"--secret--", "/state/evaluations/word")])

    def test_end_without_a_process(self) -> None:
        """Where none was started there may be orphans all the same."""
        cell = self.no_cell()
        cell.make_launch_spec("x", ENVIRONMENT, Path("/"))
        self.successResultOf(Deferred.fromCoroutine(cell.kill_remaining_processes()))
        self.assertEqual(len(self.orphans.asked), 1)

    def test_exit(self) -> None:
        """It has ended as its shell has."""
        cell = self.no_cell()
        self.assertEqual(cell.interpret_exit(137, None), EvaluatorExit(137))
        self.assertEqual(cell.interpret_exit(None, 9), EvaluatorExit(None, 9))
        self.assertEqual(cell.interpret_exit(0, None), EvaluatorExit(0, None))
