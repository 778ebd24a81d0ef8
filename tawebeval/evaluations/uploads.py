"""Writing the files of a form to the disk: gathered in memory, written by threads.

A small form is written by one call of a thread, when the form is complete. Of a large form, one
call writes a batch while the next batch is gathered; when that is full, too, the connection is not
read until the call has returned. So a slow disk slows down the client that uploads, and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import attrs
from twisted.logger import Logger

from tawebeval.core.form import EvaluationRequest
from tawebeval.core.shares import Share
from tawebeval.deferreds import Condition, WorkerThreads, run_in_background
from tawebeval.linux.filetree import add_path_to_errors

WRITE_BATCH_BYTES = 512 * 1024
"""Bytes of a form that are gathered before a thread writes them; fewer at its end."""

_PER_FILE = 1024  # bytes of memory that a file takes besides its content
_MEMORY = 32 * 2**20  # bytes of all forms that may wait for the disk

log = Logger()


@attrs.define(eq=False)
class SharedUpload:
    """Files of a submission, counted once for the evaluation and for reruns, which link them.

    `reference_count` is the number of evaluations that need the files. `upload_number` is unique
    among the uploads. The files count for the `caller`.
    """

    _share: Share
    size: int
    upload_number: int
    caller: str
    reference_count: int = 1

    def add_reference(self) -> None:
        """Count one reference more."""
        self.reference_count += 1

    def remove_reference(self) -> None:
        """Count one reference less; the last one gives back the bytes."""
        self.reference_count -= 1
        if not self.reference_count:
            self._share.give_back(self.size, self.caller)


@attrs.frozen
class ReceivedForm:
    """A form that has arrived, with its files below `directory`.

    `idempotency_key` is the `Idempotency-Key`, None without one; `form_digest` identifies the
    form's content. `upload_bytes` is the number of bytes that the form takes of the space for
    uploads; `reused_upload` is in place of it the share of the submission whose files it links,
    counted as a user.
    """

    request: EvaluationRequest
    directory: Path
    idempotency_key: str | None = None
    form_digest: bytes = b""
    upload_bytes: int = 0
    reused_upload: SharedUpload | None = None


class UploadRequest(Protocol):
    """The request that a form arrives in."""

    def pause_body(self) -> None:
        """Read no more of the body."""

    def resume_body(self) -> None:
        """Read the body again; no effect if it is not paused."""

    def refuse_request(self, error: Exception) -> None:
        """Answer the request with an error, which may be an OSError."""


@attrs.define
class UnwrittenUploads:
    """Counter of the bytes of all forms that are gathered or being written."""

    size: int = 0

    @property
    def is_memory_full(self) -> bool:
        """Whether forms must wait for the disk before they receive more."""
        return self.size >= _MEMORY


@attrs.define
class _Piece:
    """A part of a file; `begins` is whether it is the first part.

    `target` is an existing file of which the whole file is to be a hard link.
    """

    path: Path
    begins: bool
    target: Path | None = None
    content: bytearray = attrs.field(factory=bytearray)


@attrs.define(eq=False)
class UploadWriter:
    """Writer of the files of one form below `directory`, which the first write creates.

    `has_begun_writing` is whether `directory` may exist.
    """

    directory: Path
    _source: UploadRequest
    _unwritten: UnwrittenUploads
    _threads: WorkerThreads
    has_begun_writing: bool = False
    _gathered: list[_Piece] = attrs.field(factory=list)
    _size: int = 0  # bytes of memory of the gathered pieces
    _file: Path = Path()  # the file that is arriving
    _complete: bool = False
    _writing: bool = False
    _error: Exception | None = None
    _batch_written: Condition = attrs.field(factory=Condition)
    _on_idle: Callable[[], object] | None = None

    def begin_file(self, path: Path) -> None:
        """Begin a file at a path relative to the directory."""
        self._file = path
        self._gather(_Piece(path, begins=True), _PER_FILE)

    def link_file(self, path: Path, target: Path) -> None:
        """Make the file at `path` a hard link to `target`."""
        self._gather(_Piece(path, begins=True, target=target), _PER_FILE)

    def add_content(self, content: bytes | bytearray) -> None:
        """Add content to the file that was begun last."""
        if not self._gathered:
            self._gather(_Piece(self._file, begins=False), _PER_FILE)
        self._gathered[-1].content += content
        self._count(len(content))
        if self._writing:
            if self._is_due:
                self._source.pause_body()
        else:
            self._write_if_due()

    def _gather(self, piece: _Piece, size: int) -> None:
        self._gathered.append(piece)
        self._count(size)

    def _count(self, size: int) -> None:
        self._size += size
        self._unwritten.size += size

    async def finish(self) -> None:
        """Return when all files are written. May be cancelled. Raises: OSError."""
        self._complete = True
        if not self._writing:
            self._write_if_due()
        while self._writing:
            await self._batch_written.wait()
        if self._error is not None:
            raise self._error

    def stop_writing(self, on_idle: Callable[[], object]) -> None:
        """Write nothing more; call `on_idle()` when no thread writes any more."""
        self._take_gathered()
        if self._writing:
            self._on_idle = on_idle
        else:
            on_idle()

    def _take_gathered(self) -> list[_Piece]:
        gathered, self._gathered = self._gathered, []
        self._count(-self._size)
        return gathered

    @property
    def _is_due(self) -> bool:
        """Whether the gathered pieces are to be written once no thread writes."""
        if self._error is not None or not self._gathered:
            return False
        return self._complete or self._size >= WRITE_BATCH_BYTES or self._unwritten.is_memory_full

    def _write_if_due(self) -> None:
        if self._is_due:
            self._writing = self.has_begun_writing = True
            run_in_background(self._write(), log, "defect: an upload could not be written")

    async def _write(self) -> None:
        try:
            while self._is_due:
                size = self._size
                pieces = self._take_gathered()
                self._unwritten.size += size
                try:
                    await self._threads.run_in_thread(_write, self.directory, pieces)
                finally:
                    self._unwritten.size -= size
                self._source.resume_body()
        except Exception as error:  # noqa: BLE001  (the client is told of any error)
            self._error = error
        self._writing = False
        self._batch_written.notify()
        if self._on_idle is not None:
            self._on_idle()
        elif self._error is not None and not self._complete:
            self._source.refuse_request(self._error)


def _write(directory: Path, pieces: list[_Piece]) -> None:
    """Write pieces of files in order. Blocks. Raises: OSError."""
    # Not its parents: those are made with a mode that keeps other users out.
    directory.mkdir(mode=0o755, exist_ok=True)
    for piece in pieces:
        path = directory / piece.path
        if piece.begins:
            path.parent.mkdir(mode=0o755, parents=True)
        if piece.target is not None:
            path.hardlink_to(piece.target)
            continue
        # Unbuffered: bytes that the disk has refused must not be written again by close().
        with (
            add_path_to_errors(path),
            open(path, "xb" if piece.begins else "ab", buffering=0) as file,
        ):
            rest = memoryview(piece.content)
            while rest:
                rest = rest[file.write(rest) :]
