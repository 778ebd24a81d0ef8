"""The process of a run on a node: the `ProcessTransport` of an evaluator behind srun."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from resource import struct_rusage
from typing import Any

import attrs
import msgspec
from twisted.internet.defer import CancelledError
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.core import text
from tawebeval.deferreds import OneShotEvent, run_in_background
from tawebeval.errors import EvaluationFailure, FailureReason
from tawebeval.linux.child import (
    ProcessAdopter,
    ProcessTransport,
    StartedProcess,
    kill_started_child,
)
from tawebeval.sandbox.base import RunnerStatus
from tawebeval.slurm.commands import SlurmCommands
from tawebeval.slurm.frames import (
    END,
    KILL,
    STDOUT_WINDOW_BYTES,
    BrokenFrame,
    FrameKind,
    FrameParser,
    encode_command,
    encode_stdout_grant,
)
from tawebeval.slurm.job_transfer import JobSender
from tawebeval.slurm.jobs import (
    ENDING_STATE,
    QueuedJob,
    explain_job_loss,
    find_job_identifier,
    reports_out_of_memory,
)
from tawebeval.slurm.node_files import NodeFileReader

KILL_ANSWER_TIMEOUT = 10.0
"""Seconds after which a node that does not answer to `KILL` is given up."""

MAX_KILL_SECONDS = 2 * KILL_ANSWER_TIMEOUT
"""The most seconds from `KILL` to the end of a run, besides those in which the node sends stdout.

