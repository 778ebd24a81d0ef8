r"""File blocks of SEGI: what stands between the file markers, taken apart.

    Content-Type: image/svg+xml
    Content-Disposition: attachment; filename="report.svg"
    X-SEGI-As: content

    <svg ...

The headers are written as in HTTP (RFC 9112, section 5), and may be folded; a `\r` before the
terminators of headers and empty line does not count. The body is the file itself or, with
`X-SEGI-As: path`, the path where the evaluator has put it. The terminator before the end marker
belongs to the block, not to the body.
"""

from __future__ import annotations

import re
from email.parser import HeaderParser

import attrs

from tawebeval.filenames import base_name

MAX_HEADERS = 8 * 1024
"""The most bytes that the headers of a file block may have together, with their terminators."""

_EMPTY_LINE = re.compile(rb"\n\r?\n")
_LONGEST_HEAD = MAX_HEADERS + len(b"\n\n")  # with the terminators before and after it
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r]*\r?")
_CONTINUED = re.compile(r"[ \t][^\r]*\r?")
_EXCERPT = 80


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
        if len(self._gathered) > self._limit + _LONGEST_HEAD + len(self._end):
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
        block = bytes(self._gathered + b"\n")
        empty_line = _EMPTY_LINE.search(block, 0, _LONGEST_HEAD)
        if empty_line is None:
            raise FileBlockError(
                "a file block has no empty line between its headers and its body,"
                f" or its headers are over {MAX_HEADERS} bytes"
            )
        head = block[1 : empty_line.start()].decode("utf-8", "replace")
        body = block[empty_line.end() : -1]
        if len(body) > self._limit:
            raise too_large
        _check_headers(head)
        headers = HeaderParser().parsestr(head)
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


def _check_headers(head: str) -> None:
    """Raise FileBlockError where a line is neither a header nor the continuation of one.

    The standard library's parser takes such a line, and all that follows, for the body.
    """
    if not head:
        return
    allowed: tuple[re.Pattern[str], ...] = (_HEADER,)
    for line in head.split("\n"):
        if not any(pattern.fullmatch(line) for pattern in allowed):
            raise FileBlockError(
                "a file block has, before its empty line, a line that is no header:"
                f" {line[:_EXCERPT]!r}; headers are written NAME: VALUE"
            )
        allowed = (_HEADER, _CONTINUED)


def _checked(filename: str) -> str:
    try:
        return base_name(filename)
    except ValueError as error:
        raise FileBlockError(f"a file block's name: {error}") from None
