"""A fake sandbox, whose runs do as the test says and have no process, cgroup or disk."""

from __future__ import annotations

import resource
import signal as signals
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from resource import struct_rusage
from typing import Any

import attrs
from twisted.internet.protocol import ProcessProtocol

from tawebeval.config import LimitSettings, SlurmJobSettings
from tawebeval.core.evaluations import Checkout
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.run import Run
from tawebeval.linux.cgroups import CgroupManager, ResourceUsage
from tawebeval.linux.kernel_files import CgroupDirectory
from tawebeval.linux.starter import LaunchSpec
from tawebeval.linux.starter_client import StartedProgram
from tawebeval.sandbox.base import (
    ClusterJob,
    Environment,
    EvaluatorExit,
    ResumableProcess,
    RunLimits,
)
from tawebeval.sandbox.disk import DiskUsage
from tawebeval.sandbox.workspace import Workspace, WorkspaceView
from tests.fakes.children import NO_PROCESS, FakeChild, FakeSpawner
from tests.fakes.gates import Gate

NO_CGROUPS = CgroupManager({})
"""A machine on which there is nothing to limit a tree with."""


class FakeRunLimits(RunLimits):
    """Limits that the test drives.

    `over` is the answer of `find_limit_failure`; `looks` has `final` of each, and `counts` is how
    many of these counted files; `used` is the usage. `fault`, if set, is raised instead, or only
    where files are counted, with `fails_to_count`.
    """

    cgroup = first_process = None
    disk_bytes = inspected_entry_count = 0
    free_disk_bytes = inf
    over: EvaluationFailure | None = None
    fault: Exception | None = None
    fails_to_count = False
    used = ResourceUsage(None, None)

    def __init__(self, settings: LimitSettings, **given: Any) -> None:
        self.settings = settings
        self.looks: list[bool] = []
        self.counts = 0
        vars(self).update(given)

    def find_limit_failure(
        self, final: bool = False, counts: bool = True
    ) -> EvaluationFailure | None:
        """Answer, and note the question."""
        self.looks.append(final)
        self.counts += counts
        if self.fault is not None and (counts or not self.fails_to_count):
            raise self.fault
        return self.over

    def find_node_limit_failure(self) -> EvaluationFailure | None:
        """Answer, if that is about memory."""
        return self.over if self.over is not None and self.over.reason == "memory" else None

    def read_usage(self, rusage: struct_rusage | None) -> ResourceUsage:
        return self.used


