"""`tawebeval.registry`: what nobody asks for, and the end of the daemon."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from tawebeval.config import Configuration, Evaluations, Limits
from tawebeval.errors import Busy, EvaluationGone, InvalidCursor
from tests.test_registry import END, RegistryTestCase

PATIENT = Configuration(
    evaluations=Evaluations(abandon_after=900), limits=Limits(wall_clock=100_000)
)
"""Under these settings evaluations are abandoned long before they are over their time."""


class ExpireTests(RegistryTestCase):
    """Evaluations for which nobody asks."""

    configuration = PATIENT

    def expire(self, seconds: float) -> None:
        """Look for abandoned ones that much later."""
        self.world.clock.advance(seconds)
        self.registry.expire()
        self.world.turn()

    def test_abandoned(self) -> None:
        """After that time, and no moment before, it is killed and forgotten."""
        identifier, child = self.start(b"a\n")
        self.expire(899.999)
        self.assertEqual(child.signals, [])
        self.expire(0.001)
        self.assertEqual(child.signals, [15])
        self.assert_refused(EvaluationGone, identifier)
        self.assertEqual(self.page(identifier, END)["end"], None)

    def test_finished(self) -> None:
        """One that has ended is forgotten as well."""
        identifier, child = self.start()
        self.finish(child)
        self.expire(900)
        self.assert_refused(EvaluationGone, identifier)

    def test_queued(self) -> None:
        """So is one that waits for its turn."""
        identifiers = [self.accept() for _ in range(4)]
        for _ in range(9):
            for identifier in identifiers[:2]:
                self.page(identifier)
            self.expire(100)
        self.assert_refused(EvaluationGone, *identifiers[2:3])
        self.assert_refused(EvaluationGone, *identifiers[3:])
        self.accept()

    def test_each_request_counts(self) -> None:
        """Whoever asks for its events or its status keeps it."""
        identifier, child = self.start(b"a\n")
        self.finish(child)
        for ask in (
            lambda: self.page(identifier),
            lambda: self.registry.status(identifier),
            lambda: self.page(identifier, "2"),
            lambda: self.successResultOf(Deferred.fromCoroutine(self.registry.cancel(identifier))),
        ):
            self.expire(899)
            ask()
        self.expire(899)
        self.page(identifier, "2")

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
            self.assert_refused(EvaluationGone, identifier)

    def test_place_is_free(self) -> None:
        """The place of one that was abandoned is given to the next when its process is gone."""
        _, child = self.start()
        others = [self.accept() for _ in range(2)]
        self.world.clock.advance(899)
        for identifier in others:
            self.page(identifier)
        self.expire(1)
        self.assertEqual(self.registry.status(others[1])["state"], "queued")
        self.finish(child)
        self.assertEqual(self.registry.status(others[1])["state"], "running")


class CloseTests(RegistryTestCase):
    """The end of the daemon."""

    configuration = PATIENT

    def close(self) -> Deferred[None]:
        """Close the registry."""
        return Deferred.fromCoroutine(self.registry.close())

    def test_close(self) -> None:
        """All end with `shutdown`; it is closed when the last of their processes is gone."""
        identifiers = [self.accept() for _ in range(4)]
        closed = self.close()
        self.assertEqual([child.signals for child in self.world.spawn.children], [[15], [15]])
        for child in self.world.spawn.children:
            self.assertNoResult(closed)
            self.finish(child)
        self.assertTrue(self.successResultOf(closed))
        for identifier in identifiers:
            self.assertEqual(self.consume(identifier), ["shutdown"])
        self.assertEqual(len(self.world.spawn.children), 2)

    def test_idle(self) -> None:
        """With nothing to end it is closed at once."""
        identifier, child = self.start()
        self.finish(child)
        self.assertFalse(self.successResultOf(self.close()))
        self.assertEqual(self.consume(identifier), [])

    def test_nothing_new(self) -> None:
        """From then on nothing is accepted."""
        self.successResultOf(self.close())
        with self.assertRaises(Busy):
            self.registry.check_admission()
        with self.assertRaises(Busy):
            self.accept()

    def test_forgotten_ones(self) -> None:
        """It waits also for those that are forgotten, but not gone yet."""
        _, child = self.start()
        self.world.clock.advance(900)
        self.registry.expire()
        closed = self.close()
        self.assertNoResult(closed)
        self.finish(child)
        self.successResultOf(closed)

    def test_wakes_readers(self) -> None:
        """Those who wait for events get the final one."""
        identifier, child = self.start()
        asked = self.ask(identifier, None, 20)
        self.close()
        self.finish(child)
        self.assertEqual(self.decode(self.successResultOf(asked))["data"], ["shutdown"])
