"""`sandbox.base`: what all cells hold, and the cell that is none."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock

from tawebeval.config import MIB
from tawebeval.core.segi import add_tools_to_path
from tawebeval.linux.starter import LaunchSpec
from tawebeval.linux.starter_client import StartedProgram
from tawebeval.sandbox import base as module
from tawebeval.sandbox.base import EvaluatorExit, NoSandbox, ResumableProcess
from tests.cases.sandbox import ENVIRONMENT, LIMITS, TOOLS, CellTestCase
from tests.fakes.children import NO_PROCESS, FakeChild

ALL = ("memory", "processes", "cpu")


class ProcessLimitTests(CellTestCase):
    def make_launch_spec(self, *arguments: Any) -> LaunchSpec:
        run: Any = self.no_cell()
        return run.make_launch_spec(*arguments)

    def test_data_rlimit_is_set_only_if_no_cgroup_limits_memory(self) -> None:
        for enforced in ((), ("memory",)):
            self.cgroups.enforced_resources = frozenset(enforced)
            launch = self.make_launch_spec("./it --now", ENVIRONMENT, Path("/some/where"))
            expected = {
                "cpu": (61, -1),
                "fsize": (5 * MIB, 5 * MIB),
                "nofile": (99, 99),
                "core": (1, -1),
                "as": (-1, -1),
                "stack": (8 * MIB, -1),
                "msgqueue": (0, 0),
                "sigpending": (1024, 1024),
                "nice": (0, 0),
                "rtprio": (0, 0),
            }
            if "memory" not in enforced:
                expected["data"] = (64 * MIB, 64 * MIB)
            self.assertEqual(launch.rlimits, expected, enforced)
            self.assertEqual(launch.argv, ["/bin/sh", "-c", "./it --now"])
            self.assertEqual(launch.environment, add_tools_to_path(ENVIRONMENT, str(TOOLS)))
            self.assertEqual(launch.directory, "/some/where")
            self.assertEqual(launch.descriptors, ())

    def test_hard_limits_are_those_of_the_daemon(self) -> None:
        self.cgroups.enforced_resources = frozenset({"cpu"})
        self.hard = 77
        limits = self.make_launch_spec("./it", ENVIRONMENT, Path("/")).rlimits
        self.assertEqual(limits["core"], (1, 77))
        self.assertEqual(limits["cpu"], (61, 77))
        self.assertEqual(limits["as"], (77, 77))
        self.assertEqual(limits["stack"], (77, 77))


class GroupTests(CellTestCase):
    def test_close_fails_if_the_cgroup_cannot_be_removed_and_can_be_repeated(self) -> None:
        cell = self.started()
        self.cgroups.group.stays = OSError(16, "Device or resource busy")
        for _ in range(2):
            self.assertRaises(OSError, cell.close)
        self.cgroups.group.stays = None
        for _ in range(2):
            cell.close()
        self.assertEqual(self.cgroups.group.removed, 3)

    def test_cgroup_is_removed_if_the_start_fails(self) -> None:
        self.launcher.error = OSError(28, "No space left on device")
        cell = self.no_cell()
        cell.close()
        self.assertEqual(self.cgroups.group.removed, 0)
        self.assertRaises(OSError, cell.start_evaluator, "x", ENVIRONMENT, Path("/"))
        cell.close()
        self.assertEqual(self.cgroups.group.removed, 1)


class ProcessTests(CellTestCase):
    def test_started_process_joins_the_cgroup_and_its_output_is_read_from_offset_0(self) -> None:
        self.cgroups.group.entries = ["/cgroup/a", "/cgroup/b"]
        run = self.no_cell()
        started = run.start_evaluator("x", ENVIRONMENT, Path("/"))
        run.connect_process(ProcessProtocol(), started)
        self.assertEqual(self.launcher.connected, [(started, 0)])
        self.assertEqual(self.cgroups.made, [("word", LIMITS)])
        (launch,) = self.launcher.launched
        self.assertEqual(launch.procs_files, ["/cgroup/a", "/cgroup/b"])
        self.assertEqual(launch.niceness, 10)
        self.assertEqual(launch.stdout_limit, LIMITS.output)
        self.assertEqual(launch.stderr_limit, LIMITS.stderr)

    def test_overlay_is_held_until_close(self) -> None:
        self.launcher.overlay_descriptor = os.open("/proc", os.O_RDONLY)
        run = self.started()
        self.assertEqual(run.workspace_view.tree_descriptor, self.launcher.overlay_descriptor)
        run.close()
        self.assertEqual(self.launcher.killed, [self.workspace])
        run.close()
        self.assertRaises(OSError, os.fstat, self.launcher.overlay_descriptor)
        self.assertIsNone(run.workspace_view.tree_descriptor)

    def test_resumed_run_goes_on_with_its_output_and_limits(self) -> None:
        described = json.loads(json.dumps(self.started().make_resume_data()))
        self.launcher.overlay_descriptor = os.open("/proc", os.O_RDONLY)
        run = self.no_cell()
        run.resume_process(ProcessProtocol(), ResumableProcess(described, 7, 8, 900))
        program = StartedProgram(self.workspace.output_directory, 7, 8)
        self.assertEqual(self.launcher.connected, [(program, 900)])
        self.assertEqual(self.disks[-1].run_start_time, described["since"])
        self.assertEqual(run.workspace_view.tree_descriptor, self.launcher.overlay_descriptor)
        run.close()
        self.assertEqual(self.cgroups.group.removed, 1)


class NoSandboxTests(CellTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.child: Any = FakeChild(Clock(), ProcessProtocol())

    def test_run_without_sandbox_uses_the_paths_of_the_workspace(self) -> None:
        cell = NoSandbox(LIMITS, self.cgroups, self.launcher, TOOLS).make_run(
            self.workspace, self.checkout, LIMITS
        )
        self.assertEqual(cell.workspace_view, self.workspace.make_unsandboxed_view())
        self.assertEqual((cell.limits, cell.workspace), (LIMITS, self.workspace))
        cell.start_evaluator("x", ENVIRONMENT, Path("/"))
        self.assertEqual(self.cgroups.made, [("word", LIMITS)])

    def test_signal_reaches_the_group_and_descendants_outside_the_group(self) -> None:
        done: list[object] = []
        self.patch(module, "list_descendant_pids", lambda pid: done.append(pid) or [31, 32])
        self.patch(module, "send_signal", lambda pid, number: done.append((pid, number)))
        self.child.signal_group = done.append
        self.no_cell().send_signal(self.child, signal.SIGTERM)
        self.assertEqual(done, [NO_PROCESS, signal.SIGTERM, (31, 15), (32, 15)])

    def test_process_group_and_all_processes_of_the_evaluation_directory_are_killed(self) -> None:
        asked: list[object] = []
        self.patch(
            module,
            "kill_directory_processes",
            lambda root, parent: asked.append((root, parent)),
        )
        cell = self.no_cell()
        cell.start_evaluator("x", ENVIRONMENT, Path("/"))
        cell.run_limits.first_process = self.child
        self.child.exit(0)
        self.successResultOf(Deferred.fromCoroutine(cell.kill_remaining_processes()))
        self.assertEqual(self.child.group_signals, [signal.SIGKILL])
        self.assertEqual(asked, [(Path("/state/evaluations/word"), 77)])

    def test_exit_without_a_sandbox_is_the_status_or_signal_of_the_shell(self) -> None:
        cell = self.no_cell()
        self.assertEqual(cell.interpret_exit(137, None), EvaluatorExit(137))
        self.assertEqual(cell.interpret_exit(None, 9), EvaluatorExit(None, 9))
        self.assertEqual(cell.interpret_exit(0, None), EvaluatorExit(0, None))
