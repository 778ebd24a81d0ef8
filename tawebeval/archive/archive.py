"""The archive: ended evaluations in compressed files, beside their rows in the store.

DIRECTORY/files/AB/NAME.jsonl.zst   the events of an evaluation whose NAME begins with AB
DIRECTORY/files/AB/NAME.tar.zst     its submission
DIRECTORY/files/AB/NAME.*.part      one of these files, while it is written

NAME is a digest of the identifier, from which the identifier cannot be guessed. Other users cannot
enter DIRECTORY/files. An evaluation is archived once a complete file has its name and its row says
so; until then the caller of `store_evaluation` keeps what it was made of, and archives it again
after a kill. A removal deletes the files before the rows. So a kill leaves rows without files at
most, and the next removal chooses the same ones.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args

import attrs
from twisted.logger import Logger

from tawebeval.archive.files import (
    ArchiveFileTooLarge,
    DamagedArchiveFile,
    pack_submission,
    read_events,
    write_evaluation,
)
from tawebeval.config import MIB, ArchiveSettings
from tawebeval.core.budgets import Budget, SharedResource
from tawebeval.core.evaluations import ArchiveRecord
from tawebeval.core.events import EMPTY_BATCH, EVENTS_LOST_ERROR, EventBatch, EventRing
from tawebeval.deferreds import Condition, FairQueue, WorkerThreads, run_in_background
from tawebeval.errors import DamagedArchive, DiscardedCursor, ServerBusy, StoreError, format_size
from tawebeval.linux.filetree import describe_disk_error, get_disk_bytes, rename_durably
from tawebeval.sandbox.workspace import Workspace, derive_directory_name, derive_log_pseudonym

UnarchivedReason = Literal["disk", "size", "defect"]
"""Reason why an evaluation is not archived.

The disk is full or fails; the evaluation alone exceeds `archive.size`; a defect.
"""

MAX_REMOVALS_PER_STEP = 100
"""Evaluations that one step removes, at most; after it an evaluation may be archived."""
WRITER_THREADS, WRITES_PER_CALLER = 4, 3
"""Evaluations that are archived at once: of all callers, and of one."""
READER_THREADS, READS_PER_CALLER = 2, 1
"""Reads of the archive at once: of all callers, and of one. Others wait in fair turns."""

_ROW = 2048  # bytes of the disk that a row takes, or so
_DAY = 24 * 60 * 60.0
_RETRY_AFTER = 5  # seconds
_PART = ".part"
_REMOVAL = " removal"  # begins the names of its turns, as no caller's name begins
RemovalCandidate = tuple[str, str, int]  # identifier, caller, bytes on the disk
T = TypeVar("T")

log = Logger()


class ArchiveRows(Protocol):
    """The rows of archived evaluations in the store. The methods may raise ServerBusy."""

    async def find_archived(self, identifier: str) -> Any:
        """Return the row, with `caller` and `archive_record.event_count`; None if there is none."""

    async def list_oldest_archived(
        self, max_count: int, *, caller: str | None = None, ended_before: float = math.inf
    ) -> list[RemovalCandidate]:
        """Return rows that ended first."""

    async def count_archived(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of rows and of bytes by caller."""

    def delete(self, identifier: str) -> None:
        """Delete a row."""

    def flush(self) -> Awaitable[None]:
        """Return when all changes until now are committed."""


@attrs.frozen
class EndedEvaluation:
    """An evaluation that has ended.

    - `final_status`: the last line of the file, with the status.
    - `read_all_events()`, called in a thread, yields all events; see `write_evaluation`.
    - `workspace`: the workspace with the submission, None if it is not kept.
    """

    identifier: str
    caller: str
    final_status: Mapping[str, Any]
    read_all_events: Callable[[], Iterator[EventRing]]
    workspace: Workspace | None = None


def make_monotonic_wall_clock() -> Callable[[], float]:
    """Return a clock that begins with the time of day, and that nobody sets.

    By a time of day that is wrong for a minute, the whole archive would be too old.
    """
    offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return lambda: offset + time.clock_gettime(time.CLOCK_BOOTTIME)


