"""The inward road: stdout, read, parsed and put into the ring, as fast as readers allow.

Bytes come in at `received`, events go out into the ring. Against the stream runs the
back-pressure: the producer is paused while the ring is full, while a file is read, and
while the parser has more input than it parses in one turn of the reactor.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessTerminated
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.core import text
from tawebeval.core.budget import Share
from tawebeval.core.events import Batch
from tawebeval.core.fileblock import WantedFile
from tawebeval.core.ring import Ring
from tawebeval.core.segi import Parser
from tawebeval.deferreds import OneShot, WorkerThreads
from tawebeval.errors import EvaluationFailure, Reason, over_limit, unread
from tawebeval.linux.cgroups.group import Usage
from tawebeval.linux.child import ChildProcess
from tawebeval.sandbox.base import Exit, SandboxedRun
from tawebeval.sandbox.workspace import FileRefused

PARTIAL_LINE = 0.02
"""Seconds that a partial line waits for its rest (contract, section 4)."""

log = Logger()


class Producer(Protocol):
    """What can be paused: the transport of the evaluator's process."""

    def pauseProducing(self) -> None:
        """Stop reading stdout."""

    def resumeProducing(self) -> None:
        """Read stdout again."""


class PumpOwner(Protocol):
    """Whose stdout it is."""

    def printed(self) -> None:
        """Take that there are new events."""

    def hold(self, held: bool) -> None:
        """Take that the ring has become full, or that there is room again."""

    def read_file(self, wanted: WantedFile) -> Awaitable[bytes]:
        """Return the content of a file. Raises FileRefused."""

    def lose_output(self) -> None:
        """Take that events are lost by a defect of the daemon: the run is to be killed."""


