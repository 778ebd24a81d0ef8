"""`evaluations.service`: bounds of queue, memory and records; nothing is left at the end."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred

from tawebeval.config import Configuration, EvaluationSettings, EventBufferSettings, LimitSettings
from tawebeval.errors import EvaluationExpired, ServerBusy
from tawebeval.evaluations.submissions import ReceivedForm
from tests.cases.evaluations import END, RegistryTestCase
from tests.cases.settings import with_constants
from tests.fakes.world import UntidyThreads, make_request


class RetryTests(RegistryTestCase):
    running, queued = 1, 1
    configuration = Configuration(limits=LimitSettings(wall_clock=1000))

    def refuse(self) -> int:
        """Return the seconds that a refused client is to wait."""
        return self.assertRaises(ServerBusy, self.accept).retry_after

    def test_retry_time_follows_from_the_rate_of_ends(self) -> None:
        self.accept()
        for _ in range(40):
            self.accept()
            self.world.clock.advance(3)
            self.world.child.end()
            self.world.turn()
        self.accept()
        # A look that is no request, such as a proxy's, takes no client's time.
        for _ in range(9):
            with self.assertRaises(ServerBusy):
                self.registry.check_readiness()
        for expected in (3, 6, 9):
            self.assertLessEqual(abs(self.refuse() - expected), 1)
        self.world.clock.advance(100)
        self.assertGreater(self.refuse(), 5)


class IdleRetryTests(RegistryTestCase):
    running, queued = 2, 1
    configuration = Configuration(limits=LimitSettings(wall_clock=1000))

    def test_ends_count_only_of_times_in_which_all_slots_were_in_use(self) -> None:
        self.world.repositories.remote = True
        for _ in range(40):
            self.world.repositories.gate.shut = True
            self.accept()  # it waits, but not for a slot
            self.world.repositories.gate.open()
            self.world.clock.advance(60)
            self.world.child.end()
            self.world.turn()
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

    def refuse(self) -> None:
        """Hold that no other is accepted, and that it is told when to come again."""
        error = self.assertRaises(ServerBusy, self.accept)
        self.assertGreater(error.retry_after, 0)

    def test_reading_a_kept_evaluation_makes_room(self) -> None:
        first, second = self.fill()
        self.refuse()
        self.page(first)
        self.refuse()
        self.page(first, END)
        self.accept()
        self.assertEqual(self.page(second)["data"], ["a", "\n"])

    def test_evaluation_that_a_stream_has_sent_goes_before_a_refusal(self) -> None:
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

    def test_stream_may_end_before_its_evaluation_is_cleaned_up(self) -> None:
        self.world.threads = threads = UntidyThreads()
        self.registry = self.make()
        threads.tidied.shut = True
        identifier, child = self.start(b"a\n")
        self.finish(child)
        self.send_all(identifier)
        self.assertEqual(self.registry.records.ended_share.used, 0)
        threads.tidied.open()
        other, _ = self.fill()
        self.assert_refused(EvaluationExpired, identifier)
        self.page(other)

    def test_readiness_forgets_nothing(self) -> None:
        first, second = self.fill()
        self.assertRaises(ServerBusy, self.registry.check_readiness)
        self.send_all(second)
        self.registry.check_readiness()
        self.assertIn(second, self.registry.records)
        self.page(second)  # its reader may ask for more
        self.assertRaises(ServerBusy, self.registry.check_readiness)
        self.page(first, END)
        self.registry.check_readiness()

    def cut_stream(self, identifier: str) -> None:
        """Let a stream be broken off after all events, before the end."""
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        with self.assertRaises(ConnectionError), subscription:
            self.read(subscription)
            raise ConnectionError

    def test_partly_sent_evaluation_stays(self) -> None:
        first, second = self.fill()
        self.cut_stream(first)
        subscription = self.registry.events.subscribe(second, None)
        assert subscription is not None
        with subscription:
            self.read(subscription, 1)
        self.refuse()
        self.send_all(first)
        self.page(first)
        self.refuse()
        self.world.clock.advance(29.5)
        self.refuse()
        subscription = self.registry.events.subscribe(first, None)
        assert subscription is not None
        with subscription:
            self.world.clock.advance(0.5)
            self.refuse()
            self.page(second)
        self.accept()
        self.page(second)
        self.assert_refused(EvaluationExpired, first)


class DiskTests(RegistryTestCase):
    configuration = Configuration(
        evaluations=EvaluationSettings(retain=900),
        buffers=with_constants(EventBufferSettings, max_page_bytes=4096)(disk=20_000),
        limits=LimitSettings(wall_clock=10**6),
    )

    def refuse(self) -> None:
        """Hold that no other is accepted, and that it is told when to come again."""
        error = self.assertRaises(ServerBusy, self.accept)
        self.assertGreater(error.retry_after, 0)

    def test_evaluations_that_run_go_on_when_the_disk_is_used_up(self) -> None:
        identifier, child = self.start(b"x" * 20_000 + b"\n")
        self.refuse()
        child.print(b"y" * 20_000 + b"\n")
        self.finish(child)
        self.assertEqual(self.registry.get_status(identifier)["state"], "finished")
        self.assertEqual(self.registry.get_status(identifier)["buffered_bytes"], 40_002)

    def test_abandoned_evaluation_counts_until_its_process_is_gone(self) -> None:
        _, child = self.start(b"x" * 20_000)
        self.expire(900)
        self.assertEqual(self.world.disk.used, 20_000)
        self.finish(child)
        self.assertEqual(self.world.disk.used, 0)

    def test_what_a_stream_has_sent_goes_before_a_refusal(self) -> None:
        identifier, child = self.start(b"x" * 20_000)
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        with subscription:
            self.finish(child)
            self.read(subscription)
            self.refuse()
        self.accept()
        self.assertEqual(self.world.disk.used, 0)

    def test_forgotten_evaluation_counts_while_a_stream_reads_it(self) -> None:
        identifier, child = self.start(b"a\n")
        self.finish(child)
        subscription = self.registry.events.subscribe(identifier, None)
        assert subscription is not None
        with subscription:
            self.page(identifier, END)
            self.assertEqual(self.world.disk.used, 2)
            self.assertEqual(self.read(subscription).count, 2)
        self.assertEqual(self.world.disk.used, 0)


class SpoolTests(RegistryTestCase):
    def send(self, size: int, **settings: Any) -> str:
        self.registry.submissions.share.take_within_part(size, "")
        return self.registry.accept_form(
            ReceivedForm(make_request(), Path("/uploads/some"), upload_bytes=size, **settings)
        )

    def test_upload_counts_until_its_directories_are_removed(self) -> None:
        identifiers = [self.send(100) for _ in range(3)]
        self.assertEqual(self.registry.submissions.share.used, 300)
        self.finish(self.world.spawn.children[0])
        self.assertEqual(self.registry.submissions.share.used, 200)
        Deferred.fromCoroutine(self.registry.cancel_evaluation(identifiers[1]))
        self.assertEqual(self.registry.submissions.share.used, 200)
        self.finish(self.world.spawn.children[1])
        self.assertEqual(self.registry.submissions.share.used, 100)

    def test_form_that_begins_nothing_is_removed_and_does_not_count_any_more(self) -> None:
        self.send(100, idempotency_key="k", form_digest=b"1")
        self.send(100, idempotency_key="k", form_digest=b"1")
        self.assertEqual(self.registry.submissions.share.used, 100)


class NothingLeftTests(RegistryTestCase):
    def watch(self, identifier: str) -> list[weakref.ref[Any]]:
        evaluation = self.registry.records[identifier]
        return [weakref.ref(one) for one in (evaluation, evaluation.events)]

    def assert_nothing_left(self, references: list[weakref.ref[Any]]) -> None:
        self.world.spawn.children.clear()
        self.world.sandbox.cells.clear()
        gc.collect()
        self.assertEqual([reference() for reference in references], [None] * len(references))
        self.assertEqual((self.world.disk.used, self.registry.submissions.share.used), (0, 0))
        self.assertEqual((self.world.memory.share.used, self.world.store.rows), (0, {}))
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_evaluation_read_to_its_end_leaves_nothing(self) -> None:
        identifier, child = self.start(b"a line\n" * 100)
        references = self.watch(identifier)
        self.ask(identifier, "0", 20)
        subscription = self.registry.events.subscribe(identifier, "0")
        assert subscription is not None
        with subscription:
            self.read(subscription, 100)
        self.finish(child)
        del child, subscription
        self.consume(identifier)
        self.assert_nothing_left(references)

    def test_evaluation_sent_to_its_end_leaves_nothing(self) -> None:
        for way in (self.consume, lambda _: self.world.clock.advance(900)):
            identifier, child = self.start(b"a line\n")
            references = self.watch(identifier)
            self.finish(child)
            subscription = self.registry.events.subscribe(identifier, None)
            assert subscription is not None
            with subscription:
                self.read(subscription, 100)
            del child, subscription
            way(identifier)
            self.registry.expire_evaluations()
            self.assert_nothing_left(references)

    def test_abandoned_evaluation_leaves_nothing(self) -> None:
        identifier, child = self.start(b"a line\n" * 100)
        references = self.watch(identifier)
        self.world.clock.advance(200)
        self.page(identifier)
        self.world.clock.advance(90)
        self.finish(child)
        del child
        self.expire(900)
        self.assert_nothing_left(references)
