"""`evaluations.registry`: expiry of evaluations that no client asks for."""

from __future__ import annotations

from tawebeval.errors import EvaluationExpired
from tests.cases.evaluations import END, PATIENT, RegistryTestCase


class ExpireTests(RegistryTestCase):
    configuration = PATIENT

    def test_abandoned_evaluation_is_killed_and_forgotten_in_time(self) -> None:
        identifier, child = self.start(b"a\n")
        self.expire(899.999)
        self.assertEqual(child.signals, [])
        self.expire(0.001)
        self.assertEqual(child.signals, [15])
        self.assert_refused(EvaluationExpired, identifier)
        self.assertEqual(self.page(identifier, END)["end"], None)

    def test_ended_evaluation_is_forgotten_after_its_own_time(self) -> None:
        identifier, child = self.start(b"a\n")
        self.world.clock.advance(899)
        self.finish(child)
        self.expire(899.999)
        self.assertEqual(self.list_all()[0]["state"], "finished")
        self.expire(0.001)
        self.assert_refused(EvaluationExpired, identifier)
        self.assertEqual(self.page(identifier, END)["end"], None)

    def test_each_request_keeps_the_evaluation(self) -> None:
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

    def test_waiting_reader_keeps_the_evaluation(self) -> None:
        identifier, child = self.start()
        asked = self.ask(identifier, None, 2000)
        self.expire(1000)
        self.assertEqual(child.signals, [])
        self.expire(999)
        child.print(b"a\n")
        self.assertEqual(self.successResultOf(asked).events.count, 1)
        self.expire(899)
        self.page(identifier)

    def test_slot_of_an_abandoned_evaluation_is_free_when_its_process_is_gone(self) -> None:
        _, child = self.start()
        others = [self.accept() for _ in range(2)]
        self.world.clock.advance(899)
        for identifier in others:
            self.page(identifier)
        self.expire(1)
        self.assertEqual(self.registry.get_status(others[1])["state"], "queued")
        self.finish(child)
        self.assertEqual(self.registry.get_status(others[1])["state"], "running")
