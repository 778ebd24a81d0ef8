"""Events of an evaluation: the log, the files that stand behind it, and reading from both.

An evaluation's directory has these files:

- `stdout`: what the evaluator has printed; the starter writes it.
  Acknowledged parts are punched out of it (fallocate(2)).
- `marks`: records of 24 bytes: the cursor after some events, their time, and where a partial line
  was flushed (`core.events.BatchMark`). A mark is written before its events are delivered.
- `segments`: for each segment that has ended its source, the state of the parser there, and the
  results so far, as msgpack with a checksum.
- `files`: the files that stdout named, as they were when they were read, or why they were refused.

`RecordedStdout` parses stdout, writes these files, and appends the events to the log. After the
daemon's process has ended, however it did, `RecordedStdout.restore_event_log` makes the same log of
the files again, event by event. A torn record at the end of a file is dropped: none of its events
was delivered.

`EvaluationEvents.read` returns events after a cursor. A thread parses events again that have left
memory. An acknowledgement discards events; then a thread gives their room on the
disk back. Nobody waits for readers: the evaluator goes on, and what is not read lies on the disk.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import attrs
import msgspec
from twisted.internet.defer import succeed
from twisted.logger import Logger

from tawebeval.core.budgets import Budget
from tawebeval.core.events import (
    ALL_RECEIVED_CURSOR,
    EMPTY_BATCH,
    EVENTS_LOST_ERROR,
    BatchMark,
    EventBatch,
    EventLog,
    EventMemory,
    EventPage,
    EventRing,
    EventSegment,
    EventsEvicted,
    SegmentSource,
    StdoutChanged,
    compute_base64_size,
    make_page,
    resolve_cursor,
    split_batch,
)
from tawebeval.core.segi import Markers, SegiParser
from tawebeval.deferreds import (
    Condition,
    FairQueue,
    SingleFlight,
    WorkerThreads,
    run_in_background,
)
from tawebeval.errors import DiscardedCursor, ServerBusy
from tawebeval.evaluations.store import format_rfc3339_time
from tawebeval.linux.filetree import is_transient_error
from tawebeval_client.results import ResultSummary

_READ = 64 * 1024
_PUNCHED = 1024 * 1024  # bytes that are punched out at once, at least
_REMOVED = 500  # files that are removed at once, at most
_MAX_STDOUT = 1024 * 1024  # bytes from which a segment ends, also with few events or none
_MARK = struct.Struct("<QQQ")
_NO_FLUSH, _LAST = 2**64 - 1, 2**64 - 2  # in place of where a flush was
_HEAD = struct.Struct("<II")  # size and CRC-32 of a segment's record
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE

T = TypeVar("T")

log = Logger()

_libc = ctypes.CDLL(None, use_errno=True)


class _SegmentRecord(msgspec.Struct, array_like=True, frozen=True):
    """A segment that has ended, and the state after it."""

    begin_cursor: int
    end_cursor: int
    source: SegmentSource
    next_stdout_begin: int
    next_checkpoint: bytes
    next_file: int
    file_bytes: int
    result_summary: bytes


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_SegmentRecord).decode


class EventFiles:
    """Files behind the event log in the directory of one evaluation. All methods block."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)
        self._descriptors: dict[str, int] = {}
        self._punched = 0
        self._removed_files = 0

    def close(self) -> None:
        """Close the files; the next use opens them again. No thread may use them."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _open(self, name: str) -> int:
        """Return the descriptor of a file, which is opened when it is used first."""
        if name not in self._descriptors:
            append = os.O_APPEND if name == "segments" else 0
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | append
            opened = os.open(self._directory / name, flags, 0o600)
            if self._descriptors.setdefault(name, opened) != opened:
                os.close(opened)  # another thread was faster
        return self._descriptors[name]

    @property
    def stdout_size(self) -> int:
        """Bytes of stdout."""
        return os.fstat(self._open("stdout")).st_size

    def read_stdout(self, begin: int, end: int) -> bytes:
        """Return bytes of stdout; fewer if the file is shorter."""
        return os.pread(self._open("stdout"), end - begin, begin)

    def has_disk_space_to_free(self, stdout_bytes: int, file_count: int) -> bool:
        """Return whether `free_stdout_blocks` or `remove_referenced_files` has something to do."""
        return stdout_bytes - self._punched >= _PUNCHED or file_count > self._removed_files

    def free_stdout_blocks(self, before: int) -> None:
        """Give back the blocks before a place in stdout, in steps of at least 1 MiB."""
        if before - self._punched >= _PUNCHED:
            mode, offset, size = _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(before)
            # A file system without holes keeps the bytes until the evaluation is removed.
            _libc.fallocate(self._open("stdout"), mode, offset, size)
            self._punched = before

    def write_batch_mark(self, number: int, mark: BatchMark) -> None:
        """Write a mark, in place of the one with the same number."""
        flushed = _LAST if mark.is_from_stdout_end else mark.flush_offset
        flushed = _NO_FLUSH if flushed is None else flushed
        packed = _MARK.pack(mark.end_cursor, mark.time_ms, flushed)
        if os.pwrite(self._open("marks"), packed, number * _MARK.size) < len(packed):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read_batch_marks(self, first: int, end: int | None = None) -> list[BatchMark]:
        """Return marks by their numbers, all from the first on without an `end`."""
        marks = self._open("marks")
        size = os.fstat(marks).st_size if end is None else end * _MARK.size
        content = os.pread(marks, max(0, size - first * _MARK.size), first * _MARK.size)
        whole = content[: len(content) // _MARK.size * _MARK.size]
        return [
            BatchMark(end_cursor, time_ms, None if flushed >= _LAST else flushed, flushed == _LAST)
            for end_cursor, time_ms, flushed in _MARK.iter_unpack(whole)
        ]

    def append_segment_record(self, record: _SegmentRecord) -> None:
        """Append the record of a segment that has ended."""
        packed = _pack(record)
        packed = _HEAD.pack(len(packed), zlib.crc32(packed)) + packed
        if os.write(self._open("segments"), packed) < len(packed):
            # Later records would be lost with it.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read_segment_records(self) -> list[_SegmentRecord]:
        """Return the records of all segments; drop what was torn at the end of both files."""
        marks, segments = self._open("marks"), self._open("segments")
        os.ftruncate(marks, os.fstat(marks).st_size // _MARK.size * _MARK.size)
        content = os.pread(segments, os.fstat(segments).st_size, 0)
        records, at = [], 0
        while len(content) - at >= _HEAD.size:
            length, checksum = _HEAD.unpack_from(content, at)
            packed = content[at + _HEAD.size : at + _HEAD.size + length]
            if not length or len(packed) < length or zlib.crc32(packed) != checksum:
                break
            records.append(_unpack(packed))
            at += _HEAD.size + length
        os.ftruncate(segments, at)
        return records

    def store_referenced_file(self, number: int, content: bytes | str) -> None:
        """Keep the content of the file that stdout named, or the message of its refusal."""
        name, data = (
            ("refused", content.encode()) if isinstance(content, str) else ("read", content)
        )
        (self._directory / "files").mkdir(exist_ok=True)  # few evaluations name a file
        partial = self._directory / "files" / "partial"
        partial.write_bytes(data)
        partial.rename(self._directory / "files" / f"{number}.{name}")

    def remove_referenced_files(self, before: int) -> None:
        """Remove files that stdout named before the one of this number, some of them at once."""
        end = min(before, self._removed_files + _REMOVED)
        for number in range(self._removed_files, end):
            for name in ("read", "refused"):
                (self._directory / "files" / f"{number}.{name}").unlink(missing_ok=True)
        self._removed_files = max(self._removed_files, end)

    def read_referenced_file(self, number: int) -> bytes | str | None:
        """Return what `store_referenced_file` has kept, None without it."""
        for name in ("read", "refused"):
            try:
                content = (self._directory / "files" / f"{number}.{name}").read_bytes()
            except FileNotFoundError:
                continue
            return content if name == "read" else content.decode()
        return None


def has_batch_marks(directory: Path) -> bool:
    """Return whether an evaluation's directory has marks, as where events were delivered."""
    try:
        return (directory / "marks").stat().st_size > 0
    except OSError:
        return False


