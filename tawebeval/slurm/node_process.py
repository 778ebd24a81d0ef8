"""The process of a run on a node: the `ProcessTransport` of an evaluator behind srun.

`Attempt` is one job of an evaluation, with a directory of its own below that of the evaluation,
which daemon and node see. So a job of an earlier attempt, which may still run on a node that does
not answer, writes into no file of a later one.

`PollingWatcher` watches files that other machines write, of which inotify(7) says nothing.

`NodeProcess` is the process: one job, or two after the loss of a node.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from resource import struct_rusage
from secrets import token_hex
from threading import Lock
from typing import Any

import attrs
import msgspec
from twisted.internet.defer import CancelledError, Deferred, DeferredLock, succeed
from twisted.internet.error import ProcessTerminated
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.deferreds import OneShotEvent, WorkerThreads, run_in_background
from tawebeval.errors import EvaluationFailure, StoreError
from tawebeval.linux import kernel_files, starter
from tawebeval.linux.child import STDERR, STDOUT
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.starter_client import (
    ProgramListener,
    ProgramState,
    StartedProgram,
    StarterClient,
    collect_program,
)
from tawebeval.linux.tail import ProgramFiles, TailedProcess
from tawebeval.sandbox import broker
from tawebeval.sandbox.base import RunnerStatus
from tawebeval.sandbox.workspace import Workspace, WorkspaceView
from tawebeval.slurm import node
from tawebeval.slurm.commands import NODE_PYTHON, QueuedJob, SlurmCommands, explain_job_loss

MIN_POLL_SECONDS = 0.02
"""Seconds between two looks at a file that has just changed."""
MAX_POLL_SECONDS = 0.4
"""Seconds between two looks at a file that has not changed for long."""

_PAUSE = 0.1  # between two looks, as a part of the time since the last change

_Signature = tuple[int, int, int]  # inode, size, and time of the last change in nanoseconds

log = Logger()


@attrs.define(eq=False)
class _WatchedFile:
    path: Path
    on_change: Callable[[], object]
    changed_at: float
    signature: _Signature | None = None
    due: float = 0.0


@attrs.define(eq=False)
class PollingWatcher:
    """Watcher of files by one thread, which looks at all files in turn.

    While the file system does not answer, that thread waits, and nothing else does.
    """

    _clock: Any
    _threads: WorkerThreads
    _files: dict[Path, _WatchedFile] = attrs.field(factory=dict)
    _is_polling: bool = False

    def watch(self, path: Path, on_change: Callable[[], object]) -> None:
        """Call `on_change()` when the file has appeared or changed."""
        self._files[path] = _WatchedFile(path, on_change, self._clock.seconds())
        if not self._is_polling:
            self._is_polling = True
            run_in_background(self._poll(), log, "defect: the shared directory is not watched")

    def unwatch(self, path: Path) -> None:
        """Stop watching a file."""
        self._files.pop(path, None)

    async def _poll(self) -> None:
        try:
            while self._files:
                now = self._clock.seconds()
                if due := [file for file in self._files.values() if file.due <= now]:
                    await self._look(due)
                await deferLater(self._clock, MIN_POLL_SECONDS)
        finally:
            self._is_polling = False

    async def _look(self, files: Sequence[_WatchedFile]) -> None:
        signatures = await self._threads.run_in_thread(
            lambda: [_read_signature(file.path) for file in files]
        )
        now = self._clock.seconds()
        for file, signature in zip(files, signatures, strict=True):
            has_changed = signature not in (None, file.signature)
            if has_changed:
                file.signature, file.changed_at = signature, now
            pause = (now - file.changed_at) * _PAUSE
            file.due = now + min(max(pause, MIN_POLL_SECONDS), MAX_POLL_SECONDS)
            if has_changed and self._files.get(file.path) is file:
                file.on_change()


def _read_signature(path: Path) -> _Signature | None:
    """Return what changes with a file; None without one. Blocks.

    By open(2), at which NFS asks its server: stat(2) would be answered by the client's cache.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


_PREFIX = "job-"
_PROGRAMS = "node-"  # begins the names of the programs on the nodes
_NAME_LENGTH = 16  # of an evaluation's name in the log, which begins its directory's name
_STDERR_TAIL = 8 * 1024  # bytes of srun's stderr that are read
_PROGRAM = collect_program(node, broker, kernel_files, starter)
_DIGEST = hashlib.sha256(b"\0".join(_PROGRAM.values())).hexdigest()[:16]

