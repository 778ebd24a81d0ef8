"""Start of an evaluation: fetch, run slot, workspace, evaluator; and return to one that runs.

One coroutine leads to the start of the evaluator, another one (`lifecycle.end_evaluation`) from its
exit to the end, and none waits in between: a thousand evaluations may run at once.

Of the evaluations of an earlier process of the daemon, what waits runs, what has ended can be read,
and what runs goes on: its events are made again of the files in its directory, and its process is
found by the starter of evaluators. If that process is gone, the evaluation ends by its exit status,
or else as lost, after all that it has printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from tawebeval.config import Configuration, SlurmJobSettings
from tawebeval.core.evaluations import Checkout, Commit, EvaluationState
from tawebeval.core.events import EVENTS_LOST_ERROR, EventRing, StdoutChanged
from tawebeval.core.form import Repository, SubmissionFile
from tawebeval.core.segi import Markers
from tawebeval.deferreds import FairQueue, OneShotEvent
from tawebeval.errors import DiscardedCursor, EvaluationFailure
from tawebeval.evaluations.building import BuildPlan, build_tree, plan_build
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.eventlog import (
    RecordedStdout,
    has_batch_marks,
    read_ended_evaluation_events,
)
from tawebeval.evaluations.lifecycle import (
    Evaluation,
    end_evaluation,
    make_log_fields,
    run_evaluation_task,
)
from tawebeval.evaluations.run import Run
from tawebeval.evaluations.store import EvaluationDetails, RunRow
from tawebeval.sandbox.base import ResumableProcess, SandboxedRun, find_environment
from tawebeval.sandbox.workspace import Workspace, derive_directory_name

_DAMAGED_UPLOAD = EvaluationFailure(
    "lost", "the submission was damaged while the daemon was away; submit again"
)

log = Logger()


def admit_evaluation(evaluation: Evaluation, slots: FairQueue) -> None:
    """Let a new evaluation enter the queue, and run as soon as there is a slot."""
    details, context = evaluation.details, evaluation.context
    details.state_times.setdefault("created", evaluation.wall_clock.read())
    context.counters.record_admission()
    log.info(
        "{evaluation}: {state}; caller {caller!r}, commit {commit}", **make_log_fields(details)
    )
    start_evaluation(evaluation, slots)


def start_evaluation(evaluation: Evaluation, slots: FairQueue) -> None:
    """Fetch the commit, wait for a run slot and start the evaluator. On failure, end."""
    evaluation.slot_queue = slots
    start = _Start(evaluation, slots)
    startup = run_evaluation_task(evaluation, start.run())
    if evaluation.run is None and not evaluation.details.state.has_ended:
        start.startup = startup
        evaluation.cancel_start = start.cancel


def requeue_evaluation(evaluation: Evaluation, slots: FairQueue) -> None:
    """Let an evaluation enter the queue again that an earlier process had not started. Blocks."""
    details, upload = evaluation.details, evaluation.details.upload_directory
    details.limits = details.environment = details.cluster_job = None
    # Of a run that could not be stored; another one would have other events.
    has_delivered_events = has_batch_marks(evaluation.workspace.output_directory)
    evaluation.events.has_lost_events = has_delivered_events
    with suppress(OSError):  # the start finds what is missing
        if upload is not None and not upload.exists() and evaluation.workspace.root.exists():
            evaluation.workspace.restore_uploaded_files(upload)
    if evaluation.stop_reason is not None:
        evaluation.events.has_events_to_restore = True
        run_evaluation_task(evaluation, end_evaluation(evaluation, evaluation.stop_reason))
    elif has_delivered_events:
        run_evaluation_task(evaluation, end_evaluation(evaluation, _LOST))
    elif upload is not None and upload.exists() and _is_damaged(upload, details.request.submission):
        run_evaluation_task(evaluation, end_evaluation(evaluation, _DAMAGED_UPLOAD))
    else:
        start_evaluation(evaluation, slots)


def _is_damaged(upload: Path, submission: Sequence[SubmissionFile]) -> bool:
    """Tell whether an uploaded file has another size than was received, as after a power cut."""
    try:
        return any(
            Workspace(upload).locate_submitted_file(file).stat().st_size != file.size
            for file in submission
            if file.size is not None
        )
    except OSError:
        return True


@attrs.define(eq=False)
class _Start:
    """The way of one evaluation to its run; `startup` is the Deferred of `run`."""

    _evaluation: Evaluation
    _slots: FairQueue
    startup: Deferred[None] | None = None
    _is_launching: bool = False

    def cancel(self) -> None:
        """Cancel the start, unless a thread starts the evaluator just now."""
        if self.startup is not None and not self._is_launching:
            self.startup.cancel()

    async def run(self) -> None:
        evaluation = self._evaluation
        try:
            await self._start()
        except EvaluationFailure as error:
            if error.reason == "build" and evaluation.details.request.has_restricted_token:
                error = attrs.evolve(error, extra_members={})  # it may quote secret files
            await end_evaluation(evaluation, error)
        except CancelledError:
            await end_evaluation(evaluation, evaluation.stop_reason)
        except OSError as error:
            # A path of the machine stays in the log. The error is no defect: no traceback.
            words = "{evaluation}: the evaluator could not be run: {error}"
            log.error(words, evaluation=evaluation.details.log_name, error=error)  # noqa: TRY400
            await end_evaluation(evaluation, _not_run(error.strerror))
        except Exception as error:  # noqa: BLE001  (a client learns of every end)
            log.failure(
                "{evaluation}: defect: the evaluator could not be run",
                evaluation=evaluation.details.log_name,
            )
            await end_evaluation(evaluation, _not_run(type(error).__name__))

    async def _start(self) -> None:
        evaluation, slots = self._evaluation, self._slots
        details, context = evaluation.details, evaluation.context
        source = context.checkout_source
        if source.checkout_needs_network(*self._checkout_arguments()):
            slots.reserve_queue_place(details.identifier, details.caller)
            await self._fetch()
        await self._wait_for_slot()
        await self._resolve_branch()
        checkout = evaluation.checkout = await source.check_out_commit(*self._checkout_arguments())
        details.set_commit(checkout.commit)
        self._fix_environment()
        checkout = await self._use_build(checkout)
        if evaluation.handed_to_next_daemon_at is not None:
            return  # the next process of the daemon starts it
        details.limits = evaluation.limits
        sandboxed = make_sandboxed_run(evaluation, checkout)
        markers = Markers.generate(context.generate_random_bytes)
        self._is_launching = True  # no cancelling from here on: the child would be lost
        run, started = await context.worker_threads.run_in_thread(
            self.launch, sandboxed, checkout, markers
        )
        if sandboxed.has_external_queue:
            await self._wait_for_begin(sandboxed, started)
        self._connect(run, started)

    def _checkout_arguments(self) -> tuple[Repository, str, str]:
        """Return the arguments of `check_out_commit`, unpacked each time: a small queue."""
        request = self._evaluation.details.request
        return request.repository, request.commit_oid, self._evaluation.details.caller

    async def _resolve_branch(self) -> None:
        """Put the newest commit of the branch into a request without a commit."""
        details = self._evaluation.details
        request = details.request
        if not request.commit_oid:
            source = self._evaluation.context.checkout_source
            details.set_request_commit_oid(
                await source.resolve_branch(request.repository, details.caller)
            )
            log.info(
                "{evaluation}: branch {branch} is commit {commit}",
                branch=request.repository.branch,
                **make_log_fields(details),
            )

    async def _fetch(self) -> None:
        """Fetch the commit into the cache before there is a run slot.

        Until then the evaluation counts against the caller's share of fetches.
        """
        details, context = self._evaluation.details, self._evaluation.context
        await context.fetch_slots.acquire_slot(details.identifier, details.caller)
        self._evaluation.enter_state(EvaluationState.FETCHING)
        await self._resolve_branch()
        checkout = await context.checkout_source.check_out_commit(*self._checkout_arguments())
        details.set_commit(checkout.commit)
        checkout.release()  # a queued evaluation pins nothing in the cache
        # After a failure the end of the evaluation gives it back.
        context.fetch_slots.release_slot_keep_quota(details.identifier)

    async def _wait_for_slot(self) -> None:
        """Wait for a run slot; in the queue, too, while the caller's events leave no room."""
        evaluation, details = self._evaluation, self._evaluation.details
        context, slots = evaluation.context, self._slots
        slot = slots.acquire_slot(details.identifier, details.caller)
        if details.state is EvaluationState.FETCHING and not slot.called:
            evaluation.enter_state(EvaluationState.QUEUED)
        await slot
        # Others that have run meanwhile may have printed more than the caller's part.
        while not _has_room_for_events(context, details.caller):
            self._return_to_queue()
            log.info(
                "{evaluation}: waits until events of the caller are read (buffers.disk,"
                " buffers.total)",
                **make_log_fields(details),
            )
            while not _has_room_for_events(context, details.caller):
                await context.event_room_condition.wait()
            await slots.acquire_slot(details.identifier, details.caller)
        context.fetch_slots.release_slot(details.identifier)
        if details.state is EvaluationState.QUEUED:
            evaluation.enter_state(EvaluationState.FETCHING)

    def _return_to_queue(self) -> None:
        """Give the run slot back, and wait for another one without being ready for it."""
        details = self._evaluation.details
        self._slots.return_to_queue(details.identifier)
        if details.state is EvaluationState.FETCHING:
            self._evaluation.enter_state(EvaluationState.QUEUED)

    async def _use_build(self, checkout: Checkout) -> Checkout:
        """Return the checkout as the problem's build leaves it; the same one without a build.

        The first evaluation builds in its run slot. Others wait for it in the queue, without one.
        A queued evaluation pins nothing in the cache.
        """
        evaluation, context = self._evaluation, self._evaluation.context
        if not evaluation.details.request.build_command.strip():
            return checkout
        plan = plan_build(evaluation, checkout)
        while (built := context.checkout_source.find_build(checkout, plan.key)) is None:
            running = context.running_builds.get(plan.key)
            if running is None:
                built = await self._build(plan, checkout)
                break
            await deferLater(context.clock, 0)  # otherwise all who wait come here in one turn
            self._return_to_queue()
            evaluation.build_state, evaluation.checkout = "waiting", None
            checkout.release()
            try:
                failure = await running.wait()
            finally:
                evaluation.build_state = None
            if failure is not None:
                raise attrs.evolve(failure)
            await self._wait_for_slot()
            source, arguments = context.checkout_source, self._checkout_arguments()
            checkout = evaluation.checkout = await source.check_out_commit(*arguments)
        evaluation.checkout = built
        checkout.release()
        evaluation.details.set_commit(built.commit)
        return built

    async def _build(self, plan: BuildPlan, checkout: Checkout) -> Checkout:
        """Build and store a tree. Raises: EvaluationFailure, which others get that wait for it."""
        evaluation, context = self._evaluation, self._evaluation.context

        def start(build: Evaluation) -> None:
            start_evaluation(build, FairQueue(1))

        build = partial(build_tree, evaluation, plan, checkout, start)
        ended = context.running_builds[plan.key] = OneShotEvent()
        evaluation.build_state, failure, begin = "running", None, evaluation.wall_clock.read()
        try:
            return await context.checkout_source.store_build(checkout, plan.key, build)
        except EvaluationFailure as error:
            failure = error
            raise
        finally:
            evaluation.build_state = None
            del context.running_builds[plan.key]
            ended.set_value(failure)  # after a cancellation another one builds
            evaluation.record_phase("building", begin)

    def _fix_environment(self) -> None:
        """Keep the present environment. Raises: EvaluationFailure, if a reload has removed it."""
        details = self._evaluation.details
        name = details.request.environment_name
        try:
            details.environment = find_environment(self._evaluation.context.configuration, name)
        except KeyError:
            raise EvaluationFailure(
                "lost",
                f"the environment {name!r} was removed while the evaluation waited; submit again"
                " with another one",
                is_daemon_fault=False,
            ) from None

    def launch(
        self, sandboxed: SandboxedRun, checkout: Checkout, markers: Markers
    ) -> tuple[Run, Any]:
        """Create the workspace and start the evaluator. Blocks. Raises: EvaluationFailure, OSError.

        All blocking work is in this one call: each change of threads costs time.
        """
        evaluation, details = self._evaluation, self._evaluation.details
        workspace = evaluation.workspace
        assert details.upload_directory is not None, "only this method takes it"
        workspace.create_directories(details.upload_directory, sandboxed.workspace_view)
        details.upload_directory = None
        if details.should_keep_submission:
            workspace.request_file.write_bytes(details.pack_request_for_rerun())
        directory = workspace.locate_working_directory(details.request.directory, checkout.path)
        open_recorded_stdout(evaluation, markers)
        run = make_run(evaluation, checkout, sandboxed)
        if evaluation.stop_reason is not None:
            raise evaluation.stop_reason
        return run, run.start_process(directory)

    async def _wait_for_begin(self, sandboxed: SandboxedRun, started: Any) -> None:
        """Wait in the queue of a cluster, from which a stop takes the evaluation."""
        evaluation = self._evaluation
        evaluation.enter_state(EvaluationState.QUEUED)
        waiting = Deferred.fromCoroutine(sandboxed.wait_for_evaluator_start(started))
        self._is_launching = False
        if evaluation.stop_reason is not None:  # while srun was started
            waiting.cancel()
        await waiting
        self._is_launching = True
        evaluation.enter_state(EvaluationState.FETCHING)

    def _connect(self, run: Run, started: Any) -> None:
        """Connect the started evaluator to its run; kill it if `stop` was called meanwhile."""
        evaluation = self._evaluation
        evaluation.cancel_start = None
        run.sandboxed.connect_process(run, started)
        evaluation.run = run
        evaluation.details.drop_start_only_fields()
        evaluation.enter_state(EvaluationState.RUNNING)
        supervise_run(evaluation, run)
        if evaluation.context.store is not None:
            # The next process of the daemon would begin a run again that has no row: its events
            # might be others.
            run.pause_stdout(evaluation.context.store.flush())
        if evaluation.stop_reason is not None:
            run.stop(evaluation.stop_reason)
            run.kill()  # no grace time: no client has seen it run


