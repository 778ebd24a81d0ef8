"""The body of `POST /evaluate`, taken apart while it arrives and spooled to disk.

twisted.web would hold the whole form in memory, twice, and lose the names of files. Here
only text fields are in memory, each below its limit, and as much of files as `uploads` gathers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from multipart import (
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)
from twisted.web.http_headers import Headers

from tawebeval.config import Configuration
from tawebeval.core.budget import Spool
from tawebeval.core.form import (
    FIELD_ALIASES,
    TEXT_FIELDS,
    SubmissionFile,
    parse_form,
    parse_submission_file,
)
from tawebeval.errors import (
    InvalidField,
    MalformedRequest,
    RequestError,
    TooLarge,
    UnsupportedMediaType,
)
from tawebeval.evaluations.records import Upload
from tawebeval.evaluations.uploads import UploadSource, UploadWriter
from tawebeval.web.context import WebContext
from tawebeval.web.responses import header
from tawebeval.web.server.problems import not_stored

_BOUNDARY = 70  # characters at most (RFC 2046, section 5.1.1)
_MAX_KEY = 255  # characters of an Idempotency-Key
_NOT_UTF8 = "the headers of a part have to be UTF-8, with the names in them"


class FormReceiver:
    """Takes one form and has its files written by `files`, in a subdirectory `submission`.

    `key` is the request's `Idempotency-Key`. `received` is how many bytes have come; the spool
    counts them until who removes the directory gives them back. All methods raise
    RequestErrors.
    """

    def __init__(
        self,
        content_type: str,
        length: int | None,
        files: UploadWriter,
        key: str | None,
        configuration: Configuration,
        spool: Spool,
    ) -> None:
        """Look at the headers; nothing is made on disk before the first byte arrives."""
        self._files = files
        self._key = key
        self._protocols = configuration.repositories.protocols
        self._limits = configuration.limits
        self.received = 0
        self._spool = spool
        self._fields: dict[str, bytes] = {}  # in UTF-8
        self._submission: list[SubmissionFile] = []
        self._digests: dict[str, bytes] = {}
        # The part that is arriving: where its bytes go, if anywhere.
        self._name = ""
        self._text: bytearray | None = None
        self._most = 0  # bytes that the text may have
        self._in_file = False
        self._hash = hashlib.sha256()

        media_type, options = parse_options_header(content_type)
        if media_type != "multipart/form-data":
            raise UnsupportedMediaType(
                "the body must be multipart/form-data, as a browser's FormData makes it; "
                f"this is {media_type or 'of no declared type'}"
            )
        self._check_length(length or 0)
        boundary = options.get("boundary", "")
        if len(boundary) > _BOUNDARY:
            raise MalformedRequest(f"the boundary of the form has over {_BOUNDARY} characters")
        try:
            self._parser = PushMultipartParser(
                boundary,
                content_length=-1 if length is None else length,
                max_segment_count=self._limits.fields,
            )
        except MultipartError as error:
            raise _unreadable(error) from None
        self._begin_with = b"\r\n--" + self._parser.boundary
        self._begun = b""  # the first bytes, up to as many as these
        spool.check_room(length or 0)

    def _check_length(self, length: int) -> None:
        if length > self._limits.request_body:
            raise TooLarge(
                f"the body is over the limit of {self._limits.request_body} bytes",
                limit=self._limits.request_body,
            )

    def feed(self, chunk: bytes) -> None:
        """Take a part of the body."""
        self._check_length(self.received + len(chunk))
        self._spool.add(len(chunk))
        self.received += len(chunk)
        if len(self._begun) < len(self._begin_with):
            self._check_beginning(chunk)
        try:
            for event in self._parser.parse(chunk):
                if isinstance(event, MultipartSegment):
                    self._begin(event)
                elif event is None:
                    self._end()
                else:
                    self._take(event)
        except ParserLimitReached as error:
            raise TooLarge(
                f"the form has over {self._limits.fields} fields, or too long headers: {error}"
            ) from None
        except MultipartError as error:
            raise _unreadable(error) from None

    def _check_beginning(self, chunk: bytes) -> None:
        """Refuse what stands before the first boundary, as RFC 2046 would allow.

        The parser overlooks a boundary there when it arrives in pieces.
        """
        missing = len(self._begin_with) - len(self._begun)
        self._begun += chunk[:missing]
        for begin in (self._begin_with, self._begin_with[2:]):
            if begin.startswith(self._begun[: len(begin)]):
                return
        raise MalformedRequest("the form does not begin with its boundary")

    async def finish(self) -> Upload:
        """Take the end of the body; return the form when its files are on the disk."""
        try:
            self._parser.close()
        except MultipartError as error:
            raise _unreadable(error) from None
        fields = {name: text.decode() for name, text in self._fields.items()}
        request = parse_form(fields, self._submission, self._protocols)
        digest = hashlib.sha256(repr(sorted(self._digests.items())).encode()).digest()
        try:
            await self._files.finish()
        except OSError as error:
            raise not_stored(error) from None
        return Upload(request, self._files.directory, self._key, digest, self.received)

    def abandon(self, discard: Callable[[Path, int], object]) -> None:
        """Write nothing more; then have `discard` remove what there is, of so many bytes."""
        if self._files.used:
            self._files.abandon(lambda: discard(self._files.directory, self.received))
        else:
            self._files.abandon(lambda: self._spool.remove(self.received))

    def _begin(self, part: MultipartSegment) -> None:
        # The parser refuses it only where the line arrives in pieces.
        if any("\n" in value for _, value in part.headerlist):
            raise MalformedRequest("a header in the form has a line feed without a carriage return")
        name = part.name or ""
        name = self._name = FIELD_ALIASES.get(name, name)
        self._hash = hashlib.sha256(repr((name, part.filename)).encode("utf-8", "replace"))
        file = parse_submission_file(name, part.filename)
        if file is None and name not in TEXT_FIELDS:
            return
        if name in self._digests:
            raise InvalidField(name, "stands in the form more than once")
        self._digests[name] = b""
        if file is None:
            self._text = bytearray()
            self._most = min(TEXT_FIELDS[name] or self._limits.field, self._limits.field)
        else:
            self._submission.append(file)
            self._in_file = True
            self._files.begin(Path("submission", file.field, file.filename))

    def _take(self, chunk: bytes | bytearray) -> None:
        if self._key is not None:
            self._hash.update(chunk)
        if self._in_file:
            self._files.add(chunk)
        elif self._text is not None:
            self._take_text(self._text, chunk)

    def _take_text(self, text: bytearray, chunk: bytes | bytearray) -> None:
        size, most = len(text) + len(chunk), self._most
        if size > most:
            setting = " (limits.field)" if most == self._limits.field else ""
            raise TooLarge(
                f"{self._name}: {size} bytes have come so far; the limit is {most}{setting}",
                field=self._name,
                size=size,
                limit=most,
            )
        text += chunk

    def _end(self) -> None:
        if self._in_file:
            self._in_file = False
        elif self._text is not None:
            try:
                self._text.decode()
            except UnicodeDecodeError:
                raise InvalidField(self._name, "is not UTF-8") from None
            self._fields[self._name] = bytes(self._text)
            self._text = None
        else:
            return
        self._digests[self._name] = self._hash.digest()


def receive_form(
    api: WebContext, headers: Headers, length: int | None, caller: str, source: UploadSource
) -> FormReceiver:
    """Return the receiver of the form of a request with these headers. Raises RequestErrors.

    `length` is that of the body in bytes, None if it is not known beforehand; `source` is the
    request.
    """
    spool = api.registry.spool
    key = header(headers, "Idempotency-Key")
    if key is not None and not 0 < len(key) <= _MAX_KEY:
        raise MalformedRequest(f"Idempotency-Key: must have 1 to {_MAX_KEY} characters")
    form = FormReceiver(
        header(headers, "Content-Type") or "",
        length,
        UploadWriter(api.uploads / api.random(16).hex(), source, spool, api.threads),
        key,
        api.configuration,
        spool,
    )
    if key is None:
        # Before the body is sent, for nothing. (A key may be for one that is accepted.)
        api.registry.check_admission(caller)
    return form


def _unreadable(error: MultipartError) -> RequestError:
    """Return the refusal of what is no form, which names the field where that can be known."""
    wrong = error.__context__
    if not isinstance(wrong, UnicodeDecodeError):
        return MalformedRequest(f"the form cannot be read: {error}")
    header = wrong.object.decode("utf-8", "replace")
    name = parse_options_header(header.partition(":")[2])[1].get("name", "")
    if not name or "\ufffd" in name:
        return MalformedRequest(f"the form cannot be read: {_NOT_UTF8}")
    return InvalidField(FIELD_ALIASES.get(name, name)[:80], _NOT_UTF8)
