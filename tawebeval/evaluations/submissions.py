"""Submitted files: written while a form arrives, counted, kept for a rerun, shown by the API.

A small form is written by one call of a thread, when the form is complete. Of a large form, one
call writes a batch while the next batch is gathered; when that is full, too, the connection is not
read until the call has returned. So a slow disk slows down the client that uploads, and no other.
"""

from __future__ import annotations

import errno
import os
import re
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import attrs
from twisted.logger import Logger

from tawebeval.archive.files import KeptSubmission, extract_submission
from tawebeval.core.form import EvaluationRequest, unpack_request
from tawebeval.core.shares import Share, SharedResource
from tawebeval.deferreds import Condition, WorkerThreads, run_in_background
from tawebeval.errors import SubmissionDiscarded, format_size
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.linux.filetree import add_path_to_errors, open_regular_file, remove_tree

WRITE_BATCH_BYTES = 512 * 1024
"""Bytes of a form that are gathered before a thread writes them; fewer at its end."""

_PER_FILE = 1024  # bytes of memory that a file takes besides its content
_MEMORY = 32 * 2**20  # bytes of all forms that may wait for the disk

log = Logger()


@attrs.frozen
class ReceivedForm:
    """A form that has arrived, with its files below `directory`.

    `idempotency_key` is the `Idempotency-Key`, None without one; `form_digest` identifies the
    form's content. `upload_bytes` is the number of bytes that the form takes of the space for
    uploads; those of files that a rerun links count once more.
    """

    request: EvaluationRequest
    directory: Path
    idempotency_key: str | None = None
    form_digest: bytes = b""
    upload_bytes: int = 0


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


_CALLERS = 4  # that have a part of limits.uploads at the same time, at least


