"""File blocks of SEGI: what stands between the file markers, taken apart.

    Content-Type: image/svg+xml
    Content-Disposition: attachment; filename="report.svg"
    X-SEGI-As: content

    <svg ...

The body is the file itself or, with `X-SEGI-As: path`, the path where the evaluator has
put it. The terminator before the end marker belongs to the block, not to the body.
"""

from __future__ import annotations

from email.parser import HeaderParser

import attrs

from tawebeval.filenames import base_name

MAX_HEADERS = 8 * 1024
"""The most bytes that the headers of a file block may have together."""

_EMPTY_LINE = b"\n\n"


class FileBlockError(ValueError):
    """A file block that is not as it should be; `str()` is a sentence for people."""


@attrs.frozen
class File:
    """A file that the evaluator sent as it is."""

    filename: str
    content_type: str
    content: bytes


@attrs.frozen
class WantedFile:
    """A file that the evaluator named by a path: somebody who has a file system must read it.

    `path` is as the evaluator wrote it.
    """

    filename: str
    content_type: str
    path: str


class FileBlock:
    """Gathers one block, whose body may have `limit` bytes; what is over that is not kept."""

    def __init__(self, end_marker: bytes, limit: int) -> None:
        self._end = b"\n" + end_marker + b"\n"
        self._limit = limit
        self._overlong = False
        # The end marker may stand on the very first line.
        self._gathered = bytearray(b"\n")

    def feed(self, data: bytes) -> bytes | None:
        """Take a part of the block; return what follows its end, or None before that."""
        start = max(len(self._gathered) - len(self._end) + 1, 0)
        self._gathered += data
        at = self._gathered.find(self._end, start)
        if at >= 0:
            rest = bytes(self._gathered[at + len(self._end) :])
            del self._gathered[at:]
            return rest
        if len(self._gathered) > self._limit + MAX_HEADERS + len(_EMPTY_LINE + self._end):
            self._overlong = True
            del self._gathered[: 1 - len(self._end)]
        return None

    def parse(self) -> File | WantedFile:
        """Return what the block, now ended, says. Raises FileBlockError."""
        too_large = FileBlockError(
            f"a file block is over {self._limit} bytes, or its headers over {MAX_HEADERS}"
        )
        if self._overlong:
            raise too_large
        head, empty_line, body = bytes(self._gathered + b"\n").partition(_EMPTY_LINE)
        if not empty_line:
            raise FileBlockError("a file block has no empty line between its headers and its body")
        body = body[:-1]
        if len(head) > MAX_HEADERS or len(body) > self._limit:
            raise too_large
        headers = HeaderParser().parsestr(head[1:].decode("utf-8", "replace"))
        content_type = headers.get("Content-Type", "application/octet-stream")
        try:
            filename = headers.get_filename()
        except (ValueError, LookupError):
            raise FileBlockError("a file block's name is encoded strangely") from None
        match headers.get("X-SEGI-As", "content").strip().lower():
            case "content":
                return File(_checked(filename or "file"), content_type, body)
            case "path":
                path = body.decode("utf-8", "surrogateescape")
                return WantedFile(_checked(filename or path), content_type, path)
            case other:
                raise FileBlockError(f"X-SEGI-As is {other!r}; it can be 'content' or 'path'")


def _checked(filename: str) -> str:
    try:
        return base_name(filename)
    except ValueError as error:
        raise FileBlockError(f"a file block's name: {error}") from None
