"""`evaluations.registry`: refused requests, and requests that wait for events."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred

from tawebeval.core.identifiers import IdentifierIssuer
from tawebeval.core.pages import EventPage
from tawebeval.errors import DiscardedCursor, EvaluationExpired, EvaluationNotFound, InvalidCursor
from tests.cases.evaluations import END, RegistryTestCase
from tests.fakes.children import FakeChild
from tests.fakes.world import straw


class RefusalTests(RegistryTestCase):
    """Who asks for what is not there."""

    def test_unknown(self) -> None:
        """An identifier that was never issued here: 404, whatever is asked."""
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

    def test_restart(self) -> None:
        """One that was lost in a restart is gone; its end is told, and it can be cancelled."""
        identifier = self.accept()
        self.registry = self.make(2)
        self.assert_refused(EvaluationExpired, identifier)
        self.assertEqual(self.page(identifier, END), {"begin": END, "end": None, "data": []})
        self.assertIsNone(
            self.successResultOf(
                Deferred.fromCoroutine(self.registry.cancel_evaluation(identifier))
            )
        )

    def test_beyond_a_closed_end(self) -> None:
        """A number beyond the newest event is none either when all has ended."""
        identifier, child = self.start(b"a\n")
        self.finish(child)
        self.assert_refused(InvalidCursor, identifier, "3")
        self.assertEqual(self.page(identifier, "2")["end"], END)


class WaitTests(RegistryTestCase):
    """Long polls."""

    def waiting(self, after: str | None = None) -> tuple[str, FakeChild, Deferred[EventPage]]:
        """Begin an evaluation, and wait 20 s for its first event."""
        identifier, child = self.start()
        asked = self.ask(identifier, after, 20)
        self.assertNoResult(asked)
        return identifier, child, asked

    def assert_nothing_left(self) -> None:
        """Hold that no call is scheduled but the run's own, and that of the watch over it."""
        self.assertEqual(len(self.world.clock.getDelayedCalls()), 2)

    def test_event(self) -> None:
        """An event answers at once."""
        for after in (None, "0"):
            _, child, asked = self.waiting(after)
            child.print(b"a\n")
            page = self.decode(self.successResultOf(asked))
            self.assertEqual(page, {"begin": after, "end": "1", "data": ["a"]})
            self.finish(child)

    def test_nothing_to_wait_for(self) -> None:
        """Where there are events, or the end, there is no waiting."""
        identifier, child = self.start(b"a\n")
        self.assertEqual(self.successResultOf(self.ask(identifier, None, 20)).events.count, 1)
        self.finish(child)
        self.assertEqual(self.successResultOf(self.ask(identifier, "2", 20)).end_cursor, END)
        self.assertEqual(self.successResultOf(self.ask(identifier, END, 20)).end_cursor, None)
        self.assertEqual(self.successResultOf(self.ask(identifier, END, 20)).end_cursor, None)

    def test_no_wish_to_wait(self) -> None:
        """Who does not wish to wait is answered with nothing."""
        identifier, _ = self.start()
        self.assertEqual(self.successResultOf(self.ask(identifier, None, 0)).end_cursor, "0")
        self.assert_nothing_left()

    def test_end(self) -> None:
        """The end answers, even if it brings no event."""
        _, child, asked = self.waiting("0")
        self.finish(child)
        page = self.decode(self.successResultOf(asked))
        self.assertEqual(page, {"begin": "0", "end": END, "data": []})

    def test_bad_end(self) -> None:
        """A final error answers with it."""
        identifier, _, asked = self.waiting()
        self.world.child.obeys = (15,)
        Deferred.fromCoroutine(self.registry.cancel_evaluation(identifier))
        self.world.turn()
        page = self.decode(self.successResultOf(asked))
        self.assertEqual((page["data"], page["end"]), (["cancelled"], END))

    def test_time(self) -> None:
        """When the time is over, and no moment before, the answer is an empty page."""
        _, _, asked = self.waiting("0")
        self.world.clock.advance(19.999)
        self.assertNoResult(asked)
        self.world.clock.advance(0.001)
        page = self.decode(self.successResultOf(asked))
        self.assertEqual(page, {"begin": "0", "end": "0", "data": []})
        self.assert_nothing_left()

    def test_answered_leaves_nothing(self) -> None:
        """An answer before its time leaves no timer."""
        _, child, asked = self.waiting()
        child.print(b"a\n")
        self.successResultOf(asked)
        self.assert_nothing_left()

    def test_cancelled_leaves_nothing(self) -> None:
        """A client that goes away leaves nothing, and its events stay for the next."""
        identifier, child, asked = self.waiting()
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        self.assert_nothing_left()
        child.print(b"a\n")
        self.assertEqual(self.page(identifier)["data"], ["a"])

    def test_several(self) -> None:
        """Any number may wait for the same events, each as long as it likes."""
        identifier, child, first = self.waiting("0")
        second, third = self.ask(identifier, None, 5), self.ask(identifier, "0", 30)
        self.world.clock.advance(5)
        self.assertEqual(self.successResultOf(second).events.count, 0)
        child.print(b"a\n")
        for asked in (first, third):
            self.assertEqual(self.successResultOf(asked).events.count, 1)

    def test_acknowledged_meanwhile(self) -> None:
        """Who waits at a cursor that another one goes beyond meanwhile is told so."""
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

    def test_forgotten_meanwhile(self) -> None:
        """Who waits for an evaluation that another one reads to its end is told so."""
        identifier, child, first = self.waiting("0")
        second = self.ask(identifier, "0", 20)
        first.addCallback(
            lambda page: self.registry.events.read_page_now(identifier, page.end_cursor)
        )
        self.finish(child)
        self.assertEqual(self.successResultOf(first).end_cursor, None)
        self.failureResultOf(second, EvaluationExpired)
