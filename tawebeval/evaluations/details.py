"""What is known of one evaluation besides its events, and its lines in the log.

The log has a line for each state. The line begins with the evaluation's name in the log; its fields
are the caller, the commit, the state, and the seconds that the state before has lasted.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import msgspec

from tawebeval.config import LimitSettings
from tawebeval.core.evaluations import Commit, EvaluationState
from tawebeval.core.form import (
    EvaluationRequest,
    ProblemAndLabels,
    pack_request,
    unpack_problem_and_labels,
    unpack_request,
)
from tawebeval.core.results import ResultSummary
from tawebeval.core.text import take_tail
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import EvaluationFailure, format_size
from tawebeval.evaluations.uploads import SharedUpload
from tawebeval.linux.cgroups import ResourceUsage
from tawebeval.sandbox.base import Environment, EvaluatorExit, RunnerStatus
from tawebeval.sandbox.workspace import derive_log_pseudonym
from tawebeval.webhooks.callback import CallbackRecord

STDERR_TAIL_BYTES = 8 * 1024
"""Bytes of stderr that are kept, and bytes of UTF-8 that are shown (docs/evaluators.md)."""


@attrs.frozen
class RunResult:
    """Result of a run.

    `exit_status` is None if no evaluator ran. `stderr_tail` has at most `STDERR_TAIL_BYTES` bytes.
    `stray_marker_advice` is advice about a begin marker that was text, None for a run that has
    failed.
    """

    exit_status: EvaluatorExit | None
    usage: ResourceUsage
    stderr_tail: bytes = attrs.field(repr=False)
    stray_marker_advice: str | None = None

    @property
    def stderr_text(self) -> str:
        """The tail of stderr as text of at most `STDERR_TAIL_BYTES` bytes of UTF-8."""
        # U+FFFD is longer than the byte that it replaces.
        shown = self.stderr_tail.decode("utf-8", "replace").encode()
        return take_tail(shown, STDERR_TAIL_BYTES).decode()


class ArchivedRow(msgspec.Struct, omit_defaults=True):
    """The files of an evaluation in the archive: bytes on the disk, and number of events."""

    file_bytes: int
    event_count: int


@attrs.define(eq=False)
class StoredDetails:
    """Details of one evaluation that its row in the store has, too.

    - `packed_request`: the form, after the start without the fields that only a start needs. Text
      of callers and evaluators is kept as bytes, since a `str` may take four times as much.
    - `sequence_number`: the number in the order of acceptance by the registry.
    - `idempotency_key`: the `Idempotency-Key`, None without one; `form_digest`: the digest of the
      form with that key.
    - `should_keep_submission`: whether its files and its request are to be left in the workspace at
      the end; `has_kept_submission`: whether they are there.
    - `state_times`: when each state began, and the keys `created` and `ended`, in seconds since the
      epoch.
    - `clock_offset`: the time of day at acceptance less that of the boot clock, in seconds.
    - `limits`, `environment`: those of the run; None before the start.
    - `run_result`: set when the evaluator has ended.
    - `runner_status`: where the evaluator runs, None on this machine.
    - `failure`: the failure; in a row before the end, the reason of a stop. `failure_event`: its
      event, b"" without one.
    - `archived`: what the archive has of it, None without an archive or before.
    """

    identifier: str
    packed_request: bytes = attrs.field(repr=False)
    seed: int
    sequence_number: int = 0
    state: EvaluationState = EvaluationState.QUEUED
    caller: str = ANONYMOUS_CALLER
    state_times: dict[str, float] = attrs.field(factory=dict)
    clock_offset: float | None = None
    idempotency_key: str | None = None
    form_digest: bytes = b""
    should_keep_submission: bool = False
    has_kept_submission: bool = False
    callback: CallbackRecord | None = None
    commit: Commit | None = None
    limits: LimitSettings | None = None
    environment: Environment | None = None
    runner_status: RunnerStatus | None = None
    run_result: RunResult | None = None
    failure: EvaluationFailure | None = None
    failure_event: bytes = b""
    archived: ArchivedRow | None = None

    def list_stored_members(self) -> dict[str, Any]:
        """Return the members of this class by their names."""
        return {each.name: getattr(self, each.name) for each in attrs.fields(StoredDetails)}


@attrs.define(eq=False)
class EvaluationDetails(StoredDetails):
    """Details of one evaluation. Its `Evaluation` changes them, and all others read them.

    - `upload_directory`: the directory of the form's files, None once the workspace has them.
    - `shared_upload`: counts the bytes of the form's files; None without a registry.
    - `final_state`: DRAINED or EXPIRED once the registry has forgotten the evaluation.
    - `result_summary`: what the evaluator has reported, None before the start.
    - `event_bytes`: the bytes of events on the disk that count for the caller.
    - `is_row_deleted`: whether the store has no row of it any more.
    """

    upload_directory: Path | None = None
    shared_upload: SharedUpload | None = None
    final_state: EvaluationState | None = None
    result_summary: ResultSummary | None = None
    event_bytes: int = 0
    is_row_deleted: bool = False

    @property
    def last_visible_state(self) -> EvaluationState:
        """The state, or that in which it ended once only its identifier is left."""
        if self.state not in (EvaluationState.DRAINED, EvaluationState.EXPIRED):
            return self.state
        if self.failure is None:
            return EvaluationState.FINISHED
        cancelled = self.failure.reason == "cancelled"
        return EvaluationState.CANCELLED if cancelled else EvaluationState.FAILED

    @property
    def log_name(self) -> str:
        """Name in the log, from which the identifier cannot be guessed."""
        return derive_log_pseudonym(self.identifier)

    @property
    def request(self) -> EvaluationRequest:
        """The form; after the start without the fields that only a start needs."""
        return unpack_request(self.packed_request)

    @property
    def problem_and_labels(self) -> ProblemAndLabels:
        """What lists show of the request, decoded faster than the whole."""
        return unpack_problem_and_labels(self.packed_request)

    def drop_start_fields(self) -> None:
        """Drop the fields of the request that only a start needs."""
        self.packed_request = pack_request(self.request.drop_start_only_fields())

    def set_commit_oid(self, oid: str) -> None:
        """Put the newest commit of the branch into a request without a commit."""
        self.packed_request = pack_request(attrs.evolve(self.request, commit_oid=oid))

    def set_commit(self, commit: Commit) -> None:
        """Note the commit that was checked out; it replaces the OID of its tag in the request."""
        self.commit = commit
        if self.request.commit_oid != commit.oid:
            self.set_commit_oid(commit.oid)

    def pack_for_rerun(self) -> bytes:
        """Return the packed request with the seed in use; the callback was for this run."""
        return pack_request(attrs.evolve(self.request, seed=self.seed, callback_url=None))


_STEP = "{evaluation}: {state} after {after:.3f} s"
_LIMITS = "; limits: {wall_clock:g} s, {cpu} s of processor time, "
_PRINTED = "; {events} events"
_PROCESSOR = ", {cpu_seconds:.3f} s of processor time"


def make_log_fields(details: EvaluationDetails) -> dict[str, Any]:
    """Return the fields of each line."""
    request = details.request
    return {
        "evaluation": details.log_name,
        "caller": details.caller,
        "commit": request.commit_oid or f"refs/heads/{request.repository.branch}",
        "state": details.state.value,
    }


def format_state_line(
    details: EvaluationDetails, after: float, event_count: int
) -> tuple[str, dict[str, Any]]:
    """Return the format and the fields of the line about the present state.

    The state before has lasted `after` seconds. `event_count` is the number of events so far.
    """
    fields: dict[str, Any] = {**make_log_fields(details), "after": after}
    words = _STEP
    if details.state is EvaluationState.RUNNING and details.limits is not None:
        limits = details.limits
        words += _LIMITS + f"{format_size(limits.memory)} of memory"
        fields.update(wall_clock=limits.wall_clock, cpu=limits.cpu, memory=limits.memory)
    elif details.state in (
        EvaluationState.FINISHED,
        EvaluationState.FAILED,
        EvaluationState.CANCELLED,
    ):
        if details.failure is not None:
            words += ": {reason}: {failure}"
            fields.update(reason=details.failure.reason, failure=details.failure.message)
        if details.run_result is not None:
            usage = details.run_result.usage
            words += _PRINTED
            fields["events"] = event_count
            if usage.cpu_seconds is not None:
                words += _PROCESSOR
                fields["cpu_seconds"] = usage.cpu_seconds
            if usage.peak_memory_bytes is not None:
                words += f", {format_size(usage.peak_memory_bytes)} of memory"
                fields["peak_memory_bytes"] = usage.peak_memory_bytes
            if details.run_result.stray_marker_advice:
                words += f"; {details.run_result.stray_marker_advice}"
            elif not event_count:
                words += "; the evaluator printed nothing"
            if details.result_summary is not None and details.result_summary.uncounted_value:
                words += "; {uncounted}"
                fields["uncounted"] = details.result_summary.uncounted_value
    return words, fields


def format_rfc3339_time(timestamp: float) -> str:
    """Format a time, in seconds since the epoch, as in RFC 3339: as clients see it."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds")
