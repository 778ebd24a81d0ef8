"""All evaluations of the daemon: acceptance, reading, expiry, restore and shutdown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from twisted.logger import Logger

from tawebeval.core.budget import SharedUpload
from tawebeval.core.evaluation_lists import DAEMON_START_ID_BYTES
from tawebeval.core.form import draw_seed, pack_request
from tawebeval.core.identifiers import IdentifierIssuer
from tawebeval.core.states import EvaluationState
from tawebeval.errors import (
    EvaluationExpired,
    EvaluationFailure,
    EvaluationNotEnded,
    IdempotencyKeyReused,
    ServerStopping,
    SubmissionDiscarded,
)
from tawebeval.evaluations.admission import AdmissionControl
from tawebeval.evaluations.archive_reader import ArchiveReader, make_recording_end
from tawebeval.evaluations.callbacks import EvaluationCallbacks
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.details import EvaluationDetails
from tawebeval.evaluations.evaluation import KEEPER_ENDED, Evaluation, ResumeCheckout
from tawebeval.evaluations.event_requests import EventRequests
from tawebeval.evaluations.handover_journal import HandoverJournal
from tawebeval.evaluations.lister import EvaluationLister
from tawebeval.evaluations.reading import Subscription
from tawebeval.evaluations.records import EvaluationRecord, RecordIndex
from tawebeval.evaluations.restart import RecoveredEvaluation, RecoveredEvaluations
from tawebeval.evaluations.shutdown import EvaluationDrain
from tawebeval.evaluations.status import build_status
from tawebeval.evaluations.submission_store import RerunnableSubmission, SubmissionStore
from tawebeval.evaluations.submitted_files import read_submitted_files
from tawebeval.evaluations.timestamps import format_rfc3339_time
from tawebeval.evaluations.uploads import ReceivedForm
from tawebeval.sandbox.workspace import Workspace, derive_directory_name
from tawebeval.webhooks.deliveries import CallbackQueue

log = Logger()


class EvaluationRegistry:
    """All evaluations of the daemon, whose directories lie below `root`.

    `bounds` are the arguments of the queue for run slots (`FairQueue`). `callbacks` delivers the
    status document of an ended evaluation to the URL in its form.

    The parameter `caller` of the methods is the name of the caller that makes the request. An
    evaluation of another caller raises the same error as an unknown identifier: EvaluationNotFound.
    """

    def __init__(
        self,
        context: EvaluationContext,
        identities: IdentifierIssuer,
        bounds: tuple[int, int, int, int],
        root: Path,
        callbacks: CallbackQueue,
    ) -> None:
        self.context = context
        self._clock = context.clock
        self._started = format_rfc3339_time(context.read_wall_clock())
        self._identities = identities
        self._root = root
        self._callbacks = EvaluationCallbacks(callbacks, context.run_keeper)
        self.submissions = SubmissionStore(context, root)
        self.records = RecordIndex(identities, context.clock, self.submissions.discard_kept_files)
        self._admission = AdmissionControl(context, self.records, bounds)
        self.run_queue = self._admission.run_queue
        # Evaluations with a process or a directory left, also those without a record.
        self._alive: dict[str, EvaluationRecord] = {}
        subscriptions: set[Subscription] = set()
        self._drain = EvaluationDrain(self._alive, self.records, subscriptions, self._clock)
        self.events = EventRequests(
            self.records,
            self._drain,
            self._clock,
            lambda: context.configuration.buffers.max_page_bytes,
            self._started,
            self._drain.on_drain_progress,
            subscriptions,
        )
        self.archived = ArchiveReader(context.archive)
        start_id = context.generate_random_bytes(DAEMON_START_ID_BYTES).hex()
        self.lister = EvaluationLister(self.records, self.archived, start_id)

    # Admission

    def check_not_stopping(self) -> None:
        """Raise ServerStopping if the daemon is about to stop."""
        if self._drain.has_begun:
            raise ServerStopping

    def check_admission(self, caller: str = "", *, should_schedule_retry: bool = True) -> None:
        """Raise the error with which a new evaluation would be refused.

        This is ServerStopping, or that of `AdmissionControl.check_admission`.
        """
        self.check_not_stopping()
        self._admission.check_admission(caller, should_schedule_retry=should_schedule_retry)

    # Life of an evaluation

    def accept_form(self, form: ReceivedForm, caller: str = "") -> str:
        """Queue a new evaluation and return its identifier.

        A form with an `Idempotency-Key` that the caller has used before is discarded; its answer
        is the identifier of the first evaluation.

        Raises: IdempotencyKeyReused (the first form was another one), InvalidField (the daemon does
        not call the `callback_url`), and as `check_admission`.
        """
        first = self.find_evaluation_by_idempotency_key(
            form.idempotency_key, form.form_digest, caller
        )
        if first is not None:
            self.submissions.budget.release_share(caller, form.upload_bytes)
            self.submissions.discard_upload(form.directory, form.upload_bytes)
            if form.reused_upload is not None:
                form.reused_upload.remove_reference()
            return first
        url = form.request.callback_url
        callback = (
            None if url is None else self._callbacks.callback_queue.create_callback(url, caller)
        )
        self.check_admission(caller)
        seed, key = form.request.seed, form.idempotency_key
        number = self.records.last_sequence_number + 1
        details = EvaluationDetails(
            identifier=self._identities.issue_identifier(caller),
            packed_request=pack_request(form.request),
            seed=draw_seed(self.context.generate_random_bytes) if seed is None else seed,
            upload_directory=form.directory,
            caller=caller,
            sequence_number=number,
            idempotency_key=key,
            form_digest=form.form_digest if key is not None else b"",
            shared_upload=form.reused_upload
            or SharedUpload(self.submissions.budget, form.upload_bytes, number, caller=caller),
            should_keep_submission=self.context.configuration.evaluations.should_keep_submissions,
            callback=callback,
        )
        journal = None
        if self.context.run_keeper is not None:
            client = self.context.run_keeper.client
            journal = HandoverJournal.create(client, details.log_name)
        evaluation = self._make_evaluation(details, journal)
        self._alive[details.identifier] = self.records.add_record(evaluation)
        evaluation.cleanup_event.add_callback(self._on_cleaned_up)
        self._begin_recording(evaluation)
        evaluation.enter_queue(self.run_queue)
        self._admission.record_evaluation_start()
        return evaluation.details.identifier

    # Another process of the daemon goes on

    def restore_evaluations(
        self, recovered: RecoveredEvaluations, uploads: Path, resume_checkout: ResumeCheckout
    ) -> None:
        """Take over the evaluations of an earlier process.

        `uploads` is the directory of their files that have not begun. Blocks, for some milliseconds
        each.
        """
        shares: dict[int, SharedUpload] = {}
        self._callbacks.resume_deliveries(
            recovered.undelivered_callbacks,
            {
                each.log_name
                for each in recovered.evaluations
                if not each.snapshot.has_only_callback_left
            },
        )
        # Otherwise those that wait would take the slots of those that run.
        for each in sorted(recovered.evaluations, key=lambda each: each.has_no_evaluator):
            resume = partial(
                Evaluation.resume_run,
                recovered=each,
                resume_checkout=resume_checkout,
                last_heartbeat=recovered.last_heartbeat,
                run_slots=self.run_queue,
            )
            try:
                self._restore(each, uploads, resume, shares)
            except Exception:  # noqa: BLE001  (the others go on; its journal stays)
                log.failure("defect: {evaluation} cannot be restored", evaluation=each.log_name)
        self.records.sort_by_acceptance()
        self.records.last_sequence_number = max(
            self.records.last_sequence_number, recovered.last_sequence_number
        )

    def _restore(
        self,
        found: RecoveredEvaluation,
        uploads: Path,
        resume: Callable[[Evaluation], None],
        shares: dict[int, SharedUpload],
    ) -> None:
        snapshot = found.snapshot
        directory = uploads / (snapshot.upload_directory or found.log_name)
        details = EvaluationDetails.from_snapshot(snapshot, directory)
        assert self.context.run_keeper is not None, "it has the journal"
        client = self.context.run_keeper.client
        journal = HandoverJournal(client, found.log_name, found.journal)
        evaluation = self._make_evaluation(details, journal)
        evaluation.restore_events(snapshot, found.journal_content)
        has_ended = found.state.has_ended
        if not (has_ended and self.context.archive.is_archived(details.identifier)):
            self._begin_recording(evaluation)
        evaluation.ring.acknowledge(
            min(found.journal_content.acknowledged_cursor, evaluation.ring.end_cursor)
        )
        share = shares.get(snapshot.shared_upload_number)
        if share is None:
            budget, size = self.submissions.budget, snapshot.upload_size
            budget.restore_stored_bytes(size, snapshot.caller)
            share = shares[snapshot.shared_upload_number] = SharedUpload(
                budget, size, snapshot.shared_upload_number, caller=snapshot.caller
            )
        else:
            share.add_reference()
        details.shared_upload = share
        self._alive[details.identifier] = self.records.add_record(evaluation)
        evaluation.ring_allocation.set_used_bytes(evaluation.ring.memory_bytes)
        self.context.counters.record_restored_evaluation(found.state)
        if has_ended:
            evaluation.restore_ended(snapshot)
        elif found.run_descriptors is not None:
            self.run_queue.take_slot_unconditionally(evaluation.details.identifier, snapshot.caller)
            resume(evaluation)
        elif found.has_lost_evaluator:
            evaluation.end_as_lost()
        else:
            evaluation.requeue(self.run_queue)
        evaluation.cleanup_event.add_callback(
            self._keep_ended if snapshot.has_only_callback_left else self._on_cleaned_up
        )
        if snapshot.is_forgotten_by_registry:
            self.records.forget_record(evaluation.details.identifier, EvaluationState.EXPIRED)

    def refuse_evaluations(self) -> None:
        """Accept nothing more: the daemon is about to stop."""
        self._drain.has_begun = True

    def end_lost_runs(self) -> None:
        """Stop running evaluations: the keeper has ended, and with the keeper their evaluators."""
        for record in list(self._alive.values()):
            if record.evaluation.supervisor is not None:
                record.evaluation.stop(KEEPER_ENDED)

    async def wait_until_persisted(self) -> None:
        """Return when evaluations accepted so far outlive this process, if they are to."""
        if self.context.run_keeper is not None:
            await self.context.run_keeper.client.flush()

    def _begin_recording(self, evaluation: Evaluation) -> None:
        """Archive the events of an evaluation, those in its ring and all that follow."""
        self.context.archive.begin_recording(
            evaluation.details.identifier,
            evaluation.details.caller,
            evaluation.ring,
            evaluation.ring_allocation,
            evaluation.discard_journaled_events,
        )

    def is_known_idempotency_key(self, key: str | None, caller: str) -> bool:
        """Return whether an `Idempotency-Key` of the caller names an evaluation."""
        return self.records.find_by_idempotency_key(key, caller) is not None

    def find_evaluation_by_idempotency_key(
        self, key: str | None, form_digest: bytes, caller: str
    ) -> str | None:
        """Return the identifier of the evaluation that this form with an `Idempotency-Key` began.

        None for an unknown key. Raises: IdempotencyKeyReused (the first form was another one).
        """
        known = self.records.find_by_idempotency_key(key, caller)
        if known is None:
            return None
        if known.details.form_digest != form_digest:
            raise IdempotencyKeyReused(
                "Idempotency-Key: this key was used with another form; send a new key"
            )
        return known.details.identifier

    def _make_evaluation(
        self, details: EvaluationDetails, journal: HandoverJournal | None
    ) -> Evaluation:
        workspace = Workspace(self._root / derive_directory_name(details.identifier))
        return Evaluation(details, workspace, self.context, journal=journal)

    def _on_cleaned_up(self, evaluation: Evaluation) -> None:
        try:
            # First: what follows changes the state of an evaluation that has no record any more.
            self._callbacks.start_delivery(evaluation)
        finally:
            self._keep_ended(evaluation)

    def _keep_ended(self, evaluation: Evaluation) -> None:
        """Keep an evaluation with only its events, and perhaps its files, left."""
        record = self._alive[evaluation.details.identifier]
        try:
            self._end_recording(record)
        finally:
            self.records.note_evaluation_end(record)
            del self._alive[evaluation.details.identifier]
            self.submissions.handle_evaluation_end(record)
            evaluation.save_final_snapshot()
            self._admission.record_evaluation_end()
            self._drain.on_drain_progress()

    def _end_recording(self, record: EvaluationRecord) -> None:
        """Archive an evaluation that has ended."""
        if self.context.archive.is_enabled:
            evaluation, identifier = record.evaluation, record.details.identifier
            self.context.archive.end_recording(identifier, make_recording_end(evaluation))
            self.context.archive.add_archived_callback(
                identifier, evaluation.discard_journaled_events
            )

    # Rerun

    def find_ended_evaluation(self, identifier: str, caller: str = "") -> Evaluation:
        """Return an evaluation that has ended.

        Raises: EvaluationNotFound, EvaluationExpired, EvaluationNotEnded.
        """
        record = self.records.find_record(identifier, caller, is_reader=False)
        if record is None:
            raise EvaluationExpired(self._started)
        if not record.details.state.has_ended:
            raise EvaluationNotEnded
        return record.evaluation

    @asynccontextmanager
    async def open_kept_submission(
        self, identifier: str, caller: str = ""
    ) -> AsyncIterator[RerunnableSubmission]:
        """Return the request and the files of an evaluation that has ended.

        Within the context the files make no room for uploads. Raises: as `find_ended_evaluation`;
        SubmissionDiscarded; ServerBusy and OSError for archived files.
        """
        async with AsyncExitStack() as stack:
            try:
                use = self.submissions.open_kept_submission(
                    self.find_ended_evaluation(identifier, caller)
                )
                kept = await stack.enter_async_context(use)
            except (EvaluationExpired, SubmissionDiscarded):
                if await self.archived.read_status(identifier, caller) is None:
                    raise
                use = self.submissions.open_archived_submission(identifier, caller)
                kept = await stack.enter_async_context(use)
            yield kept

    async def read_submission(self, identifier: str, caller: str = "") -> list[dict[str, Any]]:
        """Return the files of an evaluation as `read_submitted_files`.

        Raises: EvaluationNotFound, EvaluationExpired, SubmissionDiscarded; ServerBusy and OSError
        for archived files.
        """
        record = self.records.find_record(identifier, caller, is_reader=False)
        try:
            if record is not None and not record.details.state.has_ended:
                workspace, upload = record.evaluation.workspace, record.details.upload_directory
                roots = [workspace] if upload is None else [Workspace(upload), workspace]
                return await self._read_files(roots)
            async with self.open_kept_submission(identifier, caller) as kept:
                return await self._read_files([kept.workspace])
        except FileNotFoundError:
            raise SubmissionDiscarded from None

    async def _read_files(self, roots: Sequence[Workspace]) -> list[dict[str, Any]]:
        directories = [root.submission_directory for root in roots]
        return await self.context.worker_threads.run_in_thread(read_submitted_files, directories)

    async def cancel_evaluation(self, identifier: str, caller: str = "") -> None:
        """Stop an evaluation and return when only its events are left.

        An evaluation that has ended is left as it is. Raises: EvaluationNotFound.
        """
        record = self.records.find_record(identifier, caller, is_reader=False)
        record = record or self._alive.get(identifier)
        if record is not None:
            record.evaluation.stop(EvaluationFailure("cancelled", "the evaluation was cancelled"))
            await record.evaluation.cleanup_event.wait()

    # Status and lists

    def get_status(self, identifier: str, caller: str = "") -> dict[str, Any]:
        """Return the status document. Raises: EvaluationNotFound, EvaluationExpired.

        A look at the status does not keep an evaluation that waits for a reader of its events.
        """
        record = self.records.find_record(identifier, caller, is_reader=False)
        if record is None:
            raise EvaluationExpired(self._started)
        return build_status(record.evaluation, self.run_queue.find_waiter_position(identifier))

    # Housekeeping and shutdown

    def expire_evaluations(self) -> None:
        """Forget evaluations that no client asks for, and stop those whose readers are too slow.

        To be called about once a second.
        """
        settings = self.context.configuration.evaluations
        for record in self.records.find_abandoned_evaluations(settings.abandon_after_seconds):
            record.evaluation.stop_as_abandoned()
            self.records.forget_record(record.details.identifier, EvaluationState.EXPIRED)
        for record in self.records.find_unread_evaluations(settings.retention_seconds):
            self.records.forget_record(record.details.identifier, EvaluationState.EXPIRED)
        self.run_queue.dispatch_slots()  # the time in which pages are expected may have passed

    def hand_over_evaluations(self) -> None:
        """Accept nothing more, and answer the clients that wait: another process goes on."""
        self.refuse_evaluations()
        for record in (*self.records, *self._alive.values()):
            record.evaluation.hand_over()

    def end_drain_early(self) -> None:
        """End the time that `drain_and_close` gives to running evaluations."""
        self._drain.end_drain_early()

    async def drain_and_close(self, drain_seconds: float = 0) -> bool:
        """Accept nothing more, end all evaluations and return when their processes are gone.

        Running evaluations have `drain_seconds` seconds to end by themselves; readers then have
        some seconds for the last events. Return whether there was an evaluation or a reader.
        """
        had_work = await self._drain.drain_evaluations(drain_seconds)
        await self.context.archive.flush()  # it takes the submissions that are removed next
        await self.submissions.remove_kept_files()
        return had_work
