"""`evaluations.registry`: admission, idempotency and cancelling."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from tawebeval.core.form import MAX_SEED
from tawebeval.errors import IdempotencyKeyReused, ServerBusy
from tests.cases.evaluations import RegistryTestCase
from tests.fakes.world import IdleThreads


class AcceptTests(RegistryTestCase):
    """New evaluations."""

    def test_identifiers(self) -> None:
        """Each has an identifier of its own, and is known by it."""
        identifiers = [self.accept() for _ in range(4)]
        self.assertEqual(len(set(identifiers)), 4)
        for identifier in identifiers:
            self.assertEqual(self.registry.get_status(identifier)["evaluation_id"], identifier)
            self.assertEqual(self.page(identifier)["end"], "0")

    def test_places(self) -> None:
        """As many run as may, the others wait in order, and each of them is told its place."""
        identifiers = [self.accept() for _ in range(4)]
        seen = [self.registry.get_status(identifier) for identifier in identifiers]
        self.assertEqual([s["state"] for s in seen], ["running", "running", "queued", "queued"])
        self.assertEqual([s["queue_place"] for s in seen], [None, None, 0, 1])
        self.finish(self.world.spawn.children[1])
        seen = [self.registry.get_status(identifier) for identifier in identifiers]
        self.assertEqual([s["state"] for s in seen], ["running", "finished", "running", "queued"])
        self.assertEqual([s["queue_place"] for s in seen], [None, None, None, 0])

    def test_restored_in_another_order(self) -> None:
        """Evaluations that a restart has restored are listed in the order of their acceptance."""
        records = self.registry.records
        for number in (6, 2, 4):
            records.last_sequence_number = number - 1
            self.accept()
        records.sort_by_acceptance()
        listed = records.list_records("", 0, 2)
        self.assertEqual([record.details.sequence_number for record in listed], [2, 4])

    def test_full(self) -> None:
        """With no place even to wait, none is accepted, and that is told with a time."""
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

    def test_seed(self) -> None:
        """The seed is the client's, or one is drawn and told."""
        given = self.registry.get_status(self.accept(seed=0))["seed"]
        self.assertEqual(given, 0)
        self.assertEqual(self.world.child.environment["TURINGARENA_SEED"], "0")
        self.world.random = lambda number: b"\xff" * number
        self.registry = self.make()
        drawn = self.registry.get_status(self.accept(seed=None))["seed"]
        self.assertEqual(drawn, MAX_SEED)
        self.assertEqual(self.world.child.environment["TURINGARENA_SEED"], str(MAX_SEED))


class IdempotencyTests(RegistryTestCase):
    """`Idempotency-Key`."""

    def setUp(self) -> None:
        super().setUp()
        self.removed: list[str] = []

        class Threads(IdleThreads):
            async def run_in_thread(inner, call: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
                self.removed.append(call.__name__)
                return await super().run_in_thread(call, *args, **kwargs)

        self.world.threads = Threads()
        self.registry = self.make()

    def test_same_form(self) -> None:
        """The same key with the same form is answered as before, and begins nothing."""
        first = self.accept(key="k", digest=b"1")
        self.removed.clear()
        for _ in range(2):
            self.assertEqual(self.accept(key="k", digest=b"1"), first)
        self.assertEqual(len(self.world.spawn.children), 1)
        self.assertEqual(self.removed, ["remove_tree", "remove_tree"])

    def test_other_form(self) -> None:
        """With another form it is refused, and the first is not disturbed."""
        first = self.accept(key="k", digest=b"1")
        with self.assertRaises(IdempotencyKeyReused):
            self.accept(key="k", digest=b"2")
        self.assertEqual(self.accept(key="k", digest=b"1"), first)
        self.assertEqual(len(self.world.spawn.children), 1)

    def test_other_keys(self) -> None:
        """Other keys, and none, begin evaluations of their own."""
        identifiers = [self.accept(key=key, digest=b"1") for key in ("a", "b", None, None)]
        self.assertEqual(len(set(identifiers)), 4)

    def test_when_full(self) -> None:
        """A repetition is answered also when nothing new would be accepted."""
        first = self.accept(key="k", digest=b"1")
        for _ in range(3):
            self.accept()
        self.assertEqual(self.accept(key="k", digest=b"1"), first)
        with self.assertRaises(ServerBusy):
            self.accept(key="l", digest=b"1")

    def test_refused_key_is_free(self) -> None:
        """A key that came when there was no place is as if it had never come."""
        for _ in range(4):
            self.accept()
        with self.assertRaises(ServerBusy):
            self.accept(key="k", digest=b"1")
        self.finish(self.world.spawn.children[0])
        self.accept(key="k", digest=b"2")

    def test_as_long_as_the_evaluation(self) -> None:
        """The key is kept until its evaluation is forgotten, and then is free."""
        first = self.accept(key="k", digest=b"1")
        self.finish(self.world.child)
        self.assertEqual(self.accept(key="k", digest=b"1"), first)
        self.consume(first)
        second = self.accept(key="k", digest=b"2")
        self.assertNotEqual(second, first)
        self.expire(900)
        self.assertNotIn(self.accept(key="k", digest=b"3"), (first, second))


class CancelTests(RegistryTestCase):
    """Cancelling."""

    def cancel(self, identifier: str) -> Deferred[None]:
        """Cancel an evaluation."""
        return Deferred.fromCoroutine(self.registry.cancel_evaluation(identifier))

    def test_running(self) -> None:
        """It is told when the process is gone; the events stay, with the final one."""
        identifier, child = self.start(b"a\n")
        cancelled = self.cancel(identifier)
        self.assertNoResult(cancelled)
        self.finish(child)
        self.assertIsNone(self.successResultOf(cancelled))
        self.assertEqual(self.registry.get_status(identifier)["state"], "cancelled")
        self.assertEqual(self.consume(identifier), ["a", "\n", "cancelled"])

    def test_queued(self) -> None:
        """One that waits is cancelled at once, and makes room for others."""
        identifiers = [self.accept() for _ in range(4)]
        self.successResultOf(self.cancel(identifiers[2]))
        self.assertEqual(self.registry.get_status(identifiers[3])["queue_place"], 0)
        self.accept()
        self.assertEqual(self.consume(identifiers[2]), ["cancelled"])

    def test_repeatable(self) -> None:
        """To cancel again, at once or later, waits for the same end and changes nothing."""
        identifier, child = self.start()
        asked = [self.cancel(identifier) for _ in range(3)]
        self.finish(child)
        for one in (*asked, self.cancel(identifier)):
            self.assertIsNone(self.successResultOf(one))
        self.assertEqual(self.consume(identifier), ["cancelled"])
        self.assertIsNone(self.successResultOf(self.cancel(identifier)))

    def test_client_gone(self) -> None:
        """Where the client who cancels does not wait for the end, it comes all the same."""
        identifier, child = self.start()
        asked = self.cancel(identifier)
        asked.addErrback(lambda failure: None)
        asked.cancel()
        self.finish(child)
        self.assertEqual(self.consume(identifier), ["cancelled"])

    def test_ended(self) -> None:
        """One that has ended is left as it is."""
        identifier, child = self.start(b"a\n")
        self.finish(child)
        self.successResultOf(self.cancel(identifier))
        self.assertEqual(self.registry.get_status(identifier)["state"], "finished")
        self.assertEqual(self.consume(identifier), ["a", "\n"])
