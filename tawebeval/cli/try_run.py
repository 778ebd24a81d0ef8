"""One run of `tawebeval try`: an ordinary evaluation of a copied directory, without a daemon."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeAlias

import attrs
import click
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from tawebeval.cli.follow import (
    DownloadDirectory,
    EventDisplay,
    show_drawn_seed,
    warn_of_empty_stdout,
)
from tawebeval.cli.options import SubmissionFields
from tawebeval.cli.output import Screen, StdoutWriteError
from tawebeval.cli.runtime import (
    WRONG,
    Interrupted,
    compute_exit_status,
    handle_signals,
    report_failure,
)
from tawebeval.config import MAX_TREE_FILES, Configuration
from tawebeval.core.evaluations import Checkout, Commit, EvaluationState
from tawebeval.core.events import EventMemory, make_page
from tawebeval.core.form import (
    ChosenLimits,
    EvaluationRequest,
    Repository,
    SubmissionFile,
    draw_seed,
    pack_request,
    parse_environment_name,
    parse_limits,
    parse_submission_file,
)
from tawebeval.daemon.configuration import check_sandbox_paths, read_configuration
from tawebeval.daemon.process import reset_inherited_signals, use_monotonic_clock
from tawebeval.deferreds import FairQueue, WorkerThreads
from tawebeval.errors import ConfigurationError, EvaluationFailure, InvalidField, format_size
from tawebeval.evaluations.context import (
    EvaluationContext,
    FixedCheckoutSource,
    make_unread_events_budget,
)
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.starting import admit_evaluation
from tawebeval.evaluations.store import EvaluationDetails
from tawebeval.git.fetch_limits import TreeLimits
from tawebeval.linux.cgroups import ResourceUsage, open_cgroups
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.privileges import check_user_and_locale, drop_capabilities
from tawebeval.sandbox.base import LimitMonitor
from tawebeval.sandbox.bubblewrap import write_sandbox_files
from tawebeval.sandbox.probe import check_sandbox_and_log_problems, open_sandbox
from tawebeval.sandbox.workspace import Workspace, WorkspaceLauncher
from tawebeval_client.events import Page, parse_page

NULL_COMMIT_OID = "0" * 40
"""The commit identifier of a working directory."""
CHECKOUT_NAME, UPLOAD_NAME = "checkout", "upload"
"""The names in a `scratch_directory`: of the copy of the working directory, and the submission."""

_THREADS = 3  # two of them poll limits


def copy_working_tree(root: Path, scratch_directory: Path, limits: TreeLimits) -> Checkout:
    """Copy a working directory into `scratch_directory`. Blocks. Raises: EvaluationFailure.

    It leaves out `.git`, `scratch_directory` itself if it is below `root`, and sockets, pipes and
    devices, which no commit has.
    """
    target = scratch_directory / CHECKOUT_NAME
    files = size = 0
    try:
        target.mkdir(parents=True)
        for source, status in _walk(root, scratch_directory):
            copy, mode = target / source.relative_to(root), status.st_mode
            files += 1
            size += status.st_size if stat.S_ISREG(mode) else 0
            limits.check_tree(files, size)
            if stat.S_ISLNK(mode):
                copy.symlink_to(os.readlink(source))
            elif stat.S_ISDIR(mode):
                copy.mkdir()
            elif stat.S_ISREG(mode):
                shutil.copy2(source, copy)
    except OSError as error:
        raise EvaluationFailure(
            "repository", f"{error.filename} cannot be copied: {error.strerror}"
        ) from None
    return Checkout(Commit(NULL_COMMIT_OID, NULL_COMMIT_OID, files, size), target, lambda: None)


def _walk(root: Path, left_out: Path | None) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield all that is below a directory, but `.git` and `left_out`. Blocks. Raises: OSError."""
    for folder, directories, names in os.walk(root, onerror=_raise):
        parent = Path(folder)
        directories[:] = [
            name for name in directories if parent / name not in (root / ".git", left_out)
        ]
        for path in (parent / name for name in (*directories, *names)):
            yield path, path.lstat()


def _raise(error: OSError) -> None:
    raise error