_writing = Lock()  # several threads may start jobs at once


def write_node_program(parent: Path) -> Path:
    """Write the program of the nodes below a shared directory; return its path. Blocks.

    Raises: OSError.
    """
    target = parent / f"{_PROGRAMS}{_DIGEST}"
    with _writing:
        if not target.exists():
            new = parent / f"{_PROGRAMS}new"
            for name, content in _PROGRAM.items():  # no archive: each job would compile it
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(content)
            new.rename(target)
    return target


def remove_other_node_programs(parent: Path) -> None:
    """Remove the programs of nodes of other versions of tawebeval. Blocks. Raises: OSError."""
    for program in parent.glob(f"{_PROGRAMS}*"):
        if program.name != f"{_PROGRAMS}{_DIGEST}":
            remove_tree(program)


class NodeState(ProgramState, frozen=True):
    """The content of the file `state` of a job (`node.NodeJob`)."""

    node: str | None = None
    job: str | None = None
    exceeded: str | None = None
    unlinked_bytes: int = 0
    error: str | None = None

    @property
    def is_final(self) -> bool:
        """Whether nothing more comes from the node."""
        return self.error is not None or self.is_output_complete


@attrs.frozen
class JobWorkspace(Workspace):
    """The directories of one job; only the submission is that of the evaluation."""

    @property
    def submission_directory(self) -> Path:
        """The directory of the submitted files."""
        return Workspace(self.root.parent).submission_directory

    def make_sandboxed_view(self, root: Path) -> WorkspaceView:
        """Return the view of an evaluator that sees its own workspace only, at `root`."""
        return attrs.evolve(super().make_sandboxed_view(root), ours=[self.root, self.root.parent])


@attrs.define(eq=False)
class Attempt:
    """One job, and its srun.

    - `job_name`: its name in Slurm; `workspace`: its directories, `evaluation` that of the events.
    - `job_identifier`, `node`: None until known. `state`: what the node has told; None before.
    - `job`: what squeue said last, since the end of srun. `deadline`: of the wait for more.
    - `is_over`: whether its end was taken: nothing more counts.
    - `has_srun`: whether the starter runs an srun for it. `srun_ended`: happens at its end.
    """

    job_name: str
    workspace: JobWorkspace
    evaluation: Workspace
    job_identifier: str | None = None
    node: str | None = None
    state: NodeState | None = None
    is_over: bool = False
    has_srun: bool = True
    job: QueuedJob | None = None
    deadline: IDelayedCall | None = None
    srun_ended: OneShotEvent[None] = attrs.field(factory=OneShotEvent)

    @classmethod
    def create(cls, job_prefix: str, session: str, evaluation: Workspace) -> Attempt:
        """Return a new job, of which nothing is on the disk yet; its name ends in `session`."""
        token = token_hex(4) + session
        name = f"{job_prefix}{evaluation.root.name[:_NAME_LENGTH]}-{token}"
        return cls(name, JobWorkspace(evaluation.root / f"{_PREFIX}{token}"), evaluation)

    @classmethod
    def load(cls, described: Mapping[str, Any], evaluation: Workspace) -> Attempt:
        """Return the job that `describe` has described."""
        name = described["job_name"]
        workspace = JobWorkspace(evaluation.root / f"{_PREFIX}{name.rpartition('-')[2]}")
        return cls(name, workspace, evaluation, described["job"], described["node"])

    def describe(self) -> dict[str, Any]:
        """Return what `load` needs, as JSON."""
        return {"job_name": self.job_name, "job": self.job_identifier, "node": self.node}

    @property
    def directory(self) -> Path:
        """The job's directory, which is also the name of srun for the starter."""
        return self.workspace.root

    @property
    def state_file(self) -> Path:
        """The file that the node writes."""
        return self.directory / "state"

    @property
    def has_begun(self) -> bool:
        """Whether the node has started the evaluator."""
        return self.state is not None and self.state.error is None

    # On the disk; these block

    def make_directories(self) -> None:
        """Make the directories and files that the node finds. Raises: OSError."""
        for _, directory in self.workspace.make_sandboxed_view(self.directory).writable_paths:
            directory.mkdir(parents=True, exist_ok=True)
        self.workspace.output_directory.mkdir(mode=0o700)
        (self.directory / "signal").touch(0o600)

    def write_start(self, specification: Mapping[str, Any]) -> None:
        """Write what the node has to start. Raises: OSError."""
        path = self.workspace.output_directory / "start"
        path.touch(0o600)
        path.write_text(json.dumps(specification))

    def read_start(self, other: Attempt) -> dict[str, Any]:
        """Return what another job has to start, for the directories of this job.

        The names of these directories are random, and nothing else contains them. Raises: OSError;
        ValueError, if the description is damaged.
        """
        text = (other.workspace.output_directory / "start").read_text()
        found: dict[str, Any] = json.loads(text.replace(other.directory.name, self.directory.name))
        return found

    def read_state(self) -> NodeState | None:
        """Return what the node has told; None before. Raises: OSError.

        Once the evaluator runs, its output is where events are made of it.
        """
        try:
            state = msgspec.json.decode(self.state_file.read_bytes(), type=NodeState)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        if state.error is None:
            own, target = self.workspace.output_directory, self.evaluation.output_directory
            target.mkdir(exist_ok=True)
            for name in ("stdout", "stderr"):
                with suppress(FileNotFoundError):
                    (own / name).rename(target / name)
                with suppress(FileNotFoundError):  # NFS asks its server for the size
                    os.close(os.open(target / name, os.O_RDONLY | os.O_CLOEXEC))
        return state

    def has_printed(self) -> bool:
        """Tell whether the evaluator has printed anything."""
        return any(
            (directory / name).exists() and (directory / name).stat().st_size
            for directory in (self.workspace.output_directory, self.evaluation.output_directory)
            for name in ("stdout", "stderr")
        )

    def write_signal(self, number: int) -> None:
        """Let the node send a signal to the evaluator. Raises: OSError."""
        with (self.directory / "signal").open("a") as file:
            file.write(f"{number}\n")

    def read_srun_stderr(self) -> str:
        """Return the end of what srun has printed on stderr."""
        with suppress(OSError):
            return (self.directory / "stderr").read_bytes()[-_STDERR_TAIL:].decode(errors="replace")
        return ""

    def remove(self) -> None:
        """Remove the directory. Raises: OSError."""
        remove_tree(self.directory)


