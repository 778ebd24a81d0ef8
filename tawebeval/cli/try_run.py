"""One run of `tawebeval try`: its temporary directory, raw stdout, hint and usage."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import attrs
import click
from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from tawebeval.cli.evaluate import Submission, show_seed
from tawebeval.cli.follow import DownloadDirectory, EventDisplay, warn_of_empty_stdout
from tawebeval.cli.output import OutputError, Screen
from tawebeval.cli.runtime import (
    WRONG,
    Interrupted,
    compute_exit_status,
    handle_signals,
    report_failure,
)
from tawebeval.cli.try_evaluation import (
    NO_COMMIT,
    UPLOAD_NAME,
    LocalEnvironment,
    read_pages,
    write_upload,
)
from tawebeval.client import Text
from tawebeval.client.events import EvaluationError as ErrorEvent
from tawebeval.client.events import Event
from tawebeval.core.evaluations import EvaluationState
from tawebeval.core.form import (
    ChosenLimits,
    EvaluationRequest,
    Repository,
    draw_seed,
    parse_environment_name,
    parse_limits,
)
from tawebeval.daemon.reload import read_configuration
from tawebeval.daemon.startup import check_environments, check_sandbox_readable_paths
from tawebeval.daemon.tap import reset_inherited_signals, use_monotonic_clock
from tawebeval.deferreds import FairQueue
from tawebeval.errors import ConfigurationError, EvaluationFailure, InvalidField, format_size
from tawebeval.evaluations.eventlog import RecordedStdout
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.starting import enter_queue
from tawebeval.linux.cgroups import ResourceUsage, open_cgroups
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.privileges import drop_privileges, refuse_root
from tawebeval.sandbox.workspace import WritableTrees

_WORDS = {
    "data_begin": "<<< data begins >>>",
    "data_end": "<<< data ends >>>",
    "file_begin": "<<< file begins >>>",
    "file_end": "<<< file ends >>>",
}
_READ = 2**20  # bytes of stdout
_SETTING = re.compile(r"\(((limits|sandbox)\.(\w+))\)")


def run_try(
    screen: Screen,
    *,
    root: Path,
    fields: Submission,
    evaluator: str,
    directory: str | None,
    seed: int | None,
    environment: str | None,
    limits: Mapping[str, str],
    config: Path | None,
    raw: bool,
    folder: DownloadDirectory | None,
) -> NoReturn:
    """Run the evaluator, show its output, and exit with the status. Raises UsageError.

    The parameters are the arguments and options of the command.
    """
    drawn = draw_seed(os.urandom) if seed is None else seed
    directory = directory or ""
    with _usage_errors():
        refuse_root("tawebeval try")
        configuration = read_configuration(config)
        chosen = parse_limits(
            limits,
            configuration.limits.requestable_ranges,
            ", which the file of --config can raise",
        )
        environment = parse_environment_name(environment or "", configuration.environments)
        check_sandbox_readable_paths(configuration, config, os.environ)
        check_environments(configuration, config, os.environ)

    async def work(reactor: Any) -> int:
        with ExitStack() as made:
            cgroups = open_cgroups(f"try-{os.getpid()}")
            made.callback(cgroups.remove_all_cgroups)
            place = made.enter_context(make_temporary_directory())
            with _usage_errors():
                files = write_upload(fields, place / UPLOAD_NAME)
                trees = WritableTrees(place / "starter" / "socket")
                surroundings = LocalEnvironment.open(
                    configuration, root, place, cgroups, trees, reactor
                )
                drop_privileges()
            if configuration.sandbox.kind == "none":
                screen.show_message(
                    "warning: the evaluator runs without a sandbox (sandbox.kind = none)", "yellow"
                )
            show_seed(screen, drawn if seed is None else None)
            request = EvaluationRequest(
                Repository(Path(os.path.abspath(root)).as_uri()),
                NO_COMMIT,
                directory,
                evaluator,
                drawn,
                files,
                limits=chosen,
                environment=environment,
            )
            evaluation = LocalEvaluation(request, surroundings, screen, folder, raw)
            return await evaluation.run()

    run_reactor(screen, work)


@attrs.frozen
class LocalEvaluation:
    """One evaluation without a daemon, and its output. `raw` shows stdout as it was printed."""

    _request: EvaluationRequest
    _environment: LocalEnvironment
    _screen: Screen
    _folder: DownloadDirectory | None
    _raw: bool

    async def run(self) -> int:
        """Run the evaluation and return the exit status."""
        try:
            with self._environment.run_services():
                return await self._attend(self._environment.prepare_evaluation(self._request))
        except SystemExit as error:  # the sandbox does not work
            self._screen.show_message(str(error).removeprefix("tawebeval: "), "red")
            return WRONG

    async def _attend(self, evaluation: Evaluation) -> int:
        """Run an evaluation and show it. A cancellation stops it, and a second one kills it."""
        cancelled = False

        def stop() -> None:
            evaluation.stop(EvaluationFailure("cancelled", "the evaluation was cancelled"))

        def on_cancel() -> None:
            nonlocal cancelled
            stop()
            if cancelled and evaluation.run is not None:
                evaluation.run.kill()
            cancelled = True

        last: Event | None = None

        def show(event: Event) -> None:
            nonlocal last
            last = event
            if not self._raw or isinstance(event, ErrorEvent):
                self._screen.show_event(event)

        raw_output = RawOutput(self._screen) if self._raw else None
        enter_queue(evaluation, FairQueue(running=1, queued=0))
        try:
            with EventDisplay(self._screen, show, self._folder) as display:
                async for page in read_pages(evaluation, on_cancel):
                    if raw_output is not None:
                        raw_output.show_new_output(evaluation.events.stdout)
                    display.show_page(page)
                if raw_output is not None:
                    raw_output.show_new_output(evaluation.events.stdout, is_ended=True)
        finally:
            stop()  # stdout may have been lost
            while not evaluation.cleanup_event.is_set:
                try:
                    await evaluation.cleanup_event.wait()
                except CancelledError:
                    on_cancel()
        if last is None:
            warn_of_empty_stdout(self._screen)
        error = last if isinstance(last, ErrorEvent) and last.final else None
        result = evaluation.details.run_result
        stderr = "" if result is None else result.stderr_text
        if stderr and (error is None or "stderr" not in error.members):
            self._screen.show_message("stderr:")
            self._screen.show_stderr(stderr)
        if error is not None and (hint := find_hint(error.message, self._request.limits)):
            self._screen.show_message(f"hint: {hint}", "yellow")
        self._show_usage(evaluation)
        return display.status

    def _show_usage(self, evaluation: Evaluation) -> None:
        result, times = evaluation.details.run_result, evaluation.details.state_times
        if result is not None and result.exit_status is not None:
            seconds = times["ended"] - times[EvaluationState.RUNNING.value]
            memory = evaluation.limits.memory
            self._screen.show_message(describe_usage(result.usage, seconds, memory))


def find_hint(message: str, chosen: ChosenLimits) -> str:
    """Return how to change the setting that an error names, "" for none.

    `chosen` are the limits of --limit.
    """
    found = _SETTING.search(message)
    if found is None:
        return ""
    setting, section, name = found.groups()
    if section == "limits" and name in chosen:
        return f"to change {setting}, give another value by --limit {name}=VALUE"
    value = "true" if section == "sandbox" else "VALUE"
    return (
        f"to change {setting}, in the file of --config write [{section}] and below it"
        f" {name} = {value}"
    )


def describe_usage(usage: ResourceUsage, wall_seconds: float, memory_limit: int) -> str:
    """Return the time and peak memory of a `try`; `memory_limit` is limits.memory in bytes.

    A machine without cgroups measures neither processor time nor memory.
    """
    used = f"used {wall_seconds:.2f} s"
    if usage.cpu_seconds is not None:
        used += f", {usage.cpu_seconds:.2f} s of processor time"
    if usage.peak_memory_bytes is not None:
        return f"{used}, {format_size(usage.peak_memory_bytes)} of memory"
    return (
        f"{used}; limits.memory ({format_size(memory_limit)}) held for each process alone, but most"
        " servers count all processes together"
    )


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turn what would keep the daemon from starting into UsageError."""
    try:
        yield
    except (ConfigurationError, EvaluationFailure, InvalidField) as error:
        raise click.UsageError(str(error)) from None
    except SystemExit as error:
        raise click.UsageError(str(error).removeprefix("tawebeval: ")) from None


