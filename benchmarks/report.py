"""The table of results, for the terminal and for `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from benchmarks.measure import CannotRun, NotMeasured, Row, Spread

Cells = tuple[str, ...]

Results = Mapping[str, Sequence[Row | NotMeasured]]
"""What benchmarks have measured, by their names."""

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"

_HEADINGS = ("benchmark", "what", "ours", "baseline", "ratio", "target")
_MACHINE = "## Machine\n\n"
_FIGURES = "## Figures\n\n"
_RENEWED = "renewed later: "
_BEGIN = "<!-- By hand from here. -->"
_END = "<!-- By hand up to here. -->"
_BY_HAND = """
## Missed targets

Nothing yet.
"""

_ABOUT = """\
# Benchmarks

How fast the daemon is, compared with simple programs that do the same work.

- `python -m benchmarks --write` writes this page, except the last section. Each module in
  `benchmarks/rows/` says what it measures, its baseline, and what was tried without success.
- Everything runs on one machine. Daemon and baseline alternate, and the ratio (ours to the
  baseline) is formed within each round, so other load hardly changes it.
- Figures are medians of the rounds, with the least and the greatest in brackets. A target in
  brackets is optional.
- "By processor time" means per second of processor time of the program.
"""


@attrs.frozen
class Page:
    """What the tool writes: lines about the machine, and the table's rows, without headings."""

    machine: Sequence[str]
    rows: Sequence[Cells]


def table(results: Results) -> list[Cells]:
    """Return the table, its headings first."""
    named = ((name, row) for name, rows in results.items() for row in rows)
    return [_HEADINGS, *((name, *_cells(row)) for name, row in named)]


def _cells(row: Row | NotMeasured) -> Cells:
    if isinstance(row, NotMeasured):
        return (row.what, *[""] * (len(_HEADINGS) - 3), f"**not measured**: {row.why}")
    ratio, ours = row.ratio, Spread.of(row.ours)
    middle = f"{_number(ours.middle)} {row.unit}".strip()
    sign = "≥" if row.higher_is_better else "≤"
    return (
        row.what,
        middle if ratio else f"{middle} ({_range(ours)})",
        _number(Spread.of(row.baseline).middle) if row.baseline is not None else "",
        f"{_number(ratio.middle)} ({_range(ratio)})" if ratio else "",
        "" if row.target is None else f"{sign} {_bounds(row)}: {_verdict(row)}",
    )


def _range(spread: Spread) -> str:
    return f"{_number(spread.low)}…{_number(spread.high)}"


def _bounds(row: Row) -> str:
    """Write the target, and in brackets what would be better still."""
    return f"{row.target:g}" if row.stretch is None else f"{row.target:g} ({row.stretch:g})"


def _verdict(row: Row) -> str:
    if row.stretch is not None and row.reaches(row.stretch):
        return "met, that in brackets too"
    return {True: "met", False: "**missed**", None: ""}[row.met]


def _number(value: float) -> str:
    """Write three significant digits, without an exponent; whole numbers are figures as well."""
    if value == int(value) and value < 100:
        return f"{value:.0f}"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def text(lines: Sequence[Cells]) -> str:
    """Return the table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = (0, 1, len(widths) - 1)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    )


def markdown(lines: Sequence[Cells]) -> str:
    """Return the table in Markdown."""
    headings, *rest = lines
    rule = ("---", "---", *["---:"] * (len(headings) - 3), "---")
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rest))


def read() -> Page:
    """Return what the document has. Raises: CannotRun if its table has other columns."""
    old = DOCUMENT.read_text("utf-8") if DOCUMENT.exists() else ""
    machine, figures = (
        old.partition(heading)[2].partition("\n\n")[0].splitlines()
        for heading in (_MACHINE, _FIGURES)
    )
    headings, _, *rows = (tuple(line[2:-2].split(" | ")) for line in figures or ["", ""])
    if headings != _HEADINGS:
        raise CannotRun(f"{DOCUMENT} has no such table: write it without a NAME first")
    return Page([line.removeprefix("- ") for line in machine], rows)


def renew(old: Page, new: Page, names: Iterable[str]) -> Page:
    """Return the old page with the rows of all benchmarks that are on the new one.

    `names` has the names of all benchmarks, in their order. A line tells how the machine was
    another, but for its load, and which were renewed there.
    """
    renewed = list(dict.fromkeys(cells[0] for cells in new.rows))
    machine = []
    for line in old.machine:
        before, *details = line.removeprefix(_RENEWED).split("; ")
        if line.startswith(_RENEWED):
            left = [name for name in before.split(", ") if name not in renewed]
            machine += ["; ".join([_RENEWED + ", ".join(left), *details])] if left else []
        else:
            machine.append(line)
    different = [line for line in new.machine if line not in machine and "load" not in line]
    if different:
        machine.append("; ".join([_RENEWED + ", ".join(renewed), *different]))
    rows = [
        cells
        for name in names
        for cells in (new if name in renewed else old).rows
        if cells[0] == name
    ]
    return Page(machine, rows)


def write(page: Page) -> None:
    """Write the document anew, around what is written by hand in it."""
    kept = _BY_HAND
    if DOCUMENT.exists():
        old = DOCUMENT.read_text(encoding="utf-8")
        if _BEGIN in old and _END in old:
            kept = old.partition(_BEGIN)[2].partition(_END)[0]
    parts = [
        _ABOUT,
        _MACHINE + "\n".join(f"- {line}" for line in page.machine) + "\n",
        _FIGURES + markdown([_HEADINGS, *page.rows]) + "\n",
        _BEGIN + kept + _END + "\n",
    ]
    DOCUMENT.write_text("\n".join(parts), encoding="utf-8")
