"""`evaluations.registry`: reading, by the rules of pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import BufferSettings, Configuration, EvaluationSettings
from tawebeval.core.identifiers import Identifiers
from tawebeval.core.pages import EventPage
from tawebeval.errors import (
    DiscardedCursor,
    EvaluationExpired,
    InvalidCursor,
    RequestError,
)
from tawebeval.evaluations.registry import Registry, Upload
from tawebeval.web.events import Poll
from tests.fakes.callbacks import tell_nobody
from tests.fakes.children import FakeChild
from tests.fakes.world import IdleThreads, World, answer, make_request, straw

KEY = b"k" * 32
END = "end"


class RegistryTestCase(SynchronousTestCase):
    """A registry in a world without a disk."""

    configuration = Configuration(
        evaluations=EvaluationSettings(abandon_after=900, paused=10**6),
        buffers=BufferSettings(evaluation=4096, page=1024),
    )
    running, queued = 2, 2
    own = (0, 0)  # of each caller, that run and that wait

    def setUp(self) -> None:
        self.world = World(
            configuration=self.configuration, threads=IdleThreads(), running=self.running
        )
        self.registry = self.make()
        self.addCleanup(self.end_all)

    def end_all(self) -> None:
        """End what still runs."""
        closed = Deferred.fromCoroutine(self.registry.close())
        self.world.end()
        self.world.clock.advance(5)  # for those who might read on
        self.successResultOf(closed)

    def make(self, seed: int = 1) -> Registry:
        """Return a registry, such as a daemon makes at its start."""
        return Registry(
            self.world.surroundings(),
            Identifiers(KEY, straw(seed)),
            (self.running, self.queued, *self.own),
            Path("/evaluations"),
            tell_nobody(),
        )

    def upload(self, key: str | None = None, digest: bytes = b"", **changes: Any) -> Upload:
        """Return a form that has arrived."""
        return Upload(make_request(**changes), Path("/uploads/some"), key, digest)

    def accept(self, **settings: Any) -> str:
        """Begin an evaluation."""
        return self.registry.accept(self.upload(**settings))

    def expire(self, seconds: float) -> None:
        """Look, that much later, for what nobody has asked for in time."""
        self.world.clock.advance(seconds)
        self.registry.expire()
        self.world.turn()

    def start(self, printed: bytes = b"") -> tuple[str, FakeChild]:
        """Begin an evaluation that runs, and let it print."""
        identifier = self.accept()
        child = self.world.child
        if printed:
            child.print(printed)
        return identifier, child

    def page(self, identifier: str, after: str | None = None) -> dict[str, Any]:
        """Return a page, as clients see it."""
        return self.decode(self.registry.page(identifier, after))

    def decode(self, page: EventPage) -> dict[str, Any]:
        """Return a page as clients see it: payloads only, for text."""
        value = json.loads(page.encode())
        self.assertEqual(list(value), ["begin", "end", "data"])
        for cursor in (value["begin"], value["end"]):
            self.assertTrue(cursor is None or re.fullmatch("[A-Za-z0-9_-]+", cursor), cursor)
        value["data"] = [
            event["payload"] if event["type"] == "text" else event["payload"]["reason"]
            for event in value["data"]
        ]
        return value

    def ask(self, identifier: str, after: str | None, wait: int) -> Deferred[EventPage]:
        """Ask for a page and wait for it."""
        return Deferred.fromCoroutine(answer(Poll("", identifier, after, wait), self.registry))

    def finish(self, child: FakeChild, status: int = 0) -> None:
        """Let a run end."""
        child.end(status)
        self.world.turn()

    def consume(self, identifier: str) -> list[str]:
        """Read an evaluation that has ended as clients do, and forget it; return its events."""
        events: list[str] = []
        page = self.page(identifier)
        while page["end"] is not None:
            events += page["data"]
            following = self.page(identifier, page["end"])
            self.assertEqual(following["begin"], page["end"])
            page = following
        self.assertEqual(page["data"], [])
        return events

    def assert_refused(
        self, error: type[RequestError], identifier: str, *cursors: str | None
    ) -> None:
        """Hold that these cursors, or any one, are refused so."""
        for cursor in cursors or (None, "", "0", "1"):
            with self.assertRaises(error):
                self.registry.page(identifier, cursor)


class PageTests(RegistryTestCase):
    """Pages and cursors."""

    def test_first_page(self) -> None:
        """`begin` is null where `after` is absent or empty, and only there."""
        identifier, _ = self.start(b"a\nb\n")
        expected = {"begin": None, "end": "3", "data": ["a", "\n", "b"]}
        self.assertEqual(self.page(identifier), expected)
        self.assertEqual(self.page(identifier, ""), expected)
        self.assertEqual(self.page(identifier, "0"), {**expected, "begin": "0"})

    def test_nothing_yet(self) -> None:
        """A first page without events ends at the cursor before the first, never at null."""
        identifier, _ = self.start()
        for _ in range(2):
            self.assertEqual(self.page(identifier), {"begin": None, "end": "0", "data": []})
            self.assertEqual(self.page(identifier, "0"), {"begin": "0", "end": "0", "data": []})

    def test_queued_or_fetching(self) -> None:
        """One that does not run yet can be asked already."""
        self.world.repositories.gate.shut = True
        for _ in range(3):
            self.assertEqual(self.page(self.accept())["end"], "0")

    def test_nothing_new(self) -> None:
        """With nothing new a page is empty and ends where it begins."""
        identifier, child = self.start(b"a\nb\n")
        for _ in range(2):
            self.assertEqual(self.page(identifier, "3"), {"begin": "3", "end": "3", "data": []})
        child.print(b"c\n")
        self.assertEqual(self.page(identifier, "3")["data"], ["\n", "c"])

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
            raw = self.registry.page(identifier, after).events.lines
            self.assertLessEqual(len(raw), 1024)
            events += page["data"]
            after, pages = page["end"], pages + 1
        self.assertEqual("".join(events), text)
        self.assertEqual(len(events), 80)
        self.assertGreater(pages, 2)

    def test_one_large_event(self) -> None:
        """One event is let through however large it is."""
        identifier, child = self.start(b"x" * 3000 + b"\nrest\n")
        page = self.page(identifier)
        self.assertEqual((page["data"], page["end"]), (["x" * 3000], "1"))
        self.assertEqual(self.page(identifier, "1")["data"], ["\n", "rest"])
        self.finish(child)

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
            self.registry.status(identifier)
        # When the registry was made, in no words but the clock's.
        self.assertEqual(caught.exception.members, {"started": "2023-11-14T22:13:20.000+00:00"})
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

    def test_repeatable(self) -> None:
        """The same `after` gives the same events again, and perhaps more."""
        identifier, child = self.start(b"a\nb\n")
        first = self.page(identifier, "0")["data"]
        child.print(b"c\n")
        second = self.page(identifier, "0")["data"]
        self.assertEqual(second, [*first, "\n", "c"])

    def test_acknowledges(self) -> None:
        """A later `after` discards what is before it, and nothing else."""
        identifier, _ = self.start(b"a\nb\nc\n")
        self.page(identifier, "2")
        with self.assertRaises(DiscardedCursor) as caught:
            self.registry.page(identifier, "1")
        self.assertEqual(caught.exception.members, {"oldest": "2"})
        self.assert_refused(DiscardedCursor, identifier, None, "", "0", "1")
        self.assertEqual(self.page(identifier, "2")["data"], ["b", "\n", "c"])
        self.assertEqual(
            self.registry.status(identifier)["events"], {"buffered": 3, "discarded": 2}
        )

    def test_first_page_acknowledges_nothing(self) -> None:
        """The very beginning can be asked for until somebody goes on."""
        identifier, _ = self.start(b"a\n")
        for after in (None, "0", None, "0", ""):
            self.assertEqual(self.page(identifier, after)["data"], ["a"])

    def test_refused_acknowledges_nothing(self) -> None:
        """What is refused discards nothing."""
        identifier, _ = self.start(b"a\nb\n")
        self.assert_refused(InvalidCursor, identifier, "4", "x", "-1")
        self.assertEqual(self.page(identifier)["data"], ["a", "\n", "b"])

    def test_resumes(self) -> None:
        """An acknowledgement makes room, so that a run that was held goes on."""
        identifier, child = self.start(b"a line\n" * 200)
        self.assertTrue(child.paused)
        page = self.page(identifier)
        self.assertTrue(child.paused)
        while child.paused:
            page = self.page(identifier, page["end"])
            self.assertTrue(page["data"])
        self.assertEqual(self.registry.status(identifier)["state"], "running")
