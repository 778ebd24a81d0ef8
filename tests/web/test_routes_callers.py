"""`web`: tokens, callers, shares and origins, over HTTP in memory."""

from __future__ import annotations

from pathlib import Path

from tawebeval.config import CallerSettings, Configuration, LimitSettings
from tawebeval.evaluations import service
from tawebeval.linux import filetree
from tawebeval.web import upload
from tests.cases.web import CallerTestCase, WebTestCase
from tests.fakes.clients import MULTIPART, Answer, Connection, form, parts


class TokenTests(CallerTestCase):
    def test_every_request_except_health_the_page_and_options_needs_a_token(self) -> None:
        for method, path in (
            ("GET", "/evaluation/x"),
            ("GET", "/evaluation/x/events"),
            ("DELETE", "/evaluation/x"),
            ("HEAD", "/evaluation/x"),
            ("POST", "/evaluate"),
            ("GET", "/nowhere"),
            ("GET", "/static/"),
            ("GET", "/health/"),
            ("GET", "/health/../evaluation/x"),
            ("GET", "/evaluation/x?/health"),
        ):
            self.call(method, path, 401, None)
            self.headers["eve"] = "Bearer tawebeval_" + "A" * 43
            answer = self.call(method, path, 401, "eve")
            self.assertNotIn(b"AAAA", answer.body)
        for path in ("/health", "//health"):
            self.call("GET", path, 200, None)
        for path in ("/evaluate", "/evaluation/x"):
            self.call("OPTIONS", path, 204, None)
        self.call("GET", "/evaluation/x", 404, "alice")

    def test_401_comes_before_the_body_and_nothing_is_kept(self) -> None:
        connection = self.begin_form(50_000, Expect="100-continue")
        answer = connection.answer()
        self.assertEqual(answer.status, 401)
        self.assertEqual(answer.headers["WWW-Authenticate"], "Bearer")
        self.assertEqual(answer.headers["Connection"], "close")
        connection.send(form(parts()))
        self.assertEqual(self.service.leftovers(), [])

    def test_caller_neither_sees_nor_cancels_evaluations_of_another_caller(self) -> None:
        place = self.begin("alice").headers["location"]
        self.child.print(b"a\n")
        unknown = self.call("GET", place, 404, "bob").json()
        self.assertEqual(unknown, self.call("GET", f"/evaluation/{'a' * 40}", 404, "bob").json())
        for path in (f"{place}/events", f"{place}/events?wait=5", f"{place}/events?after=end"):
            self.call("GET", path, 404, "bob")
        self.call("DELETE", place, 404, "bob")
        self.assertEqual(self.child.signals, [])
        self.assertEqual(self.call("GET", place, 200, "alice").json()["state"], "running")
        self.assertTrue(self.call("GET", f"{place}/events", 200, "alice").json()["data"])
        self.finish()
        self.call("GET", f"{place}/events?after=end", 200, "alice")
        self.call("GET", f"{place}/events?after=end", 404, "bob")
        self.call("DELETE", place, 404, "bob")
        self.call("DELETE", place, 204, "alice")

    def test_caller_over_its_queue_share_is_429_before_the_body(self) -> None:
        for _ in range(2):
            self.begin("alice")
        self.assertGreater(int(self.begin("alice", 429).headers["retry-after"]), 0)
        connection = self.begin_form(50_000, Authorization=self.headers["alice"])
        self.assertEqual(connection.answer().status, 429)
        self.begin("bob")

    def test_caller_over_the_share_of_unread_results_gets_429_until_a_result_is_read(self) -> None:
        identifier = self.begin("alice").json()["evaluation_id"]
        self.begin("bob")
        for child in self.service.world.spawn.children:
            child.end(0)
        self.service.world.turn()
        self.assertEqual(self.begin("alice", 429).headers["retry-after"], "30")
        connection = self.begin_form(50_000, Authorization=self.headers["alice"])
        self.assertEqual(connection.answer().status, 429)
        self.call("DELETE", f"/evaluation/{identifier}", 204, "alice")
        self.begin("alice", 429)
        self.call("GET", f"/evaluation/{identifier}/events?after=end", 200, "alice")
        self.begin("alice")
        self.begin("bob", 429)

    def test_request_over_the_rate_limit_is_429_and_health_is_not_counted(self) -> None:
        for _ in range(30):
            self.call("GET", "/evaluation/x", 404, "alice")
        answer = self.call("GET", "/evaluation/x", 429, "alice")
        self.assertEqual(answer.headers["retry-after"], "2")
        self.begin("alice", 429)
        self.call("GET", "/health", 200, "alice")
        self.call("GET", f"/evaluation/{'a' * 40}", 404, "bob")
        self.service.reactor.advance(2)
        self.call("GET", "/evaluation/x", 404, "alice")


