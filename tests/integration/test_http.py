"""HTTP at its edges: whatever a client sends, it is answered by a problem document."""

from __future__ import annotations

import json

from tests.integration.harness import DaemonTestCase
from tests.integration.raw import Connection, RawAnswer, head_of

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class HttpTests(DaemonTestCase):
    """Byte by byte; nothing is evaluated."""

    def connect(self) -> Connection:
        """Return a connection that is closed after the test."""
        connection = Connection(self.daemon.port)
        self.addCleanup(connection.close)
        return connection

    def ask(self, line: str, *headers: str, body: bytes = b"") -> RawAnswer:
        """Return the answer to a request on a connection of its own."""
        head = "\r\n".join([line, "Host: localhost", *headers, "", ""])
        return self.connect().ask(head.encode("latin-1") + body, head=line.startswith("HEAD"))

    def check_health(self, connection: Connection) -> None:
        """Check that a connection still works."""
        answer = connection.ask(HEALTH)
        self.assertEqual(answer.code, 200)
        self.assertEqual(json.loads(answer.body)["status"], "ok")

    async def test_what_is_no_http_is_a_problem(self) -> None:
        """A broken request line or header is answered by 400, and the connection closed."""
        for request in (
            b"nonsense\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET /health\r\n\r\n",
            b"GET /health HTTP/1.1 more\r\n\r\n",
            b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
            b"GET /health HTTP/1.1\r\nContent-Length: x\r\n\r\n",
            b"POST /evaluate HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"POST /evaluate HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            b"POST /evaluate HTTP/1.1\r\nTransfer-Encoding: x\r\nContent-Length: 5\r\n\r\n",
            b"POST /evaluate HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        ):
            connection = self.connect()
            connection.ask(request).problem(400)
            self.assertTrue(connection.ended, request)

    async def test_broken_chunks_are_a_problem(self) -> None:
        """A body that is not in the coding that it claims: 400, and the connection closed."""
        connection = self.connect()
        connection.send(head_of(None, "Transfer-Encoding: chunked", target="/x") + b"xyz\r\n")
        connection.answer().problem(400)
        self.assertTrue(connection.ended)

    async def test_overlong_lines_are_a_problem(self) -> None:
        """A line that does not end is answered by 431 (or 414), and the connection closed."""
        for start in (b"GET /", b"GET / HTTP/1.1\r\nX: "):
            connection = self.connect()
            connection.send(start + b"x" * 20_000)
            answer = connection.answer()
            answer.problem(answer.code)
            self.assertIn(answer.code, (414, 431))

    async def test_too_many_headers_are_a_problem(self) -> None:
        """Headers without end are answered by 400 or 431, and the connection closed."""
        connection = self.connect()
        connection.send(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 600 + b"\r\n")
        answer = connection.answer()
        answer.problem(answer.code)
        self.assertIn(answer.code, (400, 431))

    async def test_http_1_0_is_answered(self) -> None:
        """An old client gets its answer, and the end of the connection."""
        connection = self.connect()
        answer = connection.ask(b"GET /health HTTP/1.0\r\n\r\n")
        self.assertEqual(json.loads(answer.body)["status"], "ok")
        self.assertTrue(connection.ended)
        self.connect().ask(b"GET /missing HTTP/1.0\r\n\r\n").problem(404)

    async def test_unknown_paths_are_a_problem(self) -> None:
        """404 for whatever is not there, however odd its spelling."""
        for path in (
            *(
                "/missing",
                "/evaluation",
                "/evaluation/",
                "/health/more",
                "/%00",
                "/%2e%2e",
                "/..//..",
            ),
            *(
                "/evaluation/x",
                "/evaluation/x/events",
                "/evaluation/" + "x" * 1000,
                "/missing?x=%zz",
            ),
        ):
            problem = self.ask(f"GET {path} HTTP/1.1").problem(404)
            self.assertNotIn("<", str(problem["message"]))

    async def test_paths_that_are_not_utf8_are_a_problem(self) -> None:
        """Bytes that no path here has are 400 or 404, and no defect."""
        for path in (
            "/%ff",
            "/\xff",
            "/evaluation/%ff%fe/events",
            "/evaluation/x/events?after=%ff",
        ):
            answer = self.ask(f"GET {path} HTTP/1.1")
            answer.problem(answer.code)
            self.assertIn(answer.code, (400, 404))

    async def test_unknown_methods_are_a_problem(self) -> None:
        """405, and which methods there are; also for methods that nobody has heard of."""
        for method, path, allowed in (
            ("GET", "/evaluate", "POST"),
            ("PUT", "/evaluate", "POST"),
            ("POST", "/health", "GET"),
            ("BREW", "/health", "GET"),
            ("PATCH", "/evaluation/x", "DELETE"),
            ("DELETE", "/evaluation/x/events", "GET"),
        ):
            answer = self.ask(f"{method} {path} HTTP/1.1", "Content-Length: 0")
            answer.problem(405)
            self.assertIn(allowed, answer.headers["allow"])

    async def test_head_is_get_without_a_body(self) -> None:
        """HEAD gets the headers of GET, and the connection goes on."""
        connection = self.connect()
        line = b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        answer = connection.ask(line, head=True)
        self.assertEqual(answer.code, 200)
        self.assertEqual(answer.headers["content-type"], "application/json")
        self.check_health(connection)
        answer = connection.ask(line.replace(b"health", b"missing"), head=True)
        self.assertEqual(answer.code, 404)
        self.assertEqual(answer.headers["content-type"], "application/problem+json")
        self.check_health(connection)

    async def test_preflight_is_answered(self) -> None:
        """A browser that asks before it sends is told what it may, for any path."""
        for path in ("/evaluate", "/evaluation/x/events", "/evaluation/x", "/missing", "*"):
            answer = self.ask(
                f"OPTIONS {path} HTTP/1.1",
                "Origin: https://example.org",
                "Access-Control-Request-Method: DELETE",
                "Access-Control-Request-Headers: idempotency-key, prefer",
            )
            self.assertEqual((answer.code, answer.body), (204, b""))
            self.assertEqual(answer.headers["access-control-allow-origin"], "*")
            for method in ("GET", "POST", "DELETE"):
                self.assertIn(method, answer.headers["access-control-allow-methods"])
            for name in ("content-type", "idempotency-key", "prefer"):
                self.assertIn(name, answer.headers["access-control-allow-headers"].lower())

    async def test_answers_may_be_read_by_pages_of_other_sites(self) -> None:
        """CORS headers stand on what is no error, too, and let `Location` be read."""
        answer = self.ask("GET /health HTTP/1.1", "Origin: https://example.org")
        self.assertEqual(answer.headers["access-control-allow-origin"], "*")
        exposed = answer.headers["access-control-expose-headers"].lower()
        for name in ("location", "retry-after"):
            self.assertIn(name, exposed)

    async def test_a_connection_goes_on_after_errors(self) -> None:
        """What a request has done wrong does not end its connection."""
        connection = self.connect()
        for line, code in (
            (b"GET /missing HTTP/1.1", 404),
            (b"PUT /health HTTP/1.1\r\nContent-Length: 0", 405),
            (b"PUT /health HTTP/1.1\r\nContent-Length: 5", 405),
            (b"GET /evaluation/x/events HTTP/1.1", 404),
        ):
            body = b"abcde" if line.endswith(b"5") else b""
            connection.ask(line + b"\r\nHost: localhost\r\n\r\n" + body).problem(code)
            self.check_health(connection)

    async def test_requests_in_a_row_are_answered_in_order(self) -> None:
        """Requests that are sent without waiting for answers are all answered."""
        connection = self.connect()
        connection.send((HEALTH + HEALTH.replace(b"health", b"missing")) * 5)
        for _ in range(5):
            self.assertEqual(connection.answer().code, 200)
            connection.answer().problem(404)

    async def test_bodies_that_nobody_expects_are_refused(self) -> None:
        """413 for a large body where none belongs, announced or not."""
        self.ask("POST /health HTTP/1.1", "Content-Length: 99999999").problem(413)
        connection = self.connect()
        head = head_of(None, "Transfer-Encoding: chunked", target="/health")
        connection.send(head.replace(b"POST", b"DELETE"))
        connection.send(b"%x\r\n%s\r\n" % (100_000, b"x" * 100_000))
        connection.answer().problem(413)

    async def test_escapes_and_queries_find_their_way(self) -> None:
        """A path that is spelled in another way is the same path."""
        for path in ("/%68ealth", "/health?x=y&x=z"):
            self.assertEqual(self.ask(f"GET {path} HTTP/1.1").code, 200, path)

    async def test_a_whole_url_as_a_target_is_served_or_a_problem(self) -> None:
        """Where a path stands a proxy may send a URL (RFC 9112, 3.2.2): no defect comes of it."""
        for path in ("/health", "/missing", "", "/%ff"):
            answer = self.ask(f"GET http://localhost{path} HTTP/1.1")
            if answer.code != 200:
                answer.problem(answer.code)
                self.assertIn(answer.code, (400, 404))

    async def test_broken_parameters_are_a_problem(self) -> None:
        """400 for a parameter that stands there twice, or waits for no number."""
        identifier = await self.begin("true")
        for query in (
            *("after=0&after=1", "wait=x", "wait=-1", "after=x", "after=-1", "after=1.5"),
            *("after=99", "after=%20", "after=00", "after=null"),
        ):
            self.ask(f"GET /evaluation/{identifier}/events?{query} HTTP/1.1").problem(400)
        for query in ("", "after=", "after=0", "wait=0"):
            answer = self.ask(f"GET /evaluation/{identifier}/events?{query} HTTP/1.1")
            self.assertEqual(answer.code, 200)
        await self.client.follow(identifier)
