"""The table of results, for the terminal and for `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Row, Spread

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"

_HEADINGS = ("what", "ours", "baseline", "", "ratio", "spread of the ratio", "target", "")
_BEGIN = "<!-- By hand from here. -->"
_END = "<!-- By hand up to here. -->"
_BY_HAND = """
## Tried, and did not help

Nothing is noted yet.
"""

_ABOUT = """\
# Benchmarks

Written by `python -m benchmarks --write`; only what stands between the two marks near the
end is written by hand, and kept.

Everything runs on one machine, over the loopback interface. Ours and the baseline are
measured alternately, and the ratio (ours to the baseline) is formed within each round, so
a busy machine shows as spread rather than as a better or worse ratio. Figures are medians
of the rounds, the spread is from the least to the greatest. The baselines are the small
programs in `benchmarks/programs/`.

Rates "by processor time" are per second of processor time that the program itself
has spent, rather than of time on the clock.

`make soak` (`python -m benchmarks.soak`) is not among these, for it tells right from wrong, not
fast from slow, and takes a few minutes: 200 evaluators in the sandbox print 2 GB to readers that
are slow, or break off and resume, or never come back, by pages and all kinds of streams. It
compares every stream with what was printed, shows the daemon's peak memory beside its bound, and
looks for what is left: processes, directories, descriptors, and objects in the daemon's memory.
"""


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the table, its headings first."""
    return [_HEADINGS, *map(_cells, rows)]


def _cells(row: Row) -> tuple[str, ...]:
    ratio = row.ratio
    judged = ratio or Spread.of(row.ours)
    baseline = _number(Spread.of(row.baseline).middle) if row.baseline is not None else "-"
    sign = "≥" if row.higher_is_better else "≤"
    unit = "" if ratio else f" {row.unit}"
    return (
        row.what,
        _number(Spread.of(row.ours).middle),
        baseline,
        row.unit,
        _number(ratio.middle) if ratio else "-",
        f"{_number(judged.low)} … {_number(judged.high)}{unit}",
        "-" if row.target is None else f"{sign} {row.target:g}{unit}",
        {True: "met", False: "**missed**", None: ""}[row.met],
    )


def _number(value: float) -> str:
    """Write three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def text(lines: Sequence[tuple[str, ...]]) -> str:
    """Return the table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *others = widths
    return "\n".join(
        "  ".join(
            [cells[0].ljust(first)]
            + [cell.rjust(width) for cell, width in zip(cells[1:], others, strict=True)]
        ).rstrip()
        for cells in lines
    )


def markdown(lines: Sequence[tuple[str, ...]]) -> str:
    """Return the table in Markdown."""
    headings, *rest = lines
    rule = ("---", *["---:"] * (len(headings) - 2), "---")
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rest))


def write(rows: Sequence[Row], machine: Sequence[str], rounds: int) -> None:
    """Write the document anew, around what is written by hand in it."""
    kept = _BY_HAND
    if DOCUMENT.exists():
        old = DOCUMENT.read_text(encoding="utf-8")
        if _BEGIN in old and _END in old:
            kept = old.partition(_BEGIN)[2].partition(_END)[0]
    parts = [
        _ABOUT,
        "## Machine\n\n" + "\n".join(f"- {line}" for line in machine) + f"\n- {rounds} rounds\n",
        "## Figures\n\n" + markdown(table(rows)) + "\n",
        _BEGIN + kept + _END + "\n",
    ]
    DOCUMENT.write_text("\n".join(parts), encoding="utf-8")
