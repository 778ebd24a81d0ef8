"""`evaluations.registry`: pages and cursors."""

from __future__ import annotations

from tawebeval.errors import DiscardedCursor, EvaluationExpired, InvalidCursor
from tests.cases.evaluations import END, RegistryTestCase


class PageTests(RegistryTestCase):
    """Pages and cursors."""

    def test_queued_or_fetching(self) -> None:
        """One that does not run yet can be asked already."""
        self.world.repositories.gate.shut = True
        for _ in range(3):
            self.assertEqual(self.page(self.accept())["end"], "0")

    def test_contiguous(self) -> None:
        """Pages follow each other without a gap and without repetition, each within its bytes."""
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

    def test_end(self) -> None:
        """The page that reaches the end ends at the dummy end; after that comes null."""
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

    def test_nothing_at_all(self) -> None:
        """One that ends without an event has a first page all the same."""
        identifier, child = self.start()
        self.finish(child)
        self.assertEqual(self.page(identifier), {"begin": None, "end": END, "data": []})
        self.assertEqual(self.page(identifier, END), {"begin": END, "end": None, "data": []})

    def test_end_frees(self) -> None:
        """To ask after the dummy end frees all: from then on everything else is gone."""
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

    def test_end_before_the_end(self) -> None:
        """The dummy end is no cursor of one that runs, and asking for it frees nothing."""
        identifier, child = self.start(b"a\n")
        self.assert_refused(InvalidCursor, identifier, END)
        self.assertEqual(self.page(identifier)["data"], ["a"])
        self.finish(child)
        self.assertEqual(self.consume(identifier), ["a", "\n"])

    def test_final_error(self) -> None:
        """A bad end is the last event, once."""
        identifier, child = self.start(b"a\n")
        self.finish(child, 1)
        self.assertEqual(self.consume(identifier), ["a", "\n", "exit"])


class RepetitionTests(RegistryTestCase):
    """Requests that are repeated, and acknowledgement."""

    def test_acknowledges(self) -> None:
        """A later `after` discards what is before it, and nothing else."""
        identifier, _ = self.start(b"a\nb\nc\n")
        self.page(identifier, "2")
        with self.assertRaises(DiscardedCursor) as caught:
            self.registry.events.read_page_now(identifier, "1")
        self.assertEqual(caught.exception.extra_members, {"oldest": "2"})
        self.assert_refused(DiscardedCursor, identifier, None, "", "0", "1")
        self.assertEqual(self.page(identifier, "2")["data"], ["b", "\n", "c"])
        self.assertEqual(
            self.registry.get_status(identifier)["events"], {"buffered": 3, "discarded": 2}
        )
