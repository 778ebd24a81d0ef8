"""`web`: links that only read one evaluation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs, formatEvent

from tawebeval.config import ArchiveSettings, CallerSettings, Configuration
from tawebeval.errors import StoreError
from tawebeval.web import auth as module
from tests.cases.web import CallerTestCase, WebTestCase
from tests.fakes.clients import Answer, Connection, Service
from tests.fakes.files import FakeStore
from tests.fakes.streams import FOLLOWERS
from tests.fakes.world import read_again, straw

HOUR = 3600


class LinkTestCase(CallerTestCase):
    """An evaluation of alice, who may ask as often as she likes."""

    configuration = Configuration(callers=CallerSettings(requests_per_minute=0, running=2))

    def setUp(self) -> None:
        super().setUp()
        self.identifier = self.begin("alice").json()["id"]
        self.path = f"/evaluation/{self.identifier}"

    def share(self, query: str = "", status: int = 200, caller: str = "alice") -> Any:
        answer = self.call("POST", f"{self.path}/links{query}", status, caller)
        return answer.json()["link"] if status == 200 else answer.json()

    def revoke(self, status: int = 204, caller: str = "alice") -> None:
        self.call("DELETE", f"{self.path}/links", status, caller)

    def read(self, link: str, path: str = "", status: int = 200, method: str = "GET") -> Answer:
        """Make a request by a link, in both ways; return one of the answers."""
        self.headers["link"] = f"Bearer {link}"
        path = path if path.startswith("/evaluation/") else f"{self.path}{path}"
        first = self.call(method, path, status, "link")
        if "/evaluations" not in path:
            sign = "&" if "?" in path else "?"
            second = self.call(method, f"{path}{sign}link={link}", status, None)
            self.assertEqual(second.body, first.body)
        return first

    @property
    def links(self) -> module.EvaluationLinks:
        return self.service.context.evaluation_links

    def turn(self) -> None:
        self.service.reactor.pump([0] * 6)


class LinkTests(LinkTestCase):
    def test_link_reads_status_events_and_files_and_acknowledges_nothing(self) -> None:
        self.child.print(b"a\nb\n")
        link = self.share()
        self.assertEqual(self.read(link).json()["state"], "running")
        self.assertEqual(self.read(link, "/submission").json()["files"][0]["text"], "print()\n")
        for query in ("", "?after=2", "?after=1&limit=1"):
            self.read(link, f"/events{query}")
        self.finish()
        self.read(link, "/events?after=end")
        self.read(link, "/events", method="HEAD")
        page = self.call("GET", f"{self.path}/events", 200, "alice").json()
        self.assertEqual([one["payload"] for one in page["data"]], ["a", "\n", "b", "\n"])

    def test_acknowledged_events_are_410_with_the_oldest_cursor(self) -> None:
        self.child.print(b"a\nb\n")
        link = self.share()
        self.call("GET", f"{self.path}/events?after=2", 200, "alice")
        problem = self.read(link, "/events", 410).json()
        self.assertEqual(problem["oldest"], "2")
        self.assertIn("a later request acknowledged them", problem["detail"])
        self.read(link, "/events?after=2")
        self.finish()
        self.call("GET", f"{self.path}/events?after=end", 200, "alice")
        self.read(link, "/events", 410)
        self.read(link, "", 410)

    def test_every_other_request_by_a_link_is_403(self) -> None:
        for link in (self.share(), "link_" + "A" * 28):
            for method, path in (
                *(("DELETE", ""), ("POST", "/rerun"), ("POST", "/links"), ("DELETE", "/links")),
                *(("GET", "/evaluations"), ("POST", "/evaluate")),
                ("GET", "/nowhere"),
            ):
                whole = path if path.startswith(("/evaluat", "/nowhere")) else f"{self.path}{path}"
                self.headers["link"] = f"Bearer {link}"
                answer = self.call(method, whole, 403, "link")
                self.assertIn("a link permits only", answer.json()["detail"])
        self.assertEqual(self.call("GET", self.path, 200, "alice").json()["state"], "running")

    def test_every_invalid_link_gets_the_same_401(self) -> None:
        other = self.begin("bob").json()["id"]
        link = self.share()
        wrong = {
            self.read(each, path, 401).body
            for each in (link[:-1], "link_", "link_" + "A" * 28, link[:-1] + "~")
            for path in ("", "/events", "/submission")
        }
        for identifier in (other, "a" * 40, "x"):
            wrong.add(self.read(link, f"/evaluation/{identifier}", 401).body)
        for path in (
            *(f"evaluation/{other}%2f..%2f{self.identifier}", "problems", "environments"),
            *(f"evaluation/{self.identifier}/../{other}", f"evaluation_events?evaluation={other}"),
        ):
            self.assertEqual(
                self.exchange(f"GET /{path}", Authorization=f"Bearer {link}").status, 403
            )
        self.revoke()
        wrong.add(self.read(link, "", 401).body)
        self.assertEqual(len(wrong), 1)

    def test_request_with_a_token_and_a_link_or_two_links_is_400(self) -> None:
        link = self.share()
        self.call("GET", f"{self.path}?link={link}&link={link}", 400, None)
        self.call("GET", f"{self.path}?link={link}", 400, "alice")
        self.call("GET", f"{self.path}?link=", 401, None)
        self.call("GET", f"{self.path}?%6cink={link}", 200, None)

    def test_links_are_made_by_any_token_of_the_owner_that_is_not_read_only(self) -> None:
        self.add_token("reader", is_read_only=True)
        self.add_token("student", problems=["one"])
        self.share(status=403, caller="reader")
        self.share(status=404, caller="bob")
        self.revoke(404, "bob")
        link = self.share(caller="student")
        self.read(link)
        self.revoke(caller="student")
        self.read(link, status=401)
        self.finish()
        self.call("GET", f"{self.path}/events?after=end", 200, "alice")
        self.share(status=410)
        self.revoke()

    def test_link_holds_as_long_as_asked_within_the_maximum(self) -> None:
        short, long = self.share("?lifetime=1"), self.share(f"?lifetime={30 * 24 * HOUR}")
        default = self.share()
        for query in ("0", f"{30 * 24 * HOUR + 1}", "x", "-1"):
            self.share(f"?lifetime={query}", 400)
        refused = self.call("POST", f"{self.path}/links?lifetime=9999999", 400, "alice").json()
        self.assertEqual(refused["limit"], 30 * 24 * HOUR)
        self.read(short)
        self.service.reactor.advance(1)
        self.read(short, status=401)
        self.read(default)
        with mock.patch.object(self.links, "_read_wall_clock", lambda: 4e9):
            self.read(long, status=401)

    def test_link_days_of_0_refuses_new_links_and_keeps_old_ones(self) -> None:
        link = self.share()
        callers = CallerSettings(requests_per_minute=0, link_days=0)
        self.service.registry.context.configuration = Configuration(callers=callers)
        self.assertIn("callers.link_days", self.share(status=403)["detail"])
        self.read(link)  # until it expires or is revoked

    def test_links_of_a_caller_without_a_token_do_not_hold(self) -> None:
        link = self.share()
        self.file.write_text(self.file.read_text().split("\n")[1])
        read_again(self.service.access)
        self.read(link, status=401)

    def test_access_log_names_the_owner_and_no_link(self) -> None:
        link = self.share()
        self.service.site.request_log.is_enabled = True
        with capturedLogs() as events:
            self.read(link, "/events?after=")
        lines = [str(formatEvent(event)) for event in events]
        self.assertEqual(len(lines), 2)
        for line in lines:
            self.assertIn("'link of alice'", line)
            self.assertNotIn("link_", line)


class TokenlessTests(WebTestCase):
    def test_new_link_over_the_limit_invalidates_the_link_that_expires_first(
        self,
    ) -> None:
        paths = [f"/evaluation/{self.evaluate()}" for _ in range(3)]
        lifetimes = [100, 50, 70]
        links = []
        waiting = self.connect()
        with mock.patch.object(
            self.service.context.evaluation_links.linked_evaluations_budget, "total", 2
        ):
            for path, lifetime in zip(paths, lifetimes, strict=True):
                made = self.request("POST", f"{path}/links?lifetime={lifetime}").json()
                links.append(made["link"])
                if lifetime == 50:
                    waiting.request(f"GET {path}/events?after=0&wait=30&link={made['link']}")
        self.assertTrue(waiting.aborted)
        waiting.lose()
        for path, link, status in zip(paths, links, (200, 401, 200), strict=True):
            self.request("GET", f"{path}?link={link}", status)


class EndTests(LinkTestCase):
    def begin_all(self, link: str) -> list[Connection]:
        poll = self.connect()
        poll.request(f"GET {self.path}/events?after=0&wait=30&link={link}")
        streams = [
            kind(self.service, self.identifier, f"?link={link}").connection for kind in FOLLOWERS
        ]
        self.turn()
        self.assertEqual(self.links.readers_budget.used, 4)
        return [poll, *streams]

    def check_cut(self, connections: list[Connection]) -> None:
        self.assertEqual([one.aborted for one in connections], [True] * 4)
        for one in connections:
            one.lose()
        self.assertEqual(self.links.readers_budget.used, 0)
        record = self.service.registry.records[self.identifier]
        self.assertEqual(record.events.read_only_client_count, 0)

    def test_revocation_cuts_the_readers_of_that_evaluation_only(self) -> None:
        link = self.share()
        connections = self.begin_all(link)
        own = self.connect()
        target = f"{self.path}/events?after=0&wait=30"
        own.request(f"GET {target}", Authorization=self.headers["alice"])
        self.revoke()
        self.check_cut(connections)
        self.assertFalse(own.aborted)
        self.assertNotEqual(self.share(), link)
        self.read(link, status=401)

    def test_reload_that_removes_the_last_token_of_the_caller_cuts_readers(self) -> None:
        connections = self.begin_all(self.share())
        known = self.file.read_text()
        for lines, is_cut in ((f"# \n{known}", False), (re.sub("alice.*", "", known), True)):
            self.file.write_text(lines)
            read_again(self.service.access)
            self.turn()
            self.assertEqual([one.aborted for one in connections], [is_cut] * 4)
        self.check_cut(connections)

    def test_expiry_of_a_link_disconnects_its_readers(self) -> None:
        link = self.share("?lifetime=5")
        connections = self.begin_all(link)
        self.service.reactor.advance(4)
        self.assertEqual([one.aborted for one in connections], [False] * 4)
        self.service.reactor.advance(1)
        self.check_cut(connections)


class BoundTests(LinkTestCase):
    def test_readers_by_links_are_bounded_and_the_owner_is_not(self) -> None:
        link = self.share()
        for owner, bound, status in (
            (self.links.readers_budget, "total", 503),
            (module, "MAX_LINK_READERS_PER_EVALUATION", 429),
        ):
            with mock.patch.object(owner, bound, 2):
                after = self.call("GET", f"{self.path}/events", 200, "alice").json()["end"]
                waiting = [self.connect(), self.connect()]
                for one in waiting:
                    one.request(f"GET {self.path}/events?after={after}&wait=30&link={link}")
                self.assertIn("retry-after", self.read(link, status=status).headers)
                self.call("GET", self.path, 200, "alice")
                self.child.print(b"x\n")
                self.turn()
                self.assertEqual([one.answer().status for one in waiting], [200, 200])
                self.read(link)
            self.assertEqual(self.links.readers_budget.used, 0)

    def test_readers_by_links_of_one_caller_leave_room_for_another(self) -> None:
        own, other = self.share(), self.begin("bob").json()["id"]
        link = self.call("POST", f"/evaluation/{other}/links", 200, "bob").json()["link"]
        readers, rate = self.links.readers_budget, "LINK_REQUESTS_PER_MINUTE"
        bounds = ((readers, "total", "caller_quota"), (module, rate, f"{rate}_PER_CALLER"))
        for owner, total, part in bounds:
            with mock.patch.object(owner, total, 8), mock.patch.object(owner, part, 4):
                waiting = [self.connect() for _ in range(8)]
                for one in waiting:
                    one.request(f"GET {self.path}/events?wait=30&link={own}")
                self.assertEqual(self.links.readers_budget.used, 4)
                self.call("GET", f"/evaluation/{other}?link={link}", 200, None)
                for one in waiting:
                    one.lose()
            self.service.reactor.advance(60)

    def test_requests_by_links_are_bounded_and_do_not_count_for_the_owner(self) -> None:
        self.service.access.rate_limit.per_minute = 2
        link = self.share()
        for bound in ("LINK_REQUESTS_PER_MINUTE", "LINK_REQUESTS_PER_MINUTE_PER_EVALUATION"):
            with mock.patch.object(module, bound, 4):
                self.read(link)
                self.read(link)
                self.read(link, status=429)
            self.service.reactor.advance(60)
        self.call("GET", self.path, 200, "alice")

    def test_evaluations_with_links_are_bounded_in_all_and_for_each_caller(self) -> None:
        link = self.share("?lifetime=5")
        other = self.begin("bob").json()["id"]
        place = f"/evaluation/{other}/links"
        budget = self.links.linked_evaluations_budget
        with mock.patch.object(budget, "total", 1):
            self.call("POST", place, 503, "bob")
            self.read(self.share("?lifetime=1"))
        with mock.patch.object(budget, "caller_quota", 1):
            second = self.begin("alice").json()["id"]
            self.call("POST", f"/evaluation/{second}/links", 429, "alice")
            self.call("POST", place, 200, "bob")
            self.call("DELETE", place, 204, "bob")
        self.service.reactor.advance(5)
        self.read(link, status=401)
        with mock.patch.object(budget, "total", 1):
            self.call("POST", place, 200, "bob")
        self.assertEqual(list(self.links.links_by_evaluation), [other])


class ArchivedTests(LinkTestCase):
    configuration = Configuration(
        callers=CallerSettings(requests_per_minute=0), archive=ArchiveSettings(enabled=True)
    )

    def test_links_read_archived_evaluations_and_are_made_for_them(self) -> None:
        link = self.share()
        self.child.print(b"a\n")
        self.finish()
        self.call("GET", f"{self.path}/events?after=end", 200, "alice")
        self.service.reactor.pump([0.1, 0.1])
        for each in (link, self.share()):
            self.assertTrue(self.read(each).json()["archived"])
            self.assertEqual(self.read(each, "/events").json()["data"][0]["payload"], "a")
            self.read(each, "/submission")
        self.revoke()
        self.read(link, status=401)


class StoreTests(LinkTestCase):
    @property
    def store(self) -> FakeStore:
        return self.service.world.store

    def test_link_and_revocation_are_stored_before_the_answer(self) -> None:
        headers = {"Authorization": self.headers["alice"]}
        for method, kept, status in (("POST", [self.identifier], 200), ("DELETE", [], 204)):
            committed: Deferred[None] = Deferred()
            self.patch(FakeStore, "flush", lambda store, committed=committed: committed)
            asked = self.ask(method, f"{self.path}/links", headers=headers)
            self.assertNoResult(asked)
            self.assertEqual(list(self.store.links), kept)
            committed.callback(None)
            self.assertEqual(self.answer(asked).status, status)

    def test_next_daemon_knows_links_and_revocations(self) -> None:
        link = self.share()
        other = self.begin("bob").json()["id"]
        self.call("POST", f"/evaluation/{other}/links", 200, "bob")
        self.call("DELETE", f"/evaluation/{other}/links", 204, "bob")
        root = Path(self.mktemp()).resolve()
        service = Service(
            root, self.service.configuration, tokens=self.file, store=self.store, random=straw(9)
        )
        links = service.context.evaluation_links
        self.assertEqual(
            links.links_by_evaluation, {self.identifier: self.store.links[self.identifier]}
        )
        self.assertEqual(links.add_reader(object(), self.identifier, link, lambda: None), "alice")

    def test_unstored_link_is_refused_but_an_unstored_revocation_takes_effect(self) -> None:
        link = self.share()
        self.store.error = StoreError()
        self.assertIn("its disk is full or fails", self.share(status=503)["detail"])
        self.revoke(503)
        self.read(link, status=401)
        self.store.error = None
        self.revoke()
        self.read(link, status=401)
        self.assertEqual(self.store.links, {})
