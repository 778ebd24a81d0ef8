"""The sandbox on the nodes of a cluster: what evaluations use in place of the daemon's own."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from resource import struct_rusage
from secrets import token_hex
from typing import Any

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger

from tawebeval.config import LimitSettings, RunnerSettings
from tawebeval.core.evaluations import Checkout
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import ConfigurationError, EvaluationFailure
from tawebeval.linux.cgroups import CgroupManager, ResourceUsage
from tawebeval.linux.filetree import copy_tree, remove_tree
from tawebeval.linux.starter import LaunchSpec
from tawebeval.linux.tail import TailedProcess
from tawebeval.sandbox.base import (
    Environment,
    EvaluatorExit,
    LeftProcess,
    RunLimits,
    RunnerStatus,
    Sandbox,
    SandboxedRun,
    build_cpu_limit_failure,
    build_disk_limit_failure,
)
from tawebeval.sandbox.bubblewrap import (
    WORKSPACE_MOUNT_POINT,
    BubblewrapRun,
    BubblewrapSandbox,
)
from tawebeval.sandbox.workspace import Workspace, WritableTrees
from tawebeval.slurm.commands import (
    NODE_PYTHON,
    SlurmCommands,
    build_command_environment,
    build_srun_options,
    exclude_node,
)
from tawebeval.slurm.job import (
    ClusterAccess,
    Job,
    NodeState,
    PollingWatcher,
    write_node_program,
)

_NAME_LENGTH = 16  # of an evaluation's name in the log, which begins its directory's name
_SRUN_OUTPUT_BYTES = 2**20  # of srun's own stdout, and of its stderr, that are stored
_NO_CGROUPS = CgroupManager({})  # those of a job belong to root

log = Logger()


@attrs.define(eq=False)
class SlurmSandbox:
    """The sandbox of `runner.kind = "slurm"`.

    `limits`, `cgroup_manager` and `writable_trees` are those of the daemon's own sandbox; its
    starter runs each srun. `local` makes what a node has to start, of paths that the
    node has, too. `job_prefix` begins the names of all jobs of the daemon, and `session` ends the
    names of those that this process of the daemon starts.
    """

    settings: RunnerSettings
    limits: LimitSettings
    cgroup_manager: CgroupManager
    writable_trees: WritableTrees
    local: BubblewrapSandbox
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
            trees,
            attrs.evolve(local, cgroup_manager=_NO_CGROUPS),
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
        return SlurmRun(workspace, checkout, self, limits, environment)


def _begin_job_names(label: str) -> str:
    """Return what the names of all jobs of a daemon begin with."""
    return f"tawebeval-{label}-"


def cancel_all_jobs(commands: SlurmCommands, clock: Any, label: str) -> None:
    """Cancel the jobs of the daemon `label`, which has used a cluster before, and does not now."""
    every = _begin_job_names(label)
    clock.callWhenRunning(commands.cancel_jobs, lambda name: name.startswith(every))


class SlurmRunLimits(RunLimits):
    """The limits of a run on a node.

    The daemon counts files in the shared directory. The node checks what only it sees, and the
    kernel there the rest.
    """

    job: Job | None = None
    _is_away = False

    def _list_main_pids(self) -> tuple[int, ...]:
        """Return nothing: the processes are on the node."""
        return ()

    def use_job(self, job: Job) -> None:
        """Count the files of another job from now on."""
        self.job = job
        self.disk = attrs.evolve(self.disk, directory=job.directory, left=None)

    def check(self, final: bool = False, counts: bool = True) -> EvaluationFailure | None:
        """Return the error of the first exceeded limit; None if all are kept. Blocks."""
        try:
            failure = (
                self.find_unnoticed_failure() or super().check(final, counts) or self._check_disk()
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
        return None if self.job is None else self.job.state

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


class SlurmRun(SandboxedRun):
    """One run on a node.

    `job` is the present job: the first, or the one in place of a job that was lost before the
    evaluator ran. `workspace` is in its directory.
    """

    has_external_queue = True
    runner_status: RunnerStatus
    run_limits: SlurmRunLimits

    def __init__(
        self,
        workspace: Workspace,
        checkout: Checkout,
        sandbox: SlurmSandbox,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> None:
        self.runner_status = RunnerStatus("slurm")
        self._evaluation_workspace = workspace
        self._checkout = checkout
        self._sandbox = sandbox
        self._environment = environment
        self._arguments: tuple[str, Mapping[str, str], Path]  # of `start_evaluator`
        self._is_started = False
        self.has_network = sandbox.local.has_network
        self.job = self._make_job()
        own = self.job.workspace
        run_limits = SlurmRunLimits(limits, _NO_CGROUPS, own, checkout.commit)
        super().__init__(own, own.make_sandboxed_view(WORKSPACE_MOUNT_POINT), run_limits)

    def _make_job(self) -> Job:
        sandbox, evaluation = self._sandbox, self._evaluation_workspace
        stem = f"{sandbox.job_prefix}{evaluation.root.name[:_NAME_LENGTH]}"
        name = f"{stem}-{token_hex(4)}{sandbox.session}"
        return Job(sandbox.access, self.runner_status, name, evaluation)

    def _make_local_run(self) -> BubblewrapRun:
        """Return the run as the node starts it."""
        local = self._sandbox.local
        run = BubblewrapRun(self.workspace, self._checkout, self.limits, local, self._environment)
        run.run_limits = self.run_limits  # which have the cgroup, if only in name
        return run

    # The start

    def start_evaluator(self, command: str, environment: Mapping[str, str], directory: Path) -> Job:
        """Start srun, whose job waits for a node. Blocks."""
        self.run_limits.make_cgroup(self.job.directory.name)
        self._arguments = command, environment, directory
        return self._start_job()

    def _start_job(self, avoided_node: str | None = None) -> Job:
        """Write what the node needs, and start srun. Blocks. Raises: OSError."""
        job, limits = self.job, self.run_limits.settings
        job.make_directories()
        launch = self._make_local_run().make_launch_spec(*self._arguments)
        launch = launch._replace(stdout_limit=limits.output, stderr_limit=limits.stderr)
        copy_tree(self._checkout.path, job.workspace.tree_directory)
        job.write_start(launch.build_json_object())
        self._start_srun(job, avoided_node)
        return job

    def _start_srun(self, job: Job, avoided_node: str | None) -> None:
        """Start srun by the starter. Blocks. Raises: OSError."""
        limits, runner = self.run_limits.settings, self._sandbox.settings
        options = list(build_srun_options(limits, job.job_name, runner, *self.job_settings))
        if avoided_node is not None:
            options = exclude_node(options, avoided_node)
        variables = build_command_environment()
        srun = shutil.which("srun", path=variables["PATH"])
        if srun is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "srun")
        program = str(write_node_program(self._sandbox.local.sandbox_files_directory))
        arguments = (program, str(job.directory), str(limits.cpu), str(limits.disk))
        launch = LaunchSpec(
            [srun, *options, "--", NODE_PYTHON, "-I", "-S", *arguments],
            variables,
            "/",
            stdout_limit=_SRUN_OUTPUT_BYTES,
            stderr_limit=_SRUN_OUTPUT_BYTES,
        )
        self._is_started = True
        try:
            self._sandbox.writable_trees.starter.start_program(job.directory, launch)
        finally:  # it has SLURM_JWT, for which the shared directory is no place
            with suppress(FileNotFoundError):
                (job.directory / "start").unlink()

    async def wait_for_evaluator_start(self, started: Job) -> None:
        """Wait until a node runs the evaluator. Raises: EvaluationFailure, OSError.

        A job that is lost before is replaced once, if `runner.retries` allows it. A cancellation is
        raised after the end of srun, or leaves that to `close`.
        """
        self.run_limits.job = started
        started.follow()
        try:
            await started.wait_for_start()
        except EvaluationFailure as loss:
            has_failed = started.state is not None  # the node could not start the evaluator
            is_repeatable = has_failed or loss.reason in ("node", "preempted")
            if not (is_repeatable and self._sandbox.settings.retries):
                raise
            log.warn("{why}; another job takes its place", why=loss.message)
            another = await self._start_in_place_of(started, loss)
            another.follow()
            try:
                await another.wait_for_start()
            except EvaluationFailure:
                if has_failed:  # there may be no other node
                    raise loss from None
                raise

    async def _start_in_place_of(self, lost: Job, loss: EvaluationFailure) -> Job:
        """Start a job, in directories of its own. Raises: EvaluationFailure, if it cannot."""
        threads, status = self._sandbox.access.threads, self.runner_status
        avoided_node = None if lost.state is None else status.node
        self._use_job(self._make_job())
        try:
            job = await threads.run_in_thread(self._start_job, avoided_node)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  (a client learns of every end)
            words = "no job can take the place of the lost one: {error!r}"
            log.error(words, error=error)  # noqa: TRY400
            raise loss from None
        with suppress(OSError):  # what still runs somewhere writes to the directory
            await threads.run_in_thread(remove_tree, lost.directory)
        self._sandbox.access.commands.counters.restarted_jobs += 1
        status.retry_count += 1
        status.job_id = status.node = None
        return job

    def _use_job(self, job: Job) -> None:
        self.job = job
        self.workspace = job.workspace
        self.workspace_view = job.workspace.make_sandboxed_view(WORKSPACE_MOUNT_POINT)
        self.run_limits.use_job(job)

    def connect_process(self, run: ProcessProtocol, started: Job) -> TailedProcess:
        """Let the evaluator on the node drive `run`."""
        return self.job.connect(run)

    def describe_for_resume(self) -> dict[str, Any]:
        """Return what `resume_process` needs, as JSON."""
        return {**self.runner_status.build_json_object(), "job_name": self.job.job_name}

    def resume_process(self, run: ProcessProtocol, left: LeftProcess) -> TailedProcess:
        """Go on with a run that was started by another process of the daemon. Blocks.

        Raises: OSError.
        """
        status, described = self.runner_status, left.description
        status.job_id, status.node = described["job"], described["node"]
        status.retry_count = described["retries"]
        job = Job(self._sandbox.access, status, described["job_name"], self._evaluation_workspace)
        self._is_started = True
        self._use_job(job)
        return job.resume(run, left.stdout_offset)

    # The end

    def send_signal(self, child: TailedProcess, number: int) -> None:
        """Send a signal to the evaluator's processes on the node."""
        child.signal_group(number)

    async def kill_remaining_processes(self) -> None:
        """Do nothing: the node has told the exit after it has killed them, or the job is lost."""

    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the evaluator's exit. Raises: EvaluationFailure."""
        if self.job.loss is not None:
            raise self.job.loss
        return self._make_local_run().interpret_exit(status, number)

    def close(self) -> None:
        """End an srun that nobody has followed. Blocks."""
        access, job = self._sandbox.access, self.job
        if self._is_started and not job.is_followed:
            with suppress(OSError):  # it has ended
                access.get_starter().forget_program_now(job.directory)
            access.reactor.callFromThread(access.commands.cancel_job, job.job_name)
        super().close()
