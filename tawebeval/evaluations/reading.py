"""Reading of the events of one evaluation, from memory or from its stdout.

`EvaluationEvents.read` returns events after a cursor. A thread parses events again that have left
memory (`SegmentLoader`). An acknowledgement discards events; then a thread gives their room on the
disk back. A stream has a `Subscription`, which reads from a cursor on and acknowledges nothing. So
the client of a stream that was cut resumes at any cursor that no acknowledgement has passed.

Nobody waits for readers: the evaluator goes on, and what is not read lies on the disk.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.logger import Logger

from tawebeval.core.event_log import (
    LOST_EVENT,
    EventLog,
    EventPage,
    EventSegment,
    EventsEvicted,
    StdoutChanged,
    make_page,
    resolve_cursor,
)
from tawebeval.core.events import ALL_RECEIVED_CURSOR, EMPTY_BATCH, EventBatch
from tawebeval.deferreds import (
    UNLIMITED_WAITERS,
    Condition,
    FairQueue,
    SingleFlight,
    WorkerThreads,
    run_in_background,
)
from tawebeval.errors import DiscardedCursor, ServerBusy
from tawebeval.evaluations.details import format_rfc3339_time
from tawebeval.evaluations.eventlog import RecordedStdout

MAX_LOADS, MAX_LOADS_PER_CALLER = 4, 2
"""Segments that are parsed again at once: of all callers, and of one.

