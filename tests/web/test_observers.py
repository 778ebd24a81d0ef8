"""`web`: requests with a token that only reads acknowledge nothing."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.cases.web import CAPACITY, END, StreamTestCase, Tokens
from tests.fakes.clients import MULTIPART, Answer, form, parts
from tests.fakes.streams import FOLLOWERS, Follower, LineFollower


class ObserverTestCase(StreamTestCase):
    """A caller with two tokens, one of which only reads."""

    tokens: ClassVar[Tokens] = {
        "reader": {"caller": "alice"},
        "observer": {"caller": "alice", "is_read_only": True},
    }

    def setUp(self) -> None:
        super().setUp()
        self.reader, self.observer = self.headers["reader"], self.headers["observer"]

    def begin(self, printed: bytes = b"") -> str:
        headers = {"Content-Type": MULTIPART, "Authorization": self.reader}
        answer = self.request("POST", "/evaluate", data=form(parts()), headers=headers)
        identifier: str = answer.json()["evaluation_id"]
        if printed:
            self.print(printed)
        return identifier

    def read(self, identifier: str, query: str, token: str, status: int = 200) -> Answer:
        path = f"/evaluation/{identifier}/events{query}"
        return self.request("GET", path, status, headers={"Authorization": token})

    def observe(self, kind: type[Follower], identifier: str, query: str = "") -> Any:
        return self.follow(kind, identifier, query, Authorization=self.observer)

    def check_whole(self, identifier: str, payloads: list[str]) -> None:
        page = self.read(identifier, "", self.reader).json()
        self.assertEqual([event["payload"] for event in page["data"]], payloads)
        self.assertEqual(page["end"], END)
        self.assertIsNone(self.read(identifier, f"?after={END}", self.reader).json()["end"])

    def let_pass(self, seconds: int) -> None:
        for _ in range(seconds):
            self.service.reactor.advance(1)
            self.service.registry.expire_evaluations()
        self.service.world.turn()


class PageTests(ObserverTestCase):
    def test_waiting_observer_gets_the_next_events_and_acknowledges_nothing(self) -> None:
        identifier = self.begin(b"a\n")
        path = f"/evaluation/{identifier}/events?after=1&wait=20"
        asked = self.ask("GET", path, headers={"Authorization": self.observer})
        self.print(b"b\n")
        page = self.answer(asked).json()
        self.assertEqual([event["payload"] for event in page["data"]], ["\n", "b"])
        self.finish()
        self.check_whole(identifier, ["a", "\n", "b", "\n"])


class LifeTests(ObserverTestCase):
    """How long observers keep an evaluation: `evaluations.retain` is 900 seconds."""

    def test_running_evaluation_is_kept_by_observers(self) -> None:
        identifier = self.begin()
        follower = self.observe(LineFollower, identifier)
        self.let_pass(1000)
        follower.lose()
        self.let_pass(800)
        self.read(identifier, "", self.observer)
        self.let_pass(800)
        self.assertEqual(self.child.signals, [])
        self.let_pass(100)
        self.assertNotEqual(self.child.signals, [])

    def test_ended_evaluation_is_not_kept_by_observers(self) -> None:
        identifier = self.begin(b"a\n")
        self.finish()
        follower = self.observe(LineFollower, identifier)
        self.assertTrue(follower.complete)
        self.let_pass(600)
        self.read(identifier, "", self.observer)
        self.let_pass(299)
        self.read(identifier, "", self.observer)
        self.let_pass(1)
        self.read(identifier, "", self.reader, 410)

    def test_long_poll_of_the_reader_keeps_the_evaluation(self) -> None:
        identifier = self.begin()
        self.print(b"a\n")
        newest = self.service.registry.records[identifier].events.event_log.end_cursor
        self.observe(LineFollower, identifier)
        path = f"/evaluation/{identifier}/events?after={newest}&wait=30"
        for _ in range(40):
            asked = self.ask("GET", path, headers={"Authorization": self.reader})
            self.let_pass(30)
            self.answer(asked)
        self.assertEqual(self.child.signals, [])


class StreamTests(ObserverTestCase):
    def test_observer_streams_all_events_and_the_reader_gets_them_later(self) -> None:
        for kind in FOLLOWERS:
            identifier = self.begin(b"a\n")
            follower = self.observe(kind, identifier)
            self.print(b"b\n")
            self.finish()
            self.assertEqual(follower.payloads, ["a", "\n", "b", "\n"])
            self.assertTrue(follower.complete, kind)
            self.observe(kind, identifier, f"?after={END}")
            self.check_nothing_left(identifier)
            self.check_whole(identifier, ["a", "\n", "b", "\n"])

    def test_slow_observer_is_cut_off_if_the_next_events_were_discarded(self) -> None:
        for kind in FOLLOWERS:
            identifier = self.begin()
            follower = self.observe(kind, identifier)
            follower.full = True
            for _ in range(3 * CAPACITY // 9000):
                for _ in range(10):
                    self.print(b"x" * 900 + b"\n")
                newest = self.service.registry.records[identifier].events.event_log.end_cursor
                self.read(identifier, f"?after={newest}", self.reader)
            follower.take()
            self.check_cut(follower, 4410)
            got = len(follower.payloads)
            problem = self.read(identifier, f"?after={got}", self.observer, 410).json()
            self.assertEqual(problem["oldest"], str(newest))
            self.finish()
