"""One run of an evaluator: its process, its stdout, its limits and its end.

A `Run` is the protocol of the evaluator's process, and the one owner of it. The transport
(`linux.tail.TailedProcess`) delivers stdout and stderr in pieces. The run feeds stdout to a
`RecordedStdout`, which makes events of it, in turns of the reactor: it pauses the transport while a
turn has parsed enough, and while a file is read that stdout names. Readers never slow a run.

A bad exit has a message with a hint for the author. The shell says only "not found" for a file with
Windows line ends or without its interpreter, so these hints come from the commit's files.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessTerminated
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.config import LimitSettings
from tawebeval.core.evaluations import Checkout
from tawebeval.core.events import compute_base64_size
from tawebeval.core.segi import MAX_SENT_FILE_BYTES, FileReference, build_evaluator_environment
from tawebeval.deferreds import OneShotEvent
from tawebeval.errors import (
    EvaluationFailure,
    FailureReason,
    format_size,
    make_limit_failure,
)
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.eventlog import EvaluationEvents
from tawebeval.evaluations.store import (
    STDERR_TAIL_BYTES,
    EvaluationDetails,
    RunResult,
    RunRow,
    get_utf8_tail,
)
from tawebeval.linux.cgroups import ResourceUsage
from tawebeval.linux.filetree import open_regular_file
from tawebeval.linux.starter import MAX_SLOW_READ_CPU_SECONDS
from tawebeval.linux.tail import TailedProcess
from tawebeval.sandbox.base import EvaluatorExit, SandboxedRun, build_cpu_limit_failure
from tawebeval.sandbox.workspace import EvaluatorFileRefused

PARTIAL_LINE_DELAY_SECONDS = 0.02
"""Seconds that a partial line waits for its rest (docs/evaluators.md)."""

# A run over one of these limits gets no grace time in which it could take more. A run that is over
# its time, or is cancelled, may clean up.
KILL_GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL, for the evaluator to clean up."""
_AT_ONCE: frozenset[FailureReason] = frozenset(
    {"memory", "processes", "disk", "file_size", "output", "stderr"}
)
_LOST = EvaluationFailure(
    "lost", "defect of the daemon: events were lost; the daemon's log has the details"
)
_DELAYED = EvaluationFailure(
    "output",
    "the evaluator was stopped: reading its stdout and stderr took the daemon over"
    f" {MAX_SLOW_READ_CPU_SECONDS} seconds of processor time; watch them with fewer instances of"
    " epoll(7)",
    {"value": MAX_SLOW_READ_CPU_SECONDS},
)

T = TypeVar("T")

log = Logger()


