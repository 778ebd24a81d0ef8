"""A sandbox and one run in it: what all kinds have in common, and the kind without a sandbox.

A `Sandbox` belongs to the daemon. It makes a `SandboxedRun` for each evaluation, which starts the
evaluator and ends its processes, and whose `RunLimits` measure its usage (`limits`). `LocalRun`
uses the starter, on this machine.

These are the seam for other kinds of sandbox, such as containers or a cluster.
`probe.open_sandbox` chooses the kind by the setting `sandbox.kind`.
"""

from __future__ import annotations

import os
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import attrs
from twisted.internet.protocol import ProcessProtocol

from tawebeval.config import Configuration, LimitSettings, SlurmJobSettings
from tawebeval.core.evaluations import Checkout
from tawebeval.core.segi import add_tools_to_path
from tawebeval.linux.cgroups import CgroupManager
from tawebeval.linux.child import kill_processes_below, send_signal
from tawebeval.linux.kernel_files import list_descendants
from tawebeval.linux.starter import LaunchSpec
from tawebeval.linux.starter_client import MountedOverlay, StartedProgram
from tawebeval.linux.tail import TailedProcess
from tawebeval.sandbox.limits import RunLimits, convert_rlimit_names
from tawebeval.sandbox.workspace import Workspace, WorkspaceView, WritableTrees

_DIGEST = re.compile(r"sha256-[0-9a-f]{64}")


def find_stored_root_digest(root: Path) -> str | None:
    """Return the digest of a root of the store by its name; None for another directory."""
    return root.name if _DIGEST.fullmatch(root.name) else None


@attrs.frozen
class Environment:
    """A configured root: its name, directory and variables; `digest` is None outside the store."""

    name: str
    root: Path
    variables: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def digest(self) -> str | None:
        """The digest of the content, by the name of the directory."""
        return find_stored_root_digest(self.root)


def find_environment(configuration: Configuration, name: str | None) -> Environment | None:
    """Return the environment of a request; None for the default. Raises: KeyError."""
    if name is None:
        return None
    settings = configuration.environments[name]
    return Environment(name, Path(settings.root), settings.variables)


@attrs.frozen
class EvaluatorExit:
    """The exit status of an evaluator, or the number of the signal that ended it."""

    status: int | None
    signal: int | None = None


@attrs.define
class RunnerStatus:
    """Where a run is that is not on this machine: a part of the status of its evaluation.

    `queue_reason` is why the cluster has not started the job yet, in the cluster's own words.
    `retry_count` is how many jobs were lost before the evaluator ran, and replaced.
    """

    kind: str
    job_id: str | None = None
    node: str | None = None
    queue_reason: str | None = None
    retry_count: int = 0

    def build_json_object(self) -> dict[str, Any]:
        """Return the members, by their names on the wire and in the store."""
        return {
            "kind": self.kind,
            "job": self.job_id,
            "node": self.node,
            "queue_reason": self.queue_reason,
            "retries": self.retry_count,
        }


@attrs.frozen
class LeftProcess:
    """The first process of a run that another process of the daemon has started.

    `description` is that of `Launch.describe_for_resume`; stdout goes on at `stdout_offset`.
    """

    description: Mapping[str, Any]
    pid: int
    start_time: int
    stdout_offset: int


