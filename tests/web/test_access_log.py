"""`web.routes`: requests are counted, and logged where that is wanted."""

from __future__ import annotations

from typing import Any

from twisted.logger import LogEvent, capturedLogs, formatEvent

from tawebeval.config import Configuration, HttpSettings
from tawebeval.core.events import EventPage
from tawebeval.evaluations.reading import EventReader
from tawebeval.sandbox.workspace import derive_log_pseudonym
from tawebeval.web.auth import EVENTS_ROUTE
from tawebeval.web.server.channel import CLIENT_GONE_STATUS
from tawebeval.web.server.messages import UNKNOWN_ROUTE
from tests.cases.settings import with_constants
from tests.cases.web import WebTestCase
from tests.fakes.clients import Connection, form, head, parts

STATUS = "/evaluation/<identifier>"


class TrafficTestCase(WebTestCase):
    """A service with one evaluation, and what is counted from then on."""

    configuration = Configuration(http=with_constants(HttpSettings, max_line_bytes=1024)())

    def setUp(self) -> None:
        super().setUp()
        self.identifier = self.evaluate()
        self.request_log = self.service.site.request_log
        self.request_log.response_counts.clear()
        self.request_log.response_durations.clear()

    def events(self, query: str = "") -> str:
        return f"/evaluation/{self.identifier}/events{query}"

    def assert_counted(self, *expected: tuple[str, str, int]) -> None:
        """Hold that just these were counted, and begin anew."""
        self.assertEqual(sorted(self.request_log.response_counts.elements()), sorted(expected))
        self.request_log.response_counts.clear()

    def timed(self) -> dict[str, int]:
        return {
            route: list(seconds.list_buckets())[-1][1]
            for route, seconds in self.request_log.response_durations.items()
        }

    def ask_raw(self, line: str, **headers: str) -> Connection:
        connection = self.connect()
        connection.send(head(line, headers))
        return connection


class CountTests(TrafficTestCase):
    def test_requests_are_counted_by_known_method_route_and_status(self) -> None:
        for line, counted in (
            ("GET /health", ("GET", "/health", 200)),
            ("HEAD /health", ("HEAD", "/health", 200)),
            (f"GET /evaluation/{self.identifier}", ("GET", STATUS, 200)),
            ("GET //evaluation//x", ("GET", STATUS, 404)),
            ("GET /evaluation/%ff", ("GET", STATUS, 400)),
            ("GET /nothing", ("GET", UNKNOWN_ROUTE, 404)),
            ("POST /health", ("POST", UNKNOWN_ROUTE, 405)),
            ("BREW /health", (UNKNOWN_ROUTE, UNKNOWN_ROUTE, 405)),
            ("OPTIONS /health", ("OPTIONS", UNKNOWN_ROUTE, 204)),
            ("GET /evaluation_events", ("GET", "/evaluation_events", 400)),
        ):
            self.ask_raw(line)
            self.assert_counted(counted)

    def test_only_known_methods_and_routes_are_counted(self) -> None:
        known = list(self.service.application.list_routes())
        self.assertEqual(len(set(known)), len(known))
        for method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "BREW"):
            for path in ("/evaluate", self.events(), f"/evaluation/{self.identifier}", "/x", "*"):
                self.assertIn(
                    self.service.application.match_route(method.encode(), path.encode())[:2], known
                )

    def test_only_answers_that_wait_for_no_evaluation_have_a_duration(self) -> None:
        self.ask_raw(f"GET {self.events()}")
        self.assertEqual(self.timed(), {EVENTS_ROUTE: 1})
        self.ask_raw(f"GET {self.events('?after=9')}")
        self.assertEqual(self.timed(), {EVENTS_ROUTE: 2})
        self.ask_raw(f"GET {self.events('?wait=5')}")
        self.service.reactor.advance(5)
        self.ask_raw(f"GET {self.events('?wait=5')}").lose()
        self.assert_counted(
            *[("GET", EVENTS_ROUTE, 200)] * 2,
            ("GET", EVENTS_ROUTE, 400),
            ("GET", EVENTS_ROUTE, CLIENT_GONE_STATUS),
        )
        self.ask_raw(f"GET {self.events()}", Accept="application/jsonl")
        self.ask_raw(f"DELETE /evaluation/{self.identifier}")
        self.service.world.end()
        self.assert_counted(("GET", EVENTS_ROUTE, 200), ("DELETE", STATUS, 204))
        self.assertEqual(self.timed(), {EVENTS_ROUTE: 2})

    def test_duration_of_a_poll_is_the_time_to_answer(self) -> None:
        read_page = EventReader.read_page_now

        def read_slowly(*arguments: Any, **settings: Any) -> EventPage:
            self.service.reactor.advance(0.25)
            return read_page(*arguments, **settings)

        self.patch(EventReader, "read_page_now", read_slowly)
        self.ask_raw(f"GET {self.events()}")
        self.ask_raw(f"GET {self.events('?after=9')}")
        self.assertEqual(self.request_log.response_durations[EVENTS_ROUTE].sum, 0.5)

    def test_duration_of_a_form_begins_at_its_last_byte(self) -> None:
        body = form(parts())
        connection = self.begin_form(len(body))
        connection.send(body[:-1])
        self.service.reactor.advance(7)
        connection.send(body[-1:])
        self.assert_counted(("POST", "/evaluate", 200))
        self.assertEqual(self.request_log.response_durations["/evaluate"].sum, 0)

    def test_form_that_is_refused_early_is_counted_once(self) -> None:
        connection = self.connect()
        connection.send(
            b"POST /evaluate HTTP/1.1\r\nHost: a\r\nContent-Type: text/plain\r\n"
            b"Content-Length: 9\r\n\r\nabc"
        )
        self.assertIn(b"415", connection.received)
        connection.lose()
        self.assert_counted(("POST", "/evaluate", 415))

    def test_malformed_request_is_counted_and_a_silent_connection_is_not(self) -> None:
        self.connect().send(b"nonsense\r\n\r\n")
        self.assert_counted((UNKNOWN_ROUTE, UNKNOWN_ROUTE, 400))
        self.connect().send(b"GET /" + b"x" * 2000 + b" HTTP/1.1\r\n\r\n")
        self.assert_counted((UNKNOWN_ROUTE, UNKNOWN_ROUTE, 414))
        for data in (b"", b"GET / HTTP/1.1\r\nHost:"):
            connection = self.connect()
            connection.send(data)
            connection.lose()
        self.assert_counted()