class StdoutPump:
    """Feeds one ring from one stdout, which is `owner`'s.

    While the ring's `share` of the buffers is full nothing is parsed, no file is read, and the
    producer is paused; the share calls `on_room` when that ends. `done` is set when all has been
    put into the ring, or `failed` is: a defect of the daemon has lost events, and what follows is
    thrown away.
    """

    __slots__ = (
        *("_clock", "_ended", "_finished", "_flush", "_full", "_owner", "_parser", "_paused"),
        *(
            "_producer",
            "_reading",
            "_refusing",
            "_released",
            "_ring",
            "_share",
            "_turn",
            "done",
            "failed",
        ),
    )

    def __init__(
        self,
        clock: IReactorTime,
        parser: Parser,
        ring: Ring,
        share: Share,
        owner: PumpOwner,
    ) -> None:
        self.done: OneShot[None] = OneShot()
        self.failed = False
        self._clock = clock
        self._parser = parser
        self._ring = ring
        self._share = share
        self._owner = owner
        self._producer: Producer | None = None
        self._full = False
        self._paused = False
        self._reading = False
        self._released = False
        self._refusing = False
        self._ended = False
        self._finished = False
        self._flush: IDelayedCall | None = None
        self._turn: IDelayedCall | None = None

    def start(self, producer: Producer) -> None:
        """Take what `producer` reads, and pause it when that is too much."""
        self._producer = producer

    def received(self, chunk: bytes) -> None:
        """Take a chunk of stdout."""
        self._attempt(self._parse, self._parser.feed, chunk)

    def ended(self) -> None:
        """Take the end of stdout."""
        self._ended = True
        self._attempt(self._plan)
        if self.failed:
            self.done.set(None)

    def acknowledged(self) -> None:
        """Events were discarded: there may be room again, or others may have taken it."""
        if self.failed:
            self._share.resize(self._ring.size)
        self._attempt(self._resize)

    def release(self) -> None:
        """Take the rest of stdout however full the ring is: the processes have ended.

        It is at most what a pipe holds. The files that it names may be many times as much: each of
        them still waits for room in the ring.
        """
        self._released = True
        self._attempt(self._share.unbind)

    def refuse_files(self) -> None:
        """Refuse files for which there is no room: the run was stopped, and waits for no reader."""
        self._refusing = True
        self._attempt(self._plan)

    def on_room(self) -> None:
        """Take that the ring is not full any more."""
        self._attempt(self._plan)

    def _attempt(self, step: Callable[..., object], *arguments: Any) -> None:
        """Make a step on the road from stdout to the ring; where that raises events are lost."""
        if self.failed:
            return
        try:
            step(*arguments)
        except Exception:  # noqa: BLE001  (whatever the defect is)
            self._fail()

    def _fail(self) -> None:
        log.failure("events are lost by a defect on the road from stdout to the ring")
        self.failed = True
        self._cancel_calls()
        self._owner.lose_output()
        if self._ended:
            self.done.set(None)
        elif self._producer is not None:
            self._producer.resumeProducing()  # until the end, which has to come

    def _parse(self, parse: Callable[..., Batch], *arguments: Any) -> None:
        """Let the parser do something, and put what comes of it into the ring."""
        self._put(parse(*arguments))
        self._plan()

    def _put(self, batch: Batch) -> None:
        self._ring.append(batch)
        self._share.resize(self._ring.size)
        if batch.count:
            self._owner.printed()

    def _resize(self) -> None:
        self._share.resize(self._ring.size)
        self._plan()

    def _plan(self) -> None:
        """Plan what comes next: a turn of the parser, a read of stdout, or the end."""
        if self.failed:  # meanwhile, in telling somebody
            return
        full = self._must_wait()
        if full is not self._full:
            self._full = full
            self._owner.hold(full)
        busy = self._parser.pending or self._parser.wanted is not None
        if busy and not (full or self._reading or self._turn):
            self._turn = self._clock.callLater(0, self._attempt, self._take_turn)
        if self._flush is None and self._parser.partial:
            self._flush = self._clock.callLater(PARTIAL_LINE, self._attempt, self._deliver_partial)
        paused = full or busy
        if paused is not self._paused and self._producer is not None:
            self._paused = paused
            if paused:
                self._producer.pauseProducing()
            else:
                self._producer.resumeProducing()
        if self._ended and not (busy or self._finished):
            self._finish()

    def _must_wait(self) -> bool:
        """Return whether the next step has to wait for room in the ring."""
        if not self._released:
            return self._share.full
        asks = self._parser.wanted is not None and not self._refusing
        return asks and self._share.size >= self._share.limit

    def _take_turn(self) -> None:
        """Parse on, or read the file that is wanted, unless others have taken the room."""
        self._share.resize(self._ring.size)
        self._turn = None
        wanted = self._parser.wanted
        if self._must_wait():
            self._plan()
        elif wanted is None:
            self._parse(self._parser.proceed)
        elif self._released and self._share.size >= self._share.limit:
            self._parse(self._parser.refuse, "the run was stopped before there was room for a file")
        else:
            self._reading = True
            Deferred.fromCoroutine(self._read(wanted))

    async def _read(self, wanted: WantedFile) -> None:
        try:
            content = await self._owner.read_file(wanted)
        except FileRefused as error:
            step: Callable[[], None] = partial(self._parse, self._parser.refuse, str(error))
        except Exception as error:  # noqa: BLE001  (whatever the defect is)
            step = Failure(error).raiseException
        else:
            step = partial(self._parse, self._parser.supply, content)
        self._reading = False
        self._attempt(step)

    def _deliver_partial(self) -> None:
        self._flush = None
        self._parse(self._parser.flush)

    def _cancel_calls(self) -> None:
        for call in (self._flush, self._turn):
            if call is not None:
                call.cancel()
        self._flush = self._turn = None

    def _finish(self) -> None:
        self._finished = True
        self._cancel_calls()
        self._put(self._parser.finish())
        self._share.unbind()  # nothing waits any more: no pause lasts beyond the end of stdout
        self.done.set(None)


STDERR_TAIL = 8 * 1024
"""Bytes of stderr that are kept, and bytes of UTF-8 that are shown (contract, section 4)."""

