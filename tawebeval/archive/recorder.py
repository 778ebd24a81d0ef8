"""The archive in the reactor's thread: the queue between rings and the disk, and the readers.

A ring hands over each batch as it is appended, so the archive is complete however soon readers
acknowledge events. The batches wait in memory until the one thread that writes takes all of them.
While `MAX_QUEUED_BYTES_PER_EVALUATION` bytes wait, the evaluators that print more are held back, as
by a full ring. A recording that would make more than `MAX_QUEUED_BYTES` wait is given up, and so
are all if a write takes `STALLED_WRITE_SECONDS`: evaluations do not depend on the disk.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, get_args

import attrs
from twisted.internet.defer import Deferred, FirstError, gatherResults
from twisted.internet.defer import TimeoutError as WaitTimedOut
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from tawebeval.archive.files import ArchiveFile, DamagedArchiveFile
from tawebeval.archive.index import ArchiveQuery, IndexedEvaluation
from tawebeval.archive.store import (
    SUBDIRECTORY_NAMES,
    ArchiveStore,
    ArchiveUsage,
    PendingEvents,
    PendingWrites,
    RecordingEnd,
    RecordingLossReason,
)
from tawebeval.archive.submissions import ExtractedSubmission
from tawebeval.config import ArchiveSettings
from tawebeval.core.budget import RingAllocation
from tawebeval.core.ring import EventRing
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.deferreds import (
    UNLIMITED_WAITERS,
    FairQueue,
    OneShotEvent,
    WorkerThreads,
    make_one_shot_event,
    run_in_background,
)
from tawebeval.errors import CallerQuotaExceeded, DamagedArchive, ServerBusy
from tawebeval.sandbox.workspace import derive_directory_name, derive_log_pseudonym

MAX_QUEUED_BYTES_PER_EVALUATION = 16 * 2**20
"""Bytes of waiting events from which evaluators that print more are held back."""

MAX_QUEUED_BYTES = 64 * 2**20
"""Bytes of waiting events beyond which a recording is given up."""

STALLED_WRITE_SECONDS = 10
"""Seconds of one write after which all recordings are given up, and evaluators go on."""

ARCHIVE_CLOSE_TIMEOUT = 4.0
"""Seconds in which the shutdown writes what waits, at most."""

_DELAY = 0.05  # seconds for which events gather before a thread writes them
_AT_ONCE = 256 * 1024  # bytes that wait no longer
_END_BYTES = 16 * 1024  # bytes of memory that the documents of an ended evaluation take, or so
_PER_BATCH = 256  # bytes of memory that a batch takes besides its lines
_MAINTENANCE_PERIOD = 60.0  # seconds between removals by age and size
_END_WAIT = 10.0  # seconds for which a reader waits until an ended evaluation is archived
READ_TIMEOUT = 10.0
"""Seconds for which a reader waits for the disk."""
READER_THREADS = 2
"""Threads that read the archive. A read that hangs keeps its thread."""
T = TypeVar("T")

log = Logger()


@attrs.define(eq=False)
class _Recording:
    """The recording of one evaluation; `loss` is set once it is given up.

    The events before the cursor `written` are on the disk.
    """

    identifier: str
    caller: str
    ring: EventRing
    allocation: RingAllocation
    written: int = 0
    events: list[PendingEvents] = attrs.field(factory=list)
    queued_bytes: int = 0
    end: RecordingEnd | None = None
    loss: RecordingLossReason | None = None
    is_spooled: bool = False  # whether there may be files
    on_written: Callable[[], object] = lambda: None
    done: OneShotEvent[None] = attrs.field(factory=OneShotEvent)


def make_zero_loss_counts() -> Counter[RecordingLossReason]:
    """Return the counter of evaluations that are not archived, with all reasons as 0."""
    return Counter(dict.fromkeys(get_args(RecordingLossReason), 0))


@attrs.define(eq=False)
class DiskArchive:
    """The archive of `store`, which `_writer`, a pool of one thread, writes to.

    `archived_count` and `loss_counts_by_reason` count evaluations that were archived or not.
    `queued_bytes` are the bytes of memory that events wait in.
    """

    store: ArchiveStore
    _writer: WorkerThreads
    _readers: WorkerThreads
    _clock: IReactorTime
    _format_time: Callable[[float], str]
    queued_bytes: int = 0
    archived_count: int = 0
    loss_counts_by_reason: Counter[RecordingLossReason] = attrs.field(factory=make_zero_loss_counts)
    _recordings: dict[str, _Recording] = attrs.field(factory=dict)
    _changed: dict[str, _Recording] = attrs.field(factory=dict)
    _held: dict[str, _Recording] = attrs.field(factory=dict)
    _left: dict[str, int] = attrs.field(factory=dict)  # recordings of an earlier process
    _read_queue: FairQueue = attrs.field(
        factory=lambda: FairQueue(READER_THREADS, UNLIMITED_WAITERS)  # connections are limited
    )
    _read_number: int = 0
    _last_read_end: float = float("-inf")
    _is_writing: bool = False
    _is_stalled: bool = False
    _write_call: IDelayedCall | None = None
    _stall_call: IDelayedCall | None = None
    _next_maintenance: float = float("inf")
    _is_maintaining: bool = False
    _idle: OneShotEvent[None] = attrs.field(factory=OneShotEvent)

    @property
    def is_enabled(self) -> bool:
        """Whether the archive is open."""
        return self.store.is_open

    @property
    def usage(self) -> ArchiveUsage:
        """The size of the archive."""
        return self.store.usage

    @property
    def settings(self) -> ArchiveSettings:
        """The settings in use."""
        return self.store.settings

    def open(self) -> int:
        """Open the directory; return the highest sequence number in it.

        If the directory cannot be opened, evaluations are not archived until it can. Blocks, for
        the start.
        """
        newest = 0
        try:
            newest, self._left = self.store.open()
        except OSError as error:
            self._log_unusable(error)
        return newest

    # Recording

    def is_archived(self, identifier: str) -> bool:
        """Return whether an earlier process has archived an evaluation. Blocks, for the start."""
        return self.is_enabled and self.store.is_archived(identifier)

    def get_written_cursor(self, identifier: str) -> int | None:
        """Return the cursor from which events are not on the disk; None if none is to be."""
        recording = self._recordings.get(identifier)
        return None if recording is None or recording.loss is not None else recording.written

    def begin_recording(
        self,
        identifier: str,
        caller: str,
        ring: EventRing,
        allocation: RingAllocation,
        on_written: Callable[[], object] = lambda: None,
    ) -> None:
        """Record all events of `ring`, from now on and those that it has.

        After a restart the recording goes on after the last event that is on the disk.
        `on_written` is called when more events are on the disk.
        """
        if not self.is_enabled or self._is_stalled:
            self.loss_counts_by_reason["queue" if self.is_enabled else "disk"] += 1
            return
        recording = _Recording(identifier, caller, ring, allocation, on_written=on_written)
        self._recordings[identifier] = recording
        left = self._left.pop(derive_directory_name(identifier), None)
        recording.is_spooled = left is not None
        recording.written = position = left or 0
        if not ring.begin_cursor <= position <= ring.end_cursor:
            self._give_up(recording, "gap", "events were discarded before they were archived")
        while position < ring.end_cursor and recording.loss is None:
            batch = ring.read_timed_events(position, _AT_ONCE, self._format_time)
            self._add_events(recording, PendingEvents(position, batch, None))
            position += batch.count
        if recording.loss is None:
            ring.on_append = lambda first, batch, time_ms: self._add_events(
                recording, PendingEvents(first, batch, self._format_time(time_ms / 1000))
            )

    def end_recording(self, identifier: str, recording_end: RecordingEnd) -> None:
        """Archive an evaluation that has ended; no event follows."""
        recording = self._recordings.get(identifier)
        if recording is None:
            return
        recording.ring.on_append = None
        if recording.loss is None and self._enqueue(recording, _END_BYTES):
            recording.end = recording_end
            self._change(recording)
        else:
            del self._recordings[identifier]

    def add_archived_callback(self, identifier: str, on_archived: Callable[[], object]) -> None:
        """Call `on_archived` once an ended evaluation is archived or given up; now if it is not."""
        recording = self._recordings.get(identifier)
        if recording is None or recording.loss is not None:
            on_archived()
        else:
            recording.done.add_callback(lambda _: on_archived())

    def _add_events(self, recording: _Recording, events: PendingEvents) -> None:
        if recording.loss is None and self._enqueue(recording, len(events.batch.lines)):
            recording.events.append(events)
            if self.queued_bytes >= MAX_QUEUED_BYTES_PER_EVALUATION:
                self._held[recording.identifier] = recording
                recording.allocation.set_archive_behind(True)
            self._change(recording)

    def _enqueue(self, recording: _Recording, size: int) -> bool:
        """Count bytes that wait; give the recording up and return False if they are too many."""
        size += _PER_BATCH
        if self.queued_bytes and self.queued_bytes + size > MAX_QUEUED_BYTES:
            self._give_up(recording, "queue", "the disk is too slow (archive.directory)")
            return False
        recording.queued_bytes += size
        self.queued_bytes += size
        return True

    def _change(self, recording: _Recording) -> None:
        self._changed[recording.identifier] = recording
        if self._is_writing:
            return
        if self.queued_bytes >= _AT_ONCE and self._write_call is not None:
            self._write_call.reset(0)
        elif self._write_call is None:
            self._write_call = self._clock.callLater(_DELAY, self._start_write)

    def _start_write(self) -> None:
        self._write_call = None
        self._is_writing = True
        run_in_background(self._write(), log, "defect: evaluations could not be archived")

    async def _write(self) -> None:
        """Write all that waits, and what comes meanwhile."""
        try:
            while self._changed:
                recordings, self._changed = self._changed, {}
                works = [self._take_work(each) for each in recordings.values()]
                size = sum(each.queued_bytes for each in recordings.values())
                for each in recordings.values():
                    each.queued_bytes = 0
                self._stall_call = self._clock.callLater(STALLED_WRITE_SECONDS, self._on_stall)
                try:
                    await self._write_works(works)
                finally:
                    self.queued_bytes -= size
                    self._is_stalled = False
                    if self._stall_call.active():
                        self._stall_call.cancel()
                if self.queued_bytes < MAX_QUEUED_BYTES_PER_EVALUATION // 2:
                    self._release_held()
                is_too_large = self.usage.total_bytes > self.settings.max_bytes
                if is_too_large and not self.store.has_unremovable_files:
                    self._next_maintenance = min(self._next_maintenance, self._clock.seconds())
        finally:
            self._is_writing = False
            if not self._changed:
                self._idle.set_value(None)

    def _take_work(self, recording: _Recording) -> PendingWrites:
        events, recording.events = recording.events, []
        recording.is_spooled = True
        return PendingWrites(
            recording.identifier,
            recording.caller,
            events,
            recording.end,
            recording.loss is not None,
        )

    async def _write_works(self, works: list[PendingWrites]) -> None:
        try:
            outcomes = await self._writer.run_in_thread(self.store.write_recordings, works)
        except Exception:  # noqa: BLE001  (evaluations go on, whatever the defect is)
            log.failure("defect: evaluations could not be archived")
            for work in works:
                recording = self._recordings.get(work.identifier)
                if recording is not None and recording.loss is None:
                    self._give_up(recording, "defect", "the log has the details")
            outcomes = []
        for outcome in outcomes:
            recording = self._recordings.get(outcome.identifier)
            if outcome.loss_reason is not None and recording is not None and recording.loss is None:
                self._give_up(recording, outcome.loss_reason, outcome.loss_message)
        for work in works:
            if work.events and work.identifier in self._recordings:
                recording = self._recordings[work.identifier]
                recording.written = work.events[-1].end_cursor
                recording.on_written()
            if work.recording_end is not None:
                self._finish(work.identifier)

    def _finish(self, identifier: str) -> None:
        recording = self._recordings.pop(identifier, None)
        if recording is not None and recording.loss is None:
            self.archived_count += 1
            recording.done.set_value(None)

    # The bounds of the queue

    def _on_stall(self) -> None:
        """Give up all recordings: the disk hangs, and nothing may gather until it answers."""
        self._is_stalled = True
        for recording in list(self._recordings.values()):
            if recording.loss is None:
                self._give_up(
                    recording,
                    "queue",
                    f"the disk has not answered for {STALLED_WRITE_SECONDS} seconds"
                    " (archive.directory)",
                )

    def _release_held(self) -> None:
        held, self._held = self._held, {}
        for recording in held.values():
            recording.allocation.set_archive_behind(False)

    def _give_up(self, recording: _Recording, reason: RecordingLossReason, message: str) -> None:
        """Archive the evaluation no further; it goes on."""
        log.warn(
            "{evaluation}: not archived ({reason}): {why}",
            evaluation=derive_log_pseudonym(recording.identifier),
            reason=reason,
            why=message,
        )
        self.loss_counts_by_reason[reason] += 1
        recording.loss = reason
        recording.ring.on_append = None
        recording.events = []
        self.queued_bytes -= recording.queued_bytes
        recording.queued_bytes = 0
        recording.done.set_value(None)
        if self._held.pop(recording.identifier, None) is not None:
            recording.allocation.set_archive_behind(False)
        if recording.is_spooled:
            self._change(recording)  # its files are removed
            return
        self._changed.pop(recording.identifier, None)
        if recording.end is not None:
            self._recordings.pop(recording.identifier, None)

    # Start, removal and end

    def discard_orphaned_recordings(self) -> None:
        """Remove recordings of an earlier process that no evaluation has continued."""
        self.store.needs_index_check = True
        self._maintain(list(self._left))
        self._left = {}

    def start_maintenance(self) -> None:
        """Start removals by age and size if they are due. To be called about once a second."""
        if self._clock.seconds() >= self._next_maintenance and not self._is_maintaining:
            self._maintain([])

    def _maintain(self, unclaimed: list[str]) -> None:
        self._next_maintenance = float("inf")
        self._is_maintaining = True
        run_in_background(
            self._run_maintenance(unclaimed), log, "defect: the archive could not be maintained"
        )

    async def _run_maintenance(self, unclaimed: list[str]) -> None:
        """Work in small steps, between which the thread writes what waits."""
        run, store = self._writer.run_in_thread, self.store
        try:
            if not store.is_open:
                unclaimed = list((await run(store.open))[1])
                log.info("archive: {path} can be used now", path=store.directory)
            await run(store.discard_recordings, unclaimed)
            if store.needs_index_check:
                await self._readers.run_in_thread(store.check_index)  # may take seconds
                await run(store.recreate_damaged_index)
                for part in SUBDIRECTORY_NAMES:
                    await run(store.reconcile_index, part)
                await run(store.update_usage_from_index)
            while await run(store.remove_old_evaluations):
                pass
        except (OSError, sqlite3.Error) as error:
            self._log_unusable(error)
        finally:
            self._is_maintaining = False
            self._next_maintenance = self._clock.seconds() + _MAINTENANCE_PERIOD

    def _log_unusable(self, error: Exception) -> None:
        log.error("archive: {path}: {error}", path=self.store.directory, error=error)

    async def flush(self) -> None:
        """Return when all that waits is written, at the latest after some seconds."""
        if self._write_call is not None:
            self._write_call.reset(0)
        if self._changed or self._is_writing:
            self._idle = OneShotEvent()
            await _wait_at_most(self._idle.wait(), ARCHIVE_CLOSE_TIMEOUT / 2, self._clock)

    async def close(self) -> None:
        """Write what waits, and close the index; a disk that hangs is given up."""
        if not self._is_writing:
            await self.flush()
        self._next_maintenance = float("inf")
        for call in (self._write_call, self._stall_call):
            if call is not None and call.active():
                call.cancel()
        self._release_held()
        closed: OneShotEvent[None] = OneShotEvent()
        closing = Deferred.fromCoroutine(self._writer.run_in_thread(self.store.close))
        closing.addBoth(lambda _: closed.set_value(None))
        await _wait_at_most(closed.wait(), ARCHIVE_CLOSE_TIMEOUT / 2, self._clock)

    # Reading

    async def extract_submission(
        self, identifier: str, caller: str, directory: Path
    ) -> ExtractedSubmission | None:
        """Write an archived submission below `directory`, which may then exist; None if none.

        Raises: OSError; as `read_evaluation`.
        """
        await self._wait_for_end(identifier)
        try:
            return await self._call_reader(
                caller, self.store.extract_submission, identifier, caller, directory
            )
        except DamagedArchiveFile as error:
            self._log_damage(identifier, error)
            raise DamagedArchive from None

    async def list_rows(self, query: ArchiveQuery) -> list[IndexedEvaluation]:
        """Return the rows of a query. Raises: ServerBusy."""
        ending = [
            recording.done.wait()
            for recording in self._recordings.values()
            if recording.ring.has_ended and recording.caller == query.caller
        ]
        await _wait_at_most(gatherResults(ending, consumeErrors=True), _END_WAIT, self._clock)
        return await self._call_reader(query.caller, self.store.list_rows, query)

    async def read_evaluation(
        self, identifier: str, caller: str, read_archive_file: Callable[[ArchiveFile], T]
    ) -> T | None:
        """Return the result of `read_archive_file`, called in a thread with the open file.

        None if the caller has no archived evaluation of that name. Raises: DamagedArchive;
        ServerBusy, if the disk fails or hangs; CallerQuotaExceeded.
        """

        def open_and_read() -> T | None:
            file = self.store.open_file(identifier, caller)
            if file is None:
                return None
            try:
                return read_archive_file(file)
            finally:
                file.close()

        await self._wait_for_end(identifier)
        try:
            return await self._call_reader(caller, open_and_read)
        except DamagedArchiveFile as error:
            self._log_damage(identifier, error)
            raise DamagedArchive from None
        except OSError as error:
            self._log_damage(identifier, error)
            reason = f"the archive cannot be read: {error.strerror}; try again later"
            raise ServerBusy(reason, int(READ_TIMEOUT)) from None

    async def _call_reader(self, caller: str, call: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a call in a thread, in fair turns of the callers.

        Raises: ServerBusy, if the disk hangs; CallerQuotaExceeded.
        """
        self._read_number += 1
        holder = str(self._read_number)
        began = self._clock.seconds()
        try:
            slot = self._read_queue.acquire_slot(holder, caller)
            await slot.addTimeout(READ_TIMEOUT, self._clock)
        except WaitTimedOut:
            if self._last_read_end >= began:
                error = ServerBusy if caller == ANONYMOUS_CALLER else CallerQuotaExceeded
                reason = "too many requests read the archive at the same time; try again later"
                raise error(reason, int(READ_TIMEOUT)) from None
        else:
            reading = Deferred.fromCoroutine(self._readers.run_in_thread(call, *arguments))
            ended = make_one_shot_event(reading)
            ended.add_callback(lambda _: self._end_read(holder))
            await _wait_at_most(ended.wait(), READ_TIMEOUT, self._clock)
            if ended.is_set:
                return (await ended.wait())()
        raise ServerBusy(
            "the disk of the archive does not answer (archive.directory); try again later",
            int(READ_TIMEOUT),
        )

    def _end_read(self, holder: str) -> None:
        self._last_read_end = self._clock.seconds()
        self._read_queue.release_slot(holder)

    def _log_damage(self, identifier: str, error: Exception) -> None:
        log.error(
            "{evaluation}: the archive cannot be read: {error}",
            evaluation=derive_log_pseudonym(identifier),
            error=error,
        )

    async def _wait_for_end(self, identifier: str) -> None:
        """Wait until an evaluation that is gone from memory is archived or given up."""
        recording = self._recordings.get(identifier)
        if recording is not None:
            await _wait_at_most(recording.done.wait(), _END_WAIT, self._clock)


async def _wait_at_most(waiting: Deferred[Any], seconds: float, clock: IReactorTime) -> None:
    with suppress(WaitTimedOut, FirstError):  # the second from `gatherResults`
        await waiting.addTimeout(seconds, clock)