@attrs.define(eq=False)
class FakeSandboxedRun:
    """A run that the test drives.

    While `orphans` is shut, processes resist `kill_remaining_processes`.

    `unable` is raised by `start_evaluator`, `unstarted` by `interpret_exit`, and each of
    `unkillable` by one call of `kill_remaining_processes`.
    """

    limits: LimitSettings
    workspace_view: WorkspaceView
    _spawner: FakeSpawner
    orphans: Gate = attrs.field(factory=Gate)
    unstarted: EvaluationFailure | OSError | None = None
    unkillable: list[OSError] = attrs.field(factory=list)
    unable: OSError | None = None
    started_as: list[LaunchSpec] = attrs.field(factory=list)
    resumed_as: list[tuple[Mapping[str, Any], int, int, int]] = attrs.field(factory=list)
    closed: int = 0
    has_network: bool = True
    is_build: bool = False
    has_external_queue: bool = False
    cluster_job: ClusterJob | None = None
    job_settings: Sequence[SlurmJobSettings] = ()
    begin: Gate = attrs.field(factory=Gate)
    workspace: Workspace = attrs.field(factory=lambda: Workspace(Path("/some")))
    run_limits: FakeRunLimits = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.run_limits = FakeRunLimits(self.limits)

    @property
    def child(self) -> Any:
        return self.run_limits.first_process

    async def wait_for_evaluator_start(self, started: LaunchSpec) -> None:
        """Wait until the gate `begin` is open."""
        await self.begin.wait()

    def connect_process(self, run: ProcessProtocol, started: LaunchSpec) -> FakeChild:
        return self._spawner.adopt_child(run, started)

    def resume_process(self, run: ProcessProtocol, left: ResumableProcess) -> FakeChild:
        """Let the process drive `run`; note how it was found."""
        if self.unable is not None:
            raise self.unable
        self.resumed_as.append(attrs.astuple(left, recurse=False))
        child = self._spawner.adopt_child(run, None)
        if isinstance(run, Run):
            files = run._stdout._files
            child.deliver_later(files.read_stdout(left.stdout_offset, files.stdout_size))
        return child

    def start_evaluator(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> LaunchSpec:
        """Start nothing, and return what would be, for a fake spawner to adopt."""
        if self.unable is not None:
            raise self.unable
        self.started_as.append(LaunchSpec(["/bin/sh", "-c", command], environment, str(directory)))
        return self.started_as[-1]

    def send_signal(self, child: Any, number: int) -> None:
        child.signal_group(number)

    async def kill_remaining_processes(self) -> None:
        """Return when the gate is open."""
        if self.unkillable:
            raise self.unkillable.pop()
        self.child.signal_group(signals.SIGKILL)
        await self.orphans.wait()

    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        if self.unstarted is not None:
            raise self.unstarted
        return EvaluatorExit(status, number)

    def close(self) -> None:
        self.closed += 1

    def make_resume_data(self) -> dict[str, Any]:
        return {"group": None}


@attrs.define
class FakeLauncher:
    """Makes no trees; `made` are the checkouts that trees were wanted of, `copied` those of copies.

    `launched` is what was to be started, `error` raised instead, `overlay_descriptor` everybody's.
    `overlay_problem` is why there are no overlays. `ended` is what `starter` says of each program:
    status and output. `killed` are the workspaces whose programs were killed.
    """

    overlay_descriptor: int | None = None
    overlay_problem: str | None = None
    error: OSError | None = None
    ended: tuple[int, bytes] = (0, b"")
    pid: int = 77
    made: list[Path] = attrs.field(factory=list)
    copied: list[Path] = attrs.field(factory=list)
    launched: list[LaunchSpec] = attrs.field(factory=list)
    killed: list[Workspace] = attrs.field(factory=list)
    connected: list[tuple[StartedProgram, int]] = attrs.field(factory=list)
    closed: int = 0

    @property
    def starter(self) -> FakeLauncher:
        """The starter, which is this."""
        return self

    def connect_starter(self) -> FakeLauncher:
        if self.error is not None:
            raise self.error
        return self

    async def run_in_thread(self, call: Callable[[], Any]) -> Any:
        return call()

    def list_programs(self) -> set[Path]:
        return set()

    def start_program(
        self, checkout: Path, workspace: Workspace, launch: LaunchSpec, *, copies_tree: bool = False
    ) -> StartedProgram:
        self.made.append(checkout)
        if copies_tree:
            self.copied.append(checkout)
        self.launched.append(launch)
        if self.error is not None:
            raise self.error
        return StartedProgram(workspace.output_directory, NO_PROCESS, 1, self.overlay_descriptor)

    def connect_program(self, protocol: Any, program: StartedProgram, offset: int = 0) -> Any:
        """Note the program, and from where stdout goes on."""
        self.connected.append((program, offset))
        return None

    def reopen_overlay(self, directory: Path) -> int | None:
        return self.overlay_descriptor

    def wait_for_program(self, directory: Path, timeout: float) -> tuple[int, bytes]:
        return self.ended

    def kill_program(self, workspace: Workspace) -> None:
        self.killed.append(workspace)

    def attach_reactor(self, *_: Any) -> None:
        """Do nothing."""

    def close(self, *, stop: bool = True) -> None:
        self.closed += 1


class FakeSandbox:
    """Makes fake cells, which all share a gate for their orphans."""

    def __init__(self, limits: LimitSettings, spawner: FakeSpawner) -> None:
        self._spawner = spawner
        self.cells: list[FakeSandboxedRun] = []
        self.environments: list[Environment | None] = []  # of the cells
        self.orphans = Gate()
        self.has_external_queue = False
        self.begin = Gate()  # of all cells
        self.unable: OSError | None = None  # of cells that are made from now on
        self.default_limits = limits

    def make_run(
        self,
        workspace: Workspace,
        checkout: Checkout,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> Any:
        self.environments.append(environment)
        cell = FakeSandboxedRun(
            limits,
            workspace.make_unsandboxed_view(),
            self._spawner,
            self.orphans,
            unable=self.unable,
            has_external_queue=self.has_external_queue,
            begin=self.begin,
            workspace=workspace,
        )
        self.cells.append(cell)
        return self.cells[-1]

    @property
    def last(self) -> FakeSandboxedRun:
        """The cell that was made last."""
        return self.cells[-1]


@attrs.define
class FakeGroup:
    """A group that says what the test wants; `removed` counts, also when it `stays`."""

    entries: Sequence[str] = ()
    name: str = "group"
    over: frozenset[str] = frozenset()
    submission_peak_memory_bytes: int = 0
    used: ResourceUsage = attrs.field(factory=lambda: ResourceUsage(None, None))
    removed: int = 0
    stays: OSError | None = None
    patience: list[float] = attrs.field(factory=list)

    directory: CgroupDirectory = attrs.field(factory=lambda: CgroupDirectory(""))

    @property
    def procs_files(self) -> Sequence[str]:
        return self.entries

    def find_exceeded_limits(self, patience: float) -> frozenset[str]:
        self.patience.append(patience)
        return self.over

    def read_usage(self, rusage: resource.struct_rusage | None) -> ResourceUsage:
        return self.used

    def is_over_cpu_limit(self, limit: float, measure: Callable[[], float]) -> bool:
        used = self.used.cpu_seconds
        return (measure() if used is None else used) > limit

    def remove_cgroup(self) -> None:
        self.removed += 1
        if self.stays is not None:
            raise self.stays


@attrs.define
class FakeCgroups:
    """What gives `group` to everybody.

    `made` are the names and limits that were asked for.
    """

    enforced_resources: frozenset[str] = frozenset()
    evaluator_niceness: int = 10
    group: FakeGroup = attrs.field(factory=FakeGroup)
    made: list[tuple[str, LimitSettings]] = attrs.field(factory=list)

    def make_evaluation_cgroup(self, identifier: str, limits: LimitSettings) -> FakeGroup:
        self.made.append((identifier, limits))
        return self.group

    def find_evaluation_cgroup(self, name: str) -> FakeGroup:
        return self.group


@attrs.define
class FakeDisk:
    """A watch over a disk on which there is what `last_usage` says.

    `looks` has of each look whether it was to count anew.
    """

    directory: Path
    size: int
    max_files: int
    pids: Callable[[], Iterable[int]]
    last_usage: DiskUsage = attrs.field(factory=DiskUsage)
    looks: list[bool] = attrs.field(factory=list)
    run_start_time: float = 0
    free_bytes: float = inf

    def measure_usage(self, again: bool, counts: bool) -> DiskUsage:
        self.looks.append(again)
        return self.last_usage
