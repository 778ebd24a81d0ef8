"""`web.access_log`: requests are counted, and logged where that is wanted."""

from __future__ import annotations

from typing import Any

from twisted.logger import LogEvent, capturedLogs, formatEvent

from tawebeval.config import Configuration, HttpSettings
from tawebeval.core.pages import EventPage
from tawebeval.evaluations.event_requests import EventRequests
from tawebeval.sandbox.workspace import derive_log_pseudonym
from tawebeval.web.access_log import UNKNOWN_ROUTE, RouteTable
from tawebeval.web.auth import EVENTS_ROUTE
from tawebeval.web.server.interface import CLIENT_GONE_STATUS
from tests.cases.settings import with_constants
from tests.cases.web import WebTestCase
from tests.fakes.clients import MULTIPART, Connection, form, parts

STATUS = "/evaluation/<identifier>"


class TrafficTestCase(WebTestCase):
    """A service with one evaluation, and what is counted from then on."""

    configuration = Configuration(http=with_constants(HttpSettings, max_line_bytes=1024)())

    def setUp(self) -> None:
        super().setUp()
        self.identifier = self.evaluate()
        self.request_log = self.service.context.request_log
        self.request_log.response_counts.clear()
        self.request_log.response_durations.clear()

    def events(self, query: str = "") -> str:
        """Return the path of a page."""
        return f"/evaluation/{self.identifier}/events{query}"

    def assert_counted(self, *expected: tuple[str, str, int]) -> None:
        """Hold that just these were counted, and begin anew."""
        self.assertEqual(sorted(self.request_log.response_counts.elements()), sorted(expected))
        self.request_log.response_counts.clear()

    def timed(self) -> dict[str, int]:
        """Return how many of each route had a time."""
        return {
            route: list(seconds.list_buckets())[-1][1]
            for route, seconds in self.request_log.response_durations.items()
        }

    def ask_raw(self, line: str, **headers: str) -> Connection:
        """Send a request without a body."""
        connection = self.connect()
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection.send(f"{line} HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n".encode())
        return connection


