"""`evaluations.service`: admission, requests, bounds and the end of all evaluations."""

from __future__ import annotations

import errno
import gc
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred

from tawebeval.config import Configuration, EvaluationSettings, LimitSettings
from tawebeval.core.form import MAX_SEED
from tawebeval.errors import DiscardedCursor, EvaluationExpired, ServerBusy
from tawebeval.evaluations.service import ReceivedForm
from tests.cases.evaluations import END, PATIENT, RegistryTestCase
from tests.fakes.files import MemoryEventFiles
from tests.fakes.world import UntidyThreads, make_request


class AcceptTests(RegistryTestCase):
    def test_seed_is_taken_from_the_request_or_generated_and_shown_in_the_status(self) -> None:
        given = self.registry.get_status(self.accept(seed=0))["seed"]
        self.assertEqual(given, 0)
        self.assertEqual(self.world.child.environment["TURINGARENA_SEED"], "0")
        self.world.random = lambda number: b"\xff" * number
        self.registry = self.make()
        drawn = self.registry.get_status(self.accept(seed=None))["seed"]
        self.assertEqual(drawn, MAX_SEED)
        self.assertEqual(self.world.child.environment["TURINGARENA_SEED"], str(MAX_SEED))


class WaitTests(RegistryTestCase):
    def test_waiting_reader_is_refused_if_its_cursor_is_discarded(self) -> None:
        identifier, child = self.start()
        asked = self.ask(identifier, "0", 20)
        self.assertNoResult(asked)
        child.print(b"")
        second = self.ask(identifier, "0", 20).addCallback(
            lambda page: self.registry.events.read_page_now(identifier, page.end_cursor)
        )
        third = self.ask(identifier, "0", 20)
        child.print(b"a\nb\n")
        self.assertEqual(self.successResultOf(asked).events.count, 3)
        self.assertEqual(self.successResultOf(second).events.count, 0)
        self.failureResultOf(third, DiscardedCursor)

    def test_waiting_reader_is_refused_if_the_evaluation_is_forgotten(self) -> None:
        identifier, child = self.start()
        first, second = (self.ask(identifier, "0", 20) for _ in range(2))
        first.addCallback(
            lambda page: self.registry.events.read_page_now(identifier, page.end_cursor)
        )
        self.finish(child)
        self.assertEqual(self.successResultOf(first).end_cursor, None)
        self.failureResultOf(second, EvaluationExpired)


class RetryTests(RegistryTestCase):
    running, queued = 1, 1
    configuration = Configuration(limits=LimitSettings(wall_clock=1000))

    def refuse(self) -> int:
        """Return the seconds that a refused client is to wait."""
        return self.assertRaises(ServerBusy, self.accept).retry_after

    def test_retry_time_is_the_mean_interval_between_ends(self) -> None:
        self.accept()
        for _ in range(40):
            self.accept()
            self.world.clock.advance(3)
            self.finish(self.world.child)
        self.accept()
        # A look that is no request, such as a proxy's, takes no client's time.
        for _ in range(9):
            with self.assertRaises(ServerBusy):
                self.registry.check_readiness()
        for expected in (3, 6, 9):
            self.assertLessEqual(abs(self.refuse() - expected), 1)


class IdleRetryTests(RegistryTestCase):
    running, queued = 2, 1
    configuration = Configuration(limits=LimitSettings(wall_clock=1000))

    def test_ends_with_a_free_slot_do_not_change_the_retry_time(self) -> None:
        self.world.repositories.remote = True
        for _ in range(40):
            self.world.repositories.gate.shut = True
            self.accept()  # it waits, but not for a slot
            self.world.repositories.gate.open()
            self.world.clock.advance(60)
            self.finish(self.world.child)
        for _ in range(3):
            self.accept()
        error = self.assertRaises(ServerBusy, self.accept)
        self.assertLessEqual(error.retry_after, 6)  # two slots, each for 10 s as none was measured


