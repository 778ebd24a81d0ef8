"""Archived evaluations as the API shows them: pages, streams, status, submission.

The web layer asks here once the registry has raised `EvaluationExpired`. Reading an archived
evaluation changes nothing: any cursor can be read, any number of times.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import attrs
import orjson
from twisted.internet.defer import Deferred, succeed

from tawebeval.archive.files import ArchiveFile
from tawebeval.archive.index import ArchiveQuery, IndexedEvaluation
from tawebeval.archive.store import RecordingEnd
from tawebeval.core.evaluation_lists import ListEntry
from tawebeval.core.events import EventBatch, encode_error_event
from tawebeval.core.pages import (
    ALL_RECEIVED_CURSOR,
    EventPage,
    make_empty_last_page,
    parse_cursor,
    resolve_cursor,
)
from tawebeval.core.ring import EventRing
from tawebeval.errors import DamagedArchive, DiscardedCursor, EvaluationExpired
from tawebeval.evaluations.archive import EvaluationArchive
from tawebeval.evaluations.details import EvaluationDetails
from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.evaluations.filters import EvaluationFilter
from tawebeval.evaluations.reading import Subscription
from tawebeval.evaluations.status import build_listing_entry, build_status
from tawebeval.evaluations.timestamps import format_rfc3339_time

_PIECE_BYTES = 64 * 1024  # bytes of events that a thread reads at once, for a stream
_LOST_EVENT = encode_error_event(
    "lost",
    "the events that follow are lost: the file of the evaluation in the archive is damaged; the"
    " daemon's log has the reason",
)

T = TypeVar("T")


def make_recording_end(evaluation: Evaluation) -> RecordingEnd:
    """Return what is archived of an evaluation besides its events."""
    details, status = evaluation.details, build_status(evaluation, None)
    # All events can be read again, from the first on.
    events = {"buffered": evaluation.ring.end_cursor, "discarded": 0}
    return RecordingEnd(
        details.sequence_number,
        details.state_times["created"],
        details.state_times["ended"],
        {**status, "events": events, "buffered_bytes": 0, "archived": True},
        build_listing_entry(details),
        evaluation.workspace if details.has_kept_submission else None,
    )


@attrs.frozen
class ListedEvaluation:
    """An evaluation of a list: in memory, or a row of the archive.

    A row without an entry does not match the filter of the list.
    """

    details_or_row: EvaluationDetails | IndexedEvaluation

    @property
    def sequence_number(self) -> int:
        """The number in the order of acceptance."""
        return self.details_or_row.sequence_number

    def encode_listing_entry(self) -> ListEntry:
        """Return what the list shows."""
        if isinstance(self.details_or_row, EvaluationDetails):
            entry = build_listing_entry(self.details_or_row)
            return ListEntry(entry["created"], orjson.dumps(entry))
        row = self.details_or_row
        return ListEntry(format_rfc3339_time(row.created_time), row.listing_entry)

    def matches(self, evaluation_filter: EvaluationFilter) -> bool:
        """Return whether the filter holds."""
        if isinstance(self.details_or_row, EvaluationDetails):
            return evaluation_filter.matches(self.details_or_row)
        return bool(self.details_or_row.listing_entry)


def _decode_entry(row: IndexedEvaluation) -> dict[str, Any]:
    entry: dict[str, Any] = orjson.loads(row.listing_entry)
    return entry


def _matches_row(wanted: EvaluationFilter, row: IndexedEvaluation) -> bool:
    """Return whether a filter holds for a row. Called in a thread: rows may be large."""
    if not wanted.matches_state_and_time(row.state, row.created_time):
        return False
    if not wanted.needs_problem_or_labels:
        return True
    entry = _decode_entry(row)
    return wanted.matches_problem_and_labels(entry["problem"], entry["metadata"])


@attrs.define(eq=False)
class ArchivedSubscription:
    """The subscription of a stream to an archived evaluation, like `reading.Subscription`.

    It has `event_count` events. A thread reads each piece; in between no file is open. At a damage
    the last event, with the last number, says so.
    """

    read_cursor: int
    _event_count: int
    _read_piece: Callable[[int, bool], Awaitable[EventBatch | None]]
    with_times: bool = False

    def __enter__(self) -> None:
        """Do nothing: no event is discarded."""

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Do nothing."""

    @property
    def has_ended(self) -> bool:
        """Whether all events were read."""
        return self.read_cursor == self._event_count

    async def read_events(self, max_bytes: int) -> EventBatch:
        """Return the next piece.

        Raises: DiscardedCursor, if the evaluation cannot be read any more; ServerBusy.
        """
        try:
            batch = await self._read_piece(self.read_cursor, self.with_times)
        except DamagedArchive:
            self.read_cursor = self._event_count
            return _LOST_EVENT
        if batch is None:
            raise DiscardedCursor(str(self._event_count))
        self.read_cursor += batch.count
        return batch

    def wait_for_events(self) -> Deferred[None]:
        """Return a Deferred that has fired: the next events are there."""
        return succeed(None)

    def acknowledge(self, cursor: int) -> bool:
        """Return whether the events before `cursor` were sent."""
        return cursor <= self.read_cursor