class SandboxedRun(ABC):
    """One run of one evaluator: how it is started, signalled and ended.

    `start_evaluator` and `connect_process`, or `resume_process`, are called once, and `close` in
    the end, also without a start.

    - `workspace_view`: the paths under which the evaluator sees `workspace`.
    - `run_limits`: its limits.
    - `has_network`: whether the evaluator reaches the network.
    - `has_external_queue`: whether the started program waits until something else lets it run.
    - `runner_status`: where the run is; None on this machine.
    - `job_settings`: those of the environment and of the problem, for runs that are jobs.
    """

    has_network = True
    has_external_queue = False
    runner_status: RunnerStatus | None = None
    job_settings: Sequence[SlurmJobSettings] = ()

    def __init__(self, workspace: Workspace, view: WorkspaceView, limits: RunLimits) -> None:
        self.workspace = workspace
        self.workspace_view = view
        self.run_limits = limits

    @property
    def limits(self) -> LimitSettings:
        """The limits of the run."""
        return self.run_limits.settings

    @abstractmethod
    def start_evaluator(self, command: str, environment: Mapping[str, str], directory: Path) -> Any:
        """Start the shell that runs `command` in `directory`, a path of the daemon's. Blocks.

        The result is for `connect_process`. Raises: OSError.
        """

    async def wait_for_evaluator_start(self, started: Any) -> None:  # noqa: B027
        """Wait until the evaluator runs, with `has_external_queue`. Raises: EvaluationFailure.

        A cancellation is raised after the end of the started program.
        """

    @abstractmethod
    def connect_process(self, run: ProcessProtocol, started: Any) -> TailedProcess:
        """Let the started process drive `run`. Raises: OSError."""

    @abstractmethod
    def describe_for_resume(self) -> dict[str, Any]:
        """Return what `resume_process` needs, as JSON."""

    @abstractmethod
    def resume_process(self, run: ProcessProtocol, left: LeftProcess) -> TailedProcess:
        """Go on with a run that was started by another process of the daemon. Blocks.

        The first process may have ended, or be lost. Raises: OSError.
        """

    @abstractmethod
    def send_signal(self, child: TailedProcess, number: int) -> None:
        """Send a signal to all processes of the run; `child` is the first, and still runs."""

    @abstractmethod
    async def kill_remaining_processes(self) -> None:
        """Kill the processes that the first one has left.

        Return when nothing is left that could write to the workspace. Raises: OSError, if they
        cannot be looked for.
        """

    @abstractmethod
    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the evaluator's exit, by the exit status or signal of the first process.

        Raises: EvaluationFailure, if the evaluator was not even started; OSError.
        """

    def close(self) -> None:
        """Kill the remaining processes and remove what the start has made. Blocks.

        Raises: OSError, if killed processes do not end soon; call again later.
        """
        self.run_limits.close()


class LocalRun(SandboxedRun):
    """A run that the starter starts, in a cgroup, with a writable tree over the checkout.

    A kind of sandbox says by a subclass which program runs the command.
    """

    def __init__(
        self,
        workspace: Workspace,
        view: WorkspaceView,
        checkout: Checkout,
        limits: LimitSettings,
        sandbox: Sandbox,
    ) -> None:
        cgroups = sandbox.cgroup_manager
        super().__init__(workspace, view, RunLimits(limits, cgroups, workspace, checkout.commit))
        self._checkout = checkout
        self._sandbox = sandbox
        self._trees = sandbox.writable_trees
        self._overlay: MountedOverlay | None = None  # which only the evaluator sees

    @abstractmethod
    def make_launch_spec(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> LaunchSpec:
        """Return the program by which the shell runs `command` in `directory`.

        The program is a child of the starter, and its stdout and stderr are the evaluator's. For a
        container it is a client that stays in the foreground, such as `podman run`. `directory` is
        a path of the daemon's. `start_evaluator` adds cgroups, the nice value and limits of output.
        Raises: OSError.
        """

    def start_evaluator(self, command: str, environment: Mapping[str, str], directory: Path) -> Any:
        """Start the shell that runs `command` in `directory`, a path of the daemon's. Blocks."""
        # Other users can read the names of cgroups: the identifier must not be among them.
        group = self.run_limits.make_cgroup(self.workspace.root.name)
        launch = self.make_launch_spec(command, environment, directory)._replace(
            procs_files=group.procs_files,
            niceness=self._sandbox.cgroup_manager.evaluator_niceness,
            stdout_limit=self.limits.output,
            stderr_limit=self.limits.stderr,
        )
        started = self._trees.start_program(self._checkout.path, self.workspace, launch)
        if started.overlay is not None:
            self._use_overlay(started.overlay)
            self.run_limits.disk.device_numbers = started.overlay.device_numbers
        return started

    def _use_overlay(self, overlay: MountedOverlay) -> None:
        self._overlay = overlay
        opened = {self.workspace.tree_directory: overlay.root_descriptor}
        self.workspace_view = attrs.evolve(self.workspace_view, path_descriptors=opened)

    def connect_process(self, run: ProcessProtocol, started: Any) -> TailedProcess:
        """Let the started process drive `run`. Raises: OSError."""
        return self._trees.connect_program(run, started)

    def describe_for_resume(self) -> dict[str, Any]:
        """Return what `resume_process` needs, as JSON."""
        return self.run_limits.describe_for_resume()

    def resume_process(self, run: ProcessProtocol, left: LeftProcess) -> TailedProcess:
        """Go on with a run that was started by another process of the daemon. Blocks."""
        overlay = self._trees.reopen_overlay(self.workspace)
        if overlay is not None:
            self._use_overlay(overlay)
        self.run_limits.resume(left.description)
        program = StartedProgram(self.workspace.output_directory, left.pid, left.start_time)
        return self._trees.connect_program(run, program, left.stdout_offset)

    def close(self) -> None:
        """Close the tree, kill the program, and remove the cgroup. Blocks. Raises: OSError."""
        if self._overlay is not None:
            os.close(self._overlay.root_descriptor)
            self._overlay = None
        try:
            self._trees.forget_program(self.workspace)
        finally:
            super().close()


class Sandbox(Protocol):
    """One kind of sandbox, as the daemon has set it up: it makes runs, and has what they share.

    `limits` are the defaults of all runs.
    """

    limits: LimitSettings
    cgroup_manager: CgroupManager
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


class UnsandboxedRun(LocalRun):
    """The run of an evaluator with the rights of the daemon."""

    _sandbox: NoSandbox

    def make_launch_spec(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> LaunchSpec:
        """Return the shell with the command."""
        return LaunchSpec(
            ["/bin/sh", "-c", command],
            add_tools_to_path(environment, str(self._sandbox.tools_directory)),
            str(directory),
            rlimits=convert_rlimit_names(self.run_limits.list_rlimits(apart=False)),
        )

    def send_signal(self, child: TailedProcess, number: int) -> None:
        """Send a signal to the process group, and to descendants that have left it."""
        strays = list_descendants(child.pid)
        child.signal_group(number)
        for pid in strays:
            send_signal(pid, number)

    async def kill_remaining_processes(self) -> None:
        """Kill the process group, and what has left it."""
        first = self.run_limits.first_process
        if first is not None:
            first.signal_group(signal.SIGKILL)
        root, starter = self.workspace.root, self._trees.starter.pid
        await self._trees.run_in_thread(partial(kill_processes_below, root, parent=starter))

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
        view = workspace.make_unsandboxed_view()
        return UnsandboxedRun(workspace, view, checkout, limits, self)
