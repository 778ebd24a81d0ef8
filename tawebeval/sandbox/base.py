"""A sandbox and one run in it: what all kinds have in common, and the kind without a sandbox.

A `Sandbox` belongs to the daemon. It makes a `SandboxedRun` for each evaluation, which turns the
evaluator's command into a process to start, holds its limits, signals and ends its processes,
measures their usage and interprets their exit.

These two classes are the seam for other kinds of sandbox, such as containers or a cluster;
`SandboxedRun` says what an implementation has to do.
"""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
from twisted.internet.protocol import ProcessProtocol

from tawebeval.config import LimitSettings
from tawebeval.core.checkout import Checkout
from tawebeval.core.evaluator_environment import add_tools_to_path
from tawebeval.linux.cgroups.manager import CgroupManager
from tawebeval.linux.child import ProcessTransport
from tawebeval.linux.reaper import OrphanReaper, list_descendants, send_signal
from tawebeval.linux.starter_client import LaunchSpec, StartedProgram
from tawebeval.sandbox.environments import Environment
from tawebeval.sandbox.overlay import WritableTrees
from tawebeval.sandbox.run_limits import LocalRunLimits, RunLimits, convert_rlimit_names
from tawebeval.sandbox.workspace import Workspace, WorkspaceView

_TOOLS = Path(__file__).with_name("tools")
# Now: the user of the service may not read it later. With their times, by which Python knows
# whether a compiled module is outdated.
EVALUATOR_TOOLS = {
    path.relative_to(_TOOLS): (path.read_bytes(), path.stat().st_mtime)
    for path in _TOOLS.rglob("*")
    if path.is_file()
}
"""The tools for evaluators: content and time (seconds since the epoch) of each file."""


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

    The base class does the rest: it makes the workspace's tree and starts the program in the run's
    cgroup. `run_limits` checks limits and measures usage. A kind that has its own limits or file
    system sets other `run_limits`, and overrides `start_evaluator` and `close`.
    `probe.open_sandbox` chooses the kind by the setting `sandbox.kind`.

    The order of calls is: `start_evaluator` and `connect_process`, or `resume_process`;
    `set_first_process`; any number of `send_signal`; after the first process has exited
    `kill_remaining_processes` and `interpret_exit`; `close`, also without a start.
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
        self._local_limits = LocalRunLimits(
            limits, sandbox.cgroup_manager, workspace, checkout.commit
        )
        self.run_limits: RunLimits = self._local_limits

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
        group = self._local_limits.make_cgroup(self.workspace.root.name)
        launch = self.make_launch_spec(command, environment, directory)
        launch = attrs.evolve(
            launch,
            cgroup_procs_files=group.find_procs_files(),
            niceness=self._cgroups.evaluator_niceness,
            max_stdout_bytes=self.limits.output,
            max_stderr_bytes=self.limits.stderr,
        )
        started = self._trees.start_program(self._checkout.path, self.workspace, launch)
        if (overlay := started.overlay) is not None:
            self._tree = overlay.root_descriptor
            self._local_limits.disk.device_numbers = overlay.device_numbers
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
        self._local_limits.first_process = child

    # For a run that outlives the daemon

    def describe_for_resume(self) -> dict[str, Any]:
        """Return what `resume_process` needs, as JSON."""
        return self._local_limits.describe_for_resume()

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
        self._local_limits.resume(described)
        program = StartedProgram(self.workspace.output_directory, pid, start_time)
        return self._trees.connect_program(run, program, stdout_offset)

    def close(self) -> None:
        """Kill the remaining processes and remove what `start_evaluator` has made. Blocks.

        Raises: OSError, if killed processes do not end soon; call again later.
        """
        if self._tree is not None:
            os.close(self._tree)
            self._tree = None
        self._trees.forget_program(self.workspace)
        self._local_limits.remove_cgroup()


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
            rlimits=convert_rlimit_names(self._local_limits.list_rlimits(apart=False)),
        )

    def send_signal(self, child: ProcessTransport, number: int) -> None:
        """Send a signal to the process group, and to descendants that have left it."""
        strays = list_descendants(child.pid)
        child.signal_group(number)
        for pid in strays:
            send_signal(pid, number)

    async def kill_remaining_processes(self) -> None:
        """Kill the process group, and the orphans of the run."""
        first = self._local_limits.first_process
        if first is not None:
            first.signal_group(signal.SIGKILL)
        if self._mark:
            await self._orphans.kill_orphans_of_run(
                self._mark, str(self.workspace.writable_directory), self._trees.starter.pid
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
