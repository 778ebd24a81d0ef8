"""What the benchmarks make of their figures: ratios, verdicts, the table."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from benchmarks import report
from benchmarks.measure import NotMeasured, Row
from benchmarks.report import DOCUMENT, table
from benchmarks.rows import BENCHMARKS, polls, workers
from benchmarks.running import Server

SCALE = Path(__file__).resolve().parent.parent / "docs" / "scale.md"


class NamesTests(SynchronousTestCase):
    """Rows by their names, as others speak of them."""

    def rows(self, module: ModuleType) -> set[str]:
        """Return the names of the rows of a module, which measures nothing."""

        def nothing(*_: Any, **__: Any) -> AbstractContextManager[Server]:
            return nullcontext(Server(0, 0))

        def measured(_rounds: int, _ways: object) -> dict[str, list[float]]:
            return defaultdict(lambda: [1.0])

        for name, fake in (
            ("interleave", measured),
            *((kind, nothing) for kind in ("daemon", "server", "nginx")),
        ):
            if hasattr(module, name):
                self.patch(module, name, fake)
        self.patch(module, "silent_evaluation", lambda _: "/")
        return {row.what for row in module.measure(1)}

    def test_scale_md_quotes_rows_that_exist(self) -> None:
        names = self.rows(polls) | self.rows(workers)
        quoted = re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", SCALE.read_text("utf-8"))
        self.assertTrue(quoted)
        for quote in quoted:
            parts = [re.escape(part) for part in " ".join(quote.split()).split("…")]
            found = [name for name in names if re.fullmatch(".*".join(parts), name)]
            self.assertTrue(found, f"no row has the name {quote!r}")


class TableTests(SynchronousTestCase):
    """The table as people read it."""

    def test_new_measurement_keeps_the_text_by_hand(self) -> None:
        document = Path(self.mktemp())
        document.write_bytes(DOCUMENT.read_bytes())
        self.patch(report, "DOCUMENT", document)
        report.write(self.page(["a machine"], name=[Row("what", "ms", [3])]))
        old, new = DOCUMENT.read_text("utf-8"), document.read_text("utf-8")
        self.assertEqual(old.partition("## Machine")[0], new.partition("## Machine")[0])
        self.assertEqual(old.partition("<!-- By hand")[2], new.partition("<!-- By hand")[2])
        self.assertIn("| name | what | 3 |", new)

    def page(self, machine: Sequence[str], **results: Sequence[Row | NotMeasured]) -> report.Page:
        """Return a page with these results."""
        return report.Page(machine, table(results)[1:])

    def test_rows_of_the_page_are_those_of_benchmarks(self) -> None:
        names = list(dict.fromkeys(cells[0] for cells in report.read().rows))
        self.assertEqual(names, [name for name in BENCHMARKS if name in names])