READ_RATE = 64 * 1024
"""Bytes of events a second that make up for the time in which a run waits for its readers."""

_WANTED = 4  # part of `evaluations.paused` that a run may wait while another waits for its place
_IN_ALL = 10  # times as long it may wait in all, however much is read

# A run that is over a limit of these gets no time to take more. A run whose time is over, or that
# is cancelled, may clean up.
_AT_ONCE: frozenset[Reason] = frozenset(
    {"memory", "processes", "disk", "file_size", "output", "stderr"}
)
_LOST = EvaluationFailure("lost", "events were lost by a defect of the daemon; see its log")
_MOST_DELAY = 0.25  # seconds of the reactor's processor time that slow reads may take
_DELAYED = EvaluationFailure(
    "output",
    "the evaluator was stopped: reading its stdout and stderr takes the daemon too much processor"
    f" time ({_MOST_DELAY} seconds); watch them with fewer instances of epoll(7)",
    {"value": _MOST_DELAY},
)
_SLACK = 1.0  # seconds of processor time by which the kernel's own reckoning may differ

T = TypeVar("T")


@attrs.frozen
class RunResult:
    """What is kept of a run that has ended, for as long as its evaluation is remembered.

    `exit` is None where there was no evaluator; `paused_seconds` is for how long it waited for
    readers, `stderr_tail` the last of what it printed there.
    """

    exit: Exit | None
    usage: Usage
    paused_seconds: float
    stderr_tail: bytes = attrs.field(repr=False)

    @property
    def stderr(self) -> str:
        """The last of what was printed to stderr, as it is shown."""
        # U+FFFD is longer than what it stands for.
        shown = self.stderr_tail.decode("utf-8", "replace").encode()
        return text.tail(shown, STDERR_TAIL).decode()


@attrs.define
class _Pauses:
    """The time for which a run has waited for its readers, in seconds.

    `total` is all of it. `owed` is what reading has not made up for: each second of waiting adds
    one, and `READ_RATE` bytes that are read take one away. Nothing is saved up for later.
    """

    total: float = 0.0
    owed: float = 0.0
    _since: float | None = None  # until when the pause that lasts has been counted
    _read: int = 0  # bytes

    @property
    def lasting(self) -> bool:
        """Whether there is a pause now."""
        return self._since is not None

    def count(self, now: float) -> None:
        """Add the time that has passed."""
        if self._since is not None:
            self.total += now - self._since
            self.owed += now - self._since
            self._since = now

    def hold(self, held: bool, now: float) -> None:
        """Begin a pause, or end it."""
        self.count(now)
        self._since = now if held else None

    def work_off(self, read: int) -> None:
        """Take away what reading has made up for, by which `read` bytes are read in all."""
        more = max(0, read - self._read)  # less where a batch that was read to its end has grown
        self.owed = max(0.0, self.owed - more / READ_RATE)
        self._read += more


