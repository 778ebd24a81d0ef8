"""The sandbox on the nodes of a cluster: what evaluations use in place of the daemon's own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
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
from tawebeval.linux.cgroups.group import CgroupManager, ResourceUsage
from tawebeval.linux.child import ProcessAdopter, ProcessTransport, StartedProcess
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.launcher_client import FIRST_DESCRIPTOR, LaunchSpec
from tawebeval.linux.reaper import OrphanReaper
from tawebeval.sandbox.base import EvaluatorExit, RunnerStatus, Sandbox, SandboxedRun
from tawebeval.sandbox.bubblewrap import ROOM
from tawebeval.sandbox.environments import Environment
from tawebeval.sandbox.overlay import WritableTrees
from tawebeval.sandbox.submissions import SOCKET_NAME
from tawebeval.sandbox.workspace import Workspace, WorkspaceView
from tawebeval.slurm.commands import SlurmCommands, build_command_environment
from tawebeval.slurm.frames import KILL, TERMINATE
from tawebeval.slurm.jobs import NODE_PROGRAM, build_srun_options, merge_settings
from tawebeval.slurm.order import Order
from tawebeval.slurm.transport import NodeTransport, wait_for_begin

_NAME_LENGTH = 16  # of an evaluation's name in the log, which begins its directory's name
# srun reads the daemon's lines from its stdin, a descriptor that the launcher has handed over.
_SHELL = ("/bin/sh", "-c", f'exec "$@" <&{FIRST_DESCRIPTOR} {FIRST_DESCRIPTOR}<&-', "srun")


@attrs.define(eq=False)
class SlurmSandbox:
    """The sandbox of `runner.kind = "slurm"`.

    `limits`, `cgroups`, `orphan_reaper` and `writable_trees` are those of the daemon's own sandbox,
    by which srun is started. A reload replaces `configuration`. `job_prefix` begins the names of
    this daemon's jobs, and of no others.
    """

    configuration: Configuration
    limits: LimitSettings
    cgroups: CgroupManager
    orphan_reaper: OrphanReaper
    writable_trees: WritableTrees
    commands: SlurmCommands
    threads: WorkerThreads
    clock: Any
    job_prefix: str

    @classmethod
    def create(
        cls,
        configuration: Configuration,
        local: Sandbox,
        commands: SlurmCommands,
        threads: WorkerThreads,
        clock: Any,
        label: str,
    ) -> SlurmSandbox:
        """Return the sandbox beside the daemon's own, `local`.

        `label` is the daemon's. Jobs that an earlier one of this label has left are cancelled.
        """
        every = f"tawebeval-{label}-"
        prefix = f"{every}{token_hex(3)}-"
        clock.callWhenRunning(commands.cancel_left_jobs, every, prefix)
        own = (local.limits, local.cgroups, local.orphan_reaper, local.writable_trees)
        return cls(configuration, *own, commands, threads, clock, prefix)

    def make_run(
        self,
        workspace: Workspace,
        checkout: Checkout,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> SandboxedRun:
        """Return the run of an evaluation with these limits, not started yet."""
        return SlurmRun(workspace, checkout, self, limits, environment)


class SlurmRun(SandboxedRun):
    """One run on a node."""

    has_own_queue = True

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
        self.has_network = self._configuration.sandbox.network
        self.runner = self._status = RunnerStatus("slurm")
        self._order: Path | None = None
        self._orders = -1  # the write end of the first srun's stdin
        self._transport: NodeTransport | None = None

    def make_workspace_view(self) -> WorkspaceView:
        """Return the evaluator's view of the workspace."""
        return self.workspace.make_sandboxed_view(ROOM)

    def start_evaluator(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> StartedProcess:
        """Start srun, whose job waits for a node. Blocks."""
        commit = self._checkout.commit
        self._order = Order(
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
        started, self._orders = self._start_srun(0)
        return started

    def _start_srun(self, attempt: int) -> tuple[StartedProcess, int]:
        """Start an srun; return it and the write end of its stdin. Blocks. Raises: OSError."""
        with contextlib.ExitStack() as writing:
            reading, orders = os.pipe2(os.O_CLOEXEC)
            writing.callback(os.close, orders)
            try:
                os.set_blocking(orders, False)
                spec = attrs.evolve(self._make_srun_spec(attempt), descriptors=(reading,))
                with self._orphans.expect_child() as tell:
                    started = self._trees.start_beside(spec)
                    tell(started.pid)
            finally:
                os.close(reading)
            writing.pop_all()
            return started, orders

    def _name_job(self, attempt: int) -> str:
        return f"{self._sandbox.job_prefix}{self.workspace.root.name[:_NAME_LENGTH]}-{attempt}"

    def _make_srun_spec(self, attempt: int) -> LaunchSpec:
        configuration, environment = self._configuration, self._environment
        problem = configuration.problems.get(self.problem or "")
        named = None if environment is None else configuration.environments.get(environment.name)
        settings = merge_settings(
            configuration.runner, *(one.runner for one in (named, problem) if one is not None)
        )
        options = build_srun_options(
            settings, self.limits, self._name_job(attempt), configuration.evaluations.paused
        )
        python = configuration.runner.python or sys.executable
        return LaunchSpec(
            [
                *(*_SHELL, "srun", *options),
                *("--", python, "-I", "-m", NODE_PROGRAM, str(self._order)),
            ],
            build_command_environment(),
            "/",
        )

    def make_launch_spec(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> LaunchSpec:
        """Return srun; the order's file has the command."""
        return self._make_srun_spec(0)

    async def wait_for_begin(self, started: StartedProcess, spawner: ProcessAdopter) -> None:
        """Wait until a node runs the evaluator. Raises: EvaluationFailure.

        If it is cancelled, it returns after the end of srun.
        """
        retries = self._configuration.runner.retries
        transport = self._transport = NodeTransport(
            *(self._sandbox.clock, spawner, self._sandbox.commands, self._status),
            self._start_again,
            retries,
        )
        transport.adopt(started, self._name_job(0), self._orders)
        await wait_for_begin(transport)

    async def _start_again(self, attempt: int) -> tuple[StartedProcess, str, int]:
        """Start another srun, in directories as new. Raises: OSError."""
        started, orders = await self._sandbox.threads.run_in_thread(self._renew, attempt)
        return started, self._name_job(attempt), orders

    def _renew(self, attempt: int) -> tuple[StartedProcess, int]:
        for _, directory in self.make_workspace_view().writable_paths:
            remove_tree(directory)
            directory.mkdir()
        (self.workspace.root / SOCKET_NAME).unlink(missing_ok=True)
        return self._start_srun(attempt)

    def connect_process(
        self, run: ProcessProtocol, started: StartedProcess, spawner: ProcessAdopter
    ) -> None:
        """Let the evaluator on the node drive `run`."""
        assert self._transport is not None, "the run has begun"
        self._transport.connect(run)

    def send_signal(self, child: ProcessTransport, number: int) -> None:
        """Send a signal to the evaluator's processes on the node."""
        assert self._transport is not None, "the run has begun"
        self._transport.send_command(KILL if number == signal.SIGKILL else TERMINATE)

    async def kill_remaining_processes(self) -> None:
        """Do nothing: the node has told the exit after it has killed them, or the job is lost."""

    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the evaluator's exit, as the node has told it. Raises: EvaluationFailure."""
        assert self._transport is not None, "the run has begun"
        outcome, loss = self._transport.outcome, self._transport.loss
        if outcome is None:
            raise loss or EvaluationFailure("lost", "the evaluator was stopped without an outcome")
        if outcome.exit is None:
            raise outcome.unstarted or EvaluationFailure("lost", "the node has told no exit")
        return EvaluatorExit(*outcome.exit)

    def check_limits(self, final: bool = False, work: float = inf) -> EvaluationFailure | None:
        """Return the error of the limit that the node, or Slurm, has found exceeded."""
        transport = self._transport
        if transport is None or transport.outcome is None:
            return None
        return transport.outcome.over or transport.loss

    def check_memory(self) -> EvaluationFailure | None:
        """Return the error of a limit that a run that succeeded has exceeded."""
        return self.check_limits()

    def read_usage(self, waited: struct_rusage | None) -> ResourceUsage:
        """Return the usage that the node has measured."""
        outcome = self._transport.outcome if self._transport is not None else None
        return ResourceUsage(*outcome.usage) if outcome is not None else ResourceUsage(None, None)

    def list_descriptors(self) -> Sequence[int]:
        """Return none: evaluations on a cluster end with the daemon."""
        return ()
