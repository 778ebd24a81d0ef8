"""What the benchmarks write: the table in docs/benchmarks.md."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from benchmarks import report
from benchmarks.measure import Row
from benchmarks.rows import BENCHMARKS


class TableTests(SynchronousTestCase):
    def test_new_measurement_keeps_the_text_by_hand(self) -> None:
        document = Path(self.mktemp())
        document.write_bytes(report.DOCUMENT.read_bytes())
        self.patch(report, "DOCUMENT", document)
        old = document.read_text("utf-8")
        rows = report.table({"name": [Row("what", "ms", [3])]})[1:]
        report.write(report.Page(["a machine"], rows))
        new = document.read_text("utf-8")
        self.assertEqual(old.partition("## Machine")[0], new.partition("## Machine")[0])
        self.assertEqual(old.partition("<!-- By hand")[2], new.partition("<!-- By hand")[2])
        self.assertIn("| name | what | 3 |", new)

    def test_rows_of_the_page_are_those_of_benchmarks(self) -> None:
        names = list(dict.fromkeys(cells[0] for cells in report.read().rows))
        self.assertEqual(names, [name for name in BENCHMARKS if name in names])
