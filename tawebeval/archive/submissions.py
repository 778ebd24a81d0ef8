"""Archived submissions: the request and the submitted files, as NAME.tar.zst.

The members are `request`, as `core.form` packs it, and `submission/FIELD/FILENAME`, in this
order of the fields. Every function here blocks.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import attrs
import zstandard

from tawebeval.archive.evaluation_files import DamagedArchiveFile, make_compressor
from tawebeval.core.form import EvaluationRequest, SubmissionFile, unpack_request
from tawebeval.linux.filetree import open_regular_file
from tawebeval.sandbox.workspace import Workspace

_REQUEST = "request"
_MAX_REQUEST = 64 * 1024 * 1024  # bytes; the limits of the form are far lower


@attrs.frozen
class ExtractedSubmission:
    """A submission in the directories of `workspace`; `size` is the size of its files in bytes."""

    evaluation_request: EvaluationRequest
    workspace: Workspace
    size: int


@attrs.frozen
class ArchivedSubmission:
    """An open archived submission; `files` yields each file, with its size, and its content."""

    evaluation_request: EvaluationRequest
    files: Iterator[tuple[SubmissionFile, IO[bytes]]]


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


@contextmanager
def open_submission(source: Path) -> Iterator[ArchivedSubmission]:
    """Open an archived submission to read its files in their order.

    Raises, also within the context: OSError, DamagedArchiveFile.
    """
    try:
        with (
            open(source, "rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file) as reader,
            tarfile.open(fileobj=reader, mode="r|") as archive,
        ):
            request = _read_request(archive)
            yield ArchivedSubmission(request, _read_files(archive, request.submission))
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        raise DamagedArchiveFile(str(error)) from None


def _read_files(
    archive: tarfile.TarFile, files: Sequence[SubmissionFile]
) -> Iterator[tuple[SubmissionFile, IO[bytes]]]:
    missing = {f"submission/{one.field}/{one.filename}": one for one in files}
    for member in archive:
        wanted, content = missing.pop(member.name, None), archive.extractfile(member)
        if wanted is not None and content is not None:
            yield attrs.evolve(wanted, size=member.size), content
    if missing:
        raise DamagedArchiveFile(f"{len(missing)} files are missing")


def extract_submission(source: Path, directory: Path) -> ExtractedSubmission:
    """Write the files of an archived submission below `directory`, which is created.

    Raises: OSError, DamagedArchiveFile.
    """
    workspace = Workspace(directory)
    directory.mkdir(mode=0o700)
    size = 0
    with open_submission(source) as submission:
        for file, content in submission.files:
            path = workspace.locate_submitted_file(file)
            path.parent.mkdir(mode=0o755, parents=True)
            size += _copy_file(content, path)
    return ExtractedSubmission(submission.evaluation_request, workspace, size)


def _read_request(archive: tarfile.TarFile) -> EvaluationRequest:
    member = archive.next()
    content = member and archive.extractfile(member)
    if member is None or not content or member.name != _REQUEST or member.size > _MAX_REQUEST:
        raise DamagedArchiveFile("the request is missing")
    return _unpack(content.read())


def _copy_file(content: IO[bytes], path: Path) -> int:
    size = 0
    with open(path, "xb") as file:
        while chunk := content.read(64 * 1024):
            size += file.write(chunk)
    return size
