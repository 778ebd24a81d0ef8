"""`web`: evaluations that run again."""

from __future__ import annotations

from typing import Any, ClassVar

from twisted.internet.defer import Deferred

from tawebeval.config import (
    CallerSettings,
    Configuration,
    LimitSettings,
    MaximumLimitSettings,
    ProblemSettings,
)
from tawebeval.errors import EvaluationFailure
from tawebeval.sandbox.workspace import derive_directory_name
from tests.cases.web import CallerTestCase, Tokens, WebTestCase
from tests.fakes.clients import MULTIPART, Answer, Part, form, parts
from tests.fakes.world import OID

OTHER = "d" * 40
FIELDS = {
    "directory": b"usr",
    "seed": b"5",
    "limits[memory]": b"64M",
    "limits[wall_clock]": b"2.5",
    "metadata[a]": b"b",
    "depth": b"3",
}
PROBLEM = ProblemSettings("https://example.org/p.git", "./run", commit=OID)
CONFIGURATION = Configuration(
    limits=LimitSettings(maximum=MaximumLimitSettings(wall_clock=1000)),
    problems={"one": PROBLEM, "two": PROBLEM},
    callers=CallerSettings(requests_per_minute=0),
)
SAME = (
    *("problem", "repository", "commit_oid", "directory", "evaluator_cmd", "seed", "limits"),
    "metadata",
)
"""The members of the status that a rerun has as the first run had them."""


