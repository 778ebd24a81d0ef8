"""Cases of an evaluator's results as values, lines of text, and rows of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from tawebeval.errors import format_size

_EXCERPTS = ("expected", "printed")
_ROW = "{:<12}  {:<16}  {:>9}  {:>9}  {:>6}"
_COLOURS = {"accepted": "green", "partial": "yellow", "skipped": "yellow"}

CASE_TABLE_HEADER = _ROW.format("CASE", "VERDICT", "TIME", "MEMORY", "POINTS")
"""The line above the rows of cases."""


@attrs.frozen
class Case:
    """A case, whose figures are in words and empty if the evaluator has not given them.

    `excerpts` are what was expected and printed, each a line; `message` may have several lines.
    """

    name: str
    verdict: str
    points: str
    time: str
    memory: str
    other_members: str
    message: str
    excerpts: tuple[str, ...]

    def format_lines(self, *, with_excerpts: bool) -> list[str]:
        """Return the lines of the case, as text for a pipe."""
        points = self.points and f"{self.points} point{'' if self.points == '1' else 's'}"
        figures = ", ".join(filter(None, (points, self.time, self.memory, self.other_members)))
        shown = f"case {self.name}: {self.verdict}{figures and f' ({figures})'}"
        first, *rest = self.message.split("\n")
        excerpts = self.excerpts if with_excerpts else ()
        return [
            shown.replace("\n", " ") + (first and f": {first}"),
            *(f"    {line}" for line in rest),
            *(f"  {line}" for line in excerpts),
        ]

    def format_row(self, *, with_excerpts: bool) -> list[tuple[str, str | None]]:
        """Return the lines of the case in a table, each with its colour."""
        row = _ROW.format(self.name, self.verdict, self.time, self.memory, self.points)
        colour = _COLOURS.get(self.verdict, "red")
        below = [self.other_members, *self.message.split("\n")]
        if with_excerpts:
            below += self.excerpts
        return [
            (row.replace("\n", " ").rstrip(), colour),
            *((f"  {line}", None) for line in below if line),
        ]


def parse_case(payload: object) -> Case | None:
    """Return the case that a data value describes; None for other values."""
    match payload:
        case {"type": "case", "case": str(name), "verdict": str(verdict), **members}:
            pass
        case _:
            return None
    others = {key: value for key, value in members.items() if value is not None}
    message = describe_value(others.pop("message", "")).rstrip("\n")
    excerpts = {key: others.pop(key) for key in _EXCERPTS if key in others}
    return Case(
        name,
        verdict.replace("_", " "),
        _take_figure(others, "points", "{:g}".format),
        _take_figure(others, "time", "{:.3f} s".format),
        _take_figure(others, "memory", format_size),
        describe_members(others),
        message,
        tuple(
            f"{key}: {json.dumps(text, ensure_ascii=False)}"
            for key, text in excerpts.items()
            if isinstance(text, str) and text
        ),
    )


def _take_figure(members: dict[Any, Any], name: str, describe: Any) -> str:
    """Remove a number from `members`, and return it in words; empty for anything else."""
    number = members.get(name)
    if not isinstance(number, int | float) or abs(number) >= 2**53:
        return ""
    del members[name]
    words: str = describe(number)
    return words


def describe_members(members: Mapping[Any, object]) -> str:
    """Return the members of an object as text."""
    return ", ".join(f"{name}: {describe_value(value)}" for name, value in members.items())


def describe_value(value: object) -> str:
    """Return a value as text: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
