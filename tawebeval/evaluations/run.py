"""One run of an evaluator: limits, clock and exit.

`ChildProcess` (`linux.child`) reads stdout and stderr in pieces and calls a `EvaluatorRun`. The run
counts the bytes and hands stdout to its `StdoutPump`. While the ring is full, the run stops the
clock of `limits.wall_clock`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import msgspec
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessTerminated
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.config import TOTAL_PAUSE_FACTOR
from tawebeval.core import text
from tawebeval.deferreds import OneShotEvent, WorkerThreads
from tawebeval.errors import (
    EvaluationFailure,
    FailureReason,
    build_limit_failure,
    build_slow_reader_failure,
    format_size,
)
from tawebeval.evaluations.exit_messages import explain_exit
from tawebeval.evaluations.stdout_pump import StdoutPump
from tawebeval.linux.cgroups.manager import ResourceUsage
from tawebeval.linux.child import ProcessTransport
from tawebeval.sandbox.base import EvaluatorExit, SandboxedRun, build_cpu_limit_failure

STDERR_TAIL_BYTES = 8 * 1024
"""Bytes of stderr that are kept, and bytes of UTF-8 that are shown (contract, section 4)."""

MIN_READ_BYTES_PER_SECOND = 64 * 1024
"""Bytes of events per second that make up for a second in which a run waits for its readers."""

_WANTED = 4  # divides `evaluations.paused` for a run whose slot another evaluation waits for

# A run over one of these limits gets no grace time in which it could take more. A run that is over
# its time, or is cancelled, may clean up.
_AT_ONCE: frozenset[FailureReason] = frozenset(
    {"memory", "processes", "disk", "file_size", "output", "stderr"}
)
_LOST = EvaluationFailure(
    "lost", "defect of the daemon: events were lost; the daemon's log has the details"
)
_MOST_DELAY = 0.25  # seconds of the reactor's processor time that slow reads may take
_DELAYED = EvaluationFailure(
    "output",
    "the evaluator was stopped: reading its stdout and stderr took the daemon over"
    f" {_MOST_DELAY} seconds of processor time; watch them with fewer instances of epoll(7)",
    {"value": _MOST_DELAY},
)

T = TypeVar("T")

log = Logger()


@attrs.frozen
class RunResult:
    """Result of a run, kept as long as the record of its evaluation.

    `exit_status` is None if no evaluator ran. `paused_seconds` is the time in which the run waited
    for readers. `stderr_tail` has at most `STDERR_TAIL_BYTES` bytes. `stray_marker_advice` is
    that of the pump, None for a run that has failed.
    """

    exit_status: EvaluatorExit | None
    usage: ResourceUsage
    paused_seconds: float
    stderr_tail: bytes = attrs.field(repr=False)
    stray_marker_advice: str | None = None

    @property
    def stderr_text(self) -> str:
        """The tail of stderr as text of at most `STDERR_TAIL_BYTES` bytes of UTF-8."""
        # U+FFFD is longer than the byte that it replaces.
        shown = self.stderr_tail.decode("utf-8", "replace").encode()
        return text.take_tail(shown, STDERR_TAIL_BYTES).decode()


class RunProgress(
    msgspec.Struct,
    frozen=True,
    rename={  # the keys in journals
        "wall_clock_seconds_left": "time_left",
        "paused_seconds": "paused",
        "uncompensated_pause_seconds": "owed",
        "is_clock_suspended": "is_suspended",
    },
):
    """What a run has used of its limits so far.

    `wall_clock_seconds_left` is the rest of `limits.wall_clock`. `paused_seconds` is the sum of its
    pauses, `uncompensated_pause_seconds` the part of them that no reading has made up for
    (`MIN_READ_BYTES_PER_SECOND`). `is_paused` is whether it waits for readers. `output_bytes` have
    counted against `limits.output`, `stderr_bytes` against `limits.stderr`. `is_clock_suspended` is
    whether the run waits to be begun again.
    """

    wall_clock_seconds_left: float
    paused_seconds: float = 0.0
    uncompensated_pause_seconds: float = 0.0
    is_paused: bool = False
    output_bytes: int = 0
    stderr_bytes: int = 0
    is_clock_suspended: bool = False


@attrs.define
class _Pauses:
    """Pauses of a run that waits for its readers, in seconds.

    `total` is the sum of all pauses. `owed` grows by the same seconds, and shrinks by a second for
    each `MIN_READ_BYTES_PER_SECOND` bytes read, down to 0.
    """

    total: float = 0.0
    owed: float = 0.0
    _since: float | None = None  # until when the present pause is counted
    _read: int = 0  # bytes

    @property
    def is_paused(self) -> bool:
        """Whether the run is paused now."""
        return self._since is not None

    def count(self, now: float) -> None:
        """Add the time since the last count."""
        if self._since is not None:
            self.total += now - self._since
            self.owed += now - self._since
            self._since = now

    def set_paused(self, paused: bool, now: float) -> None:
        """Begin a pause, or end it."""
        self.count(now)
        self._since = now if paused else None

    def reduce_owed(self, read: int) -> None:
        """Reduce `owed`; `read` is the number of bytes that readers have read in all."""
        more = max(0, read - self._read)  # `read` shrinks if a batch read to its end has grown
        self.owed = max(0.0, self.owed - more / MIN_READ_BYTES_PER_SECOND)
        self._read += more


class EvaluatorRun(ProcessProtocol):
    """Protocol of the evaluator's process: applies the limits, and learns of stdout and the exit.

    The process is known only as a `ProcessTransport` (`linux.child`), so it may be a child of the
    daemon or of the keeper.

    `run_ended` is set, to the run, when the process tree is gone and all output is in the ring.
    `failure` is the reason of a stop or a bad exit, None after a good one. `exit_status` is None
    until the end, and if no evaluator ran. `usage` is known at the end. `grace` is the time between
    TERM and KILL, in seconds. `on_change()` is called when `failure` is set by a stop, and when the
    run waits to be begun again, or was. `progress` is that of a run that an earlier process has
    begun. `find_command_hint(status, stderr)` explains a bad exit; it is called in a thread.
    """

    failure: EvaluationFailure | None = None
    exit_status: EvaluatorExit | None = None
    usage = ResourceUsage(None, None)

    def __init__(
        self,
        clock: IReactorTime,
        pump: StdoutPump,
        grace: float,
        sandboxed: SandboxedRun,
        threads: WorkerThreads,
        on_change: Callable[[], object] = lambda: None,
        progress: RunProgress | None = None,
    ) -> None:
        progress = progress or RunProgress(sandboxed.limits.wall_clock)
        self.run_ended: OneShotEvent[EvaluatorRun] = OneShotEvent()
        self._clock = clock
        self._pump = pump
        self._grace = grace
        self._on_change = on_change
        self._sandboxed = sandboxed
        self._threads = threads
        self._stderr = b""
        self._stdout_size, self._stderr_size = progress.output_bytes, progress.stderr_bytes
        self._time_left = progress.wall_clock_seconds_left
        self._running_since: float | None = None
        self._pauses = _Pauses(progress.paused_seconds, progress.uncompensated_pause_seconds)
        self._timeout: IDelayedCall | None = None
        self._kill: IDelayedCall | None = None
        self._tree_ended: OneShotEvent[None] = OneShotEvent()
        self._is_left = False
        self._is_suspended = progress.is_clock_suspended
        self._process: ProcessTransport
        self.find_command_hint: Callable[[int, str], str] = lambda status, stderr: ""

    @property
    def stderr_text(self) -> str:
        """The tail of stderr, as text."""
        return self.result.stderr_text

    @property
    def result(self) -> RunResult:
        """The result so far."""
        return RunResult(
            self.exit_status,
            self.usage,
            self.paused_seconds,
            self._stderr,
            self._pump.stray_marker_advice if self.failure is None else None,
        )

    @property
    def main_pid(self) -> int:
        """The first process."""
        return self._process.pid

    @property
    def output_bytes(self) -> int:
        """Bytes that have counted against `limits.output`."""
        return self._stdout_size

    @property
    def progress(self) -> RunProgress:
        """What the run has used of its limits so far."""
        now, since = self._clock.seconds(), self._running_since
        self._pauses.count(now)
        return RunProgress(
            self._time_left if since is None else self._time_left - (now - since),
            self._pauses.total,
            self._pauses.owed,
            self._pauses.is_paused,
            self._stdout_size,
            self._stderr_size,
            self._is_suspended,
        )

    @property
    def paused_seconds(self) -> float:
        """Time in which the run has waited for readers, in seconds."""
        self._pauses.count(self._clock.seconds())
        return self._pauses.total

    def makeConnection(self, transport: Any) -> None:
        """Connect the started process, a `ProcessTransport`."""
        self._process = transport
        self._sandboxed.set_first_process(transport)
        super().makeConnection(transport)

    def connectionMade(self) -> None:
        """Start the clock, and read stdout."""
        self._pump.start(self._process)
        self.set_clock_paused(False)

    def set_clock_paused(self, paused: bool) -> None:
        """Stop the clock of `limits.wall_clock` while the run waits for readers; restart it."""
        if not paused and self._timeout is not None:
            return  # the reactor keeps a cancelled timeout until its time
        self._stop_clock()
        now = self._clock.seconds()
        if not paused and self._process.is_running and not self._is_suspended:
            self._running_since = now
            self._timeout = self._clock.callLater(max(self._time_left, 0), self._on_timeout)
        self._pauses.set_paused(paused, now)

    def suspend_clock(self) -> None:
        """Stop the clock until `restart_clock`: the evaluator is to be begun again elsewhere."""
        self._is_suspended = True
        self._stop_clock()
        self._on_change()

    def restart_clock(self) -> None:
        """Give a run that was begun again its whole time."""
        if self._is_suspended:
            self._is_suspended = False
            self._time_left = self._sandboxed.limits.wall_clock
            self.set_clock_paused(False)
            self._on_change()

    def _stop_clock(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
        if self._running_since is not None:
            self._time_left -= self._clock.seconds() - self._running_since
            self._running_since = None

    def hand_over(self) -> None:
        """Leave the process alone from now on: another process of the daemon goes on with it."""
        self._is_left = True
        self._pump.hand_over()
        self._stop_clock()
        if self._kill is not None and self._kill.active():
            self._kill.cancel()

    def check_reader_timeout(
        self, max_paused_seconds: float, total_read_bytes: int, *, is_slot_wanted: bool
    ) -> None:
        """Stop a paused run that has waited too long for its readers.

        `max_paused_seconds` is `evaluations.paused`, in seconds. `total_read_bytes` is the number
        of bytes of events that the readers have read in all. `is_slot_wanted` is whether another
        evaluation waits for the slot. To be called about once a second.
        """
        pauses = self._pauses
        pauses.count(self._clock.seconds())
        pauses.reduce_owed(total_read_bytes)
        most = max_paused_seconds / _WANTED if is_slot_wanted else max_paused_seconds
        if not pauses.is_paused:
            return
        why = " while other evaluations waited for its run slot" if is_slot_wanted else ""
        if pauses.owed >= most:
            self.stop(
                build_slow_reader_failure(max_paused_seconds, f"for {pauses.owed:.0f} seconds{why}")
            )
        elif pauses.total >= most * TOTAL_PAUSE_FACTOR:
            self.stop(
                build_slow_reader_failure(
                    max_paused_seconds, f"for {pauses.total:.0f} seconds in all{why}"
                )
            )

    def _on_timeout(self) -> None:
        self._timeout = None
        most = self._sandboxed.limits.wall_clock
        self.stop_unless_exited(
            build_limit_failure("timeout", "wall_clock", f"ran for over {most:g} seconds", most)
        )

    def stop(self, failure: EvaluationFailure) -> None:
        """End the process tree. The first reason becomes the failure.

        All processes get TERM, and KILL after the grace time. A run over the limit of a resource
        gets KILL at once, even if it is being stopped for another reason. Files that stdout names
        no longer wait for readers.
        """
        if self._is_left:
            return
        running, at_once = self._process.is_running, failure.reason in _AT_ONCE
        if self.failure is None and (running or not self._pump.output_stored_event.is_set):
            self.failure = failure
            self._on_change()
            if running and not at_once:
                self._kill = self._clock.callLater(self._grace, self.kill)
                self._signal(signal.SIGTERM)
            elif self._tree_ended.is_set:
                self._hurry_files()
        if at_once:
            self.kill()

    def stop_unless_exited(self, failure: EvaluationFailure) -> None:
        """Stop the run unless the evaluator has ended, which may be told later."""
        if not self._process.has_exited:
            self.stop(failure)

    def on_lost_events(self) -> None:
        """Kill the process tree: a run without all its events is worthless."""
        self.stop(_LOST)
        self.kill()

    def kill(self) -> None:
        """Kill the process tree of a stopped run, without the rest of the grace time."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process.is_running:
            self._sandboxed.send_signal(self._process, number)

    @property
    def output_stored_event(self) -> OneShotEvent[None]:
        """The event of the pump: all output is in the ring."""
        return self._pump.output_stored_event

    def outReceived(self, data: bytes) -> None:
        """Feed stdout to the pump, up to the limit."""
        self._check_delay()
        within = self.count_output_within_limit(len(data))
        if within:
            self._pump.feed(data[:within])

    def count_output_within_limit(self, size: int) -> int:
        """Count bytes of output; return those within the limit. Beyond it stop the run."""
        limit = self._sandboxed.limits.output
        left = max(limit - self._stdout_size, 0)
        self._stdout_size += size
        if size > left:
            self.stop(
                build_limit_failure("output", "output", f"printed over {format_size(limit)}", limit)
            )
        return min(size, left)

    def errReceived(self, data: bytes) -> None:
        """Keep the tail of stderr, up to the limit."""
        self._check_delay()
        limit = self._sandboxed.limits.stderr
        left = limit - self._stderr_size
        self._stderr_size += len(data)
        if left > 0:
            self._stderr = text.take_tail(self._stderr + data[:left], STDERR_TAIL_BYTES)
        if len(data) > left:
            self.stop(
                build_limit_failure(
                    "stderr", "stderr", f"printed over {format_size(limit)} on stderr", limit
                )
            )

    def _check_delay(self) -> None:
        if self._process.pipe_read_cpu_seconds > _MOST_DELAY:
            self.stop(_DELAYED)

    def outConnectionLost(self) -> None:
        """Tell the pump the end of stdout."""
        self._pump.on_stdout_end()

    def processExited(self, reason: Failure) -> None:
        """Kill the processes that the evaluator has left."""
        if self._is_left:
            return
        self._stop_clock()
        if self._kill is not None and self._kill.active():
            self._kill.cancel()
        Deferred.fromCoroutine(self._end_tree())

    async def _end_tree(self) -> None:
        try:
            await self._sandboxed.kill_remaining_processes()
        finally:
            self._tree_ended.set_value(None)
            if self.failure is not None:
                self._hurry_files()
            # The rest in the pipe is little: read it, so that the run can end.
            self._pump.accept_remaining_output()
            self._process.read_remaining_output()

    def _hurry_files(self) -> None:
        self._sandboxed.abort_remote_reads()
        self._pump.refuse_referenced_files()

    def processEnded(self, reason: Failure) -> None:
        """Interpret the exit; all output has been read."""
        if self._is_left:
            return
        value = reason.value
        status, number = 0, None
        if isinstance(value, ProcessTerminated):
            status, number = value.exitCode, value.signal
        Deferred.fromCoroutine(self._conclude(status, number))

    async def _conclude(self, status: int | None, number: int | None) -> None:
        await self._tree_ended.wait()
        await self._pump.output_stored_event.wait()
        if self._pump.has_lost_events:
            self.failure = self.failure or _LOST
        elif self._process.lost_reason is not None:
            self.failure = self.failure or EvaluationFailure(
                "lost", f"the evaluator was lost: {self._process.lost_reason}"
            )
        try:
            self.exit_status = self._sandboxed.interpret_exit(status, number)
        except EvaluationFailure as error:
            # The limits of the run may be too low for the sandbox itself.
            over = self.failure or await self._ask(self._sandboxed.check_limits, True)
            self.failure = over or self._with_stderr(error)
        self.usage = await self._ask(
            self._sandboxed.read_usage, self._process.resource_usage
        ) or ResourceUsage(None, None)
        self._add_waited_usage()
        if self.failure is None and self.exit_status == EvaluatorExit(0):
            self.failure = self._sandboxed.check_memory() or self._check_cpu()
        elif self.failure is None and self.exit_status is not None:
            self.failure = await self._ask(self._sandboxed.check_limits, True)
            if self.failure is None:
                status = self.exit_status.status or 0
                hint = await self._ask(self.find_command_hint, status, self.stderr_text)
                self.failure = self._explain_exit(self.exit_status, hint or "")
        self.run_ended.set_value(self)

    async def _ask(self, question: Callable[..., T], *arguments: Any) -> T | None:
        """Return the answer of the sandboxed run; None if it raises, for the run has to end."""
        try:
            return await self._threads.run_in_thread(question, *arguments)
        except Exception:  # noqa: BLE001
            log.failure("defect: {question} of a run failed", question=question.__name__)
            return None

    def _add_waited_usage(self) -> None:
        """Use the processor time of wait4(2) if no cgroup counts it."""
        usage, waited = self.usage, self._process.resource_usage
        if usage.cpu_seconds is None and waited is not None:
            self.usage = attrs.evolve(usage, cpu_seconds=waited.ru_utime + waited.ru_stime)

    def _with_stderr(self, error: EvaluationFailure) -> EvaluationFailure:
        return attrs.evolve(
            error, extra_members={**error.extra_members, "stderr": self.stderr_text}
        )

    def _check_cpu(self) -> EvaluationFailure | None:
        """Return the error of a run whose processor time, as measured in the end, is too much."""
        limits = self._sandboxed.limits
        over = (self.usage.cpu_seconds or 0) > limits.cpu
        return build_cpu_limit_failure(limits) if over else None

    def _explain_exit(self, end: EvaluatorExit, command_hint: str) -> EvaluationFailure:
        """Return the failure for a bad exit, which may come from a limit of one process."""
        limits, number, status = self._sandboxed.limits, end.signal, end.status
        if over := self._check_cpu():
            return over
        message = explain_exit(
            end,
            self.stderr_text,
            limits,
            has_network=self._sandboxed.has_network,
            has_output=bool(self._stdout_size or self._stderr_size),
            stray_marker_advice=self._pump.stray_marker_advice,
            command_hint=command_hint,
        )
        members = {"status": status or 0} if number is None else {"signal": number}
        return self._with_stderr(EvaluationFailure("exit", message, members))
