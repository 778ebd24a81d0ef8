"""Readers of the events of one evaluation: streams, and clients that ask for pages.

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

from collections import deque
from collections.abc import Callable
from typing import Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from tawebeval.core.events import EventBatch
from tawebeval.core.ring import EventRetention, StreamPosition
from tawebeval.errors import DiscardedCursor
from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.evaluations.status import format_rfc3339_time

STREAM_RESUME_TIMEOUT = 30.0
"""Seconds for which events are kept for the client of a stream that was cut, or that rests."""

_NOTED = 8 * 1024  # bytes of a connection between two positions that are noted, at least


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

    def acknowledge(self, before_cursor: int) -> None:
        """Record that a client has asked for the page after a cursor."""
        self.furthest_read_cursor = max(self.furthest_read_cursor, before_cursor)
        if self.retention.acknowledge(before_cursor):  # most pages are asked for twice: no new room
            self.discard_unneeded_events()

    def discard_unneeded_events(self) -> None:
        """Discard events that no reader needs, and let the evaluator write on.

        To be called when a reader needs less, and when the ring has become full.
        """
        for stream in self._streams:
            stream.infer_received_cursor()
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

    def read_events(self, max_bytes: int) -> EventBatch:
        """Read the next events, at most `max_bytes` bytes but at least one event if there are any.

        Raises: DiscardedCursor.
        """
        ring = self._readers.evaluation.ring
        if self.read_cursor < ring.begin_cursor:
            raise DiscardedCursor(str(ring.begin_cursor))
        if self.with_times:
            batch = ring.read_timed_events(self.read_cursor, max_bytes, format_rfc3339_time)
        else:
            batch = ring.read_events(self.read_cursor, max_bytes)
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

    def infer_received_cursor(self) -> None:
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
