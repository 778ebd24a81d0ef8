"""`web.events`: what the headers of a request for events ask for."""

from __future__ import annotations

from tawebeval.config import CallerSettings, Configuration
from tawebeval.web.events import STREAM_FRAMINGS
from tests.cases import described
from tests.cases.web import END, StreamTestCase
from tests.fakes.clients import Answer
from tests.fakes.streams import FOLLOWERS, LineFollower, SocketFollower, SourceFollower, parse

OF_CONTENT = ("date", "content-length", "transfer-encoding")
"""Headers that hang on the time, or that an answer may have only with its content."""


class ChoiceTests(StreamTestCase):
    def test_stream_has_the_accepted_type_and_is_not_cached(self) -> None:
        identifier = self.evaluate()
        for accept in ("text/event-stream", "application/jsonl", "application/x-ndjson"):
            answer = self.follow(LineFollower, identifier, Accept=accept).answer
            self.assertEqual(answer.status, 200)
            self.assertEqual(answer.headers["content-type"], accept)
            self.assertEqual(answer.headers["cache-control"], "no-store")
            self.assertEqual(answer.headers["x-accel-buffering"], "no")
            self.assertEqual(answer.headers["vary"], "Accept")
            self.assertEqual(answer.headers["access-control-allow-origin"], "*")
        page = self.request("GET", f"/evaluation/{identifier}/events")
        self.assertEqual(page.headers["vary"], "Accept")
        self.assertNotIn("x-accel-buffering", page.headers)

    def test_406_names_the_offers_and_acknowledges_nothing(self) -> None:
        identifier = self.evaluate()
        self.print(b"a\nb\n")
        path = f"/evaluation/{identifier}/events?after=2"
        answer = self.request("GET", path, 406, headers={"Accept": "text/html"})
        self.assertIn("application/jsonl", answer.json()["offered"])
        self.assertEqual(answer.headers["vary"], "Accept")
        self.page(identifier)

    def test_http_1_0_has_no_json_lines_but_pages_and_server_sent_events(self) -> None:
        identifier = self.evaluate()
        self.print(b"a\n")
        self.finish()
        for accept, status, whole in (
            ("application/jsonl", 505, b"}"),
            ("application/x-ndjson", 505, b"}"),
            ("text/event-stream", 200, b"event: end\ndata: null\nid: end\n\n"),
            ("application/json", 200, b"]}"),
        ):
            for method in ("GET", "HEAD"):
                connection = self.connect()
                connection.send(
                    f"{method} /evaluation/{identifier}/events HTTP/1.0\r\n"
                    f"Accept: {accept}\r\n\r\n".encode()
                )
                self.turn()
                answer = connection.answer(method)
                self.assertEqual(answer.status, status, accept)
                if method == "GET":
                    self.assertTrue(answer.body.endswith(whole), answer.body)
                if method == "GET" and status == 505:
                    said = answer.json()["detail"]
                    self.assertIn("application/json, text/event-stream", said)
                    self.check_nothing_left(identifier)

    def test_malformed_parameter_is_400_for_every_media_type(self) -> None:
        path = f"/evaluation/{self.evaluate()}/events"
        for name, values in (
            ("wait", ("x", "-1", "1.5", "", "1&wait=2", "%ff")),
            ("skip", ("x", "-1", "1&skip=1")),
            ("times", ("2", "x", "", "1&times=1")),
            ("limit", ("0", "00", "x", "-1", "", "1.5", "1000000000000000", "1&limit=1")),
        ):
            for value in values:
                for accept in ("application/json", "text/event-stream", "application/jsonl"):
                    target = f"{path}?{name}={value}"
                    answer = self.request("GET", target, 400, headers={"Accept": accept})
                    self.assertIn(name, answer.json()["detail"])

    def test_head_begins_no_stream(self) -> None:
        identifier = self.evaluate()
        for accept in ("text/event-stream", "application/jsonl"):
            connection = self.connect()
            connection.request(f"HEAD /evaluation/{identifier}/events", Accept=accept)
            answer = connection.answer("HEAD")
            self.assertEqual((answer.status, answer.body), (200, b""))
            self.assertEqual(answer.headers["Content-Type"], accept)
            connection.request("HEAD /evaluation/unknown/events", Accept=accept)
            self.assertEqual(connection.answer("HEAD").status, 404)
        self.check_nothing_left(identifier)

    def test_head_has_the_status_and_headers_of_get(self) -> None:
        queries = ["", "?wait=20", "?after=3", "?after=x", "?after=9", "?skip=2", "?skip=5"]
        queries += ["?after=0&skip=9", f"?after={END}&skip=1", f"?after={END}"]
        for accept in ("application/json", *STREAM_FRAMINGS, "text/html"):
            path = f"/evaluation/{self.evaluate()}/events"
            self.print(b"a\nb\n")
            for state in ("running", "finished", "forgotten"):
                if state == "finished":
                    self.finish()
                for query in queries:
                    head, get = self.answers_to_both(f"{path}{query}", accept)
                    self.assertEqual(head, get, (state, accept, query))

    def answers_to_both(self, path: str, accept: str) -> list[tuple[int, dict[str, str]]]:
        answers = []
        for method in ("HEAD", "GET"):
            connection = self.connect()
            connection.request(f"{method} {path}", Accept=accept)
            self.turn()
            answer, _ = parse(connection.received)
            described.check(method, path, answer)
            headers = {k: v for k, v in answer.headers.items() if k not in OF_CONTENT}
            answers.append((answer.status, headers))
            connection.lose()
        return answers

    def test_head_acknowledges_nothing(self) -> None:
        identifier = self.evaluate()
        self.print(b"a\nb\n")
        self.finish()
        for accept in ("text/event-stream", "application/jsonl", "application/json"):
            for query in ("?after=2", f"?after={END}", "?after=1&wait=20"):
                nothing = accept == "text/event-stream" and query == f"?after={END}"
                connection = self.connect()
                connection.request(f"HEAD /evaluation/{identifier}/events{query}", Accept=accept)
                answer = connection.answer("HEAD")
                self.assertEqual(answer.status, 204 if nothing else 200)
                described.check("HEAD", f"/evaluation/{identifier}/events", answer)
        self.assertEqual(len(self.page(identifier)["data"]), 4)