_POLL = 0.5  # seconds between looks at the files of --watch
# Editors write them while they save a file, or keep them beside an unsaved one.
_TEMPORARY = re.compile(r"\.#|#.*#$|4913$|\.goutputstream-|.*(~|\.sw.|\.tmp)$")

DirectorySnapshot: TypeAlias = dict[Path, tuple[int, int, int]]
"""Files, and what changes when they do; empty while they cannot be listed."""


def take_directory_snapshot(
    root: Path, fields: SubmissionFields, left_out: Path | None
) -> DirectorySnapshot:
    """Return what is below `root`, and the files of a submission. Blocks.

    `left_out` is a directory that is of no interest. What is not copied counts, too.
    """
    try:
        found = [(path, status) for path, status in _walk(root, left_out)]
        files = (path for path in fields.values() if isinstance(path, Path))
        found += [(path, path.stat()) for path in files if path.exists()]
    except OSError:
        return {}
    return {
        path: (status.st_ino, status.st_size, status.st_mtime_ns)
        for path, status in found
        if not stat.S_ISDIR(status.st_mode) and not _TEMPORARY.match(path.name)
    }


async def wait_for_file_change(
    reactor: Any, take: Callable[[], DirectorySnapshot], seen: DirectorySnapshot
) -> list[str]:
    """Return names of what has changed since a snapshot, when nothing changes any more."""
    before, now = seen, take()
    while before != now or now == seen:
        await deferLater(reactor, _POLL)
        before, now = now, take()
    return sorted({path.name for path, _ in seen.items() ^ now.items()})


