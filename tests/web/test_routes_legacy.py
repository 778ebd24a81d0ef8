"""`web.routes`: what TuringArena's clients of 2018 want."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from tests.cases.web import END, WebTestCase
from tests.fakes.clients import MULTIPART, Part, form, parts


class FormTests(WebTestCase):
    def post_parts(self, *renamed: tuple[str, str]) -> Any:
        names = dict(renamed)
        body = form(
            Part(names.get(part.name, part.name), part.content, part.filename) for part in parts()
        )
        return self.ask("POST", "//evaluate", data=body, headers={"Content-Type": MULTIPART})

    def test_answer_has_the_older_name_of_the_identifier(self) -> None:
        answer = self.post().json()
        self.assertEqual(answer["id"], answer["evaluation_id"])

    def test_older_names_of_fields_are_known(self) -> None:
        for renamed in (
            [("commit_oid", "oid")],
            [("repository[url]", "repositories[main][url]")],
            [("commit_oid", "oid"), ("repository[url]", "repositories[main][url]")],
        ):
            answer = self.answer(self.post_parts(*renamed))
            self.assertEqual(answer.status, 200, answer.body)
            (repository, commit) = self.service.world.repositories.asked[-1]
            self.assertEqual(repository.url, "https://example.org/problem.git")
            self.assertEqual(commit, "c" * 40)
            self.finish()

    def test_field_under_both_names_is_repeated(self) -> None:
        body = form([*parts(), Part("oid", b"c" * 40)])
        problem = self.post(400, body).json()
        self.assertEqual(problem["field"], "commit_oid")


class PageTests(WebTestCase):
    def older(self, identifier: str, after: str | None = None) -> Deferred[Any]:
        query = "" if after is None else f"&after={after}"
        return self.ask("GET", f"//evaluation_events?evaluation={identifier}{query}")

    def test_legacy_pages_are_those_of_the_newer_path(self) -> None:
        identifier = self.evaluate()
        self.child.print(b"a\nb\n")
        page = self.answer(self.older(identifier)).json()
        self.assertEqual(page, self.page(identifier))
        self.finish()
        page = self.answer(self.older(identifier, page["end"])).json()
        self.assertEqual((page["begin"], page["end"], len(page["data"])), ("3", END, 1))
        page = self.answer(self.older(identifier, END)).json()
        self.assertEqual(page, {"begin": END, "end": None, "data": []})

    def test_legacy_poll_waits_by_itself(self) -> None:
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

    def test_legacy_poll_heeds_a_chosen_wait(self) -> None:
        identifier = self.evaluate()
        answer = self.request("GET", f"/evaluation_events?evaluation={identifier}&wait=0")
        self.assertEqual(answer.json()["data"], [])
        self.assertNotIn("preference-applied", answer.headers)

    def test_legacy_errors_are_the_same(self) -> None:
        identifier = self.evaluate()
        for query, status in (
            ("", 400),
            ("?evaluation=", 400),
            ("?evaluation=unknown", 404),
            (f"?evaluation={identifier}&after=x", 400),
            (f"?evaluation={identifier}&evaluation={identifier}", 400),
        ):
            answer = self.request("GET", "/evaluation_events" + query, status)
        self.request("POST", "/evaluation_events", 405)
        self.assertIn("evaluation", answer.json()["detail"])

    def test_legacy_head_neither_waits_nor_acknowledges(self) -> None:
        identifier = self.evaluate()
        self.child.print(b"a\nb\n")
        connection = self.connect()
        connection.request(f"HEAD /evaluation_events?evaluation={identifier}&after=3")
        self.assertEqual(connection.answer("HEAD").status, 200)
        self.assertEqual(len(self.page(identifier)["data"]), 3)