def build_node_command(program: Path, arguments: Sequence[str]) -> Sequence[str]:
    """Return what a job runs."""
    return [NODE_PYTHON, "-I", "-S", str(program), *arguments]


KILL_ANSWER_TIMEOUT = 10.0
"""Seconds after which a node that does not answer to SIGKILL is given up."""

MAX_KILL_SECONDS = 2 * KILL_ANSWER_TIMEOUT
"""The most seconds from SIGKILL to the end of a run, also on a busy machine."""

SRUN_END_TIMEOUT = 60.0
"""Seconds after the evaluator's end for srun to end; it waits for a controller that is away."""

JOB_QUERY_TIMEOUT = 120.0
"""Seconds for a controller that is away, or a node that ends a job, to say why a job was lost."""

_MISSES = 2  # looks at the queue without a job whose srun has ended
_MISSES_OF_UNKNOWN = 15  # ... and of a job that nobody has told of
_KILLED = ProgramState(
    status=signal.SIGKILL, rusage=(0,) * 16, is_output_complete=True
)  # of a lost evaluator


@attrs.frozen
class ClusterAccess:
    """What runs on nodes share: the starter of srun, and how files of nodes are read."""

    reactor: Any
    get_starter: Callable[[], StarterClient]
    watcher: PollingWatcher
    threads: WorkerThreads
    commands: SlurmCommands


RepeatJob = Callable[[Attempt, str | None], Awaitable[Attempt]]
"""Start a job in place of a lost one, not on the node that is named."""


class _SrunListener:
    """What the starter tells of the srun of one attempt."""

    def __init__(self, process: NodeProcess, attempt: Attempt) -> None:
        self._process = process
        self._attempt = attempt

    def on_state(self, state: ProgramState) -> None:
        if state.is_unknown:
            self.on_starter_lost()
        elif state.status is not None and state.is_output_complete:
            self._process.on_srun_end(self._attempt, is_known=True)

    def on_starter_lost(self) -> None:
        self._process.on_srun_end(self._attempt, is_known=False)


