"""All evaluations of the daemon: admission, reading, listing, expiry and shutdown."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import orjson
from twisted.internet.defer import TimeoutError as WaitTimedOut
from twisted.logger import Logger

from tawebeval.core.budget import UploadBudget
from tawebeval.core.form import draw_seed
from tawebeval.core.identifiers import IdentifierIssuer
from tawebeval.core.pages import (
    DUMMY_END,
    EventPage,
    locate_cursor,
    make_end_page,
    parse_cursor,
    read_page,
)
from tawebeval.core.states import EvaluationState
from tawebeval.core.tokens import ANONYMOUS
from tawebeval.deferreds import FairQueue, run_in_background
from tawebeval.errors import (
    CallerShareExceeded,
    EvaluationExpired,
    EvaluationFailure,
    IdempotencyKeyReused,
    InvalidCursor,
    ServerBusy,
    ServerStopping,
)
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.evaluations.filters import EVERY_EVALUATION, EvaluationFilter
from tawebeval.evaluations.records import EvaluationRecord, ReceivedForm, RecordIndex, Subscription
from tawebeval.evaluations.shutdown import Drain
from tawebeval.evaluations.status import build_listing_entry, build_status, format_time
from tawebeval.linux.filetree import remove_tree
from tawebeval.sandbox.workspace import Workspace, derive_directory_name
from tawebeval.webhooks.callback import Callback
from tawebeval.webhooks.deliveries import CallbackQueue

_RETRY_AFTER = 5  # seconds, if the queue is full
_RETRY_LATER = 30  # seconds, if too many events are unread
_NEXT_PAGE = 30.0  # seconds after a page in which its reader is expected to ask for the next
LISTING_SIZE = 100  # evaluations in one answer, at most
EXAMINED_AT_ONCE = 500  # evaluations that a filter examines for one answer, at most: about 2 ms
_MARK = 5  # random bytes in the cursors of lists
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")

log = Logger()


@attrs.frozen
class EvaluationListing:
    """Some evaluations of one caller, in the order of their acceptance.

    `begin` is the cursor before the first of them, None at the start of the list; `end` is the
    cursor after the last of them, None if no other evaluation follows now. `data` are the
    summaries.
    """

    begin: str | None
    end: str | None
    data: list[dict[str, Any]]


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
        self._started = format_time(context.read_wall_clock())
        self._identities = identities
        self._root = root
        self._callbacks = callbacks
        self.records = RecordIndex(identities, context.clock)
        # In the cursors of lists: those of another start of the daemon are refused by it.
        self.cursor_mark = context.random_bytes(_MARK).hex()
        self.run_queue = FairQueue(*bounds, admits=self._has_memory)
        # Evaluations with a process or a directory left, also those without a record.
        self._alive: dict[str, EvaluationRecord] = {}
        self.subscriptions: set[Subscription] = set()
        self._drain = Drain(self._alive, self.records, self.subscriptions, self._clock)
        self.upload_budget = UploadBudget(context.configuration.limits.uploads)

    # Admission

    def check_not_stopping(self) -> None:
        """Raise Stopping if the daemon is about to stop."""
        if self._drain.has_begun:
            raise ServerStopping

    def check_admission(self, caller: str = "") -> None:
        """Raise Stopping, OverShare or Busy if a new evaluation would be refused.

        OverShare, which the caller can remedy, comes before Busy. Before a refusal the registry
        forgets evaluations that a stream has sent to the end: they are kept only for clients that
        have lost some of the events.
        """
        self.check_not_stopping()
        while self._has_kept_share(caller) and self.records.forget_sent_evaluation(caller):
            pass
        while self._has_too_much_kept() and self.records.forget_sent_evaluation():
            pass
        if self._has_kept_share(caller):
            raise CallerShareExceeded(
                "too many of your finished evaluations are unread (callers.kept); read them, or"
                " discard them by GET /evaluation/ID/events?after=end",
                _RETRY_LATER,
            )
        if not self._has_memory(caller):
            raise CallerShareExceeded(
                "your unread events use up your share of memory (callers.buffers); read them, or"
                " discard those of finished evaluations by GET /evaluation/ID/events?after=end",
                _RETRY_LATER,
            )
        if self._has_too_much_kept():
            raise ServerBusy(
                "too many finished evaluations are unread (evaluations.kept, buffers.total); try"
                " again later",
                _RETRY_LATER,
            )
        if self.run_queue.is_share_used_up(caller):
            raise CallerShareExceeded(
                "too many of your evaluations are queued (callers.queued); try again later",
                _RETRY_AFTER,
            )
        if self.run_queue.is_full(caller):
            raise ServerBusy(
                "the queue is full (evaluations.queued); try again later", _RETRY_AFTER
            )

    def _has_memory(self, caller: str) -> bool:
        """Return whether a caller may use more memory for events; the queue asks, too.

        If not, the queue is dispatched as soon as the caller uses less.
        """
        budget = self.context.ring_budget
        while budget.is_share_used_up(caller) and self.records.forget_sent_evaluation(caller):
            pass
        if not budget.is_share_used_up(caller):
            return True
        budget.call_when_share_free(caller, self.run_queue.dispatch_slots)
        return False

    def _has_too_much_kept(self) -> bool:
        return (
            self.records.kept_count >= self.context.configuration.evaluations.kept
            or self.context.ring_budget.is_exhausted
        )

    def _has_kept_share(self, caller: str) -> bool:
        """Return whether a caller has as many unread finished evaluations as `callers.kept`."""
        configuration = self.context.configuration
        share = configuration.callers.kept
        if caller == ANONYMOUS or not 0 < share < configuration.evaluations.kept:
            return False
        return self.records.count_kept(caller) >= share

    # Life of an evaluation

    def accept_form(self, upload: ReceivedForm, caller: str = "") -> str:
        """Queue a new evaluation and return its identifier.

        A form with an `Idempotency-Key` that the caller has used before is discarded; its answer
        is the identifier of the first evaluation.

        Raises: KeyReused (the first form was another one), Stopping, OverShare, Busy, InvalidField
        (the daemon does not call the `callback_url`).
        """
        known = self.records.find_by_key(upload.idempotency_key, caller)
        if known is not None:
            if known.form_digest != upload.form_digest:
                raise IdempotencyKeyReused(
                    "Idempotency-Key: this key was used with another form; send a new key"
                )
            self.discard_upload(upload.directory, upload.size)
            return known.evaluation.identifier
        url = upload.request.callback_url
        callback = None if url is None else self._callbacks.create_callback(url, caller)
        self.check_admission(caller)
        evaluation = self._make_evaluation(upload, caller, callback)
        self._alive[evaluation.identifier] = self.records.add_record(evaluation, upload, caller)
        evaluation.cleanup_event.add_callback(self._on_cleaned_up)
        evaluation.enter_queue(self.run_queue)
        return evaluation.identifier

    def _make_evaluation(
        self, upload: ReceivedForm, caller: str, callback: Callback | None
    ) -> Evaluation:
        identifier = self._identities.issue_identifier(caller)
        seed = upload.request.seed
        return Evaluation(
            identifier=identifier,
            request=upload.request,
            seed=draw_seed(self.context.random_bytes) if seed is None else seed,
            upload_directory=upload.directory,
            workspace=Workspace(self._root / derive_directory_name(identifier)),
            context=self.context,
            caller=caller,
            callback=callback,
            on_full=self._on_full,
        )

    def _on_full(self, evaluation: Evaluation) -> None:
        self.records.make_ring_room(self._alive[evaluation.identifier])

    def _on_cleaned_up(self, evaluation: Evaluation) -> None:
        record = self._alive[evaluation.identifier]
        try:
            # Before `end`: it changes the state of an evaluation that has no record any more.
            self._notify(evaluation)
        finally:
            self.records.note_evaluation_end(record)
            del self._alive[evaluation.identifier]
            self.upload_budget.remove_bytes(record.memory_size)
            self.run_queue.dispatch_slots()
            self._drain.on_drain_progress()

    def _notify(self, evaluation: Evaluation) -> None:
        """Send the callback of an evaluation that has ended, if its form asks for one."""
        callback = evaluation.callback
        if callback is not None:
            self._callbacks.start_delivery(
                callback, evaluation.log_name, lambda: orjson.dumps(build_status(evaluation, None))
            )

    def discard_upload(self, directory: Path, size: int) -> None:
        """Remove the `directory` of a form that becomes no evaluation; give back `size` bytes."""
        attempt = self.context.cleanup_queue.attempt_call(
            "removal of an upload",
            remove_tree,
            directory,
            on_success=lambda: self.upload_budget.remove_bytes(size),
        )
        run_in_background(attempt, log, "an upload could not be removed")

    async def cancel_evaluation(self, identifier: str, caller: str = "") -> None:
        """Stop an evaluation and return when only its events are left.

        An evaluation that has ended is left as it is. Raises: EvaluationNotFound.
        """
        record = self.records.find_record(identifier, caller, reads=False)
        record = record or self._alive.get(identifier)
        if record is not None:
            record.evaluation.stop(EvaluationFailure("cancelled", "the evaluation was cancelled"))
            await record.evaluation.cleanup_event.wait()

    # Events: pages and streams

    def read_page(
        self,
        identifier: str,
        after: str | None,
        caller: str = "",
        limit: int | None = None,
        *,
        with_times: bool = False,
    ) -> EventPage:
        """Return the page as `peek_page` does, and acknowledge the events before it."""
        record = self._find_at(identifier, after, caller)
        if record is None:
            self._drop_read(identifier)
            return make_end_page()
        page = self._read(record, after, limit, with_times)
        begin = locate_cursor(record.evaluation.ring, page.begin)
        self._drain.add_page_reader(identifier)
        self._expect_next_page(record)
        record.readers.acknowledge(begin)
        return page

    def peek_page(
        self,
        identifier: str,
        after: str | None,
        caller: str = "",
        limit: int | None = None,
        *,
        with_times: bool = False,
    ) -> EventPage:
        """Return the page that begins at the cursor `after`, without an acknowledgement.

        The page has at most `limit` bytes of events, at most `buffers.page`, and at least one
        event if there are any. If `with_times`, each event has its time, on top of the limit.

        Raises: the RequestErrors of the contract, section 3.
        """
        record = self._find_at(identifier, after, caller)
        return make_end_page() if record is None else self._read(record, after, limit, with_times)

    async def wait_for_page(
        self,
        identifier: str,
        after: str | None,
        wait: float,
        caller: str = "",
        limit: int | None = None,
        *,
        with_times: bool = False,
    ) -> EventPage:
        """Return the page of `read_page` when there are new events, or after `wait` seconds.

        To be called right after `read_page` has returned a page without news. Raises: as
        `read_page`.
        """
        record = self.records[identifier]
        try:
            with suppress(WaitTimedOut):
                await record.evaluation.change_condition.wait().addTimeout(wait, self._clock)
        finally:  # also when the client has gone: it may ask again
            self._expect_next_page(record)
        return self.read_page(identifier, after, caller, limit, with_times=with_times)

    def subscribe(
        self, identifier: str, after: str | None, caller: str = "", skip: int = 0
    ) -> Subscription | None:
        """Return a subscription to the events from `skip` events after the cursor `after` on.

        The cursor of the very end acknowledges all events, as with pages: the evaluation is
        forgotten, and the answer is None. Raises: as `peek_page`.
        """
        record = self._find_at(identifier, after, caller)
        if record is None:
            self._drop_read(identifier)
            return None
        return Subscription(
            locate_cursor(record.evaluation.ring, after or None, skip),
            record.readers,
            self.subscriptions,
            lambda: self._on_unsubscribed(record),
        )

    def can_subscribe(
        self, identifier: str, after: str | None, caller: str = "", skip: int = 0
    ) -> bool:
        """Return whether `subscribe` would return a subscription, without an acknowledgement.

        Raises: as `peek_page`.
        """
        record = self._find_at(identifier, after, caller)
        if record is not None:
            locate_cursor(record.evaluation.ring, after or None, skip)
        return record is not None

    def _find_at(self, identifier: str, after: str | None, caller: str) -> EvaluationRecord | None:
        """Return the record in which to read after a cursor; None after the very end."""
        cursor = parse_cursor(after)
        record = self.records.find_record(identifier, caller)
        if record is None and cursor != DUMMY_END:
            raise EvaluationExpired(self._started)
        if cursor == DUMMY_END and (record is None or record.evaluation.ring.is_closed):
            return None
        return record

    def _read(
        self, record: EvaluationRecord, after: str | None, limit: int | None, with_times: bool
    ) -> EventPage:
        most = self.context.configuration.buffers.page
        size = most if limit is None else min(limit, most)
        return read_page(
            record.evaluation.ring, after or None, size, format_time if with_times else None
        )

    def _expect_next_page(self, record: EvaluationRecord) -> None:
        record.readers.next_page_deadline = self._clock.seconds() + _NEXT_PAGE

    def _on_unsubscribed(self, record: EvaluationRecord) -> None:
        self.records.note_stream_end(record)
        self.run_queue.dispatch_slots()  # what the stream has sent may have been in a caller's way
        self._drain.on_drain_progress()

    def _drop_read(self, identifier: str) -> None:
        """Forget an evaluation that was read to its end."""
        self.records.forget_record(identifier, EvaluationState.DRAINED)
        self._drain.on_drain_progress()

    # Status and lists

    def get_status(self, identifier: str, caller: str = "") -> dict[str, Any]:
        """Return the status document. Raises: EvaluationNotFound, EvaluationExpired.

        A look at the status does not keep an evaluation that waits for a reader of its events.
        """
        record = self.records.find_record(identifier, caller, reads=False)
        if record is None:
            raise EvaluationExpired(self._started)
        return build_status(record.evaluation, self.run_queue.find_waiter_position(identifier))

    def list_evaluations(
        self, after: str | None, caller: str = "", wanted: EvaluationFilter = EVERY_EVALUATION
    ) -> EvaluationListing:
        """Return up to 100 evaluations of a caller that were accepted after a cursor.

        None and the empty cursor stand for the start of the list. A filter examines a bounded
        number of evaluations in one call, so there may be fewer, or none. Raises: InvalidCursor.
        """
        number = self._parse_list_cursor(after) if after else 0
        examined = LISTING_SIZE if wanted.is_empty else EXAMINED_AT_ONCE
        found = self.records.list_records(caller, number, examined + 1)
        listed: list[Evaluation] = []
        end = None
        for record, following in pairwise((*found, None)):
            assert record is not None, "only the last is None"
            if wanted.matches(record.evaluation):
                listed.append(record.evaluation)
            examined -= 1
            if following is not None and (len(listed) == LISTING_SIZE or not examined):
                end = f"{self.cursor_mark}-{record.sequence_number}"
                break
        return EvaluationListing(after or None, end, list(map(build_listing_entry, listed)))

    def _parse_list_cursor(self, cursor: str) -> int:
        mark, _, number = cursor.partition("-")
        if (
            mark != self.cursor_mark
            or not _NUMBER.fullmatch(number)
            or int(number) > self.records.accepted_count
        ):
            raise InvalidCursor(
                f"after: {cursor[:80]!r} is not a cursor of this list, or it is from before the"
                " daemon's start; begin again without `after`"
            )
        return int(number)

    # Housekeeping and shutdown

    def expire_evaluations(self) -> None:
        """Forget evaluations that no client asks for, and stop those whose readers are too slow.

        To be called about once a second.
        """
        settings = self.context.configuration.evaluations
        for record in self.records.find_abandoned(settings.abandon_after):
            record.evaluation.abandon()
            self.records.forget_record(record.evaluation.identifier, EvaluationState.EXPIRED)
        for record in self.records.find_unread(settings.retain):
            self.records.forget_record(record.evaluation.identifier, EvaluationState.EXPIRED)
        for identifier, wanted in self.run_queue.list_slot_holders():
            record = self._alive[identifier]
            record.evaluation.check_reader_timeout(
                record.readers.furthest_read_cursor, wanted=wanted
            )
        self.run_queue.dispatch_slots()  # the time in which pages are expected may have passed

    def end_drain(self) -> None:
        """End the time that `close` gives to running evaluations."""
        self._drain.end_drain()

    async def close(self, drain: float = 0) -> bool:
        """Accept nothing more, end all evaluations and return when their processes are gone.

        Running evaluations have `drain` seconds to end by themselves; readers then have some
        seconds for the last events. Return whether there was an evaluation or a reader.
        """
        return await self._drain.drain_evaluations(drain)