def _has_room_for_events(context: EvaluationContext, caller: str) -> bool:
    """Return whether a caller has not used up its parts of the disk and memory for events."""
    budgets = context.unread_events_budget, context.event_memory.pinned_budget
    return not any(budget.is_quota_used_up(caller) for budget in budgets)


def make_sandboxed_run(evaluation: Evaluation, checkout: Checkout) -> SandboxedRun:
    """Return the sandbox for the run, under the limits of the details."""
    details = evaluation.details
    sandboxed = evaluation.sandboxed_run = evaluation.context.sandbox.make_run(
        evaluation.workspace, checkout, evaluation.limits, details.environment
    )
    sandboxed.is_build = evaluation.on_tree_built is not None
    sandboxed.job_settings = _list_job_settings(evaluation.context.configuration, details)
    details.cluster_job = sandboxed.cluster_job
    return sandboxed


def _list_job_settings(
    configuration: Configuration, details: EvaluationDetails
) -> Sequence[SlurmJobSettings]:
    environment, problem = details.environment, details.request.problem_name
    chosen = (
        None if environment is None else configuration.environments.get(environment.name),
        None if problem is None else configuration.problems.get(problem),
    )
    return [each.runner for each in chosen if each is not None]


def open_recorded_stdout(evaluation: Evaluation, markers: Markers) -> RecordedStdout:
    """Open the files of the events of an evaluation. Blocks. Raises: OSError."""
    stdout = evaluation.events.stdout = RecordedStdout(
        evaluation.events.event_log,
        evaluation.context.open_event_files(evaluation.workspace.output_directory),
        markers,
        evaluation.wall_clock.read,
        max_output=evaluation.limits.output,
    )
    return stdout


