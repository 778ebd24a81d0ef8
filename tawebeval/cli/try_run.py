"""One run of `tawebeval try`: its temporary directory, and the raw view of stdout."""

from __future__ import annotations

import codecs
import os
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
from twisted.internet.interfaces import IProcessTransport
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from tawebeval.cli.evaluate import Submission, show_seed
from tawebeval.cli.follow import DownloadDirectory, EventDisplay, warn_of_empty_stdout
from tawebeval.cli.hints import HintFinder, describe_usage
from tawebeval.cli.output import OutputError, Screen
from tawebeval.cli.runtime import (
    WRONG,
    Interrupted,
    compute_exit_status,
    handle_signals,
    report_failure,
)
from tawebeval.cli.try_evaluation import (
    CHECKOUT_NAME,
    NO_COMMIT,
    UPLOAD_NAME,
    LocalEnvironment,
    read_pages,
    write_upload,
)
from tawebeval.client import Text
from tawebeval.client.events import EvaluationError as ErrorEvent
from tawebeval.client.events import Event
from tawebeval.core.form import (
    EvaluationRequest,
    Repository,
    draw_seed,
    parse_environment_name,
)
from tawebeval.core.limits import parse_limits
from tawebeval.core.segi import Markers
from tawebeval.core.states import EvaluationState
from tawebeval.daemon.process_setup import reset_inherited_signals, use_monotonic_clock
from tawebeval.daemon.reload import read_configuration
from tawebeval.daemon.startup import check_environments, check_sandbox_readable_paths
from tawebeval.deferreds import FairQueue
from tawebeval.errors import ConfigurationError, EvaluationFailure, InvalidField
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.starting import enter_queue
from tawebeval.linux.cgroups import open_cgroups
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.privileges import drop_privileges, refuse_root
from tawebeval.linux.starter_client import StartedProgram
from tawebeval.linux.tailed_process import TailedProcess
from tawebeval.sandbox.overlay import WritableTrees

_WORDS = {
    "data_begin": "<<< data begins >>>",
    "data_end": "<<< data ends >>>",
    "file_begin": "<<< file begins >>>",
    "file_end": "<<< file ends >>>",
}


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
    times: bool,
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
                socket = place / "starter" / "socket"
                trees = RawOutputTrees(socket, screen) if raw else WritableTrees(socket)
                surroundings = LocalEnvironment.open(
                    configuration, root, place, cgroups, trees, reactor
                )
                drop_privileges()
            if configuration.sandbox.kind == "none":
                screen.show_message(
                    "warning: the evaluator runs without a sandbox (sandbox.kind = none)", "yellow"
                )
            show_seed(screen, drawn if seed is None else None)
            hint_finder = HintFinder(configuration, root, place / CHECKOUT_NAME, directory, chosen)
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
            evaluation = LocalEvaluation(
                request, surroundings, screen, folder, raw, hint_finder, times
            )
            return await evaluation.run()

    run_reactor(screen, work)


