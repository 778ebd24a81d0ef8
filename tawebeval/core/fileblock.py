r"""File blocks of SEGI: the headers and the body between the file markers.

    Content-Type: image/svg+xml
    Content-Disposition: attachment; filename="report.svg"
    X-SEGI-As: content

    <svg ...

Headers follow HTTP's syntax (RFC 9112, section 5) and may be folded. A `\r` before the
terminator of a header or of the empty line is ignored. The body is the file's content or, with
`X-SEGI-As: path`, the file's path. The terminator before the end marker belongs to the block,
not to the body.

The evaluator chooses every byte and the reactor parses them. So the size of headers is bounded,
and parsing takes time linear in their size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs

from tawebeval.core.text import decode_extended_filename, get_base_name
from tawebeval.errors import format_size

MAX_HEADER_BYTES = 1024
"""The most bytes that the headers of a file block may have together, with their terminators."""

MAX_PATH_BYTES = 4096
"""The most bytes that the path of a file may have (PATH_MAX of Linux)."""

_EMPTY_LINE = re.compile(rb"\n\r?\n")
_LONGEST_HEAD = MAX_HEADER_BYTES + len(b"\n\n")  # with the terminators before and after it

# RFC 9110, sections 5.5 and 5.6, with UTF-8 for obs-text. Each can match in one way only, so that
# no search backtracks.
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105  (a token of HTTP's grammar)
_SPACES = " \t"
_TEXT = r"[^\0-\x08\x0a-\x1f\x7f]*"
_HEADER = re.compile(rf"({_TOKEN}):({_TEXT})\r?")
_CONTINUED = re.compile(rf"[ \t]({_TEXT})\r?")
_DISPOSITION = re.compile(_TOKEN)
_PARAMETER = re.compile(rf'[ \t]*;[ \t]*(?:({_TOKEN})=(?:({_TOKEN})|"((?:[^"\\]|\\.)*+)"))?')
_QUOTED = re.compile(r"\\?(.)")  # a character, or a pair that stands for one
_EXCERPT = 80


class FileBlockError(ValueError):
    """A malformed file block; `str()` is a message for the evaluator's author."""


@attrs.frozen
class PrintedFile:
    """A file whose content stood in the block."""

    filename: str
    content_type: str
    content: bytes


@attrs.frozen
class FileReference:
    """A file named by its path, which the caller must read.

    `path` is unchecked: the evaluator chose it.
    """

    filename: str
    content_type: str
    path: str


