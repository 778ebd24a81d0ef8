"""Requests, responses and forms as values, and what a client does about each response or failure.

The functions here only decide. The drivers (`sync_client`, `async_client`) send an `HttpRequest`
and return a `Response` or, if none has come, a `RequestFailure`, whose cause they find out. `str()`
of each exception is a sentence for people, which may quote the server, whose control characters are
escaped. Forms are `multipart/form-data` as browsers send it (docs/api.md);
their files are read while they are sent, so that no file is held in memory.
"""

from __future__ import annotations

import errno
import json
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum, auto
from http import HTTPStatus
from io import BytesIO
from ipaddress import ip_address
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import attrs
import msgspec

_LONGEST_QUOTE = 2000  # characters of a server's words in a message


class ClientError(Exception):
    """The base of all errors of a request."""


class Unavailable(ClientError):
    """No usable response, after all attempts or because a repetition would be of no use.

    `is_refused_connection` tells whether nothing listens at the server's address.
    """

    def __init__(self, message: str, is_refused_connection: bool = False) -> None:
        super().__init__(message)
        self.is_refused_connection = is_refused_connection


class Refused(ClientError):
    """The server refuses the request, and would refuse it again.

    `status` is the HTTP status, `members` those of the problem document (RFC 9457), empty if the
    body is not one.
    """

    def __init__(self, status: int, message: str, members: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.members = members


class InvalidRequest(Refused):
    """A field of the request is missing, invalid or too large."""

    @property
    def field(self) -> str | None:
        """The invalid field of the form, None if the error is about none."""
        return self.members.get("field")


class Forbidden(Refused):
    """The token is missing, or the server does not accept it."""


class UnknownEvaluation(Refused):
    """The caller has never had an evaluation of this identifier on this server."""


class EvaluationGone(Refused):
    """The server has discarded the evaluation, or its events after the requested cursor.

    `status` is 404 if the server knew the evaluation before and does not any more.
    """

    @property
    def oldest(self) -> str | None:
        """The oldest usable cursor, None if the whole evaluation is discarded."""
        return self.members.get("oldest")


_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_KINDS = {401: Forbidden, 403: Forbidden, 404: UnknownEvaluation, 410: EvaluationGone}


def make_printable(text: str) -> str:
    """Return the words of a server for a message: shortened, and without control characters."""
    short = text[:_LONGEST_QUOTE] + "…" * (len(text) > _LONGEST_QUOTE)
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in short
    )


def build_refusal(status: int, body: bytes, location: str = "") -> Refused:
    """Return the exception for a response whose status is no success; `body` may be anything.

    `location` is where a redirect leads, which is not followed.
    """
    members = _members(body)
    message = members.get("message") or members.get("detail")
    if not isinstance(message, str):
        answer = f"{status} {_PHRASES.get(status, '')}".strip()
        message = f"the server answers {answer} without an explanation"
        if location:
            message = f"the server answers {answer} and names another URL, {location}"
        if 300 <= status < 400 or status in (404, 405):  # those of another server, or site
            message += "; is it a tawebeval server? Check https:// and the path of the URL"
    kind = _KINDS.get(status, InvalidRequest if 400 <= status < 500 else Refused)
    return kind(status, make_printable(message), members)


