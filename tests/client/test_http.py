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

    def test_words(self) -> None:
        """Each kind has a sentence of one line, whatever the server has said."""
        for kind in FailureKind:
            for base in (BASE, "http://[::1]:8080"):
                words = RequestFailure(kind, "\x1b[31m{base}\n" * 5).explain(base)
                self.assertTrue(words.isprintable(), words)
                self.assertIn(base, words)
        self.assertIn("or try https://a", RequestFailure(FailureKind.NOT_HTTP).explain("http://a"))
        self.assertIn(
            "or try http://a:81", RequestFailure(FailureKind.NOT_TLS).explain("https://a:81")
        )

    def test_final(self) -> None:
        """A failure is final if the next attempt would fail in the same way."""
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

    def test_loopback(self) -> None:
        """The names and addresses of this machine are known."""
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

    def test_header(self) -> None:
        """Names of headers have no case."""
        response = Response(200, {"retry-after": "3"}, b"")
        self.assertEqual(response.get_header("Retry-After"), "3")
        self.assertEqual(response.get_header("Location"), "")

    def test_parse(self) -> None:
        """A body that is not accepted is of another server, of another version, or cut off."""

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

    def test_timeout(self) -> None:
        """A form has the time to be sent at 4096 bytes per second."""
        self.assertEqual(HttpRequest("POST", "", timeout=60).get_timeout(40_960), 70)
