"""The form of a submission: checked, and encoded in pieces for each attempt.

The encoding is `multipart/form-data` as browsers send it (docs/api.md). Files are read
while they are sent, so that no file is held in memory.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import IO, TypeAlias
from uuid import uuid4

import attrs

from tawebeval.core.text import get_base_name

_PIECE = 1 << 16  # bytes of a file in one piece
_ESCAPES = str.maketrans({'"': "%22", "\r": "%0D", "\n": "%0A"})  # as in browsers


@attrs.frozen
class NamedFile:
    """A file of a submission: its content or path, sent under `filename`."""

    filename: str
    content: bytes | Path


Content: TypeAlias = str | bytes | Path | NamedFile
"""The content of a field: text or bytes without a file name, a file, or a `NamedFile` file."""


@attrs.frozen
class SubmissionForm:
    """The form of `POST /evaluate`.

    `fields` and `submission` map the names of fields to their content. Raises ValueError for an
    invalid file name and for text that is not UTF-8.
    """

    fields: Mapping[str, str]
    submission: Mapping[str, Content]
    _boundary: str = attrs.field(init=False, factory=lambda: uuid4().hex)

    def __attrs_post_init__(self) -> None:
        """Check all file names and texts. Raises ValueError."""
        for name, content in self.submission.items():
            _filename(content)
            check_encodable(f"submission[{name}]", content if isinstance(content, str) else "")
        for name, text in self.fields.items():
            check_encodable(name, text)

    @property
    def content_type(self) -> str:
        """The value of the header `Content-Type`."""
        return f"multipart/form-data; boundary={self._boundary}"

    def open_body(self, opened: ExitStack) -> FormBody:
        """Open the files and return the body; `opened` closes them. Raises OSError. Blocks."""
        parts: list[bytes | _OpenFile] = []
        for name, text in self.fields.items():
            parts += [self._head(name), text.encode(), b"\r\n"]
        for name, content in self.submission.items():
            head = self._head(f"submission[{name}]", _filename(content), isinstance(content, str))
            parts += [head, _open(_source(content), opened), b"\r\n"]
        return FormBody([*parts, f"--{self._boundary}--\r\n".encode()])

    def _head(self, name: str, filename: str | None = None, is_text: bool = True) -> bytes:
        head = f'--{self._boundary}\r\nContent-Disposition: form-data; name="{_escape(name)}"'
        if filename is not None:
            head += f'; filename="{_escape(filename)}"'
        if not is_text:
            head += "\r\nContent-Type: application/octet-stream"
        return f"{head}\r\n\r\n".encode()


@attrs.frozen
class _OpenFile:
    """A file of a form, of which exactly `size` bytes are sent."""

    file: IO[bytes]
    size: int
    path: Path


class FormBody:
    """A form as bytes, for one attempt: `length` bytes in `pieces`."""

    def __init__(self, parts: Sequence[bytes | _OpenFile]) -> None:
        self._parts = parts
        self.length = sum(len(one) if isinstance(one, bytes) else one.size for one in parts)

    def iterate_pieces(self) -> Iterator[bytes]:
        """Yield the bytes. Raises OSError, also for a file that has shrunk. Blocks."""
        for part in self._parts:
            if isinstance(part, bytes):
                source: IO[bytes] = BytesIO(part)
                left = len(part)
            else:
                source, left = part.file, part.size
            while left:
                piece = source.read(min(_PIECE, left))
                if not piece:
                    assert isinstance(part, _OpenFile)
                    raise OSError(errno.EIO, "the file has changed while it was sent", part.path)
                left -= len(piece)
                yield piece


def check_encodable(name: str, text: str) -> None:
    """Raise ValueError if the name or the text of a field cannot be encoded as UTF-8."""
    try:
        f"{name}{text}".encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: must be UTF-8") from None


def _escape(name: str) -> str:
    return name.translate(_ESCAPES)


def _filename(content: Content) -> str | None:
    if isinstance(content, NamedFile):
        return get_base_name(content.filename)
    return get_base_name(content.name) if isinstance(content, Path) else None


def _source(content: Content) -> bytes | Path:
    if isinstance(content, NamedFile):
        return content.content
    return content.encode() if isinstance(content, str) else content


def _open(source: bytes | Path, opened: ExitStack) -> bytes | _OpenFile:
    if isinstance(source, bytes):
        return source
    found = source.stat()
    # A pipe has no length, and may block for ever.
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", source)
    return _OpenFile(opened.enter_context(source.open("rb")), found.st_size, source)
