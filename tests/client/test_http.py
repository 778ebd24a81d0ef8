"""`client.http`: what a response or a failure means."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from multipart import MultipartParser
from twisted.trial.unittest import SynchronousTestCase

from tawebeval_client.http import (
    Content,
    EvaluationGone,
    Forbidden,
    HttpRequest,
    InvalidRequest,
    NamedFile,
    Refused,
    Repetition,
    RequestFailure,
    Response,
    SubmissionForm,
    UnknownEvaluation,
    build_refusal,
    is_loopback,
    make_printable,
    parse_response,
)

BASE = "https://judge.example.org/base"


class FailureTests(SynchronousTestCase):
    """`RequestFailure`."""

    def test_failure_is_permanent_if_the_next_attempt_would_fail_alike(self) -> None:
        local = "http://localhost"
        for repetition, base, server_has_answered, can_wait, final in (
            (Repetition.ALWAYS, BASE, False, False, False),
            (Repetition.NEVER, BASE, True, True, True),
            (Repetition.IF_NAME_IS_KNOWN, BASE, False, True, True),
            (Repetition.IF_NAME_IS_KNOWN, BASE, True, False, False),
            (Repetition.IF_SERVER_MAY_START, BASE, False, False, False),
            (Repetition.IF_SERVER_MAY_START, local, False, False, True),
            (Repetition.IF_SERVER_MAY_START, local, True, False, False),
            (Repetition.IF_SERVER_MAY_START, local, False, True, False),
        ):
            found = RequestFailure("x", repetition).is_permanent(
                base, server_has_answered=server_has_answered, can_wait=can_wait
            )
            self.assertEqual(found, final, (repetition, base, server_has_answered, can_wait))

    def test_message_has_no_control_characters(self) -> None:
        self.assertEqual(RequestFailure("\x1b[31m\n").message, "\\x1b[31m\\n")

    def test_names_and_addresses_of_this_machine_are_loopback(self) -> None:
        for base, expected in (
            ("http://localhost:8080", True),
            ("http://127.0.0.9", True),
            ("http://[::1]:8080", True),
            ("http://192.0.2.1", False),
            ("http://judge.example.org", False),
            ("", False),
        ):
            self.assertIs(is_loopback(base), expected, base)


class ResponseTests(SynchronousTestCase):
    """`Response` and `parse_response`."""

    def test_header_names_ignore_case(self) -> None:
        response = Response(200, {"retry-after": "3"}, b"")
        self.assertEqual(response.get_header("Retry-After"), "3")
        self.assertEqual(response.get_header("Location"), "")

    def test_error_about_an_unparsable_body_names_likely_causes(self) -> None:
        def refuse(response: Response) -> None:
            raise ValueError("odd")

        json = {"content-type": "Application/JSON; charset=utf-8"}
        other = "http://a is not a tawebeval server: it sends "
        for headers, body, words, repetition in (
            ({}, b"{}", f"{other}a body of no declared type", Repetition.NEVER),
            ({"content-type": "text/html"}, b"", f"{other}text/html", Repetition.NEVER),
            (json, b"{}", "http://a: odd", Repetition.NEVER),
            (json, b'{"a', "the connection to http://a broke: odd", Repetition.ALWAYS),
        ):
            failure = parse_response("http://a", Response(200, headers, body), refuse)
            assert isinstance(failure, RequestFailure)
            self.assertTrue(failure.message.startswith(words), failure)
            self.assertIs(failure.repetition, repetition)
        response = Response(200, json, b"1")
        self.assertEqual(parse_response("http://a", response, lambda one: one.body), b"1")

    def test_form_may_be_sent_at_4096_bytes_per_second(self) -> None:
        self.assertEqual(HttpRequest("POST", "", timeout=60).get_timeout(40_960), 70)


OTHER_SERVER = "is it a tawebeval server? Check https:// and the path of the URL"


class RefusalTests(SynchronousTestCase):
    """`build_refusal`."""

    def test_status_sets_the_exception_and_the_body_its_message(self) -> None:
        for status, body, kind, words in (
            (301, b"", Refused, f"301 Moved Permanently without an explanation; {OTHER_SERVER}"),
            (400, b'{"message": "no"}', InvalidRequest, "no"),
            (400, b'{"detail": "not"}', InvalidRequest, "not"),
            (401, b"", Forbidden, "401 Unauthorized"),
            (403, b"<html>", Forbidden, "403"),
            (404, b"[" * 100_000, UnknownEvaluation, OTHER_SERVER),
            (405, b"<html>", InvalidRequest, OTHER_SERVER),
            (410, b"[]", EvaluationGone, "410"),
            (499, b'{"message": 5}', InvalidRequest, "499"),
            (501, b"<html>", Refused, "501 Not Implemented"),
        ):
            refusal = build_refusal(status, body)
            self.assertIs(type(refusal), kind)
            self.assertIn(words, str(refusal))
            self.assertEqual(refusal.status, status)

    def test_redirect_names_its_target(self) -> None:
        words = str(build_refusal(302, b"", "https://b/\x1b[31m"))
        self.assertIn("302 Found and names another URL, https://b/\\x1b[31m; is it", words)

    def test_members_of_the_problem_document_are_kept(self) -> None:
        body = json.dumps({"message": "m", "field": "seed", "oldest": "3"}).encode()
        invalid, gone = build_refusal(400, body), build_refusal(410, body)
        assert isinstance(invalid, InvalidRequest)
        assert isinstance(gone, EvaluationGone)
        self.assertEqual((invalid.field, gone.oldest), ("seed", "3"))

    @given(st.text(max_size=50), st.integers(100, 999), st.binary(max_size=20))
    def test_message_has_no_control_characters_and_can_be_encoded(
        self, words: str, status: int, body: bytes
    ) -> None:
        for refusal in (
            build_refusal(status, json.dumps({"message": words}).encode()),
            build_refusal(status, body, words),
        ):
            str(refusal).encode()
            self.assertTrue(str(refusal).isprintable())

    def test_long_message_is_shortened(self) -> None:
        self.assertEqual(make_printable("x" * 9000), "x" * 2000 + "…")


def encode(form: SubmissionForm) -> bytes:
    """Return the body, whose length must be the announced one."""
    with ExitStack() as opened:
        body = form.open_body(opened)
        encoded = b"".join(body.iterate_pieces())
    assert len(encoded) == body.length
    return encoded


def parse(form: SubmissionForm) -> list[tuple[str, str | None, bytes]]:
    """Return name, file name and content of each part, as a server parses them."""
    boundary = form.content_type.partition("boundary=")[2]
    parser = MultipartParser(BytesIO(encode(form)), boundary, memory_limit=1 << 22)
    return [(part.name, part.filename, part.raw) for part in parser]


class FormTests(SynchronousTestCase):
    """`SubmissionForm`."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp())
        self.folder.mkdir()

    def test_form_has_the_name_filename_and_content_of_each_part(self) -> None:
        file = self.folder / "my prog.py"
        file.write_bytes(b"y" * 200_000)
        form = SubmissionForm(
            {"seed": "7", "ü": "é\r\n"},
            {
                "text": "c++ ü",
                "raw": b"\0\r\n--",
                "file": file,
                "named": NamedFile("a/b.c", b"x"),
                "other": NamedFile("z.py", file),
                "empty": b"",
            },
        )
        self.assertEqual(
            parse(form),
            [
                ("seed", None, b"7"),
                ("ü", None, "é\r\n".encode()),
                ("submission[text]", None, "c++ ü".encode()),
                ("submission[raw]", None, b"\0\r\n--"),
                ("submission[file]", "my prog.py", b"y" * 200_000),
                ("submission[named]", "a/b.c", b"x"),
                ("submission[other]", "z.py", b"y" * 200_000),
                ("submission[empty]", None, b""),
            ],
        )

    # A server cannot tell "%22" from an escaped quotation mark, nor can it of a browser's form; the
    # parser takes the base name of a path of Windows.
    @given(st.text(min_size=1, max_size=20).filter(lambda name: not {*name} & {*"%\\"}), st.text())
    def test_any_name_and_text_arrives_unchanged_or_is_refused_before_sending(
        self, filename: str, text: str
    ) -> None:
        submission: dict[str, Content] = {"a": NamedFile(filename, b"x"), "b": text}
        try:
            form = SubmissionForm({"c": text}, submission)
        except ValueError:
            return
        self.assertEqual(
            parse(form),
            [
                ("c", None, text.encode()),
                ("submission[a]", filename, b"x"),
                ("submission[b]", None, text.encode()),
            ],
        )

    def test_invalid_names_and_texts_are_refused_before_sending(self) -> None:
        for fields, submission, words in (
            ({}, {"a": NamedFile("\udcff", b"")}, "submission[a]: must be UTF-8"),
            ({}, {"a": Path("\udcff")}, "submission[a]: must be UTF-8"),
            ({}, {"source": "\udcff"}, "submission[source]: must be UTF-8"),
            ({"seed": "\udcff"}, {}, "seed: must be UTF-8"),
        ):
            error = self.assertRaises(ValueError, SubmissionForm, fields, submission)
            self.assertIn(words, str(error))

    def test_unreadable_and_special_files_are_named(self) -> None:
        os.mkfifo(self.folder / "pipe")
        for name, kind in (("absent", FileNotFoundError), ("pipe", OSError), (".", OSError)):
            path = self.folder / name
            form = SubmissionForm({}, {"a": NamedFile("a", path)})
            error = self.assertRaises(kind, encode, form)
            self.assertEqual(str(error.filename), str(path))

    def test_growth_of_an_open_file_is_not_sent_and_its_shrinking_raises_oserror(self) -> None:
        path = self.folder / "log"
        path.write_bytes(b"x" * 100)
        form = SubmissionForm({}, {"a": path})
        for size, works in ((200, True), (50, False)):
            with ExitStack() as opened:
                path.write_bytes(b"x" * 100)
                body = form.open_body(opened)
                os.truncate(path, size)
                if works:
                    self.assertEqual(len(b"".join(body.iterate_pieces())), body.length)
                else:
                    error = self.assertRaises(OSError, list, body.iterate_pieces())
                    self.assertIn("has changed", error.strerror)
