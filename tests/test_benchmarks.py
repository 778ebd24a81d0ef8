"""What the benchmarks make of their figures: ratios, verdicts, the table."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from benchmarks import disk, report
from benchmarks.measure import CannotRun, NotMeasured, Round, Row, Spread, interleave, percentile
from benchmarks.report import DOCUMENT, markdown, table, text
from benchmarks.rows import BENCHMARKS, polls, workers
from benchmarks.running import Server
from tests.cases.own_python import printed_by

SCALE = Path(__file__).resolve().parent.parent / "docs" / "scale.md"

SAMPLES = st.lists(st.floats(0.001, 1e6), min_size=1)


class RowTests(SynchronousTestCase):
    """One line of the table."""

    @given(SAMPLES, st.floats(0.01, 100))
    def test_a_slow_round_leaves_the_ratio(self, baseline: list[float], factor: float) -> None:
        """What is twice the baseline in each round has the ratio 2, however they differ."""
        row = Row("what", "s", [sample * factor for sample in baseline], baseline)
        assert row.ratio is not None
        for ratio in (row.ratio.low, row.ratio.middle, row.ratio.high):
            self.assertAlmostEqual(ratio / factor, 1)

    def test_judged_by_the_ratio(self) -> None:
        """The target is for the ratio where there is a baseline, and for the figure elsewhere."""
        self.assertTrue(Row("what", "1/s", [4, 4, 4], [2, 2, 2], 2).met)
        self.assertFalse(Row("what", "1/s", [4, 4, 4], [2, 2, 2], 2.1).met)
        self.assertTrue(Row("what", "1/s", [4, 4, 4], None, 4).met)
        self.assertIsNone(Row("what", "1/s", [4, 4, 4]).met)

    def test_judged_by_the_better_side(self) -> None:
        """Less is better where that is said."""
        self.assertTrue(Row("what", "ms", [1, 2, 9], None, 2, False).met)
        self.assertFalse(Row("what", "ms", [1, 2, 9], None, 1.9, False).met)


class InterleaveTests(SynchronousTestCase):
    """The order in which ways are measured."""

    def test_every_second_round_goes_backwards(self) -> None:
        """And each way's samples stand in the order of the rounds."""
        order: list[str] = []

        def way(name: str) -> Callable[[], Round]:
            def measure() -> Round:
                order.append(name)
                return {"place": len(order)}

            return measure

        samples = interleave(3, {"a": way("a"), "b": way("b")})
        self.assertEqual("".join(order), "abbaab")
        self.assertEqual(samples, {"a.place": [1, 4, 5], "b.place": [2, 3, 6]})


class FiguresTests(SynchronousTestCase):
    """Percentiles and spreads."""

    @given(SAMPLES, st.floats(0, 100))
    def test_percentile(self, samples: list[float], percent: float) -> None:
        """So many are not above it, and with the next smaller sample there would be too few."""
        found = percentile(samples, percent)
        self.assertIn(found, samples)
        wanted = len(samples) * percent / 100
        self.assertGreaterEqual(sum(sample <= found for sample in samples), wanted)
        if found > min(samples):
            self.assertLess(sum(sample < found for sample in samples), wanted)

    @given(SAMPLES)
    def test_spread(self, samples: list[float]) -> None:
        """It has the extremes, and half of the samples on each side of the middle."""
        spread = Spread.of(samples)
        self.assertEqual((spread.low, spread.high), (min(samples), max(samples)))
        self.assertLessEqual(sum(sample < spread.middle for sample in samples), len(samples) / 2)
        self.assertLessEqual(sum(sample > spread.middle for sample in samples), len(samples) / 2)


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

    def test_quoted(self) -> None:
        """docs/scale.md quotes rows that exist."""
        names = self.rows(polls) | self.rows(workers)
        quoted = re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", SCALE.read_text("utf-8"))
        self.assertGreater(len(quoted), 2)
        for quote in quoted:
            parts = [re.escape(part) for part in " ".join(quote.split()).split("…")]
            found = [name for name in names if re.fullmatch(".*".join(parts), name)]
            self.assertTrue(found, f"no row has the name {quote!r}")