class KeptTests(RegistryTestCase):
    configuration = Configuration(evaluations=EvaluationSettings(kept=2, retain=600))

    def fill(self) -> list[str]:
        identifiers = []
        for _ in range(2):
            identifier, child = self.start(b"a\n")
            self.registry.check_admission()
            self.finish(child)
            identifiers.append(identifier)
        return identifiers

    def test_evaluation_sent_by_a_stream_is_expired_before_a_form_is_refused(self) -> None:
        first, second = self.fill()
        self.send_all(second)
        self.send_all(first)
        self.send_all(second)
        self.page(second)
        self.world.clock.advance(30)
        self.accept()
        self.assert_refused(EvaluationExpired, second)
        self.page(first)
        self.accept()

    def test_evaluation_is_counted_although_its_files_cannot_be_closed(self) -> None:
        identifier, child = self.start(b"a\n")
        with mock.patch.object(MemoryEventFiles, "close", side_effect=OSError(errno.EIO, "no")):
            self.finish(child)
        self.assertEqual(self.registry.records.ended_evaluations_budget.used, 1)
        self.assertEqual(self.consume(identifier), ["a", "\n"])
        self.assertEqual(self.registry.records.ended_evaluations_budget.used, 0)
        self.flushLoggedErrors(OSError)

    def test_evaluation_sent_during_its_clean_up_is_expired_to_make_room(self) -> None:
        self.world.threads = threads = UntidyThreads()
        self.registry = self.make()
        threads.tidied.shut = True
        identifier = self.evaluate(b"a\n")
        self.send_all(identifier)
        self.assertEqual(self.registry.records.ended_evaluations_budget.used, 0)
        threads.tidied.open()
        other, _ = self.fill()
        self.assert_refused(EvaluationExpired, identifier)
        self.page(other)

    def test_readiness_check_counts_sent_evaluations_as_room_and_expires_none(self) -> None:
        first, second = self.fill()
        self.assertRaises(ServerBusy, self.registry.check_readiness)
        self.send_all(second)
        with self.subscribe(second).reader_context:  # another stream
            self.assertRaises(ServerBusy, self.registry.check_readiness)
        self.registry.check_readiness()
        self.assertIn(second, self.registry.records)
        self.page(second)  # its reader may ask for more
        self.assertRaises(ServerBusy, self.registry.check_readiness)
        self.page(first, END)
        self.registry.check_readiness()

    def test_evaluation_is_kept_for_30_seconds_after_a_long_poll_was_answered(self) -> None:
        (first, child), (_, other) = self.start(), self.start()
        asked = self.ask(first, None, 60)
        self.world.clock.advance(40)
        self.finish(child)
        self.finish(other)
        self.successResultOf(asked)
        self.send_all(first)
        self.assertRaises(ServerBusy, self.registry.check_readiness)
        self.world.clock.advance(30)
        self.registry.check_readiness()

    def test_cut_stream_does_not_count_the_evaluation_as_sent(self) -> None:
        first, _ = self.fill()
        subscription = self.subscribe(first)
        with self.assertRaises(ConnectionError), subscription.reader_context:
            self.read(subscription)
            raise ConnectionError
        error = self.assertRaises(ServerBusy, self.accept)
        self.assertGreater(error.retry_after, 0)
        self.send_all(first)
        self.accept()


class SpoolTests(RegistryTestCase):
    def send(self, size: int, **settings: Any) -> str:
        self.registry.submissions.budget.take_within_quota(size, "")
        return self.registry.accept_form(
            ReceivedForm(make_request(), Path("/uploads/some"), upload_size=size, **settings)
        )

    def test_upload_counts_until_its_directories_are_removed(self) -> None:
        identifiers = [self.send(100) for _ in range(3)]
        self.assertEqual(self.registry.submissions.budget.used, 300)
        self.finish(self.world.spawn.children[0])
        self.assertEqual(self.registry.submissions.budget.used, 200)
        Deferred.fromCoroutine(self.registry.cancel_evaluation(identifiers[1]))
        self.assertEqual(self.registry.submissions.budget.used, 200)
        self.finish(self.world.spawn.children[1])
        self.assertEqual(self.registry.submissions.budget.used, 100)

    def test_repeated_form_is_removed_and_not_counted(self) -> None:
        self.send(100, idempotency_key="k", form_digest=b"1")
        self.send(100, idempotency_key="k", form_digest=b"1")
        self.assertEqual(self.registry.submissions.budget.used, 100)