class RerunTests(WebTestCase):
    configuration = CONFIGURATION

    def begin(self, path: str = "/evaluate", **fields: bytes | None) -> str:
        sent = parts(**fields)
        if path != "/evaluate":
            sent = [part for part in sent if part.name.startswith(("submission", "meta"))]
        place: str = self.post(200, form(sent), path).headers["location"]
        return place

    def rerun(self, place: str, status: int = 200, *sent: Part, **headers: str) -> Answer:
        given = {"data": form(sent), "headers": {"Content-Type": MULTIPART, **headers}}
        return self.request("POST", f"{place}/rerun", status, **(given if sent else {}))

    def status(self, place: str) -> dict[str, Any]:
        document: dict[str, Any] = self.request("GET", place).json()
        return document

    @property
    def stored(self) -> int:
        return self.service.registry.submissions.budget.used

    @property
    def kept(self) -> int:
        return len(list(self.service.root.glob("evaluations/*/submission")))

    def read_to_end(self, *places: str) -> None:
        for place in places:
            self.page(place.rpartition("/")[2], "?after=end")

    def test_rerun_has_the_same_fields_seed_and_files(self) -> None:
        first = self.begin(**FIELDS)
        self.finish()
        again = self.rerun(first)
        place = again.headers["location"]
        self.assertNotEqual(place, first)
        self.assertEqual(again.json()["id"], place.rpartition("/")[2])
        before, after = self.status(first), self.status(place)
        for name in SAME:
            self.assertEqual(after[name], before[name], name)
        path = self.child.environment["SUBMISSION_FILE_SOURCE"]
        self.assertTrue(path.endswith("/submission/source/solution.py"), path)
        files = self.service.root.glob("evaluations/*/submission/source/solution.py")
        self.assertEqual([file.read_bytes() for file in files], [b"print()\n"] * 2)
        (repository, _), *others = self.service.world.repositories.asked
        self.assertEqual({each for each, _ in others}, {repository})

    def test_rerun_has_the_drawn_seed(self) -> None:
        place = self.begin(seed=None)
        seed = self.status(place)["seed"]
        for _ in range(2):
            self.finish()
            place = self.rerun(place).headers["location"]
            self.assertEqual(self.status(place)["seed"], seed)

    def test_fields_of_the_form_replace_those_of_the_first_run(self) -> None:
        first = self.begin(**FIELDS)
        self.finish()
        sent = {
            "seed": b"6",
            "limits[memory]": b"128M",
            "limits[cpu]": b"7",
            "metadata[a]": b"",
            "metadata[c]": b"d",
            "commit_oid": OTHER.encode(),
        }
        answer = self.rerun(first, 200, *(Part(name, value) for name, value in sent.items()))
        status = self.status(answer.headers["location"])
        self.assertEqual((status["seed"], status["commit_oid"]), (6, OTHER))
        limits = status["limits"]
        self.assertEqual(
            (limits["memory"], limits["cpu"], limits["wall_clock"]), (128 * 2**20, 7, 2.5)
        )
        self.assertEqual(status["metadata"], {"c": "d"})

    def test_rerun_without_body_or_fields_changes_nothing_and_other_bodies_are_415(self) -> None:
        place = self.begin()
        self.finish()
        self.post(200, form([]), f"{place}/rerun")
        self.finish()
        self.assertEqual(self.exchange(f"POST {place}/rerun", b"seed=3").status, 415)
        self.assertEqual(self.exchange(f"POST {place}/rerun", b"").status, 200)

    def test_rerun_is_409_before_the_end_410_once_forgotten_and_404_if_unknown(self) -> None:
        place = self.begin()
        self.assertIn("has not ended", self.rerun(place, 409).json()["detail"])
        self.finish()
        self.rerun(place)
        self.finish()
        self.page(place.rpartition("/")[2], "?after=end")
        self.rerun(place, 410)
        self.rerun(f"/evaluation/{'a' * 40}", 404)
        self.request("GET", f"{place}/rerun", 405)

    def test_evaluation_whose_commit_was_not_fetched_can_be_rerun(self) -> None:
        repositories = self.service.world.repositories
        repositories.gate.error = EvaluationFailure("repository", "away")
        place = self.begin(**FIELDS)
        self.assertEqual(self.status(place)["state"], "failed")
        repositories.gate.error = None
        again = self.rerun(place).headers["location"]
        self.assertEqual(self.status(again)["seed"], 5)
        self.assertEqual(self.status(again)["state"], "running")

    def test_key_of_a_rerun_is_bound_to_its_evaluation(self) -> None:
        places = [self.begin(), self.begin()]
        for child in self.service.world.spawn.children:
            child.end(0)
        self.service.world.turn()
        key = {"Idempotency-Key": "k"}
        first = self.rerun(places[0], 200, Part("seed", b"1"), **key).json()
        stored = self.stored
        self.assertEqual(self.rerun(places[0], 200, Part("seed", b"1"), **key).json(), first)
        self.assertEqual(self.stored, stored)
        self.rerun(places[1], 422, Part("seed", b"1"), **key)
        self.assertEqual(self.stored, stored)

    def test_repeated_rerun_is_answered_without_files_or_evaluation(self) -> None:
        place = self.begin()
        self.finish()
        key = {"Idempotency-Key": "k"}
        seed = Part("seed", b"1")
        first = self.rerun(place, 200, seed, **key).json()
        self.finish()
        budget = self.service.registry.submissions.budget
        budget.make_room(self.stored, None)
        stored = self.stored
        self.rerun(place, 410)
        self.assertEqual(self.rerun(place, 200, seed, **key).json(), first)
        self.page(place.rpartition("/")[2], "?after=end")
        self.assertEqual(self.rerun(place, 200, seed, **key).json(), first)
        self.rerun(place, 422, Part("seed", b"2"), **key)
        self.rerun(place, 422, Part("evaluator_cmd", b"id"), **key)
        self.rerun(place, 410, seed, **{"Idempotency-Key": "other"})
        self.page(first["id"], "?after=end")
        self.rerun(place, 410, seed, **key)
        self.assertEqual(self.stored, stored)

    def test_repeated_rerun_is_410_if_its_key_is_forgotten_during_the_upload(self) -> None:
        place = self.begin()
        self.finish()
        again = self.rerun(place, **{"Idempotency-Key": "k"}).json()["id"]
        self.finish()
        self.page(place.rpartition("/")[2], "?after=end")
        body = form(parts())
        connection = self.begin_form(len(body), f"{place}/rerun", **{"Idempotency-Key": "k"})
        self.page(again, "?after=end")
        connection.send(body)
        self.assertEqual(connection.answer().status, 410)
        self.assertEqual((self.service.leftovers(), self.stored), ([], 0))

    def test_files_count_for_each_rerun_until_it_is_read(self) -> None:
        place = self.begin()
        self.finish()
        size = self.stored
        again = self.rerun(place).headers["location"]
        self.assertEqual(self.stored, 2 * size)
        self.page(place.rpartition("/")[2], "?after=end")
        self.assertEqual(len(self.service.leftovers()), 1)
        path = next(self.service.root.glob("evaluations/*/submission/source/solution.py"))
        self.assertEqual((path.read_bytes(), self.stored), (b"print()\n", size))
        self.finish()
        self.page(again.rpartition("/")[2], "?after=end")
        self.assertEqual((self.service.leftovers(), self.stored), ([], 0))

    def test_upload_displaces_the_oldest_kept_files(self) -> None:
        places = []
        for _ in range(3):
            places.append(self.begin())
            self.finish()
        budget = self.service.registry.submissions.budget
        budget.total = self.stored + 100
        last = self.begin()
        self.assertLessEqual(self.stored, budget.total)
        self.assertEqual(self.kept, 3)
        self.assertIn("send the submission again", self.rerun(places[0], 410).json()["detail"])
        self.assertEqual(self.status(places[0])["state"], "finished")
        self.finish()
        again = self.rerun(places[2]).headers["location"]
        self.finish()
        self.read_to_end(*places, last, again)
        self.assertEqual((self.service.leftovers(), self.stored), ([], 0))

    def test_upload_that_never_fits_displaces_nothing(self) -> None:
        place = self.begin()
        self.finish()
        self.service.registry.submissions.budget.total = self.stored
        self.post(503, form([*parts(), Part("x", b"x" * 50_000)]))
        self.assertEqual((self.kept, len(self.service.leftovers())), (1, 1))
        self.service.registry.submissions.budget.total *= 2
        self.rerun(place)

    def test_next_daemon_takes_over_kept_files(self) -> None:
        place = self.begin()
        identifier = place.rpartition("/")[2]
        self.finish()
        self.successResultOf(Deferred.fromCoroutine(self.service.registry.drain_and_close()))
        directory = f"evaluations/{derive_directory_name(identifier)}"
        self.assertEqual((self.service.leftovers(), self.kept), ([directory], 1))
        self.assertEqual(list(self.service.world.store.rows), [identifier])
        self.read_to_end(place)
        self.assertEqual((self.service.leftovers(), self.stored), ([], 0))
        self.assertEqual(list(self.service.world.store.rows), [])

    def test_rerun_of_a_problem_may_have_another_commit(self) -> None:
        place = self.begin("/problems/one/evaluate")
        self.finish()
        self.service.registry.context.configuration = (
            Configuration()
        )  # the problem is there no more
        again = self.rerun(place, 200, Part("metadata[a]", b"b"))
        first, second = self.status(place), self.status(again.headers["location"])
        self.assertEqual((second["problem"], second["seed"]), ("one", first["seed"]))
        for name in ("evaluator_cmd", "directory"):
            answer = self.rerun(place, 400, Part(name, b"1")).json()
            self.assertIn("the problem 'one' sets this field", answer["detail"])
        self.finish()
        again = self.rerun(place, 200, Part("commit_oid", OTHER.encode()), Part("seed", b"6"))
        status = self.status(again.headers["location"])
        self.assertEqual(
            (status["problem"], status["commit_oid"], status["seed"]), ("one", OTHER, 6)
        )