class TableTests(SynchronousTestCase):
    """The table as people read it."""

    def last_cells(self, *rows: Row | NotMeasured) -> Sequence[tuple[str, ...]]:
        """Return target and verdict of each."""
        return [cells[-2:] for cells in table({"name": rows})[1:]]

    def test_verdicts(self) -> None:
        """A row that misses its target is marked, and so is one that reaches what is better."""
        self.assertEqual(
            self.last_cells(
                Row("", "1/s", [3], [1], 1, stretch=2),
                Row("", "1/s", [3], [2], 1, stretch=2),
                Row("", "1/s", [3], [4], 1, stretch=2),
                Row("", "ms", [3], None, 2.5, False),
                Row("", "ms", [3]),
            ),
            [
                ("≥ 1 (2)", "met, that in brackets too"),
                ("≥ 1 (2)", "met"),
                ("≥ 1 (2)", "**missed**"),
                ("≤ 2.5", "**missed**"),
                ("", ""),
            ],
        )

    def test_document(self) -> None:
        """A new measurement keeps the text by hand, and the page's head is the tool's."""
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

    def test_renewed(self) -> None:
        """The rows of the named benchmarks are new, in their place; all others stay."""
        document = Path(self.mktemp())
        self.patch(report, "DOCUMENT", document)
        one, two, three = ([Row(what, "ms", [3], [1], 2)] for what in ("1", "2", "3"))
        old = self.page(["a machine", "load 1", "5 rounds"], a=one * 2, b=two, gone=three)
        report.write(old)
        self.assertEqual(report.read(), old)
        other = NotMeasured("4", "there is none")
        new = self.page(["a machine", "load 2", "5 rounds"], b=[*three, other], c=one)
        report.write(report.renew(report.read(), new, "cba"))
        both = self.page(
            [*old.machine, "renewed later: b, c; load 2"], c=one, b=[*three, other], a=one * 2
        )
        self.assertEqual(report.read(), both)

    def test_renewed_again(self) -> None:
        """Each benchmark stands in one line of renewals, with what differs from the first."""
        old = self.page(["a machine", "load 1", "renewed later: a, b; load 2", "renewed later: c"])
        new = self.page(["another", "load 1"], b=[Row("1", "ms", [3])], c=[Row("2", "ms", [3])])
        self.assertEqual(
            report.renew(old, new, "abc").machine,
            ["a machine", "load 1", "renewed later: a; load 2", "renewed later: b, c; another"],
        )

    def test_not_renewed(self) -> None:
        """A page without such a table, or none, cannot be renewed."""
        document = Path(self.mktemp())
        self.patch(report, "DOCUMENT", document)
        self.assertIn("without a NAME", self.assertRaises(CannotRun, report.read).code)
        document.write_text("## Figures\n\n| what | ours |\n| --- | --- |\n| a | 1 |\n\n")
        self.assertIn(str(document), self.assertRaises(CannotRun, report.read).code)

    def test_all_are_known(self) -> None:
        """The rows of the page are those of benchmarks, in their order."""
        names = list(dict.fromkeys(cells[0] for cells in report.read().rows))
        self.assertEqual(names, [name for name in BENCHMARKS if name in names])

    def test_not_measured(self) -> None:
        """What could not be measured has a line that says why."""
        row = NotMeasured("upload", "there is no nginx here")
        lines = table({"name": [row]})
        for written in (text(lines), markdown(lines)):
            line = written.splitlines()[-1]
            self.assertIn("upload", line)
            self.assertIn("**not measured**: there is no nginx here", line)
        self.assertEqual({len(cells) for cells in lines}, {9})


class DiskTests(SynchronousTestCase):
    """Where the temporary directories are."""

    def test_made(self) -> None:
        """The line tells where they are, which is what it says, and nothing of it stays."""
        usual = self.mktemp()
        os.mkdir(usual)
        program = (
            "import subprocess, tempfile; from benchmarks import disk\n"
            "with disk.fresh() as line, tempfile.TemporaryDirectory() as path:\n"
            "    kind = ['df', '--output=source,fstype', path]\n"
            "    print(line, subprocess.check_output(kind, text=True).split()[-2:], sep='\\n')\n"
        )
        printed = printed_by(program, TMPDIR=os.path.abspath(usual))
        line, kind = printed.splitlines()
        mounted = line.startswith("directories on a new ext4")
        self.assertEqual("loop" in kind, mounted, printed)
        self.assertEqual(f"directories in {os.path.abspath(usual)}" in line, not mounted, printed)
        self.assertEqual(os.listdir(usual), [])

    def test_not_made(self) -> None:
        """Where there cannot be another disk the line says why, and the usual one serves."""
        usual = tempfile.gettempdir()
        before = os.listdir(usual)

        def fail(image: Path, place: Path) -> None:
            raise OSError(errno.EPERM, "no other disk (nobody may)")

        self.patch(disk, "mount_image", fail)
        with disk.fresh() as line:
            self.assertEqual(tempfile.gettempdir(), usual)
        self.assertIn(f"directories in {usual}, on ", line)
        self.assertTrue(line.endswith(": no other disk (nobody may)"), line)
        left = set(os.listdir(usual)) - set(before)
        self.assertEqual([name for name in left if name.startswith("tawebeval-disk-")], [])

    def test_too_full(self) -> None:
        """A disk without room for another one is left alone."""
        self.patch(disk, "SIZE", 2**62)
        with disk.fresh() as line:
            self.assertIn(f"no other disk (less than {2**62} bytes are free)", line)