@attrs.define(eq=False)
class EvaluationArchive:
    """The archive in `directory`, written and removed from by the `_writers`.

    `_min_free_bytes` stay free on its file system. `archival_count` counts evaluations that were
    archived, `unarchived_counts_by_reason` others. `on_removal(identifier)` is called when the
    files of an evaluation are removed. It returns whether the evaluation is not forgotten yet: then
    the row stays, and says that the evaluation is not archived. Otherwise the row is deleted.
    """

    directory: Path
    settings: ArchiveSettings
    _min_free_bytes: int
    _rows: ArchiveRows
    _writers: WorkerThreads
    _readers: WorkerThreads
    _format_time: Callable[[float], str]
    _read_clock: Callable[[], float] = attrs.field(factory=make_monotonic_wall_clock)
    on_removal: Callable[[str], bool] = lambda identifier: False
    max_submission_bytes: int = MIB  # of an archived submission
    archival_count: int = 0
    unarchived_counts_by_reason: Counter[UnarchivedReason] = attrs.field(
        factory=lambda: Counter(dict.fromkeys(get_args(UnarchivedReason), 0))
    )
    evaluation_count: int = 0  # in the archive
    _budget: Budget = attrs.field(
        default=attrs.Factory(
            lambda self: Budget(SharedResource.ARCHIVE, self.settings.size), takes_self=True
        ),
        init=False,
    )
    _changes: FairQueue = attrs.field(
        factory=lambda: FairQueue(WRITER_THREADS, running_per_caller=WRITES_PER_CALLER)
    )
    _has_started: bool = False
    _has_counted: bool = False  # the rows of earlier processes
    _is_removing: bool = False
    _reads: FairQueue = attrs.field(
        factory=lambda: FairQueue(READER_THREADS, running_per_caller=READS_PER_CALLER)
    )

    @property
    def total_bytes(self) -> int:
        """Bytes of the disk that the archive takes."""
        return self._budget.used

    def _locate(self, identifier: str, kind: str) -> Path:
        name = derive_directory_name(identifier)
        return self.directory / "files" / name[:2] / f"{name}.{kind}.zst"

    def _unlink(self, identifier: str) -> None:
        for kind in ("tar", "jsonl"):  # what has its events is still complete
            path = self._locate(identifier, kind)
            for each in (path.with_suffix(_PART), path):
                each.unlink(missing_ok=True)

    # Writing

    async def store_evaluation(
        self, ended: EndedEvaluation, save_row: Callable[[ArchiveRecord], Awaitable[None]]
    ) -> bool:
        """Archive an evaluation; return whether it is in the archive.

        `save_row` makes the row say so, and returns once that is committed. Afterwards nothing
        else of the evaluation is needed. Raises: StoreError of `save_row`, which has then taken
        back what the row says.
        """
        async with self._changes.hold_slot(ended.caller):
            try:
                stored = await self._writers.run_in_thread(self._write_files, ended)
            except ArchiveFileTooLarge as error:
                if error.max_bytes < self.settings.size:
                    reserve = format_size(self._min_free_bytes)
                    why = f"less than {reserve} is free (see limits.free_disk)"
                    return self._count_loss(ended, "disk", why)
                limit = format_size(self.settings.size)
                return self._count_loss(ended, "size", f"it alone exceeds archive.size ({limit})")
            except OSError as error:
                return self._count_loss(ended, "disk", describe_disk_error(error))
            except DiscardedCursor:  # what clients have acknowledged is gone
                return False
            except Exception:  # noqa: BLE001  (the others are still archived)
                log.failure("defect: an evaluation could not be archived")
                return self._count_loss(ended, "defect", "the log has the details")
            try:
                await save_row(stored)
            except StoreError:
                await self._writers.run_in_thread(self._unlink, ended.identifier)
                raise
            self.archival_count += 1
            self.evaluation_count += 1
            self._budget.record_usage(stored.file_bytes, ended.caller)
        if self.total_bytes > self.settings.size:
            self.start_excess_removal()
        return True

    def _count_loss(self, ended: EndedEvaluation, reason: UnarchivedReason, why: str) -> bool:
        self.unarchived_counts_by_reason[reason] += 1
        log.warn(
            "{evaluation}: not archived ({reason}): {why}",
            evaluation=derive_log_pseudonym(ended.identifier),
            reason=reason,
            why=why,
        )
        return False

    def _write_files(self, ended: EndedEvaluation) -> ArchiveRecord:
        """Write the files of an evaluation. Raises: OSError, ArchiveFileTooLarge."""
        target = self._locate(ended.identifier, "jsonl")
        for directory in (self.directory, self.directory / "files", target.parent):
            directory.mkdir(mode=0o700, exist_ok=True)
        new = target.with_suffix(_PART)
        try:
            count = write_evaluation(
                new,
                {"archive": 1, "evaluation_id": ended.identifier, "caller": ended.caller},
                self._read_rings_with_room(ended),
                ended.final_status,
                self._format_time,
                min(self._measure_room(), self.settings.size),
            )
            if ended.workspace is not None:
                self._write_submission(ended.identifier, ended.workspace)
            rename_durably(new, target)
        except BaseException:
            with suppress(OSError):
                self._unlink(ended.identifier)
            raise
        paths = target, self._locate(ended.identifier, "tar")
        files = [path.stat() for path in paths if path.exists()]
        # Some file systems have not allocated the blocks yet.
        size = sum(max(file.st_size, get_disk_bytes(file)) for file in files)
        return ArchiveRecord(_ROW + size, count)

    def _measure_room(self) -> int:
        """Return the bytes that are free beside those that stay so. Blocks."""
        status = os.statvfs(self.directory)
        return status.f_bavail * status.f_frsize - self._min_free_bytes

    def _read_rings_with_room(self, ended: EndedEvaluation) -> Iterator[EventRing]:
        """Yield all events while there is room, also beside what others write meanwhile.

        Raises: ArchiveFileTooLarge; as `read_all_events`.
        """
        for ring in ended.read_all_events():
            room = self._measure_room()
            if room < 0:
                raise ArchiveFileTooLarge(room)
            yield ring

    def _write_submission(self, identifier: str, workspace: Workspace) -> None:
        """Archive the submission; without it the evaluation cannot run again."""
        target = self._locate(identifier, "tar")
        new = target.with_suffix(_PART)
        try:
            if pack_submission(workspace, self.max_submission_bytes, new):
                rename_durably(new, target)
        except (OSError, DamagedArchiveFile) as error:
            log.warn(
                "{evaluation}: the submission is not archived: {error}",
                evaluation=derive_log_pseudonym(identifier),
                error=error,
            )
        finally:
            new.unlink(missing_ok=True)

    # Removal

    def enable_removal(self) -> None:
        """Begin to remove evaluations. Call it once those of an earlier process are restored."""
        self._has_started = True
        self.start_excess_removal()

    def start_excess_removal(self) -> None:
        """Begin `remove_excess_evaluations`, after the start. To be called once a minute."""
        if self._has_started:
            what = "defect: archive.days and archive.size may not hold until the next minute"
            run_in_background(self._try_to_remove_excess(), log, what)

    async def _try_to_remove_excess(self) -> None:
        with suppress(StoreError):  # the store has logged it
            await self.remove_excess_evaluations()

    async def remove_excess_evaluations(self) -> None:
        """Remove evaluations beyond `archive.days` and `archive.size`.

        Beyond `archive.size` the caller that holds most loses the oldest. Nothing more is removed
        after a file that cannot be. Raises: ServerBusy of the store.
        """
        if self._is_removing:
            return
        self._is_removing = True
        try:
            if not self._has_counted:
                await self._count_rows()
            while await self._remove_some():
                pass
        finally:
            self._is_removing = False

    @asynccontextmanager
    async def _take_all_turns(self) -> AsyncIterator[None]:
        """Let nothing be archived meanwhile; two such calls at once would wait for ever.

        Behind all evaluations of a caller it would wait for as many again before each turn, with
        fewer and fewer writers.
        """
        async with AsyncExitStack() as turns:
            for number in range(WRITER_THREADS):
                await turns.enter_async_context(self._changes.hold_slot(f"{_REMOVAL} {number}"))
            yield

    async def _count_rows(self) -> None:
        """Count what is archived, also by earlier processes. Raises: StoreError."""
        async with self._take_all_turns():
            await self._rows.flush()
            found = await self._rows.count_archived()
            self.evaluation_count = sum(count for count, _ in found.values())
            for caller in {*found, *self._budget.used_by_caller}:
                _, size = found.get(caller, (0, 0))
                self._budget.record_usage(size - self._budget.used_by_caller[caller], caller)
            self._has_counted = True
            files = self.directory / "files"
            if not found and await self._writers.run_in_thread(lambda: any(files.glob("*/*"))):
                log.error(
                    "archive: {path} has evaluations that the store does not know; restore the"
                    " store from a backup, or remove this directory",
                    path=files,
                )

    async def _remove_some(self) -> bool:
        """Remove up to `MAX_REMOVALS_PER_STEP`; return whether others may be left to remove."""
        async with self._take_all_turns():
            latest = self._read_clock() - self.settings.days * _DAY
            rows = await self._rows.list_oldest_archived(MAX_REMOVALS_PER_STEP, ended_before=latest)
            rows = rows or await self._list_excess()
            removed = await self._writers.run_in_thread(self._remove, rows)
            for identifier, _, _ in removed:
                if not self.on_removal(identifier):
                    self._rows.delete(identifier)
            self._has_counted = False  # if they cannot be deleted now, all are counted anew
            await self._rows.flush()
            self._has_counted = True
            for _, caller, size in removed:
                self._budget.give_back(size, caller)
            self.evaluation_count -= len(removed)
        return bool(rows) and len(removed) == len(rows)

    async def _list_excess(self) -> list[RemovalCandidate]:
        """Return the rows of the caller that holds most, until another caller holds more."""
        excess = self.total_bytes - self.settings.size
        held = self._budget.used_by_caller.most_common()
        for caller, size in held if excess > 0 else ():
            others = max((other_size for other, other_size in held if other != caller), default=0)
            rows = []
            for row in await self._rows.list_oldest_archived(MAX_REMOVALS_PER_STEP, caller=caller):
                rows.append(row)
                excess -= row[2]
                size -= row[2]
                if excess <= 0 or size < others:
                    break
            if rows:
                return rows
        return []

    def _remove(self, rows: Sequence[RemovalCandidate]) -> Sequence[RemovalCandidate]:
        """Remove files; return the rows of those that are removed."""
        for number, (identifier, _, _) in enumerate(rows):
            try:
                self._unlink(identifier)
            except OSError as error:
                log.error(  # noqa: TRY400
                    "archive: {path} cannot be removed: {error}; let the daemon's user write to"
                    " its directory, or remove the file as root; until then archive.days and"
                    " archive.size do not hold",
                    path=error.filename,
                    error=error.strerror,
                )
                return rows[:number]
        return rows

    # Reading

    async def find_events(self, identifier: str, caller: str) -> ArchivedEvents | None:
        """Return the events of an archived evaluation of the caller; None if there is none.

        Raises: ServerBusy of the store.
        """
        row = await self._find_row(identifier, caller)
        if row is None:
            return None
        path, call_reader = self._locate(identifier, "jsonl"), partial(self._call_reader, caller)
        return ArchivedEvents(row.archive_record.event_count, identifier, path, call_reader)

    async def read_submission(
        self, identifier: str, caller: str, read: Callable[[Path], T]
    ) -> T | None:
        """Return the result of `read` for the file of an archived submission; None if none.

        `read` is called in a thread. Raises: OSError, DamagedArchive; ServerBusy of the store.
        """
        if await self._find_row(identifier, caller) is None:
            return None
        try:
            return await self._call_reader(caller, partial(read, self._locate(identifier, "tar")))
        except FileNotFoundError:
            return None
        except DamagedArchiveFile as error:
            _log_failed_read(identifier, error)
            raise DamagedArchive from None

    async def _find_row(self, identifier: str, caller: str) -> Any:
        row = await self._rows.find_archived(identifier)
        return row if row is not None and row.caller == caller else None

    async def _call_reader(self, caller: str, call: Callable[[], T]) -> T:
        """Return the result of a call in a thread, in fair turns of the callers."""
        return await self._reads.run_in_turn(caller, partial(self._readers.run_in_thread, call))