class NamedOriginTests(StreamTestCase):
    configuration = Configuration(callers=CallerSettings(origins=("https://judge.example.org",)))

    def check(self, answer: Answer) -> None:
        """Hold nothing: what is promised of every answer is not so here."""

    def test_vary_names_accept_and_origin(self) -> None:
        follower = self.follow(LineFollower, self.evaluate())
        self.assertEqual(follower.answer.headers["vary"], "Accept, Origin")


class PageTests(StreamTestCase):
    def test_link_leads_to_the_next_page_until_the_end(self) -> None:
        identifier = self.evaluate()
        self.print(b"a\n" * 100)
        self.finish()
        path = f"/evaluation/{identifier}/events"
        seen, found = [], 0
        while path:
            answer = self.request("GET", path)
            found += len(answer.json()["data"])
            seen.append(path)
            link = answer.headers.get("link", "")
            path = link.partition("<")[2].partition(">")[0]
            self.assertEqual(link, f'<{path}>; rel="next"' if path else "")
        self.assertEqual(found, 200)
        self.assertEqual(seen[-1], f"/evaluation/{identifier}/events?after={END}")
        self.assertGreater(len(seen), 2)

    def test_limit_makes_pages_smaller_down_to_one_event_and_never_larger(self) -> None:
        identifier = self.evaluate()
        self.print(b"a\n" * 100 + b"b" * 1000 + b"\n")
        self.finish()
        path, found = f"/evaluation/{identifier}/events?limit=100", 0
        text, end = '{"type":"text","payload":"a"}', '{"type":"text","payload":"\\n"}'
        self.assertLess(len(text) + len(end) + 2, 100)
        while path:
            answer = self.request("GET", path)
            data = answer.json()["data"]
            found += len(data)
            self.assertLessEqual(len(data), 3)
            path = answer.headers.get("link", "").partition("<")[2].partition(">")[0]
            self.assertTrue(not path or path.endswith("&limit=100"), path)
        self.assertEqual(found, 202)
        identifier = self.evaluate()
        self.print(b"a\n" * 1000)
        usual = self.page(identifier)
        self.assertLess(len(usual["data"]), 1000)
        self.assertEqual(self.page(identifier, "?limit=999999999999999"), usual)
        self.assertEqual(len(self.page(identifier, "?limit=1")["data"]), 1)
        older = f"/evaluation_events?evaluation={identifier}&limit=1"
        self.assertEqual(len(self.request("GET", older).json()["data"]), 1)
        head = self.request("HEAD", f"/evaluation/{identifier}/events?limit=1")
        self.assertTrue(head.headers["link"].endswith('?after=1&limit=1>; rel="next"'))

    def test_times_are_added_only_where_asked_for(self) -> None:
        identifier = self.evaluate()
        self.print(b"a\n")
        self.service.world.clock.advance(1.5)
        self.print(b"b\n")
        self.finish()
        path = f"/evaluation/{identifier}/events?times=1"
        answer = self.request("GET", path)
        self.assertEqual(answer.headers["link"], f'<{path[:-7]}after=end&times=1>; rel="next"')
        plain = self.page(identifier)["data"]
        timed = answer.json()["data"]
        status = self.request("GET", f"/evaluation/{identifier}").json()
        self.assertEqual(
            [event.pop("time") for event in timed],
            [status["created"], *[status["ended"]] * (len(plain) - 1)],
        )
        self.assertEqual(timed, plain)
        expected = answer.json()["data"]
        for kind in FOLLOWERS:
            for query, events in (("?times=1", expected), ("?times=0", plain), ("", plain)):
                follower = self.follow(kind, identifier, query)
                self.turn()
                self.assertEqual(follower.events, events, kind)
        self.page(identifier, "?after=end&times=1")

    def test_limit_and_times_hold_for_a_page_that_waits_and_the_link_of_head(self) -> None:
        identifier = self.evaluate()
        waiting = self.ask("GET", f"/evaluation/{identifier}/events?wait=5&limit=1&times=1")
        self.print(b"a\n" * 100)
        (event,) = self.answer(waiting).json()["data"]
        self.assertIn("time", event)
        head = self.request("HEAD", f"/evaluation/{identifier}/events?times=1")
        self.assertIn('&times=1>; rel="next"', head.headers["link"])

    def test_only_an_empty_page_without_wait_has_retry_after(self) -> None:
        identifier = self.evaluate()
        path = f"/evaluation/{identifier}/events"
        answer = self.request("GET", path)
        self.assertEqual(answer.headers["retry-after"], "1")
        waiting = self.ask("GET", path + "?wait=5")
        self.service.reactor.advance(5)
        self.assertNotIn("retry-after", self.answer(waiting).headers)
        self.print(b"a\n")
        self.assertNotIn("retry-after", self.request("GET", path).headers)
        self.finish()
        for after in ("2", END):
            self.assertNotIn("retry-after", self.request("GET", f"{path}?after={after}").headers)

    def test_pages_of_other_origins_may_send_last_event_id_and_read_headers(self) -> None:
        answer = self.request("OPTIONS", "/evaluation/x/events", 204)
        self.assertIn("Last-Event-ID", answer.headers["access-control-allow-headers"])
        for name in ("Link", "Retry-After", "Preference-Applied", "Location"):
            self.assertIn(name, answer.headers["access-control-expose-headers"].split(", "))


