"""Findings of `tawebeval doctor`: one part of the daemon each, and how severe its problem is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum

import attrs

from tawebeval.errors import ConfigurationError, Problem


class Severity(IntEnum):
    """Severity of a finding, the worst last: also the exit status of the command."""

    OK = 0
    WEAKER = 1
    BROKEN = 2


@attrs.frozen
class Finding:
    """State of one part, and the remedy if the part is not ok."""

    part: str
    health: Severity
    what: str
    remedy: str = ""


Check = tuple[str, Callable[[], Iterable[str | Problem | Finding]]]
"""The name of a part, and a check of it.

The check yields a string for what is ok, a `Problem` for what protects less than it could, and the
findings of other parts. It raises ConfigurationError or OSError for what is broken.
"""


def run_checks(*checks: Check) -> Iterator[Finding]:
    """Yield the findings of all checks."""
    for part, check in checks:
        try:
            for said in check():
                if isinstance(said, Finding):
                    yield said
                elif isinstance(said, Problem):
                    yield Finding(part, Severity.WEAKER, *said)
                else:
                    yield Finding(part, Severity.OK, said)
        except ConfigurationError as error:
            yield Finding(part, Severity.BROKEN, *error.problem)
        except OSError as error:
            yield Finding(part, Severity.BROKEN, f"cannot be looked at: {error}")


def list_problems(problems: Iterable[Problem], well: str) -> Sequence[Problem | str]:
    """Return problems, or the words for what is `well` if there are none."""
    return list(problems) or [well]
