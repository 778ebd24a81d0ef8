"""`web`: submissions for problems, and tokens that are restricted to problems."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

from tawebeval.config import Configuration, LimitSettings, MaximumLimitSettings, ProblemSettings
from tawebeval.core.limits import LimitRange
from tawebeval.core.tokens import generate_token
from tests.cases.web import CallerTestCase, WebTestCase
from tests.fakes.clients import MULTIPART, Answer, Part, form, head, parts
from tests.fakes.world import OID, read_again

URL = "https://example.org/problem.git"
SOURCE = Part("submission[source]", b"print()", "a.py")
PROBLEMS = {
    "one": ProblemSettings(
        URL,
        "./run",
        commit=OID.upper(),
        directory="usr//bin",
        limits={"memory": "256M", "cpu": 400},
        fields=("source",),
        extensions=("sh", "awk"),
        title="First",
        description="The first one.",
        statement="# First\n",
    ),
    "two": ProblemSettings(URL, "./run", commit=OID),
}
CONFIGURATION = Configuration(
    problems=PROBLEMS, limits=LimitSettings(maximum=MaximumLimitSettings(cpu=500))
)


class CountedLimits(LimitSettings, frozen=True):
    """Limits that count how often their ranges are computed."""

    counted: ClassVar[list[None]] = []

    @property
    def requestable_ranges(self) -> Mapping[str, LimitRange]:
        """The ranges."""
        self.counted.append(None)
        return super().requestable_ranges


class ProblemTests(WebTestCase):
    """Without tokens."""

    configuration = CONFIGURATION

    def submit(self, name: str, *sent: Part, status: int = 200, **headers: str) -> Answer:
        """Post a form for a problem."""
        return self.request(
            "POST",
            f"/problems/{name}/evaluate",
            status,
            data=form(sent or (SOURCE,)),
            headers={"Content-Type": MULTIPART, **headers},
        )

    def status(self, answer: Answer) -> dict[str, Any]:
        """Return the status of an evaluation that was begun."""
        found: dict[str, Any] = self.request("GET", answer.headers["location"]).json()
        return found

    def test_submit(self) -> None:
        """The problem's fields make the evaluation, and the status names the problem."""
        status = self.status(self.submit("one"))
        self.assertEqual(status["problem"], "one")
        self.assertEqual(
            (status["repository"], status["commit_oid"], status["directory"]), (URL, OID, "usr/bin")
        )
        self.assertEqual(status["evaluator_cmd"], "./run")
        self.assertEqual(status["limits"]["memory"], 256 * 2**20)
        self.assertEqual(status["limits"]["cpu"], 400)
        self.finish()
        self.assertIsNone(self.status(self.post())["problem"])

    def test_chosen(self) -> None:
        """A submission chooses labels and the callback."""
        status = self.status(self.submit("one", SOURCE, Part("metadata[a]", b"b")))
        self.assertEqual(status["metadata"], {"a": "b"})
        refused = self.submit("one", SOURCE, Part("callback_url", b"ftp://x"), status=400)
        self.assertEqual(refused.json()["field"], "callback_url")

    def test_set_fields(self) -> None:
        """Any other known field is refused, even if it is as the problem has it; others pass."""
        for name in (
            *("repository[url]", "repository[branch]", "repository[depth]", "commit_oid", "oid"),
            *("directory", "evaluator_cmd", "limits[cpu]", "limits[memory]", "environment"),
            *("seed", "repositories[main][url]"),
        ):
            answer = self.submit("one", SOURCE, Part(name, b"./run"), status=400)
            self.assertIn("the problem 'one' sets this field", answer.json()["detail"], name)
            answer = self.submit("one", SOURCE, Part(name, b""), status=400)
        self.submit("one", SOURCE, Part("what", b"ever"))

    def test_files(self) -> None:
        """A file that is missing, or not expected, is named with those that are expected."""
        other = Part("submission[other]", b"", "b")
        answer = self.submit("one", SOURCE, other, status=400).json()
        self.assertEqual(answer["field"], "submission[other]")
        self.assertIn("its fields: submission[source]", answer["detail"])
        answer = self.submit("one", Part("metadata[a]", b"1"), status=400).json()
        self.assertEqual(answer["field"], "submission[source]")
        self.submit("two", SOURCE, other)
        self.submit("two", Part("metadata[a]", b"1"), status=400)

    def test_unknown(self) -> None:
        """404 before the body, with where the names are."""
        for name in ("three", "ONE", "%6fn"):
            answer = self.submit(name, status=404).json()
            self.assertIn("GET /problems", answer["detail"])
        self.submit("%6fne")
        connection = self.connect()
        fields = {"Content-Type": MULTIPART, "Content-Length": "50000"}
        connection.send(head("POST /problems/three/evaluate", fields))
        self.assertEqual(connection.answer().status, 404)
        for path in ("/problems/one/evaluate/", "/problems/three", "/problems/evaluate"):
            self.request("GET", path, 404)
        self.request("GET", "/problems/one/evaluate", 405)

    def test_keys(self) -> None:
        """The same form for another problem is another form."""
        key = {"Idempotency-Key": "k"}
        first = self.submit("one", **key).json()
        self.assertEqual(self.submit("one", **key).json(), first)
        self.submit("two", status=422, **key)
        body = form([SOURCE])
        self.post(422, body=body, **key)

    def test_reload(self) -> None:
        """A problem that is set later can be used from then on, one that is not no more."""
        self.service.registry.context.configuration = Configuration(
            problems={"new": PROBLEMS["two"]}
        )
        self.submit("one", status=404)
        self.submit("new")

    def test_lost_answer(self) -> None:
        """A repeated request gets its answer although the problem is set no more."""
        key = {"Idempotency-Key": "k"}
        first = self.submit("one", **key).json()
        self.service.registry.context.configuration = Configuration()
        self.assertEqual(self.submit("one", **key).json(), first)
        self.submit("one", SOURCE, Part("evaluator_cmd", b"id"), status=422, **key)
        self.submit("one", status=404, **{"Idempotency-Key": "other"})
        self.assertEqual(self.service.registry.records.last_sequence_number, 1)

    def test_branch(self) -> None:
        """The branch of a problem is resolved for each evaluation; the status says to what."""
        problem = ProblemSettings(URL, "./run", branch="main")
        self.service.registry.context.configuration = Configuration(problems={"new": problem})
        repositories = self.service.world.repositories
        for oid in ("a" * 40, "b" * 40):
            repositories.branches["main"] = oid
            self.assertEqual(self.status(self.submit("new"))["commit_oid"], oid)
            self.finish()

    def test_list(self) -> None:
        """All problems by name, with what they expect and the limits that hold."""
        listed = self.request("GET", "/problems").json()
        self.assertEqual([one["name"] for one in listed["data"]], ["one", "two"])
        one, two = listed["data"]
        self.assertEqual((one["title"], one["fields"]), ("First", ["source"]))
        self.assertEqual((one["extensions"], two["extensions"]), (["sh", "awk"], []))
        self.assertEqual((one["limits"]["cpu"], two["limits"]["cpu"]), (400, 300))
        self.assertNotIn(URL, str(listed))

    def test_document(self) -> None:
        """The document has the members of the list, and the statement."""
        one, two = self.request("GET", "/problems").json()["data"]
        self.assertEqual(one["description"], "The first one.")
        document = self.request("GET", "/problems/one").json()
        self.assertEqual(document, {**one, "statement": "# First\n"})
        self.assertEqual(self.request("GET", "/problems/two").json(), {**two, "statement": ""})
        self.request("HEAD", "/problems/one")

    def test_pages(self) -> None:
        """So many at a time; `end` and `Link` lead on."""
        with mock.patch("tawebeval.web.lists.PROBLEMS_PER_PAGE", 1):
            answer = self.request("GET", "/problems")
            self.assertEqual(answer.json()["end"], "one")
            self.assertEqual(answer.headers["link"], '</problems?after=one>; rel="next"')
            listed = self.request("GET", "/problems?after=one").json()
        self.assertEqual((listed["begin"], listed["end"]), ("one", None))
        self.assertEqual([one["name"] for one in listed["data"]], ["two"])

    def test_ranges(self) -> None:
        """The ranges of the limits, half of the time of a page, are computed once."""
        limits = CountedLimits(maximum=MaximumLimitSettings(cpu=500))
        self.service.registry.context.configuration = Configuration(
            problems=PROBLEMS, limits=limits
        )
        CountedLimits.counted.clear()
        self.request("GET", "/problems")
        self.assertEqual(len(CountedLimits.counted), 1)

    def test_filter(self) -> None:
        """The list of evaluations has those of one problem, exactly."""
        begun = {name: self.submit(name).json()["evaluation_id"] for name in PROBLEMS}
        self.post()
        listed = self.request("GET", "/evaluations?problem=one").json()["data"]
        self.assertEqual([one["evaluation_id"] for one in listed], [begun["one"]])
        self.assertEqual(listed[0]["problem"], "one")
        every = self.request("GET", "/evaluations").json()["data"]
        self.assertEqual([one["problem"] for one in every], ["one", "two", None])
        self.assertEqual(self.request("GET", "/evaluations?problem=on").json()["data"], [])
        for wrong in ("", "A", "a%2Cb"):
            self.request("GET", f"/evaluations?problem={wrong}", 400)