EventSubscription = Subscription | ArchivedSubscription


async def read_archived_or_raise(
    archive_reading: Awaitable[T | None], expired_error: EvaluationExpired
) -> T:
    """Return what the archive has in place of an evaluation that is gone from memory.

    Raises: `expired_error`, if the archive has nothing; as `archive_reading`.
    """
    found = await archive_reading
    if found is None:
        raise expired_error from None
    return found


@attrs.frozen
class ArchiveReader:
    """Reader of the archive; the methods return None for what is not archived for the caller.

    They raise ServerBusy and CallerQuotaExceeded as `DiskArchive.read_evaluation`.
    """

    _archive: EvaluationArchive

    @property
    def is_enabled(self) -> bool:
        """Whether there is an archive."""
        return self._archive.is_enabled

    async def read_page(
        self,
        identifier: str,
        after_cursor: str | None,
        caller: str,
        max_bytes: int,
        *,
        with_times: bool = False,
    ) -> EventPage | None:
        """Return the page after a cursor.

        `max_bytes` is in bytes of events, with their times. Raises: InvalidCursor.
        """
        cursor = parse_cursor(after_cursor)
        if cursor == ALL_RECEIVED_CURSOR:
            return make_empty_last_page()
        begin = 0 if cursor is None else int(cursor)

        def read(file: ArchiveFile) -> EventPage:
            resolve_cursor(EventRing(end_cursor=file.event_count), cursor)  # may raise
            batch = file.read_events(begin, max_bytes, with_times=with_times)
            end = begin + batch.count
            return EventPage(
                cursor, ALL_RECEIVED_CURSOR if end == file.event_count else str(end), batch
            )

        try:
            return await self._archive.read_evaluation(identifier, caller, read)
        except DamagedArchive:
            return EventPage(cursor, ALL_RECEIVED_CURSOR, _LOST_EVENT)

    async def read_status(self, identifier: str, caller: str) -> dict[str, Any] | None:
        """Return the status document. Raises: DamagedArchive."""
        end = await self._archive.read_evaluation(identifier, caller, ArchiveFile.read_end_line)
        return None if end is None else dict(end["status"])

    async def subscribe(
        self, identifier: str, after_cursor: str | None, caller: str, skip_count: int = 0
    ) -> ArchivedSubscription | None:
        """Return a subscription. Raises: InvalidCursor."""
        archive = self._archive
        cursor = parse_cursor(after_cursor)

        def locate(file: ArchiveFile) -> tuple[int, int]:
            position = resolve_cursor(EventRing(end_cursor=file.event_count), cursor, skip_count)
            file.read_events(position, 1, with_times=False)  # may raise, before the stream begins
            return position, file.event_count

        try:
            found = await archive.read_evaluation(identifier, caller, locate)
        except DamagedArchive:
            first = int(cursor or 0) + skip_count
            found = first, first + 1
        if found is None:
            return None

        async def read_piece(position: int, with_times: bool) -> EventBatch | None:
            return await archive.read_evaluation(
                identifier,
                caller,
                lambda file: file.read_events(position, _PIECE_BYTES, with_times=with_times),
            )

        return ArchivedSubscription(*found, read_piece)

    async def list_evaluations(
        self,
        caller: str,
        after_sequence_number: int,
        last_sequence_number: int,
        max_count: int,
        evaluation_filter: EvaluationFilter,
    ) -> list[ListedEvaluation]:
        """Return archived evaluations; the parameters are those of `ArchiveQuery`."""
        query = ArchiveQuery(
            caller,
            after_sequence_number,
            last_sequence_number,
            max_count,
            partial(_matches_row, evaluation_filter),
        )
        rows = await self._archive.list_rows(query)
        return [ListedEvaluation(row) for row in rows]
