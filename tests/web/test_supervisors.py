"""`web`: members of groups, their supervisors, tokens that many people share, and `GET /whoami`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tawebeval.config import Configuration, ProblemSettings
from tawebeval.core.tokens import generate_token
from tests.cases.web import StreamTestCase
from tests.fakes.clients import Answer, Part, Service, form
from tests.fakes.streams import FOLLOWERS
from tests.fakes.world import read_again

OID = "a" * 40


class SupervisorTestCase(StreamTestCase):
    """A teacher and two students of a group, a student of another group, and a site."""

    configuration = Configuration(
        problems={
            name: ProblemSettings(repository="https://example.org/p.git", command="x", commit=OID)
            for name in ("one", "two")
        }
    )
    tokens: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("teacher", "teacher", {"supervised_groups": ("g",)}),
        ("assistant", "assistant", {"supervised_groups": ("g",), "is_read_only": True}),
        ("ann", "ann", {"group": "g", "problems": ("one",)}),
        ("bob", "bob", {"group": "g"}),
        ("eve", "eve", {"group": "h"}),
        ("site", "site", {"is_shared": True, "problems": ("one",)}),
    )

    def setUp(self) -> None:
        super().setUp()
        self.lines, self.headers = {}, {}
        for key, caller, given in self.tokens:
            token, self.lines[key] = generate_token(caller, os.urandom, **given)
            self.headers[key] = f"Bearer {token}"
        self.file = Path(self.mktemp()).absolute()
        self.file.write_text("\n".join(self.lines.values()))
        root = Path(self.mktemp()).resolve()
        self.service = Service(root, self.configuration, tokens=self.file)
        self.client, self.agent = self.service.treq()

    def call(self, method: str, path: str, status: int, key: str) -> Answer:
        return self.request(method, path, status, headers={"Authorization": self.headers[key]})

    def begin(self, key: str, status: int = 200) -> str:
        path = "/problems/one/evaluate"
        body = form([Part("submission[source]", b"x", "a.py")])
        found = self.post(status, body, path, Authorization=self.headers[key]).json()
        return str(found.get("evaluation_id"))

    def reload(self, **lines: str) -> None:
        self.file.write_text("\n".join({**self.lines, **lines}.values()))
        read_again(self.service.access)


class AccessTests(SupervisorTestCase):
    def test_supervisor_reads_members_alone_and_takes_no_event_from_them(self) -> None:
        for key, status in (("ann", 200), ("bob", 200), ("eve", 404), ("site", 404)):
            place = f"/evaluation/{self.begin(key)}"
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

    def test_supervisor_cancels_and_shares_for_members_alone(self) -> None:
        for key, is_member in (("ann", True), ("eve", False)):
            place = f"/evaluation/{self.begin(key)}"
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

    def test_rerun_by_a_supervisor_is_the_members_evaluation(self) -> None:
        first = self.begin("ann")
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
            self.assertTrue(request.is_restricted, "a failed build would show its output")
        other = self.begin("eve")
        self.call("POST", f"/evaluation/{other}/rerun", 404, "teacher")

    def test_forgotten_evaluation_of_a_member_is_gone_and_not_unknown(self) -> None:
        for key, status in (("ann", 410), ("eve", 404)):
            place = f"/evaluation/{self.begin(key)}"
            self.finish()
            self.call("GET", f"{place}/events?after=end", 200, key)
            self.call("GET", place, status, "teacher")

    def test_log_names_the_supervisor_and_the_member(self) -> None:
        log = self.service.context.request_log
        log.is_enabled = True
        lines: list[str] = []
        self.patch(type(log), "write_line", lambda _, *line: lines.append(line[4]))
        place = f"/evaluation/{self.begin('ann')}"
        self.call("GET", place, 200, "teacher")
        self.call("GET", place, 200, "ann")
        self.assertEqual(lines, ["ann", "teacher for ann", "ann"])


class ReloadTests(SupervisorTestCase):
    def follow_all(self, identifier: str, key: str) -> list[Any]:
        return [
            self.follow(kind, identifier, Authorization=self.headers[key]) for kind in FOLLOWERS
        ]

    def test_revoked_token_loses_its_open_streams_and_polls(self) -> None:
        identifiers = {key: self.begin(key) for key in ("ann", "bob")}
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

    def test_supervisor_of_another_group_loses_the_streams_of_members_and_keeps_its_own(
        self,
    ) -> None:
        for change in (
            {"teacher": self.lines["teacher"].replace("=g", "=h")},
            {"teacher": ""},
            {"ann": self.lines["ann"].replace("group=g", "group=h")},
            {"ann": ""},
        ):
            self.reload()
            mine, hers = self.begin("teacher"), self.begin("ann")
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
    def test_restricted_token_lists_its_own_evaluations_unless_it_is_shared(self) -> None:
        own = self.begin("ann")
        self.begin("bob")
        self.begin("site")
        listed = self.call("GET", "/evaluations", 200, "ann").json()["data"]
        self.assertEqual([one["evaluation_id"] for one in listed], [own])
        self.call("GET", "/evaluations", 403, "site")
        self.call("GET", "/environments", 403, "ann")

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
        identifier = self.begin("ann")
        link = self.call("POST", f"/evaluation/{identifier}/links", 200, "ann").json()["link"]
        self.headers["link"] = f"Bearer {link}"
        self.call("GET", "/whoami", 403, "link")