def make_run(
    evaluation: Evaluation,
    checkout: Checkout,
    sandboxed: SandboxedRun,
    deadline: float | None = None,
) -> Run:
    """Return the run, after `open_recorded_stdout`, which is not connected to a process yet."""
    return Run(
        evaluation.context,
        evaluation.details,
        checkout,
        sandboxed,
        evaluation.events,
        evaluation.save,
        deadline,
    )


def supervise_run(evaluation: Evaluation, run: Run) -> None:
    """Lead a connected run to the end of its evaluation."""
    run.run_ended.add_callback(partial(_on_run_ended, evaluation))
    evaluation.save()


def _on_run_ended(evaluation: Evaluation, run: Run) -> None:
    if run.stderr_text:
        words = "{evaluation}: end of stderr: {stderr!r}"
        log.info(words, **make_log_fields(evaluation.details), stderr=run.stderr_text)
    evaluation.details.run_result = run.result
    run_evaluation_task(evaluation, end_evaluation(evaluation, run.failure))


def _not_run(why: str | None) -> EvaluationFailure:
    return EvaluationFailure("lost", f"the daemon could not run the evaluator: {why}")


ExistingCheckoutGetter = Callable[[Commit, Path], Checkout]
"""Function that returns a checkout that an evaluation uses already, by its path."""

