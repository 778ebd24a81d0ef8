"""One run of an evaluator: from its start until its whole process tree is dead."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessTerminated
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval import utf8
from tawebeval.errors import EvaluationError, over_limit
from tawebeval.groups import Usage
from tawebeval.intake import Intake
from tawebeval.process import ChildProcess
from tawebeval.sandbox import Cell, Exit
from tawebeval.signals import Latch, Threads

STDERR_TAIL = 8 * 1024
"""Bytes of stderr that are kept, and bytes of UTF-8 that are shown (contract, section 4)."""


_SLACK = 1.0  # seconds of processor time by which the kernel's own reckoning may differ

T = TypeVar("T")

log = Logger()


class Run(ProcessProtocol):
    """Watches over an evaluator's process; `ended` is set, to itself, when all of it is over.

    `failure` is why the run was stopped or failed, None after a good end. `exit` is how the
    evaluator ended, None before that and where there was none; `usage` is what it has used, known
    at its end. `grace` is the number of seconds between TERM and KILL.
    """

    failure: EvaluationError | None = None
    exit: Exit | None = None
    usage = Usage(None, None)

    def __init__(
        self,
        clock: IReactorTime,
        intake: Intake,
        grace: float,
        cell: Cell,
        threads: Threads,
    ) -> None:
        self.ended: Latch[Run] = Latch()
        self._clock = clock
        self._intake = intake
        self._grace = grace
        self._cell = cell
        self._threads = threads
        self._stderr = b""
        self._output = self._complaints = 0
        self._time_left = cell.limits.wall_clock
        self._running_since: float | None = None
        self._timeout: IDelayedCall | None = None
        self._kill: IDelayedCall | None = None
        self._buried: Latch[None] = Latch()
        self._child: ChildProcess

    @property
    def stderr(self) -> str:
        """The last of what was printed to stderr."""
        # U+FFFD is longer than what it stands for.
        shown = self._stderr.decode("utf-8", "replace").encode()
        return utf8.tail(shown, STDERR_TAIL).decode()

    def makeConnection(self, transport: Any) -> None:
        """Begin: the process runs."""
        self._child = transport
        self._cell.started(transport)
        super().makeConnection(transport)

    def connectionMade(self) -> None:
        """Start the clock, and take what the process prints."""
        self._intake.start(self._child)
        self.hold(False)

    def hold(self, held: bool) -> None:
        """Stop the clock while stdout is not read, and start it again."""
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
        now = self._clock.seconds()
        if self._running_since is not None:
            self._time_left -= now - self._running_since
            self._running_since = None
        if not held and self._child.running:
            self._running_since = now
            self._timeout = self._clock.callLater(max(self._time_left, 0), self._timed_out)

    def _timed_out(self) -> None:
        self._timeout = None
        self.stop(over_limit("timeout", "wall_clock", "seconds", self._cell.limits.wall_clock))

    def stop(self, reason: EvaluationError) -> None:
        """End the process tree: TERM, and KILL after the grace time. The first reason counts."""
        if self.failure is None and not self._intake.done.is_set:
            self.failure = reason
            if self._child.running:
                self._kill = self._clock.callLater(self._grace, self._signal, signal.SIGKILL)
                self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process tree of one that was stopped without any more grace."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._child.running:
            self._cell.signal(self._child, number)

    def outReceived(self, data: bytes) -> None:
        """Pass on stdout, up to the limit."""
        left = self._cell.limits.output - self._output
        self._output += len(data)
        if left > 0:
            self._intake.received(data[:left])
        if len(data) > left:
            self.stop(over_limit("output", "output", "bytes", self._cell.limits.output))

    def errReceived(self, data: bytes) -> None:
        """Keep the last of stderr, up to the limit."""
        left = self._cell.limits.stderr - self._complaints
        self._complaints += len(data)
        if left > 0:
            self._stderr = utf8.tail(self._stderr + data[:left], STDERR_TAIL)
        if len(data) > left:
            self.stop(over_limit("stderr", "stderr", "bytes on stderr", self._cell.limits.stderr))

    def outConnectionLost(self) -> None:
        """Take the end of stdout."""
        self._intake.ended()

    def processExited(self, reason: Failure) -> None:
        """End whoever the process has left behind."""
        self.hold(True)
        if self._kill is not None and self._kill.active():
            self._kill.cancel()
        Deferred.fromCoroutine(self._bury())

    async def _bury(self) -> None:
        try:
            await self._cell.end()
        finally:
            self._buried.set(None)
            # What the pipe still holds is little: take it, so that the run can end.
            self._intake.release()
            self._child.read_the_rest()

    def processEnded(self, reason: Failure) -> None:
        """Note how it ended; all output has been read."""
        value = reason.value
        status, number = 0, None
        if isinstance(value, ProcessTerminated):
            status, number = value.exitCode, value.signal
        Deferred.fromCoroutine(self._conclude(status, number))

    async def _conclude(self, status: int | None, number: int | None) -> None:
        await self._buried.wait()
        await self._intake.done.wait()
        try:
            self.exit = self._cell.exit(status, number)
        except EvaluationError as error:
            # Limits of its own may be too low for a sandbox.
            over = self.failure or await self._asked(self._cell.exceeded, True)
            self.failure = over or self._with_stderr(error)
        self.usage = await self._asked(self._cell.usage) or Usage(None, None)
        self._add_what_was_waited_for()
        if self.failure is None and self.exit is not None and self.exit != Exit(0):
            self.failure = await self._asked(self._cell.exceeded, True) or self._why(self.exit)
        self.ended.set(self)

    async def _asked(self, question: Callable[..., T], *arguments: Any) -> T | None:
        """Return what the cell answers; nothing where it cannot, for the run has to end."""
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

    def _with_stderr(self, error: EvaluationError) -> EvaluationError:
        return attrs.evolve(error, members={**error.members, "stderr": self.stderr})

    def _why(self, end: Exit) -> EvaluationError:
        """Return the error of a run that ended badly by itself, or by a limit of one process."""
        limits, number, status = self._cell.limits, end.signal, end.status
        # Anybody may exit like this: what was used has to fit.
        if number == signal.SIGXCPU and (self.usage.cpu_seconds or 0) > limits.cpu - _SLACK:
            return over_limit("cpu", "cpu", "seconds of processor time", limits.cpu)
        if number is not None:
            message = f"the evaluator was ended by signal {number} ({signal.strsignal(number)})"
            return self._with_stderr(EvaluationError("exit", message, {"signal": number}))
        message = f"the evaluator exited with status {status}"
        return self._with_stderr(EvaluationError("exit", message, {"status": status or 0}))