class TokenTests(CallerTestCase):
    """A token that is restricted to a problem, such as one in a page of a site."""

    def setUp(self) -> None:
        super().setUp()
        self.service.registry.context.configuration = CONFIGURATION
        token, line = generate_token("alice", os.urandom, problems=["one"])
        self.file.write_text(f"{self.file.read_text()}\n{line}")
        read_again(self.service.access)
        self.headers["student"] = f"Bearer {token}"
        self.service.access.rate_limit.per_minute = 0

    def send(self, path: str, status: int, caller: str = "student", method: str = "POST") -> Answer:
        """Post a form that would run a command anywhere."""
        connection = self.connect()
        body = form(parts(evaluator_cmd=b"id"))
        headers = {"Content-Type": MULTIPART, "Authorization": self.headers[caller]}
        connection.request(f"{method} {path}", body, **headers)
        answer = connection.answer()
        self.assertEqual(answer.status, status, f"{method} {path}: {answer.body!r}")
        return answer

    def submit(self, name: str, status: int, *others: Part, caller: str = "student") -> Answer:
        """Post a form for a problem."""
        return self.request(
            "POST",
            f"/problems/{name}/evaluate",
            status,
            data=form([SOURCE, *others]),
            headers={"Content-Type": MULTIPART, "Authorization": self.headers[caller]},
        )

    def test_permitted(self) -> None:
        """It submits for its problem, and reads and cancels what it has begun."""
        place = self.submit("one", 200).headers["location"]
        self.child.print(b"a\n")
        for method in ("GET", "HEAD"):
            self.call(method, place, 200, "student")
            self.call(method, f"{place}/events", 200, "student")
        identifier = place.rpartition("/")[2]
        self.call("GET", f"/evaluation_events?evaluation={identifier}", 200, "student")
        listed = self.call("GET", "/problems", 200, "student").json()["data"]
        self.assertEqual([one["name"] for one in listed], ["one"])
        self.call("GET", "/problems/one", 200, "student")
        self.assertEqual(len(self.call("GET", "/problems", 200, "alice").json()["data"]), 2)
        cancelled = self.ask("DELETE", place, headers={"Authorization": self.headers["student"]})
        self.child.end(-15)
        self.service.world.turn()
        self.assertEqual(self.answer(cancelled).status, 204)

    def test_refused(self) -> None:
        """Everything else is 403: other problems, known or not, and the list of evaluations."""
        answer = self.submit("two", 403).json()
        self.assertIn("does not permit the problem 'two'", answer["detail"])
        self.submit("three", 403)
        for name in ("two", "three"):
            self.call("GET", f"/problems/{name}", 403, "student")
        self.call("GET", "/evaluations", 403, "student")
        self.call("GET", "/nowhere", 403, "student")
        self.call("GET", "/health", 200, "student")

    def test_no_callback(self) -> None:
        """It has the daemon call no URL."""
        url = Part("callback_url", b"https://example.org/")
        answer = self.submit("one", 400, url).json()
        self.assertEqual(answer["field"], "callback_url")
        self.assertIn("restricted to problems", answer["detail"])
        self.submit("one", 200, url, caller="alice")

    def test_no_command(self) -> None:
        """No spelling of a path or a method runs a command of the form."""
        for path in (
            *("/evaluate", "//evaluate", "/evaluate/", "/./evaluate", "/%65valuate"),
            *("/%2fevaluate", "/%2Fevaluate", "/evaluate?x", "/evaluate;x", "/EVALUATE"),
            *("/problems/one/../../evaluate", "/problems/one/%2e%2e/%2e%2e/evaluate"),
            *("/problems/one/..%2f..%2fevaluate", "/problems/one/%2e%2e%2f%2e%2e%2fevaluate"),
            *("/problems/one%2fevaluate/../../../evaluate", "/problems/one/evaluate/../evaluate"),
            *("/problems/two%2f..%2fone/evaluate", "/problems/one%2f..%2ftwo/evaluate"),
            *(
                "/problems/one%00/evaluate",
                "/problems/one%2500/evaluate",
                "/problems/%252e/evaluate",
            ),
            *("/problems/two/evaluate?name=one", "/evaluation/one/evaluate"),
            *("/evaluation_events", "/evaluation_events/../evaluate", "/health/../evaluate"),
            *("http://localhost/evaluate", "http://localhost//evaluate"),
            *("/problems/%2e%2e/evaluate", "/problems/../evaluate", "/problems//evaluate"),
        ):
            self.send(path, 403)
            self.send(path, 405 if path == "/health" else 403, method="PUT")
        # The problem's own path takes none of the fields that would make a command.
        for path in (
            *("/problems/one/evaluate", "//problems//one//evaluate", "/problems/%6fne/evaluate"),
            *("/problems%2fone/evaluate", "/problems/one%2fevaluate"),
            "http://localhost/problems/one/evaluate",
        ):
            self.assertIn("sets this field", self.send(path, 400).json()["detail"])
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            answer = self.send("/evaluate", 403, method=method)
        self.assertIn("restricted to problems", answer.json()["detail"])
        self.assertEqual(self.service.world.spawn.children, [])
        self.assertEqual(self.service.leftovers(), [])

    def test_new_routes(self) -> None:
        """Of all routes, also those added later, only these few are not refused."""
        permitted = {
            ("POST", "/problems/<name>/evaluate"),
            ("POST", "/evaluation/<identifier>/rerun"),
            ("GET", "/problems"),
            ("GET", "/problems/<name>"),
            ("GET", "/evaluation/<identifier>"),
            ("DELETE", "/evaluation/<identifier>"),
            ("GET", "/evaluation/<identifier>/events"),
            ("GET", "/evaluation/<identifier>/submission"),
            ("POST", "/evaluation/<identifier>/links"),
            ("DELETE", "/evaluation/<identifier>/links"),
            ("GET", "/evaluation_events"),
        }
        open_to_all = {"/", "/health", "/health/ready", "/metrics", "/openapi.json"}
        for method, route in self.service.routes.list_routes():
            if route in open_to_all or method in ("OPTIONS", "HEAD", "other"):
                continue
            path = route.replace("<name>", "one").replace("<identifier>", "a" * 40)
            if route == "other":
                path = "/other"
            with self.subTest(method=method, route=route):
                connection = self.connect()
                connection.request(f"{method} {path}", Authorization=self.headers["student"])
                is_refused = connection.answer().status == 403
                self.assertEqual(is_refused, (method, route) not in permitted)

    def test_read_only(self) -> None:
        """A token for reading stays one with problems."""
        token, line = generate_token("alice", os.urandom, is_read_only=True, problems=["one"])
        self.file.write_text(f"{self.file.read_text()}\n{line}")
        read_again(self.service.access)
        self.headers["student"] = f"Bearer {token}"
        self.submit("one", 403)
        self.call("GET", "/problems", 200, "student")
