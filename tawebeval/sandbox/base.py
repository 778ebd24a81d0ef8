"""A sandbox and one run in it: what all kinds have in common, and the kind without a sandbox.

A `Sandbox` belongs to the daemon. It makes a `SandboxedRun` for each evaluation, which turns the
evaluator's command into a process to start, holds its limits, signals and ends its processes,
measures their usage and interprets their exit.

These two classes are the seam for other kinds of sandbox, such as containers or a cluster;
`SandboxedRun` says what an implementation has to do.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any, Protocol

import attrs
from twisted.internet.protocol import ProcessProtocol

from tawebeval.config import LimitSettings
from tawebeval.core.checkout import Checkout
from tawebeval.core.evaluator_environment import add_tools_to_path
from tawebeval.errors import EvaluationFailure, build_limit_failure, format_size
from tawebeval.linux.cgroups.manager import CgroupManager, EvaluationCgroup, ResourceUsage
from tawebeval.linux.child import ProcessTransport
from tawebeval.linux.reaper import OrphanReaper, list_descendants, send_signal
from tawebeval.linux.starter_client import LaunchSpec, StartedProgram
from tawebeval.sandbox.broker import measure_cpu_seconds
from tawebeval.sandbox.disk_usage import BLOCK_BYTES, SIGNIFICANT_DISK_USAGE_BYTES, DiskMeter
from tawebeval.sandbox.environments import Environment
from tawebeval.sandbox.overlay import WritableTrees
from tawebeval.sandbox.workspace import READ_ONLY_WORKSPACE_NAMES, Workspace, WorkspaceView

_TOOLS = Path(__file__).with_name("tools")
# Now: the user of the service may not read it later. With their times, by which Python knows
# whether a compiled module is outdated.
EVALUATOR_TOOLS = {
    path.relative_to(_TOOLS): (path.read_bytes(), path.stat().st_mtime)
    for path in _TOOLS.rglob("*")
    if path.is_file()
}
"""The tools for evaluators: content and time (seconds since the epoch) of each file."""

_STACK = 8 * 2**20  # bytes: the soft limit of most systems
_SIGNALS = 1024  # pending signals, which the kernel counts for all processes of a user
# Seconds for which a limit that the kernel enforces may go unnoticed: the run gains nothing by it.
_UNNOTICED = 1.0


@attrs.frozen
class EvaluatorExit:
    """The exit status of an evaluator, or the number of the signal that ended it."""

    status: int | None
    signal: int | None = None


@attrs.define
class RunnerStatus:
    """Where a run is that is not on this machine: a part of the status of its evaluation.

    `queue_reason` is why the cluster has not started the job yet, in the cluster's own words.
    `retry_count` is how often the run was begun again after the loss of a node.
    """

    kind: str
    job_id: str | None = None
    node: str | None = None
    queue_reason: str | None = None
    retry_count: int = 0

    def build_json_object(self) -> dict[str, Any]:
        """Return the members, by their names on the wire and in journals."""
        return {
            "kind": self.kind,
            "job": self.job_id,
            "node": self.node,
            "queue_reason": self.queue_reason,
            "retries": self.retry_count,
        }


def build_cpu_limit_failure(limits: LimitSettings) -> EvaluationFailure:
    """Return the error of a run over its processor time."""
    what = f"used over {limits.cpu} seconds of processor time"
    return build_limit_failure("cpu", "cpu", what, limits.cpu)


class SandboxedRun(ABC):
    """One run of one evaluator: its process, limits, cgroup and writable tree.

    A kind of sandbox is a subclass with five methods, and a `Sandbox` that makes it:

    - `make_workspace_view`: the paths under which the evaluator sees its workspace.
    - `make_launch_spec`: the program that runs the command. The program is a child of the starter,
      and its stdout and stderr are the evaluator's. For a container or a remote machine it is a
      client that stays in the foreground, such as `podman run`.
    - `send_signal`: pass a signal on to all processes of the run.
    - `kill_remaining_processes`: kill what the first process has left, and return when nothing is
      left that could write to the workspace.
    - `interpret_exit`: the evaluator's own exit, as far as the program's exit tells.

    The base class does the rest: it makes the workspace's tree, starts the program in the run's
    cgroup, checks limits and measures usage. A kind that has its own limits or file system
    overrides `start_evaluator`, `check_limits`, `read_usage` and `close`. `probe.open_sandbox`
    chooses the kind by the setting `sandbox.kind`.

    The order of calls is: `start_evaluator` and `connect_process`, or `resume_process`;
    `set_first_process`; any number of `send_signal` and `check_limits`, the latter in a thread;
    after the first process has exited `kill_remaining_processes`, `interpret_exit`, `read_usage`,
    and `check_limits(final=True)` after a failure or else `check_memory`; `close`, also without a
    start.
    """

    has_network = True  # whether the evaluator reaches the network
    has_external_queue = False  # whether the started program waits until something else lets it run
    stores_stdout = True  # whether stdout is in the file of the output directory
    runner_status: RunnerStatus | None = None  # None on this machine
    # Reads a file that the evaluator names; None if its files are on this machine.
    read_remote_file: Callable[[str], Awaitable[bytes]] | None = None
    problem_name: str | None = None  # the name of the problem, for kinds with settings by problem

    def __init__(
        self, workspace: Workspace, checkout: Checkout, sandbox: Sandbox, limits: LimitSettings
    ) -> None:
        self.limits = limits
        self.workspace = workspace
        self._checkout = checkout
        self._cgroups = sandbox.cgroup_manager
        self._orphans = sandbox.orphan_reaper
        self._trees = sandbox.writable_trees
        self._tree: int | None = None  # descriptor of the overlay that only the evaluator sees
        self._group: EvaluationCgroup | None = None
        # The limit is for what the evaluator adds. The checkout is there from the start, or an
        # overlay copies a file of it when the evaluator changes the file.
        commit = checkout.commit
        self._most_disk = limits.disk + commit.size + BLOCK_BYTES * commit.file_count
        self._most_files = limits.disk_files + commit.file_count
        self._disk = DiskMeter(
            workspace.writable_directory,
            self._most_disk,
            self._most_files,
            self._pids,
            excluded_names=READ_ONLY_WORKSPACE_NAMES,
            run_start_time=time.time(),
            floor=limits.free_disk,
            held=workspace.quota_directory is not None,
        )
        self._first: ProcessTransport | None = None

    @property
    def workspace_view(self) -> WorkspaceView:
        """The paths under which the evaluator sees its workspace."""
        view = self.make_workspace_view()
        if self._tree is None:
            return view
        return attrs.evolve(view, path_descriptors={self.workspace.tree_directory: self._tree})

    @abstractmethod
    def make_workspace_view(self) -> WorkspaceView:
        """Return the evaluator's view of the workspace, without an overlay's descriptor."""

    def start_evaluator(self, command: str, environment: Mapping[str, str], directory: Path) -> Any:
        """Start the shell that runs `command` in `directory`, a path of the daemon's. Blocks.

        The result is for `connect_process`. Raises: OSError.
        """
        # Other users can read the names of cgroups: the identifier must not be among them.
        self._group = self._cgroups.make_evaluation_cgroup(self.workspace.root.name, self.limits)
        launch = self.make_launch_spec(command, environment, directory)
        launch = attrs.evolve(
            launch,
            cgroup_procs_files=self._group.find_procs_files(),
            niceness=self._cgroups.evaluator_niceness,
            max_stdout_bytes=self.limits.output,
            max_stderr_bytes=self.limits.stderr,
        )
        started = self._trees.start_program(self._checkout.path, self.workspace, launch)
        if (overlay := started.overlay) is not None:
            self._tree, self._disk.device_numbers = overlay.root_descriptor, overlay.device_numbers
        return started

    @abstractmethod
    def make_launch_spec(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> LaunchSpec:
        """Return the program by which the shell runs `command` in `directory`.

        `directory` is a path of the daemon's. `start_evaluator` adds cgroups and the nice value.
        Raises: OSError.
        """

    async def wait_for_evaluator_start(self, started: Any) -> None:  # noqa: B027
        """Wait until the evaluator runs, with `has_external_queue`. Raises: EvaluationFailure.

        A cancellation is raised after the end of the started program.
        """

    def connect_process(self, run: ProcessProtocol, started: Any) -> ProcessTransport:
        """Let the started process drive `run`. Raises: OSError."""
        return self._trees.connect_program(run, started)

    @abstractmethod
    def send_signal(self, child: ProcessTransport, number: int) -> None:
        """Send a signal to all processes of the run; `child` is the first, and still runs."""

    def abort_remote_reads(self) -> None:  # noqa: B027  (most kinds have none)
        """End `read_remote_file` soon, whatever a node does: the stopped run has ended."""

    @abstractmethod
    async def kill_remaining_processes(self) -> None:
        """Kill the processes that the first one has left, and return after their end."""

    @abstractmethod
    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the evaluator's exit, by the exit status or signal of the first process.

        Raises: EvaluationError, if the evaluator was not even started.
        """

    def set_first_process(self, child: ProcessTransport) -> None:
        """Set the run's first process, once it was adopted."""
        self._first = child

    # For a run that outlives the daemon

    def describe_for_resume(self) -> dict[str, Any]:
        """Return what `resume_process` needs, as JSON."""
        return {
            "group": None if self._group is None else self._group.name,
            "devices": sorted(self._disk.device_numbers),
            "since": self._disk.run_start_time,
        }

    def resume_process(
        self,
        run: ProcessProtocol,
        described: Mapping[str, Any],
        pid: int,
        start_time: int,
        stdout_offset: int,
    ) -> ProcessTransport:
        """Go on with a run that was started by another process of the daemon. Blocks.

        It takes the place of `start_evaluator` and `connect_process`; stdout goes on at an offset.
        The first process may have ended, or be lost. Raises: OSError.
        """
        overlay = self._trees.reopen_overlay(self.workspace)
        if overlay is not None:
            self._tree = overlay.root_descriptor
        if described["group"] is not None:
            self._group = self._cgroups.find_evaluation_cgroup(described["group"])
        self._disk.device_numbers = frozenset(described["devices"])
        self._disk.run_start_time = described["since"]
        program = StartedProgram(self.workspace.output_directory, pid, start_time)
        return self._trees.connect_program(run, program, stdout_offset)

    def check_limits(self, final: bool = False, work: float = inf) -> EvaluationFailure | None:
        """Return the error of the first exceeded limit; None if all are kept. Blocks.

        `final`, for a run that has failed, looks more closely. `work` is the maximum number of
        looks at the disk.

        Raises: TooManyInspections, if more are needed and no other limit is exceeded.
        """
        limits = self.limits
        # An exited run may wait for its readers for long, and uses nothing but the disk.
        if self._group is not None and (final or self._running):
            over = self._group.find_exceeded_limits(0 if final else _UNNOTICED)
            if "memory" in over:
                return self._build_memory_failure()
            if "processes" in over:
                what = f"started over {limits.processes} processes and threads"
                return build_limit_failure("processes", "processes", what, limits.processes)
            if self._group.is_over_cpu_limit(limits.cpu, self._measure_cpu_seconds):
                return build_cpu_limit_failure(limits)
        disk = self._disk.measure_usage(again=final, work=work)
        if disk.disk_bytes > self._most_disk:
            what = f"wrote over {format_size(limits.disk)} to the disk"
            return build_limit_failure("disk", "disk", what, limits.disk)
        if disk.file_count > self._most_files or disk.has_uncounted_deep_directories:
            what = f"made over {limits.disk_files} files and directories, or nested them too deeply"
            return build_limit_failure("disk", "disk_files", what, limits.disk_files)
        if final and disk.largest_file_bytes >= limits.file_size:
            what = f"wrote a file of {format_size(limits.file_size)}"
            return build_limit_failure("file_size", "file_size", what, limits.file_size)
        if (
            final
            and self.is_disk_nearly_full
            and (
                self.disk_bytes >= SIGNIFICANT_DISK_USAGE_BYTES
                or self.free_disk_bytes < SIGNIFICANT_DISK_USAGE_BYTES
            )
        ):
            return self.make_disk_error()
        return None

    def check_memory(self) -> EvaluationFailure | None:
        """Return the error of a run over its memory, as `read_usage` has found it.

        With version 1 of cgroups the kernel kills one process, and the evaluator may go on and
        succeed.
        """
        if self._group is None or "memory" not in self._group.find_exceeded_limits(inf):
            return None
        return self._build_memory_failure()

    def _build_memory_failure(self) -> EvaluationFailure:
        limit = self.limits.memory
        what = f"used over {format_size(limit)} of memory"
        if self._group is not None and (programs := self._group.submission_peak_memory_bytes):
            what = f"and the submission's programs ({format_size(min(programs, limit))}) {what}"
        return build_limit_failure("memory", "memory", what, limit)

    @property
    def disk_bytes(self) -> int:
        """The bytes of the run on the disk, as last counted."""
        return self._disk.last_usage.disk_bytes

    @property
    def free_disk_bytes(self) -> float:
        """The free bytes of the disk at the last look."""
        return self._disk.free_bytes

    @property
    def is_disk_nearly_full(self) -> bool:
        """Whether less than `limits.free_disk` was free at the last look."""
        return self.free_disk_bytes < self.limits.free_disk

    def make_disk_error(self) -> EvaluationFailure:
        """Return the error of a run that is stopped because the disk is nearly full."""
        floor = self.limits.free_disk
        return EvaluationFailure(
            "disk",
            f"the evaluator was stopped: under {format_size(floor)} (limits.free_disk) of the"
            " server's disk is free, and the evaluator's files take"
            f" {format_size(self.disk_bytes)}",
            {"limit": "limits.free_disk", "value": floor},
        )

    def read_usage(self, rusage: resource.struct_rusage | None) -> ResourceUsage:
        """Return the usage, when all processes have ended. Blocks.

        `rusage` is the usage that wait4(2) has returned; None if it was not called.
        """
        if self._group is None:
            return ResourceUsage(None, None)
        return self._group.read_usage(rusage)

    def close(self) -> None:
        """Kill the remaining processes and remove what `start_evaluator` has made. Blocks.

        Raises: OSError, if killed processes do not end soon; call again later.
        """
        if self._tree is not None:
            os.close(self._tree)
            self._tree = None
        self._trees.forget_program(self.workspace)
        if self._group is not None:
            self._group.remove_cgroup()
            self._group = None

    @property
    def _running(self) -> bool:
        return self._first is not None and self._first.is_running

    def _pids(self) -> Iterable[int]:
        # After the first process has ended another one may have its number.
        return (
            list_descendants(self._first.pid) if self._first is not None and self._running else ()
        )

    def _measure_cpu_seconds(self) -> float:
        """Return the processor time of all processes without cgroups, as far as /proc tells."""
        if self._first is None or not self._running:
            return 0.0
        return measure_cpu_seconds(self._first.pid)

    def _list_rlimits(self, *, apart: bool) -> Mapping[str, tuple[int, int]]:
        """Return the resource limits of each process, soft and hard, by their names.

        Resources that the cgroup limits are left out. `apart`: the kernel counts the user's
        processes for this run alone, as in a user namespace. The hard limits of core dumps and of
        processor time are the daemon's: some programs raise the soft limits of their children.
        """
        limits, core = self.limits, resource.getrlimit(resource.RLIMIT_CORE)[1]
        own_cpu = resource.getrlimit(resource.RLIMIT_CPU)[1]
        own_as = resource.getrlimit(resource.RLIMIT_AS)[1]
        own_stack = resource.getrlimit(resource.RLIMIT_STACK)[1]
        bounds = {
            # Twice as much: the kernel compares it with ticks, and `LimitMonitor` looks first.
            "cpu": (2 * limits.cpu + 1, own_cpu),
            "fsize": (limits.file_size, limits.file_size),
            "nofile": (limits.open_files, limits.open_files),
            # With 1 byte the kernel writes no file and starts no crash handler. With 0 it starts
            # the machine's handler, as root (core(5)).
            "core": (1 if core else 0, core),
            # Whatever the shell of the daemon had.
            "as": (own_as, own_as),
            "stack": (_STACK if own_stack < 0 else min(_STACK, own_stack), own_stack),
            "msgqueue": (0, 0),
            "sigpending": (_SIGNALS, _SIGNALS),
            "nice": (0, 0),
            "rtprio": (0, 0),
        }
        if apart and "processes" not in self._cgroups.enforced_resources:
            bounds["nproc"] = (limits.processes, limits.processes)
        if "memory" not in self._cgroups.enforced_resources:
            bounds["data"] = (limits.memory, limits.memory)
        return bounds


