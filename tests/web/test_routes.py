"""`web`: the routes, through treq and our own site, in memory."""

from __future__ import annotations

import signal

from twisted.internet.defer import Deferred

from tawebeval.config import Configuration, HttpSettings
from tawebeval.config import ServiceSettings as Process
from tawebeval.sandbox.workspace import derive_directory_name
from tests.cases import described
from tests.cases.web import END, WebTestCase
from tests.fakes.clients import MULTIPART, form, parts
from tests.fakes.files import FakeStore

OVER = "1 GiB is over the maximum, 512 MiB (limits.maximum.memory); the operator can raise it"


class NameTests(WebTestCase):
    configuration = Configuration(service=Process(name="judge1"))

    def test_identifiers_begin_with_the_name_of_the_daemon(self) -> None:
        identifier = self.evaluate()
        self.assertRegex(identifier, r"\Ajudge1-[a-z2-7]{40}\Z")
        path = f"/evaluation/{identifier}"
        self.assertEqual(self.request("GET", path).json()["evaluation_id"], identifier)
        self.finish()
        page = self.request("GET", f"{path}/events").json()
        self.assertEqual(page["end"], END)
        self.assertIsNone(self.request("GET", f"{path}/events?after={END}").json()["end"])
        self.request("GET", path, 410)

    def test_identifiers_of_other_daemons_are_unknown(self) -> None:
        identifier = self.evaluate()
        own = identifier.removeprefix("judge1-")
        for other in (own, f"judge2-{own}", f"judge1--{own}"):
            self.request("GET", f"/evaluation/{other}", 404)
            self.request("DELETE", f"/evaluation/{other}", 404)


class WrongPathTests(WebTestCase):
    configuration = Configuration(http=HttpSettings(base_path="/judge"))

    def test_404_names_the_path_and_where_all_are_listed(self) -> None:
        for path in ("/evalaute", "/judge/evaluations/", "/zzz", "/judge/evaluation/x%2f%2fevents"):
            detail = self.request("GET", path, 404).json()["detail"]
            self.assertTrue(detail.startswith("no resource at '/"), detail)
            self.assertTrue(detail.endswith("; GET /openapi.json lists all paths"), detail)

    def test_405_names_the_methods(self) -> None:
        detail = self.request("PUT", "/evaluations", 405).json()["detail"]
        self.assertEqual(detail, "method 'PUT' is not allowed here; allowed: GET, HEAD")

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

    def test_uploaded_files_are_kept_until_the_evaluation_is_forgotten(self) -> None:
        identifier = self.evaluate()
        self.assertEqual(
            self.service.leftovers(), [f"evaluations/{derive_directory_name(identifier)}"]
        )
        path = (
            self.root
            / "evaluations"
            / derive_directory_name(identifier)
            / "submission/source/solution.py"
        )
        self.assertEqual(path.read_bytes(), b"print()\n")
        self.finish()
        self.assertEqual(path.read_bytes(), b"print()\n")
        self.page(identifier, "?after=end")
        self.assertEqual(self.service.leftovers(), [])

    def test_form_refused_at_its_end_names_the_field_and_leaves_nothing(self) -> None:
        answer = self.post(400, form(parts(commit_oid=None)))
        self.assertEqual(answer.json()["field"], "commit_oid")
        self.assertEqual(self.service.leftovers(), [])
        self.assertEqual(self.service.world.spawn.children, [])

    def test_drawn_seed_is_told(self) -> None:
        identifier = self.evaluate()
        seed = self.request("GET", f"/evaluation/{identifier}").json()["seed"]
        self.assertEqual(self.child.environment["TURINGARENA_SEED"], str(seed))

    def test_chosen_limits_are_shown_and_hold(self) -> None:
        body = form(parts(**{"limits[memory]": b"64M", "limits[wall_clock]": b"2.5"}))
        identifier = self.post(body=body).json()["evaluation_id"]
        shown = self.request("GET", f"/evaluation/{identifier}").json()["limits"]
        self.assertEqual((shown["memory"], shown["wall_clock"], shown["cpu"]), (2**26, 2.5, 300))
        limits = self.service.world.sandbox.last.limits
        self.assertEqual((limits.memory, limits.wall_clock, limits.cpu), (2**26, 2.5, 300))
        self.service.reactor.advance(2.6)
        self.assertEqual(self.child.signals, [signal.SIGTERM])

    def test_refused_limit_is_400_and_names_the_field(self) -> None:
        for name, value, words in (
            ("memory", b"1G", OVER),
            ("wall_clock", b"0", "'0' is not above 0"),
            ("cpu", b"2.5", "'2.5' is not a whole number of seconds, such as 10"),
            ("memroy", b"1M", "no such limit; write limits[NAME], where NAME is "),
        ):
            field = f"limits[{name}]"
            problem = self.post(400, form(parts(**{field: value}))).json()
            self.assertEqual(problem["field"], field)
            self.assertTrue(problem["detail"].startswith(f"{field}: {words}"), problem["detail"])
        self.assertEqual(problem.get("limit"), None)

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
        body = form(parts())
        self.request("POST", "/evaluate?x=1", data=body, headers={"Content-Type": MULTIPART})


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

    def test_unknown_discarded_and_malformed_are_404_410_and_400(self) -> None:
        identifier = self.evaluate()
        self.child.print(b"a\nb\n")
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

    def test_head_answers_as_get_without_body(self) -> None:
        identifier = self.evaluate()
        for path, status in (
            (f"/evaluation/{identifier}", 200),
            (f"/evaluation/{identifier}/events", 200),
            ("/health", 200),
            ("/evaluation/unknown", 404),
        ):
            connection = self.connect()
            connection.request(f"GET {path}")
            got = connection.answer()
            connection.request(f"HEAD {path}")
            answer = connection.answer("HEAD")
            self.assertEqual((answer.status, got.status), (status, status))
            self.assertEqual(answer.body, b"")
            self.assertEqual(int(answer.headers["Content-Length"]), len(got.body))
            self.assertEqual(answer.headers.keys(), got.headers.keys())
            described.check("HEAD", path, answer)
