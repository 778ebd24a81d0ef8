"""`web.server.channel`: malformed requests, ambiguous ends, private names of Twisted."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from twisted.protocols.basic import LineReceiver
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.http import HTTPChannel, Request

from tawebeval import web
from tawebeval.sandbox.workspace import derive_directory_name
from tawebeval.web.server.channel import TWISTED_PRIVATE_NAMES
from tests.cases.web import RawTestCase
from tests.fakes.clients import MULTIPART, Connection, form, head, parts
from twisted import version  # type: ignore[attr-defined]


class MalformedTests(RawTestCase):
    """What is no request, or none that can be taken."""

    def test_malformed_request_line_or_header_is_400_and_closes(self) -> None:
        for request in (
            b"hello\r\n\r\n",
            b"GET /health\r\n\r\n",
            b"GET /health HTTP/1.1 x\r\n\r\n",
            b"GET /health HTTP/9.9\r\n\r\n",
            b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        ):
            self.refuse(400, request, closed=True)

    def test_tls_client_gets_plain_text_at_once(self) -> None:
        for hello in (b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\n" * 500):
            connection = self.connect()
            connection.send(hello)
            answer = connection.answer()
            self.check_raw(answer, 400)
            self.assertTrue(connection.closed)
            self.assertIn("use http:// in place of https://", answer.json()["detail"])

    def test_long_request_line_is_414_and_a_long_header_431(self) -> None:
        self.refuse(414, b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", closed=True)
        self.refuse(414, b"GET /" + b"x" * 32_768, closed=True)
        self.refuse(431, b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", closed=True)
        self.refuse(431, b"GET / HTTP/1.1\r\nX: " + b"x" * 32_768, closed=True)

    def test_invalid_host_header_is_refused_on_every_path(self) -> None:
        for host in (b"..", b"a..b", b"x" * 64, b"[::1", b"[::x]", b"a:x", b"\xff", b"a b"):
            for path in (b"/health", b"/nowhere"):
                self.refuse(400, b"GET %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (path, host))

    def test_http_1_1_needs_one_host_and_1_0_none(self) -> None:
        for start in (b"GET /health", b"GET /nowhere", b"OPTIONS /health", b"POST /evaluate"):
            connection = self.connect()
            for fields, wrong in (
                (b"", "the header is required"),
                (b"Host: x\r\nHost: x\r\n", "the header is repeated; send it once"),
            ):
                connection.send(start + b" HTTP/1.1\r\n" + fields + b"\r\n")
                answer = connection.answer()
                self.check_raw(answer, 400)
                self.assertEqual(answer.json()["detail"], f"Host: {wrong}")
            connection.send(b"GET /health HTTP/1.1\r\nHost:\r\n\r\n")
            self.assertEqual(connection.answer().status, 200)

    def test_headers_that_are_not_utf8_are_refused_or_ignored(self) -> None:
        for line, name, status in (
            ("POST /evaluate", b"Idempotency-Key", 400),
            ("POST /evaluate", b"Content-Type", 400),
            ("POST /evaluate", b"Authorization", 415),
            ("GET /evaluation/x/events", b"Prefer", 404),
        ):
            answer = self.exchange_bytes(
                line.encode() + b" HTTP/1.1\r\nHost: x\r\n" + name + b": \xff\r\n\r\n"
            )
            self.check_raw(answer, status)

    def test_malformed_request_targets_are_400_or_404(self) -> None:
        for target in (
            *("/../x", "http://[/x", "health", "%", "/%", "/evaluation/%00/events"),
            *("/evaluation/%ff/events", "/%ff", "/evaluation/%c3%28"),
        ):
            answer = self.exchange(f"GET {target}")
            self.assertIn(answer.status, (400, 404), target)
            self.check_raw(answer, answer.status)

    def test_asterisk_is_for_options_only(self) -> None:
        connection = self.connect()
        connection.request("GET *")
        answer = connection.answer()
        self.assertIn(answer.status, (400, 404, 405))
        self.assertEqual(answer.headers["Content-Type"], "application/problem+json")
        connection.request("OPTIONS *")
        self.assertEqual(connection.answer().status, 204)

    def test_connection_closes_if_close_is_among_the_connection_options(self) -> None:
        for options in ("close, x", "x,close", "Close", "x\r\nConnection: close"):
            connection = self.connect()
            connection.send(head("GET /health", {"Connection": options}))
            self.assertEqual(connection.answer().headers["Connection"], "close", options)
            self.assertTrue(connection.closed, options)

    def test_methods_in_lower_case_are_501(self) -> None:
        identifier = self.evaluate(b"a\nb\n")
        for line in (
            f"get /evaluation/{identifier}/events?after=2",
            f"delete /evaluation/{identifier}",
            "Post /evaluate",
            "get /health",
        ):
            self.refuse(501, head(line, {}), closed=False)
        self.assertEqual(self.page(identifier)["begin"], None)

    def test_one_turn_answers_one_pipelined_request(self) -> None:
        connection = self.connect()
        connection.send(head("GET /health", {}) * 100)
        self.assertEqual(connection.received.count(b"HTTP/1.1 200 OK"), 1)
        self.assertEqual(len(self.service.reactor.getDelayedCalls()), 1)
        connection.settle()
        self.assertEqual(connection.received.count(b"HTTP/1.1 200 OK"), 100)
        self.assertFalse(connection.closed)

    def test_one_turn_reads_64_kib_of_a_body_with_content_length_and_4_kib_otherwise(self) -> None:
        connection = self.connect()
        self.assertEqual(connection.transport.bufferSize, 4096)
        for framing, size in (
            ({"Transfer-Encoding": "chunked"}, 4096),
            ({"Content-Length": "1"}, 65536),
        ):
            connection.send(head("POST /nowhere", framing))
            self.assertEqual(connection.transport.bufferSize, size)
            connection.send(b"1\r\nx\r\n0\r\n\r\n" if size == 4096 else b"x")
            self.assertEqual(connection.answer().status, 404)
            self.assertEqual(connection.transport.bufferSize, 4096)

    def test_disconnect_between_pipelined_requests_leaves_nothing(self) -> None:
        for end in ("lose", "abort"):
            connection = self.connect()
            connection.send(head("GET /health", {}) * 2)
            if end == "abort":
                connection.channel.forceAbortClient()
                connection.settle()
            connection.lose()
            self.assertEqual(connection.received.count(b"HTTP/1.1 200 OK"), 1)
            self.assertEqual(connection.channel.requests, [])
            self.assertEqual(self.service.reactor.getDelayedCalls(), [])


class BodyTests(RawTestCase):
    def test_body_of_1000_bytes_of_a_get_is_ignored(self) -> None:
        self.assertEqual(self.exchange("GET /health", b"x" * 1000).status, 200)

    def test_body_over_64_kib_is_413_for_a_request_without_a_form(self) -> None:
        for line in ("GET /health", "POST /nowhere", "DELETE /evaluation/x"):
            self.refuse(413, head(line, {"Content-Length": "65537"}))
        connection = self.connect()
        connection.send(head("POST /nowhere", {"Transfer-Encoding": "chunked"}))
        for _ in range(16):
            connection.send(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            self.assertEqual(connection.received, b"")
        connection.send(b"1\r\nx\r\n")
        self.check_raw(connection.answer(), 413)

    def test_form_may_be_chunked(self) -> None:
        connection = self.connect()
        start = head("POST /evaluate", {"Content-Type": MULTIPART, "Transfer-Encoding": "chunked"})
        body = form(parts(source=b"x" * 5000))
        connection.send(start)
        for at in range(0, len(body), 1000):
            piece = body[at : at + 1000]
            connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.send(b"0\r\n\r\n")
        answer = connection.answer()
        self.assertEqual(answer.status, 200)
        identifier = answer.json()["evaluation_id"]
        path = (
            self.root
            / "evaluations"
            / derive_directory_name(identifier)
            / "submission/source/solution.py"
        )
        self.assertEqual(path.read_bytes(), b"x" * 5000)


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

FRAMINGS = {
    "both": b"Content-Length: 5\r\nTransfer-Encoding: chunked",
    "both, the other way": b"Transfer-Encoding: chunked\r\nContent-Length: 5",
    "twice": b"Content-Length: 5\r\nContent-Length: 5",
    "twice, and different": b"Content-Length: 5\r\nContent-Length: 6",
    "a list": b"Content-Length: 5, 5",
    "a sign": b"Content-Length: +5",
    "negative": b"Content-Length: -5",
    "hexadecimal": b"Content-Length: 0x5",
    "an underscore": b"Content-Length: 1_0",
    "a point": b"Content-Length: 5.0",
    "nothing": b"Content-Length:",
    "other digits": "Content-Length: \u0665".encode(),
    "a space within": b"Content-Length: 5 5",
    "thousands of digits": b"Content-Length: " + b"9" * 5000,
    "a coding that there is not": b"Transfer-Encoding: xchunked",
    "identity": b"Transfer-Encoding: identity",
    "identity and a length": b"Content-Length: 5\r\nTransfer-Encoding: identity",
    "identity, then chunked": b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "chunked twice, in a list": b"Transfer-Encoding: chunked, chunked",
    "two codings": b"Transfer-Encoding: gzip, chunked",
    "a vertical tab": b"Transfer-Encoding: \x0bchunked",
    "in quotes": b'Transfer-Encoding: "chunked"',
    "a space before the colon": b"Content-Length : 5",
    "a tab before the colon": b"Transfer-Encoding\t: chunked",
    "a space before the name": b" Content-Length: 5",
    "a folded header": b"X: y\r\n Content-Length: 5",
    "a folded coding": b"Transfer-Encoding:\r\n chunked",
    "an empty name": b": 5",
    "a name with NUL": b"Content-Length\x00: 5",
    "a value with NUL": b"X: \x00",
    "a bare LF": b"X: y\nContent-Length: 5",
    "a bare CR": b"X: y\rContent-Length: 5",
    "no colon": b"Content-Length 5",
}

CHUNKS = {
    "a sign": b"+5\r\nhello\r\n0\r\n\r\n",
    "negative": b"-5\r\nhello\r\n0\r\n\r\n",
    "a prefix": b"0x5\r\nhello\r\n0\r\n\r\n",
    "a space before": b" 5\r\nhello\r\n0\r\n\r\n",
    "a space behind": b"5 \r\nhello\r\n0\r\n\r\n",
    "an underscore": b"0_5\r\nhello\r\n0\r\n\r\n",
    "nothing": b"\r\nhello\r\n0\r\n\r\n",
    "too short": b"4\r\nhello\r\n0\r\n\r\n",
    "a bare LF": b"5\nhello\n0\n\n\r\n",
    "a bare LF in an extension": b"5;x\ny\r\nhello\r\n0\r\n\r\n",
    "a long extension": b"5;" + b"x" * 2000 + b"\r\nhello\r\n0\r\n\r\n",
    "an endless trailer": b"0\r\n" + b"X: y\r\n" * 20_000,
}


def statuses(connection: Connection) -> list[bytes]:
    """Return the statuses of the answers that have come."""
    connection.settle()
    return re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", connection.received)


class FramingTests(RawTestCase):
    """The same request, in one piece and byte by byte, with another one behind."""

    def test_ambiguous_body_length_is_400_and_closes_the_connection(self) -> None:
        for name, lines in FRAMINGS.items():
            request = b"POST /nowhere HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n\r\nhello" + HEALTH
            for size in (len(request), 1):
                connection = self.connect()
                for at in range(0, len(request), size):
                    connection.send(request[at : at + size])
                self.assertEqual(statuses(connection), [b"400"], name)
                self.check_raw(connection.answer(), 400)
                self.assertTrue(connection.closed, name)

    def test_http_1_0_has_no_chunks(self) -> None:
        start = b"POST /nowhere HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        self.refuse(400, start + HEALTH, closed=True)

    def test_malformed_chunk_is_400_and_closes_the_connection(self) -> None:
        start = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        for name, chunks in CHUNKS.items():
            connection = self.connect()
            connection.send(start + chunks + HEALTH)
            self.assertEqual(statuses(connection), [b"400"], name)
            self.check_raw(connection.answer(), 400)
            self.assertTrue(connection.closed, name)

    def test_chunk_extensions_and_trailers_are_ignored(self) -> None:
        for chunks in (b"5;a=b\r\nhello\r\n0;c\r\n\r\n", b'5;a=";"\r\nhello\r\n0\r\nX: y\r\n\r\n'):
            connection = self.connect()
            start = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.send(start + chunks + HEALTH)
            self.assertEqual(statuses(connection), [b"404", b"200"])

    def test_request_with_bare_line_feeds_is_408(self) -> None:
        connection = self.connect()
        connection.send(HEALTH.replace(b"\r", b""))
        self.assertEqual(connection.received, b"")
        self.service.reactor.advance(20)
        self.check_raw(connection.answer(), 408)

    def test_garbage_after_a_request_is_refused_once(self) -> None:
        for garbage in (b"\0" * 100 + b"\r\n\r\n", b"hello\r\n", b" \r\n", b"\r\n\r\n\r\n"):
            connection = self.connect()
            connection.send(HEALTH + garbage + HEALTH)
            self.assertEqual(statuses(connection), [b"200", b"400"], garbage)
            self.assertTrue(connection.closed)


class HeadTests(RawTestCase):
    def test_100_headers_are_served_and_101_refused(self) -> None:
        connection = self.connect()
        start = HEALTH.removesuffix(b"\r\n")
        connection.send(start + b"X: y\r\n" * 99 + b"\r\n")
        self.assertEqual(connection.answer().status, 200)
        self.refuse(431, start + b"X: y\r\n" * 100 + b"\r\n", closed=True)

    def test_32_kib_of_headers_are_served_and_a_byte_more_refused(self) -> None:
        rest = HEALTH.removesuffix(b"\r\n") + (b"X: " + b"y" * 8000 + b"\r\n") * 4
        last = 32_768 - len(rest) - 2
        connection = self.connect()
        connection.send(rest + b"Y: ".ljust(last - 2, b"y") + b"\r\n\r\n")
        self.assertEqual(connection.answer().status, 200)
        connection.send(rest + b"Y: ".ljust(last - 2, b"y") + b"\r\n\r\n")
        self.assertEqual(connection.answer().status, 200)
        self.refuse(431, rest + b"Y: ".ljust(last - 1, b"y") + b"\r\n\r\n", closed=True)

    def test_8_kib_in_a_line_are_served_and_a_byte_more_refused(self) -> None:
        line = b"GET /health?".ljust(8192 - 9, b"x") + b" HTTP/1.1\r\n"
        connection = self.connect()
        connection.send(line + b"Host: x\r\n\r\n")
        self.assertEqual(connection.answer().status, 200)
        self.refuse(414, line.replace(b"?", b"?x") + b"\r\n", closed=True)
        header = b"X:".ljust(8192, b"x") + b"\r\n"
        connection.send(HEALTH.removesuffix(b"\r\n") + header + b"\r\n")
        self.assertEqual(connection.answer().status, 200)
        self.refuse(431, b"GET /health HTTP/1.1\r\n" + b"X" + header + b"\r\n", closed=True)


TESTED = (26, 10)
"""The newest version whose names were compared; the next one is excluded in pyproject.toml."""

ROOT = Path(__file__).resolve().parents[3]
_NAME = re.compile(r"(?<=\.)_[a-z]\w*|(?<=def )_[a-z]\w*")


def find_names(*texts: str) -> set[str]:
    """Return the private names of attributes and methods in Python code."""
    return {name for text in texts for name in _NAME.findall(text) if not name.endswith("__")}


class PrivateNameTests(SynchronousTestCase):
    """What an upgrade of Twisted may break."""

    def setUp(self) -> None:
        self.twisted = find_names(*map(inspect.getsource, (LineReceiver, HTTPChannel, Request)))

    def test_installed_version_of_twisted_has_all_private_names(self) -> None:
        self.assertLessEqual(
            (version.major, version.minor), TESTED, "compare the names, then raise the bound"
        )
        self.assertEqual(set(TWISTED_PRIVATE_NAMES) - self.twisted, set())

    def test_pyproject_excludes_the_next_version_of_twisted(self) -> None:
        bound = f'<{TESTED[0]}.{TESTED[1] + 1}"'
        self.assertIn(bound, (ROOT / "pyproject.toml").read_text())

    def test_only_channel_py_of_web_uses_private_names_of_twisted(self) -> None:
        used = {}
        for path in Path(web.__file__).parent.rglob("*.py"):
            names = find_names(path.read_text()) & self.twisted
            if names:
                used[path.name] = names
        self.assertEqual(used, {"channel.py": set(TWISTED_PRIVATE_NAMES)})
