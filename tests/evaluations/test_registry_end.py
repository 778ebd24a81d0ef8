"""`evaluations.registry`: expiry of evaluations that no client asks for."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from tawebeval.errors import EvaluationExpired, InvalidCursor
from tests.cases.evaluations import END, PATIENT, RegistryTestCase


class ExpireTests(RegistryTestCase):
    """Evaluations for which nobody asks."""

    configuration = PATIENT

    def test_abandoned(self) -> None:
        """After that time, and no moment before, it is killed and forgotten."""
        identifier, child = self.start(b"a\n")
        self.expire(899.999)
        self.assertEqual(child.signals, [])
        self.expire(0.001)
        self.assertEqual(child.signals, [15])
        self.assert_refused(EvaluationExpired, identifier)
        self.assertEqual(self.page(identifier, END)["end"], None)

    def test_finished(self) -> None:
        """One that has ended is forgotten after a time of its own, counted from its end."""
        identifier, child = self.start(b"a\n")
        self.world.clock.advance(899)
        self.finish(child)
        self.expire(899.999)
        self.assertEqual(self.list_all()[0]["state"], "finished")
        self.expire(0.001)
        self.assert_refused(EvaluationExpired, identifier)
        self.assertEqual(self.page(identifier, END)["end"], None)

    def test_queued(self) -> None:
        """So is one that waits for its turn."""
        identifiers = [self.accept() for _ in range(4)]
        for _ in range(9):
            for identifier in identifiers[:2]:
                self.page(identifier)
            self.expire(100)
        self.assert_refused(EvaluationExpired, *identifiers[2:3])
        self.assert_refused(EvaluationExpired, *identifiers[3:])
        self.accept()

    def test_each_request_counts(self) -> None:
        """Whoever asks for its events keeps it, or before its end for its status."""
        identifier, child = self.start(b"a\n")
        for ask in (
            lambda: self.page(identifier),
            lambda: self.registry.get_status(identifier),
        ):
            self.expire(899)
            ask()
        self.finish(child)
        for _ in range(3):
            self.expire(899)
            self.page(identifier)

    def test_requests_that_do_not_read(self) -> None:
        """After the end neither the status nor a DELETE does."""
        identifier, child = self.start(b"a\n")
        self.finish(child)
        self.expire(899)
        self.registry.get_status(identifier)
        self.successResultOf(Deferred.fromCoroutine(self.registry.cancel_evaluation(identifier)))
        self.expire(1)
        self.assert_refused(EvaluationExpired, identifier)

    def test_refused_cursor_counts(self) -> None:
        """So does one whose cursor is refused: it is a client all the same."""
        identifier, child = self.start()
        self.finish(child)
        self.expire(899)
        self.assert_refused(InvalidCursor, identifier, "99")
        self.expire(899)
        self.page(identifier)

    def test_who_waits(self) -> None:
        """One for whose events somebody waits is not abandoned, however long that takes."""
        identifier, child = self.start()
        asked = self.ask(identifier, None, 2000)
        self.expire(1000)
        self.assertEqual(child.signals, [])
        self.expire(999)
        child.print(b"a\n")
        self.assertEqual(self.successResultOf(asked).events.count, 1)
        self.expire(899)
        self.page(identifier)

    def test_only_old_ones(self) -> None:
        """Younger ones stay, in whatever order they were asked for."""
        pairs = [self.start() for _ in range(2)]
        for _, child in pairs:
            self.finish(child)
        pairs += [self.start() for _ in range(2)]
        for _, child in pairs[2:]:
            self.finish(child)
        self.world.clock.advance(500)
        kept = [pairs[2][0], pairs[0][0]]
        for identifier in kept:
            self.page(identifier)
        self.expire(500)
        for identifier in kept:
            self.page(identifier)
        for identifier in (pairs[1][0], pairs[3][0]):
            self.assert_refused(EvaluationExpired, identifier)

    def test_place_is_free(self) -> None:
        """The place of one that was abandoned is given to the next when its process is gone."""
        _, child = self.start()
        others = [self.accept() for _ in range(2)]
        self.world.clock.advance(899)
        for identifier in others:
            self.page(identifier)
        self.expire(1)
        self.assertEqual(self.registry.get_status(others[1])["state"], "queued")
        self.finish(child)
        self.assertEqual(self.registry.get_status(others[1])["state"], "running")
