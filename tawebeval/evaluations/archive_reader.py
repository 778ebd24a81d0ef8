"""Archived evaluations as the API shows them: pages, streams, status.

The web layer asks here once the registry has raised `EvaluationExpired`. Reading an archived
evaluation changes nothing: any cursor can be read, any number of times.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.internet.defer import TimeoutError as WaitedInVain
from twisted.internet.interfaces import IReactorTime

from tawebeval.archive.archive import ArchivedEvents, EvaluationArchive
from tawebeval.core.event_log import (
    EventPage,
    EventRing,
    make_empty_last_page,
    parse_cursor,
    resolve_cursor,
)
from tawebeval.core.events import ALL_RECEIVED_CURSOR, EventBatch
from tawebeval.errors import EvaluationExpired, ServerBusy
from tawebeval.evaluations.reading import Subscription
from tawebeval.evaluations.records import EvaluationRecord
from tawebeval.evaluations.restoring import load_details
from tawebeval.evaluations.status import build_archived_status
from tawebeval.evaluations.store import EvaluationStore

_MAX_WAIT, _RETRY_AFTER = 5, 5  # seconds

T = TypeVar("T")


@attrs.define(eq=False)
class ArchivedSubscription:
    """The subscription of a stream to an archived evaluation, like `reading.Subscription`."""

    read_cursor: int
    _events: ArchivedEvents
    with_times: bool = False

    def __enter__(self) -> None:
        """Do nothing: no event is discarded."""

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Do nothing."""

    @property
    def has_ended(self) -> bool:
        """Whether all events were read."""
        return self.read_cursor == self._events.end_cursor

    async def read_events(self, max_bytes: int) -> EventBatch:
        """Return the next events. Raises: as `ArchivedEvents.read`."""
        batch = await self._events.read(self.read_cursor, max_bytes, with_times=self.with_times)
        self.read_cursor += batch.count
        return batch

    def wait_for_events(self) -> Deferred[None]:
        """Return a Deferred that has fired: all events are there."""
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


@attrs.define(eq=False)
class ArchiveReader:
    """Reader of the archive; the methods return None for what is not archived for the caller.

    Those of one evaluation wait some seconds for it to be archived, if it is `in_transit`: its
    client has received all events, or it is expired, and the archive has yet to take it. They raise
    ServerBusy and CallerQuotaExceeded as `EvaluationArchive.find_events`.
    """

    _archive: EvaluationArchive | None
    _store: EvaluationStore | None
    _clock: IReactorTime
    in_transit: dict[str, EvaluationRecord] = attrs.field(factory=dict, init=False)

    @property
    def is_enabled(self) -> bool:
        """Whether there is an archive."""
        return self._archive is not None

    async def _wait_until_archived(self, identifier: str, caller: str) -> None:
        record = self.in_transit.get(identifier)
        if record is not None and record.details.caller == caller:
            try:
                await record.archive_event.wait().addTimeout(_MAX_WAIT, self._clock)
            except WaitedInVain:
                what = "the evaluation is not archived yet; try again"
                raise ServerBusy(what, _RETRY_AFTER) from None

    async def _find_events(self, identifier: str, caller: str) -> ArchivedEvents | None:
        await self._wait_until_archived(identifier, caller)
        return (
            None if self._archive is None else await self._archive.find_events(identifier, caller)
        )

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
        events = await self._find_events(identifier, caller)
        if events is None:
            return None
        if cursor == ALL_RECEIVED_CURSOR:
            return make_empty_last_page()
        begin = resolve_cursor(EventRing(end_cursor=events.end_cursor), cursor)
        batch = await events.read(begin, max_bytes, with_times=with_times)
        end = begin + batch.count
        return EventPage(
            cursor, ALL_RECEIVED_CURSOR if end == events.end_cursor else str(end), batch
        )

    async def read_status(self, identifier: str, caller: str) -> dict[str, Any] | None:
        """Return the status document."""
        if self._archive is None or self._store is None:
            return None
        await self._wait_until_archived(identifier, caller)
        row = await self._store.find_archived(identifier)
        if row is None or row.caller != caller:
            return None
        return build_archived_status(load_details(row, None))

    async def subscribe(
        self, identifier: str, after_cursor: str | None, caller: str, skip_count: int = 0
    ) -> ArchivedSubscription | None:
        """Return a subscription. Raises: InvalidCursor; as `ArchivedEvents.read`."""
        cursor = parse_cursor(after_cursor)
        events = await self._find_events(identifier, caller)
        if events is None:
            return None
        begin = resolve_cursor(EventRing(end_cursor=events.end_cursor), cursor, skip_count)
        await events.read(begin, 1)  # a stream that has begun could only be cut
        return ArchivedSubscription(begin, events)
