"""`web.fastpath`: the fast path answers with the same bytes as the general path."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.web.http import datetimeToString

from tawebeval.config import Configuration, EventBufferSettings, HttpSettings
from tawebeval.evaluations.reading import EvaluationEvents
from tawebeval.web.server import request
from tests.cases.polls import (
    CONFIGURATIONS,
    HOSTLESS,
    NOT_PLAIN,
    PLAIN,
    STEPS,
    TOKEN,
    asking,
    check_alike,
)
from tests.cases.web import RawTestCase
from tests.fakes.world import EPOCH


class EqualityTests(RawTestCase):
    """Both paths, side by side."""

    @settings(deadline=None, max_examples=100)
    @example("usual", [(asking("?after=1wait=2"), 0, None)])
    @example(
        "tokens", [(asking("", f"Authorization: Bearer {TOKEN}", "Host: a", "Host: b"), 0, None)]
    )
    @example("usual", [(asking("", "Host: .."), 0, None)])
    @example("usual", [(HOSTLESS, 0, None)])
    @example("usual", [(asking("?wait=2"), 0, None), "leave"])
    @example("usual", ["stop", (asking("?wait=0", "Host: a"), 0, None)])
    @example("little", [(asking("", *["X: y"] * 5), 0, None)])
    @example("little", [(asking("?after=" + "9" * 100), 0, None)])
    @example("little", [(asking("", "X: " + "y" * 100, "Y: " + "y" * 100), 0, None)])
    @given(st.sampled_from(sorted(CONFIGURATIONS)), STEPS)
    def test_bytes(self, kind: str, steps: list[Any]) -> None:
        """Whatever is asked, in whatever state, each client gets the same bytes."""
        check_alike(kind, steps)
        self.flushLoggedErrors()


class FastPathTests(RawTestCase):
    """The requests that take the fast path, and what holds for them."""

    configuration = Configuration(
        buffers=EventBufferSettings(max_page_bytes=1024),
        http=HttpSettings(idle_timeout=40, rate_window_seconds=20, min_bytes_per_second=1024),
    )

    def setUp(self) -> None:
        super().setUp()
        self.made = 0
        make = request.ApiRequest.__init__

        def count(request: request.ApiRequest, *arguments: Any, **more: Any) -> None:
            self.made += 1
            make(request, *arguments, **more)

        self.identifier = self.evaluate()
        self.patch(request.ApiRequest, "__init__", count)

    def poll(self, query: str = "", *headers: str) -> bytes:
        """Return a request for a page."""
        return asking(query, *headers).replace(b"ID", self.identifier.encode())

    def test_plain(self) -> None:
        """No request is made for a plain poll, such as clients send them."""
        for query in (
            *("?wait=0", "?after=0&wait=0", "?after=&wait=0", "?after=0&wait=1"),
            *("?wait=1&limit=9", "?after=0&wait=1&limit=9", "?after=&wait=0&limit=1"),
        ):
            for header in PLAIN:
                connection = self.connect()
                connection.send(self.poll(query, header))
                self.service.reactor.advance(1)
                self.assertEqual(connection.answer().status, 200)
                connection.lose()
        self.assertEqual(self.made, 0)

    def test_names(self) -> None:
        """Nor for one of a daemon's with a name, or of another's: that is not known here."""
        connection = self.connect()
        connection.send(self.poll().replace(b"/evaluation/", b"/evaluation/a-"))
        self.check_raw(connection.answer(), 404)
        self.assertEqual(self.made, 0)

    def test_not_plain(self) -> None:
        """One is made for all others."""
        for header in NOT_PLAIN:
            before = self.made
            hosts = ["Host: localhost"] if header == "Host: other.example.org" else []
            self.connect().send(self.poll("", *hosts, header))
            self.assertEqual(self.made, before + 1, header)
        connection = self.connect()
        connection.send(HOSTLESS.replace(b"ID", self.identifier.encode()))
        self.check_raw(connection.answer(), 400)
        for start in (b"HEAD", b"POST"):
            before = self.made
            self.connect().send(self.poll().replace(b"GET", start))
            self.assertEqual(self.made, before + 1, start)

    def test_headers_of_their_own(self) -> None:
        """What one request said in its headers does not hold of the next."""
        connection = self.connect()
        connection.send(self.poll("", "Prefer: wait=2"))
        self.assertEqual(connection.received, b"")
        self.service.reactor.advance(2)
        self.assertIn("Preference-Applied", connection.answer().headers)
        connection.send(self.poll("", "Prefer: wait=x"))
        self.assertIn("Retry-After", connection.answer().headers)
        self.assertEqual(self.made, 0)

    def test_empty_lines(self) -> None:
        """An empty line before each request is passed over, wherever it ends (RFC 9112, 2.2)."""
        connection = self.connect()
        for made in (1, 2, 3):
            for piece in (b"\r\n", self.poll()):
                connection.send(piece)
            self.assertEqual(connection.answer().status, 200)
            self.assertEqual(self.made, made)
        connection.send(self.poll())
        self.assertEqual(connection.answer().status, 200)
        self.assertEqual(self.made, 3)

    def test_behind_one_that_waits(self) -> None:
        """What is sent behind a poll that waits is answered after it, and not kept without end."""
        connection = self.connect()
        connection.send(self.poll("?wait=20"))
        for _ in range(200):
            if connection.transport.producerState == "producing":
                connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        self.assertEqual(connection.received, b"")
        self.assertEqual(connection.transport.producerState, "paused")
        self.assertLess(sum(map(len, connection.channel._dataBuffer)), 20_000)
        self.child.print(b"a\n")
        connection.settle()
        found = re.findall(rb'{"(begin|status)"', connection.received)
        self.assertEqual(found[:2], [b"begin", b"status"])
        self.assertEqual(found.count(b"begin"), 1)
        self.assertGreater(len(found), 100)
        self.assertEqual(connection.transport.producerState, "producing")

    def test_date(self) -> None:
        """It is dated by the time of day, whatever clock there is for deadlines."""
        connection = self.connect()
        connection.send(self.poll())
        shown = datetimeToString(EPOCH + self.service.reactor.seconds())
        self.assertIn(b"\r\nDate: %b\r\n" % shown, connection.received)

    def test_answer_not_taken(self) -> None:
        """While an answer is not taken the next is not made; nor is it waited for for ever."""
        connection = self.connect()
        connection.take_no_more()
        for count in (1, 3, 5):
            connection.send(self.poll())
            connection.send(self.poll())
            self.assertEqual(connection.received.count(b"200 OK"), count)
            for _ in range(2):
                connection.channel.resumeProducing()
                self.assertEqual(connection.received.count(b"200 OK"), count + 1)
        self.assertEqual(self.made, 0)

    def test_never_taken(self) -> None:
        """Who takes an answer no more is cut off soon, however much it has taken before."""
        connection = self.connect()
        for _ in range(200):
            connection.send(self.poll())
        connection.channel.pauseProducing()
        for _ in range(19):
            self.service.reactor.advance(1)
        self.assertFalse(connection.aborted)
        for _ in range(2):
            self.service.reactor.advance(1)
        self.assertTrue(connection.aborted)

    def test_idle(self) -> None:
        """A connection is closed when it is idle, not while its poll waits."""
        connection = self.connect()
        connection.send(self.poll("?wait=30"))
        for _ in range(29):
            self.service.reactor.advance(1)
        self.assertFalse(connection.closed)
        self.service.reactor.advance(1)
        self.assertEqual(connection.answer().status, 200)
        self.service.reactor.advance(39.9)
        self.assertFalse(connection.closed)
        self.service.reactor.advance(0.2)
        self.assertTrue(connection.closed)
        self.assertEqual(self.made, 0)

    def test_defect(self) -> None:
        """A defect of ours is logged and answered as such, at once or later."""
        for query in ("", "?wait=20"):
            connection = self.connect()
            if query:
                connection.send(self.poll(query))
            defect = self.patch(EvaluationEvents, "read_now", lambda *_, **__: 1 // 0)
            if query:
                self.child.print(b"a\n")
            else:
                connection.send(self.poll(query))
            answer = connection.answer()
            self.assertEqual(answer.status, 500)
            self.assertEqual(answer.headers["Content-Type"], "application/problem+json")
            self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
            connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            self.assertEqual(connection.answer().status, 200)
            defect.restore()