class LogTests(TrafficTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.logged: list[LogEvent] = self.enterContext(capturedLogs())
        self.request_log.is_enabled = True

    def lines(self) -> list[str]:
        found = [formatEvent(event) for event in self.logged if "client" in event]
        self.logged.clear()
        return found

    def test_nothing_is_logged_unless_enabled(self) -> None:
        self.request_log.is_enabled = False
        self.ask_raw(f"GET {self.events()}")
        self.ask_raw("nonsense")
        self.assertEqual(self.lines(), [])

    def test_polls_and_waiting_polls_are_logged_with_the_pseudonym(self) -> None:
        path = f"/evaluation/{derive_log_pseudonym(self.identifier)}/events"
        size = len(self.ask_raw(f"GET {self.events('?after=')}").answer().body)
        self.assertEqual(self.lines(), [f"127.0.0.1 '' GET {path} 200 {size} 0.000000"])
        size = len(self.ask_raw(f"GET {self.events('?after=9')}").answer().body)
        self.assertEqual(self.lines(), [f"127.0.0.1 '' GET {path} 400 {size} 0.000000"])
        waiting = self.ask_raw(f"GET {self.events('?wait=5')}")
        self.service.reactor.advance(5)
        size = len(waiting.answer().body)
        self.assertEqual(self.lines(), [f"127.0.0.1 '' GET {path} 200 {size} 5.000000"])
        waiting = self.ask_raw(f"GET {self.events('?wait=5')}")
        self.service.reactor.advance(2)
        waiting.lose()
        self.assertEqual(self.lines(), [f"127.0.0.1 '' GET {path} 499 0 2.000000"])

    def test_log_pseudonym_is_derived_from_the_whole_identifier(self) -> None:
        self.ask_raw(f"GET /evaluation/a-{self.identifier}/events")
        (line,) = self.lines()
        self.assertIn(f"/evaluation/{derive_log_pseudonym(f'a-{self.identifier}')}/events", line)

    def test_token_query_and_identifier_are_not_logged(self) -> None:
        written = self.identifier[:5] + f"%{ord(self.identifier[5]):02x}" + self.identifier[6:]
        for path in (self.events("?secret=1"), f"/evaluation/{written}", f"/x/{self.identifier}"):
            self.ask_raw(f"GET {path}", Authorization="Bearer secret")
        self.ask_raw(f"GET /evaluation_events?evaluation={self.identifier}&secret")
        self.service.reactor.advance(60)
        logged: Any = self.lines()
        self.assertEqual(len(logged), 4)
        for line in logged:
            self.assertNotIn(self.identifier, line)
            self.assertNotIn("secret", line)

    def test_long_path_is_cut_in_the_log(self) -> None:
        self.ask_raw("GET /" + "x" * 900)
        (line,) = self.lines()
        self.assertLess(len(line), 300)

    def test_malformed_request_has_a_line(self) -> None:
        self.connect().send(b"nonsense\r\n\r\n")
        self.assertEqual(self.lines(), ["127.0.0.1 '' other - 400 0 0.000000"])
