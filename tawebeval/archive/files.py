r"""Archive files: the events of one evaluation as JSON Lines, compressed by zstd.

A file is a sequence of zstd frames (RFC 8878):

1. one line, `{"archive":1,"evaluation_id":...,"caller":...}`;
2. the events, in frames of about `MAX_FRAME_BYTES`; the first event of each write has its `time`;
3. one line, `{"status":...,"entry":...,"sequence_number":...}`;
4. a skippable frame with the index: for each frame of 2 the offset in the file and the number of
   its first event, then those of frame 3, then a trailer.

So `zstdcat` prints JSON Lines, and a reader finds the frame of a cursor by a few small reads. Every
function here blocks.
"""

from __future__ import annotations

import os
import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import attrs
import orjson
import zstandard

from tawebeval.archive.evaluation_files import DamagedArchiveFile as DamagedArchiveFile
from tawebeval.archive.evaluation_files import make_compressor
from tawebeval.core.events import EMPTY_BATCH, EventBatch

MAX_FRAME_BYTES = 256 * 1024
"""Bytes of lines that make a frame; it exceeds them by one write of events at most."""

ARCHIVE_FORMAT_VERSION = 1
_SKIPPABLE = 0x184D2A57  # one of the 16 magic numbers of skippable frames
_FRAME_HEAD = struct.Struct("<II")  # magic number, size
_ENTRY = struct.Struct("<QQ")  # offset, number of the first event
_TRAILER = struct.Struct("<QI8s")  # number of entries, their CRC, mark
_FAMILY = b"taweb-a"  # and a digit
_MARK = b"%b%d" % (_FAMILY, ARCHIVE_FORMAT_VERSION)
_TIME_MEMBER = b',"time":"'
# Only a time of ours ends a line: inside of a payload that is text the quotes are escaped.
_TIME = re.compile(re.escape(_TIME_MEMBER) + rb'[^"]*"}\n')


class UnsupportedArchiveFormat(DamagedArchiveFile):
    """A complete file of another version of tawebeval."""


def compress_frame(lines: bytes) -> bytes:
    """Return `lines` as one zstd frame."""
    return make_compressor().compress(lines)


def decompress_frame(frame: bytes) -> bytes:
    """Return the lines of a frame. Raises: DamagedArchiveFile."""
    try:
        return zstandard.ZstdDecompressor().decompress(frame)
    except (zstandard.ZstdError, MemoryError) as error:
        raise DamagedArchiveFile(str(error)) from None


def group_batches_into_frames(
    batches: Iterable[EventBatch],
) -> tuple[list[EventBatch], list[EventBatch]]:
    """Return the batches that fill frames, put together, and the batches that are left."""
    frames: list[EventBatch] = []
    left: list[EventBatch] = []
    size = 0
    for batch in batches:
        left.append(batch)
        size += len(batch.lines)
        if size >= MAX_FRAME_BYTES:
            frames.append(concatenate_batches(left))
            left, size = [], 0
    return frames, left


def concatenate_batches(batches: Sequence[EventBatch]) -> EventBatch:
    """Return several batches as one."""
    lines = batches[0].lines if len(batches) == 1 else b"".join(one.lines for one in batches)
    return EventBatch(sum(one.count for one in batches), lines)


def add_time_to_first_event(batch: EventBatch, event_time: str) -> EventBatch:
    """Return a batch whose first event has a member `time`; the others have the same.

    A time for each event would take ten times as long for short lines.
    """
    end = batch.lines.index(b"\n") - 1
    parts = (
        batch.lines[:end],
        _TIME_MEMBER,
        event_time.encode(),
        b'"',
        memoryview(batch.lines)[end:],
    )
    return EventBatch(batch.count, b"".join(parts))


def remove_event_times(lines: bytes) -> bytes:
    """Return lines without our times."""
    first, *others = lines.split(_TIME_MEMBER)
    parts = [first]
    for other in others:
        end = other.find(b'"')
        is_ours = other[end : end + 3] == b'"}\n'
        parts += [other[end + 1 :]] if is_ours else [_TIME_MEMBER, other]
    return b"".join(parts)


def fill_in_event_times(lines: bytes) -> bytes:
    """Return lines with a time for each event: its own, or that of the last one before it."""
    parts, position, time = [], 0, b""
    for mark in _TIME.finditer(lines):
        start = lines.rfind(b"\n", 0, mark.start()) + 1
        parts += [lines[position:start].replace(b"}\n", time), lines[start : mark.end()]]
        position, time = mark.end(), mark[0]
    return b"".join((*parts, lines[position:].replace(b"}\n", time)))


