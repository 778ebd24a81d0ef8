"""Recordings: the events of evaluations that have not ended, in the directory `spool`.

NAME.frames              the file that becomes the archive file: its header and full frames
NAME.FIRST.SIZE.lines    the lines after these; FIRST is the number of their first event, SIZE the
                         size of NAME.frames without what an interrupted write has left
NAME.new                 the next file of lines, while it is written

When the lines fill a frame, the frame is appended first, then a new file of lines takes the place
of the old one. At each moment the newest file of lines says what is complete. So nothing that was
written is lost or doubled if the process is killed. Every function here blocks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import attrs
import orjson
import zstandard

from tawebeval.archive.files import (
    MAX_FRAME_BYTES,
    DamagedArchiveFile,
    FrameIndex,
    compress_frame,
    concatenate_batches,
    group_batches_into_frames,
)
from tawebeval.core.events import EventBatch
from tawebeval.linux.filetree import add_path_to_errors, rename_durably

_FILE = re.compile(r"([0-9a-f]{32})\.(frames|new|([0-9]+)\.([0-9]+)\.lines)")
_CHUNK = 1024 * 1024  # bytes of a file that are read at once


@attrs.define(eq=False)
class SpooledRecording:
    """The events of one evaluation in the directory `spool`; `event_count` events are written.

    `identifier` and `caller` are empty until this process writes to the recording.
    An OSError or DamagedArchiveFile of a method leaves the recording useless: discard it.
    """

    _spool: Path
    file_stem: str
    event_count: int = 0
    _first: int = 0  # the number of the first event of the file of lines
    _frames_size: int = 0
    _lines_size: int | None = None  # None without a file of lines
    _index: FrameIndex | None = attrs.field(factory=FrameIndex)  # None until it is read again
    identifier: str = ""
    caller: str = ""

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return self._frames_size + (self._lines_size or 0)

    @property
    def _frames_path(self) -> Path:
        return self._spool / f"{self.file_stem}.frames"

    @property
    def _lines_path(self) -> Path:
        return self._spool / f"{self.file_stem}.{self._first}.{self._frames_size}.lines"

    def owns_spool_file(self, name: str) -> bool:
        """Return whether a file of the spool with this name is part of the recording."""
        return name in (self._lines_path.name, self._frames_size and self._frames_path.name)

    def write_events(self, batches: Sequence[EventBatch], header: bytes) -> None:
        """Append events; `header` is the first frame of the file.

        Raises: OSError, DamagedArchiveFile.
        """
        size = sum(len(batch.lines) for batch in batches)
        if (self._lines_size or 0) + size < MAX_FRAME_BYTES:
            _append(self._lines_path, b"".join(batch.lines for batch in batches))
            self._lines_size = (self._lines_size or 0) + size
        else:
            frames, left = group_batches_into_frames([*self._read_lines(), *batches])
            former = self._lines_path
            self._append_frames(frames, header)
            new = self._spool / f"{self.file_stem}.new"
            rest = b"".join(batch.lines for batch in left)
            _append(new, rest)
            new.rename(self._lines_path)
            former.unlink(missing_ok=True)
            self._lines_size = len(rest)
        self.event_count += sum(batch.count for batch in batches)

    def finish(
        self, batches: Sequence[EventBatch], header: bytes, end: dict[str, Any], target: Path
    ) -> None:
        """Append the last events and the line `end`, and move the file to `target`.

        Raises: OSError, DamagedArchiveFile.
        """
        former = self._lines_path
        frames, left = group_batches_into_frames([*self._read_lines(), *batches])
        self._append_frames([*frames, concatenate_batches(left)] if left else frames, header)
        self.event_count = self._first
        index = self._read_index()
        index.add_frame(self._frames_size, self.event_count)
        last = compress_frame(orjson.dumps(end, option=orjson.OPT_APPEND_NEWLINE))
        _append(self._frames_path, last + index.encode_index_frame())
        rename_durably(self._frames_path, target)
        former.unlink(missing_ok=True)

    def _read_lines(self) -> Sequence[EventBatch]:
        """Return the content of the file of lines as a batch; none if it is empty."""
        if not self._lines_size:
            return []
        lines = self._lines_path.read_bytes()
        if len(lines) != self._lines_size:
            raise DamagedArchiveFile("the recording was changed by another program")
        return [EventBatch(self.event_count - self._first, lines)]

    def _append_frames(self, frames: Sequence[EventBatch], header: bytes) -> None:
        """Append a frame for each of `frames`, and the header if there is none."""
        index, content = self._read_index(), []
        if not self._frames_size:
            content.append(header)
        offset, first = self._frames_size or len(header), self._first
        for frame in frames:
            index.add_frame(offset, first)
            content.append(compress_frame(frame.lines))
            offset += len(content[-1])
            first += frame.count
        _append(self._frames_path, b"".join(content))
        self._frames_size, self._first = offset, first

    def _read_index(self) -> FrameIndex:
        if self._index is None:
            self._index, first = FrameIndex(), 0
            for offset, count in _walk_frames(self._frames_path) if self._frames_size else ():
                if offset:  # not the header
                    self._index.add_frame(offset, first)
                    first += count
            if first != self._first:
                raise DamagedArchiveFile("the recording has another number of events")
        return self._index


def recover_recordings(spool: Path) -> dict[str, SpooledRecording]:
    """Return the recordings of an earlier process by name; remove incomplete files.

    Raises: OSError.
    """
    found: dict[str, tuple[int, int]] = {}
    for entry in os.scandir(spool):
        match = _FILE.fullmatch(entry.name)
        if match is not None and match[3]:
            found[match[1]] = max(found.get(match[1], (0, 0)), (int(match[3]), int(match[4])))
    recordings = {}
    for name, (first, size) in found.items():
        recording = _recover(spool, name, first, size)
        if recording is not None:
            recordings[name] = recording
    for entry in os.scandir(spool):
        match = _FILE.fullmatch(entry.name)
        if match is None:
            continue
        known = recordings.get(match[1])
        if known is None or not known.owns_spool_file(entry.name):
            os.unlink(entry.path)
    return recordings


def _recover(spool: Path, name: str, first: int, size: int) -> SpooledRecording | None:
    """Return a recording by what its newest file of lines says; None if frames are missing."""
    lines, frames = spool / f"{name}.{first}.{size}.lines", spool / f"{name}.frames"
    if size:
        if not frames.exists() or frames.stat().st_size < size:
            return None
        os.truncate(frames, size)
    content = lines.read_bytes()
    whole = content.rfind(b"\n") + 1
    os.truncate(lines, whole)
    count = first + content.count(b"\n")
    return SpooledRecording(spool, name, count, first, size, whole, None)


def remove_recording(spool: Path, file_stem: str) -> None:
    """Remove the files of a recording. Raises: OSError."""
    for path in spool.glob(f"{file_stem}.*"):
        path.unlink(missing_ok=True)


def _append(path: Path, content: bytes) -> None:
    """Append to a file. Raises: OSError, with the path."""
    # Unbuffered: bytes that the disk has refused must not be written again by close().
    with add_path_to_errors(path), open(path, "ab", buffering=0) as file:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]


def _walk_frames(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the offset and the number of lines of each frame.

    Raises: OSError, DamagedArchiveFile.
    """
    with open(path, "rb") as file:
        offset, rest = 0, b""
        while rest or (rest := file.read(_CHUNK)):
            count, rest, size = _measure_frame(file, rest)
            yield offset, count
            offset += size


def _measure_frame(file: IO[bytes], chunk: bytes) -> tuple[int, bytes, int]:
    """Return the lines of a frame that begins with `chunk`, what follows it, and its size."""
    decoder, count, size = zstandard.ZstdDecompressor().decompressobj(), 0, 0
    try:
        while chunk:
            count += decoder.decompress(chunk).count(b"\n")
            size += len(chunk)
            if decoder.eof:
                return count, decoder.unused_data, size - len(decoder.unused_data)
            chunk = file.read(_CHUNK)
    except zstandard.ZstdError as error:
        raise DamagedArchiveFile(str(error)) from None
    raise DamagedArchiveFile("a frame is incomplete")
