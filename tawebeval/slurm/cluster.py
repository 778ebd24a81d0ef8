"""The sandbox on the nodes of a cluster: what evaluations use in place of the daemon's own."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from resource import struct_rusage
from secrets import token_hex
from typing import Any, NoReturn

import attrs
import msgspec
from twisted.internet.protocol import ProcessProtocol

from tawebeval.config import Configuration, LimitSettings
from tawebeval.core.checkout import Checkout
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import EvaluationFailure
from tawebeval.linux.cgroups import CgroupManager, ResourceUsage
from tawebeval.linux.child import ProcessTransport, Spawner, start_child
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.reaper import OrphanReaper
from tawebeval.linux.starter_client import LaunchSpec
from tawebeval.sandbox.base import (
    EvaluatorExit,
    Launch,
    LeftProcess,
    RunEnd,
    RunnerStatus,
    Sandbox,
    SandboxedRun,
)
from tawebeval.sandbox.bubblewrap import BROKER_SOCKET_NAME, WORKSPACE_MOUNT_POINT
from tawebeval.sandbox.environments import Environment
from tawebeval.sandbox.overlay import WritableTrees
from tawebeval.sandbox.run_limits import RunLimits
from tawebeval.sandbox.workspace import Workspace, WorkspaceView
from tawebeval.slurm.commands import SlurmCommands, build_command_environment
from tawebeval.slurm.frames import KILL, TERMINATE
from tawebeval.slurm.job_description import JOB_DESCRIPTION_FILE_NAME, JobDescription
from tawebeval.slurm.job_transfer import JobSender
from tawebeval.slurm.jobs import NODE_MODULE, build_srun_options, merge_job_settings
from tawebeval.slurm.transport import NodeTransport, StartedSrun, wait_for_evaluator_start

_NAME_LENGTH = 16  # of an evaluation's name in the log, which begins its directory's name


@attrs.define(eq=False)
class SlurmSandbox:
    """The sandbox of `runner.kind = "slurm"`.

    `limits`, `cgroup_manager`, `orphan_reaper` and `writable_trees` are those of the daemon's own
    sandbox. A reload replaces `configuration`. `job_prefix` begins the names of the jobs of this
    process of the daemon, and of no others. Each srun is a child of the daemon.
    """

    configuration: Configuration
    limits: LimitSettings
    cgroup_manager: CgroupManager
    orphan_reaper: OrphanReaper
    writable_trees: WritableTrees
    commands: SlurmCommands
    threads: WorkerThreads
    clock: Any
    spawner: Spawner
    job_prefix: str

    @classmethod
    def create(
        cls,
        configuration: Configuration,
        local: Sandbox,
        commands: SlurmCommands,
        threads: WorkerThreads,
        clock: Any,
        spawner: Spawner,
        label: str,
    ) -> SlurmSandbox:
        """Return the sandbox beside the daemon's own, `local`.

        `label` is the daemon's. Jobs that an earlier one of this label has left are cancelled.
        """
        every = _begin_job_names(label)
        prefix = f"{every}{token_hex(3)}-"
        own = (local.limits, local.cgroup_manager, local.orphan_reaper, local.writable_trees)

        def is_leftover(name: str) -> bool:
            return name.startswith(every) and not name.startswith(prefix)

        clock.callWhenRunning(commands.cancel_stale_jobs, is_leftover)
        return cls(configuration, *own, commands, threads, clock, spawner, prefix)

    def make_run(
        self,
        workspace: Workspace,
        checkout: Checkout,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> SandboxedRun:
        """Return the run of an evaluation with these limits, not started yet."""
        run = SlurmRun(workspace, checkout, self, limits, environment)
        return SandboxedRun(
            workspace,
            run,
            SlurmRunLimits(limits, run),
            run,
            has_network=self.configuration.sandbox.network,
            has_external_queue=True,
            stores_stdout=False,
            runner_status=run.runner_status,
            read_remote_file=run.read_remote_file,
        )


def _begin_job_names(label: str) -> str:
    """Return what the names of all jobs of a daemon begin with."""
    return f"tawebeval-{label}-"


def cancel_all_jobs(commands: SlurmCommands, clock: Any, label: str) -> None:
    """Cancel the jobs of the daemon `label`, which has used a cluster before, and does not now."""
    every = _begin_job_names(label)
    clock.callWhenRunning(commands.cancel_stale_jobs, lambda name: name.startswith(every))


class SlurmRunLimits(RunLimits):
    """The limits of a run on a node, which the node checks."""

    def __init__(self, settings: LimitSettings, run: SlurmRun) -> None:
        super().__init__(settings)
        self._run = run

    def check(self, final: bool = False, work: float = inf) -> EvaluationFailure | None:
        """Return the error of the limit that the node, or Slurm, has found exceeded."""
        transport = self._run.transport
        if transport is None or transport.outcome is None:
            return None
        return transport.outcome.limit_failure or transport.job_loss

    def check_memory(self) -> EvaluationFailure | None:
        """Return the error of a limit that a run that succeeded has exceeded."""
        return self.check()

    def read_usage(self, rusage: struct_rusage | None) -> ResourceUsage:
        """Return the usage that the node has measured."""
        transport = self._run.transport
        outcome = None if transport is None else transport.outcome
        return ResourceUsage(*outcome.usage) if outcome is not None else ResourceUsage(None, None)


class SlurmRun(Launch, RunEnd):
    """The start and the end of one run on a node, which does not outlive the daemon.

    `transport` is None until srun is started. `read_remote_file` is None if daemon and nodes share
    a directory.
    """

    def __init__(
        self,
        workspace: Workspace,
        checkout: Checkout,
        sandbox: SlurmSandbox,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> None:
        self.workspace, self.limits = workspace, limits
        self._checkout = checkout
        self._sandbox = sandbox
        self._configuration = sandbox.configuration
        self._environment = environment
        self.runner_status = self._status = RunnerStatus("slurm")
        self._description_file = workspace.root / JOB_DESCRIPTION_FILE_NAME
        # Without a shared directory the daemon sends all files by srun's stdin.
        self._is_streamed = not self._configuration.runner.shared_directory
        self.read_remote_file = self._read_node_file if self._is_streamed else None
        self.transport: NodeTransport | None = None

    async def _read_node_file(self, path: str) -> bytes:
        assert self.transport is not None, "the run has begun"
        return await self.transport.file_reader.fetch_file(path)

    @property
    def workspace_view(self) -> WorkspaceView:
        """Return the evaluator's view of the workspace."""
        return self.workspace.make_sandboxed_view(WORKSPACE_MOUNT_POINT)

    def start_evaluator(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> StartedSrun:
        """Start srun, whose job waits for a node. Blocks."""
        commit = self._checkout.commit
        JobDescription(
            command,
            environment,
            directory,
            self.workspace.root,
            self._checkout.path,
            commit.size,
            commit.file_count,
            # Each node would stop its evaluator, all at once: the file system is shared.
            msgspec.structs.replace(self.limits, free_disk=0),
            self._configuration.sandbox,
            self._environment,
        ).write_file()
        return self._start_srun(0)

    def _start_srun(self, attempt: int) -> StartedSrun:
        """Start an srun. Blocks. Raises: OSError."""
        launch = self._make_srun_spec(attempt)
        with contextlib.ExitStack() as failing:
            reading, stdin = os.pipe2(os.O_CLOEXEC)
            failing.callback(os.close, stdin)
            try:
                os.set_blocking(stdin, False)
                with self._sandbox.orphan_reaper.expect_new_child() as tell:
                    process = start_child(
                        launch.argv, launch.environment, launch.directory, stdin=reading
                    )
                    tell(process.pid)
            finally:
                os.close(reading)
            failing.pop_all()
            return StartedSrun(process, stdin, self._name_job(attempt))

    def _name_job(self, attempt: int) -> str:
        return f"{self._sandbox.job_prefix}{self.workspace.root.name[:_NAME_LENGTH]}-{attempt}"

    def _make_srun_spec(self, attempt: int) -> LaunchSpec:
        configuration, environment = self._configuration, self._environment
        problem = configuration.problems.get(self.problem_name or "")
        named = None if environment is None else configuration.environments.get(environment.name)
        settings = merge_job_settings(
            configuration.runner, *(one.runner for one in (named, problem) if one is not None)
        )
        options = build_srun_options(
            settings,
            self.limits,
            self._name_job(attempt),
        )
        python = configuration.runner.node_python or sys.executable
        arguments = [str(self._description_file)]
        if self._is_streamed:
            arguments = ["--receive", configuration.runner.node_directory]
        return LaunchSpec(
            ["srun", *options, "--", python, "-I", "-m", NODE_MODULE, *arguments],
            build_command_environment(),
            "/",
        )

    async def wait_for_evaluator_start(self, started: StartedSrun) -> None:
        """Wait until a node runs the evaluator. Raises: EvaluationFailure, OSError.

        If it is cancelled, it returns after the end of srun.
        """
        sandbox = self._sandbox
        transport = NodeTransport(
            *(sandbox.clock, sandbox.spawner, sandbox.commands, self._status),
            self._start_again,
            self._configuration.runner.max_retries_after_node_loss,
            self._make_sender if self._is_streamed else None,
            self.limits.file,
        )
        transport.adopt_srun(started)
        self.transport = transport
        await wait_for_evaluator_start(transport)

    def _make_sender(
        self, descriptor: int, on_failure: Callable[[EvaluationFailure], object]
    ) -> JobSender:
        return JobSender(
            *(
                self._sandbox.clock,
                self._sandbox.threads,
                self._description_file,
                self._checkout.path,
            ),
            self._configuration.runner.node_cache_bytes,
            *(self.limits.free_disk, descriptor, on_failure),
        )

    async def _start_again(self, attempt: int) -> StartedSrun:
        """Start another srun, in directories as new. Raises: OSError."""
        return await self._sandbox.threads.run_in_thread(self._renew, attempt)

    def _renew(self, attempt: int) -> StartedSrun:
        for _, directory in self.workspace_view.writable_paths:
            remove_tree(directory)
            directory.mkdir()
        (self.workspace.root / BROKER_SOCKET_NAME).unlink(missing_ok=True)
        return self._start_srun(attempt)

    def connect_process(self, run: ProcessProtocol, started: StartedSrun) -> NodeTransport:
        """Let the evaluator on the node drive `run`."""
        assert self.transport is not None, "the run has begun"
        self.transport.connect(run)
        return self.transport

    def send_signal(self, child: ProcessTransport, number: int) -> None:
        """Send a signal to the evaluator's processes on the node."""
        assert self.transport is not None, "the run has begun"
        self.transport.send_command(KILL if number == signal.SIGKILL else TERMINATE)

    def abort_remote_reads(self) -> None:
        """Give a node that has files up unless all output is stored soon."""
        if self._is_streamed and self.transport is not None:
            self.transport.send_command(KILL)

    async def kill_remaining_processes(self) -> None:
        """Do nothing: the node has told the exit after it has killed them, or the job is lost."""

    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the evaluator's exit, as the node has told it. Raises: EvaluationFailure."""
        assert self.transport is not None, "the run has begun"
        outcome, loss = self.transport.outcome, self.transport.job_loss
        if outcome is None:
            raise loss or EvaluationFailure("lost", "the evaluator was stopped without an outcome")
        if outcome.exit is None:
            raise outcome.start_failure or EvaluationFailure("lost", "the node has told no exit")
        return EvaluatorExit(*outcome.exit)

    def describe_for_resume(self) -> dict[str, Any]:
        """Return the kind of runs that do not go on (`evaluations.restoring`)."""
        return {"kind": "slurm"}

    def resume_process(self, run: ProcessProtocol, left: LeftProcess) -> NoReturn:
        """Refuse to go on. Raises: OSError."""
        what = "an evaluator of another process of the daemon cannot go on with runner.kind"
        raise OSError(errno.ENOTSUP, f'{what} = "slurm"')