@attrs.define(eq=False)
class NodeProcess:
    """The process of a run: a `ProcessTransport` over one job, or over two after a loss.

    `start_event` has None once the evaluator runs, or the reason why it does not. Output and end
    are read from files, which the node writes whether or not srun or the daemon live. A job is
    begun again, by `repeat`, only if it was lost before the evaluator printed anything.

    srun is a program of the starter. If the starter has ended, and srun with it, the job goes on,
    and the queue tells its end.
    """

    _access: ClusterAccess
    runner_status: RunnerStatus
    _repeat: RepeatJob
    _retries: int
    attempt: Attempt
    pid: int = 0
    start_time: int = 0
    start_event: OneShotEvent[EvaluationFailure | None] = attrs.field(factory=OneShotEvent)
    on_broker_error: Callable[[str], object] = lambda reason: None
    job_loss: EvaluationFailure | None = None
    is_attached: bool = True  # for `TailedProcess`: `watch_program` tells the state
    _run: Any = None  # the protocol
    _process: TailedProcess | None = None  # of the present attempt, once that has begun
    _listener: ProgramListener | None = None
    _stdout_offset: int = 0
    _first_loss: EvaluationFailure | None = None
    _reading: DeferredLock = attrs.field(factory=DeferredLock)
    _is_paused: bool = False
    _is_stopped: bool = False  # no job is started any more
    _losing: Deferred[None] = attrs.field(factory=partial(succeed, None))  # of the last `_lose`
    _has_ended: bool = False
    _kill: IDelayedCall | None = None  # None until the first SIGKILL

    # The state of the process, for the run

    @property
    def is_running(self) -> bool:
        """Whether the evaluator runs, as far as the run was told."""
        if self._process is None:
            return not self._has_ended
        return self._process.is_running

    @property
    def has_exited(self) -> bool:
        """Whether the evaluator has ended."""
        state = self.attempt.state
        return not self.is_running or (state is not None and state.status is not None)

    @property
    def resource_usage(self) -> struct_rusage | None:
        """The resource usage; None until the end, and for a lost job."""
        if self._process is None or self.job_loss is not None:
            return None
        return self._process.resource_usage

    @property
    def pipe_read_cpu_seconds(self) -> float:
        """The node's processor time of slow reads of stdout and stderr, in seconds."""
        return 0.0 if self._process is None else self._process.pipe_read_cpu_seconds

    @property
    def lost_reason(self) -> str | None:
        """Why a part of the output is unknown; None otherwise. `job_loss` is told as the exit."""
        return None if self._process is None else self._process.lost_reason

    # What the run wants

    def follow(self, attempt: Attempt, *, misses: int | None = None) -> None:
        """Follow a job that was started; `misses` for one of an earlier process of the daemon."""
        access, name = self._access, attempt.job_name
        self.attempt = attempt
        access.commands.counters.record_job_state(name, is_running=False)
        access.commands.watch_job(name, partial(self._on_queue, attempt), misses=misses)
        access.watcher.watch(attempt.state_file, self._look)
        starter, listener = access.get_starter(), _SrunListener(self, attempt)
        if starter.is_attached:
            starter.watch_program(attempt.directory, listener)
        else:
            access.reactor.callLater(0, listener.on_starter_lost)

    def connect(self, run: Any) -> None:
        """Let the process drive a protocol, after `start_event`. Raises: OSError.

        It has `suspend_clock`, `restart_clock` and `wait_for_commit` of `Run` besides.
        """
        state = self.attempt.state
        assert state is not None, "it has begun"
        self.pid, self.start_time = state.pid, state.start_time
        self._run = run
        run.makeConnection(self)
        self._connect_process(state)

    def resume(self, run: Any, state: NodeState | None, stdout_offset: int) -> None:
        """Go on with a job of an earlier process of the daemon. `state` is what the node has told.

        Raises: OSError; then nothing follows the job.
        """
        self._run, self._stdout_offset = run, stdout_offset
        if state is not None and state.error is None:
            self._connect_process(state)
        self.follow(self.attempt, misses=_MISSES_OF_UNKNOWN)
        run.makeConnection(self)
        if state is None:  # it waits to be begun again
            run.suspend_clock()
        self._on_state(self.attempt, state)

    def signal_group(self, number: int) -> None:
        """Send a signal to the evaluator; after SIGKILL do not wait for long."""
        self._is_stopped = True
        if not self.attempt.has_begun:  # it waits for another node
            self._give_up(self.attempt)
            return
        run_in_background(
            self._write_signal(number), log, "defect: a signal for a node is not written"
        )
        if number == signal.SIGKILL and self._kill is None:
            self._kill = self._access.reactor.callLater(KILL_ANSWER_TIMEOUT, self._on_deaf_node)

    async def _write_signal(self, number: int) -> None:
        try:
            await self._access.threads.run_in_thread(self.attempt.write_signal, number)
        except OSError as error:  # such as a full disk; a node that does not answer is given up
            log.error("a signal for a node is not written: {error}", error=error)  # noqa: TRY400

    def pauseProducing(self) -> None:
        """Deliver no stdout; the evaluator goes on."""
        self._is_paused = True
        if self._process is not None:
            self._process.pauseProducing()

    def resumeProducing(self) -> None:
        """Deliver stdout again."""
        self._is_paused = False
        if self._process is not None:
            self._process.resumeProducing()

    def read_remaining_output(self) -> None:
        """Do nothing: the node closes the pipes."""

    def leave(self) -> None:
        """Deliver and signal nothing any more; the job goes on."""
        if not self._has_ended:
            self._has_ended = self._is_stopped = True
            if self._kill is not None and self._kill.active():
                self._kill.cancel()
            if not self.attempt.is_over:
                self._end_watch(self.attempt)
            if self._process is not None:
                self._process.leave()

    async def wait_for_start(self) -> None:
        """Wait until the evaluator runs. Raises: EvaluationFailure.

        A cancellation is raised after the end of srun.
        """
        try:
            failure = await self.start_event.wait()
        except CancelledError:
            self._is_stopped = True
            self._give_up(self.attempt)
            await self._losing  # which may start another job just now
            await self.attempt.srun_ended.wait()
            self._end_watch(self.attempt)
            raise
        if failure is not None:
            raise failure

    def _end_watch(self, attempt: Attempt) -> None:
        """Take nothing more of a job."""
        attempt.is_over = True
        self._access.watcher.unwatch(attempt.state_file)
        self._access.commands.unwatch_job(attempt.job_name)
        if not attempt.has_srun:
            self._access.commands.counters.record_job_end(attempt.job_name)
        if attempt.deadline is not None:
            attempt.deadline.cancel()
            attempt.deadline = None

    # What `TailedProcess` wants of a starter

    def watch_program(self, directory: Path, listener: ProgramListener) -> None:
        """Tell `listener` the state soon, and whenever it changes."""
        self._listener = listener
        self._access.reactor.callLater(0, self._deliver_state)

    def unwatch_program(self, directory: Path) -> None:
        """Tell nothing any more."""
        self._listener = None

    def signal_program(self, directory: Path, number: int) -> None:
        """Signal the evaluator by the node."""
        self.signal_group(number)

    def close_output(self, directory: Path) -> None:
        """Do nothing: the node closes the pipes."""

    def _deliver_state(self) -> None:
        state = self.attempt.state
        if self._listener is not None and state is not None:
            self._listener.on_state(state)

    # What the node tells

    def _look(self) -> None:
        run_in_background(self._read(self.attempt), log, "defect: the state of a job is unknown")

    async def _read(self, attempt: Attempt) -> None:
        """Read what the node has told, in a thread."""
        async with self._reading:  # in the order of changes
            try:
                state = await self._access.threads.run_in_thread(attempt.read_state)
            except OSError as error:
                log.error("the state of a job cannot be read: {error}", error=error)  # noqa: TRY400
            else:
                self._on_state(attempt, state)

    def _on_state(self, attempt: Attempt, state: NodeState | None) -> None:
        if attempt.is_over or state is None or state == attempt.state:
            return
        had_begun, attempt.state = attempt.has_begun, state
        attempt.node, attempt.job_identifier = state.node, state.job or attempt.job_identifier
        if state.is_final:
            self._release(attempt)
        if state.error is not None:
            what = f"the node {state.node} could not run the evaluator: {state.error}"
            self._lose_soon(attempt, EvaluationFailure("lost", what))
            return
        if not had_begun:
            self._begin(attempt, state)
        self._deliver_state()

    def _begin(self, attempt: Attempt, state: NodeState) -> None:
        """Take the start of the evaluator on a node."""
        status, commands = self.runner_status, self._access.commands
        status.job_id, status.node = attempt.job_identifier, attempt.node
        status.queue_reason = None
        if attempt.has_srun:
            commands.unwatch_job(attempt.job_name)
        if not attempt.is_over:
            commands.counters.record_job_state(attempt.job_name, is_running=True)
        if self._run is not None and self._process is None:
            try:
                self._connect_process(state)
            except OSError as error:
                what = f"the output of the node cannot be read: {error.strerror}"
                self._end_lost(EvaluationFailure("lost", what))
                return
            self._run.restart_clock()
        self.start_event.set_value(None)

    def _connect_process(self, state: NodeState) -> None:
        """Read the files of the present attempt, which has begun. Raises: OSError."""
        access = self._access
        self.pid, self.start_time = state.pid, state.start_time
        files = ProgramFiles(
            access.reactor,
            self,
            access.watcher,
            access.threads.run_in_thread,
            reads_in_thread=True,
        )
        program = StartedProgram(
            self.attempt.evaluation.output_directory, state.pid, state.start_time
        )
        self._process = TailedProcess(
            files, self._run, program, stdout_offset=self._stdout_offset, is_connected=True
        )
        self._process.on_broker_error = lambda reason: self.on_broker_error(reason)
        if self._is_paused:
            self._process.pauseProducing()

    def _release(self, attempt: Attempt) -> None:
        """Let srun end, which ends the job; see that neither is left."""
        access = self._access
        self._end_watch(attempt)
        if self._kill is not None and self._kill.active():
            self._kill.cancel()
        if attempt.has_srun:
            late = access.reactor.callLater(SRUN_END_TIMEOUT, self._give_up, attempt)
            attempt.srun_ended.add_callback(lambda _: late.active() and late.cancel())
        else:
            access.commands.cancel_job(attempt.job_name)  # Slurm keeps a job without its srun

    # What Slurm tells

    def _on_queue(self, attempt: Attempt, job: QueuedJob | None) -> None:
        attempt.job = job
        if job is None:
            log.warn("the job {job} of Slurm is gone", job=attempt.job_identifier)
            if attempt.has_srun:  # which waits for nothing
                self._give_up(attempt)
                return
        else:
            self.runner_status.job_id = attempt.job_identifier = job.identifier
            self.runner_status.queue_reason = job.reason if job.state == "PENDING" else None
            if attempt.has_srun or job.is_alive:
                return
            if not job.has_ended:  # its nodes have not told the controller of the end
                if self._run is not None:
                    self._run.suspend_clock()
                self._limit_questions(attempt)
                return
        self._explain_loss(attempt)

    def on_srun_end(self, attempt: Attempt, *, is_known: bool) -> None:
        """Follow the job without srun: it has ended, most often, or srun was killed.

        `is_known`: the starter has told it; else it knows no srun.
        """
        access = self._access
        if not attempt.has_srun:
            return
        attempt.has_srun, attempt.job = False, None
        if is_known:
            access.get_starter().unwatch_program(attempt.directory)
            access.get_starter().forget_program(attempt.directory)
        if attempt.is_over:
            access.commands.counters.record_job_end(attempt.job_name)
        if not (attempt.is_over or self._is_stopped):
            misses = _MISSES if is_known else _MISSES_OF_UNKNOWN
            on_queue = partial(self._on_queue, attempt)
            access.commands.watch_job(attempt.job_name, on_queue, misses=misses)
            if is_known:
                self._look()  # the end may be there, before the next look
                self._limit_questions(attempt)
        elif is_known:
            self._explain_loss(attempt)
        else:
            access.commands.cancel_job(attempt.job_name)
        attempt.srun_ended.set_value(None)

    def _limit_questions(self, attempt: Attempt) -> None:
        """Wait for what Slurm says of the end of a job, but not for ever."""
        if attempt.deadline is None:
            attempt.deadline = self._access.reactor.callLater(
                JOB_QUERY_TIMEOUT, self._on_no_answer, attempt
            )

    def _on_no_answer(self, attempt: Attempt) -> None:
        attempt.deadline = None
        if attempt.job is None or not attempt.job.is_alive:
            self._explain_loss(attempt)

    def _on_deaf_node(self) -> None:
        log.warn(
            "a node does not answer; the job {job} of Slurm is given up",
            job=self.attempt.job_identifier,
        )
        self._give_up(self.attempt)

    def _give_up(self, attempt: Attempt) -> None:
        """End srun and its job, whatever the node does."""
        self._access.commands.unwatch_job(attempt.job_name)
        self._access.commands.cancel_job(attempt.job_name)
        if attempt.has_srun:
            # At SIGTERM it would have the job cancelled by its number, which may be another's now.
            self._access.get_starter().signal_program(attempt.directory, signal.SIGKILL)
        else:
            self._explain_loss(attempt)

    def _explain_loss(self, attempt: Attempt) -> None:
        """Tell why a job has ended, unless the node has told how."""
        if not attempt.is_over:
            run_in_background(self._explain(attempt), log, "defect: the end of a job is unknown")

    async def _explain(self, attempt: Attempt) -> None:
        # This machine may see only now what the node has told before.
        await self._read(attempt)
        stderr = await self._access.threads.run_in_thread(attempt.read_srun_stderr)
        if attempt.is_over:
            return
        loss = explain_job_loss(attempt.job, stderr)
        self._release(attempt)
        self._access.commands.cancel_job(attempt.job_name)
        if not self._is_stopped:
            self._access.commands.counters.lost_jobs_by_reason[loss.reason] += 1
        self._lose_soon(attempt, loss)

    # The end of a lost job

    def _lose_soon(self, attempt: Attempt, loss: EvaluationFailure) -> None:
        self._losing = run_in_background(self._lose(attempt, loss), log, "defect: a job is lost")

    async def _lose(self, attempt: Attempt, loss: EvaluationFailure) -> None:
        """Begin a lost job again, or end."""
        try:
            repeated = await self._begin_again(attempt, loss)
        except Exception as error:  # noqa: BLE001  (a client learns of every end)
            log.error("the evaluator cannot be begun again: {error!r}", error=error)  # noqa: TRY400
            repeated = None
        if repeated is None:
            self._end_lost(self._first_loss or loss)
            return
        self._access.commands.counters.restarted_jobs += 1
        self.runner_status.retry_count += 1
        if self._run is not None:
            self._run.suspend_clock()  # stores the new job
        if self._has_ended:  # it was left meanwhile: the next process of the daemon goes on
            return
        self.follow(repeated)
        if self._is_stopped:  # meanwhile
            self._give_up(repeated)
        with suppress(OSError, StoreError):  # what still runs somewhere writes to the directory
            if self._run is not None:  # a later process of the daemon would miss the lost job
                await self._run.wait_for_commit()
            await self._access.threads.run_in_thread(attempt.remove)

    async def _begin_again(self, attempt: Attempt, loss: EvaluationFailure) -> Attempt | None:
        """Start a job in place of a lost one, if that is allowed. Raises: Exception."""
        is_start_failure = attempt.state is not None and attempt.state.error is not None
        may_repeat = self._retries > 0 and (
            is_start_failure or loss.reason in ("node", "preempted")
        )
        if may_repeat and not self._is_stopped:
            may_repeat = not await self._access.threads.run_in_thread(attempt.has_printed)
        if not may_repeat or self._is_stopped:
            return None
        log.warn("{why}; the evaluator is begun again", why=loss.message)
        self._retries -= 1
        self._first_loss = loss if is_start_failure else None
        self.runner_status.job_id = self.runner_status.node = None
        if self._process is not None:
            self._process.leave()
            self._process = self._listener = None
        if self._run is not None:
            self._run.suspend_clock()
        self._stdout_offset = 0
        return await self._repeat(attempt, attempt.node if is_start_failure else None)

    def _end_lost(self, loss: EvaluationFailure) -> None:
        """Tell the run that a job is lost, after all that was printed."""
        self.job_loss = loss
        if self._run is None:
            self.start_event.set_value(loss)
        elif self._listener is not None:
            self._listener.on_state(
                msgspec.structs.replace(_KILLED, pid=self.pid, start_time=self.start_time)
            )
        elif not self._has_ended:
            self._has_ended = True
            reason = Failure(ProcessTerminated(1))
            self._run.processExited(reason)
            for descriptor in (STDOUT, STDERR):
                self._run.childConnectionLost(descriptor)
            self._run.processEnded(reason)
