"""Evaluators in jobs of Slurm, as the daemon sees them.

`SlurmSandbox` is what evaluations use in place of the daemon's own sandbox, and `SlurmRun` one run
of it: a job with one srun(1), which the daemon's starter runs. The job has a directory below that
of the evaluation (`JobWorkspace`), which daemon and node see. Output and end are read from files
there, which the node writes whether or not srun or the daemon live.

A job that is lost before its evaluator has printed anything may be replaced by another one, with a
directory of its own: what still runs on a node that does not answer writes to no file of it.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from resource import struct_rusage
from typing import Any

import attrs
import msgspec
from twisted.internet.defer import CancelledError, DeferredLock
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import deferLater
from twisted.logger import Logger

from tawebeval.config import LimitSettings, RunnerSettings
from tawebeval.core.evaluations import Checkout
from tawebeval.deferreds import OneShotEvent, WorkerThreads, run_in_background
from tawebeval.errors import EvaluationFailure
from tawebeval.linux import kernel_files, starter
from tawebeval.linux.cgroups import CgroupManager, ResourceUsage
from tawebeval.linux.filetree import copy_tree, remove_tree
from tawebeval.linux.starter import LaunchSpec
from tawebeval.linux.starter_client import (
    ProgramState,
    ProgramStateListener,
    StartedProgram,
    collect_program_files,
)
from tawebeval.linux.tail import TailContext, TailedProcess
from tawebeval.sandbox.base import (
    ClusterJob,
    Environment,
    EvaluatorExit,
    ResumableProcess,
    RunLimits,
    Sandbox,
    build_cpu_limit_failure,
    build_disk_limit_failure,
)
from tawebeval.sandbox.bubblewrap import BubblewrapRun, BubblewrapSandbox
from tawebeval.sandbox.workspace import Workspace, WorkspaceView
from tawebeval.slurm import node
from tawebeval.slurm.commands import (
    ENDING_STATE,
    NODE_PYTHON,
    QueuedJob,
    SlurmCommands,
    build_command_environment,
    build_job_loss_failure,
    build_srun_options,
)

MIN_POLL_SECONDS = 0.02
"""Seconds between two looks at a file that has just changed."""
MAX_POLL_SECONDS = 0.4
"""Seconds between two looks at a file that has not changed for long."""
NODE_KILL_TIMEOUT = 10.0
"""Seconds after which a node that does not answer to SIGKILL is given up."""
MAX_KILL_SECONDS = 2 * NODE_KILL_TIMEOUT
"""The most seconds from SIGKILL to the end of a run, also on a busy machine."""
SRUN_END_TIMEOUT = 30.0
"""Seconds after the end of an evaluator for its srun to end."""
MAX_POLLS_WITHOUT_JOB = 3
"""Looks at the queue without a job until it counts as gone."""
MAX_POLLS_OF_ENDING_JOB = 60
"""Looks at the queue, over two minutes, for the nodes of a job to end it."""

_PAUSE = 0.1  # between two looks at a file, as a part of the time since the last change
_OUTPUTS = ("stdout", "stderr")
_STDERR_TAIL = 8 * 1024  # bytes of srun's stderr that are read
_SRUN_OUTPUT_BYTES = 2**20  # of srun's own stdout, and of its stderr, that are stored
_PROGRAM = collect_program_files(node, kernel_files, starter)

log = Logger()


@attrs.define(eq=False)
class _WatchedFile:
    path: str
    on_change: Callable[[], object]
    changed_at: float
    due: float = 0.0
    signature: tuple[int, int, int] | None = None

    def has_changed(self) -> bool:
        """Look at the file, which may be missing. Blocks.

        By open(2), at which NFS asks its server: stat(2) would be answered by the client's cache.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
        except OSError:
            return False
        before = self.signature
        self.signature = status.st_ino, status.st_size, status.st_mtime_ns
        return before != self.signature


