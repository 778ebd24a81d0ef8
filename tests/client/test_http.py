"""`client.http`: what a response or a failure means."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.client.http import (
    FailureKind,
    HttpRequest,
    RequestFailure,
    Response,
    is_loopback,
    parse_response,
)

BASE = "https://judge.example.org/base"


class FailureTests(SynchronousTestCase):
    """`RequestFailure`."""

    def test_each_kind_of_failure_has_a_sentence_of_one_line(self) -> None:
        for kind in FailureKind:
            for base in (BASE, "http://[::1]:8080"):
                words = RequestFailure(kind, "\x1b[31m{base}\n" * 5).explain(base)
                self.assertTrue(words.isprintable(), words)
                self.assertIn(base, words)
        self.assertIn("or try https://a", RequestFailure(FailureKind.NOT_HTTP).explain("http://a"))
        self.assertIn(
            "or try http://a:81", RequestFailure(FailureKind.NOT_TLS).explain("https://a:81")
        )

    def test_failure_is_permanent_if_the_next_attempt_would_fail_alike(self) -> None:
        for kind, base, server_has_answered, can_wait, final in (
            (FailureKind.BROKEN_CONNECTION, BASE, False, False, False),
            (FailureKind.TIMED_OUT, BASE, False, False, False),
            (FailureKind.UNTRUSTED_CERTIFICATE, BASE, True, True, True),
            (FailureKind.NOT_JSON, BASE, True, True, True),
            (FailureKind.UNKNOWN_HOST, BASE, False, True, True),
            (FailureKind.UNKNOWN_HOST, BASE, True, False, False),
            (FailureKind.CONNECTION_REFUSED, BASE, False, False, False),
            (FailureKind.CONNECTION_REFUSED, "http://localhost", False, False, True),
            (FailureKind.CONNECTION_REFUSED, "http://localhost", True, False, False),
            (FailureKind.CONNECTION_REFUSED, "http://localhost", False, True, False),
        ):
            found = RequestFailure(kind).is_permanent(
                base, server_has_answered=server_has_answered, can_wait=can_wait
            )
            self.assertEqual(found, final, (kind, base, server_has_answered, can_wait))

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

    def test_unparsable_body_is_of_another_server_or_version_or_cut_off(self) -> None:
        def refuse(response: Response) -> None:
            raise ValueError("odd")

        json = {"content-type": "Application/JSON; charset=utf-8"}
        for headers, body, expected in (
            ({}, b"{}", RequestFailure(FailureKind.NOT_JSON, "a body of no declared type")),
            ({"content-type": "text/html"}, b"", RequestFailure(FailureKind.NOT_JSON, "text/html")),
            (json, b"{}", RequestFailure(FailureKind.UNEXPECTED, "odd")),
            (json, b'{"a', RequestFailure(FailureKind.BROKEN_CONNECTION, "odd")),
        ):
            self.assertEqual(parse_response(Response(200, headers, body), refuse), expected)
        response = Response(200, json, b"1")
        self.assertEqual(parse_response(response, lambda one: one.body), b"1")

    def test_form_may_be_sent_at_4096_bytes_per_second(self) -> None:
        self.assertEqual(HttpRequest("POST", "", timeout=60).get_timeout(40_960), 70)
