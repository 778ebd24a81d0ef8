"""What is known of one evaluation besides its events, for its clients, the log and the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from tawebeval.config import LimitSettings
from tawebeval.core.budget import SharedUpload
from tawebeval.core.checkout import Commit
from tawebeval.core.form import (
    EvaluationRequest,
    ProblemAndLabels,
    pack_request,
    unpack_problem_and_labels,
    unpack_request,
)
from tawebeval.core.results import ResultSummary
from tawebeval.core.states import EvaluationState
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.run import RunResult
from tawebeval.evaluations.snapshot import (
    EvaluationSnapshot,
    RunSnapshot,
    dump_callback,
    dump_environment,
    dump_limits,
    load_callback,
    load_commit,
    load_environment,
    load_failure,
    load_limits,
    load_run_result,
    load_runner_status,
)
from tawebeval.sandbox.base import RunnerStatus
from tawebeval.sandbox.environments import Environment
from tawebeval.sandbox.workspace import derive_log_pseudonym
from tawebeval.webhooks.callback import CallbackRecord


@attrs.define(eq=False)
class EvaluationDetails:
    """Details of one evaluation. Its `Evaluation` changes them, and all others read them.

    - `packed_request`: the form, after the start without the fields that only a start needs. Text
      of callers and evaluators is kept as bytes, since a `str` may take four times as much.
    - `upload_directory`: the directory of the form's files, None once the workspace has them.
    - `sequence_number`: the number in the order of acceptance by the registry.
    - `idempotency_key`: the `Idempotency-Key`, None without one; `form_digest`: the digest of the
      form with that key.
    - `shared_upload`: counts the bytes of the form's files; None without a registry.
    - `should_keep_submission`: whether its files and its request are to be left in the workspace at
      the end; `has_kept_submission`: whether they are there.
    - `final_state`: DRAINED or EXPIRED once the registry has forgotten the evaluation.
    - `state_times`: when each state began, in seconds since the epoch.
    - `clock_offset`: the time of day at acceptance less that of the boot clock, in seconds.
    - `limits`, `environment`: those of the run; None before the start.
    - `run_result`: set when the evaluator has ended.
    - `result_summary`: what the evaluator has reported, None before the start.
    - `runner_status`: where the evaluator runs, None on this machine.
    - `failure_event`: the event of the failure, if there is a journal.
    """

    identifier: str
    packed_request: bytes = attrs.field(repr=False)
    seed: int
    upload_directory: Path | None
    caller: str = ANONYMOUS_CALLER
    sequence_number: int = 0
    idempotency_key: str | None = None
    form_digest: bytes = b""
    shared_upload: SharedUpload | None = None
    should_keep_submission: bool = False
    has_kept_submission: bool = False
    final_state: EvaluationState | None = None
    callback: CallbackRecord | None = None
    state: EvaluationState = EvaluationState.QUEUED
    state_times: dict[str, float] = attrs.field(factory=dict)
    clock_offset: float | None = None
    commit: Commit | None = None
    limits: LimitSettings | None = None
    environment: Environment | None = None
    runner_status: RunnerStatus | None = None
    run_result: RunResult | None = None
    result_summary: ResultSummary | None = None
    failure: EvaluationFailure | None = None
    failure_event: bytes = b""

    @classmethod
    def from_snapshot(
        cls, snapshot: EvaluationSnapshot, upload_directory: Path
    ) -> EvaluationDetails:
        """Return the details in a snapshot; the state is QUEUED for what runs or waits.

        Raises: whatever a snapshot of another version may cause.
        """
        state = EvaluationState(snapshot.state)
        callback, limits, environment = snapshot.callback, snapshot.limits, snapshot.environment
        results = snapshot.packed_result_summary
        return cls(
            identifier=snapshot.identifier,
            packed_request=pack_request(unpack_request(snapshot.packed_request)),
            seed=snapshot.seed,
            upload_directory=upload_directory,
            caller=snapshot.caller,
            sequence_number=snapshot.sequence_number,
            idempotency_key=snapshot.idempotency_key,
            form_digest=snapshot.form_digest,
            should_keep_submission=snapshot.should_keep_submission,
            has_kept_submission=snapshot.has_kept_submission,
            callback=None if callback is None else load_callback(callback, snapshot.caller),
            state=state if state.has_ended else EvaluationState.QUEUED,
            state_times=dict(snapshot.state_times),
            clock_offset=snapshot.clock_offset,
            commit=None if snapshot.commit is None else load_commit(snapshot.commit),
            limits=None if limits is None else load_limits(limits),
            environment=None if environment is None else load_environment(environment),
            runner_status=load_runner_status(snapshot.runner_status),
            run_result=None
            if snapshot.run_result is None
            else load_run_result(snapshot.run_result),
            result_summary=ResultSummary.unpack(results) if results else None,
            failure=load_failure(snapshot.failure) if state.has_ended else None,
            failure_event=snapshot.failure_event if state.has_ended else b"",
        )

    def make_snapshot(
        self,
        run: RunSnapshot | None,
        stop_reason: EvaluationFailure | None,
        end_cursor: int,
        *,
        is_cleaned_up: bool,
    ) -> EvaluationSnapshot:
        """Return a snapshot, for the journal.

        `stop_reason` becomes the failure of an evaluation that has not ended, None otherwise.
        """
        callback, limits, environment = self.callback, self.limits, self.environment
        upload, results = self.upload_directory, self.result_summary
        runner_status, share = self.runner_status, self.shared_upload
        return EvaluationSnapshot(
            identifier=self.identifier,
            packed_request=self.packed_request,
            seed=self.seed,
            state=self.state.value,
            sequence_number=self.sequence_number,
            caller=self.caller,
            upload_directory=None if upload is None else upload.name,
            upload_size=0 if share is None else share.size,
            shared_upload_number=0 if share is None else share.upload_number,
            should_keep_submission=self.should_keep_submission,
            has_kept_submission=self.has_kept_submission,
            is_cleaned_up=is_cleaned_up,
            is_forgotten_by_registry=self.final_state is not None,
            idempotency_key=self.idempotency_key,
            form_digest=self.form_digest,
            state_times=dict(self.state_times),
            clock_offset=self.clock_offset,
            callback=None if callback is None else dump_callback(callback),
            commit=_dump(self.commit),
            limits=None if limits is None else dump_limits(limits),
            environment=None if environment is None else dump_environment(environment),
            run=run,
            run_result=_dump(self.run_result),
            packed_result_summary=b"" if results is None else results.pack(),
            failure=_dump(self.failure or stop_reason),
            end_cursor=end_cursor,
            failure_event=self.failure_event,
            runner_status=None if runner_status is None else runner_status.build_json_object(),
        )

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

    @property
    def bytes_kept_after_end(self) -> int:
        """Bytes of the caller and the evaluator that are kept after the end."""
        stderr = self.run_result.stderr_tail if self.run_result is not None else b""
        url = self.callback.url if self.callback is not None else ""
        results = self.result_summary.memory_bytes if self.result_summary is not None else 0
        return len(self.packed_request) + len(stderr) + len(url) + results

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


def _dump(instance: Any) -> dict[str, Any] | None:
    """Return an instance of an attrs class as a map."""
    return None if instance is None else attrs.asdict(instance)