@attrs.define(eq=False)
class PollingFileWatcher:
    """Watcher of files that other machines write, of which inotify(7) says nothing.

    One thread looks at all files in turn. While the file system does not answer, that thread waits,
    and nothing else does.
    """

    _clock: Any
    _threads: WorkerThreads
    _files: dict[str, _WatchedFile] = attrs.field(factory=dict)
    _is_polling: bool = False

    def watch(self, path: str, on_change: Callable[[], object], *, is_urgent: bool = True) -> None:
        """Call `on_change()` when the file has appeared or changed; all are looked at alike."""
        self._files[path] = _WatchedFile(path, on_change, self._clock.seconds())
        if not self._is_polling:
            self._is_polling = True
            run_in_background(self._poll(), log, "defect: the shared directory is not watched")

    def unwatch(self, path: str) -> None:
        """Stop watching a file."""
        self._files.pop(path, None)

    async def _poll(self) -> None:
        try:
            while self._files:
                await self._look(
                    [f for f in self._files.values() if f.due <= self._clock.seconds()]
                )
                await deferLater(self._clock, MIN_POLL_SECONDS)
        finally:
            self._is_polling = False

    async def _look(self, files: list[_WatchedFile]) -> None:
        if not files:
            return
        changed = await self._threads.run_in_thread(lambda: [f for f in files if f.has_changed()])
        now = self._clock.seconds()
        for file in changed:
            file.changed_at = now
        for file in files:
            pause = (now - file.changed_at) * _PAUSE
            file.due = now + min(max(pause, MIN_POLL_SECONDS), MAX_POLL_SECONDS)
        for file in changed:
            if self._files.get(file.path) is file:
                file.on_change()


class NodeProgramState(ProgramState, frozen=True):
    """The content of the file `state` of a job (`node.NodeStarter`)."""

    node: str | None = None
    job: str | None = None
    exceeded_limit: str | None = None
    unlinked_bytes: int = 0
    error: str | None = None


@attrs.frozen
class JobWorkspace(Workspace):
    """The directories of one job, below those of its evaluation. All methods block.

    The name of `root` is that of the job in Slurm, and `root` that of srun for the starter. Only
    submission and events are those of the evaluation.
    """

    @property
    def name(self) -> str:
        """The name in Slurm."""
        return self.root.name

    @property
    def submission_directory(self) -> Path:
        """The directory of the submitted files."""
        return Workspace(self.root.parent).submission_directory

    @property
    def events_directory(self) -> Path:
        """The directory of the evaluation's output and events."""
        return Workspace(self.root.parent).output_directory

    @property
    def state_file(self) -> Path:
        """The file that the node writes."""
        return self.root / "state"

    def make_sandboxed_view(self, root: Path) -> WorkspaceView:
        """Return the view of an evaluator that sees its own workspace only, at `root`."""
        return attrs.evolve(super().make_sandboxed_view(root), ours=[self.root, self.root.parent])

    def write_launch_files(self, launch: LaunchSpec) -> None:
        """Make what the node finds: directories, and what to start. Raises: OSError."""
        for _, directory in self.make_sandboxed_view(self.root).writable_paths:
            directory.mkdir(parents=True, exist_ok=True)
        self.output_directory.mkdir(mode=0o700)
        (self.root / "signal").touch(0o600)
        path = self.output_directory / "start"
        path.touch(0o600)
        path.write_text(json.dumps(launch.build_json_object()))

    def append_signal(self, number: int) -> None:
        """Tell the node to send a signal to the evaluator. Raises: OSError."""
        with (self.root / "signal").open("a") as file:
            file.write(f"{number}\n")

    def read_state(self) -> NodeProgramState | None:
        """Return what the node has told; None before, and while it cannot be read.

        Once the evaluator runs, its output is where events are made of it.
        """
        try:
            state = msgspec.json.decode(self.state_file.read_bytes(), type=NodeProgramState)
            if state.error is None:
                for name in _OUTPUTS:
                    target = self.events_directory / name
                    with suppress(FileNotFoundError):
                        (self.output_directory / name).rename(target)
                    with suppress(FileNotFoundError):  # NFS asks its server for the size
                        target.open("rb").close()
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        except OSError as error:
            log.error("the state of a job cannot be read: {error}", error=error)  # noqa: TRY400
            return None
        return state

    def replace_empty_output_files(self) -> bool:
        """Replace the output files if nothing was printed; return whether nothing was.

        What is printed later does not count: a lost node may come back. Raises: OSError.
        """
        paths = [self.events_directory / name for name in _OUTPUTS]
        if any(path.stat().st_size for path in paths):
            return False
        for path in paths:
            new = path.with_suffix(".new")
            new.touch(0o600)
            new.rename(path)
        return True

    def read_srun_stderr(self) -> str:
        """Return the end of what srun has printed on stderr."""
        with suppress(OSError):
            return (self.root / "stderr").read_bytes()[-_STDERR_TAIL:].decode(errors="replace")
        return ""


