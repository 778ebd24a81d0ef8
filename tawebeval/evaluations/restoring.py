"""Evaluations of an earlier process of the daemon: rows of the store, and back again.

What waits runs, what has ended can be read, and what runs goes on: its events are made again of the
files in its directory, and its process is found by the starter of evaluators. If that process is
gone, the evaluation ends by its exit status, or else as lost, after all that it has printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
from twisted.internet.task import deferLater
from twisted.logger import Logger

from tawebeval.core.evaluations import Checkout, Commit, EvaluationState
from tawebeval.core.event_log import LOST_EVENT, EventRing, StdoutChanged
from tawebeval.core.events import EMPTY_BATCH, EventBatch
from tawebeval.core.results import ResultSummary
from tawebeval.core.segi import Markers
from tawebeval.deferreds import run_in_background
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.context import RunSlots
from tawebeval.evaluations.database import EvaluationRow, RunRow
from tawebeval.evaluations.details import EvaluationDetails
from tawebeval.evaluations.eventlog import RecordedStdout, read_ended_evaluation
from tawebeval.evaluations.lifecycle import Evaluation, conclude
from tawebeval.evaluations.starting import make_run, make_sandboxed_run, open_stdout, supervise
from tawebeval.sandbox.base import LeftProcess
from tawebeval.sandbox.workspace import derive_directory_name

ResumeCheckout = Callable[[Commit, Path], Checkout]
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

log = Logger()


def make_row(evaluation: Evaluation) -> EvaluationRow:
    """Return the row of an evaluation as it is now."""
    details, run, upload = evaluation.details, evaluation.run, evaluation.details.upload_directory
    share, results, stdout = details.shared_upload, details.result_summary, evaluation.events.stdout
    stop_reason = evaluation.stop_reason or (run.failure if run is not None else None)
    event_log = evaluation.events.log
    members = {
        **details.list_stored_members(),
        "state": details.last_visible_state,
        "failure": details.failure or evaluation.final_failure or stop_reason,
    }
    return EvaluationRow(
        **members,
        upload_directory=None if upload is None else upload.name,
        upload_size=0 if share is None else share.size,
        shared_upload_number=0 if share is None else share.upload_number,
        is_cleaned_up=evaluation.cleanup_event.is_set,
        is_forgotten=details.final_state is not None,
        packed_result_summary=b"" if results is None else results.pack(),
        markers=None if stdout is None else attrs.astuple(stdout.markers),
        run=None if run is None else _make_run_row(evaluation),
        begin_cursor=event_log.begin_cursor,
        end_cursor=event_log.end_cursor if event_log.has_ended else 0,
        has_lost_events=evaluation.events.has_lost_events,
    )


def _make_run_row(evaluation: Evaluation) -> RunRow:
    run = evaluation.run
    assert run is not None, "the evaluator runs"
    return RunRow(
        pid=run.main_pid,
        start_time=run.main_start_time,
        checkout_path=str(run.checkout.path),
        deadline=run.clock.deadline,
        left_at=evaluation.left_at,
        sandbox_description=run.sandboxed.launch.describe_for_resume(),
    )


def load_details(row: EvaluationRow, upload_directory: Path | None) -> EvaluationDetails:
    """Return the details in a row; the state is QUEUED for what waits or was being fetched."""
    members, results = row.list_stored_members(), row.packed_result_summary
    if not row.state.has_ended:
        members |= {"state": EvaluationState.QUEUED, "failure": None}
    return EvaluationDetails(
        **members,
        upload_directory=upload_directory,
        result_summary=ResultSummary.unpack(results) if results else None,
    )


def restore_events(evaluation: Evaluation, row: EvaluationRow) -> None:
    """Make the events of an evaluation that has ended again. Blocks, hardly."""
    event_log, details = evaluation.events.log, evaluation.details
    time_ms, is_lost = int(details.state_times["ended"] * 1000), False
    if row.markers is not None:
        try:
            stdout = open_stdout(evaluation, Markers(*row.markers))
            for _ in stdout.restore(has_ended=True):
                pass
            stdout.drop_parser()
        except (StdoutChanged, OSError, ValueError) as error:
            # Otherwise the failure says already that events are lost.
            is_lost = event_log.end_cursor + bool(row.failure_event) < row.end_cursor
            if is_lost:
                words = "{evaluation}: events are lost: {error!r}"
                log.error(words, evaluation=details.log_name, error=error)  # noqa: TRY400
                event_log.append_batch(LOST_EVENT, time_ms)
    if event_log.end_cursor < row.end_cursor and row.failure_event and not is_lost:
        event_log.append_batch(EventBatch(1, row.failure_event), time_ms)
    event_log.mark_end()
    evaluation.events.has_lost_events = is_lost or row.has_lost_events
    event_log.acknowledge(min(row.begin_cursor, event_log.end_cursor))
    evaluation.count_event_bytes()


def read_all_events(evaluation: Evaluation) -> Iterator[EventRing]:
    """Yield all events of an evaluation that has ended, also discarded ones. Blocks.

    Raises: OSError; StdoutChanged.
    """
    details = evaluation.details
    final = EventBatch(1, details.failure_event) if details.failure_event else EMPTY_BATCH
    time_ms = int(details.state_times["ended"] * 1000)
    if evaluation.events.stdout is None:
        ring = EventRing()
        ring.append_batch(final, time_ms)
        yield ring
        return
    yield from read_ended_evaluation(
        evaluation.workspace.output_directory,
        evaluation.events.stdout.markers,
        final,
        time_ms,
        max_output=evaluation.limits.output,
        end_cursor=evaluation.events.log.end_cursor,
    )


def resume_run(
    evaluation: Evaluation, row: EvaluationRow, resume_checkout: ResumeCheckout, slots: RunSlots
) -> None:
    """Go on with an evaluator that was started by another process of the daemon. Blocks, hardly.

    What keeps it from going on ends the evaluation.
    """
    evaluation.details.upload_directory = None
    evaluation.slots = slots
    evaluation.stop_reason = row.failure
    evaluation.details.state = EvaluationState.RUNNING
    evaluation.events.is_behind = evaluation.is_resuming = True
    name = evaluation.details.log_name
    stdout: RecordedStdout | None = None
    failure = _LOST
    try:
        _restore_sandbox(evaluation, row, resume_checkout)
        stdout = _restore_stdout(evaluation, row)
        _connect(evaluation, row, stdout)
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
    run_in_background(
        _fail(evaluation, stdout, failure),
        log,
        "{evaluation}: defect of the daemon",
        evaluation=name,
    )


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
    await conclude(evaluation, evaluation.stop_reason or failure)


def _restore_sandbox(
    evaluation: Evaluation, row: EvaluationRow, resume_checkout: ResumeCheckout
) -> None:
    """Find the checkout and the sandbox again: the clean-up ends what a later failure leaves."""
    commit = evaluation.details.commit
    assert commit is not None, "checked out before the start"
    assert row.run is not None, "the evaluator runs"
    evaluation.checkout = resume_checkout(commit, Path(row.run.checkout_path))
    make_sandboxed_run(evaluation, evaluation.checkout)


def _restore_stdout(evaluation: Evaluation, row: EvaluationRow) -> RecordedStdout:
    """Make the events again that the earlier process had. Raises: StdoutChanged, OSError."""
    events = evaluation.events
    assert row.markers is not None, "made before the start"
    stdout = open_stdout(evaluation, Markers(*row.markers))
    for _ in stdout.restore():
        pass
    events.log.acknowledge(min(row.begin_cursor, events.log.end_cursor))
    evaluation.count_event_bytes()
    if not stdout.stdout_bytes:
        stdout.close_files()  # a job that takes the place of a lost one has files of its own
    return stdout


def _connect(evaluation: Evaluation, row: EvaluationRow, stdout: RecordedStdout) -> None:
    """Connect the process to a new run. Raises: EvaluationFailure, OSError."""
    found, checkout, sandboxed = row.run, evaluation.checkout, evaluation.sandboxed
    assert found is not None, "the evaluator runs"
    assert checkout is not None, "found before"
    assert sandboxed is not None, "found before"
    if sandboxed.has_external_queue is not _is_on_cluster(found):
        raise _OTHER_RUNNER
    deadline = found.deadline
    if deadline is not None and found.left_at is not None:
        deadline += max(0.0, evaluation.context.clock.seconds() - found.left_at)
    run = make_run(evaluation, checkout, sandboxed, stdout, deadline)
    left = LeftProcess(found.sandbox_description, found.pid, found.start_time, stdout.stdout_bytes)
    sandboxed.launch.resume_process(run, left)
    evaluation.run, evaluation.is_resuming = run, False
    # Otherwise the error may have been told.
    evaluation.events.is_behind = evaluation.stop_reason is not None
    supervise(evaluation, run)
    evaluation.events.free_discarded_files()  # not before: it stores a row
    run.go_on()
    if evaluation.stop_reason is not None:
        run.stop(evaluation.stop_reason)


def _is_on_cluster(run: RunRow) -> bool:
    """Tell whether an evaluator ran on a node of Slurm, whatever `runner.kind` is now."""
    return run.sandbox_description.get("kind") == "slurm"


@attrs.frozen
class LeftEvaluations:
    """What evaluations of an earlier process still need, by their rows."""

    rows: Sequence[EvaluationRow] = ()

    @property
    def directory_names(self) -> set[str]:
        """The names of directories of evaluations."""
        return {derive_directory_name(row.identifier) for row in self.rows}

    @property
    def running_directory_names(self) -> set[str]:
        """The names of directories of evaluations that run."""
        return {derive_directory_name(row.identifier) for row in self.rows if row.run is not None}

    @property
    def upload_directory_names(self) -> set[str]:
        """The names of directories of uploaded files."""
        return {row.upload_directory for row in self.rows if row.upload_directory}

    @property
    def cgroup_names(self) -> set[str]:
        """The names of cgroups in which an evaluator runs."""
        groups = (run.sandbox_description.get("group") for run in self._runs)
        return {group for group in groups if group}

    @property
    def job_names(self) -> set[str]:
        """The names of jobs of Slurm in which an evaluator runs."""
        return {run.sandbox_description["job_name"] for run in self._runs if _is_on_cluster(run)}

    @property
    def _runs(self) -> list[RunRow]:
        return [row.run for row in self.rows if row.run is not None]