@attrs.define(eq=False)
class RecordedStdout:
    """Parser of one evaluator's stdout whose events and their files outlive the daemon.

    `feed`, `parse_pending`, `flush_partial_line`, `supply_or_refuse_file` and `finish` append
    the events that have become certain to `event_log`; they write a mark first. `read_wall_clock()`
    returns seconds since the epoch. Call them in a thread if the file system of stdout may be
    slow.

    `parser` says what comes next: its pending input, the file that it awaits, a partial line.
    `stdout_bytes` were fed so far, `file_bytes` is the size of the files that stdout has named, as
    base64. Together they are at most `max_output` after a restart; before it the caller counts.
    """

    event_log: EventLog
    _files: EventFiles
    segi_markers: Markers
    _read_wall_clock: Callable[[], float]
    _max_output: int = attrs.field(default=2**62, kw_only=True)
    stdout_bytes: int = 0
    file_bytes: int = 0
    parser: SegiParser = attrs.field(init=False)
    _mark_count: int = 0
    _last_time_ms: int = -1
    _file_count: int = 0
    # Of the newest segment:
    _begin: int = 0
    _checkpoint: bytes = b""
    _checksum: int = 0
    _first_mark: int = 0
    _first_file: int = 0
    _begin_cursor: int = 0
    _chunk: bytes = b""  # the last one, while the parser is at work on it
    # The first one is that of the next events.
    _replayed_marks: list[BatchMark] = attrs.field(factory=list)
    _drops_new_events: bool = False

    def __attrs_post_init__(self) -> None:
        self.parser = SegiParser(self.segi_markers)

    def feed(self, chunk: bytes) -> None:
        """Parse bytes of stdout; no input may be pending, and no file wanted."""
        self.stdout_bytes += len(chunk)
        self._checksum = zlib.crc32(chunk, self._checksum)
        self._chunk = chunk
        self._append(self.parser.feed(chunk))
        self._rest()

    def parse_pending(self) -> None:
        """Parse more of what was fed."""
        self._append(self.parser.parse_pending())
        self._rest()

    def flush_partial_line(self) -> None:
        """Deliver the partial line without waiting for its rest."""
        self._append(self.parser.flush_partial_line(), flush_offset=self.stdout_bytes)

    def store_referenced_file(self, content: bytes | str) -> None:
        """Keep the content of the wanted file, or the message of its refusal. Blocks.

        It precedes `supply_or_refuse_file`, which takes the same content.
        """
        self._files.store_referenced_file(self._file_count, content)

    def supply_or_refuse_file(self, content: bytes | str) -> None:
        """Take the content of the wanted file, or the message of its refusal."""
        self._file_count += 1
        if isinstance(content, str):
            self._append(self.parser.refuse_file(content))
        else:
            self.file_bytes += compute_base64_size(len(content))
            self._append(self.parser.supply_file(content))
        self._rest()

    def finish(self) -> None:
        """Take the end of stdout; the log stays open for the final event."""
        self._append(self.parser.finish(), is_last=True)
        if self._replayed_marks:
            raise StdoutChanged
        if self.event_log.end_cursor > self._begin_cursor and not self._drops_new_events:
            self._write_segment(self.stdout_bytes, b"", b"", is_last=True)

    def finish_without_files(self, refusal: str) -> Iterator[None]:
        """Take the end of stdout after a restart; refuse files that nobody can read any more.

        Blocks in each step. Raises: OSError.
        """
        while True:
            if self.parser.awaited_file is not None:
                self.store_referenced_file(refusal)
                self.supply_or_refuse_file(refusal)
            elif self.parser.has_pending_input:
                self.parse_pending()
            elif self._replay_read():
                yield
            else:
                break
        self.finish()

    def drop_parser_input(self) -> None:
        """Drop the parser's input, up to a whole data block or file: nothing follows."""
        summary, self._chunk = self.parser.result_summary, b""
        self.__attrs_post_init__()
        self.parser.result_summary = summary

    def _append(
        self, batch: EventBatch, *, flush_offset: int | None = None, is_last: bool = False
    ) -> None:
        """Append events at the times that their marks have, or now."""
        while self._replayed_marks and batch.count:
            mark = self._replayed_marks[0]
            first, batch = split_batch(
                batch, min(batch.count, mark.end_cursor - self.event_log.end_cursor)
            )
            self.event_log.append_batch(first, mark.time_ms)
            if self.event_log.end_cursor == mark.end_cursor:
                del self._replayed_marks[0]
        if not batch.count or self._drops_new_events:
            return
        time_ms = int(self._read_wall_clock() * 1000)
        mark = BatchMark(self.event_log.end_cursor + batch.count, time_ms, flush_offset, is_last)
        is_plain = flush_offset is None and not is_last
        if is_plain and time_ms == self._last_time_ms and self._mark_count > self._first_mark:
            self._mark_count -= 1  # the last mark goes on
        self._files.write_batch_mark(self._mark_count, mark)
        self._mark_count += 1
        self._last_time_ms = time_ms if is_plain else -1
        self.event_log.append_batch(batch, time_ms)

    # Segments

    def _rest(self) -> None:
        """End a segment that is large enough, also amid the last chunk: its events may be many."""
        parser, chunk = self.parser, self._chunk
        is_due = self.event_log.can_end_segment or self.stdout_bytes - self._begin >= _MAX_STDOUT
        if is_due and not (self._replayed_marks or self._drops_new_events):
            place, checkpoint = parser.make_checkpoint()
            held_back = self.stdout_bytes - place
            if held_back <= len(chunk):
                self._write_segment(place, checkpoint, chunk[len(chunk) - held_back :])
        if not parser.has_pending_input and parser.awaited_file is None:
            self._chunk = b""

    def _write_segment(
        self, place: int, checkpoint: bytes, held_back: bytes, *, is_last: bool = False
    ) -> None:
        end_cursor = self.event_log.end_cursor
        source = SegmentSource(
            self._begin,
            self.stdout_bytes,
            self._checkpoint,
            self._checksum,
            self._first_mark,
            self._mark_count,
            self._first_file,
            is_last,
        )
        self._files.append_segment_record(
            _SegmentRecord(
                self._begin_cursor,
                end_cursor,
                source,
                next_stdout_begin=place,
                next_checkpoint=checkpoint,
                next_file=self._file_count,
                file_bytes=self.file_bytes,
                result_summary=self.parser.result_summary.pack(),
            )
        )
        if end_cursor > self._begin_cursor:
            self.event_log.end_segment(source)
        self._begin_segment(end_cursor, place, checkpoint, zlib.crc32(held_back))

    def _begin_segment(self, cursor: int, place: int, checkpoint: bytes, checksum: int) -> None:
        self._begin_cursor, self._begin, self._checkpoint = cursor, place, checkpoint
        self._checksum = checksum
        self._first_mark, self._first_file = self._mark_count, self._file_count

    # After a restart, and after an eviction

    def restore_event_log(self, *, has_ended: bool = False) -> None:
        """Make the log of the files again. Blocks.

        Afterwards `stdout_bytes` is the place from which to feed stdout on; bytes up to there were
        parsed, and their marks followed. If the evaluation `has_ended`, what stdout has beside the
        events with marks stays out: another event was delivered in its place, such as the error of
        a full disk. Raises: StdoutChanged.
        """
        self._drops_new_events = has_ended
        records = self._files.read_segment_records()
        for record in records:
            if record.end_cursor > record.begin_cursor:
                self.event_log.restore_segment(
                    record.begin_cursor, record.end_cursor, record.source
                )
        if records:
            self._resume(records[-1])
        if not (records and records[-1].source.has_stdout_end):
            marks = self._files.read_batch_marks(self._mark_count)
            self._mark_count += len(marks)
            self._replay(marks)
        if self._files.stdout_size < self.stdout_bytes:
            raise StdoutChanged

    def read_last_batch_time(self) -> float:
        """Return the time of the last mark, in seconds since the epoch; 0 without one. Blocks."""
        last = self._files.read_batch_marks(max(0, self._mark_count - 1), self._mark_count)
        return last[0].time_ms / 1000 if last else 0.0

    def _resume(self, last: _SegmentRecord) -> None:
        self._mark_count, self._file_count = last.source.end_mark_index, last.next_file
        self.stdout_bytes, self.file_bytes = last.next_stdout_begin, last.file_bytes
        if not last.source.has_stdout_end:
            self.parser = SegiParser.make_from_checkpoint(last.next_checkpoint, self.segi_markers)
        self.parser.result_summary = ResultSummary.unpack(last.result_summary)
        self._begin_segment(last.end_cursor, last.next_stdout_begin, last.next_checkpoint, 0)

    def _replay(self, marks: list[BatchMark], end: int | None = None) -> None:
        """Parse again what was delivered with these marks, up to a place in stdout.

        Without an `end` stdout is parsed up to the last mark, or to its end if new events are
        dropped: what follows may be much, and is fed later. Raises: StdoutChanged.
        """
        self._replayed_marks = marks[:]
        for mark in marks:
            if mark.flush_offset is not None:
                while self.stdout_bytes < mark.flush_offset and self._replay_read(
                    mark.flush_offset
                ):
                    pass
                self.flush_partial_line()
            elif mark.is_from_stdout_end:
                while self._replay_read(end):
                    pass
                if self.parser.awaited_file is not None:
                    raise StdoutChanged  # the file is gone that stdout names
                self.finish()
                return
        while (self._replayed_marks or self._drops_new_events) and self._replay_read(end):
            pass
        if self._replayed_marks:
            raise StdoutChanged

    def _replay_read(self, end: int | None = None) -> bool:
        """Feed the next read of stdout, and the files in it; return whether there was any."""
        begin = self.stdout_bytes
        if self.parser.awaited_file is not None:
            return False
        size = _READ if end is None else min(_READ, end - begin)
        size = max(0, min(size, self._max_output - begin - self.file_bytes))
        chunk = self._files.read_stdout(begin, begin + size)
        self.feed(chunk)
        while self.parser.has_pending_input or self.parser.awaited_file is not None:
            if self.parser.has_pending_input:
                self.parse_pending()
                continue
            content = self._files.read_referenced_file(self._file_count)
            if content is None:
                break  # the earlier process had not read it
            self.supply_or_refuse_file(content)
        return bool(chunk)

    def parse_evicted_segment(self, segment: EventSegment) -> EventRing:
        """Return the events of an evicted segment again. Blocks. Raises: StdoutChanged."""
        source = segment.source
        assert source is not None, "an evicted segment has ended"
        stdout = self._files.read_stdout(source.stdout_begin_offset, source.stdout_end_offset)
        if zlib.crc32(stdout) != source.checksum:
            raise StdoutChanged
        log = EventLog(EventMemory(0), segment.begin_cursor, segment.begin_cursor)
        again = RecordedStdout(log, self._files, self.segi_markers, self._read_wall_clock)
        again._drops_new_events = True
        again.stdout_bytes = source.stdout_begin_offset
        again._file_count = source.earlier_file_count
        if source.checkpoint:
            again.parser = SegiParser.make_from_checkpoint(source.checkpoint, self.segi_markers)
        marks = self._files.read_batch_marks(source.first_mark_index, source.end_mark_index)
        again._replay(marks, source.stdout_end_offset)
        if log.end_cursor != segment.end_cursor or log.segments[0].ring is None:
            raise StdoutChanged
        return log.segments[0].ring

    @property
    def has_discarded_files(self) -> bool:
        """Whether `free_discarded_files` has something to do."""
        return self._files.has_disk_space_to_free(
            self.event_log.discarded_stdout_bytes, self.event_log.discarded_file_count
        )

    def free_discarded_files(self) -> None:
        """Give back some of the room of discarded events: stdout, and files named there. Blocks."""
        self._files.remove_referenced_files(self.event_log.discarded_file_count)
        self._files.free_stdout_blocks(self.event_log.discarded_stdout_bytes)

    def close_files(self) -> None:
        """Close the files; the next use opens them again. No thread may use them."""
        self._files.close()