class SubmissionStore:
    """The submitted files of all evaluations, whose directories lie below `root`.

    `share` counts the bytes of all files, also of forms that arrive. Only received bytes count: a
    client that announces much and sends little keeps no other client out. If an upload needs more
    room, the store discards files that are kept, those of the first end first.
    """

    def __init__(self, context: EvaluationContext, root: Path) -> None:
        self._context = context
        self._root = root
        limits = context.configuration.limits
        part = max(limits.uploads // _CALLERS, limits.request_body)
        self.share = Share(
            SharedResource.UPLOADS,
            limits.uploads,
            part,
            f"your uploads take up {format_size(part)}, the part of limits.uploads for one caller;"
            " try again when evaluations have ended",
            "the disk space for uploads is used up (limits.uploads); try again later",
            make_room=self._discard_kept,
        )
        self.unwritten = UnwrittenUploads()
        # Ended evaluations whose files are kept: of each caller in the order of their ends.
        self._kept: defaultdict[str, dict[str, Evaluation]] = defaultdict(dict)
        self._in_use: Counter[str] = Counter()  # of these, those that a rerun is linking now

    def keep_or_release_files(self, evaluation: Evaluation) -> None:
        """Keep the files of an ended evaluation, or give back the bytes of removed ones."""
        if evaluation.details.has_kept_submission:
            self._kept[evaluation.details.caller][evaluation.details.identifier] = evaluation
        else:
            self._give_back(evaluation)

    def _give_back(self, evaluation: Evaluation) -> None:
        self.share.give_back(evaluation.details.upload_size, evaluation.details.caller)

    @asynccontextmanager
    async def open_kept_submission(self, evaluation: Evaluation) -> AsyncIterator[KeptSubmission]:
        """Return the request and the files of an evaluation that has ended.

        Within the context they are not discarded. Raises: SubmissionDiscarded.
        """
        await evaluation.cleanup_event.wait()
        identifier, workspace = evaluation.details.identifier, evaluation.workspace
        self._in_use[identifier] += 1
        try:
            try:
                read = workspace.request_file.read_bytes
                packed = await self._context.worker_threads.run_in_thread(read)
            except FileNotFoundError:
                raise SubmissionDiscarded from None
            details = evaluation.details
            if identifier not in self._kept[details.caller]:  # forgotten, perhaps meanwhile
                raise SubmissionDiscarded
            yield KeptSubmission(unpack_request(packed), workspace, details.upload_size)
        finally:
            self._in_use -= Counter([identifier])

    @asynccontextmanager
    async def open_archived_submission(
        self, identifier: str, caller: str, *, makes_room: bool
    ) -> AsyncIterator[KeptSubmission]:
        """Return the request and the files of an archived evaluation, extracted for the context.

        `makes_room` is whether other files may be discarded for it. Raises: SubmissionDiscarded;
        CallerQuotaExceeded; ServerBusy; OSError.
        """
        directory, size = self._root / self._context.generate_random_bytes(16).hex(), 0
        try:
            archive = self._context.archive
            if archive is None:
                raise SubmissionDiscarded
            extract = partial(extract_submission, directory=directory)
            found = await archive.read_submission(identifier, caller, extract)
            if found is None:
                raise SubmissionDiscarded
            self.share.take_within_quota(found.size, caller, makes_room=makes_room)
            size = found.size
            yield found
        finally:
            self.discard_upload(directory, size, caller)

    def _discard_kept(self, size: int, caller: str | None) -> bool:
        """Discard kept files of `size` bytes or more, those of the first end first.

        They are those of the caller or, for None, first of the callers that hold most. If all
        together have fewer, discard none and return False.
        """
        found: list[Evaluation] = []
        for evaluation in self._list_kept(caller):
            if size <= 0:
                break
            found.append(evaluation)
            size -= evaluation.details.upload_size
        if size > 0:
            return False
        for evaluation in found:
            self.discard_kept_files(evaluation)
        return True

    def _list_kept(self, caller: str | None) -> Iterator[Evaluation]:
        for name in self.share.list_callers() if caller is None else (caller,):
            for identifier, evaluation in self._kept.get(name, {}).items():
                if identifier not in self._in_use:
                    yield evaluation

    def discard_kept_files(self, evaluation: Evaluation) -> None:
        """Remove the kept files of an ended evaluation, if they are kept.

        Their bytes are given back at once, so that an upload need not wait for the removal.
        """
        if self.release_kept_files(evaluation):
            attempt = self._context.cleanup_queue.attempt_call(
                "removal of a kept submission",
                remove_tree,
                evaluation.workspace.submission_directory,
                evaluation.workspace.request_file,
            )
            run_in_background(attempt, log, "a kept submission could not be removed")

    def release_kept_files(self, evaluation: Evaluation) -> bool:
        """Give back the bytes of kept files, which the caller removes; return if there are any."""
        details = evaluation.details
        is_kept = self._kept[details.caller].pop(details.identifier, None) is not None
        if is_kept:
            details.has_kept_submission = False
            self._give_back(evaluation)
        return is_kept

    def discard_upload(self, directory: Path, size: int, caller: str) -> None:
        """Remove the `directory` of a form that becomes no evaluation.

        The `size` bytes count for the caller until they are gone.
        """
        attempt = self._context.cleanup_queue.attempt_call(
            "removal of an upload",
            remove_tree,
            directory,
            on_success=lambda: self.share.give_back(size, caller),
        )
        run_in_background(attempt, log, "an upload could not be removed")


MAX_LISTED_CONTENT_BYTES = 256 * 1024
"""Bytes of the files in one answer, in all; a file beyond them is named without its content."""

MAX_LISTED_FILES = 1000
"""Files in one answer, at most."""

# In JSON six bytes each; and no editor shows them.
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1f]")


def read_submitted_files(directories: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the files below the first of `directories` that exists: FIELD/FILENAME.

    Each has `field`, `filename`, `size` in bytes and either `text` or `base64`, or neither if it is
    beyond `MAX_LISTED_CONTENT_BYTES`. Blocks. Raises: OSError; FileNotFoundError, if none exists.
    """
    for directory in directories[:-1]:
        with suppress(FileNotFoundError):
            return _read_directory(directory)
    return _read_directory(directories[-1])


def _read_directory(directory: Path) -> list[dict[str, Any]]:
    left = MAX_LISTED_CONTENT_BYTES
    files = []
    for path in islice(_list_files(directory), MAX_LISTED_FILES):
        with _open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            document = {"field": path.parent.name, "filename": path.name, "size": size}
            if size <= left:
                content = file.read(left)
                left -= len(content)
                document |= _encode_content(content)
            files.append(document)
    return files


def _open_file(path: Path) -> IO[bytes]:
    """Open a file. Raises: OSError; FileNotFoundError also for anything but a regular file.

    Without a sandbox an evaluator may have put anything in its place.
    """
    try:
        return open_regular_file(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileNotFoundError(errno.ENOENT, "a link", str(path)) from None
        raise


def _list_files(directory: Path) -> Iterator[Path]:
    for field in sorted(os.listdir(directory)):
        if not (directory / field).is_symlink():
            yield from (directory / field / name for name in sorted(os.listdir(directory / field)))


def _encode_content(content: bytes) -> dict[str, str]:
    if not _CONTROL.search(content):
        with suppress(UnicodeDecodeError):
            return {"text": content.decode()}
    return {"base64": b64encode(content).decode()}
