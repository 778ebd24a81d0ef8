r"""Archive files: the events of one evaluation, and its submission, compressed by zstd.

A file of events, NAME.jsonl.zst, is a sequence of zstd frames (RFC 8878):

1. one line, `{"archive":1,"evaluation_id":...,"caller":...}`;
2. the events, in frames of about `UNCOMPRESSED_FRAME_BYTES`, each with a member `time`;
3. one line, the end document of the evaluation, with its status;
4. a skippable frame with the index: for each frame of 2 its offset and the cursor of its first
   event, then those of frame 3, then a trailer.

So `zstdcat` prints JSON Lines, and a reader finds the frame of a cursor by a few small reads.

A submission, NAME.tar.zst, has the members `request`, as `core.form` packs it, and
`submission/FIELD/FILENAME`, in this order of the fields. Every function here blocks.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import attrs
import orjson
import zstandard

from tawebeval.core.events import EVENTS_LOST_ERROR, EventBatch, EventRing, StdoutChanged
from tawebeval.core.form import EvaluationRequest, SubmissionFile, unpack_request
from tawebeval.linux.filetree import add_path_to_errors, open_regular_file
from tawebeval.sandbox.workspace import Workspace

UNCOMPRESSED_FRAME_BYTES = 64 * 1024
"""Bytes of lines from which a frame ends; it exceeds them by the times, or by one event."""

_SKIPPABLE = 0x184D2A57  # one of the 16 magic numbers of skippable frames
_FRAME_HEAD = struct.Struct("<II")  # magic number, size
_ENTRY = struct.Struct("<QQ")  # offset, cursor of the first event
_TRAILER = struct.Struct("<16sI8s")  # numbers of frames and of events as an entry, CRC, mark
_MARK = b"taweb-e1"
_LEVEL = 1  # twice as fast as level 3 for short lines, and a few percent larger
# Only a time of ours ends a line: inside of a payload that is text the quotes are escaped.
_TIME = re.compile(rb',"time":"[^"]*"}\n')


class DamagedArchiveFile(Exception):
    """A file that is no complete archive file."""


class ArchiveFileTooLarge(Exception):
    """A file that would exceed `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.max_bytes = max_bytes


def make_compressor() -> zstandard.ZstdCompressor:
    """Return a compressor whose frames have a checksum."""
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)


# Writing


def write_evaluation(
    path: Path,
    header: Mapping[str, Any],
    rings: Iterable[EventRing],
    end: Mapping[str, Any],
    format_time: Callable[[float], str],
    max_bytes: int,
) -> int:
    """Write the file of an evaluation that has ended; return the number of its events.

    `rings` have consecutive events, the first one from cursor 0; if the iteration raises
    StdoutChanged, `EVENTS_LOST_ERROR` is the last event. `format_time` gets seconds since the
    epoch. Raises: OSError; ArchiveFileTooLarge.
    """
    compressor, index, count = make_compressor(), bytearray(), 0
    with add_path_to_errors(path), open(path, "wb") as file:
        file.write(compressor.compress(_encode_line(header)))
        for batch in _group_into_frames(rings, format_time):
            index += _ENTRY.pack(file.tell(), count)
            file.write(compressor.compress(batch.lines))
            count += batch.count
            if file.tell() > max_bytes:
                raise ArchiveFileTooLarge(max_bytes)
        index += _ENTRY.pack(file.tell(), count)
        file.write(compressor.compress(_encode_line(end)))
        counts = _ENTRY.pack(len(index) // _ENTRY.size - 1, count)
        index += _TRAILER.pack(counts, crc32(counts), _MARK)
        file.write(_FRAME_HEAD.pack(_SKIPPABLE, len(index)) + index)
    return count


def _encode_line(document: Mapping[str, Any]) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def _group_into_frames(
    rings: Iterable[EventRing], format_time: Callable[[float], str]
) -> Iterator[EventBatch]:
    """Yield the events of each frame, with times."""
    parts: list[bytes] = []
    size = count = 0
    last_time = b"}\n"
    try:
        for ring in rings:
            cursor = ring.begin_cursor
            while cursor < ring.end_cursor:
                batch = ring.read_events(cursor, UNCOMPRESSED_FRAME_BYTES - size, format_time)
                parts.append(batch.lines)
                last_time = batch.lines[batch.lines.rindex(b',"time":"') :]
                cursor += batch.count
                size += len(batch.lines)
                count += batch.count
                if size >= UNCOMPRESSED_FRAME_BYTES:
                    yield EventBatch(count, b"".join(parts))
                    parts, size, count = [], 0, 0
    except StdoutChanged:
        parts.append(EVENTS_LOST_ERROR.lines.replace(b"}\n", last_time))
        count += EVENTS_LOST_ERROR.count
    if parts:
        yield EventBatch(count, b"".join(parts))


# Reading


@attrs.frozen
class _EvaluationFile:
    """An open archive file of `frame_count` frames of events."""

    descriptor: int
    frame_count: int
    event_count: int
    entries: int  # offset of the entries

    def locate(self, frame: int) -> tuple[int, int]:
        """Return the offset of a frame and the cursor of its first event."""
        at = self.entries + frame * _ENTRY.size
        offset, cursor = _ENTRY.unpack(_read(self.descriptor, _ENTRY.size, at))
        return offset, cursor

    def read_lines(self, start: int, end: int) -> bytes:
        """Return the lines of the frame from `start` to `end`."""
        if not 0 <= start < end <= self.entries:
            raise DamagedArchiveFile("the index has a wrong offset")
        try:
            return zstandard.ZstdDecompressor().decompress(
                _read(self.descriptor, end - start, start)
            )
        except (zstandard.ZstdError, MemoryError) as error:
            raise DamagedArchiveFile(str(error)) from None

    def read_frame_from(self, frame: int, cursor: int, *, includes_times: bool) -> bytes:
        """Return the lines of a frame from a cursor on, which lies in the frame."""
        (start, first), (end, following) = self.locate(frame), self.locate(frame + 1)
        lines = self.read_lines(start, end)
        if not first <= cursor < following or lines.count(b"\n") != following - first:
            raise DamagedArchiveFile("the index has a wrong cursor")
        if not includes_times:
            lines = _TIME.sub(b"}\n", lines)
        return lines.split(b"\n", cursor - first)[-1]


@contextmanager
def _open(path: Path) -> Iterator[_EvaluationFile]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        trailer = max(0, os.fstat(descriptor).st_size - _TRAILER.size)
        counts, checksum, mark = _TRAILER.unpack(_read(descriptor, _TRAILER.size, trailer))
        if mark != _MARK or crc32(counts) != checksum:
            raise DamagedArchiveFile("the file has no index at its end")
        frames, events = _ENTRY.unpack(counts)
        yield _EvaluationFile(descriptor, frames, events, trailer - (frames + 1) * _ENTRY.size)
    finally:
        os.close(descriptor)


def _read(descriptor: int, size: int, offset: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    if len(data) != size:
        raise DamagedArchiveFile("the file is too short")
    return data


def read_events(
    path: Path, after_cursor: int, max_bytes: int, *, includes_times: bool
) -> EventBatch:
    """Return the events of a file after a cursor, at least one, none after a damaged frame.

    More than one have at most `max_bytes` bytes, with times if these are wanted. Raises: OSError;
    DamagedArchiveFile, if the first event cannot be read.
    """
    parts: list[bytes] = []
    cursor = after_cursor
    with _open(path) as file:
        frame = bisect_right(range(file.frame_count), cursor, key=lambda i: file.locate(i)[1]) - 1
        while cursor < file.event_count:
            try:
                lines = file.read_frame_from(frame, cursor, includes_times=includes_times)
            except DamagedArchiveFile:
                if parts:
                    break
                raise
            end = len(lines)
            if end > max_bytes:
                end = lines.rfind(b"\n", 0, max_bytes) + 1
                if not parts:
                    end = end or lines.index(b"\n") + 1
            parts.append(lines[:end])
            cursor += parts[-1].count(b"\n")
            if end < len(lines) or end >= max_bytes:
                break
            max_bytes -= end
            frame += 1
    if not parts:
        raise DamagedArchiveFile("the file has fewer events")
    return EventBatch(cursor - after_cursor, b"".join(parts))


_REQUEST = "request"
_MAX_REQUEST = 64 * 1024 * 1024  # bytes; the limits of the form are far lower


@attrs.frozen
class WorkspaceSubmission:
    """A submission in the directories of `workspace`; `size_bytes` is the size of its files."""

    request: EvaluationRequest
    workspace: Workspace
    size_bytes: int


def pack_submission(workspace: Workspace, max_bytes: int, target: Path) -> bool:
    """Write the kept submission of a workspace to `target`, unless it has over `max_bytes` bytes.

    Return whether it was written. Raises: OSError, which may be FileNotFoundError for files that
    were removed meanwhile; `target` is then incomplete. Raises: DamagedArchiveFile.
    """
    with open_regular_file(workspace.request_file) as file:
        packed = file.read(max_bytes + 1)
    if len(packed) > max_bytes:
        return False
    paths = sorted(workspace.locate_submitted_file(one) for one in _unpack(packed).submission)
    if len(packed) + sum(path.lstat().st_size for path in paths) > max_bytes:
        return False
    with (
        open(target, "wb") as file,
        make_compressor().stream_writer(file, closefd=False) as writer,
        tarfile.open(fileobj=writer, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in (workspace.request_file, *paths):
            _add_file(archive, path, str(path.relative_to(workspace.root)))
    return True


def _unpack(packed: bytes) -> EvaluationRequest:
    try:
        return unpack_request(packed)
    except ValueError as error:  # of msgspec
        raise DamagedArchiveFile(f"the request: {error}") from None


def _add_file(archive: tarfile.TarFile, path: Path, name: str) -> None:
    with open_regular_file(path) as file:
        status = os.fstat(file.fileno())
        member = tarfile.TarInfo(name)
        member.size, member.mtime, member.mode = status.st_size, int(status.st_mtime), 0o600
        archive.addfile(member, file)


def _read_files(
    archive: tarfile.TarFile, files: Sequence[SubmissionFile]
) -> Iterator[tuple[SubmissionFile, IO[bytes]]]:
    missing = {f"submission/{one.field}/{one.filename}": one for one in files}
    for member in archive:
        wanted, content = missing.pop(member.name, None), archive.extractfile(member)
        if wanted is not None and content is not None:
            yield wanted, content
    if missing:
        raise DamagedArchiveFile(f"{len(missing)} files are missing")


def extract_submission(source: Path, directory: Path) -> WorkspaceSubmission:
    """Write the files of an archived submission below `directory`, which is created.

    Raises: OSError, DamagedArchiveFile.
    """
    workspace = Workspace(directory)
    directory.mkdir(mode=0o700)
    size = 0
    try:
        with (
            open(source, "rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file) as reader,
            tarfile.open(fileobj=reader, mode="r|") as archive,
        ):
            request = _read_request(archive)
            for submitted, content in _read_files(archive, request.submission):
                path = workspace.locate_submitted_file(submitted)
                path.parent.mkdir(mode=0o755, parents=True)
                with open(path, "xb") as target:
                    shutil.copyfileobj(content, target)
                    size += target.tell()
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        raise DamagedArchiveFile(str(error)) from None
    return WorkspaceSubmission(request, workspace, size)


def _read_request(archive: tarfile.TarFile) -> EvaluationRequest:
    member = archive.next()
    content = member and archive.extractfile(member)
    if member is None or not content or member.name != _REQUEST or member.size > _MAX_REQUEST:
        raise DamagedArchiveFile("the request is missing")
    return _unpack(content.read())