class UnfinishedFormTests(CallerTestCase):
    configuration = Configuration(
        callers=CallerTestCase.configuration.callers,
        limits=LimitSettings(uploads=100_000, request_body=20_000),
    )

    def send_part(self, caller: str) -> Connection:
        connection = self.begin_form(19_000, Authorization=self.headers[caller])
        if not connection.received:
            connection.send(form(parts(source=b"x" * 18_000))[:4_000])
        return connection

    def test_unfinished_forms_of_one_caller_leave_room_for_another(self) -> None:
        connections = [self.send_part("alice") for _ in range(12)]
        refused = [one for one in connections if one.received]
        self.assertEqual(len(connections) - len(refused), 1)
        for one in refused:
            self.assertEqual(one.answer().status, 429)
        self.begin("bob")
        for one in connections:
            one.lose()
        self.begin("alice")
        budget = self.service.registry.submissions.budget
        self.assertEqual(set(budget.used_by_caller), {"alice", "bob"})

    def test_aborted_forms_count_for_their_caller_until_they_are_removed(self) -> None:
        is_broken = [True]

        def remove_tree(directory: Path) -> None:
            if is_broken:
                raise OSError("no")
            filetree.remove_tree(directory)

        self.patch(service, "remove_tree", remove_tree)
        self.patch(upload, "WRITE_BATCH_BYTES", 1)
        first = self.send_part("alice")
        self.assertEqual(first.received, b"")
        first.lose()
        second = self.send_part("alice")
        self.assertEqual(second.answer().status, 429)
        second.lose()
        self.begin("bob")
        is_broken.clear()
        self.service.registry.context.cleanup_queue.retry_next_calls()
        third = self.send_part("alice")
        self.assertEqual(third.received, b"")
        third.lose()


class KeptFileTests(CallerTestCase):
    configuration = Configuration(
        callers=CallerSettings(requests_per_minute=0),
        limits=LimitSettings(uploads=100_000, request_body=80_000),
    )

    def test_uploads_of_one_caller_discard_its_own_kept_files(self) -> None:
        places = []
        for caller in ("bob", *["alice"] * 15):
            places.append(self.begin(caller).headers["location"])
            self.finish()
        self.call("GET", f"{places[0]}/submission", 200, "bob")
        self.call("GET", f"{places[1]}/submission", 410, "alice")
        self.call("GET", f"{places[-1]}/submission", 200, "alice")


class NamedOriginTests(CallerTestCase):
    configuration = Configuration(
        callers=CallerSettings(origins=("https://a.example", "https://b.example:8443"))
    )

    def check(self, answer: Answer) -> None:
        """Hold nothing: these answers do not go to everybody."""

    def test_only_a_named_origin_is_echoed(self) -> None:
        for origin, shared in (
            ("https://a.example", True),
            ("https://b.example:8443", True),
            ("https://b.example", False),
            ("https://a.example.org", False),
            ("null", False),
        ):
            for path, status in (("/health", 200), ("/evaluation/x", 401)):
                answer = self.request("GET", path, status, headers={"Origin": origin})
                found = answer.headers.get("access-control-allow-origin")
                self.assertEqual(found, origin if shared else None)
                self.assertEqual(answer.headers["vary"], "Origin")
        answer = self.request("GET", "/health")
        self.assertNotIn("access-control-allow-origin", answer.headers)

    def test_answer_to_a_malformed_request_names_no_origin(self) -> None:
        self.assertNotIn(
            "Access-Control-Allow-Origin", self.exchange_bytes(b"nonsense\r\n\r\n").headers
        )


class OriginTestCase(WebTestCase):
    """No tokens, and a browser on this machine."""

    def ask_from(self, origin: str | None, method: str = "POST", path: str = "/evaluate") -> Answer:
        connection: Connection = self.connect()
        headers = {"Content-Type": MULTIPART} | ({"Origin": origin} if origin else {})
        connection.request(f"{method} {path}", form(parts()), **headers)
        return connection.answer(method)


class PageTests(OriginTestCase):
    def test_page_of_another_origin_cannot_submit_or_cancel(self) -> None:
        self.evaluate()
        for origin in ("https://evil.example", "null", "http://localhost:8080"):
            for method, path in (
                ("POST", "/evaluate"),
                ("DELETE", "/evaluation/x"),
                ("PUT", "/evaluation/x"),
            ):
                answer = self.ask_from(origin, method, path)
                self.assertEqual(answer.status, 403, origin)
                self.assertEqual(answer.headers["Access-Control-Allow-Origin"], "*")
                self.assertIn("origins", answer.json()["message"])
        self.assertEqual(len(self.service.world.spawn.children), 1)

    def test_own_pages_and_programs_can_submit_and_any_page_can_read(self) -> None:
        self.assertEqual(self.ask_from("http://localhost").status, 200)
        self.assertEqual(self.ask_from(None).status, 200)
        for method, status in (("GET", 404), ("HEAD", 404), ("OPTIONS", 204)):
            answer = self.ask_from("https://evil.example", method, "/evaluation/x")
            self.assertEqual(answer.status, status)


class OpenTests(OriginTestCase):
    configuration = Configuration(callers=CallerSettings(open=True))

    def test_any_page_submits_and_cancels_if_all_origins_are_allowed(self) -> None:
        for origin in ("https://evil.example", "http://localhost", None):
            self.assertEqual(self.ask_from(origin).status, 200)
            self.assertEqual(self.ask_from(origin, "DELETE", "/evaluation/x").status, 404)
