"""The limits that a request may choose: their units, and the check of a value (`limits[NAME]`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

import attrs

from tawebeval.errors import InvalidField, format_size

LimitUnit = Literal["seconds", "whole seconds", "bytes", "count"]

LIMIT_UNITS: Mapping[str, LimitUnit] = {
    "wall_clock": "seconds",
    "cpu": "whole seconds",
    "memory": "bytes",
    "processes": "count",
    "open_files": "count",
    "file_size": "bytes",
    "disk": "bytes",
    "disk_files": "count",
    "output": "bytes",
    "stderr": "bytes",
}
"""The unit of each limit that a request may choose, by its name in `[limits]`."""

ChosenLimits: TypeAlias = Mapping[str, int | float]
"""The limits that a request has chosen, by their names in `[limits]`."""

_SIZE = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,9})?)([KMGT]?)(?:i?B)?", re.IGNORECASE)

_SYNTAX: Mapping[LimitUnit, tuple[re.Pattern[str], str]] = {
    "seconds": (
        re.compile(r"[0-9]{1,10}(\.[0-9]{1,9})?"),
        "a number of seconds, such as 10 or 2.5",
    ),
    "whole seconds": (re.compile("[0-9]{1,10}"), "a whole number of seconds, such as 10"),
    "bytes": (
        _SIZE,
        "a size: bytes, or a number with K, M, G or T (of 1024), such as 65536 or 256M",
    ),
    "count": (re.compile("[0-9]{1,10}"), "a whole number, such as 100"),
}


@attrs.frozen
class LimitRange:
    """The allowed values of a limit: at least `minimum`, over 0, and at most `maximum`."""

    minimum: float
    maximum: float


def parse_limits(
    values: Mapping[str, str], limit_ranges: Mapping[str, LimitRange], over_maximum_hint: str = ""
) -> dict[str, int | float]:
    """Return the chosen limits of some values by name; an empty value chooses the default.

    `over_maximum_hint` ends the message about a value over its maximum.

    Raises: InvalidField, with the name of the form's field.
    """
    return {
        name: _parse_limit(name, value, limit_ranges[name], over_maximum_hint)
        for name, value in values.items()
        if value
    }


def _parse_limit(name: str, value: str, allowed: LimitRange, hint: str) -> int | float:
    unit = LIMIT_UNITS[name]
    pattern, words = _SYNTAX[unit]
    match = pattern.fullmatch(value)
    if match is None:
        raise InvalidField(f"limits[{name}]", f"{value!r} is not {words}")
    if unit == "bytes":
        number: int | float = _compute_size(match)
    else:
        number = float(value) if unit == "seconds" else int(value)
    if not 0 < number >= allowed.minimum:
        least = f"below the minimum, {describe_limit(name, allowed.minimum)}"
        why = least if allowed.minimum else "not above 0"
        raise InvalidField(f"limits[{name}]", f"{value!r} is {why}", limit=allowed.minimum)
    if number > allowed.maximum:
        raise InvalidField(
            f"limits[{name}]",
            f"{describe_limit(name, number)} is over the maximum,"
            f" {describe_limit(name, allowed.maximum)} (limits.maximum.{name}){hint}",
            limit=allowed.maximum,
        )
    return number


def parse_size(text: str) -> int | None:
    """Return the bytes of a size such as "65536" or "256M"; None for another text."""
    match = _SIZE.fullmatch(text)
    return None if match is None else _compute_size(match)


def _compute_size(match: re.Match[str]) -> int:
    """Return the bytes of a match of `_SIZE`."""
    bits = 10 * (1 + "KMGT".index(match[2].upper())) if match[2] else 0
    return int(float(match[1]) * 2**bits)


def describe_limit(name: str, value: float) -> str:
    """Return the value of a limit with its unit."""
    match LIMIT_UNITS[name]:
        case "bytes":
            return format_size(value)
        case "count":
            return f"{value:.0f}"
        case _:
            return f"{value:g} s"
