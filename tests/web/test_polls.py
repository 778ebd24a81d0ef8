"""`web.routes.ApiResource`: polls that wait, that are pipelined, and that meet a defect."""

from __future__ import annotations

import re

from tawebeval.config import Configuration, EventBufferSettings, HttpSettings
from tawebeval.evaluations.eventlog import EvaluationEvents
from tests.cases.polls import asking
from tests.cases.settings import with_constants
from tests.cases.web import RawTestCase


class PollTests(RawTestCase):
    configuration = Configuration(
        buffers=with_constants(EventBufferSettings, max_page_bytes=1024)(),
        http=with_constants(
            HttpSettings, idle_timeout=40, rate_window_seconds=20, min_bytes_per_second=1024
        )(),
    )

    def setUp(self) -> None:
        super().setUp()
        self.identifier = self.evaluate()

    def poll(self, query: str = "", *headers: str) -> bytes:
        return asking(query, *headers).replace(b"ID", self.identifier.encode())

    def test_requests_behind_a_waiting_poll_wait_in_the_socket(self) -> None:
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

    def test_client_that_takes_no_more_is_cut_off_soon_however_much_it_took(self) -> None:
        connection = self.connect()
        for _ in range(200):
            connection.send(self.poll())
        connection.channel.pauseProducing()
        for seconds, aborted in ((19, False), (2, True)):
            self.service.reactor.pump([1] * seconds)
            self.assertEqual(connection.aborted, aborted)

    def test_defect_is_logged_and_answered_as_such(self) -> None:
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
