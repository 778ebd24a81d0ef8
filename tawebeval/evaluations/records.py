"""Records of evaluations by identifier, caller, key and age, until they are forgotten."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

import attrs
from twisted.internet.interfaces import IReactorTime

from tawebeval.core.evaluations import IDENTIFIER_PATTERN, EvaluationState, IdentifierIssuer
from tawebeval.core.shares import Share, SharedResource
from tawebeval.deferreds import OneShotEvent
from tawebeval.errors import EvaluationNotFound
from tawebeval.evaluations.details import EvaluationDetails
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.reading import EvaluationEvents
from tawebeval.evaluations.uploads import SharedUpload

_IDENTIFIER = re.compile(IDENTIFIER_PATTERN)


@attrs.define(eq=False)
class EvaluationRecord:
    """The registry's record of one evaluation.

    - `last_request_time`: the time of a client's last request, in seconds of the clock.
    - `is_stored`: happens when the evaluation outlives the daemon, or cannot be stored; None for
      one that an earlier process has stored.
    - `archive_event`: happens when the evaluation is archived, or will not be.
    - `is_removed`: whether nothing of it is left but perhaps its copy in the archive.
    """

    evaluation: Evaluation
    last_request_time: float
    is_stored: OneShotEvent[Callable[[], None]] | None = None
    archive_event: OneShotEvent[None] = attrs.field(factory=OneShotEvent)
    is_removed: bool = False

    @property
    def details(self) -> EvaluationDetails:
        """Details of the evaluation."""
        return self.evaluation.details

    @property
    def events(self) -> EvaluationEvents:
        """Events of the evaluation."""
        return self.evaluation.events

    @property
    def shared_upload(self) -> SharedUpload:
        """The form's files, counted."""
        assert self.details.shared_upload is not None, "made by the registry"
        return self.details.shared_upload

    @property
    def is_client_waiting(self) -> bool:
        """Whether a client waits for events just now, has a stream, or awaits the callback.

        Observers and a callback do not count after the end.
        """
        evaluation, events = self.evaluation, self.evaluation.events
        if events.waiting_poll_count or events.stream_count:
            return True
        is_watched = events.observer_count > 0 or evaluation.details.callback is not None
        return is_watched and not evaluation.cleanup_event.is_set

    @property
    def is_unused(self) -> bool:
        """Whether the record is forgotten, the run over, and no stream reads."""
        return (
            self.details.final_state is not None
            and self.evaluation.cleanup_event.is_set
            and not self.evaluation.events.stream_count
        )


def _make_ended_share() -> Share:
    return Share(
        SharedResource.ENDED_EVALUATIONS,
        0,
        None,
        "too many of your finished evaluations are unread (callers.kept); read them, or"
        " discard them by GET /evaluation/ID/events?after=end",
        "too many finished evaluations are unread (evaluations.kept); try again later",
    )


