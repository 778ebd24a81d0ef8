"""`web`: submissions for problems, and tokens that are restricted to problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import msgspec

from tawebeval.config import (
    CallerSettings,
    Configuration,
    LimitSettings,
    MaximumLimitSettings,
    ProblemSettings,
)
from tawebeval.web.statements import (
    MAX_CACHED_DOCUMENTS,
    MAX_DOCUMENT_AGE_SECONDS,
    MAX_STATEMENT_BYTES,
    MAX_TOTAL_PICTURE_BYTES,
)
from tests.cases.web import CallerTestCase, Tokens, WebTestCase
from tests.fakes.clients import MULTIPART, Answer, Part, form, parts
from tests.fakes.world import OID

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
        statement="statement.md",
    ),
    "two": ProblemSettings(URL, "./run", commit=OID),
}
CONFIGURATION = Configuration(
    problems=PROBLEMS,
    limits=LimitSettings(maximum=MaximumLimitSettings(cpu=500)),
    callers=CallerSettings(requests_per_minute=0),
)


class ProblemTests(WebTestCase):
    configuration = CONFIGURATION

    def submit(self, name: str, *sent: Part, status: int = 200, **headers: str) -> Answer:
        return self.post(status, form(sent or (SOURCE,)), f"/problems/{name}/evaluate", **headers)

    def status(self, answer: Answer) -> dict[str, Any]:
        found: dict[str, Any] = self.request("GET", answer.headers["location"]).json()
        return found

    def test_submission_takes_fields_of_the_problem_and_the_status_has_its_name(self) -> None:
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

    def test_known_field_that_the_problem_sets_is_refused(self) -> None:
        for name in (
            *("repository[url]", "repository[branch]", "repository[depth]", "commit_oid", "oid"),
            *("directory", "evaluator_cmd", "limits[cpu]", "limits[memory]", "environment"),
            *("seed", "repositories[main][url]"),
        ):
            answer = self.submit("one", SOURCE, Part(name, b"./run"), status=400)
            self.assertIn("the problem 'one' sets this field", answer.json()["detail"], name)
            answer = self.submit("one", SOURCE, Part(name, b""), status=400)
        self.submit("one", SOURCE, Part("what", b"ever"))

    def test_missing_or_unexpected_file_is_named(self) -> None:
        other = Part("submission[other]", b"", "b")
        answer = self.submit("one", SOURCE, other, status=400).json()
        self.assertEqual(answer["field"], "submission[other]")
        self.assertIn("its fields: submission[source]", answer["detail"])
        answer = self.submit("one", Part("metadata[a]", b"1"), status=400).json()
        self.assertEqual(answer["field"], "submission[source]")
        self.submit("two", SOURCE, other)
        self.submit("two", Part("metadata[a]", b"1"), status=400)

    def test_unknown_problem_is_404_before_the_body(self) -> None:
        for name in ("three", "ONE", "%6fn"):
            answer = self.submit(name, status=404).json()
            self.assertIn("GET /problems", answer["detail"])
        self.submit("%6fne")
        connection = self.begin_form(50_000, "/problems/three/evaluate")
        self.assertEqual(connection.answer().status, 404)
        for path in ("/problems/one/evaluate/", "/problems/three", "/problems/evaluate"):
            self.request("GET", path, 404)
        self.request("GET", "/problems/one/evaluate", 405)

    def test_idempotency_key_reused_for_another_problem_is_422(self) -> None:
        key = {"Idempotency-Key": "k"}
        first = self.submit("one", **key).json()
        self.assertEqual(self.submit("one", **key).json(), first)
        self.submit("two", status=422, **key)
        body = form([SOURCE])
        self.post(422, body=body, **key)

    def test_repeated_request_is_answered_for_a_removed_problem(self) -> None:
        key = {"Idempotency-Key": "k"}
        first = self.submit("one", **key).json()
        self.service.registry.context.configuration = Configuration()
        self.assertEqual(self.submit("one", **key).json(), first)
        self.submit("one", SOURCE, Part("evaluator_cmd", b"id"), status=422, **key)
        self.submit("one", status=404, **{"Idempotency-Key": "other"})
        self.assertEqual(self.service.registry.records.last_sequence_number, 1)

    def test_branch_is_resolved_for_each_evaluation(self) -> None:
        problem = ProblemSettings(URL, "./run", branch="main")
        self.service.registry.context.configuration = Configuration(problems={"new": problem})
        repositories = self.service.world.repositories
        for oid in ("a" * 40, "b" * 40):
            repositories.branches["main"] = oid
            self.assertEqual(self.status(self.submit("new"))["commit_oid"], oid)
            self.finish()

    def test_problems_are_listed_by_name_with_files_and_limits(self) -> None:
        listed = self.request("GET", "/problems").json()
        self.assertEqual([one["name"] for one in listed["data"]], ["one", "two"])
        one, two = listed["data"]
        self.assertEqual((one["title"], one["fields"]), ("First", ["source"]))
        self.assertEqual((one["extensions"], two["extensions"]), (["sh", "awk"], []))
        self.assertEqual((one["limits"]["cpu"], two["limits"]["cpu"]), (400, 300))
        self.assertNotIn(URL, str(listed))

    def test_problem_document_has_the_list_entry_and_the_statement(self) -> None:
        one, two = self.request("GET", "/problems").json()["data"]
        self.assertEqual(one["description"], "The first one.")
        self.write("statement.md", b"# First\n")
        document = self.request("GET", "/problems/one").json()
        self.assertEqual(document, {**one, "statement": "# First\n", "pictures": {}})
        document = self.request("GET", "/problems/two").json()
        self.assertEqual(document, {**two, "statement": "", "pictures": {}})
        self.request("HEAD", "/problems/one")

    def write(self, name: str, content: bytes) -> Path:
        """Write a file into the directory of the problem, in the tree of each commit."""
        repositories = self.service.world.repositories
        if repositories.tree == Path("/"):
            repositories.tree = Path(self.mktemp()).resolve()
        file = repositories.tree / "usr" / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return file

    def read(self, status: int = 200, language: str = "") -> Any:
        headers = {"Accept-Language": language} if language else {}
        return self.request("GET", "/problems/one", status, headers=headers).json()

    def test_statement_is_in_the_language_that_the_reader_prefers(self) -> None:
        self.write("statement.md", b"English")
        self.write("statement.it.md", b"Italiano")
        for accepted, text in (
            ("it-IT,it;q=0.9,en;q=0.8", "Italiano"),
            ("en,it;q=0.9", "English"),
            ("en;q=0.1, IT", "Italiano"),
            ("de", "English"),
            ("../x", "English"),
            ("*", "English"),
        ):
            self.assertEqual(self.read(language=accepted)["statement"], text, accepted)
        self.assertEqual(self.service.world.repositories.users, 0)

    def test_language_without_a_statement_reads_no_repository(self) -> None:
        self.write("statement.md", b"English")
        self.write("statement.it.md", b"Italiano")
        asked = self.service.world.repositories.asked
        for number in range(MAX_CACHED_DOCUMENTS + 1):
            language = f"a{chr(ord('a') + number % 26)}{chr(ord('a') + number // 26)}"
            self.assertEqual(self.read(language=language)["statement"], "English")
        self.assertEqual(len(asked), 1)
        for _ in range(2):
            self.assertEqual(self.read(language="it")["statement"], "Italiano")
        self.assertEqual(len(asked), 2)

    def test_statement_that_is_a_link_does_not_reveal_files_of_the_machine(self) -> None:
        file = self.write("statement.md", b"English")
        for target in ("/etc/passwd", "/nowhere"):
            own = file.with_name("statement.it.md")
            own.symlink_to(target)
            detail = self.read(503, language="it")["detail"]
            self.assertIn("leads out of the repository", detail)
            own.unlink()
            self.service.reactor.advance(MAX_DOCUMENT_AGE_SECONDS)

    def test_statement_is_read_while_evaluations_wait_for_a_run_slot(self) -> None:
        self.write("statement.md", b"English")
        fetches = self.service.world.fetches
        for holder in map(str, range(fetches.slot_count)):
            fetches.take_slot_unconditionally(holder)
            fetches.release_slot_keep_quota(holder)
        self.assertEqual(self.read()["statement"], "English")

    def test_statement_read_across_a_reload_is_not_cached_for_the_new_settings(self) -> None:
        self.write("statement.md", b"old")
        self.write("other.md", b"new")
        gate = self.service.world.repositories.gate
        gate.shut = True
        before = self.ask("GET", "/problems/one")
        changed = msgspec.structs.replace(PROBLEMS["one"], statement="other.md")
        context = self.service.registry.context
        context.configuration = msgspec.structs.replace(CONFIGURATION, problems={"one": changed})
        after = self.ask("GET", "/problems/one")
        gate.open()
        self.assertEqual(self.answer(before).json()["statement"], "old")
        self.assertEqual(self.answer(after).json()["statement"], "new")
        self.assertEqual(self.read()["statement"], "new")

    def test_statement_includes_its_pictures_and_no_other_file(self) -> None:
        names = ("a.png", "b.SVG", "../c.jpg", "none.png", "secret.txt", "/etc/a.png", "link.png")
        names += ("my%20dot.png", "%2e%2e/%2e%2e/%2e%2e/a.png", "x%00.png")
        text = "".join(f"![x]({name}) " for name in (*names, "http://h/a.png"))
        file = self.write("statement.md", text.encode())
        files = (("a.png", b"a"), ("b.SVG", b"b"), ("secret.txt", b"s"), ("my dot.png", b"d"))
        for name, content in files:
            self.write(name, content)
        self.write("../c.jpg", b"c")
        outside = Path(self.mktemp()).resolve()
        outside.write_bytes(b"outside")
        file.with_name("link.png").symlink_to(outside)
        self.assertEqual(
            self.read()["pictures"],
            {
                "a.png": "data:image/png;base64,YQ==",
                "b.SVG": "data:image/svg+xml;base64,Yg==",
                "../c.jpg": "data:image/jpeg;base64,Yw==",
                "my%20dot.png": "data:image/png;base64,ZA==",
            },
        )

    def test_pictures_beyond_the_bound_are_left_out(self) -> None:
        self.write("statement.md", b"![](a.png) ![](b.png) ![](c.png)")
        for name, size in (("a.png", 1), ("b.png", MAX_TOTAL_PICTURE_BYTES), ("c.png", 1)):
            self.write(name, b"x" * size)
        self.assertEqual(set(self.read()["pictures"]), {"a.png", "c.png"})

    def test_statement_is_read_again_after_a_minute_or_kept_if_unreadable(self) -> None:
        file = self.write("statement.md", b"one")
        self.assertEqual(self.read()["statement"], "one")
        file.write_bytes(b"two")
        self.assertEqual(self.read()["statement"], "one")
        self.service.reactor.advance(MAX_DOCUMENT_AGE_SECONDS)
        self.assertEqual(self.read()["statement"], "two")
        file.unlink()
        self.service.reactor.advance(MAX_DOCUMENT_AGE_SECONDS)
        self.assertEqual(self.read()["statement"], "two")

    def test_statement_that_cannot_be_read_is_503_without_a_path_of_the_machine(self) -> None:
        file = self.write("statement.md", b"x" * (MAX_STATEMENT_BYTES + 1))

        def check(reason: str) -> None:
            self.assertEqual(
                self.read(503)["detail"], f"cannot read the statement statement.md: {reason}"
            )

        check("the file is over 64 KiB; shorten the statement")
        file.write_bytes(b"\xff")
        check("the file is not UTF-8")
        file.unlink()
        check("No such file or directory")
        file.symlink_to("statement.md")
        check("Too many levels of symbolic links")
        file.unlink()
        file.symlink_to("/etc/passwd")
        check("the path leads out of the repository")
        self.assertEqual(self.service.world.repositories.users, 0)

    def test_cursor_and_link_of_the_problem_list_lead_to_the_next_page(self) -> None:
        with mock.patch("tawebeval.web.lists.PROBLEMS_PER_PAGE", 1):
            answer = self.request("GET", "/problems")
            self.assertEqual(answer.json()["end"], "one")
            self.assertEqual(answer.headers["link"], '</problems?after=one>; rel="next"')
            listed = self.request("GET", "/problems?after=one").json()
        self.assertEqual((listed["begin"], listed["end"]), ("one", None))
        self.assertEqual([one["name"] for one in listed["data"]], ["two"])

    def test_list_of_evaluations_filters_by_problem_exactly(self) -> None:
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

    configuration = CONFIGURATION
    tokens: ClassVar[Tokens] = {
        **CallerTestCase.tokens,
        "student": {"caller": "alice", "problems": ["one"]},
    }

    def send(self, path: str, status: int, caller: str = "student", method: str = "POST") -> Answer:
        connection = self.connect()
        body = form(parts(evaluator_cmd=b"id"))
        headers = {"Content-Type": MULTIPART, "Authorization": self.headers[caller]}
        connection.request(f"{method} {path}", body, **headers)
        answer = connection.answer()
        self.assertEqual(answer.status, status, f"{method} {path}: {answer.body!r}")
        return answer

    def submit(self, name: str, status: int, *others: Part, caller: str = "student") -> Answer:
        token = {"Authorization": self.headers[caller]}
        return self.post(status, form([SOURCE, *others]), f"/problems/{name}/evaluate", **token)

    def test_restricted_token_submits_reads_and_cancels_for_its_problem(self) -> None:
        place = self.submit("one", 200).headers["location"]
        self.child.print(b"a\n")
        for method in ("GET", "HEAD"):
            self.call(method, place, 200, "student")
            self.call(method, f"{place}/events", 200, "student")
        identifier = place.rpartition("/")[2]
        self.call("GET", f"/evaluation_events?evaluation={identifier}", 200, "student")
        listed = self.call("GET", "/problems", 200, "student").json()["data"]
        self.assertEqual([one["name"] for one in listed], ["one"])
        self.call("GET", "/problems/one", 503, "student")  # no file is there
        self.assertEqual(len(self.call("GET", "/problems", 200, "alice").json()["data"]), 2)
        cancelled = self.ask("DELETE", place, headers={"Authorization": self.headers["student"]})
        self.child.end(-15)
        self.service.world.turn()
        self.assertEqual(self.answer(cancelled).status, 204)

    def test_everything_else_is_403_for_a_restricted_token(self) -> None:
        answer = self.submit("two", 403).json()
        self.assertIn("does not permit the problem 'two'", answer["detail"])
        self.submit("three", 403)
        for name in ("two", "three"):
            self.call("GET", f"/problems/{name}", 403, "student")
        self.call("GET", "/environments", 403, "student")
        self.call("GET", "/nowhere", 403, "student")
        self.call("GET", "/health", 200, "student")

    def test_restricted_token_chooses_no_callback(self) -> None:
        url = Part("callback_url", b"https://example.org/")
        answer = self.submit("one", 400, url).json()
        self.assertEqual(answer["field"], "callback_url")
        self.assertIn("restricted to problems", answer["detail"])
        self.submit("one", 200, url, caller="alice")

    def test_only_callers_who_may_run_commands_see_the_output_of_a_failed_build(self) -> None:
        problem = ProblemSettings(URL, "./run", commit=OID, build="make")
        self.service.registry.context.configuration = Configuration(problems={"one": problem})
        for caller in ("alice", "student"):
            place = self.submit("one", 200, caller=caller).headers["location"]
            self.child.complain(b"secret.cpp:1: error")
            self.child.end(3)
            self.service.world.turn()
            (event,) = self.call("GET", f"{place}/events", 200, caller).json()["data"]
            error = event["payload"]
            self.assertEqual(error["message"], "the build failed: it exited with status 3")
            shown = {"alice": "secret.cpp:1: error", "student": None}[caller]
            self.assertEqual(error.get("stderr"), shown)

    def test_restricted_token_cannot_run_commands_by_any_spelling_of_path_or_method(self) -> None:
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

    def test_only_a_few_of_all_routes_are_open_to_a_restricted_token(self) -> None:
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
            ("GET", "/evaluations"),
            ("GET", "/whoami"),
            ("GET", "/standings"),
        }
        open_to_all = {"/", "/docs", "/health", "/health/ready", "/metrics", "/openapi.json"}
        for method, route in self.service.application.list_routes():
            if route in open_to_all or method in ("OPTIONS", "HEAD", "other"):
                continue
            path = route.replace("<name>", "one").replace("<identifier>", "a" * 40)
            if route == "other":
                path = "/other"
            with self.subTest(method=method, route=route):
                is_refused = (
                    self.exchange(f"{method} {path}", Authorization=self.headers["student"]).status
                    == 403
                )
                self.assertEqual(is_refused, (method, route) not in permitted)

    def test_restricted_read_only_token_only_reads(self) -> None:
        self.add_token("student", is_read_only=True, problems=["one"])
        self.submit("one", 403)
        for method in ("GET", "HEAD"):
            self.call(method, "/problems", 200, "student")
