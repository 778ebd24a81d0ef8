"""`evaluations.service`: what a greedy caller leaves unread takes nothing from another caller."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from tawebeval.config import (
    Configuration,
    EvaluationSettings,
    EventBufferSettings,
    LimitSettings,
)
from tawebeval.errors import CallerQuotaExceeded
from tests.cases.evaluations import END, RegistryTestCase
from tests.cases.settings import with_constants


class ShareTestCase(RegistryTestCase):
    """Alice is greedy, Bob is not."""

    running, queued = 3, 6

    def begin(self, caller: str) -> str:
        return self.registry.accept_form(self.upload(), caller)

    def state(self, identifier: str, caller: str) -> str:
        state: str = self.registry.get_status(identifier, caller)["state"]
        return state

    def discard(self, identifier: str, caller: str) -> None:
        self.registry.events.read_page_now(identifier, END, caller)


class UnreadEventTests(ShareTestCase):
    configuration = Configuration(
        evaluations=EvaluationSettings(retain=900),
        buffers=with_constants(EventBufferSettings, max_page_bytes=4096)(disk=20_000),
        limits=LimitSettings(wall_clock=10**6),
    )

    def fill(self) -> list[str]:
        """Let three evaluations of Alice print 60 KB; return these, and two that are queued."""
        identifiers = [self.begin("alice") for _ in range(5)]
        for child in self.world.spawn.children:
            child.print(b"x" * 20_000 + b"\n")
        return identifiers

    def test_greedy_caller_is_refused_and_another_one_notices_nothing(self) -> None:
        self.fill()
        error = self.assertRaises(CallerQuotaExceeded, self.begin, "alice")
        self.assertIn("buffers.disk", str(error))
        self.finish(self.world.spawn.children[0])
        self.assertEqual(self.state(self.begin("bob"), "bob"), "running")

    def test_queued_evaluations_wait_until_their_caller_has_read(self) -> None:
        identifiers = self.fill()
        for child in self.world.spawn.children:
            self.finish(child)
        self.assertEqual([self.state(one, "alice") for one in identifiers[3:]], ["queued"] * 2)
        self.assertEqual(self.registry.run_queue.waiter_count, 2)
        for each in identifiers[:2]:
            self.discard(each, "alice")
            self.assertEqual(self.state(identifiers[3], "alice"), "queued")
        self.discard(identifiers[2], "alice")
        self.assertEqual([self.state(one, "alice") for one in identifiers[3:]], ["running"] * 2)
        self.assertEqual(self.world.disk.used, 0)

    def test_evaluation_that_waits_for_its_caller_can_be_cancelled(self) -> None:
        identifiers = self.fill()
        for child in self.world.spawn.children:
            self.finish(child)
        self.successResultOf(
            Deferred.fromCoroutine(self.registry.cancel_evaluation(identifiers[3], "alice"))
        )
        self.assertEqual(self.registry.run_queue.waiter_count, 1)


class FixedMemoryTests(ShareTestCase):
    configuration = Configuration(buffers=EventBufferSettings(total=20_000))

    def test_error_events_of_a_greedy_caller_leave_room_for_those_of_another(self) -> None:
        unread = [self.begin("alice") for _ in range(3)]
        for child in self.world.spawn.children:
            child.complain(b"\x01" * 8000)
            self.finish(child, 3)
        error = self.assertRaises(CallerQuotaExceeded, self.begin, "alice")
        self.assertIn("buffers.total", str(error))
        self.begin("bob")
        for each in unread:
            self.discard(each, "alice")
        self.begin("alice")
