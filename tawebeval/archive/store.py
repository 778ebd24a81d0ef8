"""The archive in one directory: recordings, files, index; bounds of age, size and free space.

DIRECTORY/spool/                    recordings of evaluations that have not ended (`spool`)
DIRECTORY/files/AB/NAME.jsonl.zst   the events of an evaluation whose NAME begins with AB (`files`)
DIRECTORY/files/AB/NAME.tar.zst     its submission (`submissions`)
DIRECTORY/index/evaluations.sqlite  the index (`index`)
DIRECTORY/lock                      locked by the daemon that uses the archive

These three directories are closed to other users. NAME is a digest of the identifier, from which
the identifier cannot be guessed. Every function here blocks.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import attrs
import orjson
from twisted.logger import Logger

from tawebeval.archive.files import (
    ArchiveFile,
    DamagedArchiveFile,
    UnsupportedArchiveFormat,
    add_time_to_first_event,
    encode_header_frame,
)
from tawebeval.archive.index import ArchiveIndex, ArchiveQuery, IncompleteIndex, IndexedEvaluation
from tawebeval.archive.spool import SpooledRecording, recover_recordings, remove_recording
from tawebeval.archive.submissions import ExtractedSubmission, extract_submission, pack_submission
from tawebeval.config import ArchiveSettings
from tawebeval.core.events import EventBatch
from tawebeval.core.expiry_clock import ExpiryClock
from tawebeval.errors import ServerBusy, format_size
from tawebeval.linux.filetree import rename_durably
from tawebeval.sandbox.workspace import Workspace, derive_directory_name

RecordingLossReason = Literal["disk", "queue", "size", "gap", "defect"]
"""Reason why an evaluation is not archived.

The disk is full or fails; the queue is full since the disk is slow or hangs; the recording alone
exceeds `archive.size`; events from before a restart are missing; a defect.
"""

MAX_REMOVALS_PER_CALL = 100
"""Evaluations that one call removes, at most; after it the thread writes what waits."""

SUBDIRECTORY_NAMES = tuple(f"{number:02x}" for number in range(256))
"""The names of the directories in `files`, each for one `reconcile_index`."""

_SPOOL_PART = 0.25  # of the archive
_OVER_SHARE = "recordings of the caller take up archive.size"
_FILE = re.compile(r"([0-9a-f]{32})\.(jsonl|tar)\.zst")
_ROW = 1024  # bytes of the disk that a row takes besides its entry
_BLOCK = 512  # bytes, the unit of st_blocks
_RETRY_AFTER = 5  # seconds, if the index cannot be read
_DAY = 24 * 60 * 60.0

log = Logger()


class RecordingLost(Exception):
    """A recording that is given up; `reason` is a `RecordingLossReason`."""

    def __init__(self, reason: RecordingLossReason, message: str) -> None:
        super().__init__(message)
        self.reason: RecordingLossReason = reason


@attrs.frozen
class PendingEvents:
    """Events to write to a recording: the number of the first, and their time.

    The time is None if the lines have times.
    """

    begin_cursor: int
    batch: EventBatch
    time_of_first_event: str | None

    @property
    def end_cursor(self) -> int:
        """The cursor after the events."""
        return self.begin_cursor + self.batch.count


@attrs.frozen
class RecordingEnd:
    """The end of a recording: its last line, and the workspace with the submission, if kept."""

    sequence_number: int
    created_time: float
    ended_time: float
    status: dict[str, Any]
    listing_entry: dict[str, Any]
    workspace: Workspace | None


@attrs.frozen
class PendingWrites:
    """What is to be written of one evaluation. `is_recording_lost` discards all of it."""

    identifier: str
    caller: str
    events: Sequence[PendingEvents]
    recording_end: RecordingEnd | None = None
    is_recording_lost: bool = False


@attrs.frozen
class RecordingOutcome:
    """What became of one `PendingWrites`: the reason and the message if the recording is lost."""

    identifier: str
    loss_reason: RecordingLossReason | None = None
    loss_message: str = ""


@attrs.frozen
class ArchiveUsage:
    """The evaluations in the archive, their bytes, and those of recordings."""

    evaluation_count: int = 0
    archived_bytes: int = 0
    spooled_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of both."""
        return self.archived_bytes + self.spooled_bytes