class NothingLeftTests(RegistryTestCase):
    def test_evaluation_read_to_its_end_leaves_nothing(self) -> None:
        identifier, child = self.start(b"a line\n" * 100)
        evaluation = self.registry.records[identifier]
        references = [weakref.ref(one) for one in (evaluation, evaluation.events)]
        self.ask(identifier, "0", 20)
        subscription = self.subscribe(identifier, "0")
        with subscription.reader_context:
            self.read(subscription, 100)
        self.finish(child)
        del child, subscription, evaluation
        self.consume(identifier)
        self.world.spawn.children.clear()
        self.world.sandbox.cells.clear()
        gc.collect()
        self.assertEqual([reference() for reference in references], [None] * 2)
        self.assertEqual((self.world.disk.used, self.registry.submissions.budget.used), (0, 0))
        self.assertEqual((self.world.memory.budget.used, self.world.store.rows), (0, {}))
        self.assertEqual(self.world.clock.getDelayedCalls(), [])


class CloseTests(RegistryTestCase):
    configuration = PATIENT

    def close(self, drain: float = 0) -> Deferred[bool]:
        return Deferred.fromCoroutine(self.registry.drain_and_close(drain))

    def finish_close(self, closed: Deferred[bool]) -> None:
        """Let the registry look once more, and hold that it is closed."""
        self.world.clock.advance(0.05)
        self.successResultOf(closed)

    def test_all_evaluations_end_with_shutdown(self) -> None:
        identifiers = [self.accept() for _ in range(4)]
        closed = self.close()
        self.assertEqual([child.signals for child in self.world.spawn.children], [[15], [15]])
        for child in self.world.spawn.children:
            self.assertNoResult(closed)
            self.finish(child)
        self.finish_close(closed)
        for identifier in identifiers:
            self.assertEqual(self.consume(identifier), ["shutdown"])
        self.assertEqual(len(self.world.spawn.children), 2)

    def test_closed_registry_accepts_nothing(self) -> None:
        self.successResultOf(self.close())
        with self.assertRaises(ServerBusy):
            self.registry.check_admission()
        with self.assertRaises(ServerBusy):
            self.accept()

    def test_close_waits_for_the_process_of_an_expired_evaluation(self) -> None:
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
        self.finish_close(closed)


class DrainTests(CloseTests):
    def close(self, drain: float = 10) -> Deferred[bool]:
        """Close the registry, and let the drain of the other tests be over."""
        closed = super().close(drain)
        if drain == 10:
            self.world.clock.advance(10)
        return closed

    def test_drain_lets_running_evaluations_end_and_refuses_new_ones(self) -> None:
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
        self.finish_close(closed)
        self.assertEqual(self.consume(first), ["a", "\n"])
        self.assertEqual(self.consume(second), ["b", "\n", "c", "\n"])
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_queued_evaluation_does_not_begin_during_a_drain(self) -> None:
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

    def test_drain_can_be_ended_early(self) -> None:
        _, child = self.start()
        closed = self.close(20)
        self.registry.end_drain_early()
        self.world.clock.advance(0.05)
        self.assertEqual(child.signals, [15])
        self.finish(child)
        self.finish_close(closed)

    def test_evaluation_being_fetched_may_run_during_a_drain(self) -> None:
        self.world.repositories.gate.shut = True
        identifier = self.accept()
        closed = self.close(20)
        self.world.repositories.gate.open()
        self.finish(self.world.child)
        self.finish_close(closed)
        self.assertEqual(self.consume(identifier), [])
