"""`evaluations.service`: admission, idempotency and cancelling."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from tawebeval.core.form import MAX_SEED
from tawebeval.errors import ServerBusy
from tests.cases.evaluations import RegistryTestCase
from tests.fakes.world import IdleThreads


class AcceptTests(RegistryTestCase):
    def test_each_evaluation_has_an_identifier_of_its_own(self) -> None:
        identifiers = [self.accept() for _ in range(4)]
        self.assertEqual(len(set(identifiers)), 4)
        for identifier in identifiers:
            self.assertEqual(self.registry.get_status(identifier)["evaluation_id"], identifier)
            self.assertEqual(self.page(identifier)["end"], "0")

    def test_evaluations_beyond_the_slots_wait_in_order(self) -> None:
        identifiers = [self.accept() for _ in range(4)]
        seen = [self.registry.get_status(identifier) for identifier in identifiers]
        self.assertEqual([s["state"] for s in seen], ["running", "running", "queued", "queued"])
        self.assertEqual([s["queue_place"] for s in seen], [None, None, 0, 1])
        self.finish(self.world.spawn.children[1])
        seen = [self.registry.get_status(identifier) for identifier in identifiers]
        self.assertEqual([s["state"] for s in seen], ["running", "finished", "running", "queued"])
        self.assertEqual([s["queue_place"] for s in seen], [None, None, None, 0])

    def test_restored_evaluations_are_listed_in_the_order_of_acceptance(self) -> None:
        records = self.registry.records
        for number in (6, 2, 4):
            records.last_sequence_number = number - 1
            self.accept()
        records.sort_by_acceptance()
        listed = records.list_evaluations("", 0, 2)
        self.assertEqual([record.details.sequence_number for record in listed], [2, 4])

    def test_full_queue_refuses_with_a_retry_time(self) -> None:
        for _ in range(4):
            self.registry.check_admission()
            self.accept()
        with self.assertRaises(ServerBusy) as caught:
            self.registry.check_admission()
        self.assertGreater(caught.exception.retry_after, 0)
        with self.assertRaises(ServerBusy):
            self.accept()
        self.finish(self.world.spawn.children[0])
        self.accept()

    def test_seed_is_the_clients_or_one_is_drawn_and_told(self) -> None:
        given = self.registry.get_status(self.accept(seed=0))["seed"]
        self.assertEqual(given, 0)
        self.assertEqual(self.world.child.environment["TURINGARENA_SEED"], "0")
        self.world.random = lambda number: b"\xff" * number
        self.registry = self.make()
        drawn = self.registry.get_status(self.accept(seed=None))["seed"]
        self.assertEqual(drawn, MAX_SEED)
        self.assertEqual(self.world.child.environment["TURINGARENA_SEED"], str(MAX_SEED))


class IdempotencyTests(RegistryTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.removed: list[str] = []

        class Threads(IdleThreads):
            async def run_in_thread(inner, call: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
                self.removed.append(call.__name__)
                return await super().run_in_thread(call, *args, **kwargs)

        self.world.threads = Threads()
        self.registry = self.make()

    def test_same_key_and_form_begin_nothing(self) -> None:
        first = self.accept(key="k", digest=b"1")
        self.removed.clear()
        for _ in range(2):
            self.assertEqual(self.accept(key="k", digest=b"1"), first)
        self.assertEqual(len(self.world.spawn.children), 1)
        self.assertEqual(self.removed, ["remove_tree", "remove_tree"])

    def test_key_lasts_as_long_as_its_evaluation(self) -> None:
        first = self.accept(key="k", digest=b"1")
        self.finish(self.world.child)
        self.assertEqual(self.accept(key="k", digest=b"1"), first)
        self.consume(first)
        second = self.accept(key="k", digest=b"2")
        self.assertNotEqual(second, first)
        self.expire(900)
        self.assertNotIn(self.accept(key="k", digest=b"3"), (first, second))


class CancelTests(RegistryTestCase):
    def cancel(self, identifier: str) -> Deferred[None]:
        return Deferred.fromCoroutine(self.registry.cancel_evaluation(identifier))

    def test_cancel_is_answered_when_the_process_is_gone(self) -> None:
        identifier, child = self.start(b"a\n")
        cancelled = self.cancel(identifier)
        self.assertNoResult(cancelled)
        self.finish(child)
        self.assertIsNone(self.successResultOf(cancelled))
        self.assertEqual(self.registry.get_status(identifier)["state"], "cancelled")
        self.assertEqual(self.consume(identifier), ["a", "\n", "cancelled"])

    def test_queued_evaluation_is_cancelled_at_once(self) -> None:
        identifiers = [self.accept() for _ in range(4)]
        self.successResultOf(self.cancel(identifiers[2]))
        self.assertEqual(self.registry.get_status(identifiers[3])["queue_place"], 0)
        self.accept()
        self.assertEqual(self.consume(identifiers[2]), ["cancelled"])

    def test_cancel_can_be_repeated(self) -> None:
        identifier, child = self.start()
        asked = [self.cancel(identifier) for _ in range(3)]
        self.finish(child)
        for one in (*asked, self.cancel(identifier)):
            self.assertIsNone(self.successResultOf(one))
        self.assertEqual(self.consume(identifier), ["cancelled"])
        self.assertIsNone(self.successResultOf(self.cancel(identifier)))

    def test_cancel_goes_on_without_its_client(self) -> None:
        identifier, child = self.start()
        asked = self.cancel(identifier)
        asked.addErrback(lambda failure: None)
        asked.cancel()
        self.finish(child)
        self.assertEqual(self.consume(identifier), ["cancelled"])
