"""`web`: members of groups, their supervisors, tokens that many people share, and `GET /whoami`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar
from unittest import mock

from tawebeval.config import Configuration, ProblemSettings
from tests.cases.web import CallerTestCase, StreamTestCase, Tokens
from tests.fakes.clients import Part, form
from tests.fakes.streams import FOLLOWERS
from tests.fakes.world import EPOCH, read_again

OID = "a" * 40
PATH = "/problems/one/evaluate"
BODY = form([Part("submission[source]", b"x", "a.py")])


class SupervisorTestCase(StreamTestCase, CallerTestCase):
    """A teacher and two students of a group, a student of another group, and a site."""

    configuration = Configuration(
        problems={
            name: ProblemSettings(repository="https://example.org/p.git", command="x", commit=OID)
            for name in ("one", "two")
        }
    )
    tokens: ClassVar[Tokens] = {
        "teacher": {"supervised_groups": ("g",)},
        "assistant": {"supervised_groups": ("g",), "is_read_only": True},
        "ann": {"group": "g", "problems": ("one",)},
        "bob": {"group": "g"},
        "eve": {"group": "h"},
        "site": {"is_shared": True, "problems": ("one",)},
    }

    def submit(self, key: str, status: int = 200) -> str:
        found = self.post(status, BODY, PATH, Authorization=self.headers[key]).json()
        return str(found.get("evaluation_id"))

    def reload(self, **lines: str) -> None:
        self.file.write_text("\n".join({**self.token_lines, **lines}.values()))
        read_again(self.service.access)


class AccessTests(SupervisorTestCase):
    def test_supervisor_reads_only_members_and_acknowledges_none_of_their_events(self) -> None:
        for key, status in (("ann", 200), ("bob", 200), ("eve", 404), ("site", 404)):
            place = f"/evaluation/{self.submit(key)}"
            self.print(b"a\n")
            for reader in ("teacher", "assistant"):
                self.call("GET", place, status, reader)
                self.call("GET", f"{place}/events?after=1", status, reader)
                self.call("GET", f"{place}/submission", status, reader)
            for student in {"ann", "bob", "eve"} - {key}:
                for path in ("", "/events", "/submission"):
                    self.call("GET", place + path, 404, student)
            page = self.call("GET", f"{place}/events", 200, key).json()
            self.assertEqual(page["data"][0]["payload"], "a")
            self.finish()
            self.call("GET", f"{place}/events?after=end", status, "teacher")
            self.assertTrue(self.call("GET", f"{place}/events", 200, key).json()["data"])

    def test_supervisor_cancels_and_shares_only_evaluations_of_members(self) -> None:
        for key, is_member in (("ann", True), ("eve", False)):
            place = f"/evaluation/{self.submit(key)}"
            self.call("POST", f"{place}/links", 200 if is_member else 404, "teacher")
            self.call("DELETE", f"{place}/links", 204 if is_member else 404, "teacher")
            self.call("POST", f"{place}/links", 403, "assistant")
            self.call("DELETE", place, 403, "assistant")
            for student in {"ann", "bob", "eve"} - {key}:
                self.call("POST", f"{place}/links", 404, student)
                self.call("DELETE", f"{place}/links", 404, student)
                self.call("DELETE", place, 404, student)
            self.assertEqual(self.call("GET", place, 200, key).json()["state"], "running")
            headers = {"Authorization": self.headers["teacher"]}
            cancelled = self.ask("DELETE", place, headers=headers)
            if is_member:
                self.assertEqual(self.child.signals, [15])
                self.child.end(-15)
                self.service.world.turn()
            self.assertEqual(self.answer(cancelled).status, 204 if is_member else 404)

    def test_rerun_by_a_supervisor_belongs_to_the_member(self) -> None:
        first = self.submit("ann")
        self.finish()
        for key in ("bob", "eve"):
            self.call("POST", f"/evaluation/{first}/rerun", 404, key)
        self.call("POST", f"/evaluation/{first}/rerun", 403, "assistant")
        answer = self.call("POST", f"/evaluation/{first}/rerun", 200, "teacher")
        again = answer.json()["evaluation_id"]
        self.assertEqual(
            self.call("GET", f"/evaluation/{again}", 200, "ann").json()["state"], "running"
        )
        listed = self.call("GET", "/evaluations", 200, "ann").json()["data"]
        self.assertEqual([one["evaluation_id"] for one in listed], [first, again])
        for one in (first, again):
            request = self.service.registry.records[one].details.request
            self.assertTrue(request.has_restricted_token, "a failed build would show its output")
        other = self.submit("eve")
        self.call("POST", f"/evaluation/{other}/rerun", 404, "teacher")

    def test_forgotten_evaluation_of_a_member_is_410_for_the_supervisor(self) -> None:
        for key, status in (("ann", 410), ("eve", 404)):
            place = f"/evaluation/{self.submit(key)}"
            self.finish()
            self.call("GET", f"{place}/events?after=end", 200, key)
            self.call("GET", place, status, "teacher")

    def test_log_names_the_supervisor_and_the_member(self) -> None:
        log = self.service.site.request_log
        log.is_enabled = True
        lines: list[str] = []
        self.patch(type(log), "_write_line", lambda _, *line: lines.append(line[4]))
        place = f"/evaluation/{self.submit('ann')}"
        self.call("GET", place, 200, "teacher")
        self.call("GET", place, 200, "ann")
        self.assertEqual(lines, ["ann", "teacher for ann", "ann"])


class DeadlineTests(SupervisorTestCase):
    """The problem is open for a minute; the service begins before."""

    opens, closes = (datetime.fromtimestamp(EPOCH + n, UTC) for n in (60, 120))

    def configure(self, **settings: Any) -> None:
        problem = ProblemSettings("https://example.org/p.git", "x", commit=OID, **settings)
        self.service.registry.context.configuration = Configuration(problems={"one": problem})

    def test_early_or_late_submission_is_403_before_the_body_and_names_the_time(self) -> None:
        self.configure(opens=self.opens, closes=self.closes)
        for seconds, status, words in (
            (59.9, 403, f"opens at {self.opens.isoformat()}"),
            (0.1, 200, ""),
            (59.9, 200, ""),
            (0.1, 403, f"closed at {self.closes.isoformat()}"),
        ):
            self.service.reactor.advance(seconds)
            for key in ("ann", "bob", "site"):
                connection = self.begin_form(50_000, PATH, Authorization=self.headers[key])
                if status == 200:
                    self.assertEqual(connection.received, b"")
                else:
                    answer = connection.answer()
                    self.assertEqual(answer.status, status)
                    self.assertIn(words, answer.json()["detail"])
                connection.lose()
        self.assertEqual(self.service.leftovers(), [])
        self.submit("teacher")

    def test_statement_is_hidden_before_the_problem_opens(self) -> None:
        self.configure(opens=self.opens)
        refused = self.call("GET", "/problems/one", 403, "ann").json()["detail"]
        self.assertIn(f"opens at {self.opens.isoformat()}", refused)
        self.call("GET", "/problems/one", 200, "teacher")
        self.service.reactor.advance(60)
        self.call("GET", "/problems/one", 200, "ann")

    def test_form_that_is_complete_after_the_end_is_403(self) -> None:
        self.configure(closes=self.closes)
        self.service.reactor.advance(119)
        connection = self.begin_form(len(BODY), PATH, Authorization=self.headers["ann"])
        connection.send(BODY[:-8])
        self.service.reactor.advance(1)
        connection.send(BODY[-8:])
        self.turn()
        self.assertEqual(connection.answer().status, 403)
        self.assertEqual(self.service.registry.records.last_sequence_number, 0)
        self.assertEqual(self.service.leftovers(), [])

    def test_repeated_request_is_answered_after_the_end(self) -> None:
        self.configure(closes=self.closes)
        headers = {"Authorization": self.headers["ann"], "Idempotency-Key": "k"}
        first = self.post(200, BODY, PATH, **headers).json()
        self.service.reactor.advance(120)
        self.assertEqual(self.post(200, BODY, PATH, **headers).json(), first)
        headers["Idempotency-Key"] = "other"
        self.post(403, BODY, PATH, **headers)

    def test_only_the_supervisor_reruns_after_the_deadline_and_keeps_the_submitted_time(
        self,
    ) -> None:
        self.configure(closes=self.closes)
        first = self.submit("ann")
        self.finish()
        self.service.reactor.advance(120)
        for key in ("ann", "bob"):
            status = 403 if key == "ann" else 404
            self.call("POST", f"/evaluation/{first}/rerun", status, key)
        for _ in range(2):
            again = self.call("POST", f"/evaluation/{first}/rerun", 200, "teacher").json()
            self.finish()
            first = again["evaluation_id"]
        status = self.call("GET", f"/evaluation/{first}", 200, "ann").json()
        (*_, listed) = self.call("GET", "/evaluations", 200, "ann").json()["data"]
        for document in (status, listed):
            submitted, created = (
                datetime.fromisoformat(document[name]) for name in ("submitted", "created")
            )
            self.assertLess(submitted, self.closes)
            self.assertGreaterEqual(created, self.closes)

    def test_late_submissions_are_accepted_where_the_problem_says_so(self) -> None:
        self.configure(opens=self.opens, closes=self.closes, late=True)
        self.submit("ann", 403)
        self.service.reactor.advance(121)
        identifier = self.submit("ann")
        status = self.call("GET", f"/evaluation/{identifier}", 200, "ann").json()
        self.assertEqual(status["submitted"], status["created"])
        (problem,) = self.call("GET", "/problems", 200, "ann").json()["data"]
        times = [datetime.fromisoformat(problem[name]) for name in ("opens", "closes")]
        self.assertEqual((times, problem["late"]), ([self.opens, self.closes], True))
        self.configure()
        problem = self.call("GET", "/problems/one", 200, "ann").json()
        self.assertEqual(
            [problem[name] for name in ("opens", "closes", "late")], [None, None, False]
        )

    def test_rerun_with_the_current_evaluator_uses_the_present_problem_settings(self) -> None:
        self.configure()
        first = self.submit("ann")
        self.finish()
        body = form([Part("metadata[student]", b"Ann")])
        problem = ProblemSettings(
            "https://example.org/new.git", "y", branch="main", build="make", limits={"cpu": 7}
        )
        self.service.registry.context.configuration = Configuration(problems={"one": problem})
        self.service.world.repositories.branches["main"] = "b" * 40
        path, headers = f"/evaluation/{first}/rerun", {"Authorization": self.headers["teacher"]}
        found = {}
        for query in ("", "?evaluator=current"):
            again = self.post(200, body, path + query, **headers).json()["evaluation_id"]
            found[query] = self.call("GET", f"/evaluation/{again}", 200, "ann").json()
            self.service.world.turn()
        old, new = found.values()
        self.assertEqual(
            (old["repository"], old["evaluator_cmd"]), ("https://example.org/p.git", "x")
        )
        self.assertEqual(
            (new["repository"], new["evaluator_cmd"]), ("https://example.org/new.git", "y")
        )
        self.assertEqual(new["commit_oid"], "b" * 40)
        self.assertEqual((new["limits"]["cpu"], new["seed"]), (7, old["seed"]))
        self.assertEqual(new["metadata"], {"student": "Ann"})
        self.post(400, body, f"{path}?evaluator=x", **headers)
        self.service.registry.context.configuration = Configuration()
        self.post(404, body, f"{path}?evaluator=current", **headers)

    def test_run_on_an_own_input_and_its_rerun_do_not_count(self) -> None:
        self.configure()
        headers = {"Authorization": self.headers["ann"]}
        body = form([Part("submission[source]", b"x", "a.py"), Part("submission[own_input]", b"1")])
        self.post(400, body, PATH, **headers)
        self.configure(own_input=True)
        first = self.post(200, body, PATH, **headers).json()["evaluation_id"]
        self.finish()
        rerun = f"/evaluation/{first}/rerun?evaluator=current"
        again = self.post(200, form([Part("metadata[x]", b"y")]), rerun, **headers).json()
        self.finish()
        counted = self.submit("ann")
        self.finish()
        for identifier, counts in (
            (first, False),
            (again["evaluation_id"], False),
            (counted, True),
        ):
            status = self.call("GET", f"/evaluation/{identifier}", 200, "ann").json()
            self.assertEqual((status["problem"], status["counts"]), ("one", counts))
        listed = self.call("GET", "/evaluations", 200, "ann").json()["data"]
        self.assertEqual([one["counts"] for one in listed], [False, False, True])
        (standing,) = self.call("GET", "/standings", 200, "ann").json()["data"]
        self.assertEqual(standing["submissions"], 1)
        self.assertEqual(standing["best"]["evaluation_id"], counted)

    def test_evaluation_of_no_problem_has_no_current_evaluator(self) -> None:
        headers = {"Authorization": self.headers["bob"]}
        identifier = self.post(200, **headers).json()["evaluation_id"]
        self.finish()
        self.call("POST", f"/evaluation/{identifier}/rerun?evaluator=current", 400, "bob")


class ReloadTests(SupervisorTestCase):
    def follow_all(self, identifier: str, key: str) -> list[Any]:
        return [
            self.follow(kind, identifier, Authorization=self.headers[key]) for kind in FOLLOWERS
        ]

    def test_revoked_token_loses_its_open_streams_and_polls(self) -> None:
        identifiers = {key: self.submit(key) for key in ("ann", "bob")}
        streams = {key: self.follow_all(one, key) for key, one in identifiers.items()}
        poll = self.connect()
        path = f"/evaluation/{identifiers['ann']}/events?wait=20"
        poll.request(f"GET {path}", Authorization=self.headers["ann"])
        self.turn()
        self.reload(ann="")
        self.turn()
        self.assertEqual([one.connection.closed for one in streams["ann"]], [True] * len(FOLLOWERS))
        self.assertEqual(
            [one.connection.closed for one in streams["bob"]], [False] * len(FOLLOWERS)
        )
        self.assertTrue(poll.closed)
        self.assertEqual(poll.received, b"")
        for one in (*streams["ann"], poll):
            one.lose()
        self.call("GET", f"/evaluation/{identifiers['ann']}", 401, "ann")

    def test_supervisor_loses_streams_of_members_after_a_change_of_group_or_token(
        self,
    ) -> None:
        for change in (
            {"teacher": self.token_lines["teacher"].replace("=g", "=h")},
            {"teacher": ""},
            {"ann": self.token_lines["ann"].replace("group=g", "group=h")},
            {"ann": ""},
        ):
            self.reload()
            mine, hers = self.submit("teacher"), self.submit("ann")
            own, followed = self.follow_all(mine, "teacher"), self.follow_all(hers, "teacher")
            self.turn()
            self.reload()
            self.turn()
            self.assertFalse(any(one.connection.closed for one in own + followed))
            self.reload(**change)
            self.turn()
            self.assertTrue(all(one.connection.closed for one in followed))
            is_changed = "teacher" in change
            self.assertEqual([one.connection.closed for one in own], [is_changed] * len(FOLLOWERS))
            for one in (*own, *followed):
                one.lose()
            if change != {"teacher": ""}:
                self.call("GET", f"/evaluation/{hers}", 404, "teacher")
            for child in self.service.world.spawn.children:
                child.end(0)
            self.turn()


class ListTests(SupervisorTestCase):
    def test_restricted_token_lists_its_own_evaluations_but_a_shared_token_is_403(self) -> None:
        own = self.submit("ann")
        self.submit("bob")
        self.submit("site")
        listed = self.call("GET", "/evaluations", 200, "ann").json()["data"]
        self.assertEqual([one["evaluation_id"] for one in listed], [own])
        self.call("GET", "/evaluations", 403, "site")
        self.call("GET", "/environments", 403, "ann")

    def test_supervisor_lists_own_and_member_evaluations_in_order(self) -> None:
        begun = {}
        for key in ("eve", "ann", "teacher", "bob", "site"):
            begun[key] = self.submit(key)
            self.finish()

        def list_keys(query: str, key: str, status: int = 200) -> list[str]:
            listed = self.call("GET", f"/evaluations{query}", status, key).json().get("data", [])
            found = [one["evaluation_id"] for one in listed]
            self.assertEqual(found, [begun[one["caller"]] for one in listed])
            return [one["caller"] for one in listed]

        for key in ("teacher", "assistant"):
            own = ["teacher"] if key == "teacher" else []
            self.assertEqual(list_keys("", key), ["ann", *own, "bob"])
            self.assertEqual(list_keys("?caller=bob", key), ["bob"])
            self.assertEqual(list_keys("?caller=bob&problem=two", key), [])
            self.assertEqual(list_keys("?caller=eve", key), [])
        self.assertEqual(list_keys("?caller=ann", "bob"), [])
        self.assertEqual(list_keys("", "bob"), ["bob"])
        list_keys("?caller=a%20b", "teacher", 400)

    def test_supervisor_gets_standings_of_all_members_and_students_get_their_own(self) -> None:
        for key in ("eve", "ann", "bob", "ann", "teacher"):
            self.submit(key)
            self.finish()

        def list_standings(key: str, query: str = "", status: int = 200) -> Any:
            return self.call("GET", f"/standings{query}", status, key).json()

        listed = list_standings("teacher")
        self.assertEqual((listed["begin"], listed["end"]), (None, None))
        found = [(one["caller"], one["problem"], one["submissions"]) for one in listed["data"]]
        self.assertEqual(found, [("ann", "one", 2), ("bob", "one", 1), ("teacher", "one", 1)])
        for one in listed["data"]:
            self.assertEqual(one["best"]["caller"], one["caller"])
        for key in ("ann", "bob", "eve"):
            self.assertEqual([one["caller"] for one in list_standings(key)["data"]], [key])
        list_standings("site", status=403)
        self.assertEqual(list_standings("teacher", "?problem=two")["data"], [])
        self.assertEqual(len(list_standings("teacher", "?caller=ann")["data"]), 1)
        self.assertEqual(len(list_standings("teacher", "?after=ann%2Fone")["data"]), 2)
        list_standings("teacher", "?problem=A", 400)
        with mock.patch("tawebeval.evaluations.reading.MAX_LIST_PAGE_BYTES", 1):
            answer = self.call("GET", "/standings?problem=one", 200, "teacher")
        self.assertEqual((answer.json()["end"], len(answer.json()["data"])), ("ann/one", 1))
        self.assertIn("/standings?after=ann%2Fone&problem=one>", answer.headers["link"])

    def test_rerun_of_an_old_commit_or_with_another_seed_has_no_standing(self) -> None:
        self.service.registry.context.configuration = Configuration(
            problems={"one": ProblemSettings("https://example.org/p.git", "x", commit="a" * 40)}
        )
        first = self.submit("bob")  # whose token is not restricted to problems
        self.finish()

        def find_best(name: str, value: bytes, query: str = "") -> tuple[str, str]:
            path, body = f"/evaluation/{self.last}/rerun{query}", form([Part(name, value)])
            headers = {"Authorization": self.headers["bob"]}
            self.last = self.post(200, body, path, **headers).json()["evaluation_id"]
            self.finish()
            (standing,) = self.call("GET", "/standings", 200, "teacher").json()["data"]
            return standing["best"]["evaluation_id"], self.last

        current = "?evaluator=current"
        for name, value, query in (
            ("commit_oid", b"b" * 40, ""),
            ("seed", b"6", current),
            ("limits[cpu]", b"1", ""),
            ("metadata[a]", b"b", ""),
        ):
            self.last = first
            self.assertEqual(find_best(name, value, query)[0], first)
            self.assertNotEqual(self.last, first)
        best, last = find_best("metadata[a]", b"b", current)  # of what has none
        self.assertEqual(best, last)
        status = self.call("GET", f"/evaluation/{last}", 200, "bob").json()
        self.assertEqual(status["commit_oid"], "a" * 40)

    def test_whoami_tells_the_caller_and_what_its_token_permits(self) -> None:
        whole = {
            "read_only": False,
            "shared": False,
            "group": None,
            "problems": None,
            "supervises": {},
        }
        for key, expected in (
            ("teacher", {"supervises": {"g": ["ann", "bob"]}}),
            ("assistant", {"supervises": {"g": ["ann", "bob"]}, "read_only": True}),
            ("ann", {"group": "g", "problems": ["one"]}),
            ("site", {"problems": ["one"], "shared": True}),
        ):
            found = self.call("GET", "/whoami", 200, key).json()
            self.assertEqual(found, {"caller": key, **whole, **expected})
        identifier = self.submit("ann")
        link = self.call("POST", f"/evaluation/{identifier}/links", 200, "ann").json()["link"]
        self.headers["link"] = f"Bearer {link}"
        self.call("GET", "/whoami", 403, "link")
