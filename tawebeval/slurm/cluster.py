"""The sandbox on the nodes of a cluster: what evaluations use in place of the daemon's own."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from resource import struct_rusage
from secrets import token_hex
from typing import Any

import attrs
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger

from tawebeval.config import LimitSettings, RunnerSettings
from tawebeval.core.evaluations import Checkout
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import ConfigurationError, EvaluationFailure
from tawebeval.linux.cgroups import CgroupManager, ResourceUsage
from tawebeval.linux.child import OrphanReaper, ProcessTransport
from tawebeval.linux.filetree import copy_tree
from tawebeval.linux.starter_client import LaunchSpec
from tawebeval.sandbox.base import (
    Environment,
    EvaluatorExit,
    Launch,
    LeftProcess,
    RunEnd,
    RunnerStatus,
    Sandbox,
    SandboxedRun,
)
from tawebeval.sandbox.bubblewrap import (
    WORKSPACE_MOUNT_POINT,
    BubblewrapEnd,
    BubblewrapLaunch,
    BubblewrapSandbox,
    locate_status_file,
)
from tawebeval.sandbox.limits import (
    LocalRunLimits,
    build_cpu_limit_failure,
    build_disk_limit_failure,
)
from tawebeval.sandbox.workspace import Workspace, WorkspaceView, WritableTrees
from tawebeval.slurm.commands import (
    SlurmCommands,
    build_command_environment,
    build_srun_options,
    exclude_node,
)
from tawebeval.slurm.node_process import (
    Attempt,
    ClusterAccess,
    NodeProcess,
    NodeState,
    PollingWatcher,
    build_node_command,
    write_node_program,
)

_SRUN_OUTPUT_BYTES = 2**20  # of srun's own stdout, and of its stderr, that are stored
_NO_CGROUPS = CgroupManager({})  # those of a job belong to root

log = Logger()


@attrs.define(eq=False)
class SlurmSandbox:
    """The sandbox of `runner.kind = "slurm"`.

    `limits`, `cgroup_manager`, `orphan_reaper` and `writable_trees` are those of the daemon's own
    sandbox; its starter runs each srun. `local` makes what a node has to start, of paths that the
    node has, too. `job_prefix` begins the names of all jobs of the daemon, and `session` ends the
    names of those that this process of the daemon starts.
    """

    settings: RunnerSettings
    limits: LimitSettings
    cgroup_manager: CgroupManager
    orphan_reaper: OrphanReaper
    writable_trees: WritableTrees
    local: BubblewrapSandbox
    commands: SlurmCommands
    access: ClusterAccess
    job_prefix: str
    session: str = attrs.field(factory=partial(token_hex, 3))

    @classmethod
    def create(
        cls,
        settings: RunnerSettings,
        local: Sandbox,
        commands: SlurmCommands,
        threads: WorkerThreads,
        reactor: Any,
        label: str,
        left_jobs: Collection[str],
    ) -> SlurmSandbox:
        """Return the sandbox beside the daemon's own, `local`.

        `label` is the daemon's. Jobs of this label that nobody follows are cancelled. Raises:
        ConfigurationError, if `local` is no sandbox.
        """
        if not isinstance(local, BubblewrapSandbox):
            raise ConfigurationError(
                "runner.kind: the nodes run evaluators in bubblewrap, which does not work here",
                "run `tawebeval doctor`, which says why",
            )
        trees = local.writable_trees
        watcher = PollingWatcher(reactor, threads)
        access = ClusterAccess(reactor, lambda: trees.starter, watcher, threads, commands)
        sandbox = cls(
            settings,
            local.limits,
            local.cgroup_manager,
            local.orphan_reaper,
            trees,
            attrs.evolve(local, cgroup_manager=_NO_CGROUPS),
            commands,
            access,
            _begin_job_names(label),
        )
        reactor.callWhenRunning(commands.cancel_jobs, partial(sandbox.is_leftover, left_jobs))
        return sandbox

    def is_leftover(self, left_jobs: Collection[str], name: str) -> bool:
        """Tell whether a job is of an earlier process of the daemon, and no evaluation's."""
        is_own = name.startswith(self.job_prefix) and not name.endswith(self.session)
        return is_own and name not in left_jobs

    def make_run(
        self,
        workspace: Workspace,
        checkout: Checkout,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> SandboxedRun:
        """Return the run of an evaluation with these limits, not started yet."""
        run = SlurmRun(workspace, checkout, self, limits, environment)
        run.sandboxed = SandboxedRun(
            run.attempt.workspace,
            run,
            run.run_limits,
            run,
            has_network=self.local.has_network,
            has_external_queue=True,
            runner_status=run.runner_status,
        )
        return run.sandboxed


def _begin_job_names(label: str) -> str:
    """Return what the names of all jobs of a daemon begin with."""
    return f"tawebeval-{label}-"


def cancel_all_jobs(commands: SlurmCommands, clock: Any, label: str) -> None:
    """Cancel the jobs of the daemon `label`, which has used a cluster before, and does not now."""
    every = _begin_job_names(label)
    clock.callWhenRunning(commands.cancel_jobs, lambda name: name.startswith(every))


class SlurmRunLimits(LocalRunLimits):
    """The limits of a run on a node.

    The daemon counts files in the shared directory. The node checks what only it sees, and the
    kernel there the rest.
    """

    process: NodeProcess | None = None
    _is_away = False

    def _list_main_pids(self) -> tuple[int, ...]:
        """Return nothing: the processes are on the node."""
        return ()

    def use_workspace(self, workspace: Workspace) -> None:
        """Count the files of another job from now on."""
        self.disk = attrs.evolve(self.disk, directory=workspace.root, left=None)

    def check(self, final: bool = False, work: float = inf) -> EvaluationFailure | None:
        """Return the error of the first exceeded limit; None if all are kept. Blocks."""
        try:
            failure = (
                self.find_unnoticed_failure() or super().check(final, work) or self._check_disk()
            )
        except OSError as error:  # the shared directory is away, for a moment
            if not self._is_away:
                words = "runner.shared: limits of a run are not checked: {error}"
                log.warn(words, error=error.strerror)
            self._is_away = True
            return None
        self._is_away = False
        return failure

    @property
    def _state(self) -> NodeState | None:
        return None if self.process is None else self.process.attempt.state

    def _check_disk(self) -> EvaluationFailure | None:
        """Return the error of files that take too much with those that only the node sees."""
        held = 0 if self._state is None else self._state.unlinked_bytes
        is_over = self.disk_bytes + held > self._most_disk
        return build_disk_limit_failure(self.settings) if is_over else None

    def find_unnoticed_failure(self) -> EvaluationFailure | None:
        """Return the error of the limit that the node has found exceeded, whatever the exit."""
        state = self._state
        if state is None or state.exceeded is None:
            return None
        limits = self.settings
        if state.exceeded == "cpu":
            return build_cpu_limit_failure(limits)
        if state.exceeded == "memory":
            return self._build_memory_failure()
        return build_disk_limit_failure(limits)

    def read_usage(self, rusage: struct_rusage | None) -> ResourceUsage:
        """Return no more than what wait4(2) has returned on the node."""
        if rusage is None:
            return ResourceUsage(None, None)
        return ResourceUsage(rusage.ru_utime + rusage.ru_stime, rusage.ru_maxrss * 1024 or None)


class SlurmRun(Launch, RunEnd):
    """The start and the end of one run on a node.

    `sandboxed` is the run itself. `process` is None until srun is started, and `attempt` the
    present job.
    """

    sandboxed: SandboxedRun

    def __init__(
        self,
        workspace: Workspace,
        checkout: Checkout,
        sandbox: SlurmSandbox,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> None:
        self.runner_status = RunnerStatus("slurm")
        self.process: NodeProcess | None = None
        self._workspace = workspace
        self._checkout = checkout
        self._sandbox = sandbox
        self._environment = environment
        self._is_started = False
        self.attempt = self._make_attempt()
        self.run_limits = SlurmRunLimits(
            limits, _NO_CGROUPS, self.attempt.workspace, checkout.commit
        )

    def _make_attempt(self) -> Attempt:
        sandbox = self._sandbox
        return Attempt.create(sandbox.job_prefix, sandbox.session, self._workspace)

    @property
    def workspace_view(self) -> WorkspaceView:
        """Return the evaluator's view of the workspace."""
        return self.attempt.workspace.make_sandboxed_view(WORKSPACE_MOUNT_POINT)

    # The start

    def start_evaluator(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> Attempt:
        """Start srun, whose job waits for a node. Blocks."""
        attempt, limits = self.attempt, self.run_limits
        limits.make_cgroup(attempt.directory.name)
        attempt.make_directories()
        local = BubblewrapLaunch(
            attempt.workspace, self._checkout, self._sandbox.local, limits, self._environment
        )
        launch = attrs.evolve(
            local.make_launch_spec(command, environment, directory),
            stdout_limit=limits.settings.output,
            stderr_limit=limits.settings.stderr,
        )
        copy_tree(self._checkout.path, attempt.workspace.tree_directory)
        attempt.write_start(launch.build_json_object())
        self._start_srun(attempt)
        return attempt

    def _start_srun(self, attempt: Attempt, avoided_node: str | None = None) -> None:
        """Start srun by the starter. Blocks. Raises: OSError."""
        limits, runner = self.run_limits.settings, self._sandbox.settings
        options = list(build_srun_options(limits, attempt.job_name, runner, *self.job_settings))
        if avoided_node is not None:
            options = exclude_node(options, avoided_node)
        variables = build_command_environment()
        srun = shutil.which("srun", path=variables["PATH"])
        if srun is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "srun")
        program = write_node_program(self._sandbox.local.sandbox_files_directory)
        told = (str(attempt.directory), str(limits.cpu), str(limits.disk))
        launch = LaunchSpec(
            [srun, *options, "--", *build_node_command(program, told)],
            variables,
            "/",
            stdout_limit=_SRUN_OUTPUT_BYTES,
            stderr_limit=_SRUN_OUTPUT_BYTES,
        )
        self._is_started = True
        try:
            self._sandbox.writable_trees.starter.start_program(attempt.directory, launch)
        finally:  # it has SLURM_JWT, for which the shared directory is no place
            with suppress(FileNotFoundError):
                (attempt.directory / "start").unlink()

    async def wait_for_evaluator_start(self, started: Attempt) -> None:
        """Wait until a node runs the evaluator. Raises: EvaluationFailure, OSError.

        If it is cancelled, it returns after the end of srun.
        """
        process = self._make_process(started)
        process.follow(started)
        await process.wait_for_start()

    def _make_process(self, attempt: Attempt) -> NodeProcess:
        retries = self._sandbox.settings.retries - self.runner_status.retry_count
        process = NodeProcess(
            self._sandbox.access, self.runner_status, self._repeat, retries, attempt
        )
        self.process = self.run_limits.process = process
        return process

    async def _repeat(self, lost: Attempt, avoided_node: str | None) -> Attempt:
        """Start a job in place of a lost one, in directories of its own.

        Raises: OSError; ValueError, if the description of the lost job is damaged.
        """
        attempt = self._make_attempt()
        try:
            await self._sandbox.access.threads.run_in_thread(
                self._start_in_place_of, lost, attempt, avoided_node
            )
        except Exception:
            # The starter may have started srun, and not have answered in time.
            self._sandbox.commands.cancel_job(attempt.job_name)
            raise
        self._use_attempt(attempt)
        return attempt

    def _use_attempt(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.sandboxed.workspace = attempt.workspace
        self.run_limits.use_workspace(attempt.workspace)

    def _start_in_place_of(self, lost: Attempt, attempt: Attempt, avoided_node: str | None) -> None:
        attempt.make_directories()
        self._sandbox.local.make_system_view(self._environment)  # the lost job's may be removed
        attempt.write_start(attempt.read_start(lost))
        copy_tree(self._checkout.path, attempt.workspace.tree_directory)
        self._start_srun(attempt, avoided_node)

    def connect_process(self, run: ProcessProtocol, started: Attempt) -> NodeProcess:
        """Let the evaluator on the node drive `run`."""
        assert self.process is not None, "the run has begun"
        self.process.connect(run)
        return self.process

    def describe_for_resume(self) -> dict[str, Any]:
        """Return what `resume_process` needs, as JSON."""
        retries = self.runner_status.retry_count
        return {"kind": "slurm", "retries": retries, **self.attempt.describe()}

    def resume_process(self, run: ProcessProtocol, left: LeftProcess) -> NodeProcess:
        """Go on with a run that was started by another process of the daemon. Blocks.

        Raises: OSError.
        """
        attempt = Attempt.load(left.description, self._workspace)
        self._is_started = True
        self._use_attempt(attempt)
        status = self.runner_status
        status.job_id, status.node = attempt.job_identifier, attempt.node
        status.retry_count = left.description["retries"]
        process = self._make_process(attempt)
        process.pid, process.start_time = left.pid, left.start_time
        try:
            process.resume(run, attempt.read_state(), left.stdout_offset)
        except OSError:
            self.process = None  # `close` ends the job
            raise
        return process

    # The end

    def send_signal(self, child: ProcessTransport, number: int) -> None:
        """Send a signal to the evaluator's processes on the node."""
        child.signal_group(number)

    async def kill_remaining_processes(self) -> None:
        """Do nothing: the node has told the exit after it has killed them, or the job is lost."""

    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the evaluator's exit. Raises: EvaluationFailure."""
        assert self.process is not None, "the run has begun"
        if self.process.job_loss is not None:
            raise self.process.job_loss
        end = BubblewrapEnd(
            locate_status_file(self.attempt.workspace), self.run_limits, self._sandbox.local
        )
        return end.interpret_exit(status, number)

    def close(self) -> None:
        """End an srun that nobody has followed. Blocks."""
        sandbox, attempt = self._sandbox, self.attempt
        if self._is_started and self.process is None:
            with suppress(OSError):  # it has ended
                sandbox.writable_trees.starter.forget_program_now(attempt.directory)
            sandbox.access.reactor.callFromThread(sandbox.commands.cancel_job, attempt.job_name)
