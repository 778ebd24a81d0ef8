"""`evaluations.service`: the end of pages, and the slot of an expired evaluation."""

from __future__ import annotations

from tawebeval.errors import EvaluationExpired
from tests.cases.evaluations import END, PATIENT, RegistryTestCase


class PageTests(RegistryTestCase):
    def test_page_that_reaches_the_end_ends_at_the_dummy_end(self) -> None:
        identifier, child = self.start(b"a\n")
        self.finish(child)
        first = {"begin": None, "end": END, "data": ["a", "\n"]}
        for after, page in (
            (None, first),
            ("2", {"begin": "2", "end": END, "data": []}),
            (END, {"begin": END, "end": None, "data": []}),
        ):
            for _ in range(3):
                self.assertEqual(self.page(identifier, after), page)

    def test_asking_after_the_dummy_end_frees_all(self) -> None:
        identifier, child = self.start(b"a\n")
        self.finish(child)
        self.page(identifier, END)
        self.assert_refused(EvaluationExpired, identifier)
        with self.assertRaises(EvaluationExpired) as caught:
            self.registry.get_status(identifier)
        # When the registry was made, in no words but the clock's.
        self.assertEqual(
            caught.exception.extra_members, {"started": "2023-11-14T22:13:20.000+00:00"}
        )
        self.assertEqual(self.page(identifier, END)["end"], None)


class ExpireTests(RegistryTestCase):
    configuration = PATIENT

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