A segment has some 64 KiB of stdout, 1 MiB at most, and the files that stdout names there. Lines of
10 to 1,000 bytes take 0.2 to 0.3 ms of processor time for 64 KiB, lines of one byte 1 ms.
"""

_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # errors that pass

T = TypeVar("T")

log = Logger()


@attrs.define(eq=False)
class SegmentLoader:
    """Loader of evicted segments, in threads; one for all evaluations.

    Callers take turns. All readers that wait for a segment share one load of it.
    """

    threads: WorkerThreads
    _slots: FairQueue = attrs.field(
        factory=lambda: FairQueue(MAX_LOADS, UNLIMITED_WAITERS, MAX_LOADS_PER_CALLER)
    )
    _loads: SingleFlight[EventSegment, None] = attrs.field(factory=SingleFlight)

    async def load_segment(self, events: EvaluationEvents, segment: EventSegment) -> None:
        """Put an evicted segment's events back into memory, or note that it is damaged.

        Raises: ServerBusy.
        """
        load = partial(events.load_segment, segment)
        await self._loads.run_once(segment, lambda: self._slots.run_in_turn(events.caller, load))


@attrs.define(eq=False)
class EvaluationEvents:
    """The events of one evaluation of `caller`, and its readers.

    - `log`: the events. Who appends some, or marks the end, notifies `change_condition`.
    - `stdout`: the parser, once the evaluator has started; it parses evicted segments again.
    - `on_discard()` is awaited before the files of acknowledged events are given back: no reader
      may be sent to them after a restart.
    - `has_lost_events`: whether newest events may be lost that clients have received: after a power
      cut, or with a damaged disk.
    - `is_behind`: whether clients may have received events that are yet to be made again, up to the
      end.
    - `keeps_files`: whether acknowledged events keep their files, for the archive.
    - `stream_count`, `waiting_poll_count`: the readers' streams, and their requests that wait.
    - `observer_count`: streams and waiting requests of observers, which acknowledge nothing.
    - `page_reader_deadline`: the time, in seconds of the clock, until which a client of pages is
      expected to ask for the next one.
    - `was_sent_completely`: whether a stream has sent a reader all events and the end.
    """

    log: EventLog
    caller: str
    log_name: str
    _loader: SegmentLoader
    stdout: RecordedStdout | None = None
    on_discard: Callable[[], Awaitable[object]] = lambda: succeed(None)
    has_lost_events: bool = False
    is_behind: bool = False
    keeps_files: bool = False
    change_condition: Condition = attrs.field(factory=Condition)
    stream_count: int = 0
    waiting_poll_count: int = 0
    observer_count: int = 0
    page_reader_deadline: float = float("-inf")
    was_sent_completely: bool = False
    _damaged_segments: tuple[EventSegment, ...] = ()
    _file_use_count: int = 0  # calls in threads
    _files_unused: Condition = attrs.field(factory=Condition)
    _is_freeing: bool = False
    _is_discarded: bool = False

    @property
    def has_readable_end(self) -> bool:
        """Whether a client may have read the end: of all events, or at a damage."""
        return self.log.has_ended or bool(self._damaged_segments)

    def resolve_cursor(self, after_cursor: str | None, skip_count: int = 0) -> int:
        """Return the number `skip_count` events after a cursor of a client, None or "" without one.

        Raises: as `core.event_log.resolve_cursor`; ServerBusy.
        """
        may_be_ahead = self.has_lost_events or (self.is_behind and not self.log.has_ended)
        if may_be_ahead and after_cursor == ALL_RECEIVED_CURSOR and not self.log.has_ended:
            raise ServerBusy("the end of the evaluation is being restored; try again", 1)
        return resolve_cursor(self.log, after_cursor or None, skip_count, may_be_ahead=may_be_ahead)

    def is_after_loss(self, cursor: int) -> bool:
        """Return whether a client at a cursor may have received events that are lost."""
        if not self.log.has_ended:
            return False
        # As many events as there are now, with the error, may have been others before the loss.
        return cursor >= self.log.end_cursor + (not self.has_lost_events)

    def read_now(
        self, after_cursor: int, max_bytes: int, *, with_times: bool = False
    ) -> EventBatch:
        """Return events after a cursor that are in memory; LOST_EVENT for damaged and lost ones.

        The result has at most `max_bytes`, but at least one event if there is one, and may end
        before `max_bytes` although more events follow. Raises: DiscardedCursor, EventsEvicted.
        """
        if after_cursor < self.log.begin_cursor:
            raise DiscardedCursor(str(self.log.begin_cursor))
        if self.is_after_loss(after_cursor):
            return LOST_EVENT
        if after_cursor > self.log.end_cursor:
            return EMPTY_BATCH
        try:
            if with_times:
                return self.log.read_timed_events(after_cursor, max_bytes, format_rfc3339_time)
            return self.log.read_events(after_cursor, max_bytes)
        except EventsEvicted as evicted:
            if evicted.segment in self._damaged_segments:
                return LOST_EVENT
            raise

    async def read(
        self, after_cursor: int, max_bytes: int, *, with_times: bool = False
    ) -> EventBatch:
        """Return what `read_now` returns; load events that have left memory.

        Raises: DiscardedCursor, also if they were acknowledged meanwhile; ServerBusy.
        """
        while True:
            try:
                return self.read_now(after_cursor, max_bytes, with_times=with_times)
            except EventsEvicted as evicted:
                await self._loader.load_segment(self, evicted.segment)

    def make_page(self, after_cursor: str | None, batch: EventBatch) -> EventPage:
        """Return the page of a batch that was read after a cursor."""
        if batch is LOST_EVENT:
            return EventPage(after_cursor, ALL_RECEIVED_CURSOR, batch)
        return make_page(self.log, after_cursor, batch)

    async def load_segment(self, segment: EventSegment) -> None:
        """Parse an evicted segment again; see `SegmentLoader`."""
        stdout = self.stdout
        assert stdout is not None, "it has made the segment"
        try:
            ring = await self._use_files(lambda: stdout.parse_evicted_segment(segment))
        except (StdoutChanged, OSError) as error:
            if segment.end_cursor <= self.log.begin_cursor:
                return  # acknowledged meanwhile, with its part of stdout
            if isinstance(error, OSError) and error.errno in _SCARCE:
                raise ServerBusy(
                    f"the daemon cannot read these events now: {error.strerror}; try again later", 5
                ) from error
            log.error(  # noqa: TRY400  (a traceback would not help)
                "evaluation {evaluation}: the events from {begin} to {end} are lost: {reason}",
                evaluation=self.log_name,
                begin=segment.begin_cursor,
                end=segment.end_cursor,
                reason=str(error) or "the file of its stdout was changed",
            )
            self._damaged_segments += (segment,)
        else:
            self.log.load_segment(segment, ring)

    # Files

    async def _use_files(self, call: Callable[[], T]) -> T:
        """Return `call()`, made in a thread; afterwards close files that nobody writes."""
        self._file_use_count += 1
        try:
            return await self._loader.threads.run_in_thread(call)
        finally:
            self._file_use_count -= 1
            if not self._file_use_count:
                if self.log.has_ended:
                    self.close_files()
                self._files_unused.notify()

    def close_files(self) -> None:
        """Close the files of an evaluation that has ended; a later read opens them for itself."""
        if self.stdout is not None and not self._file_use_count:
            self.stdout.close_files()

    async def discard(self) -> None:
        """Discard all events; return when no thread uses the files, which may then be removed."""
        self._is_discarded = True
        self.log.discard()
        while self._file_use_count:
            await self._files_unused.wait()
        self.close_files()

    def acknowledge(self, before_cursor: int) -> None:
        """Discard the events before a cursor, and in a thread their files."""
        self.log.acknowledge(min(before_cursor, self.log.end_cursor))
        self.free_discarded_files()

    def free_discarded_files(self) -> None:
        """Have a thread give back the room of discarded events, unless `keeps_files`."""
        stdout = self.stdout
        if stdout is not None and stdout.has_discarded_files and not self._is_freeing:
            self._is_freeing = True
            run_in_background(
                self._free_files(stdout),
                log,
                "evaluation {evaluation}: the files of discarded events stay until its removal",
                evaluation=self.log_name,
            )

    async def _free_files(self, stdout: RecordedStdout) -> None:
        while not (self.keeps_files or self._is_discarded) and stdout.has_discarded_files:
            await self.on_discard()
            if not self._is_discarded:  # meanwhile
                await self._use_files(stdout.free_discarded_files)
        self._is_freeing = False  # after an error it stays


@attrs.define(eq=False)
class Subscription:
    """A stream's subscription to the events of an evaluation, and a context manager.

    `read_cursor` is the cursor after the last event read. Events have their times if `with_times`
    is set. An observer's subscription does not keep the evaluation, and its client acknowledges
    nothing. `on_left()` is called after the context.
    """

    read_cursor: int
    _events: EvaluationEvents
    is_observer: bool
    _on_enter: Callable[[Subscription], object]
    _on_left: Callable[[Subscription], object]
    with_times: bool = False
    _has_read_end: bool = False

    def __enter__(self) -> None:
        self._count(1)
        self._on_enter(self)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._count(-1)
        if error is None and self.has_ended and not self.is_observer:
            self._events.was_sent_completely = True
        self._on_left(self)

    def _count(self, change: int) -> None:
        if self.is_observer:
            self._events.observer_count += change
        else:
            self._events.stream_count += change

    @property
    def has_ended(self) -> bool:
        """Whether all events were read, and no event will follow."""
        events, cursor = self._events, self.read_cursor
        is_at_end = events.log.has_ended and cursor == events.log.end_cursor
        return self._has_read_end or (is_at_end and not events.is_after_loss(cursor))

    async def read_events(self, max_bytes: int) -> EventBatch:
        """Return the next events, as `EvaluationEvents.read`, which may wait for a thread.

        No event means that none has come yet. Raises: DiscardedCursor, ServerBusy.
        """
        batch = await self._events.read(self.read_cursor, max_bytes, with_times=self.with_times)
        self.read_cursor += batch.count
        event_log = self._events.log
        if batch is LOST_EVENT:
            self._has_read_end = True
            self.read_cursor = max(self.read_cursor, event_log.end_cursor)
        elif batch.count and event_log.has_ended and self.read_cursor == event_log.end_cursor:
            self._has_read_end = True
        return batch

    def wait_for_events(self) -> Deferred[None]:
        """Return a Deferred that fires at the next events, or at the end."""
        return self._events.change_condition.wait()

    def acknowledge(self, cursor: int) -> bool:
        """Acknowledge the events before a cursor; return False if they were not all sent."""
        if cursor > self.read_cursor:
            return False
        if not self.is_observer:
            self._events.acknowledge(cursor)
        return True