class CountTests(TrafficTestCase):
    """What is counted."""

    def test_routes(self) -> None:
        """By method, route and status, never by what a stranger has made up."""
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

    def test_known(self) -> None:
        """Whatever is counted is of a method and a route that are known before."""
        known = list(self.service.routes.list_routes())
        self.assertEqual(len(set(known)), len(known))
        for method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "BREW"):
            for path in ("/evaluate", self.events(), f"/evaluation/{self.identifier}", "/x", "*"):
                self.assertIn(
                    self.service.routes.match_route(method.encode(), path.encode()), known
                )

    def test_polls(self) -> None:
        """Both roads count alike: pages, refusals, and clients that go while they wait."""
        self.ask_raw(f"GET {self.events()}")
        self.assert_counted(("GET", EVENTS_ROUTE, 200))
        self.ask_raw(f"GET {self.events('?after=9')}")
        self.assert_counted(("GET", EVENTS_ROUTE, 400))
        waiting = self.ask_raw(f"GET {self.events('?wait=5')}")
        self.assert_counted()
        waiting.lose()
        self.assert_counted(("GET", EVENTS_ROUTE, CLIENT_GONE_STATUS))
        waiting = self.ask_raw(f"GET {self.events('?wait=5')}")
        self.service.reactor.advance(5)
        self.assertTrue(waiting.received)
        waiting.lose()
        self.assert_counted(("GET", EVENTS_ROUTE, 200))

    def test_statuses(self) -> None:
        """A refusal is the same number whoever has refused."""
        self.ask_raw(f"GET {self.events('?after=9')}")
        self.assertEqual(list(self.request_log.response_counts.values()), [1])

    def test_times(self) -> None:
        """What waits for an evaluation has no time; a poll that does not has, on both roads."""
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

    def test_time(self) -> None:
        """The time of a poll is what passes while it is answered."""
        read_page = EventRequests.read_page_now

        def read_slowly(*arguments: Any, **settings: Any) -> EventPage:
            self.service.reactor.advance(0.25)
            return read_page(*arguments, **settings)

        self.patch(EventRequests, "read_page_now", read_slowly)
        self.ask_raw(f"GET {self.events()}")
        self.ask_raw(f"GET {self.events('?after=9')}")
        self.assertEqual(self.request_log.response_durations[EVENTS_ROUTE].sum, 0.5)

    def test_upload(self) -> None:
        """A form's time begins when it has come: before it is the client's."""
        body = form(parts())
        connection = self.connect()
        head = f"POST /evaluate HTTP/1.1\r\nHost: a\r\nContent-Type: {MULTIPART}\r\n"
        connection.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-1])
        self.service.reactor.advance(7)
        connection.send(body[-1:])
        self.assert_counted(("POST", "/evaluate", 200))
        self.assertEqual(self.request_log.response_durations["/evaluate"].sum, 0)

    def test_refused_early(self) -> None:
        """A form that is refused before it has come counts once, for its route."""
        connection = self.connect()
        connection.send(
            b"POST /evaluate HTTP/1.1\r\nHost: a\r\nContent-Type: text/plain\r\n"
            b"Content-Length: 9\r\n\r\nabc"
        )
        self.assertIn(b"415", connection.received)
        connection.lose()
        self.assert_counted(("POST", "/evaluate", 415))

    def test_no_request(self) -> None:
        """What is no request counts, too; who says nothing does not."""
        self.connect().send(b"nonsense\r\n\r\n")
        self.assert_counted((UNKNOWN_ROUTE, UNKNOWN_ROUTE, 400))
        self.connect().send(b"GET /" + b"x" * 2000 + b" HTTP/1.1\r\n")
        self.assert_counted((UNKNOWN_ROUTE, UNKNOWN_ROUTE, 414))
        for data in (b"", b"GET / HTTP/1.1\r\nHost:"):
            connection = self.connect()
            connection.send(data)
            connection.lose()
        self.assert_counted()

    def test_all_routes(self) -> None:
        """The name of the pages' route, which the fast writes by itself, is the real one."""
        self.assertEqual(
            RouteTable(self.service.app).match_route(b"GET", self.events().encode()),
            ("GET", EVENTS_ROUTE),
        )


class LogTests(TrafficTestCase):
    """The access log."""

    def setUp(self) -> None:
        super().setUp()
        logs = capturedLogs()
        self.logged: list[LogEvent] = logs.__enter__()
        self.addCleanup(logs.__exit__, None, None, None)
        self.request_log.is_enabled = True

    def lines(self) -> list[str]:
        """Return what was logged, and begin anew."""
        found = [formatEvent(event) for event in self.logged if "client" in event]
        self.logged.clear()
        return found

    def test_off(self) -> None:
        """Nothing is logged unless that is wanted."""
        self.request_log.is_enabled = False
        self.ask_raw(f"GET {self.events()}")
        self.ask_raw("nonsense")
        self.assertEqual(self.lines(), [])

    def test_lines(self) -> None:
        """Both roads write the same, and evaluations have their names in the log."""
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

    def test_names(self) -> None:
        """The name in the log is of the whole identifier, with the daemon's name in it."""
        self.ask_raw(f"GET /evaluation/a-{self.identifier}/events")
        (line,) = self.lines()
        self.assertIn(f"/evaluation/{derive_log_pseudonym(f'a-{self.identifier}')}/events", line)

    def test_secrets(self) -> None:
        """There is no token, no query and no identifier in it, however it is written."""
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

    def test_long_path(self) -> None:
        """A path of a stranger does not fill the log."""
        self.ask_raw("GET /" + "x" * 900)
        (line,) = self.lines()
        self.assertLess(len(line), 300)

    def test_no_request(self) -> None:
        """What is no request has a line."""
        self.connect().send(b"nonsense\r\n\r\n")
        self.assertEqual(self.lines(), ["127.0.0.1 '' other - 400 0 0.000000"])
