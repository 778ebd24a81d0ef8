"""Records of evaluations, and the readers of their events.

The ring discards only what no reader needs any more. Pages acknowledge what is before them. Of a
stream the kernels of both ends, and proxies between them, hold megabytes that are lost if the
connection is cut. So a stream notes for each piece the position in the connection's bytes at which
the piece ends; when the ring needs room, the connection says up to which position the client has
read. A client may also acknowledge events itself; then only its acknowledgements count. If a
connection shows no progress for `STREAM_RESUME_TIMEOUT`, the bytes that the client's kernel has
acknowledged count as read, where that is needed or harmless.

Observers read, too, but acknowledge nothing: the ring discards events whether or not observers have
read them. They are the requests with a token that only reads.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from tawebeval.core.budget import SharedUpload
from tawebeval.core.events import EventBatch
from tawebeval.core.form import EvaluationRequest
from tawebeval.core.identifiers import IDENTIFIER_PATTERN, IdentifierIssuer
from tawebeval.core.ring import EventRetention, StreamPosition
from tawebeval.core.states import EvaluationState
from tawebeval.errors import DiscardedCursor, EvaluationNotFound
from tawebeval.evaluations.details import EvaluationDetails
from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.evaluations.status import format_rfc3339_time

STREAM_RESUME_TIMEOUT = 30.0
"""Seconds for which events are kept for the client of a stream that was cut, or that rests."""

_IDENTIFIER = re.compile(IDENTIFIER_PATTERN)
_NOTED = 8 * 1024  # bytes of a connection between two positions that are noted, at least


@attrs.frozen
class ReceivedForm:
    """A form that has arrived, with its files below `directory`.

    `idempotency_key` is the `Idempotency-Key`, None without one; `form_digest` identifies the
    form's content. `upload_bytes` is the number of bytes that the form takes of the space for
    uploads; `reused_upload` is in place of it the share of the submission whose files it links,
    counted as a user.
    """

    request: EvaluationRequest
    directory: Path
    idempotency_key: str | None = None
    form_digest: bytes = b""
    upload_bytes: int = 0
    reused_upload: SharedUpload | None = None


class ReaderConnection(Protocol):
    """A connection that knows how much of its output the client has read."""

    def count_written_and_read_bytes(self) -> tuple[int, int]:
        """Return the bytes written to the connection, and the bytes that the client has read."""

    def set_keepalive_probing(self, enabled: bool) -> None:
        """Start or stop asking the client's machine for its acknowledgements.

        Without new data that machine need not report that the client has read more.
        """

    def treat_acknowledged_as_read(self, max_unread_bytes: int) -> None:
        """Count bytes that the client's kernel has acknowledged as read by the client.

        Do nothing if the connection is sound and the client may have more than `max_unread_bytes`
        bytes unread.
        """


class UnmeasuredConnection:
    """A connection without knowledge of the client: all bytes written count as read."""

    def count_written_and_read_bytes(self) -> tuple[int, int]:
        """Return that no byte is on the way."""
        return 0, 0

    def set_keepalive_probing(self, enabled: bool) -> None:
        """Do nothing."""

    def treat_acknowledged_as_read(self, max_unread_bytes: int) -> None:
        """Do nothing."""


@attrs.define
class EvaluationReaders:
    """The readers of one evaluation: streams, and clients that ask for pages.

    A client of pages is expected back until `page_reader_deadline`, in seconds of the clock. (A
    client that waits longer for a page has all events.) `was_sent_completely` is whether a stream
    has sent all events and the end. `furthest_read_cursor` is the last cursor up to which a client
    has read. `waiting_poll_count` and `observer_count` count the requests for pages that wait, and
    the streams and waiting requests of observers.
    """

    evaluation: Evaluation
    retention: EventRetention
    clock: IReactorTime
    page_reader_deadline: float = float("-inf")
    was_sent_completely: bool = False
    furthest_read_cursor: int = 0
    waiting_poll_count: int = 0
    observer_count: int = 0
    _streams: dict[AcknowledgingSubscription, None] = attrs.field(factory=dict)
    _retry: IDelayedCall | None = None

    def add_stream(self, stream: AcknowledgingSubscription) -> StreamPosition:
        """Keep the events that the client of a stream has yet to read."""
        self._streams[stream] = None
        return self.retention.add_stream(stream.read_cursor)

    def remove_stream(
        self, stream: AcknowledgingSubscription, stream_position: StreamPosition, *, was_cut: bool
    ) -> None:
        """Remove a stream; if it `was_cut`, its client has `STREAM_RESUME_TIMEOUT` to come back."""
        del self._streams[stream]
        if was_cut:
            self.retention.keep_events_for_resume(
                stream_position, stream.read_cursor, self.clock.seconds() + STREAM_RESUME_TIMEOUT
            )
        else:
            self.retention.remove_stream(stream_position)
        self.discard_unneeded_events()

    def acknowledge(self, after: int) -> None:
        """Record that a client has asked for the page after a cursor."""
        self.furthest_read_cursor = max(self.furthest_read_cursor, after)
        if self.retention.acknowledge(after):  # most pages are asked for twice: no new room
            self.discard_unneeded_events()

    def discard_unneeded_events(self) -> None:
        """Discard events that no reader needs, and let the evaluator write on.

        To be called when a reader needs less, and when the ring has become full.
        """
        for stream in self._streams:
            stream.update_received_cursor()
        now = self.clock.seconds()
        paged = now < self.page_reader_deadline
        self.retention.discard_received_events(
            self.evaluation.ring_allocation.max_ring_bytes, now=now, has_page_reader=paged
        )
        self.evaluation.on_acknowledge()
        self._plan_retry(now)

    def _plan_retry(self, now: float) -> None:
        """Call `discard_unneeded_events` again when no page and no resumed stream is expected.

        All streams may have read all events, and then nothing else would call it.
        """
        times = (
            self.page_reader_deadline,
            self.retention.resume_deadline or self.page_reader_deadline,
        )
        expected = [time - now for time in times if time > now]
        held = bool(len(self.retention) and expected) and self.evaluation.ring_allocation.is_full
        if held and self._retry is None:
            self._retry = self.clock.callLater(min(expected), self._on_retry)
        elif not held and self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _on_retry(self) -> None:
        self._retry = None
        self.discard_unneeded_events()


@attrs.define(eq=False)
class Subscription:
    """A stream's subscription to the events of an evaluation, and a context manager.

    This one is an observer's: it keeps no event. `read_cursor` is the cursor after the last event
    read from the ring. `registered` are all subscriptions of the registry; `on_left()` is called
    after the context. Set `reader_connection` before the context if the connection knows what the
    client has read. Events have their times if `with_times` is set.
    """

    read_cursor: int
    _readers: EvaluationReaders
    _registered: set[Subscription]
    _on_left: Callable[[], object]
    reader_connection: ReaderConnection = attrs.field(factory=UnmeasuredConnection)
    with_times: bool = False

    def __enter__(self) -> None:
        self._registered.add(self)
        self._enter()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._leave(is_complete=error is None and self.has_ended)
        self._registered.remove(self)
        self._on_left()

    def _enter(self) -> None:
        self._readers.observer_count += 1

    def _leave(self, *, is_complete: bool) -> None:
        self._readers.observer_count -= 1

    @property
    def has_ended(self) -> bool:
        """Whether all events were read, and no event will follow."""
        ring = self._readers.evaluation.ring
        return ring.has_ended and self.read_cursor == ring.end_cursor

    def read_events(self, limit: int) -> EventBatch:
        """Read the next events, at most `limit` bytes but at least one event if there are any.

        Raises: DiscardedCursor.
        """
        ring = self._readers.evaluation.ring
        if self.read_cursor < ring.begin_cursor:
            raise DiscardedCursor(str(ring.begin_cursor))
        if self.with_times:
            batch = ring.read_timed_events(self.read_cursor, limit, format_rfc3339_time)
        else:
            batch = ring.read_events(self.read_cursor, limit)
        self.read_cursor += batch.count
        return batch

    def wait_for_events(self) -> Deferred[None]:
        """Return a Deferred that fires at the next events, or at the end."""
        return self._readers.evaluation.change_condition.wait()

    def note_events_written(self) -> None:
        """Record that all events read so far were written to the connection."""

    def probe_client_if_evaluator_waits(self) -> bool:
        """Have the connection probe the client if the evaluator may wait for this client.

        Return whether it may: the ring is full, and the client was sent events that it has not
        shown to have.
        """
        return False

    def acknowledge(self, cursor: int) -> bool:
        """Record the client's acknowledgement of all events before `cursor`.

        From the first acknowledgement on, only acknowledgements count. Return False for a cursor
        beyond the events sent.
        """
        return cursor <= self.read_cursor


@attrs.define(eq=False)
class AcknowledgingSubscription(Subscription):
    """The subscription of a stream whose client is a reader.

    Within the context no event is discarded that the client has yet to read, and the stream reads
    on even if the evaluation is forgotten.
    """

    stream_position: StreamPosition = attrs.field(init=False)
    _has_acknowledged: bool = False  # whether the client acknowledges events itself
    # Ends of pieces: bytes written to the connection, and the cursor after the events.
    unread_write_positions: deque[tuple[int, int]] = attrs.field(factory=deque)
    # While the evaluator may wait for the client: the bytes that it has read, and since when.
    _standstill: tuple[int, float] | None = None

    def _enter(self) -> None:
        self.stream_position = self._readers.add_stream(self)
        # If the ring is full and this stream has read all of it, nothing else would make room.
        self._readers.discard_unneeded_events()

    def _leave(self, *, is_complete: bool) -> None:
        if is_complete:
            self._readers.was_sent_completely = True
        self._readers.remove_stream(self, self.stream_position, was_cut=not is_complete)

    def note_events_written(self) -> None:
        """Record that all events read so far were written to the connection."""
        if not self._has_acknowledged:
            written, _ = self.reader_connection.count_written_and_read_bytes()
            if (
                len(self.unread_write_positions) > 1
                and written - self.unread_write_positions[-2][0] < _NOTED
            ):
                self.unread_write_positions.pop()
            self.unread_write_positions.append((written, self.read_cursor))
        self._readers.discard_unneeded_events()

    def probe_client_if_evaluator_waits(self) -> bool:
        """Do as `Subscription` says."""
        held = (
            self._readers.evaluation.ring_allocation.is_full
            and self.stream_position.received_cursor < self.read_cursor
        )
        is_measured = held and not self._has_acknowledged
        self.reader_connection.set_keepalive_probing(is_measured)
        if is_measured:
            self._end_standstill()
        else:
            self._standstill = None
        return held

    def _end_standstill(self) -> None:
        """Count acknowledged bytes as read after `STREAM_RESUME_TIMEOUT` without progress.

        A sound connection's client may really have them unread. A cut must not cost it events, so
        then they count only if the ring has them anyway: half of it is less than it keeps.
        """
        now = self._readers.clock.seconds()
        _, read = self.reader_connection.count_written_and_read_bytes()
        if self._standstill is None or self._standstill[0] != read:
            self._standstill = read, now
        elif now - self._standstill[1] >= STREAM_RESUME_TIMEOUT:
            self.reader_connection.treat_acknowledged_as_read(
                self._readers.evaluation.ring_allocation.max_ring_bytes // 2
            )
            self._standstill = None

    def update_received_cursor(self) -> None:
        """Record what the client has read by now: those events may be discarded."""
        if self._has_acknowledged:
            self.unread_write_positions.clear()
        elif self.unread_write_positions:
            _, read = self.reader_connection.count_written_and_read_bytes()
            while self.unread_write_positions and self.unread_write_positions[0][0] <= read:
                self._take(self.unread_write_positions.popleft()[1])

    def acknowledge(self, cursor: int) -> bool:
        """Do as `Subscription` says."""
        if cursor > self.read_cursor:
            return False
        self._has_acknowledged = True
        if cursor > self.stream_position.received_cursor:
            self._take(cursor)
            self._readers.discard_unneeded_events()
        return True

    def _take(self, cursor: int) -> None:
        self.stream_position.received_cursor = cursor
        self._readers.furthest_read_cursor = max(self._readers.furthest_read_cursor, cursor)


@attrs.define(eq=False)
class EvaluationRecord:
    """The registry's record of one evaluation.

    `last_request_time` is the time of a client's last request, in seconds of the clock.
    """

    evaluation: Evaluation
    last_request_time: float
    readers: EvaluationReaders

    @property
    def details(self) -> EvaluationDetails:
        """Details of the evaluation."""
        return self.evaluation.details

    @property
    def shared_upload(self) -> SharedUpload:
        """The form's files, counted."""
        assert self.details.shared_upload is not None, "made by the registry"
        return self.details.shared_upload

    @property
    def is_client_waiting(self) -> bool:
        """Whether a client waits for events just now, has a stream, or awaits the callback.

        Observers and a callback do not count after the end, nor while the ring is full: without a
        reader there is no end.
        """
        evaluation, readers = self.evaluation, self.readers
        if readers.waiting_poll_count or len(readers.retention):
            return True
        is_watched = readers.observer_count > 0 or evaluation.details.callback is not None
        is_due = is_watched and not evaluation.cleanup_event.is_set
        return is_due and not evaluation.ring_allocation.is_full

    def discard_events_if_unused(self) -> None:
        """Release the events once the record is forgotten, the run over, and no stream reads."""
        if (
            self.details.final_state is not None
            and self.evaluation.cleanup_event.is_set
            and not len(self.readers.retention)
        ):
            self.evaluation.discard_events(self.details.final_state)