def read_ended_evaluation_events(
    directory: Path,
    markers: Markers,
    final_event: EventBatch,
    final_time_ms: int,
    *,
    max_output: int,
    end_cursor: int,
) -> Iterator[EventRing]:
    """Yield all events of an evaluation that has ended, also acknowledged ones, by segments.

    `final_event` is the error event that stdout does not have, or no event; `end_cursor` is the
    cursor after it. The files of `directory` must be complete. Blocks. Raises: OSError;
    StdoutChanged, where stdout is not what it was.
    """
    log = EventLog(EventMemory(0))
    files = EventFiles(directory)
    try:
        recorded = RecordedStdout(log, files, markers, time.time, max_output=max_output)
        with suppress(StdoutChanged):
            recorded.restore_event_log(has_ended=True)
        for segment in log.segments:
            if segment.source is not None:
                yield recorded.parse_evicted_segment(segment)
            elif segment.ring is not None:
                yield segment.ring
        if log.end_cursor + final_event.count < end_cursor:
            raise StdoutChanged
    finally:
        files.close()
    ring = EventRing(log.end_cursor, log.end_cursor)
    ring.append_batch(final_event, final_time_ms)
    yield ring


@attrs.define
class SteadyWallClock:
    """The time of day as if nobody had set it since the evaluation began."""

    _read_boot_clock: Callable[[], float]
    _offset: float  # the time of day less that of the boot clock, in seconds

    def read(self) -> float:
        """Return the time, in seconds since the epoch."""
        return self._read_boot_clock() + self._offset

    def advance(self, time: float) -> None:
        """Let `read` return no time before this one, which an earlier process has noted."""
        self._offset += max(0.0, time - self.read())