@attrs.frozen
class LocalEvaluation:
    """One evaluation without a daemon, and its output. `raw` shows stdout as it was printed.

    `times` is whether events have times.
    """

    _request: EvaluationRequest
    _environment: LocalEnvironment
    _screen: Screen
    _folder: DownloadDirectory | None
    _raw: bool
    _hint_finder: HintFinder
    _times: bool

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

        unread: OutputError | None = None
        last: Event | None = None

        def show(event: Event) -> None:
            nonlocal last
            last = event
            if not self._raw or isinstance(event, ErrorEvent):
                self._screen.show_event(event)

        def on_unread(error: OutputError) -> None:
            nonlocal unread
            unread = error
            stop()

        def get_markers() -> Markers | None:
            stdout = evaluation.events.stdout
            return None if stdout is None else stdout.markers

        trees = self._environment.evaluation_context.sandbox.writable_trees
        if isinstance(trees, RawOutputTrees):
            trees.get_markers, trees.on_output_error = get_markers, on_unread
        enter_queue(evaluation, FairQueue(running=1, queued=0))
        try:
            with EventDisplay(self._screen, show, self._folder) as display:
                async for page in read_pages(evaluation, on_cancel, times=self._times):
                    if unread is not None:
                        break
                    display.show_page(page)
        finally:
            stop()  # stdout may have been lost
            while not evaluation.cleanup_event.is_set:
                try:
                    await evaluation.cleanup_event.wait()
                except CancelledError:
                    on_cancel()
        if unread is not None:
            raise unread
        if last is None:
            warn_of_empty_stdout(self._screen)
        error = last if isinstance(last, ErrorEvent) and last.final else None
        result = evaluation.details.run_result
        stderr = "" if result is None else result.stderr_text
        if stderr and (error is None or "stderr" not in error.members):
            self._screen.show_message("stderr:")
            self._screen.show_stderr(stderr)
        for hint in self._hint_finder.find_hints(error, stderr):
            self._screen.show_message(f"hint: {hint}", "yellow")
        self._show_usage(evaluation)
        return display.status

    def _show_usage(self, evaluation: Evaluation) -> None:
        result, times = evaluation.details.run_result, evaluation.details.state_times
        if result is not None and result.exit_status is not None:
            seconds = times["ended"] - times[EvaluationState.RUNNING.value]
            memory = evaluation.limits.memory
            self._screen.show_message(describe_usage(result.usage, seconds, memory))


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turn what would keep the daemon from starting into UsageError."""
    try:
        yield
    except (ConfigurationError, InvalidField) as error:
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


class OutputMarkerReplacer:
    """Replaces lines that are markers by words for people."""

    def __init__(self, markers: Markers) -> None:
        self._words: Mapping[bytes, bytes] = {
            getattr(markers, name): words.encode() for name, words in _WORDS.items()
        }
        self._held = b""  # a partial line that may become a marker
        self._fresh = True  # nothing of the current line was returned
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Take bytes of stdout; return the text to show."""
        shown = []
        *lines, last = (self._held + data).split(b"\n")
        for line in lines:
            shown.append((self._words.get(line, line) if self._fresh else line) + b"\n")
            self._fresh = True
        self._held = b""
        if self._fresh and any(marker.startswith(last) for marker in self._words):
            self._held = last
        elif last:
            shown.append(last)
            self._fresh = False
        return self._decoder.decode(b"".join(shown))

    def finish(self) -> str:
        """Return the rest of the text after the end of stdout."""
        held, self._held = self._held, b""
        return self._decoder.decode(held, final=True)


class RawOutputTrees(WritableTrees):
    """Starter of programs whose stdout is shown on a screen.

    `get_markers()` returns those of the evaluation, which are drawn before a program starts.
    `on_output_error(error)` is called when the screen cannot be written to.
    """

    def __init__(self, socket: Path, screen: Screen) -> None:
        super().__init__(socket)
        self.get_markers: Callable[[], Markers | None] = lambda: None
        self.on_output_error: Callable[[OutputError], object] = lambda error: None
        self._screen = screen

    def connect_program(
        self, protocol: ProcessProtocol, program: StartedProgram, stdout_offset: int = 0
    ) -> TailedProcess:
        """Let a program drive a protocol through an `OutputTeeProtocol`."""
        markers = self.get_markers()
        assert markers is not None, "nothing starts before they are drawn"
        shown = OutputTeeProtocol(
            protocol,
            OutputMarkerReplacer(markers),
            self._screen,
            lambda error: self.on_output_error(error),
        )
        return super().connect_program(shown, program, stdout_offset)


class OutputTeeProtocol(ProcessProtocol):
    """Shows the stdout of a process on a screen and passes all calls to `protocol`."""

    def __init__(
        self,
        protocol: ProcessProtocol,
        replacer: OutputMarkerReplacer,
        screen: Screen,
        on_unread: Callable[[OutputError], object],
    ) -> None:
        self._protocol = protocol
        self._replacer = replacer
        self._screen = screen
        self._on_unread = on_unread

    def makeConnection(self, process: IProcessTransport) -> None:
        """Pass the process on."""
        self._protocol.makeConnection(process)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        """Show data of stdout and pass all data on."""
        if childFD == 1:
            self._show(self._replacer.feed(data))
        self._protocol.childDataReceived(childFD, data)

    def childConnectionLost(self, childFD: int) -> None:
        """Show the rest of stdout and pass the end of a pipe on."""
        if childFD == 1:
            self._show(self._replacer.finish())
        self._protocol.childConnectionLost(childFD)

    def processExited(self, reason: Failure) -> None:
        """Pass the exit of the process on."""
        self._protocol.processExited(reason)

    def processEnded(self, reason: Failure) -> None:
        """Pass the end of the process and its pipes on."""
        self._protocol.processEnded(reason)

    def _show(self, text: str) -> None:
        if text:
            try:
                self._screen.show_event(Text(text))
                self._screen.flush()
            except OutputError as error:
                self._on_unread(error)


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