@attrs.define(eq=False)
class RecordIndex:
    """Index of the records that are not forgotten.

    `accepted_count` is the number of all until now, `ended_counts_by_caller` that of the ended
    evaluations of each caller. `on_forgotten` is called with each record that is dropped.
    """

    _identities: IdentifierIssuer
    _clock: IReactorTime
    _on_forgotten: Callable[[EvaluationRecord], object]
    _records: dict[str, EvaluationRecord] = attrs.field(factory=dict)
    # Evaluations that are not cleaned up, and the others, each by the time of the last request.
    # The end of an evaluation counts as a request, too.
    _active: OrderedDict[str, EvaluationRecord] = attrs.field(factory=OrderedDict)
    _kept: OrderedDict[str, EvaluationRecord] = attrs.field(factory=OrderedDict)
    # Of `_kept`, those that a stream has sent to the end.
    _sent: dict[str, EvaluationRecord] = attrs.field(factory=dict)
    _keys: dict[tuple[str, str], EvaluationRecord] = attrs.field(factory=dict)
    ended_counts_by_caller: Counter[str] = attrs.field(factory=Counter)
    accepted_count: int = 0

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._records

    def __iter__(self) -> Iterator[EvaluationRecord]:
        return iter(list(self._records.values()))

    def __getitem__(self, identifier: str) -> EvaluationRecord:
        return self._records[identifier]

    @property
    def ended_count(self) -> int:
        """Number of evaluations that have ended and are not forgotten."""
        return len(self._kept)

    def find_record(
        self, identifier: str, caller: str, *, is_reader: bool = True
    ) -> EvaluationRecord | None:
        """Return a record, None for a forgotten one. Raises: EvaluationNotFound.

        The request keeps the evaluation from being expired. If the request `is_reader` no events,
        or acknowledges none, it does so only while the evaluator runs and the ring has room:
        otherwise events that no client reads would be kept for ever.
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

    def find_evaluations_read_by_pages(self) -> list[str]:
        """Return the identifiers of evaluations whose next page a client is expected to ask for."""
        now = self._clock.seconds()
        return [
            name
            for name, record in self._records.items()
            if now < record.readers.page_reader_deadline
        ]

    def list_records(self, caller: str, after: int, limit: int) -> list[EvaluationRecord]:
        """Return up to `limit` records of a caller after the `number` `after`, in order."""
        found = (
            record
            for record in self._records.values()
            if record.details.sequence_number > after and record.details.caller == caller
        )
        return list(islice(found, limit))

    def sort_by_acceptance(self) -> None:
        """Bring records that were restored into the order of acceptance."""
        in_order = sorted(self._records.values(), key=lambda record: record.details.sequence_number)
        self._records = {record.details.identifier: record for record in in_order}

    def add_record(self, evaluation: Evaluation) -> EvaluationRecord:
        """Add the record of a new evaluation, and return it."""
        details = evaluation.details
        self.accepted_count = max(self.accepted_count, details.sequence_number)
        readers = EvaluationReaders(evaluation, EventRetention(evaluation.ring), self._clock)
        record = EvaluationRecord(evaluation, self._clock.seconds(), readers)
        self._records[details.identifier] = self._active[details.identifier] = record
        if details.idempotency_key is not None:
            self._keys[details.caller, details.idempotency_key] = record
        return record

    def note_observer_request(self, record: EvaluationRecord) -> None:
        """Record a request that reads no events or acknowledges none, unless a reader is needed."""
        evaluation = record.evaluation
        if not evaluation.details.state.has_ended and not evaluation.ring_allocation.is_full:
            self.note_client_request(record)

    def note_client_request(self, record: EvaluationRecord) -> None:
        """Record a client's request for an evaluation, unless the evaluation is forgotten."""
        identifier = record.details.identifier
        if identifier in self._records:
            record.last_request_time = self._clock.seconds()
            (self._active if identifier in self._active else self._kept).move_to_end(identifier)

    def handle_full_ring(self, record: EvaluationRecord) -> None:
        """Discard what can be discarded of a full ring; if nothing can, the evaluator waits."""
        if record.details.callback is not None or record.readers.observer_count:
            self.note_client_request(record)  # until now the callback or an observer has kept it
        record.readers.discard_unneeded_events()

    def note_evaluation_end(self, record: EvaluationRecord) -> None:
        """Record that only the events of an evaluation are left."""
        identifier = record.details.identifier
        if self._active.pop(identifier, None) is not None:
            self._kept[identifier] = record
            self.ended_counts_by_caller[record.details.caller] += 1
            self._note_left(record)
        record.discard_events_if_unused()

    def note_stream_end(self, record: EvaluationRecord) -> None:
        """Record that a stream of an evaluation has ended."""
        self._note_left(record)
        record.discard_events_if_unused()

    def _note_left(self, record: EvaluationRecord) -> None:
        self.note_client_request(record)
        if record.readers.was_sent_completely and record.details.identifier in self._kept:
            self._sent[record.details.identifier] = record

    def forget_record(self, identifier: str, final_state: EvaluationState) -> None:
        """Drop a record, if it is there; `final_state` is DRAINED or EXPIRED."""
        record = self._records.pop(identifier, None)
        if record is None:
            return
        if self._active.pop(identifier, None) is None:
            del self._kept[identifier]
            self._sent.pop(identifier, None)
            self.ended_counts_by_caller[record.details.caller] -= 1
            if not self.ended_counts_by_caller[record.details.caller]:
                del self.ended_counts_by_caller[record.details.caller]
        if record.details.idempotency_key is not None:
            del self._keys[record.details.caller, record.details.idempotency_key]
        record.details.final_state = final_state
        self._on_forgotten(record)
        record.discard_events_if_unused()
        record.evaluation.save_snapshot()

    def forget_fully_sent_evaluation(self, caller: str | None = None) -> bool:
        """Forget one evaluation that a stream has sent to the end; return whether there was one.

        The oldest such evaluation of the caller, or of all callers for None, that no client reads
        again.
        """
        now = self._clock.seconds()
        for identifier, record in self._sent.items():
            is_read = record.is_client_waiting or now < record.readers.page_reader_deadline
            if caller in (None, record.details.caller) and not is_read:
                self.forget_record(identifier, EvaluationState.EXPIRED)
                return True
        return False