class TokenTests(CallerTestCase):
    configuration = CONFIGURATION
    tokens: ClassVar[Tokens] = {
        **CallerTestCase.tokens,
        "student": {"caller": "alice", "problems": ["one"]},
        "reader": {"caller": "alice", "is_read_only": True},
    }

    def submit(self, name: str) -> str:
        body, token = form([Part("submission[source]", b"", "a")]), self.headers["alice"]
        answer = self.post(200, body, f"/problems/{name}/evaluate", Authorization=token)
        self.finish()
        place: str = answer.headers["location"]
        return place

    def test_restricted_token_reruns_evaluations_of_its_problems_only(self) -> None:
        other = self.submit("two")
        self.call("POST", f"{other}/rerun", 403, "student")
        self.call("GET", f"{other}/events?after=end", 200, "alice")
        place = self.begin("alice").headers["location"]
        self.finish()
        self.call("POST", f"{place}/rerun", 403, "student")
        self.call("GET", f"{place}/events?after=end", 200, "alice")
        own = self.submit("one")
        self.call("POST", f"//{own}/rerun", 200, "student")
        self.finish()
        for name, detail in (
            ("callback_url", "restricted to problems"),
            *((name, "the problem 'one' sets") for name in ("seed", "commit_oid", "limits[cpu]")),
        ):
            token = {"Authorization": self.headers["student"]}
            refused = self.post(400, form([Part(name, b"1")]), f"{own}/rerun", **token)
            self.assertIn(detail, refused.json()["detail"])
