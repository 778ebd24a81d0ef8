"""`web.upload`: forms of bytes that no client would send, cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from tawebeval.config import Configuration, LimitSettings
from tawebeval.core.form import MAX_FIELDS, TEXT_FIELD_SIZE_LIMITS
from tawebeval.errors import RequestError
from tawebeval.web.server.messages import ERROR_STATUSES
from tests.cases.strategies import Chunk, chunks_of, long_chunkings, mutated
from tests.cases.uploads import UploadTestCase, files
from tests.fakes.clients import BOUNDARY, MULTIPART, Part, form, parts

FIELD, FIELDS = TEXT_FIELD_SIZE_LIMITS["evaluator_cmd"], MAX_FIELDS
CONFIGURATION = Configuration(limits=LimitSettings(request_body=2**20))

NAMES = st.sampled_from(
    [
        *(*TEXT_FIELD_SIZE_LIMITS, "oid", "repositories[main][url]", "token", "", "\xff", "name\0"),
        "submission",
        *("submission[a]", "submission[source]", "submission[]", "submission[A]", "submission[a"),
        *(f"submission[{'a' * 251}]", f"submission[{'a' * 252}]"),
    ]
)
FILE_NAMES = st.none() | st.sampled_from(
    ["a", "a/b.py", "a\\b", "/", "", ".", "..", "a\0", "ü" * 127, "ü" * 128, "x" * 255, "\\"]
)
CONTENTS = st.sampled_from(
    [
        *(b"", b" ", b"\0", b"\xff", b"a" * 40, b"g" * 40, b"1", b"-1", b"9" * 11, b"../x", b"/"),
        b"a",
        *(b"https://example.org/a", b"file:///", b"https://[::1", b"x" * FIELD, b"x" * (FIELD + 1)),
        *(b"\r\n", b"\r\n--", f"\r\n--{BOUNDARY[:-1]}".encode(), "\u2028".encode()),
        b"\xed\xa0\x80",
    ]
)
HEADERS = (
    *(b"Content-Disposition: ", b"form-data", b"; ", b"name", b"filename", b"*", b"=", b'"', b"\\"),
    *(b"utf-8''", b"utf-16''", b"%ff", b"%", b"\xff", b"\xc3\xbc", b"\0", b"\r", b"\n", b"\r\n"),
    *(b" ", b"\t", b":", b"commit_oid", b"submission[b]", b"Content-Type: ", b"text/plain"),
    *(b"Content-Transfer-Encoding: base64", b"charset=", b"_charset_", b"Content-Length: 3"),
    *(b"multipart/mixed; boundary=x", b"x" * 3000, b"''", b"0*", b"1"),
)
STRANGE = st.lists(st.sampled_from(HEADERS), max_size=12).map(b"".join)
DELIMITERS = (
    *(b"--", b"\r\n", b"\r\n\r\n", BOUNDARY.encode(), f"--{BOUNDARY}\r\n".encode()),
    *(f"\r\n--{BOUNDARY}".encode(), f"--{BOUNDARY}--".encode(), b"\n", b"\r", b"\0", b" "),
    *(b'Content-Disposition: form-data; name="seed"\r\n\r\n', b"\xff", b"a"),
)
PARTS = st.one_of(
    st.builds(Part, NAMES, CONTENTS, FILE_NAMES),
    st.sampled_from(parts()),
    st.tuples(STRANGE, CONTENTS).map(b"\r\n\r\n".join),
)
BODIES = st.one_of(
    st.lists(PARTS, max_size=FIELDS + 2).map(lambda some: form([*parts(), *some])),
    st.lists(PARTS, max_size=FIELDS + 2).map(form),
    st.lists(st.sampled_from(DELIMITERS), max_size=12).map(b"".join),
)
CONTENT_TYPES = st.just(MULTIPART) | st.one_of(
    st.sampled_from(
        [
            *("", "application/x-www-form-urlencoded", "multipart/form-data", "text/html", ";"),
            *("multipart/form-data; boundary=", f"{MULTIPART}; boundary=x", f"{MULTIPART}x"),
            f"multipart/mixed; boundary={BOUNDARY}",
            f'Multipart/Form-Data;boundary="{BOUNDARY}"',
            *("multipart/form-data; boundary=" + "x" * 71, "multipart/form-data; boundary=\xff"),
        ]
    ),
    st.lists(st.sampled_from(HEADERS), max_size=5).map(
        lambda some: MULTIPART + b"".join(some).decode("latin-1")
    ),
)


class FormTests(UploadTestCase):
    def outcome(
        self, pieces: Sequence[bytes], length: int | None, content_type: str
    ) -> dict[str, Any]:
        """Return what becomes of a body: that it is refused, or what was kept."""
        receiver = None
        try:
            receiver = self.receiver(length, "k", content_type, CONFIGURATION)
            for piece in pieces:
                receiver.feed(piece)
            upload = self.finish(receiver)
        except RequestError as error:
            self.check_refusal(error)
            if receiver is not None:
                receiver.abandon()
            assert self.spool.used == 0
            assert not list(self.uploads.iterdir())
            return {"refused": True}  # for which of several reasons may depend on the pieces
        kept = files(upload)
        self.submissions.discard_upload(upload.directory, upload.upload_size, "")
        assert self.spool.used == 0
        besides = 8192 * len(kept)
        assert upload.upload_size == sum(map(len, pieces)) + besides
        assert sum(map(len, kept.values())) < upload.upload_size
        request = upload.request
        assert set(kept) == {f"submission/{f.field}/{f.filename}" for f in request.submission}
        for text in (request.evaluator_cmd, request.directory, request.repository.url):
            assert len(text.encode()) <= FIELD
        return {"request": request, "digest": upload.form_digest, "files": kept}

    def check_refusal(self, error: RequestError) -> None:
        """Hold that a refusal can be sent, and does not show all of what a stranger has sent."""
        assert type(error) in ERROR_STATUSES
        assert error.detail
        assert len(f"{error.detail}{error.extra_members}".encode()) < 4096

    @given(mutated(BODIES, DELIMITERS), CONTENT_TYPES, st.booleans(), long_chunkings)
    def test_any_body_is_parsed_as_a_form_or_refused_however_it_is_cut(
        self, body: bytes, content_type: str, announced: bool, chunking: Sequence[Chunk]
    ) -> None:
        length = len(body) if announced else None
        whole = self.outcome([body], length, content_type)
        pieces = [piece for piece, _ in chunks_of(body, chunking) if piece]
        assert self.outcome(pieces, length, content_type) == whole

    @given(st.lists(st.binary(max_size=80), min_size=1, max_size=5), long_chunkings)
    def test_bytes_of_files_are_kept_whatever_they_resemble(
        self, contents: Sequence[bytes], chunking: Sequence[Chunk]
    ) -> None:
        contents = [
            content.replace(b"\xfe", f"\r\n--{BOUNDARY[:-1]}".encode()) for content in contents
        ]
        assume(not any(BOUNDARY.encode() in content for content in contents))
        some = [
            Part(f"submission[f{number}]", content, "x") for number, content in enumerate(contents)
        ]
        body = form([*parts(source=None), *some])
        pieces = [piece for piece, _ in chunks_of(body, chunking) if piece]
        kept = self.outcome(pieces, len(body), MULTIPART)["files"]
        assert list(kept.values()) == contents
