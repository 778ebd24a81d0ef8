"""The sandbox on the nodes of a cluster: what evaluations use in place of the daemon's own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from resource import struct_rusage
from secrets import token_hex
from typing import Any

import attrs
import msgspec
from twisted.internet.protocol import ProcessProtocol

from tawebeval.config import Configuration, LimitSettings
from tawebeval.core.checkout import Checkout
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import EvaluationFailure
from tawebeval.linux.cgroups.manager import CgroupManager, ResourceUsage
from tawebeval.linux.child import ProcessAdopter, ProcessTransport, StartedProcess
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.keeper_owned_process import KeeperOwnedDescriptors
from tawebeval.linux.launcher_client import FIRST_PASSED_DESCRIPTOR, LaunchSpec
from tawebeval.linux.reaper import OrphanReaper
from tawebeval.sandbox.base import (
    EvaluatorExit,
    ProcessReattacher,
    RunnerStatus,
    Sandbox,
    SandboxedRun,
)
from tawebeval.sandbox.broker_client import BROKER_SOCKET_NAME
from tawebeval.sandbox.bubblewrap import WORKSPACE_MOUNT_POINT
from tawebeval.sandbox.environments import Environment
from tawebeval.sandbox.overlay import WritableTrees
from tawebeval.sandbox.run_limits import RunLimits
from tawebeval.sandbox.workspace import Workspace, WorkspaceView
from tawebeval.slurm.commands import SlurmCommands, build_command_environment
from tawebeval.slurm.frames import KILL, TERMINATE
from tawebeval.slurm.job_description import (
    JOB_DESCRIPTION_FILE_NAME,
    NODE_PROTOCOL_VERSION,
    JobDescription,
)
from tawebeval.slurm.job_transfer import JobSender
from tawebeval.slurm.jobs import NODE_MODULE, build_srun_options, merge_job_settings
from tawebeval.slurm.srun_files import SrunFiles
from tawebeval.slurm.transport import NodeTransport, wait_for_evaluator_start

_NAME_LENGTH = 16  # of an evaluation's name in the log, which begins its directory's name
# srun reads the daemon's lines from its stdin, a descriptor that the launcher has handed over.
_SHELL = (
    "/bin/sh",
    "-c",
    f'exec "$@" <&{FIRST_PASSED_DESCRIPTOR} {FIRST_PASSED_DESCRIPTOR}<&-',
    "srun",
)


@attrs.define(eq=False)
class SlurmSandbox:
    """The sandbox of `runner.kind = "slurm"`.

    `limits`, `cgroup_manager`, `orphan_reaper` and `writable_trees` are those of the daemon's own
    sandbox, by which srun is started. A reload replaces `configuration`. `job_prefix` begins the
    names of the jobs of this process of the daemon, and of no others. `can_outlive_daemon`: runs
    outlive the daemon; `resumed_job_names` are those of an earlier process that go on.
    """

    configuration: Configuration
    limits: LimitSettings
    cgroup_manager: CgroupManager
    orphan_reaper: OrphanReaper
    writable_trees: WritableTrees
    commands: SlurmCommands
    threads: WorkerThreads
    clock: Any
    job_prefix: str
    can_outlive_daemon: bool = False
    resumed_job_names: set[str] = attrs.field(factory=set)

    @classmethod
    def create(
        cls,
        configuration: Configuration,
        local: Sandbox,
        commands: SlurmCommands,
        threads: WorkerThreads,
        clock: Any,
        label: str,
        *,
        can_outlive_daemon: bool = False,
    ) -> SlurmSandbox:
        """Return the sandbox beside the daemon's own, `local`.

        `label` is the daemon's. Jobs that an earlier one of this label has left are cancelled,
        except for those of runs that go on.
        """
        every = _begin_job_names(label)
        prefix = f"{every}{token_hex(3)}-"
        own = (local.limits, local.cgroup_manager, local.orphan_reaper, local.writable_trees)
        sandbox = cls(configuration, *own, commands, threads, clock, prefix, can_outlive_daemon)
        kept = sandbox.resumed_job_names

        def is_leftover(name: str) -> bool:
            return name.startswith(every) and not (name.startswith(prefix) or name in kept)

        clock.callWhenRunning(commands.cancel_stale_jobs, is_leftover)
        return sandbox

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
    clock.callWhenRunning(commands.cancel_stale_jobs, lambda name: name.startswith(every))


class SlurmRunLimits(RunLimits):
    """The limits of a run on a node, which the node checks: `get_transport()` has what it told."""

    def __init__(
        self, settings: LimitSettings, get_transport: Callable[[], NodeTransport | None]
    ) -> None:
        super().__init__(settings)
        self._get_transport = get_transport

    def check(self, final: bool = False, work: float = inf) -> EvaluationFailure | None:
        """Return the error of the limit that the node, or Slurm, has found exceeded."""
        transport = self._get_transport()
        if transport is None or transport.outcome is None:
            return None
        return transport.outcome.limit_failure or transport.job_loss

    def check_memory(self) -> EvaluationFailure | None:
        """Return the error of a limit that a run that succeeded has exceeded."""
        return self.check()

    def read_usage(self, rusage: struct_rusage | None) -> ResourceUsage:
        """Return the usage that the node has measured."""
        transport = self._get_transport()
        outcome = None if transport is None else transport.outcome
        return ResourceUsage(*outcome.usage) if outcome is not None else ResourceUsage(None, None)


class SlurmRun(SandboxedRun):
    """One run on a node."""

    has_external_queue = True

    def __init__(
        self,
        workspace: Workspace,
        checkout: Checkout,
        sandbox: SlurmSandbox,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> None:
        super().__init__(workspace, checkout, sandbox, limits)
        self._sandbox = sandbox
        self._configuration = sandbox.configuration
        self._environment = environment
        self.has_network = self._configuration.sandbox.has_network
        self.runner_status = self._status = RunnerStatus("slurm")
        self._description_file = workspace.root / JOB_DESCRIPTION_FILE_NAME
        self._set_transfer(not self._configuration.runner.shared_directory)
        self._store: SrunFiles | None = None  # of the srun that was started last
        self._transport: NodeTransport | None = None
        self.run_limits = SlurmRunLimits(limits, lambda: self._transport)

    def _set_transfer(self, is_streamed: bool) -> None:
        """Let the daemon send all files by srun's stdin, or have a shared directory for them."""
        self._is_streamed = is_streamed
        self.read_remote_file = self._read_node_file if is_streamed else None

    async def _read_node_file(self, path: str) -> bytes:
        assert self._transport is not None, "the run has begun"
        return await self._transport.file_reader.fetch_file(path)

    def make_workspace_view(self) -> WorkspaceView:
        """Return the evaluator's view of the workspace."""
        return self.workspace.make_sandboxed_view(WORKSPACE_MOUNT_POINT)

    def start_evaluator(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> StartedProcess:
        """Start srun, whose job waits for a node. Blocks."""
        commit = self._checkout.commit
        JobDescription(
            command,
            environment,
            directory,
            self.workspace.root,
            self.workspace.quota_directory,
            self._checkout.path,
            commit.size,
            commit.file_count,
            # Each node would stop its evaluator, all at once: the file system is shared.
            msgspec.structs.replace(self.limits, free_disk=0),
            self._configuration.sandbox,
            self._environment,
        ).write_file()
        return self._start_srun(0)[0]

    def _start_srun(self, attempt: int) -> tuple[StartedProcess, SrunFiles]:
        """Start an srun; return it and its files. Blocks. Raises: OSError."""
        with contextlib.ExitStack() as writing:
            reading, stdin = os.pipe2(os.O_CLOEXEC)
            writing.callback(os.close, stdin)
            try:
                os.set_blocking(stdin, False)
                store = SrunFiles.create(stdin, self._name_job(attempt), attempt)
                writing.pop_all()
                writing.callback(store.close)
                spec = attrs.evolve(self._make_srun_spec(attempt), descriptors=(reading,))
                with self._orphans.expect_new_child() as tell:
                    started = self._trees.start_program_without_tree(spec)
                    tell(started.pid)
            finally:
                os.close(reading)
            writing.pop_all()
            self._store = store
            return started, store

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
            configuration.evaluations.max_pause_seconds,
        )
        python = configuration.runner.node_python or sys.executable
        arguments = [str(self._description_file)]
        if self._is_streamed:
            arguments = ["--receive", configuration.runner.node_directory]
        return LaunchSpec(
            [
                *(*_SHELL, "srun", *options),
                *("--", python, "-I", "-m", NODE_MODULE, *arguments),
            ],
            build_command_environment(),
            "/",
        )

    def make_launch_spec(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> LaunchSpec:
        """Return srun; the file of the job description has the command."""
        return self._make_srun_spec(0)

    async def wait_for_evaluator_start(
        self, started: StartedProcess, spawner: ProcessAdopter
    ) -> None:
        """Wait until a node runs the evaluator. Raises: EvaluationFailure.

        If it is cancelled, it returns after the end of srun.
        """
        transport = self._make_transport(spawner)
        assert self._store is not None, "srun is started"
        transport.adopt_srun(started, self._store)
        self._transport = transport
        await wait_for_evaluator_start(transport)

    def _make_transport(self, spawner: ProcessAdopter) -> NodeTransport:
        sandbox = self._sandbox
        return NodeTransport(
            *(sandbox.clock, spawner, sandbox.commands, self._status),
            self._start_again,
            self._configuration.runner.max_retries_after_node_loss,
            sandbox.can_outlive_daemon,
            self._make_sender if self._is_streamed else None,
            self.limits.file,
        )

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

    async def _start_again(self, attempt: int) -> tuple[StartedProcess, SrunFiles]:
        """Start another srun, in directories as new. Raises: OSError."""
        return await self._sandbox.threads.run_in_thread(self._renew, attempt)

    def _renew(self, attempt: int) -> tuple[StartedProcess, SrunFiles]:
        for _, directory in self.make_workspace_view().writable_paths:
            remove_tree(directory)
            directory.mkdir()
        (self.workspace.root / BROKER_SOCKET_NAME).unlink(missing_ok=True)
        return self._start_srun(attempt)

    def connect_process(
        self, run: ProcessProtocol, started: StartedProcess, spawner: ProcessAdopter
    ) -> NodeTransport:
        """Let the evaluator on the node drive `run`."""
        assert self._transport is not None, "the run has begun"
        self._transport.connect(run)
        return self._transport

    def send_signal(self, child: ProcessTransport, number: int) -> None:
        """Send a signal to the evaluator's processes on the node."""
        assert self._transport is not None, "the run has begun"
        self._transport.send_command(KILL if number == signal.SIGKILL else TERMINATE)

    def abort_remote_reads(self) -> None:
        """Give a node that has files up unless all output is stored soon."""
        if self._is_streamed and self._transport is not None:
            self._transport.send_command(KILL)

    async def kill_remaining_processes(self) -> None:
        """Do nothing: the node has told the exit after it has killed them, or the job is lost."""

    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the evaluator's exit, as the node has told it. Raises: EvaluationFailure."""
        assert self._transport is not None, "the run has begun"
        outcome, loss = self._transport.outcome, self._transport.job_loss
        if outcome is None:
            raise loss or EvaluationFailure("lost", "the evaluator was stopped without an outcome")
        if outcome.exit is None:
            raise outcome.start_failure or EvaluationFailure("lost", "the node has told no exit")
        return EvaluatorExit(*outcome.exit)

    def detach(self) -> None:
        """Leave srun to another process of the daemon."""
        if self._transport is not None:
            self._transport.detach()

    def call_after_process_end(self, call: Callable[[], object]) -> None:
        """Call once srun has ended: it may wait for a controller that is away."""
        if self._transport is None:
            call()
        else:
            self._transport.call_after_srun_end(call)

    def list_descriptors(self) -> Sequence[int]:
        """Return the files of the srun that was started last."""
        return () if self._store is None else self._store.descriptors

    def describe_for_resume(self) -> dict[str, Any]:
        """Return the version of the frames, besides what all kinds of sandbox tell."""
        return {
            **super().describe_for_resume(),
            "kind": "slurm",
            "version": NODE_PROTOCOL_VERSION,
            "is_streamed": self._is_streamed,
        }

    def resume(
        self,
        described: Mapping[str, Any],
        descriptors: Sequence[int],
        connect_broker: Callable[[ProcessProtocol], object] | None = None,
    ) -> None:
        """Take over the files of an srun, or close them. Raises: OSError, ValueError."""
        with contextlib.ExitStack() as failing:
            for descriptor in descriptors:
                failing.callback(os.close, descriptor)
            super().resume(described, descriptors, connect_broker)
            if described["version"] != NODE_PROTOCOL_VERSION:
                raise ValueError(
                    f"frames of version {described['version']}, not {NODE_PROTOCOL_VERSION}"
                )
            self._set_transfer(described["is_streamed"])
            self._store = SrunFiles.load(descriptors)
            failing.pop_all()

    def reattach_process(
        self,
        run: ProcessProtocol,
        process: KeeperOwnedDescriptors,
        connect: ProcessReattacher,
        spawner: ProcessAdopter,
    ) -> NodeTransport:
        """Let the evaluator on the node drive `run`, from the byte `process.stdout_offset` on."""
        store = self._store
        assert store is not None, "resumed"
        transport = self._make_transport(spawner)
        from_frame = attrs.evolve(process, stdout_offset=store.resume_position.frame_offset)
        with contextlib.ExitStack() as failing:
            failing.callback(store.close)
            transport.resume(
                run, store, process.stdout_offset, lambda srun: connect(srun, from_frame)
            )
            failing.pop_all()
        self._transport = transport
        self._sandbox.resumed_job_names.add(store.job_name)
        return transport

    def count_skipped_stderr_bytes(self, process: KeeperOwnedDescriptors) -> int:
        """Return the bytes of stderr that `reattach_process` does not deliver again."""
        assert self._store is not None, "resumed"
        return self._store.count_skipped_stderr_bytes()
