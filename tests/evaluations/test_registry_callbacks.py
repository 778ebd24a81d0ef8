"""`evaluations.service`: callbacks at the end of an evaluation."""

from __future__ import annotations

import gc

from twisted.internet.defer import Deferred

from tawebeval.config import Configuration, EvaluationSettings, LimitSettings
from tawebeval.errors import InvalidField
from tawebeval.sandbox.workspace import derive_log_pseudonym
from tests.cases.evaluations import RegistryTestCase

URL = "https://receiver.example/hook?key=s3cret"


class CallbackTests(RegistryTestCase):
    configuration = Configuration(
        evaluations=EvaluationSettings(retain=900),
        limits=LimitSettings(wall_clock=10**6),
    )

    def test_callback_with_a_defect_leaves_nothing(self) -> None:
        def send(*_: object) -> None:
            raise ValueError("a defect")

        self.patch(self.callbacks, "start_delivery", send)
        identifier = self.accept(callback_url=URL)
        self.finish(self.world.child)
        self.assertEqual(self.registry.get_status(identifier)["state"], "finished")
        gc.collect()
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        closed = Deferred.fromCoroutine(self.registry.drain_and_close())
        self.assertFalse(self.successResultOf(closed), "there was nothing to end")

    def test_status_is_sent_once_when_nothing_is_left(self) -> None:
        identifier = self.accept(callback_url=URL)
        child = self.world.child
        child.print(b"one\n")
        self.assertEqual(self.callbacks.expected, [(URL, "")])
        waiting = {
            "url": "https://receiver.example/hook",
            "state": "waiting",
            "attempts": 0,
            "last_error": None,
        }
        self.assertEqual(self.registry.get_status(identifier)["callback"], waiting)
        self.assertEqual(self.callbacks.sent, [])
        self.finish(child, 3)
        ((evaluation, document),) = self.callbacks.sent
        self.assertEqual(evaluation, derive_log_pseudonym(identifier))
        self.assertEqual(document, self.registry.get_status(identifier))
        self.assertEqual((document["state"], document["exit"]["status"]), ("failed", 3))
        self.assertEqual(document["callback"], {**waiting, "state": "pending"})
        self.assertEqual(self.page(identifier)["data"], ["one", "\n"])

    def test_evaluation_without_a_callback_has_null_in_its_status(self) -> None:
        identifier, child = self.start()
        self.finish(child)
        self.assertIsNone(self.registry.get_status(identifier)["callback"])
        self.assertEqual(self.callbacks.sent, [])

    def test_each_kind_of_end_is_sent_with_its_state(self) -> None:
        cancelled = self.accept(callback_url=URL)
        done = Deferred.fromCoroutine(self.registry.cancel_evaluation(cancelled))
        self.world.end()
        self.successResultOf(done)
        failed = self.accept(callback_url=URL)
        self.finish(self.world.child, 3)
        stopped = self.accept(callback_url=URL)
        self.end_all()
        told = [
            (evaluation, sent["state"], sent["error"]) for evaluation, sent in self.callbacks.sent
        ]
        self.assertEqual(
            [(evaluation, state, error["reason"]) for evaluation, state, error in told],
            [
                (derive_log_pseudonym(cancelled), "cancelled", "cancelled"),
                (derive_log_pseudonym(failed), "failed", "exit"),
                (derive_log_pseudonym(stopped), "failed", "shutdown"),
            ],
        )

    def test_evaluation_with_a_callback_is_not_abandoned(self) -> None:
        first, second, third = (self.accept(callback_url=URL) for _ in range(3))
        for child in self.world.spawn.children:
            child.print(b"one\n")
        for _ in range(3):
            self.expire(901)
        for identifier in (first, second, third):
            self.finish(self.world.spawn.children[len(self.callbacks.sent)])
            self.assertEqual(self.callbacks.sent[-1][0], derive_log_pseudonym(identifier))
            self.assertEqual(self.callbacks.sent[-1][1]["state"], "finished")
        self.assertEqual(self.page(first)["data"], ["one", "\n"])

    def test_ended_evaluation_with_a_callback_expires(self) -> None:
        identifier = self.accept(callback_url=URL)
        self.expire(2000)
        self.patch(self.callbacks, "start_delivery", lambda *_: None)
        self.finish(self.world.child)
        self.expire(self.configuration.evaluations.retain - 1)
        self.assertIn(identifier, self.registry.records)
        self.expire(1)
        self.assertNotIn(identifier, self.registry.records)

    def test_forbidden_callback_refuses_the_form(self) -> None:
        self.callbacks.refuse = True
        with self.assertRaises(InvalidField):
            self.accept(callback_url=URL)
        self.assertEqual(self.list_all(), [])

    def test_repeated_form_has_one_callback(self) -> None:
        one = self.accept(callback_url=URL, key="k")
        self.callbacks.refuse = True
        self.assertEqual(self.accept(callback_url=URL, key="k"), one)
        self.finish(self.world.child)
        self.assertEqual(len(self.callbacks.sent), 1)
