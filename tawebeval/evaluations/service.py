"""All evaluations of the daemon: admission, acceptance, callbacks, expiry, restore and shutdown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import attrs
from twisted.internet.defer import gatherResults
from twisted.internet.task import deferLater
from twisted.logger import Logger

from tawebeval.archive.archive import EndedEvaluation, EvaluationArchive
from tawebeval.archive.files import WorkspaceSubmission, extract_submission
from tawebeval.core.budgets import Budget, RetrySchedule, SharedResource
from tawebeval.core.evaluations import (
    ArchiveRecord,
    EvaluationState,
    IdentifierIssuer,
    encode_json_without_slack,
)
from tawebeval.core.form import EvaluationRequest, draw_seed, pack_request, unpack_request
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.deferreds import FairQueue, convert_deferred_to_event, run_in_background
from tawebeval.errors import (
    CallerQuotaExceeded,
    EvaluationExpired,
    EvaluationFailure,
    EvaluationNotEnded,
    IdempotencyKeyReused,
    ServerBusy,
    ServerStopping,
    StoreError,
    SubmissionDiscarded,
    format_size,
)
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.lifecycle import Evaluation, EvaluationIndex, clean_up
from tawebeval.evaluations.reading import (
    ArchiveReader,
    EvaluationLister,
    EventReader,
    build_status_document,
    read_submitted_files,
)
from tawebeval.evaluations.starting import (
    ExistingCheckoutGetter,
    admit_evaluation,
    read_all_events,
    requeue_evaluation,
    restore_ended_evaluation_events,
    resume_run,
)
from tawebeval.evaluations.store import EvaluationDetails
from tawebeval.linux.filetree import remove_tree
from tawebeval.sandbox.workspace import Workspace, derive_directory_name
from tawebeval.webhooks.deliveries import CallbackQueue
from tawebeval.webhooks.records import CallbackState

_RETRY_LATER = 30  # seconds, if too many events are unread


_LOOK = 0.05  # seconds between two looks

log = Logger()


_NOT_STORED = EvaluationFailure("lost", "the evaluation could not be stored; submit again")


@attrs.frozen
class ReceivedForm:
    """A form that has arrived, with its files below `directory`.

    `idempotency_key` is the `Idempotency-Key`, None without one; `form_digest` identifies the
    form's content. `upload_size` is the number of bytes that the form takes of the space for
    uploads; those of files that a rerun links count once more.
    """

    request: EvaluationRequest
    directory: Path
    idempotency_key: str | None = None
    form_digest: bytes = b""
    upload_size: int = 0


_CALLERS = 4  # that have a part of limits.uploads at the same time, at least


class SubmissionStore:
    """The submitted files of all evaluations, whose directories lie below `root`.

    `budget` counts the bytes of all files, also of forms that arrive. Only received bytes count: a
    client that announces much and sends little keeps no other client out. If an upload needs more
    room, the store discards files that are kept, those of the first end first.
    """

    def __init__(self, context: EvaluationContext, root: Path) -> None:
        self._context = context
        self._root = root
        limits = context.configuration.limits
        part = max(limits.uploads // _CALLERS, limits.request_body)
        self.budget = Budget(
            SharedResource.UPLOADS,
            limits.uploads,
            part,
            f"your uploads take up {format_size(part)}, the part of limits.uploads for one caller;"
            " try again when evaluations have ended",
            "the disk space for uploads is used up (limits.uploads); try again later",
            make_room=self._discard_kept,
        )
        # Ended evaluations whose files are kept: of each caller in the order of their ends.
        self._kept: defaultdict[str, dict[str, Evaluation]] = defaultdict(dict)
        self._in_use: Counter[str] = Counter()  # of these, those that a rerun is linking now

    def keep_or_release_files(self, evaluation: Evaluation) -> None:
        """Keep the files of an ended evaluation, or give back the bytes of removed ones."""
        if evaluation.details.has_kept_submission:
            self._kept[evaluation.details.caller][evaluation.details.identifier] = evaluation
        else:
            self._give_back(evaluation)

    def _give_back(self, evaluation: Evaluation) -> None:
        self.budget.give_back(evaluation.details.upload_size, evaluation.details.caller)

    @asynccontextmanager
    async def open_kept_submission(
        self, evaluation: Evaluation
    ) -> AsyncIterator[WorkspaceSubmission]:
        """Return the request and the files of an evaluation that has ended.

        Within the context they are not discarded. Raises: SubmissionDiscarded.
        """
        await evaluation.cleanup_completion.wait()
        identifier, workspace = evaluation.details.identifier, evaluation.workspace
        self._in_use[identifier] += 1
        try:
            try:
                read = workspace.request_file.read_bytes
                packed = await self._context.worker_threads.run_in_thread(read)
            except FileNotFoundError:
                raise SubmissionDiscarded from None
            details = evaluation.details
            if identifier not in self._kept[details.caller]:  # forgotten, perhaps meanwhile
                raise SubmissionDiscarded
            yield WorkspaceSubmission(unpack_request(packed), workspace, details.upload_size)
        finally:
            self._in_use -= Counter([identifier])

    @asynccontextmanager
    async def open_archived_submission(
        self, identifier: str, caller: str, *, makes_room: bool
    ) -> AsyncIterator[WorkspaceSubmission]:
        """Return the request and the files of an archived evaluation, extracted for the context.

        `makes_room` is whether other files may be discarded for it. Raises: SubmissionDiscarded;
        CallerQuotaExceeded; ServerBusy; OSError.
        """
        directory, size = self._root / self._context.generate_random_bytes(16).hex(), 0
        try:
            archive = self._context.archive
            if archive is None:
                raise SubmissionDiscarded
            extract = partial(extract_submission, directory=directory)
            found = await archive.read_submission(identifier, caller, extract)
            if found is None:
                raise SubmissionDiscarded
            self.budget.take_within_quota(found.size_bytes, caller, makes_room=makes_room)
            size = found.size_bytes
            yield found
        finally:
            self.discard_upload(directory, size, caller)

    def _discard_kept(self, size: int, caller: str | None) -> bool:
        """Discard kept files of `size` bytes or more, those of the first end first.

        They are those of the caller or, for None, first of the callers that hold most. If all
        together have fewer, discard none and return False.
        """
        found: list[Evaluation] = []
        for evaluation in self._list_kept(caller):
            if size <= 0:
                break
            found.append(evaluation)
            size -= evaluation.details.upload_size
        if size > 0:
            return False
        for evaluation in found:
            self.discard_kept_files(evaluation)
        return True

    def _list_kept(self, caller: str | None) -> Iterator[Evaluation]:
        for name in self.budget.list_callers() if caller is None else (caller,):
            for identifier, evaluation in self._kept.get(name, {}).items():
                if identifier not in self._in_use:
                    yield evaluation

    def discard_kept_files(self, evaluation: Evaluation) -> None:
        """Remove the kept files of an ended evaluation, if they are kept.

        Their bytes are given back at once, so that an upload need not wait for the removal.
        """
        if self.release_kept_files(evaluation):
            attempt = self._context.cleanup_queue.attempt_call(
                "removal of a kept submission",
                remove_tree,
                evaluation.workspace.submission_directory,
                evaluation.workspace.request_file,
            )
            run_in_background(attempt, log, "a kept submission could not be removed")

    def release_kept_files(self, evaluation: Evaluation) -> bool:
        """Give back the bytes of kept files, which the caller removes; return if there are any."""
        details = evaluation.details
        is_kept = self._kept[details.caller].pop(details.identifier, None) is not None
        if is_kept:
            details.has_kept_submission = False
            self._give_back(evaluation)
        return is_kept

    def discard_upload(self, directory: Path, size: int, caller: str) -> None:
        """Remove the `directory` of a form that becomes no evaluation.

        The `size` bytes count for the caller until they are gone.
        """
        attempt = self._context.cleanup_queue.attempt_call(
            "removal of an upload",
            remove_tree,
            directory,
            on_success=lambda: self.budget.give_back(size, caller),
        )
        run_in_background(attempt, log, "an upload could not be removed")


class EvaluationRegistry:
    """All evaluations of the daemon, whose directories lie below `root`.

    `bounds` are the arguments of the queue for run slots (`FairQueue`). `callbacks` delivers the
    status document of an ended evaluation to the URL in its form. A document that is not delivered
    yet is in the evaluation's row, and outlives the daemon.

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
        self._identities = identities
        self._root = root
        self._callbacks = callbacks
        self.submissions = SubmissionStore(context, root)
        self.records = EvaluationIndex(identities, context.clock, self._on_forgotten)
        self.run_queue = FairQueue(*bounds)
        self._retries = RetrySchedule(self.run_queue.slot_count)
        for budget in self._list_budgets():
            budget.make_room = partial(self._forget_sent, budget)
        wake, pinned = context.event_room_condition.notify, context.event_memory.pinned_budget
        context.unread_events_budget.on_quota_freed = wake
        # In another turn: a log is being changed.
        pinned.on_quota_freed = partial(context.clock.callLater, 0, wake)
        # Evaluations with a process or a directory left, also those that are forgotten.
        self._alive: dict[str, Evaluation] = {}
        self._is_stopping = self._is_urgent = False
        # Forgotten ones, as long as anything, such as a callback, may still save them.
        self._forgotten: WeakValueDictionary[str, Evaluation] = WeakValueDictionary()
        self.archive_reader = ArchiveReader(context)
        if context.archive is not None:
            context.archive.on_removal = self._release_archived_copy
        self.events = EventReader(
            self.records,
            context,
            self._remove_if_unused,
            self.archive_reader,
        )
        self.lister = EvaluationLister(self.records, self.archive_reader, context.store)

    # Admission

    def check_not_stopping(self) -> None:
        """Raise ServerStopping if the daemon is about to stop."""
        if self._is_stopping:
            raise ServerStopping

    def check_admission(self, caller: str = "") -> None:
        """Raise the error with which a new evaluation would be refused.

        This is ServerStopping, or CallerQuotaExceeded, which the caller can remedy, or ServerBusy,
        in this order. Before a refusal evaluations are forgotten that a stream has sent to the end:
        they are kept only for clients that have lost some of the events. A refusal for the length
        of the queue has the time at which the client is to come back, which no other client gets.
        """
        self.check_not_stopping()
        for budget in self._list_budgets():
            budget.check_amount(1, caller)
        self._check_queue(caller, should_schedule_retry=True)

    def check_readiness(self) -> None:
        """Raise ServerBusy if a new evaluation without a token would be refused; change nothing.

        What could be forgotten before a refusal counts as room, though it may be too little.
        """
        self.check_not_stopping()
        for budget in self._list_budgets():
            if budget.is_used_up and not any(
                self.records.find_oldest_streamed(caller) for caller in budget.used_by_caller
            ):
                raise ServerBusy(budget.total_refusal_message, budget.retry_after)
        self._check_queue(ANONYMOUS_CALLER, should_schedule_retry=False)

    def _check_queue(self, caller: str, *, should_schedule_retry: bool) -> None:
        queue, retry_after = self.run_queue, _RETRY_LATER
        if queue.is_caller_quota_exhausted(caller):
            if should_schedule_retry:
                retry_after = self._retries.schedule_retry(
                    self._clock.seconds(), caller, queue.waiting_caller_count
                )
            what = "too many of your evaluations are queued (callers.queued); try again later"
            raise CallerQuotaExceeded(what, retry_after)
        if queue.is_full(caller):
            if should_schedule_retry:
                retry_after = self._retries.schedule_retry(self._clock.seconds())
            raise ServerBusy("the queue is full (evaluations.queued); try again later", retry_after)

    def _list_budgets(self) -> tuple[Budget, ...]:
        """Return the budgets of what evaluations leave until they are read."""
        configuration, ended = self.context.configuration, self.records.ended_evaluations_budget
        ended.total = configuration.evaluations.kept
        ended.caller_quota = configuration.callers.kept or None
        return ended, self.context.unread_events_budget, self.context.event_memory.pinned_budget

    def _forget_sent(self, budget: Budget, _: int, caller: str | None) -> bool:
        """Forget evaluations that a stream has sent to the end until another one has room."""
        if caller is not None:
            while budget.is_quota_used_up(caller) and self.records.forget_oldest_streamed(caller):
                pass
            return not budget.is_quota_used_up(caller)
        for name in budget.list_callers():
            while self.records.forget_oldest_streamed(name):
                if not budget.is_used_up:
                    return True
        return False

    # Life of an evaluation

    def accept_form(
        self, form: ReceivedForm, caller: str = "", trace: tuple[str, str] | None = None
    ) -> str:
        """Queue a new evaluation, which has `trace` in its details, and return its identifier.

        A form with an `Idempotency-Key` that the caller has used before is discarded; its answer
        is the identifier of the first evaluation.

        Raises: IdempotencyKeyReused (the first form was another one), InvalidField (the daemon does
        not call the `callback_url`), and as `check_admission`.
        """
        first = self.find_evaluation_by_idempotency_key(
            form.idempotency_key, form.form_digest, caller
        )
        if first is not None:
            self.submissions.discard_upload(form.directory, form.upload_size, caller)
            return first
        request, url = form.request, form.request.callback_url
        callback = None if url is None else self._callbacks.create_callback(url, caller)
        if callback is not None and trace is not None:
            callback.traceparent = trace[0]
        self.check_admission(caller)
        seed, key = request.seed, form.idempotency_key
        number = self.records.last_sequence_number + 1
        details = EvaluationDetails(
            identifier=self._identities.issue_identifier(caller),
            packed_request=pack_request(request),
            seed=draw_seed(self.context.generate_random_bytes) if seed is None else seed,
            upload_directory=form.directory,
            caller=caller,
            sequence_number=number,
            idempotency_key=key,
            form_digest=form.form_digest if key is not None else b"",
            upload_size=form.upload_size,
            should_keep_submission=True,
            callback=callback,
            counted_problem=None if request.differs_from_problem else request.problem_name,
            first_submission_time=request.submission_time,
            trace=trace,
        )
        evaluation = self._make_evaluation(details)
        details.state_times["created"] = evaluation.wall_clock.read()
        self._add(evaluation)
        evaluation.cleanup_completion.add_callback(self._on_cleaned_up)
        if self.context.store is not None:
            added = self.context.store.add(evaluation.make_row())
            evaluation.storage_completion = convert_deferred_to_event(added)
        admit_evaluation(evaluation, self.run_queue)
        if not self.run_queue.has_free_slot:
            self._retries.record_all_slots_used(self._clock.seconds())
        return evaluation.details.identifier

    async def wait_until_stored(self, identifier: str) -> None:
        """Return when an accepted evaluation outlives this process of the daemon.

        Raises: ServerBusy, if it cannot be stored; then it is stopped and forgotten.
        """
        evaluation = self._alive.get(identifier)
        if evaluation is None and identifier in self.records:
            evaluation = self.records[identifier]
        if evaluation is not None and evaluation.storage_completion is not None:
            try:
                (await evaluation.storage_completion.wait())()
            except ServerBusy:
                evaluation.stop(_NOT_STORED)
                self.records.forget_evaluation(identifier, EvaluationState.EXPIRED)
                raise

    # Another process of the daemon goes on

    def restore_evaluations(
        self,
        rows: Sequence[EvaluationDetails],
        uploads: Path,
        use_checkout_at: ExistingCheckoutGetter,
    ) -> None:
        """Take over the evaluations of an earlier process, which are in the order of acceptance.

        `uploads` is the directory of their files that have not begun. Blocks, for some milliseconds
        each.
        """
        # Otherwise those that wait would take the slots of those that run.
        for row in rows:
            if row.run is not None:
                self.run_queue.take_slot_unconditionally(row.identifier, row.caller)
        for row in rows:
            try:
                self._restore(row, uploads, use_checkout_at)
            except Exception:  # noqa: BLE001  (the others go on; its row stays)
                log.failure("defect: {evaluation} cannot be restored", evaluation=row.log_name)
                self.run_queue.release_slot(row.identifier)

    def _restore(
        self, details: EvaluationDetails, uploads: Path, use_checkout_at: ExistingCheckoutGetter
    ) -> None:
        if details.is_directory_removed:
            self._restore_callback(details)
            return
        state, upload, stop_reason = details.state, details.upload_directory, details.failure
        details.upload_directory = uploads / (details.log_name if upload is None else upload.name)
        if not state.has_ended:
            details.state, details.failure = EvaluationState.QUEUED, None
            if details.run is not None:
                details.state = EvaluationState.RUNNING
        evaluation = self._make_evaluation(details)
        self.submissions.budget.record_usage(details.upload_size, details.caller)
        self._add(evaluation)
        self.context.counters.record_restored_evaluation(details.state)
        if state.has_ended:
            if details.is_cleaned_up or upload is None:
                details.upload_directory = None
            restore_ended_evaluation_events(evaluation)
            if details.is_cleaned_up:
                evaluation.cleanup_completion.set_value(evaluation)
            else:
                run_in_background(clean_up(evaluation), log, "defect: clean-up failed")
        else:
            evaluation.stop_reason = stop_reason
            if details.run is not None:
                resume_run(evaluation, use_checkout_at, self.run_queue)
            else:
                requeue_evaluation(evaluation, self.run_queue)
        evaluation.cleanup_completion.add_callback(self._on_cleaned_up)
        if details.is_forgotten:
            self.records.forget_evaluation(details.identifier, EvaluationState.EXPIRED)

    def _restore_callback(self, details: EvaluationDetails) -> None:
        """Send the callback of an evaluation of which nothing else is left; delete the row."""
        evaluation = self._make_evaluation(details)
        evaluation.forgotten_state = EvaluationState.EXPIRED
        evaluation.cleanup_completion.set_value(evaluation)
        self._forgotten[details.identifier] = evaluation
        self._send_callback(evaluation)
        self._delete_unneeded_row(evaluation)

    def stop_accepting_evaluations(self) -> None:
        """Accept nothing more: the daemon is about to stop."""
        self._is_stopping = True

    def stop_lost_runs(self, failure: EvaluationFailure) -> None:
        """Stop running evaluations, whose evaluators are gone, for this reason."""
        for evaluation in list(self._alive.values()):
            if evaluation.run is not None:
                evaluation.stop(failure)

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

    def _make_evaluation(self, details: EvaluationDetails) -> Evaluation:
        workspace = Workspace(self._root / derive_directory_name(details.identifier))
        return Evaluation(details, workspace, self.context, self._save)

    def _add(self, evaluation: Evaluation) -> None:
        self._alive[evaluation.details.identifier] = evaluation
        self.records.add_evaluation(evaluation)

    def _save(self, evaluation: Evaluation) -> None:
        # The end of a callback may come after the removal, which must not bring back the row.
        can_be_saved = not (evaluation.is_row_deleted or evaluation.is_resuming)
        if self.context.store is not None and can_be_saved:
            self.context.store.save(evaluation.make_row())

    # The end

    def _on_cleaned_up(self, evaluation: Evaluation) -> None:
        try:
            # First: what follows changes the state of an evaluation that is forgotten.
            self._send_callback(evaluation)
        finally:
            self._keep_ended(evaluation)

    def _send_callback(self, evaluation: Evaluation) -> None:
        """Send the status document to the URL in the form, unless that is done."""
        callback = evaluation.details.callback
        if callback is None or callback.state.is_final:
            return
        callback.state = CallbackState.PENDING
        if not callback.document:
            callback.document = encode_json_without_slack(build_status_document(evaluation, None))

        async def store() -> None:
            evaluation.save()
            await self.context.wait_for_store_flush()  # another process would send another document

        def on_end() -> None:
            evaluation.save()
            self._delete_unneeded_row(evaluation)

        self._callbacks.start_delivery(callback, evaluation.details.log_name, on_end, store)

    def _keep_ended(self, evaluation: Evaluation) -> None:
        """Keep an evaluation with only its events, and perhaps its files, left."""
        try:
            self.records.note_evaluation_cleanup(evaluation)
            evaluation.events.close_files()
            self.submissions.keep_or_release_files(evaluation)
            evaluation.save()
        finally:
            del self._alive[evaluation.details.identifier]
            run_in_background(self._archive(evaluation), log, "defect: the archive has failed")
            self._retries.record_evaluation_end(
                self._clock.seconds(), are_all_slots_used=not self.run_queue.has_free_slot
            )

    async def _archive(self, evaluation: Evaluation) -> None:
        """Archive an evaluation that has ended, if there is an archive, and perhaps remove it."""
        try:
            if self.context.archive is not None and evaluation.details.archive_record is None:
                await self._store_in_archive(evaluation, self.context.archive)
        except StoreError:
            words = "{evaluation}: not archived: its row cannot be stored"
            log.warn(words, evaluation=evaluation.details.log_name)
        finally:
            evaluation.events.keeps_acknowledged_files = False
            evaluation.events.free_discarded_files()
            self.archive_reader.evaluations_to_archive.pop(evaluation.details.identifier, None)
            evaluation.archive_completion.set_value(None)
            self._remove_if_unused(evaluation)

    async def _store_in_archive(self, evaluation: Evaluation, archive: EvaluationArchive) -> None:
        """Archive an evaluation. Raises: StoreError."""
        details = evaluation.details

        async def save_row(stored: ArchiveRecord) -> None:
            details.archive_record = stored
            evaluation.save()
            if self.context.store is not None:
                try:
                    await self.context.store.flush()
                except StoreError:
                    details.archive_record = None
                    evaluation.save()
                    raise

        begin = evaluation.wall_clock.read()
        final_status = {"status": build_status_document(evaluation, None)}
        workspace = evaluation.workspace if details.has_kept_submission else None
        await archive.store_evaluation(
            EndedEvaluation(
                details.identifier,
                details.caller,
                final_status,
                partial(read_all_events, evaluation),
                workspace,
            ),
            save_row,
        )
        evaluation.record_phase("archiving", begin)

    def _release_archived_copy(self, identifier: str) -> bool:
        """Note that the archive has removed an evaluation; return whether its row is needed."""
        is_known = identifier in self.records
        evaluation = self.records[identifier] if is_known else self._forgotten.get(identifier)
        if evaluation is None:
            return False
        if not (is_known or evaluation.details.has_pending_callback):
            evaluation.is_row_deleted = True
            return False
        evaluation.details.archive_record = None
        evaluation.save()
        return True

    def _on_forgotten(self, evaluation: Evaluation) -> None:
        self._forgotten[evaluation.details.identifier] = evaluation
        if evaluation.events.keeps_acknowledged_files:
            self.archive_reader.evaluations_to_archive[evaluation.details.identifier] = evaluation
        evaluation.save()
        self._remove_if_unused(evaluation)

    def _remove_if_unused(self, evaluation: Evaluation) -> None:
        """Remove what is left of an evaluation that is forgotten; its events after all readers."""
        if evaluation.forgotten_state is None or evaluation.events.keeps_acknowledged_files:
            return
        is_read = evaluation.events.reader_count > 0
        if not evaluation.cleanup_completion.is_set or is_read:
            self.submissions.discard_kept_files(evaluation)
        elif not evaluation.details.is_directory_removed:
            evaluation.details.is_directory_removed = True
            self.submissions.release_kept_files(evaluation)
            run_in_background(self._remove(evaluation), log, "defect: the removal has failed")

    async def _remove(self, evaluation: Evaluation) -> None:
        assert evaluation.forgotten_state is not None, "it is forgotten"
        evaluation.enter_state(evaluation.forgotten_state)
        await evaluation.events.discard_all_events()
        evaluation.save()
        # A row without files would be a loss; no client waits for it.
        await self.context.wait_for_store_flush(starts_now=False)
        evaluation.events.update_unread_bytes(are_gone=True)
        await self.context.cleanup_queue.attempt_call(
            f"{evaluation.details.log_name}: removal of its events",
            remove_tree,
            evaluation.workspace.root,
        )
        self._delete_unneeded_row(evaluation)

    def _delete_unneeded_row(self, evaluation: Evaluation) -> None:
        """Delete the row of a removed evaluation, unless its callback or the archive needs it."""
        details, store = evaluation.details, self.context.store
        is_needed = details.has_pending_callback or details.archive_record is not None
        if store is not None and details.is_directory_removed and not is_needed:
            evaluation.is_row_deleted = True
            store.delete(details.identifier)

    # Rerun

    def find_ended_evaluation(self, identifier: str, caller: str = "") -> Evaluation:
        """Return an evaluation that has ended.

        Raises: EvaluationNotFound, EvaluationExpired, EvaluationNotEnded.
        """
        evaluation = self.records.find_evaluation(identifier, caller, is_reader=False)
        if evaluation is None:
            raise EvaluationExpired
        if not evaluation.details.state.has_ended:
            raise EvaluationNotEnded
        return evaluation

    @asynccontextmanager
    async def open_kept_submission(
        self, identifier: str, caller: str = "", *, makes_room: bool = True
    ) -> AsyncIterator[WorkspaceSubmission]:
        """Return the request and the files of an evaluation that has ended.

        Within the context the files make no room for uploads. For archived files other files may be
        discarded if `makes_room`. Raises: as `find_ended_evaluation`; SubmissionDiscarded;
        CallerQuotaExceeded, ServerBusy and OSError for archived files.
        """
        async with AsyncExitStack() as stack:
            try:
                use = self.submissions.open_kept_submission(
                    self.find_ended_evaluation(identifier, caller)
                )
                kept = await stack.enter_async_context(use)
            except (EvaluationExpired, SubmissionDiscarded) as error:
                try:
                    await self.archive_reader.read_status(identifier, caller)
                except EvaluationExpired:
                    raise error from None
                use = self.submissions.open_archived_submission(
                    identifier, caller, makes_room=makes_room
                )
                kept = await stack.enter_async_context(use)
            yield kept

    async def read_submission(self, identifier: str, caller: str = "") -> list[dict[str, Any]]:
        """Return the files of an evaluation as `read_submitted_files`.

        Raises: EvaluationNotFound, EvaluationExpired, SubmissionDiscarded; ServerBusy and OSError
        for archived files.
        """
        evaluation = self.records.find_evaluation(identifier, caller, is_reader=False)
        if evaluation is not None and not evaluation.details.state.has_ended:
            workspace, upload = evaluation.workspace, evaluation.details.upload_directory
            roots = [workspace] if upload is None else [Workspace(upload), workspace]
            return await self._read_files(roots)
        # A look, also by a link, displaces nothing.
        async with self.open_kept_submission(identifier, caller, makes_room=False) as kept:
            return await self._read_files([kept.workspace])

    async def _read_files(self, roots: Sequence[Workspace]) -> list[dict[str, Any]]:
        directories = [root.submission_directory for root in roots]
        try:
            return await self.context.worker_threads.run_in_thread(
                read_submitted_files, directories
            )
        except FileNotFoundError:
            raise SubmissionDiscarded from None

    async def cancel_evaluation(self, identifier: str, caller: str = "") -> None:
        """Stop an evaluation and return when only its events are left.

        An evaluation that has ended is left as it is. Raises: EvaluationNotFound.
        """
        evaluation = self.records.find_evaluation(identifier, caller, is_reader=False)
        evaluation = evaluation or self._alive.get(identifier)
        if evaluation is not None:
            evaluation.stop(EvaluationFailure("cancelled", "the evaluation was cancelled"))
            await evaluation.cleanup_completion.wait()

    # Status and lists

    def get_status(self, identifier: str, caller: str = "") -> dict[str, Any]:
        """Return the status document. Raises: EvaluationNotFound, EvaluationExpired.

        A look at the status does not keep an evaluation that waits for a reader of its events.
        """
        evaluation = self.records.find_evaluation(identifier, caller, is_reader=False)
        if evaluation is None:
            raise EvaluationExpired
        return build_status_document(evaluation, self.run_queue.find_waiter_position(identifier))

    async def read_status(self, identifier: str, caller: str) -> dict[str, Any]:
        """Return the status document, also of an archived evaluation. Raises: as `get_status`."""
        try:
            return self.get_status(identifier, caller)
        except EvaluationExpired:
            return await self.archive_reader.read_status(identifier, caller)

    # Housekeeping and shutdown

    def expire_evaluations(self) -> None:
        """Forget evaluations that no client asks for. To be called about once a second."""
        seconds = self.context.configuration.evaluations.retain
        for evaluation in self.records.find_abandoned_evaluations(seconds):
            if not evaluation.cleanup_completion.is_set:
                evaluation.stop_as_abandoned()
            self.records.forget_evaluation(evaluation.details.identifier, EvaluationState.EXPIRED)

    def hand_all_to_next_daemon(self) -> None:
        """Accept nothing more, and answer the clients that wait: another process goes on."""
        self.stop_accepting_evaluations()
        for evaluation in {*self.records, *self._alive.values()}:
            evaluation.hand_to_next_daemon()

    def end_drain_early(self) -> None:
        """End the time that `drain_and_close` gives to running evaluations."""
        self._is_urgent = True

    async def drain_and_close(
        self, drain_seconds: float = 0, end_seconds: float | None = None
    ) -> bool:
        """Accept nothing more, end all evaluations and return when their processes are gone.

        Running evaluations have `drain_seconds` seconds to end by themselves; `end_drain_early`
        ends this time. What clients have not read they can read from the next process. An
        evaluation that is not at its end after `end_seconds` more, such as one with much output
        that is not parsed yet, is left to the next process. Return whether there was an evaluation.
        """
        self.stop_accepting_evaluations()
        had_any = bool(self._alive)
        self._stop_alive(lambda evaluation: evaluation.details.state is EvaluationState.QUEUED)
        if drain_seconds and self._alive and not self._is_urgent:
            log.info(
                "stopping: {count} evaluations have {drain:g} seconds to end (service.drain);"
                " another signal ends them at once",
                count=len(self._alive),
                drain=drain_seconds,
            )
            deadline = self._clock.seconds() + drain_seconds
            while self._alive and not self._is_urgent:
                if (left := deadline - self._clock.seconds()) <= 0:
                    break
                await deferLater(self._clock, min(left, _LOOK))
        ends = [evaluation.cleanup_completion.wait() for evaluation in self._alive.values()]
        ended = gatherResults(ends, consumeErrors=True)
        self._stop_alive(lambda _: True)
        if end_seconds is not None:
            ended.addTimeout(end_seconds, self._clock, lambda *_: None)
        await ended
        for evaluation in self._alive.values():
            words = "{evaluation}: its end takes too long; the next start goes on with it"
            log.warn(words, evaluation=evaluation.details.log_name)
            evaluation.hand_to_next_daemon()
        return had_any

    def _stop_alive(self, is_chosen: Callable[[Evaluation], bool]) -> None:
        what = "the daemon was stopped; submit again when it is back"
        for evaluation in list(self._alive.values()):
            if is_chosen(evaluation):
                evaluation.stop(EvaluationFailure("shutdown", what))