def write_upload_files(submission: SubmissionFields, folder: Path) -> tuple[SubmissionFile, ...]:
    """Write the files of a submission as an upload would lie in `folder`. Blocks.

    Raises OSError.
    """
    files = []
    for field, content in submission.items():
        name = content.name if isinstance(content, Path) else None
        file = parse_submission_file(f"submission[{field}]", name)
        assert file is not None, "a field of the submission"
        path = folder / "submission" / file.field / file.filename
        if isinstance(content, Path):
            content = content.read_bytes()
        path.parent.mkdir(parents=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        files.append(file)
    return tuple(files)


async def read_event_pages(
    evaluation: Evaluation, on_cancel: Callable[[], object]
) -> AsyncIterator[Page]:
    """Yield the pages of an evaluation as a client would get them; the next one acknowledges.

    A cancellation calls `on_cancel`, and reading goes on.
    """
    after: str | None = None
    events, limit = evaluation.events, 2**16
    while True:
        begin = int(after or 0)
        batch = await events.read(begin, limit)
        page = make_page(events.event_log, after, batch)
        if page.events.count:
            yield parse_page(page.encode_json(), after)
            events.acknowledge(begin + page.events.count)
        if page.is_last_page:
            return
        after = page.end_cursor
        if not page.events.count:
            try:
                await events.reader_wakeup_condition.wait()
            except CancelledError:
                on_cancel()


@attrs.frozen
class LocalEvaluationOptions:
    """What the evaluations of one command have in common; made by `check_local_options`."""

    root: Path
    configuration: Configuration
    directory: str
    environment_name: str | None
    limits: ChosenLimits


def check_local_options(
    command: str,
    *,
    root: Path,
    config: Path | None,
    directory: str | None = None,
    environment: str | None = None,
    limits: Mapping[str, str],
) -> LocalEvaluationOptions:
    """Check the options of a command that evaluates here. Raises UsageError."""
    with _usage_errors():
        check_user_and_locale(f"tawebeval {command}")
        configuration = read_configuration(config)
        chosen = parse_limits(limits, configuration.limits.requestable_ranges)
        name = parse_environment_name(environment or "", configuration.environments)
        check_sandbox_paths(configuration, config, os.environ)
    return LocalEvaluationOptions(root, configuration, directory or "", name, chosen)


@attrs.frozen
class LocalEvaluationFactory:
    """Makes evaluations of a copied directory; made by `open_evaluation_factory`."""

    _local_options: LocalEvaluationOptions
    _context: EvaluationContext
    scratch_directory: Path
    """The directory with the copy, the submissions and the evaluations."""

    def make_evaluation(
        self,
        name: str,
        evaluator: str,
        seed: int,
        files: tuple[SubmissionFile, ...],
        problem: str | None = None,
    ) -> Evaluation:
        """Return an evaluation of files that `write_upload_files` wrote to the directory `name`.

        `problem` is one of the configuration, whose `build` is used.
        """
        local = self._local_options
        request = EvaluationRequest(
            Repository(Path(os.path.abspath(local.root)).as_uri()),
            NULL_COMMIT_OID,
            local.directory,
            evaluator,
            seed,
            files,
            limits=local.limits,
            environment_name=local.environment_name,
            problem_name=problem,
            build_command="" if problem is None else local.configuration.problems[problem].build,
        )
        sent = self.scratch_directory / name
        details = EvaluationDetails(name, pack_request(request), seed, upload_directory=sent)
        return Evaluation(
            details, Workspace(self.scratch_directory / f"{name}-evaluation"), self._context
        )


@contextmanager
def open_evaluation_factory(
    local_options: LocalEvaluationOptions,
    screen: Screen,
    reactor: Any,
    write_files: Callable[[Path], object],
) -> Iterator[LocalEvaluationFactory]:
    """Copy the directory, and start threads and sandbox; remove all at the end. Blocks.

    `write_files(scratch_directory)` writes submissions before privileges are dropped. Raises:
    UsageError; SystemExit, if the sandbox does not work.
    """
    configuration = local_options.configuration
    with ExitStack() as made:
        cgroups = open_cgroups(f"try-{os.getpid()}")
        made.callback(cgroups.remove_all_cgroups)
        scratch_directory = Path(tempfile.mkdtemp(prefix="tawebeval-try-")).resolve()
        made.callback(remove_tree, scratch_directory)
        accounts = scratch_directory / "accounts"
        threads = WorkerThreads.create(reactor, _THREADS, "work")
        launcher = WorkspaceLauncher(scratch_directory / "starter" / "socket")
        tree_limits = TreeLimits(MAX_TREE_FILES, configuration.repositories.tree_bytes)
        with _usage_errors():
            write_files(scratch_directory)
            checkout = copy_working_tree(local_options.root, scratch_directory, tree_limits)
            context = EvaluationContext(
                configuration=configuration,
                clock=reactor,
                generate_random_bytes=os.urandom,
                worker_threads=threads,
                checkout_source=FixedCheckoutSource(checkout, tree_limits.check_tree),
                sandbox=open_sandbox(configuration, accounts, cgroups, launcher),
                limit_monitor=LimitMonitor(reactor, threads, threads),
                event_memory=EventMemory(configuration.buffers.total),
                unread_events_budget=make_unread_events_budget(configuration.buffers.disk),
            )
            drop_capabilities()
        if configuration.sandbox.kind == "none":
            screen.show_message(
                "warning: the evaluator runs without a sandbox (sandbox.kind = none)", "yellow"
            )
        accounts.mkdir()
        write_sandbox_files(accounts)
        check_sandbox_and_log_problems(context.sandbox)
        made.callback(context.sandbox.close)
        threads.start()
        made.callback(threads.stop)
        launcher.attach_reactor(reactor, threads.run_in_thread, lambda: None)
        yield LocalEvaluationFactory(local_options, context, scratch_directory)


def run_try(
    screen: Screen,
    *,
    fields: SubmissionFields,
    evaluator: str,
    seed: int | None,
    folder: DownloadDirectory | None,
    watch: bool = False,
    **options: Any,
) -> NoReturn:
    """Run the evaluator, show its output, and exit with the status. Raises UsageError.

    The parameters are the arguments and options of the command; `options` are those of
    `check_local_options`.
    """
    drawn = draw_seed(os.urandom) if seed is None else seed
    local_options = check_local_options("try", **options)
    saved = None
    if folder is not None:
        root, target = os.path.realpath(local_options.root), os.path.realpath(folder.path)
        if watch and root == target:
            raise click.UsageError("--watch: what --files saves would change DIRECTORY")
        saved = local_options.root / os.path.relpath(target, root)  # the root may be relative

    async def try_once(reactor: Any) -> tuple[int, bool]:
        files: list[SubmissionFile] = []

        def write_files(scratch_directory: Path) -> None:
            files.extend(write_upload_files(fields, scratch_directory / UPLOAD_NAME))

        with open_evaluation_factory(local_options, screen, reactor, write_files) as factory:
            show_drawn_seed(screen, drawn if seed is None else None)
            evaluation = factory.make_evaluation(UPLOAD_NAME, evaluator, drawn, tuple(files))
            own = None if folder is None else DownloadDirectory(folder.path)
            return await _show_evaluation(evaluation, screen, own)

    async def watch_files(reactor: Any) -> int:
        take = partial(take_directory_snapshot, local_options.root, fields, saved)
        while True:
            seen = take()
            try:
                status, is_cancelled = await try_once(reactor)
            except (click.UsageError, OSError) as error:  # a file is missing, or refused
                words = str(error)
                if isinstance(error, OSError):
                    words = f"{error.filename}: {error.strerror}"
                screen.show_message(words, "red")
            else:
                if is_cancelled:
                    return status
            screen.show_message("waiting for a change of the files; Ctrl-C ends", "cyan")
            changed = await wait_for_file_change(reactor, take, seen)
            screen.show_message(f"changed: {', '.join(changed[:5])}", "cyan")

    async def work(reactor: Any) -> int:
        try:
            return await watch_files(reactor) if watch else (await try_once(reactor))[0]
        except SystemExit as error:  # the sandbox does not work
            screen.show_message(str(error).removeprefix("tawebeval: "), "red")
            return WRONG

    run_reactor(screen, work)


async def _show_evaluation(
    evaluation: Evaluation, screen: Screen, folder: DownloadDirectory | None
) -> tuple[int, bool]:
    """Run an evaluation and show it; return the exit status, and whether it was cancelled."""
    with EventDisplay(screen, folder) as display:
        if screen.can_show_progress:
            screen.show_progress("running")
        is_cancelled = await run_evaluation(evaluation, display.show_page)
    if display.last_event is None:
        warn_of_empty_stdout(screen)
    result, times = evaluation.details.run_result, evaluation.details.state_times
    if result is not None:
        error = display.final_error
        if result.stderr_text and (error is None or "stderr" not in error.members):
            screen.show_message("stderr:")
            screen.show_evaluator_stderr(result.stderr_text)
        if result.exit_status is not None:
            seconds = times["ended"] - times[EvaluationState.RUNNING.value]
            screen.show_message(
                describe_resource_usage(result.usage, seconds, evaluation.limits.memory)
            )
    return display.exit_status, is_cancelled


async def run_evaluation(evaluation: Evaluation, show_page: Callable[[Page], object]) -> bool:
    """Run an evaluation to its end; return whether it was cancelled.

    A cancellation stops the evaluation, and a second one kills it.
    """
    cancelled = False

    def stop() -> None:
        evaluation.stop(EvaluationFailure("cancelled", "the evaluation was cancelled"))

    def on_cancel() -> None:
        nonlocal cancelled
        stop()
        if cancelled and evaluation.run is not None:
            evaluation.run.kill()
        cancelled = True

    admit_evaluation(evaluation, FairQueue(running=1, queued=0))
    try:
        async for page in read_event_pages(evaluation, on_cancel):
            show_page(page)
    finally:
        stop()  # stdout may have been lost
        while not evaluation.cleanup_completion.is_set:
            try:
                await evaluation.cleanup_completion.wait()
            except CancelledError:
                on_cancel()
        await evaluation.events.discard_all_events()  # closes its files
    return cancelled


def describe_resource_usage(usage: ResourceUsage, wall_seconds: float, memory_limit: int) -> str:
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


def run_reactor(screen: Screen, work: Callable[[Any], Coroutine[Any, Any, int]]) -> NoReturn:
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


async def await_exit_status(screen: Screen, work: Coroutine[Any, Any, int], reactor: Any) -> int:
    """Return the exit status of `work`; print why it failed.

    Each SIGINT, SIGTERM and SIGHUP cancels `work`, but a SIGHUP after another signal: the shell and
    the kernel may both send one.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number != signal.SIGHUP or len(received) == 1:
            reactor.callFromThread(lambda: deferred.cancel())

    with handle_signals(handle):
        deferred = Deferred.fromCoroutine(work)
        try:
            status = await deferred
        except CancelledError:
            status = report_failure(Interrupted(), screen)
        except (StdoutWriteError, OSError) as error:
            status = report_failure(error, screen)
    return compute_exit_status(status, received)
