"""The body of `POST /evaluate`, taken apart while it arrives and spooled to disk.

twisted.web would hold the whole form in memory, twice, and lose the names of files. Here
only text fields are in memory, each below its limit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from multipart import (
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)

from tawebeval.config import Configuration
from tawebeval.errors import (
    InvalidField,
    MalformedRequest,
    RequestError,
    TooLarge,
    UnsupportedMediaType,
)
from tawebeval.form import TEXT_FIELDS, SubmissionFile, parse_form, submission_file
from tawebeval.records import Upload
from tawebeval.spool import Spool
from tawebeval.web.older import FIELDS

_BOUNDARY = 70  # characters at most (RFC 2046, section 5.1.1)
_NOT_UTF8 = "the headers of a part have to be UTF-8, with the names in them"


class FormReceiver:
    """Takes one form and puts its files below `directory`, in a subdirectory `submission`.

    `key` is the request's `Idempotency-Key`. `received` is how many bytes have come; the spool
    counts them until who removes the directory gives them back. All methods raise
    RequestErrors, or OSError when the disk does not take it.
    """

    def __init__(
        self,
        content_type: str,
        length: int | None,
        directory: Path,
        key: str | None,
        configuration: Configuration,
        spool: Spool,
    ) -> None:
        """Look at the headers; nothing is made on disk before the first byte arrives."""
        self.directory = directory
        self._key = key
        self._protocols = configuration.repositories.protocols
        self._limits = configuration.limits
        self.received = 0
        self._spool = spool
        self._fields: dict[str, str] = {}
        self._submission: list[SubmissionFile] = []
        self._digests: dict[str, bytes] = {}
        # The part that is arriving: where its bytes go, if anywhere.
        self._name = ""
        self._text: bytearray | None = None
        self._file: BinaryIO | None = None
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
        spool.check(length or 0)

    def _check_length(self, length: int) -> None:
        if length > self._limits.request_body:
            raise TooLarge(
                f"the body is over the limit of {self._limits.request_body} bytes",
                limit=self._limits.request_body,
            )

    def feed(self, chunk: bytes) -> None:
        """Take a part of the body."""
        self._check_length(self.received + len(chunk))
        self._spool.take(len(chunk))
        self.received += len(chunk)
        try:
            for event in self._parser.parse(chunk):
                if isinstance(event, MultipartSegment):
                    self._begin(event)
                elif event is None:
                    self._end()
                else:
                    self._take(bytes(event))
        except ParserLimitReached as error:
            raise TooLarge(
                f"the form has over {self._limits.fields} fields, or too long headers: {error}"
            ) from None
        except MultipartError as error:
            raise _unreadable(error) from None

    def finish(self) -> Upload:
        """Take the end of the body; return the form."""
        try:
            self._parser.close()
        except MultipartError as error:
            raise _unreadable(error) from None
        request = parse_form(self._fields, self._submission, self._protocols)
        digest = hashlib.sha256(repr(sorted(self._digests.items())).encode()).digest()
        return Upload(request, self.directory, self._key, digest, self.received)

    def abandon(self) -> None:
        """Close what is open; the directory is for the caller to remove."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self, part: MultipartSegment) -> None:
        name = part.name or ""
        name = self._name = FIELDS.get(name, name)
        self._hash = hashlib.sha256(repr((name, part.filename)).encode("utf-8", "replace"))
        file = submission_file(name, part.filename)
        if file is None and name not in TEXT_FIELDS:
            return
        if name in self._digests:
            raise InvalidField(name, "stands in the form more than once")
        self._digests[name] = b""
        if file is None:
            self._text = bytearray()
        else:
            self._submission.append(file)
            # What is around it is not made here: it is for nobody else to look into.
            self.directory.mkdir(mode=0o755, exist_ok=True)
            folder = self.directory / "submission" / file.field
            folder.mkdir(mode=0o755, parents=True)
            self._file = open(folder / file.filename, "xb")

    def _take(self, chunk: bytes) -> None:
        if self._key is not None:
            self._hash.update(chunk)
        if self._file is not None:
            self._file.write(chunk)
        elif self._text is not None:
            self._text += chunk
            if len(self._text) > self._limits.field:
                raise TooLarge(
                    f"{self._name}: is over the limit of {self._limits.field} bytes",
                    field=self._name,
                    limit=self._limits.field,
                )

    def _end(self) -> None:
        if self._file is not None:
            self.abandon()
        elif self._text is not None:
            try:
                self._fields[self._name] = self._text.decode()
            except UnicodeDecodeError:
                raise InvalidField(self._name, "is not UTF-8") from None
            self._text = None
        else:
            return
        self._digests[self._name] = self._hash.digest()


def _unreadable(error: MultipartError) -> RequestError:
    """Return the refusal of what is no form, which names the field where that can be known."""
    wrong = error.__context__
    if not isinstance(wrong, UnicodeDecodeError):
        return MalformedRequest(f"the form cannot be read: {error}")
    header = wrong.object.decode("utf-8", "replace")
    name = parse_options_header(header.partition(":")[2])[1].get("name", "")
    if not name or "\ufffd" in name:
        return MalformedRequest(f"the form cannot be read: {_NOT_UTF8}")
    return InvalidField(FIELDS.get(name, name)[:80], _NOT_UTF8)
