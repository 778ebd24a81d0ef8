"""The process of a run on a node: the `ProcessTransport` of an evaluator behind srun."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from resource import struct_rusage
from typing import Any

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.core import text
from tawebeval.deferreds import OneShotEvent, run_in_background
from tawebeval.errors import EvaluationFailure
from tawebeval.linux.child import ProcessAdopter, ProcessTransport, StartedProcess
from tawebeval.sandbox.base import RunnerStatus
from tawebeval.slurm.commands import SlurmCommands
from tawebeval.slurm.frames import (
    KILL,
    UNBOUNDED,
    BrokenFrame,
    FrameKind,
    FrameParser,
    encode_command,
    encode_grant,
)
from tawebeval.slurm.jobs import QueuedJob, explain_loss, find_job_identifier, is_out_of_memory

KILL_PATIENCE = 10.0
"""Seconds after which a node that does not answer to `KILL` is given up."""

STOP_SECONDS = 2 * KILL_PATIENCE
"""The most seconds from `KILL` to the end of a run: its srun has as many to end as the node."""

SRUN_PATIENCE = 60.0
"""Seconds after the outcome for srun to end; it waits for a controller that is away."""

_END_PATIENCE = 5.0  # seconds for srun to end after a bad outcome: its last words may explain it
_WORDS = 8 * 1024  # bytes of srun's words that are kept
_PIECE = 64 * 1024  # bytes of stdout that a run takes at once
_GRANTED = 64 * 1024  # bytes of stdout that one grant is for, at least

log = Logger()


@attrs.frozen
class NodeOutcome:
    """The outcome of a run, as the node has told it."""

    exit: tuple[int | None, int | None] | None
    unstarted: EvaluationFailure | None
    over: EvaluationFailure | None
    usage: tuple[float | None, int | None]

    @property
    def is_good(self) -> bool:
        """Whether the evaluator has succeeded."""
        return self.exit == (0, None) and self.over is None

    @classmethod
    def load(cls, content: bytes) -> NodeOutcome:
        """Return the outcome in a frame."""
        told: Mapping[str, Any] = json.loads(content)
        status, number = told.get("exit") or (None, None)
        seconds, peak = told.get("usage") or (None, None)
        return cls(
            (status, number) if told.get("exit") else None,
            _load_failure(told.get("unstarted")),
            _load_failure(told.get("over")),
            (seconds, peak),
        )


def _load_failure(told: Any) -> EvaluationFailure | None:
    return None if told is None else EvaluationFailure(told[0], told[1], told[2])


@attrs.define(eq=False)
class Attempt(ProcessProtocol):
    """One srun: the protocol of the daemon's child. `orders` is the write end of its stdin."""

    name: str
    orders: int
    _owner: NodeTransport
    words: bytes = b""
    identifier: str | None = None
    outcome: NodeOutcome | None = None
    has_begun: bool = False
    is_closed: bool = False  # its frames do not count any more
    ended: OneShotEvent[None] = attrs.field(factory=OneShotEvent)
    _frames: FrameParser = attrs.field(factory=FrameParser)
    _srun: ProcessTransport = attrs.field(init=False)

    def makeConnection(self, transport: Any) -> None:
        """Connect srun."""
        self._srun = transport
        super().makeConnection(transport)

    @property
    def srun_words(self) -> str:
        """The end of what srun has said."""
        return self.words.decode(errors="replace")

    def send(self, line: bytes) -> None:
        """Send a line to the node. What a pipe does not take has no reader."""
        if self.orders >= 0:
            with suppress(OSError):
                os.write(self.orders, line)

    def close_orders(self) -> None:
        """Close the stdin of srun: the node kills what is left."""
        if self.orders >= 0:
            os.close(self.orders)
            self.orders = -1

    def kill_srun(self, number: int = signal.SIGKILL) -> None:
        """Signal srun itself."""
        if not self.ended.is_set:
            self._srun.signal_group(number)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        """Take frames, or words of srun."""
        if childFD == 2:
            self.words = text.take_tail(self.words + data, _WORDS)
            self.identifier = self.identifier or find_job_identifier(self.srun_words)
            return
        try:
            for kind, content in self._frames.feed(data):
                if not self.is_closed:
                    self._owner.on_frame(self, kind, content)
        except BrokenFrame as error:
            self.words = text.take_tail(self.words + str(error).encode(), _WORDS)
            self.kill_srun(signal.SIGTERM)

    def processEnded(self, reason: Failure) -> None:
        """Tell the end of srun."""
        self.close_orders()
        self.ended.set_value(None)
        self._owner.on_srun_end(self)


StartAttempt = Callable[[int], Awaitable[tuple[StartedProcess, str, int]]]
"""Start an srun; return it, the name of its job, and the write end of its stdin."""