@attrs.define(eq=False)
class ArchiveStore:
    """The archive in `directory`, which is created by `open`.

    `min_free_bytes` are the bytes that stay free on its file system. `needs_index_check` is whether
    the index has to be compared with the files, `has_unremovable_files` whether the last removal
    could not remove all files. The reading methods at the end and `check_index` are for other
    threads, too.
    """

    directory: Path
    settings: ArchiveSettings
    min_free_bytes: int
    _read_clock: Callable[[], float] = time.time
    _read_boot_clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    usage: ArchiveUsage = attrs.field(factory=ArchiveUsage)
    is_open: bool = False
    needs_index_check: bool = False
    has_unremovable_files: bool = False
    _is_damaged: bool = False
    _has_failed: bool = False  # since the check has begun
    _index: ArchiveIndex = attrs.field(init=False)
    _recordings: dict[str, SpooledRecording] = attrs.field(factory=dict)
    # Bytes by caller.
    _archived: Counter[str] = attrs.field(factory=Counter)
    _spooled: Counter[str] = attrs.field(factory=Counter)
    _lock_descriptor: int | None = None
    _expiry_clock: ExpiryClock = attrs.field(init=False)
    _stuck: set[str] = attrs.field(factory=set)  # names whose files could not be removed

    def __attrs_post_init__(self) -> None:
        self._index = ArchiveIndex(self.directory / "index" / "evaluations.sqlite")

    # Start

    def open(self) -> tuple[int, dict[str, int]]:
        """Open the archive, and create it if it is missing.

        Return the highest sequence number, and the numbers of events of the recordings that an
        earlier process has left, by name. Raises: OSError.
        """
        self.directory.mkdir(mode=0o700, exist_ok=True)
        for name in ("spool", "files", "index"):
            (self.directory / name).mkdir(mode=0o700, exist_ok=True)
        self._lock()
        self._recordings = recover_recordings(self._spool)
        for name in [one for one in self._recordings if self._locate(one, "jsonl").exists()]:
            self._discard(name)
        newest = 0
        try:
            self._index.open()
            if not os.listdir(self.directory / "files"):
                self._index.mark_index_complete()
            newest = self._index.find_highest_sequence_number()
        except sqlite3.Error as error:
            self._note_damage(error)
        self.is_open = True
        return newest, {name: one.event_count for name, one in self._recordings.items()}

    def _lock(self) -> None:
        """Keep other daemons away, until the process ends. Raises: OSError."""
        if self._lock_descriptor is None:
            path = self.directory / "lock"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                why = "another daemon uses this archive"
                raise OSError(error.errno, why, str(self.directory)) from None
            self._lock_descriptor = descriptor
            self._expiry_clock = ExpiryClock(
                self._read_clock, self._read_boot_clock, *_read_lock_times(descriptor)
            )

    def check_index(self) -> None:
        """Read the whole index, to find out whether it is damaged. For any thread."""
        try:
            if not self._is_damaged:
                self._index.check_integrity()
        except sqlite3.Error as error:
            self._note_damage(error)

    def recreate_damaged_index(self) -> None:
        """Begin a new index if it is damaged. Raises: OSError, sqlite3.Error."""
        if self._is_damaged:
            self._index.recreate()
            self._is_damaged = False
        self._has_failed = False

    def update_usage_from_index(self) -> None:
        """Count what the check has left. Raises: sqlite3.Error."""
        self.needs_index_check = self._has_failed
        if not self._has_failed:
            self._index.mark_index_complete()
        rows = list(self._index.count_by_caller())
        self._archived = Counter({caller: size for caller, _, size in rows})
        self._set_archived_usage(sum(count for _, count, _ in rows))

    def discard_recordings(self, file_stems: Sequence[str]) -> None:
        """Remove recordings that no evaluation continues. Raises: OSError."""
        for name in file_stems:
            self._discard(name)

    def close(self) -> None:
        """Close the index, and let another daemon use the archive."""
        self._index.close()
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def reconcile_index(self, subdirectory_name: str) -> None:
        """Remove rows without a file and incomplete files; add missing rows.

        Raises: OSError, sqlite3.Error.
        """
        folder = self.directory / "files" / subdirectory_name
        files: dict[str, set[str]] = {}
        for entry in os.scandir(folder) if folder.is_dir() else ():
            match = _FILE.fullmatch(entry.name)
            if match is not None:
                files.setdefault(match[1], set()).add(match[2])
            elif entry.name.endswith(".new"):  # the process ended in a write
                with _log_stuck_files():
                    os.unlink(entry.path)
        known = set(self._index.list_file_stems(subdirectory_name))
        missing = [name for name in files if name not in known]
        for start in range(0, len(missing), MAX_REMOVALS_PER_CALL):
            self._index.add_rows(
                list(self._read_rows(missing[start : start + MAX_REMOVALS_PER_CALL]))
            )
        gone = [name for name in known if "jsonl" not in files.get(name, ())]
        if gone:
            self._index.remove_rows(gone)

    def _read_rows(self, names: Sequence[str]) -> Iterator[IndexedEvaluation]:
        """Yield the rows of files; remove files that are incomplete."""
        for name in names:
            try:
                file = ArchiveFile.open(self._locate(name, "jsonl"))
                try:
                    header, end = file.read_header_line(), file.read_end_line()
                finally:
                    file.close()
                yield self._make_row(name, header["caller"], end)
            except UnsupportedArchiveFormat as error:
                log.warn("archive: {name} is left alone: {error}", name=name, error=error)
            except (FileNotFoundError, DamagedArchiveFile, KeyError, TypeError) as error:
                words = "archive: {name} is removed, as it is incomplete: {error}"
                log.warn(words, name=name, error=error)
                with _log_stuck_files():
                    self._unlink(name)
            except OSError as error:
                words = "archive: {name} is not in lists, as it cannot be read: {error}"
                log.warn(words, name=name, error=error.strerror)

    def _make_row(self, name: str, caller: str, end: dict[str, Any]) -> IndexedEvaluation:
        entry = orjson.dumps(end["entry"])
        paths = self._locate(name, "jsonl"), self._locate(name, "tar")
        files = [path.stat() for path in paths if path.exists()]
        # Some file systems have not allocated the blocks yet.
        size = sum(max(file.st_size, file.st_blocks * _BLOCK) for file in files)
        return IndexedEvaluation(
            name,
            caller,
            end["sequence_number"],
            end["created"],
            end["ended"],
            end["entry"]["state"],
            size + _ROW + len(entry),
            entry,
        )

    def _note_damage(self, error: sqlite3.Error) -> None:
        """Have the index made again, unless the error is one of the disk."""
        self.needs_index_check = self._has_failed = True
        if isinstance(error, sqlite3.OperationalError):
            log.error("archive: the index cannot be used: {error}", error=error)
        else:
            log.error(
                "archive: the index is damaged, and is made again from the files: {error}",
                error=error,
            )
            self._is_damaged = True

    # Writing

    def write_recordings(self, pending_writes: Sequence[PendingWrites]) -> list[RecordingOutcome]:
        """Write events, and archive the evaluations that have ended."""
        outcomes, ended = [], []
        free = self._measure_free_bytes()
        lost: set[str] = set()  # recordings given up for another caller's
        for work in pending_writes:
            name = derive_directory_name(work.identifier)
            outcome = RecordingOutcome(work.identifier)
            if work.identifier in lost:
                continue
            try:
                if work.is_recording_lost:
                    self._discard(name)
                else:
                    for each in self._make_spool_room(work):
                        lost.add(each)
                        outcomes.append(RecordingOutcome(each, "size", _OVER_SHARE))
                    row = self._write_one(name, work, free)
                    ended += [row] if row is not None else []
            except RecordingLost as error:
                outcome = RecordingOutcome(work.identifier, error.reason, str(error))
            except OSError as error:
                message = f"{error.filename}: {error.strerror}"
                outcome = RecordingOutcome(work.identifier, "disk", message)
            except DamagedArchiveFile as error:
                outcome = RecordingOutcome(work.identifier, "disk", str(error))
            except Exception:  # noqa: BLE001  (the others are still archived)
                log.failure("defect: an evaluation could not be archived")
                outcome = RecordingOutcome(work.identifier, "defect", "the log has the details")
            if outcome.loss_reason is not None:
                self._forget(name)
            outcomes.append(outcome)
        if ended:
            self._add_rows(ended)
        self._measure_spool()
        return outcomes

    def _write_one(self, name: str, work: PendingWrites, free: int) -> IndexedEvaluation | None:
        """Write the events of one evaluation; return its row at its end."""
        if free < self.min_free_bytes and (work.events or work.recording_end):
            raise RecordingLost(
                "disk",
                f"less than {format_size(self.min_free_bytes)} is free (health.free_disk, and an"
                " eighth more)",
            )
        recording = self._recordings.get(name)
        if recording is None:
            recording = self._recordings[name] = SpooledRecording(self._spool, name)
        recording.identifier, recording.caller = work.identifier, work.caller
        batches = list(self._check_events(recording, work.events))
        header = encode_header_frame(work.identifier, work.caller)
        if work.recording_end is None:
            if batches:
                recording.write_events(batches, header)
            return None
        if work.recording_end.workspace is not None:
            self._pack(name, work.recording_end.workspace)
        end = {
            "status": work.recording_end.status,
            "entry": work.recording_end.listing_entry,
            "sequence_number": work.recording_end.sequence_number,
            "created": work.recording_end.created_time,
            "ended": work.recording_end.ended_time,
        }
        target = self._locate(name, "jsonl")
        target.parent.mkdir(mode=0o700, exist_ok=True)
        recording.finish(batches, header, end, target)
        del self._recordings[name]
        return self._make_row(name, work.caller, end)

    def _make_spool_room(self, work: PendingWrites) -> Iterator[str]:
        """Give up recordings of the caller that holds most, while those of `work` do not fit.

        Yield their identifiers. Raises: RecordingLost, if the caller is that of `work`.
        """
        size = sum(len(each.batch.lines) for each in work.events)
        while size and (caller := self._find_caller_over_share(work.caller, size)) is not None:
            # Without an identifier the evaluation could not be told of the loss.
            recordings = [
                one for one in self._recordings.values() if one.caller == caller and one.identifier
            ]
            if caller == work.caller or not recordings:
                raise RecordingLost("size", _OVER_SHARE)
            largest = max(recordings, key=attrgetter("size"))
            self._forget(largest.file_stem)
            self._spooled[caller] -= largest.size
            yield largest.identifier
        self._spooled[work.caller] += size

    def _find_caller_over_share(self, caller: str, size: int) -> str | None:
        """Return the caller whose recordings leave no room for `size` bytes of `caller`.

        While a caller's recordings have `_SPOOL_PART` of the archive or less, others' archived
        evaluations make room for them.
        """
        spooled = Counter(self._spooled)
        spooled[caller] += size
        found, most = spooled.most_common(1)[0]
        if spooled.total() > self.settings.max_bytes:
            return found
        held = spooled + self._archived
        excess = held.total() - self.settings.max_bytes
        is_over_share = most > self.settings.max_bytes * _SPOOL_PART and held[found] == max(
            held.values()
        )
        return found if is_over_share and excess > self._archived[found] else None

    def _check_events(
        self, recording: SpooledRecording, events: Sequence[PendingEvents]
    ) -> Iterator[EventBatch]:
        """Yield events with their times, from where the recording ends. Raises: RecordingLost."""
        position = recording.event_count
        for each in events:
            if each.begin_cursor != position:
                raise RecordingLost(
                    "gap", f"events from {position} to {each.begin_cursor} are missing"
                )
            position += each.batch.count
            yield (
                each.batch
                if each.time_of_first_event is None
                else add_time_to_first_event(each.batch, each.time_of_first_event)
            )

    def _pack(self, name: str, workspace: Workspace) -> None:
        """Archive the submission; without it the evaluation cannot run again."""
        target = self._locate(name, "tar")
        new = target.with_suffix(".new")
        target.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            if pack_submission(workspace, self.settings.max_submission_bytes, new):
                rename_durably(new, target)
        except (OSError, DamagedArchiveFile) as error:
            new.unlink(missing_ok=True)
            log.warn("{name}: the submission is not archived: {error}", name=name[:16], error=error)

    def _add_rows(self, rows: Sequence[IndexedEvaluation]) -> None:
        try:
            self._index.add_rows(rows)
        except sqlite3.Error as error:
            # The files are complete: the next check adds the rows.
            self._note_damage(error)
        for row in rows:
            self._archived[row.caller] += row.size
        self._set_archived_usage(self.usage.evaluation_count + len(rows))

    def _set_archived_usage(self, count: int) -> None:
        self._archived = +self._archived  # without callers that have nothing
        self.usage = attrs.evolve(
            self.usage, evaluation_count=count, archived_bytes=self._archived.total()
        )

    # Removal

    def remove_old_evaluations(self) -> bool:
        """Remove evaluations beyond `archive.days` and `archive.size`.

        Beyond `archive.size` the caller that holds most loses the oldest. At most
        `MAX_REMOVALS_PER_CALL` are removed. Return whether others are left to remove.
        Evaluations whose files cannot be removed stay and count; others go in their place, until
        the next removal tries again. Raises: sqlite3.Error.
        """
        now = self._expiry_clock.read()
        if self._lock_descriptor is not None:
            times = f"{now:020.3f} {self._expiry_clock.seconds_ahead:012.3f}\n"
            with suppress(OSError):  # the disk is full
                os.pwrite(self._lock_descriptor, times.encode(), 0)  # for the next process
        latest = now - self.settings.retention_days * _DAY
        count = MAX_REMOVALS_PER_CALL + len(self._stuck)
        rows = self._leave_out_stuck(self._index.list_expired_evaluations(count, latest))
        if not rows:
            rows = self._list_excess(count)
        if not rows or len(self._stuck) >= MAX_REMOVALS_PER_CALL:  # then it is not a single file
            self.has_unremovable_files = bool(self._stuck)
            self._stuck.clear()
            return False
        removed = [row for row in rows if self._try_to_unlink(row[0])]
        self._index.remove_rows([name for name, _, _ in removed])
        for _, caller, size in removed:
            self._archived[caller] -= size
        self._set_archived_usage(self.usage.evaluation_count - len(removed))
        return True

    def _list_excess(self, count: int) -> list[tuple[str, str, int]]:
        """Return the rows of the caller that holds most, until another caller holds more."""
        excess = self.usage.total_bytes - self.settings.max_bytes
        held = self._archived + self._spooled
        for caller, size in held.most_common() if excess > 0 else ():
            found = self._leave_out_stuck(self._index.list_oldest_evaluations(count, caller))
            others = max((held[other] for other in self._archived if other != caller), default=0)
            rows = []
            for row in found:
                rows.append(row)
                excess -= row[2]
                size -= row[2]
                if excess <= 0 or size < others:
                    break
            if rows:
                return rows
        return []

    def _leave_out_stuck(self, rows: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
        return [row for row in rows if row[0] not in self._stuck][:MAX_REMOVALS_PER_CALL]

    def _try_to_unlink(self, name: str) -> bool:
        """Remove the files of an evaluation; log the first failure in a row of removals."""
        try:
            self._unlink(name)
        except OSError as error:
            if not self._stuck:
                _log_stuck_file(error)
            self._stuck.add(name)
            return False
        return True

    def _unlink(self, name: str) -> None:
        for kind in ("tar", "jsonl"):  # what has its events is still complete
            self._locate(name, kind).unlink(missing_ok=True)

    def _discard(self, name: str) -> None:
        self._recordings.pop(name, None)
        remove_recording(self._spool, name)

    def _forget(self, name: str) -> None:
        """Discard a recording, also from a disk that fails."""
        try:
            self._discard(name)
            if not self._locate(name, "jsonl").exists():
                self._locate(name, "tar").unlink(missing_ok=True)
        except OSError as error:
            log.warn("archive: {error}; the next start removes the file", error=error)

    # Measures

    def _measure_spool(self) -> None:
        self._spooled = Counter()
        for recording in self._recordings.values():
            self._spooled[recording.caller] += recording.size
        self.usage = attrs.evolve(self.usage, spooled_bytes=self._spooled.total())

    def _measure_free_bytes(self) -> int:
        try:
            status = os.statvfs(self.directory)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize

    # Reading, in other threads

    def is_archived(self, identifier: str) -> bool:
        """Return whether an evaluation is archived."""
        return self._locate(derive_directory_name(identifier), "jsonl").exists()

    def open_file(self, identifier: str, caller: str) -> ArchiveFile | None:
        """Return the open file of an archived evaluation of the caller; None if there is none.

        Raises: OSError, DamagedArchiveFile.
        """
        try:
            file = ArchiveFile.open(self._locate(derive_directory_name(identifier), "jsonl"))
        except FileNotFoundError:
            return None
        try:
            if file.read_header_line()["caller"] == caller:
                return file
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def extract_submission(
        self, identifier: str, caller: str, directory: Path
    ) -> ExtractedSubmission | None:
        """Write an archived submission below `directory`; None if there is none.

        Raises: OSError, DamagedArchiveFile.
        """
        file = self.open_file(identifier, caller)
        source = self._locate(derive_directory_name(identifier), "tar")
        if file is None:
            return None
        file.close()
        try:
            return extract_submission(source, directory)
        except FileNotFoundError:
            return None

    def list_rows(self, query: ArchiveQuery) -> list[IndexedEvaluation]:
        """Return the rows of a query. Raises: ServerBusy, while the index cannot tell all."""
        try:
            return self._index.list_rows(query)
        except IncompleteIndex:
            problem = "the index of the archive is being made again from the files"
        except sqlite3.Error as error:
            self._note_damage(error)
            problem = "the index of the archive cannot be read"
        raise ServerBusy(f"{problem}; try again later", _RETRY_AFTER)

    @property
    def _spool(self) -> Path:
        return self.directory / "spool"

    def _locate(self, name: str, kind: str) -> Path:
        return self.directory / "files" / name[:2] / f"{name}.{kind}.zst"


def _read_lock_times(lock: int) -> tuple[float, float]:
    """Return the time that an earlier process has shown last, and its `seconds_ahead`."""
    try:
        latest, ahead = map(float, os.pread(lock, 64, 0).split())
    except ValueError:  # a new archive, or one of an earlier version
        return os.fstat(lock).st_mtime, 0.0
    return latest, ahead


@contextmanager
def _log_stuck_files() -> Iterator[None]:
    """Log a file that the body cannot remove."""
    try:
        yield
    except OSError as error:
        _log_stuck_file(error)


def _log_stuck_file(error: OSError) -> None:
    log.error(
        "archive: {path} cannot be removed: {error}; let the daemon's user write to its directory,"
        " or remove the file as root; until then archive.days and archive.size may not hold",
        path=error.filename,
        error=error.strerror,
    )