class FileBlock:
    """Collector of one block; keeps at most `max_body_bytes` of the body and drops the rest.

    `is_overlong` says that bytes were dropped, so that `parse_file` will raise.
    """

    def __init__(self, end_marker: bytes, max_body_bytes: int) -> None:
        self._end = b"\n" + end_marker + b"\n"
        self._limit = max_body_bytes
        self.is_overlong = False
        # The end marker may stand on the very first line.
        self._gathered = bytearray(b"\n")

    @classmethod
    def resume_overlong_block(cls, end_marker: bytes, max_body_bytes: int) -> FileBlock:
        """Return the collector of a block that is over its limit already.

        The first bytes fed to it are the `held_back_byte_count` last bytes of the block so far.
        """
        block = cls(end_marker, max_body_bytes)
        block.is_overlong = True
        block._gathered.clear()
        return block

    @property
    def held_back_byte_count(self) -> int:
        """Number of the last bytes that may begin the end of an overlong block."""
        return min(len(self._gathered), len(self._end) - 1)

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes of the block; return the bytes after its end, or None before the end."""
        start = max(len(self._gathered) - len(self._end) + 1, 0)
        self._gathered += data
        at = self._gathered.find(self._end, start)
        if at >= 0:
            rest = bytes(self._gathered[at + len(self._end) :])
            del self._gathered[at + 1 :]
            # As where a read ends before the end marker: the error must not depend on reads.
            self.is_overlong |= at > self._limit + _LONGEST_HEAD + 1
            return rest
        if len(self._gathered) > self._limit + _LONGEST_HEAD + len(self._end):
            self.is_overlong = True
            del self._gathered[: 1 - len(self._end)]
        return None

    def parse_file(self) -> PrintedFile | FileReference:
        """Return the file of a block that has ended. Raises FileBlockError."""
        too_large = FileBlockError(
            f"a file block is over {format_size(self._limit)}, or its headers over"
            f" {format_size(MAX_HEADER_BYTES)}"
        )
        if self.is_overlong:
            raise too_large
        # Its last terminator, which is the block's own, may be the one that ends the empty line.
        empty_line = _EMPTY_LINE.search(self._gathered, 0, _LONGEST_HEAD)
        if empty_line is None:
            raise FileBlockError(
                "a file block has no empty line between its headers and its body, or its headers"
                f" are over {format_size(MAX_HEADER_BYTES)}"
            )
        body = memoryview(self._gathered)[empty_line.end() : -1]
        if len(body) > self._limit:
            raise too_large
        headers = _headers(self._gathered[1 : empty_line.start()].decode("utf-8", "replace"))
        content_type = headers.get("content-type", "application/octet-stream")
        filename = _filename(headers.get("content-disposition"))
        kind = headers.get("x-segi-as", "content")
        match kind.lower():
            case "content":
                return PrintedFile(_checked(filename or "file"), content_type, bytes(body))
            case "path":
                path = _path(bytes(body[: MAX_PATH_BYTES + 1]))
                return FileReference(_checked(filename or path), content_type, path)
        raise FileBlockError(f"X-SEGI-As is {kind[:_EXCERPT]!r}; allowed: content, path")


def _headers(head: str) -> Mapping[str, str]:
    """Return header values by lower-case name. Raises FileBlockError."""
    headers: dict[str, str] = {}
    name = ""
    for line in head.split("\n") if head else ():
        if name and (continued := _CONTINUED.fullmatch(line)):
            headers[name] = f"{headers[name]} {continued[1].strip(_SPACES)}".strip(_SPACES)
        elif header := _HEADER.fullmatch(line):
            name = header[1].lower()
            if name in headers:
                raise FileBlockError(f"a file block repeats the header {name[:_EXCERPT]!r}")
            headers[name] = header[2].strip(_SPACES)
        else:
            raise FileBlockError(
                f"{line[:_EXCERPT]!r} is not a header of a file block; write NAME: VALUE, and an"
                " empty line before the body"
            )
    return headers


def _filename(disposition: str | None) -> str:
    """Return the name in a Content-Disposition (RFC 6266), "" if absent. Raises FileBlockError."""
    if disposition is None:
        return ""
    parameters = _parameters(disposition)
    extended = parameters.get("filename*")
    if extended is None:
        return parameters.get("filename", "")
    try:
        return decode_extended_filename(extended)
    except ValueError as error:
        raise FileBlockError(str(error)) from None


def _parameters(disposition: str) -> Mapping[str, str]:
    """Return parameters by lower-case name. Raises FileBlockError."""
    parameters: dict[str, str] = {}
    place = _DISPOSITION.match(disposition)
    while place is not None and place.end() < len(disposition):
        place = _PARAMETER.match(disposition, place.end())
        if place is None or place[1] is None:
            continue
        name = place[1].lower()
        if name in parameters:
            raise FileBlockError(f"Content-Disposition repeats {name[:_EXCERPT]!r}")
        parameters[name] = place[2] or "".join(_QUOTED.findall(place[3] or ""))
    if place is None:
        raise FileBlockError(
            f"malformed Content-Disposition {disposition[:_EXCERPT]!r}; write"
            ' attachment; filename="NAME" (RFC 6266)'
        )
    return parameters


def _path(body: bytes) -> str:
    """Return the path in the body of a block. Raises FileBlockError."""
    if len(body) > MAX_PATH_BYTES:
        raise FileBlockError(f"the path in a file block is over {format_size(MAX_PATH_BYTES)}")
    return body.decode("utf-8", "surrogateescape")


def _checked(filename: str) -> str:
    try:
        return get_base_name(filename)
    except ValueError as error:
        raise FileBlockError(f"a file block's name: {error}") from None