@attrs.define(eq=False)
class NodeTransport:
    """The process of a run: a `ProcessTransport` over one srun, or over two after a loss.

    `begun` has None once the evaluator runs, or the reason why it does not. Output that comes
    before `connect`, or while the run has paused it, waits here: `frames.WINDOW` bounds it. stderr,
    which has no window, never waits: the order of the two pipes is not kept. A job is begun again,
    by `start_again`, only if it was lost before the evaluator printed anything.
    """

    _clock: Any
    _spawner: ProcessAdopter
    _commands: SlurmCommands
    status: RunnerStatus
    _start_again: StartAttempt
    _retries: int
    begun: OneShotEvent[EvaluationFailure | None] = attrs.field(factory=OneShotEvent)
    pid: int = 0
    resource_usage: struct_rusage | None = None
    is_running: bool = True
    _has_exited: bool = False
    outcome: NodeOutcome | None = None
    loss: EvaluationFailure | None = None
    _attempt: Attempt = attrs.field(init=False)
    _run: Any = None  # the protocol
    _held: bytearray = attrs.field(factory=bytearray)  # stdout
    _consumed: int = 0  # bytes that no grant was sent for
    _has_printed: bool = False
    _is_paused: bool = False
    _is_turn_due: bool = False
    _is_stopped: bool = False  # no srun is started any more
    _is_over: bool = False  # nothing more comes from the node
    _has_ended: bool = False
    _kill: IDelayedCall | None = None  # None until the first `KILL`

    @property
    def slow_read_seconds(self) -> float:
        """0: the evaluator's pipes are those of the node."""
        return 0.0

    @property
    def lost_reason(self) -> str | None:
        """None: `loss` is told as the exit."""
        return None

    def adopt(self, started: StartedProcess, name: str, orders: int) -> None:
        """Take over an srun."""
        attempt = self._attempt = Attempt(name, orders, self)
        self.pid = started.pid
        self._spawner.adopt_child(attempt, started)
        self._commands.watch_job(name, self._on_queue)

    def connect(self, run: Any) -> None:
        """Let the process drive a protocol, after `begun`.

        It has the methods `suspend_clock` and `restart_clock` of `EvaluatorRun` besides.
        """
        self._run = run
        run.makeConnection(self)
        if self._has_exited:
            self._exit()
        self._plan()

    async def abandon(self) -> None:
        """End an srun whose evaluator was never connected; return after its end."""
        self._is_stopped = True
        self._close()
        await self.begun.wait()
        await self._attempt.ended.wait()

    def _close(self) -> None:
        """Give up an srun whose evaluator is not wanted any more, begun or not."""
        self._attempt.is_closed = True
        self._give_up(self._attempt)

    def _give_up(self, attempt: Attempt) -> None:
        """End srun and its job, whatever the node does."""
        self._commands.forget_job(attempt.name)
        attempt.close_orders()
        attempt.kill_srun(signal.SIGTERM)
        if not attempt.ended.is_set:
            late = self._clock.callLater(KILL_PATIENCE, attempt.kill_srun)
            attempt.ended.add_callback(lambda _: late.active() and late.cancel())
        self._commands.cancel_job(attempt.name)

    # What the run wants

    def send_command(self, command: bytes) -> None:
        """Send `TERMINATE` or `KILL` to the node; after `KILL` do not wait for long."""
        self._is_stopped = True
        if not self._attempt.has_begun:  # it waits for another node
            self._close()
            return
        self._attempt.send(encode_command(command))
        if command == KILL and self._kill is None:
            self._kill = self._clock.callLater(KILL_PATIENCE, self._on_deaf_node)

    def _on_deaf_node(self) -> None:
        log.warn("a node does not answer; the job {job} of Slurm is given up", job=self.status.job)
        self._give_up(self._attempt)

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
        """Let the node send all that is left: at most the content of a pipe."""
        self._attempt.send(encode_grant(UNBOUNDED))

    # What the node tells

    def on_frame(self, attempt: Attempt, kind: FrameKind, content: bytes) -> None:
        """Take a frame of an attempt."""
        if kind is FrameKind.BEGUN:
            told = json.loads(content)
            attempt.identifier = self.status.job = told["job"]
            self.status.node, self.status.queue_reason = told["node"], None
            self._commands.forget_job(attempt.name)
            attempt.has_begun = True
            if self._run is not None:
                self._run.restart_clock()
            self.begun.set_value(None)
        elif kind is FrameKind.STDOUT:
            self._has_printed = True
            self._held += content
            self._plan()
        elif kind is FrameKind.STDERR:
            self._has_printed = True
            if self._run is not None:  # connected by `begun`
                self._run.childDataReceived(2, content)
        elif kind is FrameKind.EXITED:
            self._exit()
        else:
            attempt.outcome = self.outcome = NodeOutcome.load(content)
            self._exit()
            if self.outcome.is_good or attempt.ended.is_set:
                self._finish()
            else:
                waiting = self._clock.callLater(_END_PATIENCE, self._finish)
                attempt.ended.add_callback(lambda _: waiting.active() and waiting.cancel())

    def _on_queue(self, job: QueuedJob) -> None:
        self.status.job = self._attempt.identifier = job.identifier
        self.status.queue_reason = job.reason if job.state == "PENDING" else None

    def _exit(self) -> None:
        """Tell the run that the evaluator has ended."""
        self._has_exited = True
        if self.is_running and self._run is not None:
            self.is_running = False
            self._run.processExited(Failure(ProcessDone(0)))

    def on_srun_end(self, attempt: Attempt) -> None:
        """Take the end of srun: the outcome is here, or the job was lost."""
        self._commands.forget_job(attempt.name)
        self.status.queue_reason = None
        if self.outcome is not None:
            if is_out_of_memory(attempt.srun_words) and not self.outcome.is_good:
                self.loss = explain_loss({"JobState": "OUT_OF_MEMORY"}, "")
            self._finish()
        else:
            run_in_background(self._explain(attempt), log, "defect: the end of a job is unknown")

    async def _explain(self, attempt: Attempt) -> None:
        """Find out why a job was lost, and begin it again, or end."""
        words, identifier = attempt.srun_words, attempt.identifier
        job: Mapping[str, str] = {}
        if identifier is not None and not self._is_stopped:
            job = await self._commands.show_job(identifier)
        loss = explain_loss(job, words)
        self._commands.cancel_job(attempt.name)
        if self._may_repeat and loss.reason in ("node", "preempted"):
            self._retries -= 1
            log.warn("{why}; the evaluator is begun again", why=loss.message)
            try:
                await self._repeat()
            except OSError as error:
                loss = EvaluationFailure("lost", f"srun cannot be started: {error.strerror}")
            else:
                return
        self.loss = loss
        if self._run is None:
            self.begun.set_value(loss)
            return
        self._exit()
        self._finish()

    @property
    def _may_repeat(self) -> bool:
        return bool(self._retries) and not (self._is_stopped or self._has_printed)

    async def _repeat(self) -> None:
        self.status.retries += 1
        self.status.job = self.status.node = None
        if self._run is not None:
            self._run.suspend_clock()
        self.adopt(*await self._start_again(self.status.retries))
        if self._is_stopped:  # meanwhile
            self._close()

    def _finish(self) -> None:
        """Tell the ends of the pipes, after what is held."""
        self._is_over = True
        if self._kill is not None and self._kill.active():
            self._kill.cancel()
        attempt = self._attempt
        attempt.close_orders()
        if not attempt.ended.is_set:
            late = self._clock.callLater(SRUN_PATIENCE, self._give_up, attempt)
            attempt.ended.add_callback(lambda _: late.active() and late.cancel())
        if self.begun.is_set:
            self._plan()
        else:  # the node could not even begin
            self.begun.set_value(None)

    # What the run gets

    def _plan(self) -> None:
        if self._run is not None and not self._is_turn_due and not self._has_ended:
            self._is_turn_due = True
            self._clock.callLater(0, self._take_turn)

    def _take_turn(self) -> None:
        """Deliver one piece, so that other runs have their turns."""
        self._is_turn_due = False
        held, run = self._held, self._run
        if held and not self._is_paused:
            content = bytes(held[:_PIECE])
            del held[:_PIECE]
            run.childDataReceived(1, content)
            self._grant(len(content))
            self._plan()
        elif not held and self._is_over and not self._has_ended and not self.is_running:
            self._has_ended = True
            for descriptor in (1, 2):
                run.childConnectionLost(descriptor)
            run.processEnded(Failure(self._build_reason()))

    def _grant(self, size: int) -> None:
        self._consumed += size
        if self._consumed >= _GRANTED:
            self._attempt.send(encode_grant(self._consumed))
            self._consumed = 0

    def _build_reason(self) -> Exception:
        status, number = (self.outcome and self.outcome.exit) or (1, None)
        if number is None and not status:
            return ProcessDone(0)
        return ProcessTerminated(status, number, 0)


async def wait_for_begin(transport: NodeTransport) -> None:
    """Wait until the evaluator runs. Raises: EvaluationFailure.

    A cancellation is raised after the end of srun.
    """
    try:
        failure = await transport.begun.wait()
    except CancelledError:
        await transport.abandon()
        raise
    if failure is not None:
        raise failure