MAX_LOADS, MAX_LOADS_PER_CALLER = 4, 2
"""Segments that are parsed again at once: of all callers, and of one.

A segment has some 64 KiB of stdout, 1 MiB at most, and the files that stdout names there. Lines of
10 to 1,000 bytes take 0.2 to 0.3 ms of processor time for 64 KiB, lines of one byte 1 ms.
"""


def make_segment_load_slots() -> FairQueue:
    """Return the places for callers that have evicted segments parsed again, in turns."""
    return FairQueue(MAX_LOADS, running_per_caller=MAX_LOADS_PER_CALLER)


@attrs.define(eq=False)
class EvaluationEvents:
    """The events of one evaluation of `caller`, and its readers.

    - `event_log`: the events. Who appends some calls `notify_readers`, who marks the end notifies
      `reader_wakeup_condition`.
    - `segment_load_slots`: those of all evaluations (`make_segment_load_slots`).
    - `unread_bytes`: bytes of events on the disk, which count for the caller in `unread_budget`.
    - `stdout`: the parser, once the evaluator has started; it parses evicted segments again.
    - `on_freeing_files()` is awaited before the files of acknowledged events are given back: no
      reader may be sent to them after a restart.
    - `has_lost_events`: whether newest events may be lost that clients have received: after a power
      cut, or with a damaged disk.
    - `has_events_to_restore`: whether clients may have received events, up to the end, that are yet
      to be made again.
    - `keeps_acknowledged_files`: whether acknowledged events keep their files, for the archive.
    - `reader_count`: the readers' streams, and their requests that wait. `read_only_client_count`:
      those of observers, which acknowledge nothing.
    - `next_page_deadline`: the time, in seconds of the clock, until which a client of pages is
      expected to ask for the next one.
    - `was_streamed_completely`: whether a stream has sent a reader all events and the end.
    """

    event_log: EventLog
    caller: str
    log_name: str
    _threads: WorkerThreads
    _segment_load_slots: FairQueue
    _unread_budget: Budget
    stdout: RecordedStdout | None = None
    unread_bytes: int = 0
    on_freeing_files: Callable[[], Awaitable[object]] = lambda: succeed(None)
    has_lost_events: bool = False
    has_events_to_restore: bool = False
    keeps_acknowledged_files: bool = False
    reader_wakeup_condition: Condition = attrs.field(factory=Condition)
    reader_count: int = 0
    read_only_client_count: int = 0
    next_page_deadline: float = float("-inf")
    was_streamed_completely: bool = False
    _damaged_segments: tuple[EventSegment, ...] = ()
    _loads: SingleFlight[EventSegment, None] = attrs.field(factory=SingleFlight)
    _file_use_count: int = 0  # calls in threads
    _files_unused: Condition = attrs.field(factory=Condition)
    _is_freeing: bool = False
    _is_discarded: bool = False

    def notify_readers(self) -> None:
        """Count new events, and wake the clients that wait for them."""
        self.update_unread_bytes()
        self.reader_wakeup_condition.notify()

    def update_unread_bytes(self, *, are_gone: bool = False) -> None:
        """Count the bytes on the disk of events that were not discarded, 0 if all `are_gone`."""
        taken, self.unread_bytes = self.unread_bytes, 0
        if self.stdout is not None and not are_gone:
            printed = self.stdout.stdout_bytes + self.stdout.file_bytes
            self.unread_bytes = printed - self.event_log.discarded_stdout_bytes
        self._unread_budget.record_usage(self.unread_bytes - taken, self.caller)

    @property
    def has_readable_end(self) -> bool:
        """Whether a client may have read the end: of all events, or at a damage."""
        return self.event_log.has_ended or bool(self._damaged_segments)

    def resolve_cursor(self, after_cursor: str | None, skip_count: int = 0) -> int:
        """Return the number `skip_count` events after a cursor of a client, None or "" without one.

        Raises: as `core.events.resolve_cursor`; ServerBusy.
        """
        may_be_ahead = self.has_lost_events or (
            self.has_events_to_restore and not self.event_log.has_ended
        )
        if may_be_ahead and after_cursor == ALL_RECEIVED_CURSOR and not self.event_log.has_ended:
            raise ServerBusy("the end of the evaluation is being restored; try again", 1)
        return resolve_cursor(
            self.event_log, after_cursor or None, skip_count, may_be_ahead=may_be_ahead
        )

    @property
    def end_cursor(self) -> int:
        """The cursor after the newest event."""
        return self.event_log.end_cursor

    @property
    def has_ended(self) -> bool:
        """Whether no event follows."""
        return self.event_log.has_ended

    def is_after_all_events(self, cursor: int) -> bool:
        """Return whether no event follows a cursor, not even one that tells of a loss."""
        return (
            self.has_ended and cursor == self.end_cursor and not self.is_after_lost_events(cursor)
        )

    def is_after_lost_events(self, cursor: int) -> bool:
        """Return whether a client at a cursor may have received events that are lost."""
        if not self.event_log.has_ended:
            return False
        # As many events as there are now, with the error, may have been others before the loss.
        return cursor >= self.event_log.end_cursor + (not self.has_lost_events)

    def read_now(
        self, after_cursor: int, max_bytes: int, *, includes_times: bool = False
    ) -> EventBatch:
        """Return events after a cursor that are in memory.

        EVENTS_LOST_ERROR stands for damaged and lost ones. The result has at most `max_bytes`, but
        at least one event if there is one, and may end before `max_bytes` although more events
        follow. Raises: DiscardedCursor, EventsEvicted.
        """
        if after_cursor < self.event_log.begin_cursor:
            raise DiscardedCursor(str(self.event_log.begin_cursor))
        if self.is_after_lost_events(after_cursor):
            return EVENTS_LOST_ERROR
        if after_cursor > self.event_log.end_cursor:
            return EMPTY_BATCH
        try:
            format_time = format_rfc3339_time if includes_times else None
            return self.event_log.read_events(after_cursor, max_bytes, format_time)
        except EventsEvicted as evicted:
            if evicted.segment in self._damaged_segments:
                return EVENTS_LOST_ERROR
            raise

    async def read(
        self, after_cursor: int, max_bytes: int, *, includes_times: bool = False
    ) -> EventBatch:
        """Return what `read_now` returns; load events that have left memory.

        Raises: DiscardedCursor, also if they were acknowledged meanwhile; ServerBusy.
        """
        while True:
            try:
                return self.read_now(after_cursor, max_bytes, includes_times=includes_times)
            except EventsEvicted as evicted:
                await self.load_segment(evicted.segment)

    def make_page(self, after_cursor: str | None, batch: EventBatch) -> EventPage:
        """Return the page of a batch that was read after a cursor."""
        if batch is EVENTS_LOST_ERROR:
            return EventPage(after_cursor, ALL_RECEIVED_CURSOR, batch)
        return make_page(self.event_log, after_cursor, batch)

    async def load_segment(self, segment: EventSegment) -> None:
        """Put an evicted segment's events back into memory, or note that it is damaged.

        All readers that wait for a segment share one load of it. Raises: ServerBusy.
        """
        load = partial(self._parse_again, segment)
        await self._loads.run_once(
            segment, lambda: self._segment_load_slots.run_in_turn(self.caller, load)
        )

    async def _parse_again(self, segment: EventSegment) -> None:
        stdout = self.stdout
        assert stdout is not None, "it has made the segment"
        try:
            ring = await self._use_files(lambda: stdout.parse_evicted_segment(segment))
        except (StdoutChanged, OSError) as error:
            if segment.end_cursor <= self.event_log.begin_cursor:
                return  # acknowledged meanwhile, with its part of stdout
            if isinstance(error, OSError) and is_transient_error(error):
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
            self.event_log.load_segment(segment, ring)

    # Files

    async def _use_files(self, call: Callable[[], T]) -> T:
        """Return `call()`, made in a thread; afterwards close files that nobody writes."""
        self._file_use_count += 1
        try:
            return await self._threads.run_in_thread(call)
        finally:
            self._file_use_count -= 1
            if not self._file_use_count:
                if self.event_log.has_ended:
                    self.close_files()
                self._files_unused.notify()

    def close_files(self) -> None:
        """Close the files of an evaluation that has ended; a later read opens them for itself."""
        if self.stdout is not None and not self._file_use_count:
            self.stdout.close_files()

    async def discard_all_events(self) -> None:
        """Discard all events; return when no thread uses the files, which may then be removed."""
        self._is_discarded = True
        self.event_log.discard()
        while self._file_use_count:
            await self._files_unused.wait()
        self.close_files()

    def acknowledge(self, before_cursor: int) -> None:
        """Discard the events before a cursor, and in a thread their files."""
        self.event_log.acknowledge(min(before_cursor, self.event_log.end_cursor))
        self.free_discarded_files()

    def free_discarded_files(self) -> None:
        """Have a thread give back the room of discarded events, unless their files are kept."""
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
        while (
            not (self.keeps_acknowledged_files or self._is_discarded) and stdout.has_discarded_files
        ):
            self.update_unread_bytes()
            await self.on_freeing_files()
            if not self._is_discarded:  # meanwhile
                await self._use_files(stdout.free_discarded_files)
        self._is_freeing = False  # after an error it stays
