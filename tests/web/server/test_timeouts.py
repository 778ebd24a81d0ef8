"""`web.server.channel`: clients that are slow to send, and to take what they asked for."""

from __future__ import annotations

from tawebeval.config import Configuration, EventBufferSettings, HttpSettings
from tests.cases.settings import with_constants
from tests.cases.web import RawTestCase
from tests.fakes.clients import Connection, form, head, parts

START = b"GET /health HTTP/1.1\r\nHost: x\r\n"


class SlowTestCase(RawTestCase):
    """A service with deadlines that are easy to reckon with."""

    configuration = Configuration(
        buffers=with_constants(EventBufferSettings, max_page_bytes=1024)(),
        http=with_constants(
            HttpSettings,
            head_timeout=10,
            rate_window_seconds=20,
            min_bytes_per_second=1024,
            idle_timeout=40,
        )(),
    )

    def advance(self, seconds: float) -> None:
        """Let time pass, second by second, so that one deadline can follow another."""
        while seconds > 0:
            self.service.reactor.advance(min(seconds, 1))
            seconds -= 1

    def check_quiet(self, connection: Connection) -> None:
        """Hold that nothing has happened, and nothing was said."""
        self.assertFalse(connection.closed)
        self.assertEqual(connection.received, b"")


class HeadTests(SlowTestCase):
    def test_connection_without_a_first_or_next_request_gets_no_answer_and_is_closed(self) -> None:
        for begun, seconds in ((b"", 9.9), (START + b"\r\n", 39.9)):
            connection = self.connect()
            if begun:
                connection.send(begun)
                connection.answer()
            self.advance(seconds)
            self.check_quiet(connection)
            self.advance(0.2)
            self.assertEqual((connection.closed, connection.received), (True, b""))

    def test_head_sent_byte_by_byte_is_408(self) -> None:
        for piece in (b"x", b"X: y\r\n"):
            connection = self.connect()
            connection.send(START)
            for _ in range(9):
                self.advance(1)
                connection.send(piece)
                self.check_quiet(connection)
            self.advance(1)
            self.check_raw(connection.answer(), 408)
            self.assertTrue(connection.closed)

    def test_head_that_is_complete_just_before_its_deadline_is_served(self) -> None:
        connection = self.connect()
        for _ in range(3):
            connection.send(START)
            self.advance(9)
            connection.send(b"\r\n")
            self.assertEqual(connection.answer().status, 200)
            self.advance(39)
        self.assertFalse(connection.closed)

    def test_head_deadline_of_a_kept_connection_starts_with_the_next_request(self) -> None:
        for start in (b"G", START, b"GET / HTTP/1.1\r\nX: y"):
            connection = self.connect()
            connection.send(START + b"\r\n")
            connection.answer()
            self.advance(39)
            connection.send(start)
            self.advance(9.9)
            self.check_quiet(connection)
            self.advance(0.2)
            self.check_raw(connection.answer(), 408)

    def test_head_deadline_of_a_pipelined_request_starts_with_that_request(self) -> None:
        for start in (b"G", START, START + b"X: y"):
            connection = self.connect()
            connection.send(START + b"\r\n" + start)
            self.assertIn(b"200 OK", connection.received)
            connection.settle()
            connection.transport.clear()
            self.advance(10)
            self.check_raw(connection.answer(), 408)