def write_node_program(directory: Path) -> Path:
    """Write the program of the nodes into a directory; return its path. Blocks. Raises: OSError."""
    program = directory / "node"
    remove_tree(program)  # that of an earlier version
    for name, content in _PROGRAM.items():  # no archive: each job would compile it
        (program / name).parent.mkdir(parents=True, exist_ok=True)
        (program / name).write_bytes(content)
    return program


class SlurmRunLimits(RunLimits):
    """The limits of a run on a node.

    The daemon counts files in the shared directory. The node checks what only it sees, which its
    state tells, and the kernel there the rest.
    """

    _state = NodeProgramState()
    _is_away = False

    def _list_main_pids(self) -> tuple[int, ...]:
        """Return nothing: the processes are on the node."""
        return ()

    def set_measured_job(self, job: JobWorkspace) -> None:
        """Count the files of another job from now on."""
        self.disk = attrs.evolve(self.disk, directory=job.root, left=None)

    def apply_node_program_state(self, state: NodeProgramState) -> None:
        """Take what the node tells. Removed files that are open there leave less for others."""
        self._most_disk += self._state.unlinked_bytes - state.unlinked_bytes
        self._state = state

    def find_limit_failure(
        self, final: bool = False, counts: bool = True
    ) -> EvaluationFailure | None:
        """Return the error of the first exceeded limit; None if all are kept. Blocks."""
        try:
            failure = self.find_node_limit_failure() or super().find_limit_failure(final, counts)
        except OSError as error:  # the shared directory is away, for a moment
            if not self._is_away:
                words = "runner.shared: limits of a run are not checked: {error}"
                log.warn(words, error=error.strerror)
            self._is_away = True
            return None
        self._is_away = False
        return failure

    def find_node_limit_failure(self) -> EvaluationFailure | None:
        """Return the error of the limit that the node has found exceeded, whatever the exit."""
        if self._state.exceeded_limit == "cpu":
            return build_cpu_limit_failure(self.settings)
        if self._state.exceeded_limit == "memory":
            return self._build_memory_failure()
        is_disk = self._state.exceeded_limit == "disk"
        return build_disk_limit_failure(self.settings) if is_disk else None

    def read_usage(self, rusage: struct_rusage | None) -> ResourceUsage:
        """Return what wait4(2) has returned on the node: the memory of the largest process."""
        return ResourceUsage(None, (rusage and rusage.ru_maxrss * 1024) or None)


