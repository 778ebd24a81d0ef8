"""`web.routes`: the routes, also those of the operator and of clients of 2018, in memory."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress

from tawebeval import __version__
from tawebeval.config import Configuration, HttpSettings
from tawebeval.web.auth import Authenticator, RateLimit
from tawebeval.web.routes import METRICS_MEDIA_TYPE, HealthAndMetrics
from tests.cases.polls import TOKENS
from tests.cases.web import END, WebTestCase
from tests.fakes.clients import MULTIPART, Answer, Part, form, parts
from tests.fakes.files import FakeStore
from tests.fakes.world import read_again


class WrongPathTests(WebTestCase):
    configuration = Configuration(http=HttpSettings(base_path="/judge"))

    def test_404_names_the_path_and_refers_to_the_list_of_paths(self) -> None:
        for path in ("/evalaute", "/judge/evaluations/", "/zzz", "/judge/evaluation/x%2f%2fevents"):
            detail = self.request("GET", path, 404).json()["detail"]
            self.assertTrue(detail.startswith("no resource at '/"), detail)
            self.assertTrue(detail.endswith("; GET /openapi.json lists all paths"), detail)

    def test_404_tells_a_malformed_identifier_from_an_unknown_one(self) -> None:
        for identifier, words in (("xyz", "40 characters"), ("a" * 40, "did not issue")):
            answer = self.request("GET", f"/evaluation/{identifier}", 404)
            self.assertIn(words, answer.json()["detail"])


class EvaluateTests(WebTestCase):
    def test_submission_is_answered_at_once_with_identifier_and_location(self) -> None:
        self.service.world.repositories.gate.shut = True
        answer = self.post()
        identifier = answer.json()["evaluation_id"]
        self.assertRegex(identifier, r"\A[a-z2-7]{40}\Z")
        self.assertEqual(answer.headers["location"], f"/evaluation/{identifier}")
        self.request("GET", answer.headers["location"])
        self.assertEqual(answer.headers["access-control-expose-headers"].split(", ")[0], "Location")

    def test_same_key_and_form_get_the_first_answer_and_another_form_422(self) -> None:
        first = self.post(**{"Idempotency-Key": "k"})
        second = self.post(**{"Idempotency-Key": "k"})
        self.assertEqual(first.json(), second.json())
        self.assertEqual(first.headers["location"], second.headers["location"])
        self.assertEqual(len(self.service.leftovers()), 1)
        for changes in ({"seed": b"1"}, {"limits[cpu]": b"1"}):
            self.post(422, form(parts(**changes)), **{"Idempotency-Key": "k"})
        self.assertEqual(len(self.service.leftovers()), 1)
        self.assertEqual(len(self.service.world.spawn.children), 1)

    def test_repeated_form_is_answered_once_the_evaluation_is_stored(self) -> None:
        stored: Deferred[None] = Deferred()
        self.patch(FakeStore, "add", lambda store, row: stored)
        headers = {"Content-Type": MULTIPART, "Idempotency-Key": "k"}
        asked = [
            self.ask("POST", "/evaluate", data=form(parts()), headers=headers) for _ in range(2)
        ]
        self.agent.flush()
        for each in asked:
            self.assertNoResult(each)
        stored.callback(None)
        first, second = (self.answer(each).json() for each in asked)
        self.assertEqual(first, second)

    def test_idempotency_key_has_1_to_255_characters(self) -> None:
        self.post(**{"Idempotency-Key": "k" * 255})
        for key in ("", "k" * 256):
            self.post(400, **{"Idempotency-Key": key})

    def test_full_queue_is_503_except_for_a_known_key(self) -> None:
        first = self.post(**{"Idempotency-Key": "k"})
        for _ in range(3):
            self.post()
        answer = self.post(503)
        self.assertGreater(int(answer.headers["retry-after"]), 0)
        self.post(503, **{"Idempotency-Key": "l"})
        self.assertEqual(self.post(**{"Idempotency-Key": "k"}).json(), first.json())
        self.assertEqual(len(self.service.leftovers()), 4)

    def test_query_of_evaluate_is_ignored(self) -> None:
        self.post(path="/evaluate?x=1")


class EventsTests(WebTestCase):
    def test_page_has_cursors_and_events_and_null_at_the_end(self) -> None:
        identifier = self.evaluate()
        self.assertEqual(self.page(identifier), {"begin": None, "end": "0", "data": []})
        self.child.print('ü"\n'.encode())
        text = {"type": "text", "payload": 'ü"'}
        self.assertEqual(self.page(identifier), {"begin": None, "end": "1", "data": [text]})
        self.assertEqual(
            self.page(identifier, "?after="), {"begin": None, "end": "1", "data": [text]}
        )
        self.finish()
        page = self.page(identifier, "?after=1")
        newline = {"type": "text", "payload": "\n"}
        self.assertEqual(page, {"begin": "1", "end": END, "data": [newline]})
        last = {"begin": END, "end": None, "data": []}
        for _ in range(2):
            self.assertEqual(self.page(identifier, f"?after={END}"), last)

    def test_unknown_evaluation_is_404_discarded_events_410_bad_cursor_400(self) -> None:
        identifier = self.evaluate(b"a\nb\n")
        self.page(identifier, "?after=2")
        path = f"/evaluation/{identifier}/events"
        self.assertEqual(self.request("GET", path, 410).json()["oldest"], "2")
        self.request("GET", path + "?after=0", 410)
        for cursor in ("9", "x", "-1", "%00", "%ff", END):
            self.request("GET", f"{path}?after={cursor}", 400)
        self.request("GET", path + "?after=2&after=3", 400)
        self.finish()
        self.page(identifier, f"?after={END}")
        self.request("GET", path, 410)
        self.request("GET", "/evaluation/unknown/events", 404)


class FormTests(WebTestCase):
    def test_answer_repeats_the_identifier_under_the_legacy_name_id(self) -> None:
        answer = self.post().json()
        self.assertEqual(answer["id"], answer["evaluation_id"])

    def test_field_under_its_old_and_new_name_is_refused_as_repeated(self) -> None:
        body = form([*parts(), Part("oid", b"c" * 40)])
        problem = self.post(400, body).json()
        self.assertEqual(problem["field"], "commit_oid")


class PageTests(WebTestCase):
    def older(self, identifier: str, after: str | None = None) -> Deferred[Any]:
        query = "" if after is None else f"&after={after}"
        return self.ask("GET", f"//evaluation_events?evaluation={identifier}{query}")

    def test_legacy_poll_waits_20_seconds_by_default(self) -> None:
        identifier = self.evaluate()
        asked = self.older(identifier)
        self.service.reactor.advance(19)
        self.agent.flush()
        self.assertNoResult(asked)
        self.service.reactor.advance(1)
        answer = self.answer(asked)
        self.assertEqual(answer.json()["end"], "0")
        self.assertNotIn("preference-applied", answer.headers)  # it had none
        asked = self.older(identifier, "0")
        self.service.reactor.advance(19)
        self.child.print(b"a\n")
        self.assertEqual(len(self.answer(asked).json()["data"]), 1)

    def test_legacy_poll_with_wait_0_answers_at_once(self) -> None:
        identifier = self.evaluate()
        answer = self.request("GET", f"/evaluation_events?evaluation={identifier}&wait=0")
        self.assertEqual(answer.json()["data"], [])
        self.assertNotIn("preference-applied", answer.headers)


FILE = {"field": "source", "filename": "solution.py", "size": 8, "text": "print()\n"}


class SubmissionTests(WebTestCase):
    def read(self, identifier: str, status: int = 200) -> Any:
        return self.request("GET", f"/evaluation/{identifier}/submission", status).json()

    def test_files_are_readable_from_submission_to_after_the_end(self) -> None:
        running = [self.evaluate() for _ in range(self.service.running)]
        waiting = self.evaluate()
        for identifier in (waiting, *running):
            self.assertEqual(self.read(identifier), {"files": [FILE]})
        self.request("HEAD", f"/evaluation/{waiting}/submission")
        self.finish()
        for identifier in (waiting, *running):
            self.assertEqual(self.read(identifier), {"files": [FILE]})

    def test_discarded_or_forgotten_files_are_410_and_unknown_ones_404(self) -> None:
        identifier = self.evaluate()
        self.finish()
        self.service.registry.submissions.budget.make_room(1, None)
        self.assertIn("discarded", self.read(identifier, 410)["detail"])
        self.request("GET", f"/evaluation/{identifier}/events?after=end")
        self.assertIn("over", self.read(identifier, 410)["detail"])
        self.read("a" * 40, 404)


class WaitTests(WebTestCase):
    def wait(self, query: str = "?wait=20", **headers: str) -> Deferred[Any]:
        self.identifier = self.evaluate()
        path = f"/evaluation/{self.identifier}/events{query}"
        asked = self.ask("GET", path, headers=headers)
        self.assertNoResult(asked)
        return asked

    def test_wait_is_read_from_prefer_among_other_preferences(self) -> None:
        for header in (
            *("wait=20", 'respond-async, wait=20, x="y"', 'wait="20"', "  wait=20  "),
            *(
                "Wait=20",
                "wait=20; foo=bar",
                "wait=20;",
                "wait = 20 ;a=b;c",
                "handling=x;wait=1,wait=20",
            ),
            *("wait=20, wait=10", 'x="a, wait=10", wait=20', r'x="\", wait=10", wait=20'),
        ):
            asked = self.wait("", Prefer=header)
            self.child.print(b"a\n")
            self.assertEqual(self.answer(asked).headers["preference-applied"], "wait=20", header)
            self.finish()

    def test_malformed_prefer_is_ignored_and_not_applied(self) -> None:
        identifier = self.evaluate()
        path = f"/evaluation/{identifier}/events"
        for header in (
            *("wait", "wait=x", "wait=-1", "wait=0", "respond-async", "", '"', "=,=;"),
            *(
                "wait, wait=20",
                "wait=x, wait=20",
                'wait="20',
                'wait="20;"',
                '"wait=20"',
                ";wait=20",
            ),
            *('x=", wait=20', "awaits=20", f"wait={'9' * 16}"),
        ):
            answer = self.request("GET", path, headers={"Prefer": header})
            self.assertNotIn("preference-applied", answer.headers, header)

    def test_first_preference_of_several_headers_counts(self) -> None:
        self.identifier = self.evaluate()
        for lines, waits in (
            (b"Prefer: wait=20\r\nPrefer: wait=0\r\n", True),
            (b"Prefer: wait=0\r\nPrefer: wait=20\r\n", False),
        ):
            connection = self.connect()
            path = f"/evaluation/{self.identifier}/events"
            connection.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n".encode() + lines + b"\r\n")
            self.assertEqual(connection.received == b"", waits, lines)
            connection.lose()

    def test_query_wins_over_prefer(self) -> None:
        asked = self.wait("?wait=5", Prefer="wait=20")
        self.service.reactor.advance(5)
        self.assertEqual(self.answer(asked).headers["preference-applied"], "wait=5")

    def test_wait_is_capped_and_preference_applied_names_the_cap(self) -> None:
        for seconds in ("31", "2147483647", "9" * 15):
            for query, headers in ((f"?wait={seconds}", {}), ("", {"Prefer": f"wait={seconds}"})):
                asked = self.wait(query, **headers)
                self.service.reactor.advance(30)
                applied = self.answer(asked).headers["preference-applied"]
                self.assertEqual(applied, "wait=30", (query, headers))
                self.finish()

    def test_disconnect_from_a_poll_leaves_nothing(self) -> None:
        identifier = self.evaluate()
        calls = len(self.service.reactor.getDelayedCalls())
        connection = self.connect()
        connection.request(f"GET /evaluation/{identifier}/events?wait=20")
        evaluation = self.service.registry.records[identifier]
        self.assertEqual(len(evaluation.events.reader_wakeup_condition), 1)
        connection.lose()
        self.assertEqual(len(evaluation.events.reader_wakeup_condition), 0)
        self.assertEqual(len(self.service.reactor.getDelayedCalls()), calls)
        self.child.print(b"a\n")
        self.assertEqual(len(self.page(identifier)["data"]), 1)


class StatusTests(WebTestCase):
    def test_cancelling_is_204_when_the_process_is_gone_and_when_repeated(self) -> None:
        identifier = self.evaluate()
        asked = self.ask("DELETE", f"/evaluation/{identifier}")
        self.assertNoResult(asked)
        self.assertEqual(self.child.signals, [15])
        self.finish()
        answer = self.answer(asked)
        self.assertEqual((answer.status, answer.body), (204, b""))
        self.check(answer)
        self.request("DELETE", f"/evaluation/{identifier}", 204)
        (event,) = self.page(identifier)["data"]
        self.assertEqual(event["payload"]["reason"], "cancelled")
        self.page(identifier, f"?after={END}")
        self.request("DELETE", f"/evaluation/{identifier}", 204)
        self.request("DELETE", "/evaluation/unknown", 404)

    def test_client_that_leaves_after_a_delete_has_cancelled(self) -> None:
        identifier = self.evaluate()
        connection = self.connect()
        connection.request(f"DELETE /evaluation/{identifier}")
        connection.lose()
        self.finish()
        status = self.request("GET", f"/evaluation/{identifier}").json()
        self.assertEqual(status["state"], "cancelled")


TOKEN = "tawebeval_metrics"


class OperationsTestCase(WebTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.obstacles: list[str] = []
        self.let_read_metrics(None)

    def let_read_metrics(self, authenticator: Authenticator | None) -> None:
        """Let those read the metrics whom `authenticator` knows; None: this machine."""
        metrics = HealthAndMetrics(lambda: self.obstacles, lambda: b"some 1\n", authenticator)
        self.set("health_and_metrics", metrics)

    def set(self, name: str, value: object) -> None:
        object.__setattr__(self.service.context, name, value)

    def metrics(self, status: int, address: IAddress | None = None, **headers: str) -> Answer:
        connection = self.service.connect(address)
        connection.request("GET /metrics", **headers)
        answer = connection.answer()
        self.assertEqual(answer.status, status, answer.body)
        if status == 200:
            self.assertEqual(answer.body, b"some 1\n")
            self.assertEqual(answer.headers["Content-Type"], METRICS_MEDIA_TYPE.decode())
        else:
            self.assertEqual(answer.headers["Content-Type"], "application/problem+json")
            self.assertNotIn(b"some", answer.body)
        return answer


class HealthTests(OperationsTestCase):
    def test_readiness_is_503_with_the_reasons_and_health_is_200_whatever_is_wrong(self) -> None:
        ready = self.request("GET", "/health/ready").json()
        self.assertEqual(ready, {"status": "ready", "version": __version__})
        self.obstacles += ["no disk", "no queue"]
        problem = self.request("GET", "/health/ready", 503).json()
        self.assertEqual(problem["reasons"], ["no disk", "no queue"])
        self.assertEqual(problem["detail"], "no disk; no queue")
        health = self.request("GET", "/health").json()
        self.assertEqual(health, {"status": "ok", "version": __version__})

    def test_health_needs_no_token(self) -> None:
        self.service.access.token_file = self.root / "callers"
        self.service.access.token_file.write_text(TOKENS)
        read_again(self.service.access)
        for path, status in (
            *(
                ("/health", 200),
                ("/health/ready", 200),
                ("/metrics", 200),
                ("//health//ready", 200),
            ),
            *(("/health/else", 401), ("/metrics/else", 401), ("/evaluations", 401)),
        ):
            self.assertEqual(self.exchange(f"GET {path}").status, status, path)


class MetricsTests(OperationsTestCase):
    def test_metrics_are_for_programs_of_this_machine(self) -> None:
        for host in ("127.0.0.1", "127.8.8.8"):
            self.metrics(200, IPv4Address("TCP", host, 1))
        for host in ("::1", "::ffff:127.0.0.1"):
            self.metrics(200, IPv6Address("TCP", host, 1))
        self.metrics(403, IPv4Address("TCP", "192.0.2.7", 1))
        self.metrics(403, IPv6Address("TCP", "2001:db8::1", 1))
        self.metrics(403, IPv6Address("TCP", "fe80::1%eth0", 1))
        self.metrics(403, UNIXAddress(None))

    def test_metrics_are_collected_at_most_once_a_second(self) -> None:
        collected: list[int] = []

        def collect() -> bytes:
            collected.append(1)
            return b"some 1\n"

        self.set("health_and_metrics", HealthAndMetrics(collect_metrics=collect))
        for seconds, times in ((0.9, 1), (0.2, 1), (0.5, 2)):
            self.metrics(200)
            self.metrics(200)
            self.assertEqual(len(collected), times)
            self.service.reactor.advance(seconds)

    def test_metrics_are_not_for_clients_behind_a_local_proxy(self) -> None:
        for name in ("Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP", "Via"):
            self.metrics(403, **{name.replace("-", "_"): "x"})

    def test_metrics_are_not_for_pages_of_a_browser(self) -> None:
        self.metrics(200, Origin="http://localhost")
        self.metrics(403, Origin="https://evil.example")
        self.metrics(403, Origin="null")
        connection = self.service.connect()
        connection.send(b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        self.assertEqual(connection.answer().status, 403)
        connection.send(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n\r\n")
        self.assertEqual(connection.answer().status, 200)

    def test_metrics_need_a_valid_token_where_tokens_are_configured(self) -> None:
        tokens = self.root / "tokens"
        tokens.write_text(f"prometheus sha256:{sha256(TOKEN.encode()).hexdigest()}\n")
        rate = RateLimit(0, self.service.reactor.seconds)
        self.let_read_metrics(Authenticator(rate, tokens))
        far = IPv4Address("TCP", "192.0.2.7", 1)
        self.metrics(200, far, Authorization=f"Bearer {TOKEN}", X_Forwarded_For="x")
        answer = self.metrics(401, far, Authorization="Bearer tawebeval_other")
        self.assertEqual(answer.headers["WWW-Authenticate"], "Bearer")
        self.metrics(401)