_LOST = EvaluationFailure(
    "lost", "the evaluator could not go on after a restart of the daemon; submit again"
)
_NO_FILE = "the daemon was restarted before it could read the file"

_OTHER_RUNNER = EvaluationFailure(
    "lost",
    "the evaluator could not go on, since the operator has changed runner.kind; submit again",
    is_daemon_fault=False,
)


def restore_ended_evaluation_events(evaluation: Evaluation) -> None:
    """Make the events of an evaluation that has ended again. Blocks, hardly."""
    event_log, details = evaluation.events.event_log, evaluation.details
    reason: object = "the files have fewer events than the row"
    if details.segi_markers is not None:
        try:
            stdout = open_recorded_stdout(evaluation, Markers(*details.segi_markers))
            stdout.restore_event_log(has_ended=True)
            stdout.drop_parser_input()
        except (StdoutChanged, OSError, ValueError) as error:
            reason = error
    # Otherwise the failure says already that events are lost, or none is.
    is_lost = event_log.end_cursor + evaluation.failure_event_batch.count < details.end_cursor
    if is_lost:
        words = "{evaluation}: events are lost: {reason!r}"
        log.error(words, evaluation=details.log_name, reason=reason)
        event_log.append_batch(EVENTS_LOST_ERROR, int(details.state_times["ended"] * 1000))
    elif event_log.end_cursor < details.end_cursor:
        evaluation.append_failure_event()
    event_log.mark_end()
    evaluation.events.has_lost_events = is_lost or details.has_lost_events
    _acknowledge_again(evaluation)