Its srun has as many to end as the node.
"""

SRUN_END_TIMEOUT = 60.0
"""Seconds after the outcome for srun to end; it waits for a controller that is away."""

JOB_QUERY_TIMEOUT = 120.0
"""Seconds in which a controller that is away may come back, and say why a job was lost."""

_SHOW_PAUSE = 2.0  # seconds between two questions
_END_PATIENCE = 5.0  # seconds for srun to end after a bad outcome: its last words may explain it
_STDERR_TAIL = 8 * 1024  # bytes of srun's stderr that are kept
_PIECE = 64 * 1024  # bytes of stdout that a run takes at once
_GRANTED = 64 * 1024  # bytes of stdout that one grant is for, at least

log = Logger()


@attrs.frozen
class NodeOutcome:
    """The outcome of a run, as the node has told it."""

    exit: tuple[int | None, int | None] | None
    start_failure: EvaluationFailure | None
    limit_failure: EvaluationFailure | None
    usage: tuple[float | None, int | None]

    @property
    def is_success(self) -> bool:
        """Whether the evaluator has succeeded."""
        return self.exit == (0, None) and self.limit_failure is None

    @classmethod
    def load(cls, content: bytes) -> NodeOutcome:
        """Return the outcome in a frame."""
        told = msgspec.json.decode(content, type=_ToldOutcome)
        return cls(
            told.exit,
            _load_failure(told.unstarted),
            _load_failure(told.over),
            told.usage or (None, None),
        )


class _ToldOutcome(msgspec.Struct):
    exit: tuple[int | None, int | None] | None = None
    unstarted: _ToldFailure | None = None
    over: _ToldFailure | None = None
    usage: tuple[float | None, int | None] | None = None


_ToldFailure = tuple[FailureReason, str, dict[str, Any]]


def _load_failure(told: _ToldFailure | None) -> EvaluationFailure | None:
    return None if told is None else EvaluationFailure(*told)


class _ToldBegin(msgspec.Struct):
    job: str | None
    node: str | None


@attrs.frozen
class StartedSrun:
    """An srun that nothing reads yet; `stdin` is the write end of its stdin."""

    process: StartedProcess
    stdin: int
    job_name: str


@attrs.define(eq=False)
class SrunProtocol(ProcessProtocol):
    """The protocol of one srun.

    `stdout` has what the node has sent of the evaluator's stdout, and the run has not taken. With
    `ignores_frames` frames do not count any more.
    """

    job_name: str
    stdin: int  # -1 once it is closed
    _owner: NodeTransport
    stdout: bytearray = attrs.field(factory=bytearray)
    stderr_tail: bytes = b""
    job_identifier: str | None = None
    node: str | None = None
    has_started_evaluator: bool = False
    outcome: NodeOutcome | None = None
    ignores_frames: bool = False
    end_event: OneShotEvent[None] = attrs.field(factory=OneShotEvent)
    job_sender: JobSender | None = None  # until the evaluator begins
    failure: EvaluationFailure | None = None  # why the daemon has given it up
    _frames: FrameParser = attrs.field(factory=FrameParser)
    _srun: ProcessTransport = attrs.field(init=False)

    def makeConnection(self, transport: Any) -> None:
        """Connect srun."""
        self._srun = transport
        super().makeConnection(transport)

    @property
    def stderr_text(self) -> str:
        """The end of what srun has said."""
        return self.stderr_tail.decode(errors="replace")

    def send_line(self, line: bytes) -> bool:
        """Send a line to the node; tell whether it was sent whole.

        What a pipe does not take has no reader.
        """
        if self.stdin >= 0:
            with contextlib.suppress(OSError):
                return os.write(self.stdin, line) == len(line)
        return False

    def close_stdin(self) -> None:
        """Close the stdin of srun, whatever is on the way there."""
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1
        self.stop_sending()

    def stop_sending(self) -> None:
        """Send no more of the job description."""
        if self.job_sender is not None:
            self.job_sender.stop()
            self.job_sender = None

    def signal_srun(self, number: int = signal.SIGKILL) -> None:
        """Signal srun itself."""
        if not self.end_event.is_set:
            self._srun.signal_group(number)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        """Take frames, or what srun prints on stderr."""
        if childFD == 2:
            self.stderr_tail = text.take_tail(self.stderr_tail + data, _STDERR_TAIL)
            self.job_identifier = self.job_identifier or find_job_identifier(self.stderr_text)
            return
        if self.ignores_frames:
            return
        try:
            for kind, content in self._frames.feed(data):
                if not self.ignores_frames:
                    self._take_frame(kind, content)
        except (BrokenFrame, ValueError) as error:
            self.stderr_tail = text.take_tail(self.stderr_tail + str(error).encode(), _STDERR_TAIL)
            self.ignores_frames = True
            self._owner.end_srun(self)

    def _take_frame(self, kind: FrameKind, content: bytes) -> None:
        if kind is FrameKind.EVALUATOR_STARTING:
            told = msgspec.json.decode(content, type=_ToldBegin)
            self.job_identifier, self.node = told.job, told.node
            self.has_started_evaluator = True
        elif kind is FrameKind.STDOUT:
            self.stdout += content
        self._owner.on_frame(self, kind, content)

    def processEnded(self, reason: Failure) -> None:
        """Tell the end of srun."""
        self.close_stdin()
        self.end_event.set_value(None)
        is_killed = isinstance(reason.value, ProcessTerminated) and reason.value.signal is not None
        self._owner.on_srun_end(self, is_killed=is_killed)

    def close(self) -> None:
        """Take no frames any more, and close stdin."""
        self.ignores_frames = True
        self.close_stdin()


MakeJobSender = Callable[[int, Callable[[EvaluationFailure], object]], JobSender]
"""Make the sender of a job by the stdin of srun; it calls if something cannot be read."""

StartSrun = Callable[[int], Awaitable[StartedSrun]]
"""Start an srun, whose number is 1 or more: the first is started elsewhere."""


@attrs.define(eq=False)
class NodeTransport:
    """The process of a run: a `ProcessTransport` over one srun, or over two after a loss.

    `start_event` has None once the evaluator runs, or the reason why it does not. Output that comes
    before `connect`, or while the run has paused it, waits in memory:
    `frames.STDOUT_WINDOW_BYTES` bounds it. stderr, which has no window, never waits: the order of
    the two is not kept. A job is begun again, by `start_again`, only if it was lost before the
    evaluator printed anything.

    `make_sender` is for a node without a shared directory. That node ends after all output was
    parsed: until then the output may name files, of at most `file_limit` bytes. The run has got the
    first `delivered_bytes` of stdout.
    """

    _clock: Any
    _spawner: ProcessAdopter
    _commands: SlurmCommands
    runner_status: RunnerStatus
    _start_again: StartSrun
    _retries: int
    _make_sender: MakeJobSender | None = None
    _file_limit: int = 0
    start_event: OneShotEvent[EvaluationFailure | None] = attrs.field(factory=OneShotEvent)
    pid: int = 0
    start_time: int = 0  # no later process of the daemon looks for srun
    on_broker_error: Callable[[str], object] = lambda reason: None  # the node tells it as a failure
    resource_usage: struct_rusage | None = None
    is_running: bool = True
    has_exited: bool = False
    job_loss: EvaluationFailure | None = None
    delivered_bytes: int = 0
    file_reader: NodeFileReader = attrs.field(init=False)
    _attempt: SrunProtocol = attrs.field(init=False)
    _run: Any = None  # the protocol
    _granted: int = STDOUT_WINDOW_BYTES  # the offset in stdout
    _has_printed: bool = False
    _is_paused: bool = False
    _is_turn_due: bool = False
    _is_stopped: bool = False  # no srun is started any more
    _is_over: bool = False  # nothing more comes from the node
    _has_ended: bool = False
    _kill: IDelayedCall | None = None  # None until the first `KILL`

    def __attrs_post_init__(self) -> None:
        self.file_reader = NodeFileReader(
            *(self._clock, self._file_limit),
            lambda line: self._attempt.send_line(line),
            self._on_silent_node,
        )

    @property
    def outcome(self) -> NodeOutcome | None:
        """What the node has told of the present srun's evaluator."""
        return self._attempt.outcome

    @property
    def pipe_read_cpu_seconds(self) -> float:
        """0: the evaluator's pipes are those of the node."""
        return 0.0

    @property
    def lost_reason(self) -> str | None:
        """None: `job_loss` is told as the exit."""
        return None

    def adopt_srun(self, started: StartedSrun) -> None:
        """Take over an srun. If that fails, srun is killed. Raises: OSError."""
        attempt = SrunProtocol(started.job_name, started.stdin, self)
        try:
            self._spawner.adopt_child(attempt, started.process)
        except BaseException:
            kill_started_child(started.process)
            attempt.close()
            self._commands.cancel_job(attempt.job_name)
            raise
        self._attempt = attempt
        self.pid = started.process.pid
        self._commands.counters.record_job_state(attempt.job_name, is_running=False)
        self._commands.watch_job(attempt.job_name, self._on_queue)

    def connect(self, run: Any) -> None:
        """Let the process drive a protocol, after `start_event`.

        It has `suspend_clock`, `restart_clock` and `output_ended` of `Run` besides.
        """
        self._run = run
        run.makeConnection(self)
        if self.has_exited:
            self._exit()
        self._plan()

    async def end_unconnected_srun(self) -> None:
        """End an srun whose evaluator was never connected; return after its end."""
        self._is_stopped = True
        self._close()
        await self.start_event.wait()
        await self._attempt.end_event.wait()
        self._attempt.close()

    def _close(self) -> None:
        """Give up an srun whose evaluator is not wanted any more, begun or not."""
        self._attempt.ignores_frames = True
        self._give_up(self._attempt)

    def _give_up(self, attempt: SrunProtocol) -> None:
        """End srun and its job, whatever the node does."""
        if self._commands.is_job_missing(attempt.job_name):
            # At SIGTERM srun would have a job cancelled by its number, which may be another's now.
            attempt.signal_srun()
        self._commands.unwatch_job(attempt.job_name)
        attempt.close_stdin()
        self.end_srun(attempt)
        self._commands.cancel_job(attempt.job_name)

    def end_srun(self, attempt: SrunProtocol) -> None:
        """End srun, which may not follow SIGTERM."""
        attempt.signal_srun(signal.SIGTERM)
        self._wait_for_srun(attempt, KILL_ANSWER_TIMEOUT, attempt.signal_srun)

    # What the run wants

    def send_command(self, command: bytes) -> None:
        """Send `TERMINATE` or `KILL` to the node; after `KILL` do not wait for long."""
        self._is_stopped = True
        if not self._attempt.has_started_evaluator:  # it waits for another node
            self._close()
            return
        self._attempt.send_line(encode_command(command))
        if command == KILL and self._kill is None:
            self._kill = self._clock.callLater(KILL_ANSWER_TIMEOUT, self._on_deaf_node)

    def _on_deaf_node(self) -> None:
        log.warn(
            "a node does not answer; the job {job} of Slurm is given up",
            job=self.runner_status.job_id,
        )
        self._give_up(self._attempt)

    def _on_silent_node(self) -> None:
        self._attempt.failure = EvaluationFailure(
            "node", "the node does not send a file that the evaluator has named"
        )
        self._on_deaf_node()
        self.file_reader.fail_pending_fetch()

    def signal_group(self, number: int) -> None:
        """Signal the evaluator by the node."""
        self.send_command(KILL)

    def pauseProducing(self) -> None:
        """Deliver no stdout; the node stops when its window is full."""
        self._is_paused = True

    def resumeProducing(self) -> None:
        """Deliver stdout again."""
        self._is_paused = False
        self._plan()

    def read_remaining_output(self) -> None:
        """Do nothing: the node sends all that was printed, by grants as before."""

    # What the node tells

    def on_frame(self, attempt: SrunProtocol, kind: FrameKind, content: bytes) -> None:
        """Take a frame of an attempt."""
        if kind in (FrameKind.READY_FOR_JOB, FrameKind.TREE_WANTED):
            self._send_job(attempt, kind)
        elif kind in (FrameKind.FILE, FrameKind.FILE_END):
            self.file_reader.on_frame(kind, content)
        elif kind is FrameKind.EVALUATOR_STARTING:
            attempt.stop_sending()
            self.runner_status.job_id, self.runner_status.node = (
                attempt.job_identifier,
                attempt.node,
            )
            self.runner_status.queue_reason = None
            self._commands.unwatch_job(attempt.job_name)
            self._commands.counters.record_job_state(attempt.job_name, is_running=True)
            if self._run is not None:
                self._run.restart_clock()
            self.start_event.set_value(None)
        elif kind is FrameKind.STDOUT:
            self._has_printed = True
            if self._kill is not None and self._kill.active():
                self._kill.reset(KILL_ANSWER_TIMEOUT)  # what was printed before is on the way
            self._plan()
        elif kind is FrameKind.STDERR:
            self._has_printed = True
            if self._run is not None:  # connected by `start_event`
                self._run.childDataReceived(2, content)
        elif kind is FrameKind.EVALUATOR_EXITED:
            self._exit()
        else:
            outcome = attempt.outcome = NodeOutcome.load(content)
            self._exit()
            if self._has_own_files or outcome.is_success or attempt.end_event.is_set:
                self._finish()
            else:
                self._wait_for_srun(attempt, _END_PATIENCE, self._finish)

    def _send_job(self, attempt: SrunProtocol, kind: FrameKind) -> None:
        """Send what a node waits for."""
        if self._make_sender is None or attempt.has_started_evaluator:
            return
        if kind is FrameKind.READY_FOR_JOB:
            give_up = partial(self._on_unsent, attempt)
            attempt.job_sender = self._make_sender(attempt.stdin, give_up)
        if attempt.job_sender is not None:
            attempt.job_sender.on_frame(kind)

    def _on_unsent(self, attempt: SrunProtocol, failure: EvaluationFailure) -> None:
        """Give up an srun whose job description cannot be sent."""
        attempt.failure = failure
        attempt.ignores_frames = True
        self._give_up(attempt)

    def _wait_for_srun(
        self, attempt: SrunProtocol, seconds: float, on_late: Callable[[], object]
    ) -> None:
        """Call `on_late` unless srun ends before."""
        waiting = self._clock.callLater(seconds, on_late)
        attempt.end_event.add_callback(lambda _: waiting.active() and waiting.cancel())

    @property
    def _has_own_files(self) -> bool:
        """Whether the evaluator's files are on the node alone."""
        return self._make_sender is not None

    def _on_queue(self, job: QueuedJob | None) -> None:
        if job is None:
            log.warn(
                "the job {job} of Slurm is gone, and its srun waits", job=self.runner_status.job_id
            )
            self._give_up(self._attempt)
            return
        self.runner_status.job_id = self._attempt.job_identifier = job.identifier
        self.runner_status.queue_reason = job.reason if job.state == "PENDING" else None

    def _exit(self) -> None:
        """Tell the run that the evaluator has ended."""
        self.has_exited = True
        if self.is_running and self._run is not None:
            self.is_running = False
            self._run.processExited(Failure(ProcessDone(0)))

    def on_srun_end(self, attempt: SrunProtocol, *, is_killed: bool) -> None:
        """Take the end of srun: the outcome is here, or the job was lost."""
        self._commands.unwatch_job(attempt.job_name)
        self._commands.counters.record_job_end(attempt.job_name)
        self.file_reader.fail_pending_fetch()
        self.runner_status.queue_reason = None
        if attempt.outcome is not None:
            if is_killed:
                self._commands.cancel_job(attempt.job_name)
            if reports_out_of_memory(attempt.stderr_text) and not attempt.outcome.is_success:
                self.job_loss = explain_job_loss({"JobState": "OUT_OF_MEMORY"}, "")
            self._finish()
            return
        if self._run is not None:  # the evaluator does not run while Slurm is asked
            self._run.suspend_clock()
        run_in_background(self._explain(attempt), log, "defect: the end of a job is unknown")

    async def _explain(self, attempt: SrunProtocol) -> None:
        """Find out why a job was lost, and begin it again, or end."""
        loss = await self._find_loss(attempt)
        loss = attempt.failure or loss
        self._commands.cancel_job(attempt.job_name)
        if not self._is_stopped:
            self._commands.counters.lost_jobs_by_reason[loss.reason] += 1
        if self._may_repeat and loss.reason in ("node", "preempted"):
            self._retries -= 1
            log.warn("{why}; the evaluator is begun again", why=loss.message)
            try:
                await self._repeat()
            except OSError as error:
                loss = EvaluationFailure("lost", f"srun cannot be started: {error.strerror}")
            except Exception:  # noqa: BLE001  (the evaluation waits for an end)
                log.failure("defect: srun cannot be started")
                loss = EvaluationFailure("lost", "srun cannot be started; the log has the reason")
            else:
                return
        self.job_loss = loss
        if self._run is None:
            attempt.close()
            self.start_event.set_value(loss)
            return
        self._exit()
        self._finish()

    async def _find_loss(self, attempt: SrunProtocol) -> EvaluationFailure:
        """Return why a job was lost.

        Ask again, but not for long, while Slurm does not answer or the job is not ended yet.
        """
        loss = explain_job_loss({}, attempt.stderr_text)
        deadline = self._clock.seconds() + JOB_QUERY_TIMEOUT
        while attempt.job_identifier and not self._is_stopped:
            job = await self._commands.show_job(attempt.job_identifier)
            if job is not None:
                # A controller that has lost its state uses numbers again.
                is_own = job.get("JobName", attempt.job_name) == attempt.job_name
                loss = explain_job_loss(job if is_own else {}, attempt.stderr_text)
                if loss.extra_members.get("slurm") != ENDING_STATE:
                    break
            if self._clock.seconds() >= deadline:
                break
            await deferLater(self._clock, _SHOW_PAUSE)
        return loss

    @property
    def _may_repeat(self) -> bool:
        return bool(self._retries) and not (self._is_stopped or self._has_printed)

    async def _repeat(self) -> None:
        self.runner_status.retry_count += 1
        self.runner_status.job_id = self.runner_status.node = None
        lost = self._attempt
        self.adopt_srun(await self._start_again(self.runner_status.retry_count))
        lost.close()
        self._commands.counters.restarted_jobs += 1
        if self._is_stopped:  # meanwhile
            self._close()

    def _finish(self) -> None:
        """Tell the ends of the pipes, after what is held."""
        self._is_over = True
        if not self._has_own_files:
            self._let_node_end()
        if self.start_event.is_set:
            self._plan()
        else:  # the node could not even begin
            self.start_event.set_value(None)

    # What the run gets

    def _plan(self) -> None:
        if self._run is not None and not self._is_turn_due and not self._has_ended:
            self._is_turn_due = True
            self._clock.callLater(0, self._take_turn)

    def _take_turn(self) -> None:
        """Deliver one piece, so that other runs have their turns."""
        self._is_turn_due = False
        stdout, run = self._attempt.stdout, self._run
        if stdout and not self._is_paused:
            content = bytes(stdout[:_PIECE])
            del stdout[:_PIECE]
            self.delivered_bytes += len(content)
            run.childDataReceived(1, content)
            if self.delivered_bytes + STDOUT_WINDOW_BYTES - self._granted >= _GRANTED:
                self._grant(self.delivered_bytes + STDOUT_WINDOW_BYTES)
            self._plan()
        elif not stdout and self._is_over and not self._has_ended and not self.is_running:
            self._has_ended = True
            for descriptor in (1, 2):
                run.childConnectionLost(descriptor)
            if self._has_own_files:
                run.output_ended.add_callback(lambda _: self._on_output_parsed())
            else:
                self._end()

    def _on_output_parsed(self) -> None:
        """Let the node end: the output names no more files. A bad end may be explained by srun."""
        attempt = self._attempt
        self._let_node_end()
        if attempt.outcome is None or attempt.outcome.is_success or attempt.end_event.is_set:
            self._end()
        else:
            end = self._clock.callLater(_END_PATIENCE, self._end)
            attempt.end_event.add_callback(lambda _: end.active() and end.reset(0))

    def _let_node_end(self) -> None:
        attempt = self._attempt
        if self._kill is not None and self._kill.active():
            self._kill.cancel()
        if self._has_own_files:
            attempt.send_line(encode_command(END))
        attempt.close_stdin()
        self._wait_for_srun(attempt, SRUN_END_TIMEOUT, partial(self._give_up, attempt))

    def _end(self) -> None:
        self._attempt.close()
        self._run.processEnded(Failure(self._build_reason()))

    def _grant(self, offset: int) -> None:
        """Let the node send stdout up to an offset."""
        self._granted = offset
        self._attempt.send_line(encode_stdout_grant(offset))

    def _build_reason(self) -> Exception:
        status, number = (self.outcome and self.outcome.exit) or (1, None)
        if number is None and not status:
            return ProcessDone(0)
        return ProcessTerminated(status, number, 0)


async def wait_for_evaluator_start(transport: NodeTransport) -> None:
    """Wait until the evaluator runs. Raises: EvaluationFailure.

    A cancellation is raised after the end of srun.
    """
    try:
        failure = await transport.start_event.wait()
    except CancelledError:
        await transport.end_unconnected_srun()
        raise
    if failure is not None:
        raise failure
