"""`client.errors`: exceptions from responses."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.client.errors import (
    EvaluationGone,
    Forbidden,
    InvalidRequest,
    Refused,
    UnknownEvaluation,
    build_refusal,
    make_printable,
)

OTHER_SERVER = "is it a tawebeval server? Check https:// and the path of the URL"


class RefusalTests(SynchronousTestCase):
    """`build_refusal`."""

    def test_status_chooses_the_exception_and_the_server_its_words(self) -> None:
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
