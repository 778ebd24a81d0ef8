"""Requests of clients for events: pages, requests that wait for a page, and streams.

A request for the page after a cursor acknowledges the events before the cursor. A stream and an
observer (a request by a link, or with a token that only reads) acknowledge nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import attrs
from twisted.internet.defer import TimeoutError as WaitTimedOut
from twisted.internet.interfaces import IReactorTime

from tawebeval.core.evaluations import EvaluationState
from tawebeval.core.event_log import EventPage, make_empty_last_page, parse_cursor
from tawebeval.core.events import ALL_RECEIVED_CURSOR, EventBatch
from tawebeval.errors import EvaluationExpired, ServerStopping
from tawebeval.evaluations.reading import Subscription
from tawebeval.evaluations.records import EvaluationRecord, RecordIndex

_NEXT_PAGE = 30.0  # seconds after a page in which its reader is expected to ask for the next


@attrs.frozen
class EventRequests:
    """Requests for the events of all evaluations in memory.

    - `get_max_page_bytes()`: bytes of events that a page may have.
    - `started`: the time of the daemon's start, for the error EvaluationExpired.
    - `on_stream_left(record)`: called when a stream has ended.
    - `subscriptions`: those of the streams at work.

    The parameter `caller` of the methods is the name of the caller that makes the request. An
    evaluation of another caller raises the same error as an unknown identifier: EvaluationNotFound.
    """

    _records: RecordIndex
    _clock: IReactorTime
    _get_max_page_bytes: Callable[[], int]
    _started: str
    _on_stream_left: Callable[[EvaluationRecord], object]
    subscriptions: set[Subscription]

    def read_page_now(
        self,
        identifier: str,
        after_cursor: str | None,
        caller: str = "",
        max_bytes: int | None = None,
        *,
        with_times: bool = False,
        is_observer: bool = False,
    ) -> EventPage:
        """Return the page that begins at `after_cursor`; acknowledge the events before it.

        A request that `is_observer` acknowledges nothing, and keeps the evaluation as a look at the
        status does. The page has at most `max_bytes` bytes of events, at most those of a page, and
        at least one event if there are any. If `with_times`, each event has its time, on top of the
        limit.

        Raises: InvalidCursor, DiscardedCursor, EvaluationNotFound, EvaluationExpired,
        ServerStopping; and EventsEvicted, if `read_page` has to wait for the events.
        """
        record = self._find(identifier, after_cursor, caller, is_observer=is_observer)
        if record is None:
            return self._end_reading(identifier, is_observer=is_observer)
        begin = record.events.resolve_cursor(after_cursor)
        limit = self.compute_max_page_bytes(max_bytes)
        batch = record.events.read_now(begin, limit, with_times=with_times)
        return self._make_page(record, after_cursor or None, batch, is_observer=is_observer)

    async def read_page(
        self,
        identifier: str,
        after_cursor: str | None,
        caller: str = "",
        max_bytes: int | None = None,
        *,
        with_times: bool = False,
        is_observer: bool = False,
        wait_seconds: float = 0,
    ) -> EventPage:
        """Return the page of `read_page_now`; load its events if they have left memory.

        If there are no new events, wait for them up to `wait_seconds`. Raises: as `read_page_now`
        without EventsEvicted; ServerBusy.
        """
        while True:
            record = self._find(identifier, after_cursor, caller, is_observer=is_observer)
            if record is None:
                return self._end_reading(identifier, is_observer=is_observer)
            begin = record.events.resolve_cursor(after_cursor)
            limit = self.compute_max_page_bytes(max_bytes)
            with self._count_waiting_poll(record, is_observer=is_observer):
                batch = await record.events.read(begin, limit, with_times=with_times)
                page = self._make_page(record, after_cursor or None, batch, is_observer=is_observer)
                if page.has_events_or_is_last or not wait_seconds:
                    return page
                change = record.events.change_condition.wait()
                with suppress(WaitTimedOut):
                    await change.addTimeout(wait_seconds, self._clock)
                wait_seconds = 0

    def _make_page(
        self,
        record: EvaluationRecord,
        after_cursor: str | None,
        batch: EventBatch,
        *,
        is_observer: bool,
    ) -> EventPage:
        """Return the page of a batch, and acknowledge the events before it."""
        page = record.events.make_page(after_cursor, batch)
        if not is_observer:
            self._expect_next_page(record)
            record.events.acknowledge(int(after_cursor or 0))
        return page

    @contextmanager
    def _count_waiting_poll(self, record: EvaluationRecord, *, is_observer: bool) -> Iterator[None]:
        events = record.events
        if is_observer:
            events.observer_count += 1
        else:
            events.waiting_poll_count += 1
        try:
            yield
        finally:  # also when the client has gone: a reader may ask again
            if is_observer:
                events.observer_count -= 1
            else:
                events.waiting_poll_count -= 1
                self._expect_next_page(record)

    def subscribe(
        self,
        identifier: str,
        after_cursor: str | None,
        caller: str = "",
        skip_count: int = 0,
        *,
        is_observer: bool = False,
    ) -> Subscription | None:
        """Return a subscription to the events from `skip_count` events after `after_cursor` on.

        The answer to the cursor of the very end is None. A request that is not an observer's
        thereby acknowledges all events, as with pages: the evaluation is forgotten. Raises: as
        `read_page`.
        """
        record = self._find(identifier, after_cursor, caller, is_observer=is_observer)
        if record is None:
            self._end_reading(identifier, is_observer=is_observer)
            return None
        return Subscription(
            record.events.resolve_cursor(after_cursor, skip_count),
            record.events,
            is_observer,
            self.subscriptions.add,
            lambda subscription: self._on_unsubscribed(record, subscription),
        )

    def can_subscribe(
        self, identifier: str, after_cursor: str | None, caller: str = "", skip_count: int = 0
    ) -> bool:
        """Return whether `subscribe` would return a subscription, without an acknowledgement.

        Raises: as `read_page`.
        """
        record = self._find(identifier, after_cursor, caller, is_observer=True)
        if record is not None:
            record.events.resolve_cursor(after_cursor, skip_count)
        return record is not None

    def compute_max_page_bytes(self, max_bytes: int | None) -> int:
        """Return the bytes of events that a page may have if a client asks for `max_bytes`."""
        most = self._get_max_page_bytes()
        return most if max_bytes is None else min(max_bytes, most)

    def _find(
        self, identifier: str, after_cursor: str | None, caller: str, *, is_observer: bool
    ) -> EvaluationRecord | None:
        """Return the record in which to read after a cursor; None after the very end."""
        cursor = parse_cursor(after_cursor)
        record = self._records.find_record(identifier, caller, is_reader=not is_observer)
        is_end = cursor == ALL_RECEIVED_CURSOR
        if record is None and not is_end:
            raise EvaluationExpired(self._started)
        return None if is_end and (record is None or record.events.has_readable_end) else record

    def _end_reading(self, identifier: str, *, is_observer: bool) -> EventPage:
        """Answer the cursor of the very end; forget an evaluation that a reader has read to it.

        Raises: ServerStopping, if the evaluation is left to the next process, which forgets it.
        """
        if not is_observer and identifier in self._records:
            if self._records[identifier].evaluation.left_at is not None:
                raise ServerStopping
            if self._records[identifier].events.log.has_ended:  # else it was read to a damage
                self._records.forget_record(identifier, EvaluationState.DRAINED)
        return make_empty_last_page()

    def _expect_next_page(self, record: EvaluationRecord) -> None:
        record.events.page_reader_deadline = self._clock.seconds() + _NEXT_PAGE

    def _on_unsubscribed(self, record: EvaluationRecord, subscription: Subscription) -> None:
        self.subscriptions.remove(subscription)
        if subscription.is_observer:
            self._records.note_observer_request(record)
        else:
            self._records.note_stream_end(record)
        self._on_stream_left(record)
