"""`evaluations.registry`: pages and cursors."""

from __future__ import annotations

from tawebeval.errors import EvaluationExpired
from tests.cases.evaluations import END, RegistryTestCase


class PageTests(RegistryTestCase):
    def test_evaluation_that_does_not_run_yet_has_an_empty_page(self) -> None:
        self.world.repositories.gate.shut = True
        for _ in range(3):
            self.assertEqual(self.page(self.accept())["end"], "0")

    def test_pages_follow_each_other_without_a_gap(self) -> None:
        text = "".join(f"line {number}\n" for number in range(40))
        identifier, child = self.start(text.encode())
        self.finish(child)
        events: list[str] = []
        after, pages = None, 0
        while after != END:
            page = self.page(identifier, after)
            self.assertEqual(page["begin"], after)
            self.assertTrue(page["data"])
            raw = self.registry.events.read_page_now(identifier, after).events.lines
            self.assertLessEqual(len(raw), 1024)
            events += page["data"]
            after, pages = page["end"], pages + 1
        self.assertEqual("".join(events), text)
        self.assertEqual(len(events), 80)
        self.assertGreater(pages, 2)

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