@contextmanager
def make_temporary_directory() -> Iterator[Path]:
    """Make a directory below TMPDIR for one `try`, and remove it at the end. Blocks.

    Raises OSError.
    """
    place = Path(tempfile.mkdtemp(prefix="tawebeval-try-")).resolve()
    try:
        yield place
    finally:
        remove_tree(place)


@attrs.define
class RawOutput:
    """An evaluator's stdout on a screen, as it was printed, with words for lines that are markers.

    A partial line, which may become a marker, is shown when it is complete.
    """

    _screen: Screen
    _shown: int = 0  # bytes

    def show_new_output(self, stdout: RecordedStdout | None, *, is_ended: bool = False) -> None:
        """Show what was parsed since the last call. Raises OutputError. Blocks briefly."""
        if stdout is None:
            return  # the evaluator has not started
        words = {getattr(stdout.markers, name): words.encode() for name, words in _WORDS.items()}
        while True:
            data = stdout.read_stdout(self._shown, min(stdout.stdout_bytes, self._shown + _READ))
            end = data.rfind(b"\n") + 1
            if len(data) == _READ:
                data = data[: end or _READ]
            elif not is_ended:
                data = data[:end]
            if not data:
                break
            self._shown += len(data)
            lines = [words.get(line, line) for line in data.split(b"\n")]
            self._screen.show_event(Text(b"\n".join(lines).decode("utf-8", "replace")))
        self._screen.flush()