def read_all_events(evaluation: Evaluation) -> Iterator[EventRing]:
    """Yield all events of an evaluation that has ended, also discarded ones. Blocks.

    Raises: OSError; StdoutChanged; DiscardedCursor, if the files of discarded events are gone: a
    daemon without an archive has given them back.
    """
    details, event_log, cursor = evaluation.details, evaluation.events.event_log, 0
    final, time_ms = evaluation.failure_event_batch, int(details.state_times["ended"] * 1000)
    if evaluation.events.stdout is None:
        ring = EventRing()
        ring.append_batch(final, time_ms)
        yield ring
        return
    try:
        for ring in read_ended_evaluation_events(
            evaluation.workspace.output_directory,
            evaluation.events.stdout.segi_markers,
            final,
            time_ms,
            max_output=evaluation.limits.output,
            end_cursor=details.end_cursor,
        ):
            yield ring
            cursor = ring.end_cursor
    except StdoutChanged:
        if cursor < event_log.begin_cursor:
            raise DiscardedCursor(str(event_log.begin_cursor)) from None
        raise


def resume_run(
    evaluation: Evaluation, use_checkout_at: ExistingCheckoutGetter, slots: FairQueue
) -> None:
    """Go on with an evaluator that was started by another process of the daemon. Blocks, hardly.

    What keeps it from going on ends the evaluation.
    """
    evaluation.details.upload_directory = None
    evaluation.slot_queue = slots
    evaluation.events.has_events_to_restore = evaluation.is_resuming = True
    failure, stdout, name = _LOST, None, evaluation.details.log_name
    try:
        # The clean-up ends what a later failure leaves.
        commit, row = evaluation.details.commit, evaluation.details.run
        assert commit is not None, "checked out before the start"
        assert row is not None, "the evaluator runs"
        checkout = evaluation.checkout = use_checkout_at(commit, Path(row.checkout_path))
        sandboxed = make_sandboxed_run(evaluation, checkout)
        assert evaluation.details.segi_markers is not None, "made before the start"
        restored = open_recorded_stdout(evaluation, Markers(*evaluation.details.segi_markers))
        restored.restore_event_log()
        evaluation.wall_clock.advance(restored.read_last_batch_time())
        _acknowledge_again(evaluation)
        stdout = restored
        _connect(evaluation, row, checkout, sandboxed, stdout)
    except EvaluationFailure as error:
        failure = error
    except (StdoutChanged, OSError) as error:
        words = "{evaluation}: the evaluator cannot go on: {error!r}"
        log.error(words, evaluation=name, error=error)  # noqa: TRY400
    except Exception:  # noqa: BLE001  (a client learns of every end)
        log.failure("{evaluation}: defect: the evaluator cannot go on", evaluation=name)
    else:
        return
    evaluation.events.has_lost_events = failure is _LOST
    run_evaluation_task(evaluation, _fail(evaluation, stdout, failure))


