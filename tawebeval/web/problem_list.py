"""The problems that callers may use: their list, and the document of one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tawebeval.config import Configuration
from tawebeval.core.form import DEFAULT_ENVIRONMENT_NAME
from tawebeval.core.limits import LIMIT_UNITS, LimitRange, parse_limits
from tawebeval.errors import ProblemNotFound

PROBLEMS_PER_PAGE = 100
"""Problems in one answer, at most."""


def list_problems(
    configuration: Configuration, after: str | None, permitted: Collection[str] | None
) -> dict[str, Any]:
    """Return the problems whose names follow `after`, in the order of their names.

    Only `permitted` ones, None for all. `end` is the last name if others follow, else None.
    """
    names = sorted(
        name
        for name in configuration.problems
        if (permitted is None or name in permitted) and name > (after or "")
    )
    listed = names[:PROBLEMS_PER_PAGE]
    ranges = configuration.limits.requestable_ranges
    return {
        "begin": after or None,
        "end": listed[-1] if len(names) > len(listed) else None,
        "data": [_describe(configuration, name, ranges) for name in listed],
    }


def describe_problem(configuration: Configuration, name: str) -> dict[str, Any]:
    """Return the document of a problem, with its statement. Raises: ProblemNotFound."""
    if name not in configuration.problems:
        raise ProblemNotFound(name)
    return {
        **_describe(configuration, name, configuration.limits.requestable_ranges),
        "statement": configuration.problems[name].statement,
    }


def _describe(
    configuration: Configuration, name: str, ranges: Mapping[str, LimitRange]
) -> dict[str, Any]:
    problem, limits = configuration.problems[name], configuration.limits
    chosen = parse_limits({name: str(value) for name, value in problem.limits.items()}, ranges)
    held = limits.choose_limits(chosen)
    return {
        "name": name,
        "title": problem.title,
        "description": problem.description,
        "fields": problem.fields,
        "extensions": problem.extensions,
        "environment": problem.environment or DEFAULT_ENVIRONMENT_NAME,
        "limits": {name: getattr(held, name) for name in LIMIT_UNITS},
    }