class Run(ProcessProtocol):
    """Watches over an evaluator's process; `ended` is set, to itself, when all of it is over.

    `failure` is why the run was stopped or failed, None after a good end. `exit` is how the
    evaluator ended, None before that and where there was none; `usage` is what it has used, known
    at its end. `grace` is the number of seconds between TERM and KILL.
    """

    failure: EvaluationFailure | None = None
    exit: Exit | None = None
    usage = Usage(None, None)

    def __init__(
        self,
        clock: IReactorTime,
        intake: StdoutPump,
        grace: float,
        sandboxed: SandboxedRun,
        threads: WorkerThreads,
    ) -> None:
        self.ended: OneShot[Run] = OneShot()
        self._clock = clock
        self._intake = intake
        self._grace = grace
        self._sandboxed = sandboxed
        self._threads = threads
        self._stderr = b""
        self._output = self._complaints = 0
        self._time_left = sandboxed.limits.wall_clock
        self._running_since: float | None = None
        self._pauses = _Pauses()
        self._timeout: IDelayedCall | None = None
        self._kill: IDelayedCall | None = None
        self._tree_ended: OneShot[None] = OneShot()
        self._child: ChildProcess

    @property
    def stderr(self) -> str:
        """The last of what was printed to stderr."""
        return self.result.stderr

    @property
    def result(self) -> RunResult:
        """What there is to keep of it."""
        return RunResult(self.exit, self.usage, self.paused_seconds, self._stderr)

    @property
    def paused_seconds(self) -> float:
        """For how long it has waited for readers."""
        self._pauses.count(self._clock.seconds())
        return self._pauses.total

    def makeConnection(self, transport: Any) -> None:
        """Begin: the process runs."""
        self._child = transport
        self._sandboxed.set_first_process(transport)
        super().makeConnection(transport)

    def connectionMade(self) -> None:
        """Start the clock, and take what the process prints."""
        self._intake.start(self._child)
        self.hold(False)

    def hold(self, held: bool) -> None:
        """Stop the clock while stdout is not read, and start it again."""
        self._stop_clock()
        now = self._clock.seconds()
        if not held and self._child.running:
            self._running_since = now
            self._timeout = self._clock.callLater(max(self._time_left, 0), self._timed_out)
        self._pauses.hold(held, now)

    def _stop_clock(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
        if self._running_since is not None:
            self._time_left -= self._clock.seconds() - self._running_since
            self._running_since = None

    def check_readers(self, limit: float, read: int, *, wanted: bool) -> None:
        """Stop a run that is held and has waited too long for its readers.

        `limit` is `evaluations.paused`, in seconds; `read` is how many bytes of events they have
        read in all; `wanted` is whether another evaluation waits for the place. To be called
        about once a second.
        """
        pauses = self._pauses
        pauses.count(self._clock.seconds())
        pauses.work_off(read)
        most = limit / _WANTED if wanted else limit
        if not pauses.lasting:
            return
        why = ", and others wait for its place" if wanted else ""
        if pauses.owed >= most:
            self.stop(unread(limit, f"for {pauses.owed:.0f} seconds{why}"))
        elif pauses.total >= most * _IN_ALL:
            self.stop(unread(limit, f"for {pauses.total:.0f} seconds in all{why}"))

    def _timed_out(self) -> None:
        self._timeout = None
        self.stop(over_limit("timeout", "wall_clock", "seconds", self._sandboxed.limits.wall_clock))

    def stop(self, reason: EvaluationFailure) -> None:
        """End the process tree. The first reason counts.

        All processes get TERM, and KILL after the grace time; KILL at once where the run is over a
        limit of a resource, also if it is being ended for another reason already. Of what stdout
        names no file waits for readers any more.
        """
        running, at_once = self._child.running, reason.reason in _AT_ONCE
        if self.failure is None and (running or not self._intake.done.is_set):
            self.failure = reason
            if running and not at_once:
                self._kill = self._clock.callLater(self._grace, self.kill)
                self._signal(signal.SIGTERM)
            elif self._tree_ended.is_set:
                self._intake.refuse_files()
        if at_once:
            self.kill()

    def lose_output(self) -> None:
        """End the process tree at once: events are lost, which makes the run worthless."""
        self.stop(_LOST)
        self.kill()

    def kill(self) -> None:
        """End the process tree of one that was stopped without any more grace."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._child.running:
            self._sandboxed.send_signal(self._child, number)

    def outReceived(self, data: bytes) -> None:
        """Pass on stdout, up to the limit."""
        self._check_delay()
        within = self.count_output(len(data))
        if within:
            self._intake.received(data[:within])

    def count_output(self, size: int) -> int:
        """Count bytes of output; return how many are within the limit. Beyond it the run ends."""
        limit = self._sandboxed.limits.output
        left = max(limit - self._output, 0)
        self._output += size
        if size > left:
            self.stop(over_limit("output", "output", "bytes", limit))
        return min(size, left)

    def errReceived(self, data: bytes) -> None:
        """Keep the last of stderr, up to the limit."""
        self._check_delay()
        left = self._sandboxed.limits.stderr - self._complaints
        self._complaints += len(data)
        if left > 0:
            self._stderr = text.tail(self._stderr + data[:left], STDERR_TAIL)
        if len(data) > left:
            self.stop(
                over_limit("stderr", "stderr", "bytes on stderr", self._sandboxed.limits.stderr)
            )

    def _check_delay(self) -> None:
        if self._child.delay > _MOST_DELAY:
            self.stop(_DELAYED)

    def outConnectionLost(self) -> None:
        """Take the end of stdout."""
        self._intake.ended()

    def processExited(self, reason: Failure) -> None:
        """End whoever the process has left behind."""
        self._stop_clock()
        if self._kill is not None and self._kill.active():
            self._kill.cancel()
        Deferred.fromCoroutine(self._end_tree())

    async def _end_tree(self) -> None:
        try:
            await self._sandboxed.kill_remaining()
        finally:
            self._tree_ended.set(None)
            if self.failure is not None:
                self._intake.refuse_files()
            # What the pipe still holds is little: take it, so that the run can end.
            self._intake.release()
            self._child.read_remaining()

    def processEnded(self, reason: Failure) -> None:
        """Note how it ended; all output has been read."""
        value = reason.value
        status, number = 0, None
        if isinstance(value, ProcessTerminated):
            status, number = value.exitCode, value.signal
        Deferred.fromCoroutine(self._conclude(status, number))

    async def _conclude(self, status: int | None, number: int | None) -> None:
        await self._tree_ended.wait()
        await self._intake.done.wait()
        if self._intake.failed:
            self.failure = self.failure or _LOST
        try:
            self.exit = self._sandboxed.interpret_exit(status, number)
        except EvaluationFailure as error:
            # Limits of its own may be too low for a sandbox.
            over = self.failure or await self._asked(self._sandboxed.check_limits, True)
            self.failure = over or self._with_stderr(error)
        self.usage = await self._asked(self._sandboxed.read_usage, self._child.usage) or Usage(
            None, None
        )
        self._add_what_was_waited_for()
        if self.failure is None and self.exit is not None and self.exit != Exit(0):
            self.failure = await self._asked(self._sandboxed.check_limits, True) or self._why(
                self.exit
            )
        self.ended.set(self)

    async def _asked(self, question: Callable[..., T], *arguments: Any) -> T | None:
        """Return what the sandboxed answers; nothing where it cannot, for the run has to end."""
        try:
            return await self._threads.run(question, *arguments)
        except Exception:  # noqa: BLE001
            log.failure("a run's {question} is not known", question=question.__name__)
            return None

    def _add_what_was_waited_for(self) -> None:
        """Take the processor time from the kernel where the groups do not know it."""
        usage, waited = self.usage, self._child.usage
        if usage.cpu_seconds is None and waited is not None:
            self.usage = attrs.evolve(usage, cpu_seconds=waited.ru_utime + waited.ru_stime)

    def _with_stderr(self, error: EvaluationFailure) -> EvaluationFailure:
        return attrs.evolve(error, members={**error.members, "stderr": self.stderr})

    def _why(self, end: Exit) -> EvaluationFailure:
        """Return the error of a run that ended badly by itself, or by a limit of one process."""
        limits, number, status = self._sandboxed.limits, end.signal, end.status
        # Anybody may exit like this: what was used has to fit.
        if number == signal.SIGXCPU and (self.usage.cpu_seconds or 0) > limits.cpu - _SLACK:
            return over_limit("cpu", "cpu", "seconds of processor time", limits.cpu)
        if number is not None:
            message = f"the evaluator was ended by signal {number} ({signal.strsignal(number)})"
            return self._with_stderr(EvaluationFailure("exit", message, {"signal": number}))
        message = f"the evaluator exited with status {status}"
        return self._with_stderr(EvaluationFailure("exit", message, {"status": status or 0}))
