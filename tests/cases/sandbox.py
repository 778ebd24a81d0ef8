"""A cell on a machine where nothing is done."""

from __future__ import annotations

import resource
from collections.abc import Collection
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import GIB, MIB, LimitSettings
from tawebeval.core.evaluations import Checkout, Commit
from tawebeval.sandbox import base as limits_module
from tawebeval.sandbox.base import NoSandbox, SandboxedRun
from tawebeval.sandbox.workspace import Workspace
from tests.fakes.sandbox import FakeCgroups, FakeDisk, FakeLauncher

LIMITS = LimitSettings(
    cpu=30,
    memory=64 * MIB,
    processes=32,
    open_files=99,
    file_size=5 * MIB,
    disk=GIB,
    disk_files=1000,
)
TOOLS = Path("/state/accounts/tools")
ENVIRONMENT = {"EVALUATION_DATA_BEGIN": "--secret--", "PATH": "/usr/bin:/bin"}


class CellTestCase(SynchronousTestCase):
    """What a cell needs: a workspace, cgroups and a disk, on which nothing is done."""

    checkout = Checkout(
        Commit("c" * 40, "7" * 40, file_count=10, size=5000), Path("/cache/tree"), lambda: None
    )

    def setUp(self) -> None:
        self.launcher: Any = FakeLauncher()
        self.cgroups: Any = FakeCgroups()
        self.workspace = Workspace(Path("/state/evaluations/word"))
        self.disks: list[FakeDisk] = []
        self.patch(limits_module, "DiskMeter", self.watch)
        self.hard = resource.RLIM_INFINITY  # of the daemon, for whatever it is
        self.patch(resource, "getrlimit", lambda number: (0, self.hard))

    def watch(
        self, *arguments: Any, excluded_names: Collection[str], run_start_time: float, floor: int
    ) -> FakeDisk:
        self.assertEqual(floor, LIMITS.free_disk)
        self.assertEqual(sorted(excluded_names), ["output", "request", "submission"])
        self.assertGreater(run_start_time, 0)
        self.disks.append(FakeDisk(*arguments))
        return self.disks[-1]

    @property
    def disk(self) -> FakeDisk:
        (disk,) = self.disks
        return disk

    def no_cell(self) -> SandboxedRun:
        sandbox = NoSandbox(LIMITS, self.cgroups, self.launcher, TOOLS)
        return sandbox.make_run(self.workspace, self.checkout, LIMITS)

    def started(self) -> SandboxedRun:
        cell = self.no_cell()
        cell.start_evaluator("x", ENVIRONMENT, Path("/"))
        return cell