class SlurmRun(BubblewrapRun):
    """One run on a node.

    It is to `TailedProcess` what the starter is to it on this machine: it tells the state of the
    evaluator, and passes signals on.

    - `workspace`: the present job; `node_program_state`: what its node has told, None before.
    - `job_loss`: why the last job was lost; None while it is not.
    """

    has_external_queue = True
    workspace: JobWorkspace
    cluster_job: ClusterJob
    run_limits: SlurmRunLimits
    node_program_state: NodeProgramState | None = None
    job_loss: EvaluationFailure | None = None
    _sandbox: SlurmSandbox
    _arguments: tuple[str, Mapping[str, str], Path] | None = None  # of `start_evaluator`
    _process: TailedProcess | None = None
    _run: Any = None  # its protocol
    _listener: ProgramStateListener | None = None
    _kill: IDelayedCall | None = None  # of the job after SIGKILL, or of srun after the end
    _first_loss: EvaluationFailure | None = None
    _has_srun = True
    _doubtful_looks = 0  # in a row, at which Slurm did not have the job, or was ending it
    _is_suspended = False  # its clock, while Slurm ends the job
    _is_stopped = False
    _is_over = False  # nothing more counts

    def __init__(
        self,
        workspace: Workspace,
        checkout: Checkout,
        limits: LimitSettings,
        sandbox: SlurmSandbox,
        environment: Environment | None = None,
    ) -> None:
        self._evaluation = workspace
        self._begun: OneShotEvent[EvaluationFailure | None] = OneShotEvent()
        self._reading = DeferredLock()
        self.cluster_job = ClusterJob("slurm")
        job = sandbox.make_job_workspace(workspace)
        super().__init__(job, checkout, limits, sandbox, environment)
        cgroups = sandbox.cgroup_manager
        self.run_limits = SlurmRunLimits(limits, cgroups, job, checkout.commit)
        self.run_limits.make_cgroup("")  # which is none

    def _use_job(self, job: JobWorkspace) -> None:
        self.workspace = job
        self.node_program_state, self._has_srun, self._doubtful_looks = None, True, 0
        self._is_suspended = False

    # The start

    def start_evaluator(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> JobWorkspace:
        """Start srun, whose job waits for a node. Blocks."""
        self._arguments = command, environment, directory
        self._start_job()
        return self.workspace

    def _start_job(self, excluded_node: str | None = None) -> None:
        """Write what the node needs, and start srun by the starter. Blocks. Raises: OSError."""
        job, limits, sandbox = self.workspace, self.limits, self._sandbox
        assert self._arguments is not None, "started by this process of the daemon"
        launch = self.make_launch_spec(*self._arguments)
        launch = launch._replace(stdout_limit=limits.output, stderr_limit=limits.stderr)
        job.write_launch_files(launch)
        copy_tree(self._checkout.path, job.tree_directory)
        options = build_srun_options(
            limits, job.name, sandbox.settings, *self.job_settings, excluded_node=excluded_node
        )
        on_node = (NODE_PYTHON, "-I", "-S", str(sandbox.node_program_path), str(job.root))
        srun = LaunchSpec(
            ["/usr/bin/env", "srun", *options, "--", *on_node, str(limits.cpu), str(limits.disk)],
            build_command_environment(),
            "/",
            stdout_limit=_SRUN_OUTPUT_BYTES,
            stderr_limit=_SRUN_OUTPUT_BYTES,
        )
        # So that the job is not cancelled if this thread waits for the shared directory.
        sandbox.reactor.callFromThread(sandbox.commands.add_job_watcher, job.name)
        try:
            self._launcher.starter.start_program(job.root, srun)
        finally:  # it has SLURM_JWT, for which the shared directory is no place
            with suppress(FileNotFoundError):
                (job.root / "start").unlink()

    async def wait_for_evaluator_start(self, started: JobWorkspace) -> None:
        """Wait until a node runs the evaluator. Raises: EvaluationFailure.

        A cancellation ends srun and its job.
        """
        self._follow()
        try:
            failure = await self._begun.wait()
        except CancelledError:
            self._give_up()
            self._is_over = True
            raise
        if failure is not None:
            raise failure

    def connect_process(
        self, run: ProcessProtocol, started: JobWorkspace, stdout_offset: int = 0
    ) -> TailedProcess:
        """Let the evaluator on the node drive `run`. Raises: OSError."""
        state, sandbox = self.node_program_state, self._sandbox
        assert state is not None, "it has begun"
        threads = sandbox.threads.run_in_thread
        context = TailContext(sandbox.reactor, self, sandbox.watcher, threads, reads_in_thread=True)
        program = StartedProgram(
            self._evaluation.output_directory, state.pid, state.start_time_ticks
        )
        self._run, self._process = run, TailedProcess(context, run, program, stdout_offset)
        return self._process

    def make_resume_data(self) -> dict[str, Any]:
        """Return what `resume_process` needs, as JSON."""
        return {**attrs.asdict(self.cluster_job), "job_name": self.workspace.name}

    def resume_process(self, run: ProcessProtocol, left: ResumableProcess) -> TailedProcess:
        """Go on with a run that was started by another process of the daemon. Blocks.

        Raises: OSError, also if the job was being replaced by another one.
        """
        status, described = self.cluster_job, left.resume_data
        status.job, status.node = described["job"], described["node"]
        status.retries = described["retries"]
        self._use_job(JobWorkspace(self._evaluation.root / described["job_name"]))
        state = self.node_program_state = self.workspace.read_state()
        known = left.pid, left.start_time_ticks
        if state is None or (state.pid, state.start_time_ticks) != known:
            path = str(self.workspace.state_file)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self.run_limits.set_measured_job(self.workspace)
        process = self.connect_process(run, self.workspace, left.stdout_offset)
        self._follow()
        self._take_state(state)
        return process

    def _follow(self) -> None:
        job = self.workspace
        self._sandbox.commands.add_job_watcher(job.name, self._on_queue)
        self._sandbox.watcher.watch(str(job.state_file), self._look)
        self._launcher.starter.watch_program(job.root, self._on_srun_state)

    def _unfollow(self) -> None:
        self._sandbox.watcher.unwatch(str(self.workspace.state_file))
        self._sandbox.commands.abandon_job(self.workspace.name)
        self._cancel_kill()

    def _cancel_kill(self) -> None:
        if self._kill is not None and self._kill.active():
            self._kill.cancel()

    # What `TailedProcess` wants of a starter

    def watch_program(self, directory: Path, listener: ProgramStateListener) -> None:
        """Tell `listener` the state soon, and whenever it changes."""
        self._listener = listener
        self._sandbox.reactor.callLater(0, self._deliver_state)

    def unwatch_program(self, directory: Path) -> None:
        """Tell nothing any more; a job that has not ended is left to the next daemon."""
        self._listener = None
        if not self._is_over:
            self._is_over = True
            self._unfollow()
            self._sandbox.commands.add_job_watcher(self.workspace.name)

    def signal_program(self, directory: Path, number: int) -> None:
        """Send a signal to the evaluator; after SIGKILL do not wait for long."""
        self._is_stopped = True
        if self._is_over:
            return
        if self.node_program_state is None:  # the job waits in place of a lost one
            self._lose(EvaluationFailure("lost", "the evaluator was stopped before it ran again"))
            return
        writing = self._sandbox.threads.run_in_thread(self.workspace.append_signal, number)
        run_in_background(writing, log, "a signal for a node is not written")
        if number == signal.SIGKILL and self._kill is None:
            deaf = EvaluationFailure("lost", "the node of the evaluator does not answer")
            self._kill = self._sandbox.reactor.callLater(NODE_KILL_TIMEOUT, self._lose, deaf)

    def close_output(self, directory: Path) -> None:
        """Do nothing: the node closes the pipes."""

    def _deliver_state(self) -> None:
        listener, process = self._listener, self._process
        if listener is None or process is None:
            return
        if self.job_loss is not None:  # the end comes after all that was printed
            killed = (process.pid, process.start_time_ticks, signal.SIGKILL)
            listener(ProgramState(*killed, is_output_complete=True))
        elif self.node_program_state is not None:
            listener(self.node_program_state)

    # What node, starter and queue tell

    def _look(self) -> None:
        run_in_background(self._read(self.workspace), log, "defect: a job is not followed")

    async def _read(self, job: JobWorkspace) -> None:
        """Read what the node has told."""
        async with self._reading:  # in the order of changes
            if not self._is_present(job):
                return  # the files of its output may have made place for those of another job
            state = await self._sandbox.threads.run_in_thread(job.read_state)
            if state is not None and state != self.node_program_state and self._is_present(job):
                self._take_state(state)

    def _is_present(self, job: JobWorkspace) -> bool:
        """Tell whether what is said of a job still counts."""
        return job is self.workspace and not self._is_over

    def _take_state(self, state: NodeProgramState) -> None:
        begins, status = self.node_program_state is None, self.cluster_job
        self.node_program_state = state
        self.run_limits.apply_node_program_state(state)
        status.node, status.job = state.node, state.job or status.job
        if state.error is not None:
            what = f"the node {state.node} could not run the evaluator: {state.error}"
            self._lose(EvaluationFailure("lost", what), is_repeatable=True)
            return
        if begins:
            status.queue_reason = None
            if self._process is not None:  # in place of a lost job
                try:
                    self._process.switch_to_process(state.pid, state.start_time_ticks)
                except OSError as error:
                    what = f"the evaluator's output cannot be read: {error.strerror}"
                    self._lose(EvaluationFailure("lost", what))
                    return
                self._run.restart_clock()
            self._begun.set_value(None)
        if state.is_output_complete:
            self._unfollow()
            self._is_over = True  # the job ends with srun, or because nobody watches it
            if self._has_srun:
                self._kill = self._sandbox.reactor.callLater(SRUN_END_TIMEOUT, self._forget_srun)
        self._deliver_state()

    def _on_srun_state(self, state: ProgramState | None) -> None:
        """Take what the starter tells of srun; None if the starter has ended."""
        if state is not None and not state.is_unknown:
            if state.wait_status is None or not state.is_output_complete:
                return
            self._forget_srun()
        self._has_srun = False
        if not self._is_over:
            self._look()  # the end may be there

    def _forget_srun(self) -> None:
        """End srun, if it runs, and drop what the starter knows of it.

        By SIGKILL: at SIGTERM srun would cancel a number, perhaps another job's.
        """
        self._cancel_kill()
        self._launcher.starter.unwatch_program(self.workspace.root)
        self._launcher.starter.forget_program(self.workspace.root)

    def _on_queue(self, queued: QueuedJob | None) -> None:
        """Take what squeue says of the job; None if it does not know the job."""
        status = self.cluster_job
        if queued is not None:
            status.job = queued.identifier
            status.queue_reason = queued.reason if queued.state == "PENDING" else None
        elif self._has_srun and status.job is None:
            return  # srun waits for a controller that is away
        if queued is not None and queued.is_alive:
            self._doubtful_looks = 0
            if self._is_suspended:
                self._is_suspended = False
                self._run.restart_clock()
            return
        self._doubtful_looks += 1
        looks = MAX_POLLS_WITHOUT_JOB if queued is None else 1
        if queued is not None and queued.state == ENDING_STATE:
            looks = MAX_POLLS_OF_ENDING_JOB
            has_begun = self.node_program_state is not None
            if self._run is not None and has_begun and not self._is_suspended:
                self._is_suspended = True
                self._run.reset_clock()
        if self._doubtful_looks >= looks:
            self._sandbox.commands.abandon_job(self.workspace.name)
            explanation = self._explain_loss(self.workspace, queued)
            run_in_background(explanation, log, "defect: the end of a job is unknown")

    async def _explain_loss(self, job: JobWorkspace, queued: QueuedJob | None) -> None:
        await self._read(job)  # this machine may see only now what the node has told before
        said = await self._sandbox.threads.run_in_thread(job.read_srun_stderr)
        if self._is_present(job):
            loss = build_job_loss_failure(queued, said)
            self._sandbox.commands.counters.lost_jobs_by_reason[loss.reason] += 1
            self._lose(loss, is_repeatable=loss.reason in ("node", "preempted"))

    # The end

    def _lose(self, loss: EvaluationFailure, *, is_repeatable: bool = False) -> None:
        """End a lost job, and start another one if the operator allows it."""
        self._give_up()
        is_allowed = self._sandbox.settings.retries > self.cluster_job.retries
        if is_repeatable and is_allowed and self._arguments is not None:
            run_in_background(self._repeat(loss), log, "defect: a lost job is not repeated")
        else:
            self._end(loss)

    def _give_up(self) -> None:
        """End srun and its job, whatever the node does."""
        self._unfollow()
        self._forget_srun()

    def _end(self, loss: EvaluationFailure) -> None:
        self._is_over = True
        # There may be no other node than the first one.
        self.job_loss = loss if self.node_program_state is not None else self._first_loss or loss
        self._sandbox.reactor.callLater(0, self._deliver_state)
        self._begun.set_value(self.job_loss)

    async def _repeat(self, loss: EvaluationFailure) -> None:
        """Start a job in place of a lost one, if its evaluator has printed nothing."""
        threads, status = self._sandbox.threads, self.cluster_job
        lost, process = self.workspace, self._process
        try:
            if process is not None:
                is_clean = await threads.run_in_thread(lost.replace_empty_output_files)
                if self._is_stopped or not (is_clean and process.is_running):
                    self._end(loss)
                    return
            log.warn("{why}; another job takes its place", why=loss.message)
            excluded_node = None if loss.reason == "preempted" else status.node
            self._first_loss = loss
            self._use_job(self._sandbox.make_job_workspace(self._evaluation))
            status.retries += 1
            status.job = status.node = None
            if process is not None:
                process.switch_to_process(process.pid, process.start_time_ticks)
                self._run.reset_clock()
            await threads.run_in_thread(self._start_job, excluded_node)
        except Exception as error:  # noqa: BLE001  (a client learns of every end)
            words = "no job can take the place of the lost one: {error!r}"
            log.error(words, error=error)  # noqa: TRY400
            self._lose(loss)
            return
        self._sandbox.commands.counters.restarted_jobs += 1
        unused = [lost.root]
        if self._is_over:  # it was stopped meanwhile, and perhaps cleaned up
            self._give_up()
            unused.append(self.workspace.root)
        else:
            self.run_limits.set_measured_job(self.workspace)
            self._follow()
        with suppress(OSError):  # what still runs somewhere writes to the directory
            await threads.run_in_thread(remove_tree, *unused)

    def send_signal(self, child: TailedProcess, number: int) -> None:
        """Send a signal to the evaluator's processes on the node."""
        child.signal_group(number)

    async def kill_remaining_processes(self) -> None:
        """Do nothing: the node has told the exit after it has killed them, or the job is lost."""

    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the evaluator's exit. Raises: EvaluationFailure."""
        if self.job_loss is not None:
            raise self.job_loss
        return super().interpret_exit(status, number)

    def close(self) -> None:
        """End the job of a run that has not come to its end. Blocks."""
        if not self._is_over:
            self._is_over = True
            with suppress(OSError):  # srun has ended
                self._launcher.starter.forget_program_blocking(self.workspace.root)
            self._sandbox.reactor.callFromThread(self._unfollow)
        self.run_limits.close()


@attrs.define(eq=False)
class SlurmSandbox(BubblewrapSandbox):
    """The sandbox of `runner.kind = "slurm"`: that of the daemon, which nodes start.

    `node_program_path` is the path of the program of the nodes.
    """

    run_class = SlurmRun
    settings: RunnerSettings
    commands: SlurmCommands
    threads: WorkerThreads
    reactor: Any
    watcher: PollingFileWatcher
    node_program_path: Path

    @classmethod
    def create(
        cls,
        settings: RunnerSettings,
        local: Sandbox,
        commands: SlurmCommands,
        threads: WorkerThreads,
        reactor: Any,
    ) -> SlurmSandbox:
        """Return the sandbox beside the daemon's own, `local`, which the nodes have, too.

        Blocks. Raises: OSError.
        """
        assert isinstance(local, BubblewrapSandbox), "`parse_configuration` refuses no sandbox"
        own = attrs.asdict(local, recurse=False, filter=lambda field, _: field.init)
        own["cgroup_manager"] = CgroupManager({})  # the cgroups of a job belong to root
        return cls(
            **own,
            settings=settings,
            commands=commands,
            threads=threads,
            reactor=reactor,
            watcher=PollingFileWatcher(reactor, threads),
            node_program_path=write_node_program(local.sandbox_files_directory),
        )

    def make_job_workspace(self, evaluation: Workspace) -> JobWorkspace:
        """Return a new job of an evaluation."""
        return JobWorkspace(evaluation.root / self.commands.make_job_name(evaluation.root.name))
