"""Journal of one evaluation: a file in memory that a later process of the daemon reads.

The journal has two kinds of frames, in the order of their writing:

- *snapshots*, each with the whole small state of the evaluation; the last one counts;
- *events*, each with the JSON Lines of a batch, its time, and the checkpoint at which parsing goes
  on after the batch.

A frame is its length, a CRC-32 and its content. The first page has a header: the version, and two
slots that are written in turn, each with its number, the offsets of the live frames, the cursor up
to which clients have acknowledged events, and a CRC-32. A frame counts from the moment in which a
slot includes it. So a daemon that is killed in the middle of a write leaves nothing half written,
whatever is found behind the end is ignored, and a byte that was damaged in between is noticed.

Frames whose events are all acknowledged are discarded, in steps of `_STEP` bytes; a snapshot is
written again before that. The last frame with events stays, for its checkpoint. If few frames are
left they move to the beginning of the file, and so pages are written again: the kernel takes
several times as long to provide new ones. Otherwise pages are given back. So a journal takes the
bytes of the ring, two times `_FRONT`, some steps more, what the archive has not written yet, and
old snapshots, of which `copy_live_events` keeps none.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

import attrs

from tawebeval.core.events import EventBatch
from tawebeval.linux.memory_file import PAGE_BYTES, punch_hole

FORMAT_VERSION = 1
"""Version of journals that are written. The release before this one reads it, too."""

READABLE_VERSIONS = (1,)
"""Versions that are read: those that the release before and the one after this may write."""

_MAGIC = b"tawebeval journal"
_HEADER = struct.Struct(f"<{len(_MAGIC)}sH")
# Number, first and last offset, cursor there, acknowledged one, CRC-32.
_SLOT = struct.Struct("<QQQQQI")
_SLOTS = (64, 128)  # their offsets
_FRAME = struct.Struct("<QIB")  # size of the content, CRC-32, kind
_SNAPSHOT, _EVENTS = 1, 2
# Cursor before the events, their number, bytes of stdout that are parsed, bytes of output that are
# counted, time in ms, and the size of the parser's state.
_BATCH = struct.Struct("<QIQQqI")
_STEP = 64 * 1024
_FRONT = 2 * _STEP  # bytes of frames that are discarded before live ones are moved over them
_MARK = PAGE_BYTES  # bytes between two offsets that are remembered, at least


class JournalError(Exception):
    """A journal that cannot be read; `str()` is the reason, for the operator."""


class UnknownJournalVersion(JournalError):
    """A journal of a version that this release does not read."""


@attrs.frozen
class ParserCheckpoint:
    """Where parsing goes on: in front of the byte `stdout_offset` of stdout.

    `parser_state` is that of `SegiParser.make_checkpoint`, and `output_bytes` the output that has
    counted against `limits.output` until there.
    """

    stdout_offset: int = 0
    output_bytes: int = 0
    parser_state: bytes = b""


@attrs.frozen
class JournaledBatch:
    """Events after the cursor `begin_cursor`, stored at `time_ms`, milliseconds since the epoch."""

    begin_cursor: int
    batch: EventBatch
    time_ms: int
    checkpoint: ParserCheckpoint


@attrs.frozen
class JournalContent:
    """What a journal says: the last snapshot, the live events and the cursor before them.

    `acknowledged_cursor` is the cursor up to which clients have acknowledged events.
    """

    snapshot: bytes
    begin_cursor: int
    batches: list[JournaledBatch]
    acknowledged_cursor: int = 0


class EvaluationJournal:
    """Journal in the file `descriptor`, which it owns.

    All methods take microseconds for each 64 KiB: the file is in memory. They raise OSError if the
    kernel has no memory for it; the journal is of no use after that.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._begin = self._end = PAGE_BYTES
        self._cursor = 0
        self._acknowledged = 0
        self._snapshot_at = 0
        self._snapshot_size = 0
        self.superseded_bytes = 0  # of snapshots that do not count any more
        self._slot = 0  # number of the last one
        # Ends of frames with events: the cursor after it, and its offset.
        self._marks: deque[tuple[int, int]] = deque()

    @classmethod
    def create(cls) -> EvaluationJournal:
        """Make an empty journal. Raises: OSError."""
        journal = cls(os.memfd_create("journal", os.MFD_CLOEXEC))
        with _close_on_error(journal):
            _write(journal.descriptor, [_HEADER.pack(_MAGIC, FORMAT_VERSION)], 0)
        return journal

    @classmethod
    def load(cls, descriptor: int) -> tuple[EvaluationJournal, JournalContent]:
        """Read a journal, which is then written on. Blocks. Raises: JournalError.

        The descriptor belongs to the journal only if no error is raised.
        """
        journal = cls(descriptor)
        return journal, journal._load()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)

    def write_snapshot(self, snapshot: bytes) -> None:
        """Write the state of the evaluation."""
        self.superseded_bytes += self._snapshot_size
        self._snapshot_at, self._snapshot_size = self._end, len(snapshot)
        self._write_frame(_SNAPSHOT, [snapshot])

    def copy_live_events(self, snapshot: bytes) -> EvaluationJournal:
        """Return a new journal with the live events and this snapshot alone. Raises: OSError."""
        _, content = EvaluationJournal.load(self.descriptor)
        journal = EvaluationJournal.create()
        with _close_on_error(journal):
            journal._cursor, journal._acknowledged = content.begin_cursor, self._acknowledged
            for batch in content.batches:
                journal.write_events(batch)
            journal.write_snapshot(snapshot)
        return journal

    def write_events(self, batch: JournaledBatch) -> None:
        """Write events before a client can see them."""
        checkpoint = batch.checkpoint
        head = _BATCH.pack(
            batch.begin_cursor,
            batch.batch.count,
            checkpoint.stdout_offset,
            checkpoint.output_bytes,
            batch.time_ms,
            len(checkpoint.parser_state),
        )
        self._write_frame(_EVENTS, [head, checkpoint.parser_state, batch.batch.lines])
        self._mark(batch.begin_cursor + batch.batch.count)

    def discard_acknowledged_events(
        self,
        acknowledged_cursor: int,
        make_snapshot: Callable[[], bytes],
        needed_cursor: int | None = None,
    ) -> None:
        """Note that the events before the cursor `acknowledged_cursor` are acknowledged.

        Give back their frames, if it is worth it, but none after the cursor `needed_cursor`.
        """
        is_new = acknowledged_cursor > self._acknowledged
        self._acknowledged = max(acknowledged_cursor, self._acknowledged)
        last = (
            acknowledged_cursor
            if needed_cursor is None
            else min(acknowledged_cursor, needed_cursor)
        )
        found = None
        for cursor, offset in islice(self._marks, max(0, len(self._marks) - 1)):
            if cursor > last:
                break
            found = cursor, offset
        if found is None or found[1] - self._begin < _STEP:
            if is_new:
                self._write_slot()
            return
        if self._snapshot_at < found[1]:
            self.write_snapshot(make_snapshot())
        while self._marks and self._marks[0][1] <= found[1]:
            self._marks.popleft()
        begin = self._begin
        self._cursor, self._begin = found
        self.superseded_bytes = 0  # about: those that are left lie behind few events
        if self._begin < PAGE_BYTES + _FRONT:
            self._write_slot()
        elif self._end - self._begin <= _FRONT:
            self._move_to_front()
        else:
            self._write_slot()
            punch_hole(self.descriptor, begin - begin % PAGE_BYTES, self._begin)

    def _move_to_front(self) -> None:
        """Copy the live frames over discarded ones, and make the copies count."""
        end, distance = self._end, self._begin - PAGE_BYTES
        for at in range(self._begin, end, _STEP):
            part = os.pread(self.descriptor, min(_STEP, end - at), at)
            _write(self.descriptor, [part], at - distance)
        self._begin -= distance
        self._end -= distance
        self._snapshot_at -= distance
        self._marks = deque((cursor, offset - distance) for cursor, offset in self._marks)
        self._write_slot()
        punch_hole(self.descriptor, PAGE_BYTES + 2 * _FRONT, end)

    def _mark(self, cursor: int) -> None:
        """Remember the end of the last frame, in place of one just before it."""
        before = self._marks[-2][1] if len(self._marks) > 1 else self._begin
        if self._marks and self._marks[-1][1] - before < _MARK:
            self._marks.pop()
        self._marks.append((cursor, self._end))

    def _write_frame(self, kind: int, parts: list[bytes]) -> None:
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        size = sum(map(len, parts))
        _write(self.descriptor, [_FRAME.pack(size, crc, kind), *parts], self._end)
        self._end += _FRAME.size + size
        self._write_slot()

    def _write_slot(self) -> None:
        self._slot += 1
        fields = self._slot, self._begin, self._end, self._cursor, self._acknowledged
        crc = zlib.crc32(_SLOT.pack(*fields, 0))
        _write(self.descriptor, [_SLOT.pack(*fields, crc)], _SLOTS[self._slot % 2])

    def _load(self) -> JournalContent:
        first = os.pread(self.descriptor, PAGE_BYTES, 0)
        if len(first) < _HEADER.size or not first.startswith(_MAGIC):
            raise JournalError("the file is not a journal")
        _, version = _HEADER.unpack_from(first)
        if version not in READABLE_VERSIONS:
            known = ", ".join(map(str, READABLE_VERSIONS))
            raise UnknownJournalVersion(f"journal version {version}; this daemon reads {known}")
        if version < FORMAT_VERSION:  # from now on frames of this version follow
            _write(self.descriptor, [_HEADER.pack(_MAGIC, FORMAT_VERSION)], 0)
        self._read_slots(first)
        snapshot, batches = None, list[JournaledBatch]()
        at = self._begin
        while at < self._end:
            kind, content = self._read_frame(at)
            offset, at = at, at + _FRAME.size + len(content)
            if kind == _SNAPSHOT:
                self.superseded_bytes += len(snapshot or b"")
                snapshot, self._snapshot_at = content, offset
                self._snapshot_size = len(content)
            else:
                batches.append(_unpack_batch(content))
                self._marks.append((batches[-1].begin_cursor + batches[-1].batch.count, at))
        if snapshot is None:
            raise JournalError("the journal has no snapshot")
        return JournalContent(snapshot, self._cursor, batches, self._acknowledged)

    def _read_slots(self, first: bytes) -> None:
        """Use the slot that was written last."""
        found = []
        for offset in _SLOTS:
            if len(first) >= offset + _SLOT.size:
                *fields, crc = _SLOT.unpack_from(first, offset)
                if crc == zlib.crc32(_SLOT.pack(*fields, 0)):
                    found.append(fields)
        if not found:
            raise JournalError("the header is damaged")
        self._slot, self._begin, self._end, self._cursor, self._acknowledged = max(found)

    def _read_frame(self, at: int) -> tuple[int, bytes]:
        head = os.pread(self.descriptor, _FRAME.size, at)
        if len(head) == _FRAME.size:
            size, crc, kind = _FRAME.unpack(head)
            if kind in (_SNAPSHOT, _EVENTS) and at + _FRAME.size + size <= self._end:
                content = os.pread(self.descriptor, size, at + _FRAME.size)
                if zlib.crc32(content) == crc and len(content) == size:
                    return kind, content
        raise JournalError(f"the frame at byte {at} is damaged")


@contextmanager
def _close_on_error(journal: EvaluationJournal) -> Iterator[None]:
    try:
        yield
    except OSError:
        journal.close()
        raise


def _unpack_batch(content: bytes) -> JournaledBatch:
    cursor, count, offset, counted, time_ms, state_size = _BATCH.unpack_from(content)
    state_end = _BATCH.size + state_size
    checkpoint = ParserCheckpoint(offset, counted, content[_BATCH.size : state_end])
    return JournaledBatch(cursor, EventBatch(count, content[state_end:]), time_ms, checkpoint)


def _write(descriptor: int, parts: list[bytes], offset: int) -> None:
    """Write all bytes at an offset. Raises: OSError."""
    size = sum(map(len, parts))
    if os.pwritev(descriptor, parts, offset) != size:
        raise OSError(None, "a journal was not written whole")
