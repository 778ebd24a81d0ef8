"""The form of POST /evaluate, parsed while it arrives and written to disk.

twisted.web would hold the whole form in memory, twice, and drop file names. `FormReceiver` holds
only text fields, each within its limit, and the chunks that `UploadWriter` collects.
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
from tawebeval.core.budget import UploadBudget
from tawebeval.core.form import (
    FIELD_ALIASES,
    SubmissionFile,
    find_size_limit,
    parse_form,
    parse_submission_file,
)
from tawebeval.errors import (
    InvalidField,
    MalformedRequest,
    RequestError,
    RequestTooLarge,
    UnsupportedMediaType,
    format_size,
)
from tawebeval.evaluations.records import ReceivedForm
from tawebeval.evaluations.uploads import UploadSource, UploadWriter
from tawebeval.web.context import WebContext
from tawebeval.web.responses import get_header
from tawebeval.web.server.problems import report_storage_error

_BOUNDARY = 70  # characters at most (RFC 2046, section 5.1.1)
_MAX_KEY = 255  # characters of an Idempotency-Key
_NOT_UTF8 = "the headers of a part must be UTF-8, with the names in them"


class FormReceiver:
    """Parses one form; `files` writes its files below the subdirectory `submission`.

    `key` is the header `Idempotency-Key`. `received_bytes` is the number of bytes received; `spool`
    counts them until the directory is removed. All methods raise RequestError.
    """

    def __init__(
        self,
        content_type: str,
        length: int | None,
        files: UploadWriter,
        key: str | None,
        configuration: Configuration,
        spool: UploadBudget,
    ) -> None:
        """Check the headers. The first byte of the body creates the directory."""
        self._files = files
        self._key = key
        self._protocols = configuration.repositories.protocols
        self._limits = configuration.limits
        self.received_bytes = 0
        self._spool = spool
        self._fields: dict[str, bytes] = {}  # in UTF-8
        self._submission: list[SubmissionFile] = []
        self._digests: dict[str, bytes] = {}
        # The arriving part: its text or file; neither if the field is unknown.
        self._name = ""
        self._text: bytearray | None = None
        self._max_text = 0  # bytes that the text may have
        self._in_file = False
        self._hash = hashlib.sha256()

        media_type, options = parse_options_header(content_type)
        if media_type != "multipart/form-data":
            raise UnsupportedMediaType(
                f"the body is {media_type or 'of no declared media type'}; send"
                " multipart/form-data, as `curl -F` or a browser's FormData does"
            )
        if length is not None:
            self._check_length(length, f"request body is {format_size(length)}; the limit is")
        boundary = options.get("boundary", "")
        if len(boundary) > _BOUNDARY:
            raise MalformedRequest(f"the form's boundary is over {_BOUNDARY} characters (RFC 2046)")
        try:
            self._parser = PushMultipartParser(
                boundary,
                content_length=-1 if length is None else length,
                max_segment_count=self._limits.fields,
            )
        except MultipartError as error:
            raise _make_form_error(error) from None
        self._expected_start = b"\r\n--" + self._parser.boundary
        self._begun = b""  # the first bytes, up to as many as these
        spool.check_space(length or 0)

    def _check_length(self, length: int, words: str) -> None:
        most = self._limits.request_body
        if length > most:
            raise RequestTooLarge(f"{words} {format_size(most)} (limits.request_body)", limit=most)

    def feed(self, chunk: bytes) -> None:
        """Parse a part of the body."""
        self._check_length(self.received_bytes + len(chunk), "request body is over")
        self._spool.add_bytes(len(chunk))
        self.received_bytes += len(chunk)
        if len(self._begun) < len(self._expected_start):
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
            raise RequestTooLarge(
                f"the form has over {self._limits.fields} fields (limits.fields), or too long"
                f" headers: {error}"
            ) from None
        except MultipartError as error:
            raise _make_form_error(error) from None

    def _check_beginning(self, chunk: bytes) -> None:
        """Refuse a preamble before the first boundary, which RFC 2046 would allow.

        The parser overlooks a first boundary that arrives in pieces.
        """
        missing = len(self._expected_start) - len(self._begun)
        self._begun += chunk[:missing]
        for begin in (self._expected_start, self._expected_start[2:]):
            if begin.startswith(self._begun[: len(begin)]):
                return
        raise MalformedRequest("the form does not begin with the boundary of its Content-Type")

    async def finish(self) -> ReceivedForm:
        """Parse the end of the body; return the form once its files are on disk."""
        try:
            self._parser.close()
        except MultipartError as error:
            raise _make_form_error(error) from None
        fields = {name: text.decode() for name, text in self._fields.items()}
        request = parse_form(
            fields, self._submission, self._protocols, self._limits.requestable_ranges
        )
        digest = hashlib.sha256(repr(sorted(self._digests.items())).encode()).digest()
        try:
            await self._files.finish()
        except OSError as error:
            raise report_storage_error(error) from None
        return ReceivedForm(request, self._files.directory, self._key, digest, self.received_bytes)

    def abandon(self, discard: Callable[[Path, int], object]) -> None:
        """Write nothing more, then call `discard` with the directory and its size in bytes."""
        if self._files.has_begun_writing:
            self._files.abandon(lambda: discard(self._files.directory, self.received_bytes))
        else:
            self._files.abandon(lambda: self._spool.remove_bytes(self.received_bytes))

    def _begin(self, part: MultipartSegment) -> None:
        # The parser refuses it only where the line arrives in pieces.
        if any("\n" in value for _, value in part.headerlist):
            raise MalformedRequest("a header in the form has a line feed without a carriage return")
        name = part.name or ""
        name = self._name = FIELD_ALIASES.get(name, name)
        self._hash = hashlib.sha256(repr((name, part.filename)).encode("utf-8", "replace"))
        file = parse_submission_file(name, part.filename)
        limit = find_size_limit(name) if file is None else None
        if file is None and limit is None:
            return
        if name in self._digests:
            raise InvalidField(name, "the field is repeated; send it once")
        self._digests[name] = b""
        if file is None:
            self._text = bytearray()
            self._max_text = int(min(limit or 0, self._limits.field))
        else:
            self._submission.append(file)
            self._in_file = True
            self._files.begin_file(Path("submission", file.field, file.filename))

    def _take(self, chunk: bytes | bytearray) -> None:
        if self._key is not None:
            self._hash.update(chunk)
        if self._in_file:
            self._files.add_content(chunk)
        elif self._text is not None:
            self._take_text(self._text, chunk)

    def _take_text(self, text: bytearray, chunk: bytes | bytearray) -> None:
        size, most = len(text) + len(chunk), self._max_text
        if size > most:
            setting = " (limits.field)" if most == self._limits.field else ""
            raise RequestTooLarge(
                f"{self._name}: the field is over {format_size(most)}{setting}",
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


def make_form_receiver(
    context: WebContext, headers: Headers, length: int | None, caller: str, source: UploadSource
) -> FormReceiver:
    """Return the receiver of a form with these request headers. Raises: RequestError.

    `length` is that of the body in bytes, None if unknown; `source` is the request.
    """
    spool = context.registry.upload_budget
    key = get_header(headers, "Idempotency-Key")
    if key is not None and not 0 < len(key) <= _MAX_KEY:
        raise MalformedRequest(f"Idempotency-Key: {len(key)} characters; allowed: 1 to {_MAX_KEY}")
    form = FormReceiver(
        get_header(headers, "Content-Type") or "",
        length,
        UploadWriter(
            context.upload_directory / context.random_bytes(16).hex(),
            source,
            spool,
            context.threads,
        ),
        key,
        context.configuration,
        spool,
    )
    if key is None:
        # Refused before the body is sent. (A key may name an accepted evaluation.)
        context.registry.check_admission(caller)
    return form


def _make_form_error(error: MultipartError) -> RequestError:
    """Return the refusal of a malformed form, with the name of the field if it is known."""
    wrong = error.__context__
    if not isinstance(wrong, UnicodeDecodeError):
        return MalformedRequest(f"malformed form: {error}")
    header = wrong.object.decode("utf-8", "replace")
    name = parse_options_header(header.partition(":")[2])[1].get("name", "")
    if not name or "\ufffd" in name:
        return MalformedRequest(f"malformed form: {_NOT_UTF8}")
    return InvalidField(FIELD_ALIASES.get(name, name)[:80], _NOT_UTF8)