async def _fail(
    evaluation: Evaluation, stdout: RecordedStdout | None, failure: EvaluationFailure
) -> None:
    """End the evaluation after all that it has printed, by a stop or with an error."""
    if stdout is not None:
        try:
            for _ in stdout.finish_without_files(_NO_FILE):
                await deferLater(evaluation.context.clock, 0)
        except (StdoutChanged, OSError) as error:
            words = "{evaluation}: its last events are lost: {error!r}"
            log.error(words, evaluation=evaluation.details.log_name, error=error)  # noqa: TRY400
    evaluation.is_resuming = False
    await end_evaluation(evaluation, evaluation.stop_reason or failure)


def _acknowledge_again(evaluation: Evaluation) -> None:
    event_log = evaluation.events.event_log
    event_log.acknowledge(min(evaluation.details.begin_cursor, event_log.end_cursor))
    evaluation.events.update_unread_bytes()


def _connect(
    evaluation: Evaluation,
    found: RunRow,
    checkout: Checkout,
    sandboxed: SandboxedRun,
    stdout: RecordedStdout,
) -> None:
    """Connect the process to a new run. Raises: EvaluationFailure, OSError."""
    if sandboxed.has_external_queue is not _is_on_cluster(found):
        raise _OTHER_RUNNER
    deadline = found.monotonic_deadline
    if deadline is not None and found.handed_to_next_daemon_at is not None:
        deadline += max(0.0, evaluation.context.clock.seconds() - found.handed_to_next_daemon_at)
    run = make_run(evaluation, checkout, sandboxed, deadline)
    left = ResumableProcess(
        found.sandbox_description, found.pid, found.start_time_ticks, stdout.stdout_bytes
    )
    sandboxed.resume_process(run, left)
    evaluation.run, evaluation.is_resuming = run, False
    # Its error may have been told, if the row of its end could not be stored.
    evaluation.events.has_events_to_restore = evaluation.stop_reason is not None
    supervise_run(evaluation, run)
    evaluation.events.free_discarded_files()  # not before: it stores a row
    run.parse_inherited_stdout()
    if evaluation.stop_reason is not None:
        run.stop(evaluation.stop_reason)


def _is_on_cluster(run: RunRow) -> bool:
    """Tell whether an evaluator ran on a node of Slurm, whatever `runner.kind` is now."""
    return run.sandbox_description.get("kind") == "slurm"


class InheritedResources:
    """What evaluations of an earlier process still need, by their rows.

    - `directory_names`: directories of evaluations, and of uploaded files.
    - `running_directory_names`, `cgroup_names`, `job_names`: directories, cgroups and jobs of Slurm
      of evaluators that run.
    """

    def __init__(self, rows: Sequence[EvaluationDetails] = ()) -> None:
        names = {row.identifier: derive_directory_name(row.identifier) for row in rows}
        runs = {row.identifier: row.run for row in rows if row.run is not None}
        descriptions = [run.sandbox_description for run in runs.values()]
        self.rows = rows
        self.directory_names = {
            names[row.identifier] for row in rows if not row.is_directory_removed
        }
        self.directory_names |= {row.upload_directory.name for row in rows if row.upload_directory}
        self.running_directory_names = {names[identifier] for identifier in runs}
        self.cgroup_names = {each["group"] for each in descriptions if each.get("group")}
        self.job_names = {
            run.sandbox_description["job_name"] for run in runs.values() if _is_on_cluster(run)
        }