class Run(ProcessProtocol):
    """One run of an evaluator.

    `run_ended` is set, to the run, when the process tree is gone and all output is in the log;
    `output_ended` when all output is.
    `failure` is the reason of a stop or a bad exit, None after a good one. `exit_status` is None
    until the end, and if no evaluator ran. `usage` is known at the end.

    - `on_change()` is called when `failure` is set by a stop, and when the clock stands.
    - `deadline`: the end of `limits.wall_clock`, in seconds of the reactor's clock, which goes on
      over a restart of the daemon; None from `reset_clock` to `restart_clock`. The parameter is
      that of a run that an earlier process of the daemon has begun. Its stdout goes on, its stderr
      is delivered again.
    """

    failure: EvaluationFailure | None = None
    exit_status: EvaluatorExit | None = None
    usage = ResourceUsage(None, None)

    def __init__(
        self,
        context: EvaluationContext,
        details: EvaluationDetails,
        checkout: Checkout,
        sandboxed: SandboxedRun,
        events: EvaluationEvents,
        on_change: Callable[[], object],
        deadline: float | None = None,
    ) -> None:
        self.run_ended: OneShotEvent[Run] = OneShotEvent()
        self.checkout = checkout
        self.sandboxed = sandboxed
        self._context = context
        self._details = details
        assert events.stdout is not None, "opened before the start"
        self._events, self._stdout = events, events.stdout
        self._on_change = on_change
        if deadline is None and not sandboxed.has_external_queue:
            deadline = context.clock.seconds() + sandboxed.limits.wall_clock
        self.deadline = deadline
        self._timeout: IDelayedCall | None = None
        self._stderr, self._stderr_bytes = b"", 0
        self._output_bytes = self._stdout.stdout_bytes + self._stdout.file_bytes
        self._kill: IDelayedCall | None = None
        self._flush: IDelayedCall | None = None
        self._turn: IDelayedCall | None = None
        self._is_paused = self._is_reading = self._has_stdout_ended = False
        self._has_lost_events = self._is_watched = False
        self._tree_ended: OneShotEvent[None] = OneShotEvent()
        self.output_ended: OneShotEvent[None] = OneShotEvent()
        self._process: TailedProcess
        details.result_summary = self._stdout.parser.result_summary

    # The start

    def start_process(self, directory: Path) -> Any:
        """Start the evaluator in `directory`; `makeConnection` follows. Blocks. Raises: OSError."""
        details, sandboxed = self._details, self.sandboxed
        request, workspace, view = (
            details.request,
            sandboxed.workspace,
            sandboxed.workspace_view,
        )
        chosen = details.environment.variables if details.environment is not None else {}
        environment = build_evaluator_environment(
            {**self._context.configuration.evaluations.environment, **chosen},
            home=str(view.translate_path(workspace.home_directory)),
            temporary_directory=str(view.translate_path(workspace.temporary_directory)),
            seed=details.seed,
            submission={
                file.field: str(view.translate_path(workspace.locate_submitted_file(file)))
                for file in request.submission
            },
            markers=self._stdout.segi_markers,
        )
        return sandboxed.start_evaluator(request.evaluator_cmd, environment, directory)

    def makeConnection(self, transport: Any) -> None:
        """Connect the started process, a `TailedProcess`."""
        self._process = transport
        transport.on_slow_reads = self._on_slow_reads
        transport.on_broker_error = self._on_broker_error
        self.sandboxed.run_limits.first_process = transport
        super().makeConnection(transport)

    def connectionMade(self) -> None:
        """Start the clock, and have the limits checked until the end."""
        self._start_clock()
        self._context.limit_monitor.add_run(self.sandboxed.run_limits, self.stop)
        self._is_watched = True

    def _on_slow_reads(self) -> None:
        self.stop(_DELAYED)

    def _on_broker_error(self, reason: str) -> None:
        """Stop a run whose submission cannot run: it would fail by no fault of its own."""
        log.warn("tawebeval-run does not work in an evaluation: {reason}", reason=reason)
        what = "the sandbox for the submission could not be started; submit again"
        self.stop_unless_exited(EvaluationFailure("lost", what))

    def pause_stdout(self, until: Deferred[None]) -> None:
        """Deliver no stdout before a Deferred has fired or failed; call it before any is read."""
        if not until.called:
            self._is_paused = True
            self._process.pauseProducing()
        until.addBoth(lambda _: self._parse(lambda: None))

    def parse_inherited_stdout(self) -> None:
        """Go on with what an earlier process has read of stdout, once the process is connected."""
        self._count_output_within_limit(0)  # the evaluator may have printed more meanwhile
        self._parse(lambda: None)

    def reset_clock(self) -> None:
        """Stop the clock while a cluster has no job of the evaluator, or is losing it."""
        self._stop_clock()
        self.deadline = None
        self._on_change()

    def restart_clock(self) -> None:
        """Start the clock after `reset_clock`: the evaluator has begun again."""
        self._start_clock()
        self._on_change()

    def _start_clock(self) -> None:
        if self.deadline is None:  # what had to wait elsewhere has its whole time from now on
            self.deadline = self._context.clock.seconds() + self.sandboxed.limits.wall_clock
        left = max(0.0, self.deadline - self._context.clock.seconds())
        self._timeout = self._context.clock.callLater(left, self._on_timeout)

    def _stop_clock(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _on_timeout(self) -> None:
        self._timeout = None
        most = self.sandboxed.limits.wall_clock
        self.stop_unless_exited(
            make_limit_failure("timeout", "wall_clock", f"ran for over {most:g} seconds", most)
        )

    def hand_to_next_daemon(self) -> None:
        """Leave the process to the next process of the daemon."""
        self._process.detach()
        self._stop_clock()
        self._unwatch_limits()

    def _unwatch_limits(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._context.limit_monitor.remove_run(self.sandboxed.run_limits)

    # Stops

    def stop(self, failure: EvaluationFailure) -> None:
        """End the process tree. The first reason becomes the failure.

        All processes get TERM, and KILL after the grace time. A run over the limit of a resource
        gets KILL at once, even if it is being stopped for another reason.
        """
        running, at_once = self._process.is_running, failure.reason in _AT_ONCE
        if self.failure is None and (running or not self.output_ended.is_set):
            self.failure = failure
            self._on_change()
            if running and not at_once:
                self._kill = self._context.clock.callLater(KILL_GRACE_SECONDS, self.kill)
                Deferred.fromCoroutine(self._terminate())
        if at_once:
            self.kill()

    async def _terminate(self) -> None:
        """Send TERM once the reason is stored.

        Otherwise, if the daemon is killed now, the next process finds an exit by a signal alone.
        """
        await self._context.wait_for_store_flush()
        self._signal(signal.SIGTERM)

    def stop_unless_exited(self, failure: EvaluationFailure) -> None:
        """Stop the run unless the evaluator has ended, which may be told later."""
        if not self._process.has_exited:
            self.stop(failure)

    def kill(self) -> None:
        """Kill the process tree of a stopped run, without the rest of the grace time."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process.is_running:
            self.sandboxed.send_signal(self._process, number)

    # Output

    def outReceived(self, data: bytes) -> None:
        """Make events of stdout, up to the limit."""
        within = data[: self._count_output_within_limit(len(data))]
        if within:
            self._parse(self._stdout.feed, within)

    def _count_output_within_limit(self, size: int) -> int:
        """Count bytes of output; return those within the limit. Stop a run that is beyond it."""
        limit = self.sandboxed.limits.output
        left = max(limit - self._output_bytes, 0)
        self._output_bytes += size
        if self._output_bytes > limit:
            self.stop(
                make_limit_failure("output", "output", f"printed over {format_size(limit)}", limit)
            )
        return min(size, left)

    def errReceived(self, data: bytes) -> None:
        """Keep the tail of stderr, up to the limit."""
        limit = self.sandboxed.limits.stderr
        left = limit - self._stderr_bytes
        self._stderr_bytes += len(data)
        if left > 0:
            self._stderr = get_utf8_tail(self._stderr + data[:left], STDERR_TAIL_BYTES)
        if len(data) > left:
            self.stop(
                make_limit_failure(
                    "stderr", "stderr", f"printed over {format_size(limit)} on stderr", limit
                )
            )

    def outConnectionLost(self) -> None:
        """Parse the end of stdout."""
        self._has_stdout_ended = True
        self._parse(lambda: None)

    def _parse(self, step: Callable[..., object], *arguments: Any) -> None:
        """Call a method of the parser, and plan the next one. If it raises, events are lost."""
        end = self._stdout.event_log.end_cursor
        if not self._has_lost_events:
            try:
                step(*arguments)
                self._plan()
            except Exception as error:  # noqa: BLE001  (whatever the defect is)
                self._lose_events(error)
        if self._has_lost_events and self._has_stdout_ended:
            self.output_ended.set_value(None)
        if self._stdout.event_log.end_cursor != end:
            self._events.notify_readers()

    def _lose_events(self, error: Exception) -> None:
        """Kill the process tree: a run without all its events is worthless."""
        self._has_lost_events = True
        for call in (self._flush, self._turn):
            if call is not None:
                call.cancel()
        self._flush = self._turn = None
        if isinstance(error, OSError):
            words = "{evaluation}: the files of events cannot be written: {error}"
            log.error(words, evaluation=self._details.log_name, error=error)
            what = f"the daemon could not write the evaluation's events: {error.strerror}"
            self.stop(EvaluationFailure("lost", f"{what}; submit again"))
        else:
            words = "{evaluation}: defect: events between stdout and the log are lost"
            log.failure(words, evaluation=self._details.log_name)
            self.stop(_LOST)
        self.kill()
        self._process.resumeProducing()  # the end of stdout is still needed

    def _plan(self) -> None:
        """Plan the next step: a turn of the parser, a read of stdout, or the end."""
        stdout, clock = self._stdout, self._context.clock
        is_busy = stdout.parser.has_pending_input or stdout.parser.awaited_file is not None
        if is_busy and not (self._is_reading or self._turn):
            self._turn = clock.callLater(0, self._take_turn)
        if self._flush is None and stdout.parser.has_partial_line:
            self._flush = clock.callLater(PARTIAL_LINE_DELAY_SECONDS, self._flush_partial_line)
        if is_busy is not self._is_paused:
            self._is_paused = is_busy
            if is_busy:
                self._process.pauseProducing()
            else:
                self._process.resumeProducing()
        if self._has_stdout_ended and not is_busy and not self.output_ended.is_set:
            if self._flush is not None:
                self._flush.cancel()
                self._flush = None
            stdout.finish()
            self.output_ended.set_value(None)

    def _take_turn(self) -> None:
        """Parse on, or read the file that stdout names."""
        self._turn = None
        wanted = self._stdout.parser.awaited_file
        if wanted is None:
            self._parse(self._stdout.parse_pending)
        else:
            self._is_reading = True
            Deferred.fromCoroutine(self._read_file(wanted))

    def _flush_partial_line(self) -> None:
        self._flush = None
        self._parse(self._stdout.flush_partial_line)

    async def _read_file(self, wanted: FileReference) -> None:
        threads = self._context.worker_threads
        try:
            content = await self._read_referenced_file(wanted.path)
            await threads.run_in_thread(self._stdout.store_referenced_file, content)
        except Exception as error:  # noqa: BLE001  (whatever the defect is)
            step: Callable[[], object] = Failure(error).raiseException
        else:
            step = partial(self._stdout.supply_or_refuse_file, content)
        self._is_reading = False
        self._parse(step)

    async def _read_referenced_file(self, path: str) -> bytes | str:
        """Return the content of a file that stdout names, or why it is refused."""
        try:
            content = await self._read_evaluator_file(path)
        except EvaluatorFileRefused as error:
            return str(error)
        size = compute_base64_size(len(content))
        if self._count_output_within_limit(size) < size:
            return f"{path!r} exceeds the rest of limits.output"
        return content

    async def _read_evaluator_file(self, path: str) -> bytes:
        sandboxed, directory = self.sandboxed, self._details.request.directory

        def read() -> bytes:
            return sandboxed.workspace.read_file(
                path,
                sandboxed.workspace.locate_working_directory(directory, self.checkout.path),
                MAX_SENT_FILE_BYTES,
                sandboxed.workspace_view,
            )

        return await self._context.worker_threads.run_in_thread(read)

    # The end

    def processExited(self, reason: Failure) -> None:
        """Kill the processes that the evaluator has left."""
        self._stop_clock()
        if self._kill is not None and self._kill.active():
            self._kill.cancel()
        Deferred.fromCoroutine(self._end_tree())

    async def _end_tree(self) -> None:
        """Kill what the evaluator has left, or leave it to the clean-up (`SandboxedRun.close`)."""
        try:
            await self.sandboxed.kill_remaining_processes()
        except OSError as error:  # such as a lack of descriptors; the clean-up is repeated
            words = "{evaluation}: its processes are left to the clean-up: {error}"
            log.error(words, evaluation=self._details.log_name, error=error)  # noqa: TRY400
        finally:
            self._tree_ended.set_value(None)
            self._process.read_remaining_output()

    def processEnded(self, reason: Failure) -> None:
        """Interpret the exit; all output has been read."""
        value = reason.value
        status, number = 0, None
        if isinstance(value, ProcessTerminated):
            status, number = value.exitCode, value.signal
        Deferred.fromCoroutine(self._conclude(status, number))

    async def _conclude(self, status: int | None, number: int | None) -> None:
        await self._tree_ended.wait()
        await self.output_ended.wait()
        limits = self.sandboxed.run_limits
        if self._process.lost_reason is not None and self.failure is None:
            # Its output may not have been stored because it has filled the disk itself.
            self.failure = await self._ask(limits.find_limit_failure, True) or EvaluationFailure(
                "lost", f"the evaluator was lost: {self._process.lost_reason}"
            )
        try:
            self.exit_status = self.sandboxed.interpret_exit(status, number)
        except EvaluationFailure as error:
            # The limits of the run may be too low for the sandbox itself.
            over = self.failure or await self._ask(limits.find_limit_failure, True)
            self.failure = over or self._with_stderr(error)
        except OSError as error:  # such as EMFILE; the run has to end
            words = "{evaluation}: the evaluator's exit cannot be read: {error}"
            log.error(words, evaluation=self._details.log_name, error=error)  # noqa: TRY400
            what = f"the daemon could not read how the evaluator has ended: {error.strerror}"
            self.failure = self.failure or EvaluationFailure("lost", what)
        waited = self._process.resource_usage
        self.usage = await self._ask(limits.read_usage, waited) or self.usage
        if self.usage.cpu_seconds is None and waited is not None:  # no cgroup counts it
            self.usage = attrs.evolve(self.usage, cpu_seconds=waited.ru_utime + waited.ru_stime)
        if self.failure is None and self.exit_status == EvaluatorExit(0):
            self.failure = limits.find_node_limit_failure() or self._check_cpu()
        elif self.failure is None and self.exit_status is not None:
            self.failure = await self._ask(limits.find_limit_failure, True)
            if self.failure is None:
                hint = await self._ask(
                    find_command_hint,
                    self._details.request.evaluator_cmd,
                    self.checkout.path,
                    self._details.request.directory,
                    self.exit_status.status or 0,
                    self.stderr_text,
                )
                self.failure = self._explain_exit(self.exit_status, hint or "")
        self._unwatch_limits()
        self.run_ended.set_value(self)

    async def _ask(self, question: Callable[..., T], *arguments: Any) -> T | None:
        """Return the answer of a blocking function; None if it raises, for the run has to end."""
        try:
            return await self._context.worker_threads.run_in_thread(question, *arguments)
        except OSError as error:
            words = "{evaluation}: {question} of a run failed: {error}"
            log.error(  # noqa: TRY400  (no defect: no traceback)
                words,
                evaluation=self._details.log_name,
                question=question.__name__,
                error=error,
            )
            return None
        except Exception:  # noqa: BLE001
            log.failure("defect: {question} of a run failed", question=question.__name__)
            return None

    @property
    def stderr_text(self) -> str:
        """The tail of stderr, as text."""
        return self.result.stderr_text

    def make_row(self, handed_to_next_daemon_at: float | None) -> RunRow:
        """Return what another process of the daemon needs to go on with the run."""
        return RunRow(
            self._process.pid,
            self._process.start_time_ticks,
            str(self.checkout.path),
            self.deadline,
            handed_to_next_daemon_at,
            self.sandboxed.make_resume_data(),
        )

    @property
    def result(self) -> RunResult:
        """The result so far."""
        return RunResult(self.exit_status, self.usage, self._stderr)

    def _with_stderr(self, error: EvaluationFailure) -> EvaluationFailure:
        return attrs.evolve(
            error, extra_members={**error.extra_members, "stderr": self.stderr_text}
        )

    def _check_cpu(self) -> EvaluationFailure | None:
        """Return the error of a run whose processor time, as measured in the end, is too much."""
        limits = self.sandboxed.limits
        over = (self.usage.cpu_seconds or 0) > limits.cpu
        return build_cpu_limit_failure(limits) if over else None

    def _explain_exit(self, end: EvaluatorExit, command_hint: str) -> EvaluationFailure:
        """Return the failure for a bad exit, which may come from a limit of one process."""
        limits, number, status = self.sandboxed.limits, end.signal, end.status
        if over := self._check_cpu():
            return over
        message = explain_exit(
            end,
            self.stderr_text,
            limits,
            has_network=self.sandboxed.has_network,
            has_output=bool(self._output_bytes or self._stderr_bytes),
            command_hint=command_hint,
        )
        members = {"status": status or 0} if number is None else {"signal": number}
        return self._with_stderr(EvaluationFailure("exit", message, members))


# What programs and libraries write to stderr, in any language's runtime, by the setting that is the
# likely reason.
_STDERR = {
    "sandbox.network": re.compile(
        "name or service not known|name resolution|could not resolve|network is unreachable|"
        "no address associated with hostname|eai_again|getaddrinfo|unknownhostexception"
        "|no such host",
        re.IGNORECASE,
    ),
    "limits.memory": re.compile(
        "memoryerror|bad_alloc|outofmemoryerror|out of memory|cannot allocate memory|^killed$"
        "|: killed",
        re.IGNORECASE | re.MULTILINE,
    ),
    "limits.file_size": re.compile("file too large|file size limit exceeded", re.IGNORECASE),
    "limits.processes": re.compile(
        r"can't start new thread|cannot fork|fork: |unable to create thread|spawn \S{1,80} eagain",
        re.IGNORECASE,
    ),
    "limits.open_files": re.compile("too many open files", re.IGNORECASE),
    "limits.disk": re.compile("no space left on device|disk quota exceeded", re.IGNORECASE),
}
_HINTS = {
    "sandbox.network": "the sandbox has no network (sandbox.network)",
    "limits.memory": "if memory ran out: the limit is {memory} (limits.memory)",
    "limits.file_size": "the limit of a file is {file_size} (limits.file_size)",
    "limits.processes": "the limit is {limits.processes} processes and threads (limits.processes),"
    " and their stacks need limits.memory",
    "limits.open_files": "the limit is {limits.open_files} open files (limits.open_files)",
    "limits.disk": "the limit on the disk is {disk} (limits.disk)",
}
_SIGNALS: dict[int | None, str] = {
    signal.SIGKILL: "limits.memory",
    signal.SIGXFSZ: "limits.file_size",
}
_DENIED = re.compile("permission denied", re.IGNORECASE)
_MAX_NAME = 80  # characters of a file's name in a hint
_COMMAND_NOT_FOUND = re.compile("([\\w./+-]{1,80}): (?:command )?not found$", re.MULTILINE)
_WORD_END = re.compile(r"[\s:'\"]")
_CANNOT_EXECUTE, _NOT_FOUND = 126, 127  # exit statuses of shells


def explain_exit(
    evaluator_exit: EvaluatorExit,
    stderr: str,
    limits: LimitSettings,
    *,
    has_network: bool,
    has_output: bool,
    command_hint: str = "",
) -> str:
    """Return the message about a bad exit. `stderr` is the last part of stderr.

    `command_hint` is that of `find_command_hint`.
    """
    if evaluator_exit.signal is not None:
        name = signal.strsignal(evaluator_exit.signal)
        message = f"the evaluator was ended by signal {evaluator_exit.signal} ({name})"
    else:
        message = f"the evaluator exited with status {evaluator_exit.status}"
    hint = command_hint or _find_hint(evaluator_exit, stderr, limits, has_network)
    if hint:
        return f"{message}; {hint}"
    return message if has_output else f"{message}; it printed nothing"


def _find_hint(end: EvaluatorExit, stderr: str, limits: LimitSettings, has_network: bool) -> str:
    """Return the likely reason of a bad exit and its remedy; "" if none is known."""
    if end.status == _CANNOT_EXECUTE and len(parts := _DENIED.split(stderr)) > 1:
        name = _WORD_END.split(parts[0].removesuffix(": "))[-1]
        file = shlex.quote(name) if 0 < len(name) <= _MAX_NAME else "FILE"
        return (
            f"permission denied: run `chmod +x {file}`, or `git update-index --chmod=+x {file}`,"
            " and commit"
        )
    if end.status == _NOT_FOUND:
        names = _COMMAND_NOT_FOUND.findall(stderr)
        if names[-1:] == ["python"]:
            return "the command python was not found: write python3"
        what = f"the command {names[-1]}" if names else "a command"
        return f"{what} was not found: check its path, or ask the operator to install it"
    setting = _SIGNALS.get(end.signal, "")
    for name, pattern in _STDERR.items():
        is_excluded = name == "sandbox.network" and has_network
        if not setting and pattern.search(stderr) and not is_excluded:
            setting = name
    sizes = {name: format_size(getattr(limits, name)) for name in ("memory", "file_size", "disk")}
    return setting and _HINTS[setting].format(limits=limits, **sizes)


_HEAD_BYTES = 256
_MAX_WORDS = 50
_FILE_NAME = re.compile(r"(\./)?[\w.-]+(/[\w.-]+)*")
# How shells and env(1) show the end of a line of Windows, or what they make of it.
_CARRIAGE_RETURN = re.compile(r"\\r['\u2019]|\r: |[Ii]llegal option [^\r\n]{1,40}\r")
_SYNTAX_ERROR = re.compile("syntax error", re.IGNORECASE)


def find_command_hint(command: str, root: Path, directory: str, status: int, stderr: str) -> str:
    """Return the likely reason of a bad exit in the first lines of scripts; "" if none is known.

    `command` runs in `directory`, relative to `root`, which has the files. Blocks, hardly.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    for word in words[:_MAX_WORDS]:
        name = word.rstrip(";&|)")
        if _FILE_NAME.fullmatch(name):
            line = _read_first_line(root / directory / name, root)
            not_found = status == _NOT_FOUND and f"{name}: not found" in stderr
            not_found = not_found or f"{name}: command not found" in stderr
            said = _CARRIAGE_RETURN.search(stderr) or _SYNTAX_ERROR.search(stderr)
            if line.endswith(b"\r") and (said or not_found):
                return _explain_line_ends(name)
            if line.startswith(b"#!") and not_found and "/" in name:
                interpreter = line[2:].decode(errors="replace").strip()
                return (
                    f"{name} begins with #!{interpreter}, which is not installed here: change the"
                    " line, or ask the operator to install the program"
                )
    return _explain_line_ends("") if _CARRIAGE_RETURN.search(stderr) else ""


def _read_first_line(path: Path, root: Path) -> bytes:
    """Return the first line of a regular file below `root`, b"" without one or for a long line."""
    try:
        if path.resolve().is_relative_to(root):
            with open_regular_file(path.resolve()) as file:
                line, end, _ = file.read(_HEAD_BYTES).partition(b"\n")
                return line if end else b""
    except (OSError, RuntimeError):  # no file, another kind, links in a circle
        pass
    return b""


def _explain_line_ends(name: str) -> str:
    kind = f"*{Path(name).suffix or '.sh'}"
    return (
        f"{name or 'a script'} has the line ends of Windows (CRLF): run"
        rf" `sed -i 's/\r$//' {name or 'FILE'}`, add the line `{kind} text eol=lf` to"
        " .gitattributes, and commit"
    )
