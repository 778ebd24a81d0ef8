"""`evaluations.service`: refused requests, and requests that wait for events."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred

from tawebeval.core.evaluations import IdentifierIssuer
from tawebeval.core.event_log import EventPage
from tawebeval.errors import DiscardedCursor, EvaluationExpired, EvaluationNotFound
from tests.cases.evaluations import END, RegistryTestCase
from tests.fakes.children import FakeChild
from tests.fakes.world import straw


class RefusalTests(RegistryTestCase):
    def test_identifier_that_was_never_issued_here(self) -> None:
        foreign = IdentifierIssuer(b"x" * 32, straw()).issue_identifier()
        for identifier in (foreign, "", "x", "A" * 40, self.accept()[:-1] + "1"):
            self.assert_refused(EvaluationNotFound, identifier, None, "0", END)
            with self.assertRaises(EvaluationNotFound):
                self.registry.get_status(identifier)
            self.failureResultOf(
                Deferred.fromCoroutine(self.registry.cancel_evaluation(identifier)),
                EvaluationNotFound,
            )
            self.failureResultOf(self.ask(identifier, None, 10), EvaluationNotFound)

    def test_evaluation_that_was_lost_in_a_restart_is_gone(self) -> None:
        identifier = self.accept()
        self.registry = self.make(2)
        self.assert_refused(EvaluationExpired, identifier)
        self.assertEqual(self.page(identifier, END), {"begin": END, "end": None, "data": []})
        self.assertIsNone(
            self.successResultOf(
                Deferred.fromCoroutine(self.registry.cancel_evaluation(identifier))
            )
        )


class WaitTests(RegistryTestCase):
    def waiting(self, after: str | None = None) -> tuple[str, FakeChild, Deferred[EventPage]]:
        """Begin an evaluation, and wait 20 s for its first event."""
        identifier, child = self.start()
        asked = self.ask(identifier, after, 20)
        self.assertNoResult(asked)
        return identifier, child, asked

    def assert_nothing_left(self) -> None:
        """Hold that no call is scheduled but the run's own, and that of the watch over it."""
        self.assertEqual(len(self.world.clock.getDelayedCalls()), 2)

    def test_reader_whose_cursor_is_discarded_meanwhile_is_refused(self) -> None:
        identifier, child, asked = self.waiting("0")
        child.print(b"")
        second = self.ask(identifier, "0", 20).addCallback(
            lambda page: self.registry.events.read_page_now(identifier, page.end_cursor)
        )
        third = self.ask(identifier, "0", 20)
        child.print(b"a\nb\n")
        self.assertEqual(self.successResultOf(asked).events.count, 3)
        self.assertEqual(self.successResultOf(second).events.count, 0)
        self.failureResultOf(third, DiscardedCursor)

    def test_reader_of_an_evaluation_that_is_forgotten_meanwhile_is_refused(self) -> None:
        identifier, child, first = self.waiting("0")
        second = self.ask(identifier, "0", 20)
        first.addCallback(
            lambda page: self.registry.events.read_page_now(identifier, page.end_cursor)
        )
        self.finish(child)
        self.assertEqual(self.successResultOf(first).end_cursor, None)
        self.failureResultOf(second, EvaluationExpired)

    def test_cancelled_wait_leaves_nothing(self) -> None:
        identifier, child, asked = self.waiting()
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        self.assert_nothing_left()
        child.print(b"a\n")
        self.assertEqual(self.page(identifier)["data"], ["a"])

    def test_wait_ends_in_an_empty_page_in_time(self) -> None:
        _, _, asked = self.waiting("0")
        self.world.clock.advance(19.999)
        self.assertNoResult(asked)
        self.world.clock.advance(0.001)
        page = self.decode(self.successResultOf(asked))
        self.assertEqual(page, {"begin": "0", "end": "0", "data": []})
        self.assert_nothing_left()
