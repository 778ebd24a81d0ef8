"""`web.server.messages`: what strangers write into the heads of requests is bounded."""

from __future__ import annotations

import time
from typing import ClassVar

from tawebeval.config import Configuration, HttpSettings
from tawebeval.web.server.messages import MAX_BYTES_PER_HEADER
from tests.cases.web import RawTestCase, Tokens
from tests.fakes.clients import head

MAX_SECONDS = 0.005
TRIES = 5  # the fastest counts: other programs on the machine should not judge

EVENTS = "GET /evaluation/ID/events"
SOCKET = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    "Sec-WebSocket-Version": "13",
}

# The request that reads a header, and how the header begins there.
HEADERS = {
    "Accept": (EVENTS, "*/*"),
    "Accept-Encoding": ("GET /", "gzip"),
    "Authorization": (EVENTS, "Bearer link_"),
    "Connection": (EVENTS, "Upgrade"),
    "Content-Encoding": ("POST /evaluate", "gzip"),
    "Content-Type": ("POST /evaluate", "multipart/form-data; boundary=x"),
    "Cookie": ("GET /", "a=b"),
    "Host": (EVENTS, "localhost"),
    "Idempotency-Key": ("POST /evaluate", "k"),
    "If-None-Match": ("GET /", '"x"'),
    "Last-Event-ID": (EVENTS, "1"),
    "Origin": (EVENTS, "http://localhost"),
    "Prefer": (EVENTS, "wait=0"),
    "Sec-WebSocket-Extensions": (EVENTS, "permessage-deflate"),
    "Sec-WebSocket-Key": (EVENTS, "A"),
    "Upgrade": (EVENTS, "websocket"),
    "X-Forwarded-For": ("GET /", "192.0.2.1"),
    "X-Odd": (EVENTS, "a"),
}

PATTERNS = (
    *(" ", "\t", " \t", ",", ", ", ";", "; ", "=", '"', "\\", '\\"', "%", "*", "\xff"),
    *("a", "a,", "a;", 'a="', "a=b;", "a/b;q=.1,", "1.1, ", "link_ ", "1.", ":", "[", "/"),
)


class HeadTestCase(RawTestCase):
    """A service behind a proxy, with an evaluation of a caller with a token."""

    configuration = Configuration(http=HttpSettings(trusted_proxies=("127.0.0.1",)))
    tokens: ClassVar[Tokens] = {"alice": {}}

    def setUp(self) -> None:
        super().setUp()
        self.authorization = self.headers["alice"]
        self.identifier = self.post(Authorization=self.authorization).json()["evaluation_id"]

    def head(self, line: str, headers: list[tuple[str, str]]) -> bytes:
        """Return the head of a request, with one `Host`."""
        made = head(line.replace("ID", self.identifier), headers)
        named = any(name == "Host" for name, _ in headers)
        return made.replace(b"Host: localhost\r\n", b"", 1) if named else made


class LimitTests(HeadTestCase):
    """Sizes of headers and targets."""

    def test_headers_over_the_limit_are_refused_by_name(self) -> None:
        for name, (line, begin) in HEADERS.items():
            if name in ("Cookie", "Origin", "Sec-WebSocket-Extensions", "X-Odd"):
                continue  # nothing reads them here
            headers = [("Authorization", self.authorization)] * (name != "Authorization")
            headers += [pair for pair in SOCKET.items() if name.startswith(("Sec-", "Conn"))]
            headers += [("Accept", "text/event-stream")] * (name == "Last-Event-ID")
            headers = [pair for pair in headers if pair[0] != name]
            separator = "; a=" if name == "Content-Type" else ", "
            for size, count in ((MAX_BYTES_PER_HEADER, 1), (MAX_BYTES_PER_HEADER // 2, 2)):
                value = (begin + separator).ljust(size, "y")
                self.assertNotEqual(
                    self.exchange_bytes(
                        self.head(line, [*headers, *[(name, value)] * count])
                    ).status,
                    431,
                    (name, count),
                )
                answer = self.check_raw(
                    self.exchange_bytes(
                        self.head(line, [*headers, *[(name, value + "y")] * count])
                    ),
                    431,
                )
                self.assertIn(f"{name}: the header has ", answer.json()["detail"])

    def test_long_targets_are_refused(self) -> None:
        for target, status in (
            ("/".ljust(1024, "x"), 404),
            ("/".ljust(1025, "x"), 414),
            ("/health?" + "a=b&" * 99 + "a=b", 200),
            ("/health?" + "a=b&" * 99 + "a=b;", 414),
        ):
            answer = self.exchange(f"GET {target}", Authorization=self.authorization)
            self.assertEqual(answer.status, status, target[:20])
            if status == 414:
                self.check_raw(answer, 414)


class BoundedTimeTests(HeadTestCase):
    """No head of a request takes the reactor for long, with a token or without."""

    def measure(self, line: str, headers: list[tuple[str, str]]) -> float:
        """Return the seconds of processor time that a request takes at least."""
        request = self.head(line, headers)
        least = 1.0
        for _ in range(TRIES):
            connection = self.connect()
            begin = time.thread_time()
            connection.send(request)
            least = min(least, time.thread_time() - begin)
            connection.lose()
            if least < MAX_SECONDS:
                break
        return least

    def test_repetitive_8_kb_headers_are_parsed_in_milliseconds(self) -> None:
        slow = []
        for name, (line, begin) in HEADERS.items():
            for unit in PATTERNS:
                for size, count in ((3800, 1), (7900, 4)):
                    value = begin + unit * (size // len(unit)) + "x"
                    for authorization in ("", self.authorization):
                        headers = [(name, value)] * count
                        if name.startswith(("Sec-", "Upgrade", "Connection", "X-Odd")):
                            headers += [pair for pair in SOCKET.items() if pair[0] != name]
                        if authorization and name != "Authorization":
                            headers.append(("Authorization", authorization))
                        took = self.measure(line, headers)
                        if took > MAX_SECONDS:
                            slow.append(
                                f"{name} {unit!r} {size} {authorization}: {took * 1000:.1f} ms"
                            )
        self.assertEqual("\n".join(slow), "")

    def test_repetitive_8_kb_targets_are_parsed_in_milliseconds(self) -> None:
        slow = []
        for begin in ("/", "/x?link=", "/evaluation/", "/evaluation/ID/events?", "/evaluations?"):
            for unit in ("&", ";", "a&", "a=%41&", "&link=", "%", "%41", "/", "a/", "../", "-"):
                for authorization in ("", self.authorization):
                    headers = [("Authorization", authorization)] if authorization else []
                    took = self.measure(f"GET {begin}{unit * (8000 // len(unit))}", headers)
                    if took > 2 * MAX_SECONDS:  # 8,000 percent signs take 4 ms to decode
                        slow.append(f"{begin} {unit!r} {authorization}: {took * 1000:.1f} ms")
        self.assertEqual("\n".join(slow), "")