class ServerSentTests(StreamTestCase):
    def test_stream_begins_at_once_with_retry(self) -> None:
        follower = self.follow(SourceFollower, self.evaluate())
        self.assertEqual(follower.answer.body, b"retry: 2000\n\n")
        self.assertEqual(follower.source.retry, 2000)

    def test_last_event_id_is_the_cursor_of_the_next_page(self) -> None:
        identifier = self.evaluate()
        follower = self.follow(SourceFollower, identifier)
        self.print(b"a\nb\n")
        self.assertEqual(follower.source.last_event_id, self.page(identifier)["end"])
        self.finish()
        self.assertEqual(follower.source.last_event_id, END)

    def test_last_event_id_wins_over_after(self) -> None:
        identifier = self.evaluate()
        self.print(b"a\nb\n")
        for query in ("", "?after=0", "?after=1", "?after=1&skip=1", "?after=x"):
            follower = self.follow(SourceFollower, identifier, query, Last_Event_ID="2")
            self.assertEqual(follower.payloads, ["b"])
        for query, payloads in (("", ["a", "\n", "b"]), ("?after=1", ["\n", "b"])):
            follower = self.follow(SourceFollower, identifier, query, Last_Event_ID="")
            self.assertEqual(follower.payloads, payloads)
            follower = self.follow(LineFollower, identifier, query, Last_Event_ID="2")
            self.assertEqual(follower.payloads, payloads)

    def test_malformed_last_event_id_is_400(self) -> None:
        identifier = self.evaluate()
        for value in ("x", "9", "-1", "\xff", "e" * 100):
            follower = self.follow(SourceFollower, identifier, Last_Event_ID=value)
            self.assertEqual(follower.answer.status, 400, value)
            self.check_problem(follower.answer)
        connection = self.connect()
        connection.send(
            f"GET /evaluation/{identifier}/events HTTP/1.1\r\nHost: localhost\r\n"
            "Accept: text/event-stream\r\nLast-Event-ID: 0\r\nLast-Event-ID: 0\r\n\r\n".encode()
        )
        self.assertEqual(connection.answer().status, 400)

    def test_client_that_lost_the_end_gets_it_again_and_then_204(self) -> None:
        identifier = self.evaluate()
        self.print(b"a\n")
        first = self.follow(SourceFollower, identifier)
        self.finish()
        self.assertTrue(first.complete)
        again = self.follow(SourceFollower, identifier, Last_Event_ID="2")
        self.assertEqual((again.events, again.complete), ([], True))
        for _ in range(3):
            follower = self.follow(SourceFollower, identifier, Last_Event_ID=END)
            self.assertEqual((follower.answer.status, follower.answer.body), (204, b""))
        follower = self.follow(SourceFollower, identifier, Last_Event_ID="2")
        self.assertEqual(follower.answer.status, 410)

    def test_comment_is_sent_after_15_seconds_without_event(self) -> None:
        follower = self.follow(SourceFollower, self.evaluate())
        begin = follower.answer.body
        self.service.reactor.advance(14)
        self.assertEqual(follower.answer.body, begin)
        for count in range(1, 4):
            self.service.reactor.advance(1)
            self.turn()
            self.assertEqual(follower.answer.body, begin + b":\n\n" * count)
            self.service.reactor.advance(14)
        self.print(b"a\n")
        self.service.reactor.advance(14)
        self.turn()
        self.assertEqual(follower.answer.body.count(b":\n\n"), 3)
        self.service.reactor.advance(1)
        self.turn()
        self.assertEqual(follower.answer.body.count(b":\n\n"), 4)
        self.assertEqual(follower.payloads, ["a"])

    def test_json_lines_have_no_heartbeat(self) -> None:
        follower = self.follow(LineFollower, self.evaluate())
        for _ in range(9):
            self.service.reactor.advance(15)
            self.turn()
        self.assertEqual(follower.answer.body, b"")

    def test_data_line_with_a_carriage_return_arrives_whole(self) -> None:
        identifier = self.evaluate()
        begin = self.child.environment["EVALUATION_DATA_BEGIN"].encode()
        end = self.child.environment["EVALUATION_DATA_END"].encode()
        followers = [
            self.follow(kind, identifier) for kind in (SourceFollower, LineFollower, SocketFollower)
        ]
        self.print(b"%s\n[1,\r2]\r\n%s\n" % (begin, end))
        for follower in followers:
            self.assertEqual(follower.payloads, [[1, 2]])