def run_reactor(screen: Screen, work: Callable[[Any], Awaitable[int]]) -> NoReturn:
    """Run the reactor for `work(reactor)`, and exit with the status that it returns.

    Exceptions other than those of `await_exit_status` are raised.
    """
    # Imported late: it installs the reactor.
    from twisted.internet import reactor as installed

    reactor: Any = installed
    results: list[int | Failure] = []

    def begin() -> None:
        done = Deferred.fromCoroutine(await_exit_status(screen, work(reactor), reactor))
        done.addBoth(results.append).addBoth(lambda _: reactor.stop())

    use_monotonic_clock(reactor)
    reset_inherited_signals()
    reactor.callWhenRunning(begin)
    reactor.run(installSignalHandlers=False)
    (result,) = results
    if isinstance(result, Failure):
        result.raiseException()
    raise SystemExit(result)


async def await_exit_status(screen: Screen, work: Awaitable[int], reactor: Any) -> int:
    """Return the exit status of `work`; print why it failed.

    Each SIGINT, SIGTERM and SIGHUP cancels `work`, but a SIGHUP after another signal: the shell and
    the kernel may both send one.
    """
    received: list[int] = []

    async def whole() -> int:
        return await work

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number != signal.SIGHUP or len(received) == 1:
            reactor.callFromThread(lambda: deferred.cancel())

    with handle_signals(handle):
        deferred = Deferred.fromCoroutine(whole())
        try:
            status = await deferred
        except CancelledError:
            status = report_failure(Interrupted(), screen)
        except (OutputError, OSError) as error:
            status = report_failure(error, screen)
    return compute_exit_status(status, received)