def encode_header_frame(identifier: str, caller: str) -> bytes:
    """Return the first frame of a file."""
    line = {"archive": ARCHIVE_FORMAT_VERSION, "evaluation_id": identifier, "caller": caller}
    return compress_frame(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


@attrs.define
class FrameIndex:
    """The offsets of frames in a file, and the numbers of their first events, in turns."""

    _pairs: array[int] = attrs.field(factory=lambda: array("Q"))

    def add_frame(self, offset: int, first_event_number: int) -> None:
        """Add the frame at `offset`, whose first event has the number `first_event_number`."""
        self._pairs.extend((offset, first_event_number))

    def encode_index_frame(self) -> bytes:
        """Return the skippable frame at the end of a file."""
        pairs = array("Q", self._pairs)
        if struct.pack("=H", 1) != struct.pack("<H", 1):
            pairs.byteswap()
        entries = pairs.tobytes()
        trailer = _TRAILER.pack(len(entries) // _ENTRY.size, crc32(entries), _MARK)
        size = len(entries) + len(trailer)
        return b"".join((_FRAME_HEAD.pack(_SKIPPABLE, size), entries, trailer))


@attrs.define(eq=False)
class ArchiveFile:
    """An open archive file of `event_count` events."""

    _descriptor: int
    _frame_count: int  # frames of events
    _entries: int  # offset of the entries
    event_count: int
    size: int

    @classmethod
    def open(cls, path: Path) -> ArchiveFile:
        """Open a file and check its index of frames. Raises: OSError, DamagedArchiveFile."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(descriptor).st_size
            count, checksum = _read_trailer(descriptor, size)
            entries = size - _TRAILER.size - count * _ENTRY.size
            if entries < _FRAME_HEAD.size:
                raise DamagedArchiveFile("the index is longer than the file")
            if crc32(_read(descriptor, count * _ENTRY.size, entries)) != checksum:
                raise DamagedArchiveFile("the index has another checksum")
            _, events = _ENTRY.unpack(
                _read(descriptor, _ENTRY.size, entries + (count - 1) * _ENTRY.size)
            )
            return cls(descriptor, count - 1, entries, events, size)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def read_header_line(self) -> dict[str, Any]:
        """Return the first line. Raises: OSError, DamagedArchiveFile."""
        return _parse(self._read_lines(0, self._locate(0)[0]))

    def read_end_line(self) -> dict[str, Any]:
        """Return the last line. Raises: OSError, DamagedArchiveFile."""
        return _parse(
            self._read_lines(self._locate(self._frame_count)[0], self._entries - _FRAME_HEAD.size)
        )

    def read_events(self, after_cursor: int, max_bytes: int, *, with_times: bool) -> EventBatch:
        """Return the events after `after_cursor`, which is at most `event_count`.

        At most `max_bytes` bytes, but at least one event if there is one; none after a damaged
        frame. Raises: OSError; DamagedArchiveFile, if the first event cannot be read.
        """
        if after_cursor >= self.event_count:
            return EMPTY_BATCH
        count = 0
        taken: list[bytes] = []
        frame = (
            bisect_right(range(self._frame_count), after_cursor, key=lambda i: self._locate(i)[1])
            - 1
        )
        while frame < self._frame_count:
            (offset, first), (end, following) = self._locate(frame), self._locate(frame + 1)
            try:
                lines = self._read_lines(offset, end)
            except DamagedArchiveFile:
                if taken:
                    break
                raise
            lines = fill_in_event_times(lines) if with_times else remove_event_times(lines)
            start = _find_line(lines, after_cursor + count - first)
            if len(lines) - start > max_bytes:
                stop = lines.rfind(b"\n", start, start + max_bytes) + 1
                if not stop and not taken:
                    stop = lines.index(b"\n", start) + 1
                if stop:
                    taken.append(lines[start:stop])
                    count += taken[-1].count(b"\n")
                break
            max_bytes -= len(lines) - start
            taken.append(lines[start:])
            count = following - after_cursor
            frame += 1
        return EventBatch(count, b"".join(taken))

    def _locate(self, frame: int) -> tuple[int, int]:
        """Return the offset of a frame of events and the number of its first event."""
        entry = _read(self._descriptor, _ENTRY.size, self._entries + frame * _ENTRY.size)
        offset, first = _ENTRY.unpack(entry)
        return offset, first

    def _read_lines(self, start: int, end: int) -> bytes:
        if not 0 <= start < end <= self._entries:
            raise DamagedArchiveFile("the index has a wrong offset")
        return decompress_frame(_read(self._descriptor, end - start, start))


def _read(descriptor: int, size: int, offset: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    if len(data) != size:
        raise DamagedArchiveFile("the file is too short")
    return data


def _read_trailer(descriptor: int, size: int) -> tuple[int, int]:
    if size < _TRAILER.size:
        raise DamagedArchiveFile("the file is too short")
    count, checksum, mark = _TRAILER.unpack(_read(descriptor, _TRAILER.size, size - _TRAILER.size))
    if mark != _MARK and mark.startswith(_FAMILY):
        raise UnsupportedArchiveFormat(f"the file has the format of another version ({mark!r})")
    if mark != _MARK or not 0 < count <= size // _ENTRY.size:
        raise DamagedArchiveFile("the file has no index at its end")
    return count, checksum


def _parse(line: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DamagedArchiveFile(str(error)) from None
    if not isinstance(document, dict):
        raise DamagedArchiveFile("a line is no object")
    return document


def _find_line(lines: bytes, count: int) -> int:
    """Return the offset after the first `count` lines."""
    at = 0
    for _ in range(count):
        at = lines.index(b"\n", at) + 1
    return at
