"""`web.server.channel`: requests whose end could be seen in two places, and long heads.

Behind a proxy that sees another end of a request than the daemon does, a stranger could put a
request of his own in front of another's. So nothing of what follows a doubtful head is taken.
"""

from __future__ import annotations

import re

from tests.cases.web import RawTestCase
from tests.fakes.clients import Connection

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

    def test_doubtful_end_of_a_head_is_refused_with_what_follows(self) -> None:
        for name, lines in FRAMINGS.items():
            request = b"POST /nowhere HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n\r\nhello" + HEALTH
            for size in (len(request), 1):
                connection = self.connect()
                for at in range(0, len(request), size):
                    connection.send(request[at : at + size])
                self.assertEqual(statuses(connection), [b"400"], name)
                self.check_raw(connection.answer(), 400)
                self.assertTrue(connection.closed, name)

    def test_request_for_two_hosts_is_400(self) -> None:
        self.refuse(400, b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n")

    def test_http_1_0_has_no_chunks(self) -> None:
        start = b"POST /nowhere HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        self.refuse(400, start + HEALTH, closed=True)

    def test_doubtful_chunk_is_refused_with_what_follows(self) -> None:
        start = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        for name, chunks in CHUNKS.items():
            connection = self.connect()
            connection.send(start + chunks + HEALTH)
            self.assertEqual(statuses(connection), [b"400"], name)
            self.check_raw(connection.answer(), 400)
            self.assertTrue(connection.closed, name)

    def test_extension_of_a_chunk_changes_nothing(self) -> None:
        for chunks in (b"5;a=b\r\nhello\r\n0;c\r\n\r\n", b'5;a=";"\r\nhello\r\n0\r\nX: y\r\n\r\n'):
            connection = self.connect()
            start = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.send(start + chunks + HEALTH)
            self.assertEqual(statuses(connection), [b"404", b"200"])

    def test_request_of_bare_line_feeds_is_refused_once(self) -> None:
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
        self.refuse(414, line.replace(b"?", b"?x"), closed=True)
        header = b"X:".ljust(8192, b"x") + b"\r\n"
        connection.send(HEALTH.removesuffix(b"\r\n") + header + b"\r\n")
        self.assertEqual(connection.answer().status, 200)
        self.refuse(431, b"GET /health HTTP/1.1\r\n" + b"X" + header, closed=True)
        self.refuse(431, b"GET /health HTTP/1.1\r\n" + b"X:".ljust(9000, b"x"), closed=True)
