"""`evaluations.shutdown`: the drain of evaluations, streams and pages."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from tawebeval.errors import ServerBusy
from tests.cases.evaluations import END, PATIENT, RegistryTestCase


class CloseTests(RegistryTestCase):
    """The end of the daemon."""

    configuration = PATIENT

    def close(self, drain: float = 0) -> Deferred[bool]:
        """Close the registry."""
        return Deferred.fromCoroutine(self.registry.drain_and_close(drain))

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
        with self.assertRaises(ServerBusy):
            self.registry.check_admission()
        with self.assertRaises(ServerBusy):
            self.accept()

    def test_forgotten_ones(self) -> None:
        """It waits also for those that are forgotten, but not gone yet."""
        _, child = self.start()
        self.world.clock.advance(900)
        self.registry.expire_evaluations()
        closed = self.close()
        self.assertNoResult(closed)
        self.finish(child)
        self.successResultOf(closed)

    def test_wakes_readers(self) -> None:
        """Those who wait for events get the final one."""
        identifier, child = self.start()
        asked = self.ask(identifier, None, 20)
        closed = self.close()
        self.finish(child)
        self.assertEqual(self.decode(self.successResultOf(asked))["data"], ["shutdown"])
        self.assertNoResult(closed)
        self.page(identifier, END)
        self.assertTrue(self.successResultOf(closed))

    def test_reader_that_does_not_come_back(self) -> None:
        """Who has been told, and does not read on, is waited for five seconds and no longer."""
        identifier, child = self.start(b"a\n")
        self.finish(child)
        closed = self.close()
        self.assertFalse(self.successResultOf(closed), "who has not asked is not there")
        self.page(identifier)
        closed = Deferred.fromCoroutine(self.registry.drain_and_close())
        self.world.clock.advance(4.5)
        self.assertNoResult(closed)
        self.world.clock.advance(0.5)
        self.assertTrue(self.successResultOf(closed))
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_reader_between_two_polls(self) -> None:
        """Who has asked for a page lately is there, and waited for until it has the end."""
        identifier, child = self.start()
        cursor = self.page(identifier)["end"]
        self.world.clock.advance(29.9)
        closed = Deferred.fromCoroutine(self.registry.drain_and_close())
        self.finish(child)
        self.world.clock.advance(1)
        self.assertNoResult(closed)
        page = self.page(identifier, cursor)
        self.assertEqual((page["data"], page["end"]), (["shutdown"], END))
        self.assertNoResult(closed)
        self.page(identifier, END)
        self.assertTrue(self.successResultOf(closed))

    def test_who_has_gone(self) -> None:
        """Who has not asked for a page in half a minute is not there any more."""
        identifier, child = self.start()
        self.finish(child)
        self.page(identifier)
        self.world.clock.advance(30)
        self.assertFalse(self.successResultOf(self.close()))

    def test_looking(self) -> None:
        """Who only looks at a page, and takes nothing, is no reader."""
        identifier, child = self.start(b"a\n")
        self.finish(child)
        self.successResultOf(self.close())
        self.registry.events.read_page_now(identifier, None, is_observer=True)
        self.assertFalse(
            self.successResultOf(Deferred.fromCoroutine(self.registry.drain_and_close()))
        )

    def test_stream(self) -> None:
        """A stream is waited for until it has left."""
        identifier, child = self.start(b"a\n")
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        with subscription:
            closed = self.close()
            self.finish(child)
            self.assertNoResult(closed)
        self.assertTrue(self.successResultOf(closed))


class DrainTests(CloseTests):
    """The end of a daemon that lets what runs end by itself; the rest holds as without that."""

    def close(self, drain: float = 10) -> Deferred[bool]:
        """Close the registry, and let the drain of the other tests be over."""
        closed = super().close(drain)
        if drain == 10:
            self.world.clock.advance(10)
        return closed

    def test_drain(self) -> None:
        """What runs may end, and nothing new may begin."""
        first, child = self.start(b"a\n")
        second, other = self.start(b"b\n")
        closed = self.close(20)
        self.finish(child)
        self.world.clock.advance(19.999)
        with self.assertRaises(ServerBusy):
            self.accept()
        other.print(b"c\n")
        self.assertEqual(other.signals, [])
        self.finish(other)
        self.assertTrue(self.successResultOf(closed))
        self.assertEqual(self.consume(first), ["a", "\n"])
        self.assertEqual(self.consume(second), ["b", "\n", "c", "\n"])
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_time_is_over(self) -> None:
        """What has not ended by then is ended, and no moment before."""
        identifier, child = self.start()
        closed = self.close(20)
        self.world.clock.advance(19.999)
        self.assertEqual(child.signals, [])
        self.world.clock.advance(0.001)
        self.assertEqual(child.signals, [15])
        self.finish(child)
        self.assertTrue(self.successResultOf(closed))
        self.assertEqual(self.consume(identifier), ["shutdown"])

    def test_queued(self) -> None:
        """What waits for its turn does not get it: it ends at once, and its readers know."""
        _, child = self.start()
        self.start()
        waiting = [self.accept() for _ in range(2)]
        asked = self.ask(waiting[0], None, 20)
        self.close(20)
        self.assertEqual(self.decode(self.successResultOf(asked))["data"], ["shutdown"])
        for identifier in waiting:
            self.assertEqual(self.registry.get_status(identifier)["state"], "failed")
        self.finish(child)
        self.assertEqual(len(self.world.spawn.children), 2)

    def test_fetching(self) -> None:
        """What is being fetched may run."""
        self.world.repositories.gate.shut = True
        identifier = self.accept()
        closed = self.close(20)
        self.world.repositories.gate.open()
        self.finish(self.world.child)
        self.assertTrue(self.successResultOf(closed))
        self.assertEqual(self.consume(identifier), [])

    def test_hurry(self) -> None:
        """Whoever is in a hurry ends it at once, also before it has begun."""
        _, child = self.start()
        closed = self.close(20)
        self.registry.end_drain_early()
        self.assertEqual(child.signals, [15])
        self.finish(child)
        self.assertTrue(self.successResultOf(closed))

    def test_nothing_runs(self) -> None:
        """With nothing that runs there is nothing to wait for."""
        self.assertFalse(self.successResultOf(self.close(20)))
