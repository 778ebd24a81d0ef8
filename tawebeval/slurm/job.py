"""The jobs of Slurm in which evaluators run.

`PollingWatcher` watches files that other machines write, of which inotify(7) says nothing.

`Job` is one job, with a directory of its own below that of the evaluation, which daemon and node
see. So a job that was lost, and may still run on a node that does not answer, writes into no file
of the job in its place.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import attrs
import msgspec
from twisted.internet.defer import CancelledError, DeferredLock
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import deferLater
from twisted.logger import Logger

from tawebeval.deferreds import OneShotEvent, WorkerThreads, run_in_background
from tawebeval.errors import EvaluationFailure
from tawebeval.linux import kernel_files, starter
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.starter_client import (
    ProgramState,
    StartedProgram,
    StarterClient,
    StateListener,
    collect_program,
)
from tawebeval.linux.tail import ProgramFiles, TailedProcess
from tawebeval.sandbox import broker
from tawebeval.sandbox.base import RunnerStatus
from tawebeval.sandbox.workspace import Workspace, WorkspaceView
from tawebeval.slurm import node
from tawebeval.slurm.commands import QueuedJob, SlurmCommands, explain_job_loss

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
_PROGRAMS = "node-"  # begins the names of the programs on the nodes
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


@attrs.frozen
class ClusterAccess:
    """What jobs share: the starter of srun, and how files of nodes are read."""

    reactor: Any
    get_starter: Callable[[], StarterClient]
    watcher: PollingWatcher
    threads: WorkerThreads
    commands: SlurmCommands


@attrs.define(eq=False)
class Job:
    """One job of an evaluation, its directory and its srun.

    The job is to `TailedProcess` what the starter is to it on this machine: it tells the state of
    the evaluator, and passes signals on. Output and end are read from files, which the node writes
    whether or not srun or the daemon live. srun is a program of the starter. If the starter has
    ended, and srun with it, the job goes on, and the queue tells its end.

    - `job_name`: its name in Slurm, of which the last word names its directory; `workspace`: its
      directories, `evaluation` that of the events.
    - `state`: what the node has told; None before.
    - `start_event` has None once the evaluator runs, or the reason why it does not.
    - `loss`: why the job was lost; None while it is not.
    """

    _access: ClusterAccess
    runner_status: RunnerStatus
    job_name: str
    evaluation: Workspace
    state: NodeState | None = None
    loss: EvaluationFailure | None = None
    start_event: OneShotEvent[EvaluationFailure | None] = attrs.field(factory=OneShotEvent)
    is_followed: bool = False
    _run: Any = None  # the protocol
    _listener: StateListener | None = None
    _reading: DeferredLock = attrs.field(factory=DeferredLock)
    _queued: QueuedJob | None = None  # what squeue said last, since the end of srun
    _deadline: IDelayedCall | None = None  # of the wait for more
    _has_srun: bool = True
    _srun_ended: OneShotEvent[None] = attrs.field(factory=OneShotEvent)
    _kill: IDelayedCall | None = None  # None until the first SIGKILL
    _is_stopped: bool = False
    _is_over: bool = False  # its end was taken: nothing more counts

    @property
    def workspace(self) -> JobWorkspace:
        """The directories of the job."""
        return JobWorkspace(self.evaluation.root / f"job-{self.job_name.rpartition('-')[2]}")

    @property
    def directory(self) -> Path:
        """The job's directory, which is also the name of srun for the starter."""
        return self.workspace.root

    @property
    def state_file(self) -> Path:
        """The file that the node writes."""
        return self.directory / "state"

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

    def _append_signal(self, number: int) -> None:
        with (self.directory / "signal").open("a") as file:
            file.write(f"{number}\n")

    def _read_srun_stderr(self) -> str:
        """Return the end of what srun has printed on stderr."""
        with suppress(OSError):
            return (self.directory / "stderr").read_bytes()[-_STDERR_TAIL:].decode(errors="replace")
        return ""

    # What the run wants

    def follow(self, *, misses: int | None = None) -> None:
        """Follow the job, which was started; `misses` if by an earlier process of the daemon."""
        access = self._access
        self.is_followed = True
        access.commands.watch_job(self.job_name, self._on_queue, misses=misses)
        access.watcher.watch(self.state_file, self._look)
        access.get_starter().watch_program(self.directory, self._on_srun_state)

    async def wait_for_start(self) -> None:
        """Wait until the evaluator runs. Raises: EvaluationFailure.

        A cancellation is raised after the end of srun.
        """
        try:
            failure = await self.start_event.wait()
        except CancelledError:
            self._is_stopped = True
            self._give_up()
            await self._srun_ended.wait()
            self._end_watch()
            raise
        if failure is not None:
            raise failure

    def connect(self, run: Any, stdout_offset: int = 0) -> TailedProcess:
        """Let the evaluator drive a protocol, after its start. Raises: OSError.

        The protocol has `suspend_clock` of `Run` besides.
        """
        access, state = self._access, self.state
        assert state is not None, "it has begun"
        self._run = run
        files = ProgramFiles(
            access.reactor,
            self,
            access.watcher,
            access.threads.run_in_thread,
            reads_in_thread=True,
        )
        program = StartedProgram(self.evaluation.output_directory, state.pid, state.start_time)
        return TailedProcess(files, run, program, stdout_offset)

    def resume(self, run: Any, stdout_offset: int) -> TailedProcess:
        """Go on with a job of an earlier process of the daemon. Blocks.

        Raises: OSError; then nothing follows the job.
        """
        state = self.state = self.read_state()
        if state is None or state.error is not None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.state_file))
        process = self.connect(run, stdout_offset)
        self.follow(misses=_MISSES_OF_UNKNOWN)
        self._take_state(state)
        return process

    def _end_watch(self) -> None:
        """Take nothing more of the job."""
        self._is_over = True
        self._access.watcher.unwatch(self.state_file)
        self._access.commands.unwatch_job(self.job_name)
        for call in (self._deadline, self._kill):
            if call is not None and call.active():
                call.cancel()

    # What `TailedProcess` wants of a starter

    def watch_program(self, directory: Path, listener: StateListener) -> None:
        """Tell `listener` the state soon, and whenever it changes."""
        self._listener = listener
        self._access.reactor.callLater(0, self._deliver_state)

    def unwatch_program(self, directory: Path) -> None:
        """Tell nothing any more; a job that has not ended is left to the next daemon."""
        self._listener = None
        if not self._is_over:
            self._end_watch()

    def signal_program(self, directory: Path, number: int) -> None:
        """Send a signal to the evaluator; after SIGKILL do not wait for long."""
        self._is_stopped = True
        run_in_background(
            self._write_signal(number), log, "defect: a signal for a node is not written"
        )
        if number == signal.SIGKILL and self._kill is None:
            self._kill = self._access.reactor.callLater(KILL_ANSWER_TIMEOUT, self._on_deaf_node)

    async def _write_signal(self, number: int) -> None:
        try:
            await self._access.threads.run_in_thread(self._append_signal, number)
        except OSError as error:  # such as a full disk; a node that does not answer is given up
            log.error("a signal for a node is not written: {error}", error=error)  # noqa: TRY400

    def close_output(self, directory: Path) -> None:
        """Do nothing: the node closes the pipes."""

    def _deliver_state(self) -> None:
        if self._listener is not None and self.state is not None:
            self._listener(self.state)

    # What the node tells

    def _look(self) -> None:
        run_in_background(self._read(), log, "defect: the state of a job is unknown")

    async def _read(self) -> None:
        """Read what the node has told, in a thread."""
        async with self._reading:  # in the order of changes
            try:
                state = await self._access.threads.run_in_thread(self.read_state)
            except OSError as error:
                log.error("the state of a job cannot be read: {error}", error=error)  # noqa: TRY400
            else:
                if not (self._is_over or state is None or state == self.state):
                    self._take_state(state)

    def _take_state(self, state: NodeState) -> None:
        self.state, status = state, self.runner_status
        status.node, status.job_id = state.node, state.job or status.job_id
        if state.is_final:
            self._release()
        if state.error is not None:
            what = f"the node {state.node} could not run the evaluator: {state.error}"
            self._end_lost(EvaluationFailure("lost", what))
            return
        if not self.start_event.is_set:
            self._begin()
        self._deliver_state()

    def _begin(self) -> None:
        """Take the start of the evaluator on a node."""
        self.runner_status.queue_reason = None
        if self._has_srun:
            self._access.commands.unwatch_job(self.job_name)
        self.start_event.set_value(None)

    def _release(self) -> None:
        """Let srun end, which ends the job; see that neither is left."""
        self._end_watch()
        if self._has_srun:
            late = self._access.reactor.callLater(SRUN_END_TIMEOUT, self._give_up)
            self._srun_ended.add_callback(lambda _: late.active() and late.cancel())
        else:
            self._access.commands.cancel_job(self.job_name)  # Slurm keeps a job without its srun

    # What Slurm tells

    def _on_queue(self, job: QueuedJob | None) -> None:
        self._queued = job
        if job is None:
            log.warn("the job {job} of Slurm is gone", job=self.job_name)
            if self._has_srun:  # which waits for nothing
                self._give_up()
                return
        else:
            self.runner_status.job_id = job.identifier
            self.runner_status.queue_reason = job.reason if job.state == "PENDING" else None
            if self._has_srun or job.is_alive:
                return
            if not job.has_ended:  # its nodes have not told the controller of the end
                if self._run is not None:
                    self._run.suspend_clock()
                self._limit_questions()
                return
        self._explain_loss()

    def _on_srun_state(self, state: ProgramState | None) -> None:
        """Take what the starter tells of srun; None if the starter has ended."""
        if state is None or state.is_unknown:
            self._on_srun_end(is_known=False)
        elif state.status is not None and state.is_output_complete:
            self._on_srun_end(is_known=True)

    def _on_srun_end(self, *, is_known: bool) -> None:
        """Follow the job without srun: it has ended, most often, or srun was killed.

        `is_known`: the starter has told it; else it knows no srun.
        """
        access = self._access
        if not self._has_srun:
            return
        self._has_srun, self._queued = False, None
        if is_known:
            access.get_starter().unwatch_program(self.directory)
            access.get_starter().forget_program(self.directory)
        if not (self._is_over or self._is_stopped):
            misses = _MISSES if is_known else _MISSES_OF_UNKNOWN
            access.commands.watch_job(self.job_name, self._on_queue, misses=misses)
            if is_known:
                self._look()  # the end may be there, before the next look
                self._limit_questions()
        elif is_known:
            self._explain_loss()
        else:
            access.commands.cancel_job(self.job_name)
        self._srun_ended.set_value(None)

    def _limit_questions(self) -> None:
        """Wait for what Slurm says of the end of the job, but not for ever."""
        if self._deadline is None:
            self._deadline = self._access.reactor.callLater(JOB_QUERY_TIMEOUT, self._on_no_answer)

    def _on_no_answer(self) -> None:
        self._deadline = None
        if self._queued is None or not self._queued.is_alive:
            self._explain_loss()

    def _on_deaf_node(self) -> None:
        log.warn("a node does not answer; the job {job} of Slurm is given up", job=self.job_name)
        self._give_up()

    def _give_up(self) -> None:
        """End srun and its job, whatever the node does."""
        self._access.commands.unwatch_job(self.job_name)
        self._access.commands.cancel_job(self.job_name)
        if self._has_srun:
            # At SIGTERM it would have the job cancelled by its number, which may be another's now.
            self._access.get_starter().signal_program(self.directory, signal.SIGKILL)
        else:
            self._explain_loss()

    def _explain_loss(self) -> None:
        """Tell why the job has ended, unless the node has told how."""
        if not self._is_over:
            run_in_background(self._explain(), log, "defect: the end of a job is unknown")

    async def _explain(self) -> None:
        # This machine may see only now what the node has told before.
        await self._read()
        stderr = await self._access.threads.run_in_thread(self._read_srun_stderr)
        if self._is_over:
            return
        self._release()
        self._access.commands.cancel_job(self.job_name)
        loss = explain_job_loss(self._queued, stderr)
        if not self._is_stopped:
            self._access.commands.counters.lost_jobs_by_reason[loss.reason] += 1
        self._end_lost(loss)

    def _end_lost(self, loss: EvaluationFailure) -> None:
        """Tell that the job is lost; a run learns it after all that was printed."""
        self.loss = loss
        if self._listener is not None and self.state is not None:
            killed = ProgramState(
                self.state.pid, self.state.start_time, signal.SIGKILL, is_output_complete=True
            )
            self._listener(killed)
        self.start_event.set_value(loss)