@attrs.define(eq=False)
class ArchivedEvents:
    """The events of one archived evaluation, for its caller.

    `end_cursor` is the cursor after the last one. At a damage of the file it becomes the cursor
    after the event that says so.
    """

    end_cursor: int
    _identifier: str
    _path: Path
    _call_reader: Callable[[Callable[[], EventBatch]], Awaitable[EventBatch]]
    has_ended: bool = attrs.field(default=True, init=False)
    # Never notified, because nothing changes.
    reader_wakeup_condition: Condition = attrs.field(factory=Condition, init=False)

    def is_after_all_events(self, cursor: int) -> bool:
        """Return whether no event follows a cursor."""
        return cursor == self.end_cursor

    async def read(
        self, after_cursor: int, max_bytes: int, *, includes_times: bool = False
    ) -> EventBatch:
        """Return events after a cursor, which is not after `end_cursor`.

        At most `max_bytes` bytes, with times if these are wanted, but at least one event if there
        is one; EVENTS_LOST_ERROR at a damage. Raises: DiscardedCursor, if the file was removed
        meanwhile; ServerBusy.
        """
        if after_cursor == self.end_cursor:
            return EMPTY_BATCH
        try:
            return await self._call_reader(
                partial(
                    read_events, self._path, after_cursor, max_bytes, includes_times=includes_times
                )
            )
        except DamagedArchiveFile as error:
            _log_failed_read(self._identifier, error)
            self.end_cursor = after_cursor + 1
            return EVENTS_LOST_ERROR
        except FileNotFoundError:
            raise DiscardedCursor(str(self.end_cursor)) from None
        except OSError as error:
            _log_failed_read(self._identifier, error)
            reason = f"the archive cannot be read: {error.strerror}; try again later"
            raise ServerBusy(reason, _RETRY_AFTER) from None


def _log_failed_read(identifier: str, error: Exception) -> None:
    log.error(
        "{evaluation}: the archive cannot be read: {error}",
        evaluation=derive_log_pseudonym(identifier),
        error=error,
    )