def _members(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


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

    `fields` and `submission` map the names of fields to their content. Raises ValueError for
    text and for a file name that is not UTF-8.
    """

    fields: Mapping[str, str]
    submission: Mapping[str, Content]
    _boundary: str = attrs.field(init=False, factory=lambda: uuid4().hex)

    def __attrs_post_init__(self) -> None:
        """Check that all can be encoded. Raises ValueError."""
        for name, content in self.submission.items():
            text = content if isinstance(content, str) else _filename(content) or ""
            check_encodable(f"submission[{name}]", text)
        for name, text in self.fields.items():
            check_encodable(name, text)

    @property
    def content_type(self) -> str:
        """The value of the header `Content-Type`."""
        return f"multipart/form-data; boundary={self._boundary}"

    def open_body(self, opened: ExitStack) -> FormBody:
        """Open the files and return the body; `opened` closes them. Raises OSError. Blocks."""
        parts: list[bytes | Path] = []
        for name, text in self.fields.items():
            parts += [self._head(name), text.encode(), b"\r\n"]
        for name, content in self.submission.items():
            head = self._head(f"submission[{name}]", _filename(content), isinstance(content, str))
            parts += [head, _source(content), b"\r\n"]
        parts.append(f"--{self._boundary}--\r\n".encode())
        return FormBody([_open(part, opened) for part in parts])

    def _head(self, name: str, filename: str | None = None, is_text: bool = True) -> bytes:
        head = f'--{self._boundary}\r\nContent-Disposition: form-data; name="{_escape(name)}"'
        if filename is not None:
            head += f'; filename="{_escape(filename)}"'
        if not is_text:
            head += "\r\nContent-Type: application/octet-stream"
        return f"{head}\r\n\r\n".encode()


class _Part(NamedTuple):
    """A part of a form, of which exactly `size` bytes are sent."""

    file: IO[bytes]
    size: int
    path: Path | None


@attrs.frozen
class FormBody:
    """A form as bytes, for one attempt."""

    _parts: Sequence[_Part]

    @property
    def length(self) -> int:
        """The number of bytes."""
        return sum(part.size for part in self._parts)

    def iterate_pieces(self) -> Iterator[bytes]:
        """Yield the bytes. Raises OSError, also for a file that has shrunk. Blocks."""
        for file, left, path in self._parts:
            while left:
                piece = file.read(min(_PIECE, left))
                if not piece:
                    raise OSError(errno.EIO, "the file has changed while it was sent", path)
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
        return content.filename
    return content.name if isinstance(content, Path) else None


def _source(content: Content) -> bytes | Path:
    if isinstance(content, NamedFile):
        return content.content
    return content.encode() if isinstance(content, str) else content


def _open(source: bytes | Path, opened: ExitStack) -> _Part:
    if isinstance(source, bytes):
        return _Part(BytesIO(source), len(source), None)
    found = source.stat()
    # A pipe has no length, and may block for ever.
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", source)
    return _Part(opened.enter_context(source.open("rb")), found.st_size, source)


MAX_RESPONSE_BODY = 256 << 20
"""The largest body of a response that a client takes, in bytes after decompression."""

_SLOWEST = 4096  # bytes per second of an upload; the daemon cuts off slower ones
_JSON = "application/json"

Parsed = TypeVar("Parsed")


@attrs.frozen
class HttpRequest:
    """A request for a driver to send once, following no redirect.

    `timeout` is in seconds for the whole exchange, however slowly bytes arrive; `connect_timeout`
    is for the connection with its TLS handshake.
    """

    method: str
    url: str
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    form: SubmissionForm | None = None
    timeout: float = 60.0
    connect_timeout: float = 30.0

    def get_timeout(self, length: int) -> float:
        """Return the seconds for the exchange with a form of `length` bytes."""
        return self.timeout + length / _SLOWEST


@attrs.frozen
class Response:
    """A response with its whole body. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def get_header(self, name: str) -> str:
        """Return the value of a header, empty if it is absent."""
        return self.headers.get(name.lower(), "")


class Repetition(Enum):
    """When a request that got no response is of use again."""

    ALWAYS = auto()
    NEVER = auto()
    IF_NAME_IS_KNOWN = auto()  # the server has answered before
    IF_SERVER_MAY_START = auto()  # nothing listens at its address


@attrs.frozen
class RequestFailure:
    """No response, or none that can be used. `message` is for people, and may quote the server."""

    message: str = attrs.field(converter=make_printable)
    repetition: Repetition = Repetition.NEVER

    def is_permanent(self, base: str, *, server_has_answered: bool, can_wait: bool) -> bool:
        """Tell whether the next attempt would fail in the same way.

        A server that has answered before has a known name, and may be restarting. With `can_wait` a
        server on this machine may also be about to start.
        """
        match self.repetition:
            case Repetition.IF_NAME_IS_KNOWN:
                return not server_has_answered
            case Repetition.IF_SERVER_MAY_START if is_loopback(base):
                return not (server_has_answered or can_wait)
        return self.repetition is Repetition.NEVER


def is_loopback(base: str) -> bool:
    """Tell whether the host of a URL is this machine."""
    host = urlsplit(base).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def parse_response(
    base: str, response: Response, parse: Callable[[Response], Parsed]
) -> Parsed | RequestFailure:
    """Return the result of `parse`, or why the server at the URL `base` sent none."""
    try:
        return parse(response)
    except ValueError as error:
        kind = response.get_header("Content-Type").partition(";")[0].strip().lower()
        if kind != _JSON:
            sent = kind or "a body of no declared type"
            return RequestFailure(
                f"{base} is not a tawebeval server: it sends {sent} instead of JSON; check the URL"
            )
        try:
            msgspec.json.decode(response.body, type=msgspec.Raw)
        except (ValueError, RecursionError):
            return describe_broken_connection(base, str(error))
        return RequestFailure(f"{base}: {error}")


def describe_broken_connection(base: str, why: str) -> RequestFailure:
    """Return the failure of a connection that ended before its response."""
    return RequestFailure(f"the connection to {base} broke: {why}", Repetition.ALWAYS)