def convert_rlimit_names(rlimits: Mapping[str, tuple[int, int]]) -> Mapping[int, tuple[int, int]]:
    """Return limits with the numbers of their resources (getrlimit(2)) in place of names."""
    return {getattr(resource, f"RLIMIT_{name.upper()}"): rlimits[name] for name in rlimits}


class Sandbox(Protocol):
    """One kind of sandbox, as the daemon has set it up: it makes runs, and has what they share.

    `limits` are the defaults of all runs.
    """

    limits: LimitSettings
    cgroup_manager: CgroupManager
    orphan_reaper: OrphanReaper
    writable_trees: WritableTrees

    def make_run(
        self,
        workspace: Workspace,
        checkout: Checkout,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> SandboxedRun:
        """Return the run of an evaluation with these limits, not started yet.

        `environment` None is the machine's system.
        """


class UnsandboxedRun(SandboxedRun):
    """A run with the rights of the daemon, whose orphans are found by a mark they inherit."""

    _mark = b""  # empty before the start

    def __init__(
        self, workspace: Workspace, checkout: Checkout, sandbox: NoSandbox, limits: LimitSettings
    ) -> None:
        super().__init__(workspace, checkout, sandbox, limits)
        self._tools = sandbox.tools_directory

    def make_workspace_view(self) -> WorkspaceView:
        """Return the evaluator's view of the workspace."""
        return self.workspace.make_unsandboxed_view()

    def make_launch_spec(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> LaunchSpec:
        """Return the shell with the command."""
        # A secret of this run, which all of its processes inherit.
        self._mark = environment["EVALUATION_DATA_BEGIN"].encode()
        return LaunchSpec(
            ["/bin/sh", "-c", command],
            add_tools_to_path(environment, str(self._tools)),
            str(directory),
            rlimits=convert_rlimit_names(self._list_rlimits(apart=False)),
        )

    def send_signal(self, child: ProcessTransport, number: int) -> None:
        """Send a signal to the process group, and to descendants that have left it."""
        strays = list_descendants(child.pid)
        child.signal_group(number)
        for pid in strays:
            send_signal(pid, number)

    async def kill_remaining_processes(self) -> None:
        """Kill the process group, and the orphans of the run."""
        if self._first is not None:
            self._first.signal_group(signal.SIGKILL)
        if self._mark:
            await self._orphans.kill_orphans_of_run(
                self._mark, str(self.workspace.writable_directory)
            )

    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the exit of the shell."""
        return EvaluatorExit(status, number)


@attrs.define
class NoSandbox:
    """The sandbox of `sandbox.kind = "none"`: runs have the rights of the daemon.

    `tools_directory` has the tools for evaluators (`bubblewrap.write_sandbox_files`).
    """

    limits: LimitSettings
    cgroup_manager: CgroupManager
    orphan_reaper: OrphanReaper
    tools_directory: Path
    writable_trees: WritableTrees = attrs.field(eq=False)

    def make_run(
        self,
        workspace: Workspace,
        checkout: Checkout,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> SandboxedRun:
        """Return the run of an evaluation with these limits, not started yet.

        `parse_configuration` refuses environments without a sandbox.
        """
        assert environment is None, "environments need a sandbox"
        return UnsandboxedRun(workspace, checkout, self, limits)
