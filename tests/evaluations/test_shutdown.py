"""`evaluations.service`: the drain of evaluations, streams and pages."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from tawebeval.errors import ServerBusy
from tests.cases.evaluations import END, PATIENT, RegistryTestCase


class CloseTests(RegistryTestCase):
    configuration = PATIENT

    def close(self, drain: float = 0) -> Deferred[bool]:
        return Deferred.fromCoroutine(self.registry.drain_and_close(drain))

    def finish_close(self, closed: Deferred[bool]) -> bool:
        """Let the registry look once more; return the result of the close."""
        self.world.clock.advance(0.05)
        return self.successResultOf(closed)

    def test_all_evaluations_end_with_shutdown(self) -> None:
        identifiers = [self.accept() for _ in range(4)]
        closed = self.close()
        self.assertEqual([child.signals for child in self.world.spawn.children], [[15], [15]])
        for child in self.world.spawn.children:
            self.assertNoResult(closed)
            self.finish(child)
        self.assertTrue(self.finish_close(closed))
        for identifier in identifiers:
            self.assertEqual(self.consume(identifier), ["shutdown"])
        self.assertEqual(len(self.world.spawn.children), 2)

    def test_empty_registry_is_closed_at_once(self) -> None:
        identifier, child = self.start()
        self.finish(child)
        self.assertFalse(self.successResultOf(self.close()))
        self.assertEqual(self.consume(identifier), [])

    def test_closed_registry_accepts_nothing(self) -> None:
        self.successResultOf(self.close())
        with self.assertRaises(ServerBusy):
            self.registry.check_admission()
        with self.assertRaises(ServerBusy):
            self.accept()

    def test_forgotten_evaluations_are_waited_for(self) -> None:
        _, child = self.start()
        self.world.clock.advance(900)
        self.registry.expire_evaluations()
        closed = self.close()
        self.assertNoResult(closed)
        self.finish(child)
        self.finish_close(closed)

    def test_waiting_readers_get_the_final_event(self) -> None:
        identifier, child = self.start()
        asked = self.ask(identifier, None, 20)
        closed = self.close()
        self.finish(child)
        self.assertEqual(self.decode(self.successResultOf(asked))["data"], ["shutdown"])
        self.assertNoResult(closed)
        self.page(identifier, END)
        self.assertTrue(self.finish_close(closed))

    def test_reader_is_waited_for_five_seconds(self) -> None:
        identifier, child = self.start(b"a\n")
        self.finish(child)
        closed = self.close()
        self.assertFalse(self.successResultOf(closed), "who has not asked is not there")
        self.page(identifier)
        closed = Deferred.fromCoroutine(self.registry.drain_and_close())
        self.world.clock.advance(4.5)
        self.assertNoResult(closed)
        self.world.clock.advance(0.5)
        self.assertTrue(self.finish_close(closed))
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_reader_between_two_polls_is_waited_for(self) -> None:
        identifier, child = self.start()
        cursor = self.page(identifier)["end"]
        self.world.clock.advance(28)
        closed = Deferred.fromCoroutine(self.registry.drain_and_close())
        self.finish(child)
        self.world.clock.advance(1)
        self.assertNoResult(closed)
        page = self.page(identifier, cursor)
        self.assertEqual((page["data"], page["end"]), (["shutdown"], END))
        self.assertNoResult(closed)
        self.page(identifier, END)
        self.assertTrue(self.finish_close(closed))

    def test_reader_without_a_poll_in_half_a_minute_has_gone(self) -> None:
        identifier, child = self.start()
        self.finish(child)
        self.page(identifier)
        self.world.clock.advance(30)
        self.assertFalse(self.successResultOf(self.close()))

    def test_page_without_an_acknowledgement_makes_no_reader(self) -> None:
        identifier, child = self.start(b"a\n")
        self.finish(child)
        self.successResultOf(self.close())
        self.registry.events.read_page_now(identifier, None, is_observer=True)
        self.assertFalse(
            self.successResultOf(Deferred.fromCoroutine(self.registry.drain_and_close()))
        )

    def test_stream_is_waited_for_until_it_has_left(self) -> None:
        identifier, child = self.start(b"a\n")
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        with subscription:
            closed = self.close()
            self.finish(child)
            self.assertNoResult(closed)
        self.assertTrue(self.finish_close(closed))


class DrainTests(CloseTests):
    def close(self, drain: float = 10) -> Deferred[bool]:
        """Close the registry, and let the drain of the other tests be over."""
        closed = super().close(drain)
        if drain == 10:
            self.world.clock.advance(10)
        return closed

    def test_running_evaluations_may_end_and_no_other_begins(self) -> None:
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
        self.assertTrue(self.finish_close(closed))
        self.assertEqual(self.consume(first), ["a", "\n"])
        self.assertEqual(self.consume(second), ["b", "\n", "c", "\n"])
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_drain_ends_evaluations_in_time(self) -> None:
        identifier, child = self.start()
        closed = self.close(20)
        self.world.clock.advance(19.999)
        self.assertEqual(child.signals, [])
        self.world.clock.advance(0.001)
        self.assertEqual(child.signals, [15])
        self.finish(child)
        self.assertTrue(self.finish_close(closed))
        self.assertEqual(self.consume(identifier), ["shutdown"])

    def test_queued_evaluation_does_not_begin(self) -> None:
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

    def test_fetched_evaluation_may_run(self) -> None:
        self.world.repositories.gate.shut = True
        identifier = self.accept()
        closed = self.close(20)
        self.world.repositories.gate.open()
        self.finish(self.world.child)
        self.assertTrue(self.finish_close(closed))
        self.assertEqual(self.consume(identifier), [])

    def test_hurry_ends_the_drain_at_once(self) -> None:
        _, child = self.start()
        closed = self.close(20)
        self.registry.end_drain_early()
        self.world.clock.advance(0.05)
        self.assertEqual(child.signals, [15])
        self.finish(child)
        self.assertTrue(self.finish_close(closed))