@attrs.define(eq=False)
class RecordIndex:
    """Index of the records that are not forgotten.

    `last_sequence_number` counts all until now, `ended_share` those that have ended; the admission
    sets its bounds. `on_forgotten` is called with each record that is dropped.
    """

    _identities: IdentifierIssuer
    _clock: IReactorTime
    _on_forgotten: Callable[[EvaluationRecord], object]
    _records: dict[str, EvaluationRecord] = attrs.field(factory=dict)
    # Evaluations that are not cleaned up, and the others, each by the time of the last request.
    # The end of an evaluation counts as a request, too.
    _active: OrderedDict[str, EvaluationRecord] = attrs.field(factory=OrderedDict)
    _kept: OrderedDict[str, EvaluationRecord] = attrs.field(factory=OrderedDict)
    # Of `_kept`, those that a stream has sent to the end, by caller and identifier.
    _sent: dict[str, dict[str, EvaluationRecord]] = attrs.field(factory=dict)
    _keys: dict[tuple[str, str], EvaluationRecord] = attrs.field(factory=dict)
    ended_share: Share = attrs.field(factory=_make_ended_share)
    last_sequence_number: int = 0

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._records

    def __iter__(self) -> Iterator[EvaluationRecord]:
        return iter(list(self._records.values()))

    def __getitem__(self, identifier: str) -> EvaluationRecord:
        return self._records[identifier]

    def find_record(
        self, identifier: str, caller: str, *, is_reader: bool = True
    ) -> EvaluationRecord | None:
        """Return a record, None for a forgotten one. Raises: EvaluationNotFound.

        The request keeps the evaluation from being expired. If the request reads no events, or
        acknowledges none, it does so only until the end: otherwise events that no client reads
        would be kept for ever.
        """
        record = self._records.get(identifier)
        if (record is None or record.details.caller != caller) and not self._identities.is_issued(
            identifier, caller
        ):
            raise EvaluationNotFound(malformed=not _IDENTIFIER.fullmatch(identifier))
        if record is not None:
            if is_reader:
                self.note_client_request(record)
            else:
                self.note_observer_request(record)
        return record

    def find_by_idempotency_key(self, key: str | None, caller: str) -> EvaluationRecord | None:
        """Return the caller's record with an `Idempotency-Key`, if there is one."""
        return None if key is None else self._keys.get((caller, key))

    def find_abandoned_evaluations(self, idle_seconds: float) -> list[EvaluationRecord]:
        """Return running and queued evaluations that no client has asked for in `idle_seconds`."""
        return self._find_unasked(self._active, idle_seconds)

    def find_unread_evaluations(self, idle_seconds: float) -> list[EvaluationRecord]:
        """Return ended evaluations that no client has asked for in `idle_seconds`."""
        return self._find_unasked(self._kept, idle_seconds)

    def _find_unasked(
        self, records: OrderedDict[str, EvaluationRecord], seconds: float
    ) -> list[EvaluationRecord]:
        latest = self._clock.seconds() - seconds
        found = []
        for record in records.values():
            if record.last_request_time > latest:
                break
            if not record.is_client_waiting:
                found.append(record)
        return found

    @property
    def has_page_reader(self) -> bool:
        """Whether a client is expected to ask for the next page of an evaluation."""
        now = self._clock.seconds()
        return any(now < one.events.page_reader_deadline for one in self._records.values())

    def list_records(
        self, caller: str, after_sequence_number: int, max_count: int
    ) -> list[EvaluationRecord]:
        """Return up to `max_count` records of a caller after `after_sequence_number`, in order."""
        found = (
            record
            for record in self._records.values()
            # Of thousands nearly all are passed over, so each property counts.
            if (details := record.evaluation.details).sequence_number > after_sequence_number
            and details.caller == caller
        )
        return list(islice(found, max_count))

    def sort_by_acceptance(self) -> None:
        """Bring records that were restored into the order of acceptance."""
        in_order = sorted(self._records.values(), key=lambda record: record.details.sequence_number)
        self._records = {record.details.identifier: record for record in in_order}

    def add_record(self, evaluation: Evaluation) -> EvaluationRecord:
        """Add the record of a new evaluation, and return it."""
        details = evaluation.details
        self.last_sequence_number = max(self.last_sequence_number, details.sequence_number)
        record = EvaluationRecord(evaluation, self._clock.seconds())
        self._records[details.identifier] = self._active[details.identifier] = record
        if details.idempotency_key is not None:
            self._keys[details.caller, details.idempotency_key] = record
        return record

    def note_observer_request(self, record: EvaluationRecord) -> None:
        """Record a request that reads no events or acknowledges none, until the end."""
        if not record.details.state.has_ended:
            self.note_client_request(record)

    def note_client_request(self, record: EvaluationRecord) -> None:
        """Record a client's request for an evaluation, unless the evaluation is forgotten."""
        identifier = record.details.identifier
        if identifier in self._records:
            record.last_request_time = self._clock.seconds()
            (self._active if identifier in self._active else self._kept).move_to_end(identifier)

    def note_evaluation_end(self, record: EvaluationRecord) -> None:
        """Record that only the events of an evaluation are left."""
        identifier = record.details.identifier
        if self._active.pop(identifier, None) is not None:
            self._kept[identifier] = record
            self.ended_share.take(1, record.details.caller)
            self._note_left(record)

    def note_stream_end(self, record: EvaluationRecord) -> None:
        """Record that a stream of an evaluation has ended."""
        self._note_left(record)

    def _note_left(self, record: EvaluationRecord) -> None:
        self.note_client_request(record)
        details = record.details
        if record.evaluation.events.was_sent_completely and details.identifier in self._kept:
            self._sent.setdefault(details.caller, {})[details.identifier] = record

    def forget_record(self, identifier: str, final_state: EvaluationState) -> None:
        """Drop a record, if it is there; `final_state` is DRAINED or EXPIRED."""
        record = self._records.pop(identifier, None)
        if record is None:
            return
        if self._active.pop(identifier, None) is None:
            del self._kept[identifier]
            self._drop_sent(record.details)
            self.ended_share.give_back(1, record.details.caller)
        if record.details.idempotency_key is not None:
            del self._keys[record.details.caller, record.details.idempotency_key]
        record.details.final_state = final_state
        self._on_forgotten(record)

    def _drop_sent(self, details: EvaluationDetails) -> None:
        sent = self._sent.get(details.caller, {})
        if sent.pop(details.identifier, None) is not None and not sent:
            del self._sent[details.caller]

    def find_sent_evaluation(self, caller: str) -> EvaluationRecord | None:
        """Return the oldest evaluation of a caller that can be forgotten, None without one.

        A stream has sent it to the end, and no client reads it again.
        """
        now = self._clock.seconds()
        for record in self._sent.get(caller, {}).values():
            deadline = record.evaluation.events.page_reader_deadline
            if not (record.is_client_waiting or now < deadline):
                return record
        return None

    def forget_sent_evaluation(self, caller: str) -> bool:
        """Forget what `find_sent_evaluation` returns; return whether there was one."""
        record = self.find_sent_evaluation(caller)
        if record is not None:
            self.forget_record(record.details.identifier, EvaluationState.EXPIRED)
        return record is not None
