"""One run of an evaluator: from its start until its whole process tree is dead."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from resource import struct_rusage
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessTerminated
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from tawebeval.config import Limits
from tawebeval.errors import EvaluationError
from tawebeval.intake import Intake
from tawebeval.orphans import descendants, send
from tawebeval.process import ChildProcess
from tawebeval.signals import Latch

STDERR_TAIL = 8 * 1024
"""Bytes of stderr that are kept (contract, section 4)."""


class Run(ProcessProtocol):
    """Watches over an evaluator's process; `ended` is set when all of it is over.

    `failure` is why the run was stopped or failed, None after a good end. `grace` is the
    number of seconds between TERM and KILL. `end_orphans()` kills what has left the
    process group, and returns when it is gone.
    """

    def __init__(
        self,
        clock: IReactorTime,
        intake: Intake,
        limits: Limits,
        grace: float,
        end_orphans: Callable[[], Awaitable[None]],
    ) -> None:
        self.ended: Latch[None] = Latch()
        self.failure: EvaluationError | None = None
        self.status: int | None = None
        self.signal: int | None = None
        self._clock = clock
        self._intake = intake
        self._limits = limits
        self._grace = grace
        self._end_orphans = end_orphans
        self._stderr = b""
        self._output = 0
        self._time_left = limits.wall_clock
        self._running_since: float | None = None
        self._timeout: IDelayedCall | None = None
        self._kill: IDelayedCall | None = None
        self._buried: Latch[None] = Latch()
        self._child: ChildProcess

    @property
    def stderr(self) -> str:
        """The last of what was printed to stderr."""
        return self._stderr.decode("utf-8", "replace")

    @property
    def usage(self) -> struct_rusage | None:
        """What the run has used (getrusage(2)), known when it has ended."""
        return self._child.usage

    def makeConnection(self, transport: Any) -> None:
        """Begin: the process runs."""
        self._child = transport
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
        self._over("timeout", "wall_clock", "seconds", self._limits.wall_clock)

    def _over(self, reason: str, limit: str, unit: str, value: float) -> None:
        self.stop(
            EvaluationError(
                reason,
                f"the evaluator was stopped: it went over its limit of {value:g} {unit}",
                {"limit": f"limits.{limit}", "value": value},
            )
        )

    def stop(self, reason: EvaluationError) -> None:
        """End the process tree: TERM, and KILL after the grace time. The first reason counts."""
        if self.failure is None and not self._intake.done.is_set:
            self.failure = reason
            if self._child.running:
                self._kill = self._clock.callLater(self._grace, self._signal, signal.SIGKILL)
                self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._child.running:
            strays = descendants(self._child.pid)
            self._child.signalProcess(number)
            for pid in strays:
                send(pid, number)

    def outReceived(self, data: bytes) -> None:
        """Pass on stdout, up to the limit."""
        left = self._limits.output - self._output
        self._output += len(data)
        if left > 0:
            self._intake.received(data[:left])
        if len(data) > left:
            self._over("output", "output", "bytes", self._limits.output)

    def errReceived(self, data: bytes) -> None:
        """Keep the last of stderr."""
        self._stderr = (self._stderr + data)[-STDERR_TAIL:]

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
            self._child.signal_group(signal.SIGKILL)
            await self._end_orphans()
        finally:
            self._buried.set(None)
            # What the pipe still holds is little: take it, so that the run can end.
            self._intake.release()
            self._child.read_the_rest()

    def processEnded(self, reason: Failure) -> None:
        """Note how it ended; all output has been read."""
        value = reason.value
        if isinstance(value, ProcessTerminated):
            self.status, self.signal = value.exitCode, value.signal
        else:
            self.status = 0
        if self.failure is None and self.status != 0:
            self.failure = self._exit()
        Deferred.fromCoroutine(self._conclude())

    async def _conclude(self) -> None:
        await self._buried.wait()
        await self._intake.done.wait()
        self.ended.set(None)

    def _exit(self) -> EvaluationError:
        if self.signal is not None:
            name = signal.strsignal(self.signal)
            message = f"the evaluator was ended by signal {self.signal} ({name})"
            how = {"signal": self.signal}
        else:
            assert self.status is not None
            message = f"the evaluator exited with status {self.status}"
            how = {"status": self.status}
        return EvaluationError("exit", message, {**how, "stderr": self.stderr})