class BodyTests(SlowTestCase):
    def upload(self, *, chunked: bool = False) -> tuple[Connection, bytes]:
        """Return a connection on which a form has begun, and its body."""
        body = form(parts(source=b"x" * 60_000))
        return self.begin_form(None if chunked else len(body)), body

    def cut_off(self, connection: Connection) -> None:
        """Hold that a connection is told to be too slow, and then ended."""
        self.check_raw(connection.answer(), 408)
        connection.send(b"x")
        self.advance(5)
        self.assertTrue(connection.aborted)
        connection.lose()
        self.assertEqual(self.service.leftovers(), [])

    def test_body_sent_byte_by_byte_is_408_and_leaves_nothing(self) -> None:
        connection, body = self.upload()
        for at in range(20):
            self.check_quiet(connection)
            connection.send(body[at : at + 1])
            self.advance(1)
        self.cut_off(connection)

    def test_stalled_body_is_408(self) -> None:
        connection, body = self.upload()
        connection.send(body[:50_000])
        self.advance(39.9)
        self.check_quiet(connection)
        self.advance(0.2)
        self.cut_off(connection)

    def test_framing_of_chunks_does_not_count_as_body(self) -> None:
        connection, body = self.upload(chunked=True)
        for at in range(20):
            self.check_quiet(connection)
            for byte in body[5 * at : 5 * at + 5]:
                connection.send(b"1;" + b"x" * 1000 + b"\r\n" + bytes([byte]) + b"\r\n")
            self.advance(1)
        self.cut_off(connection)

    def test_slow_but_steady_body_is_accepted(self) -> None:
        connection, body = self.upload()
        for at in range(0, len(body), 20_480):
            self.check_quiet(connection)
            self.advance(19)
            connection.send(body[at : at + 20_480])
            self.advance(1)
        answer = connection.answer()
        self.assertEqual(answer.status, 200)

    def test_small_body_may_take_one_window(self) -> None:
        connection = self.connect()
        connection.send(head("DELETE /nowhere", {"Content-Length": "2"}) + b"x")
        self.advance(19)
        connection.send(b"x")
        self.check_raw(connection.answer(), 404)

    def test_slow_body_of_an_answered_request_gets_no_second_answer(self) -> None:
        connection = self.connect()
        connection.send(head("POST /evaluate", {"Content-Length": "50", "Content-Type": "x"}))
        self.check_raw(connection.answer(), 415)
        self.advance(4)
        connection.send(b"x")
        self.advance(1)
        self.assertTrue(connection.aborted)
        self.advance(60)
        self.assertEqual(connection.received, b"")

    def test_malformed_rest_of_an_answered_request_gets_no_second_answer(self) -> None:
        connection = self.connect()
        framing = {"Transfer-Encoding": "chunked", "Content-Type": "x"}
        connection.send(head("POST /evaluate", framing))
        self.check_raw(connection.answer(), 415)
        connection.send(b"nonsense\r\n")
        self.assertEqual(connection.received, b"")
        self.assertTrue(connection.closed)


class AnswerTests(SlowTestCase):
    def test_waiting_request_has_no_deadline(self) -> None:
        identifier = self.evaluate()
        for behind in (b"", START):
            connection = self.connect()
            poll = f"GET /evaluation/{identifier}/events?wait=30 HTTP/1.1\r\nHost: x\r\n\r\n"
            connection.send(poll.encode() + behind)
            self.advance(29)
            self.check_quiet(connection)
            self.advance(1)
            self.assertEqual(connection.answer().status, 200)
            connection.lose()

    def test_connection_is_aborted_if_the_client_does_not_read_the_answer_in_time(self) -> None:
        connection = self.connect()
        connection.send(START + b"\r\n")
        connection.channel.write(b"x" * 102_400)
        connection.channel.pauseProducing()
        self.advance(119.9)
        self.assertFalse(connection.aborted)
        self.advance(1)
        self.assertTrue(connection.aborted)

    def test_connection_stays_open_if_the_client_reads_the_answers_in_time(self) -> None:
        connection = self.connect()
        connection.send(START + b"\r\n")
        for _ in range(5):
            connection.channel.pauseProducing()
            self.advance(10)
            connection.channel.pauseProducing()
            self.advance(19)
            connection.channel.resumeProducing()
            self.advance(2)
            connection.send(START + b"\r\n")
            self.assertFalse(connection.closed)
            self.assertFalse(connection.aborted)

    def test_closing_connection_is_aborted_if_the_client_does_not_read_the_rest(self) -> None:
        for start in (b"GET /health HTTP/1.0\r\n\r\n", b"nonsense\r\n\r\n"):
            connection = self.connect()
            connection.send(start)
            self.assertTrue(connection.closed)
            self.advance(19)
            self.assertFalse(connection.aborted)
            self.advance(2)
            self.assertTrue(connection.aborted)

    def test_pipelined_request_waits_until_the_client_takes_the_previous_answer(self) -> None:
        connection = self.connect()
        connection.take_no_more()
        connection.send((START + b"\r\n") * 20)
        for count in range(1, 21):
            self.assertEqual(connection.received.count(b"200 OK"), count)
            connection.channel.resumeProducing()
        self.assertFalse(connection.closed)
        connection.lose()
