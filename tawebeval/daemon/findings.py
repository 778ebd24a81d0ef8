"""Findings of `tawebeval doctor`: the state of one part of the daemon each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum

import attrs

from tawebeval.errors import ConfigurationError, SetupProblem


class Severity(IntEnum):
    """Severity of a finding, in ascending order. The highest is the exit status of the command."""

    OK = 0
    WEAKER = 1
    BROKEN = 2


@attrs.frozen
class Finding:
    """State of one component of the daemon. `remedy` is empty if `severity` is OK."""

    component: str
    severity: Severity
    description: str
    remedy: str = ""


NamedCheck = tuple[str, Callable[[], Iterable[str | SetupProblem | Finding]]]
"""The name of a part, and its check.

The check yields strings (OK), `SetupProblem`s (WEAKER) and the findings of other parts. It raises
ConfigurationError or OSError for a broken part.
"""


def run_checks(*checks: NamedCheck) -> Iterator[Finding]:
    """Yield the findings of all checks."""
    for part, check in checks:
        try:
            for result in check():
                if isinstance(result, Finding):
                    yield result
                elif isinstance(result, SetupProblem):
                    yield Finding(part, Severity.WEAKER, *result)
                else:
                    yield Finding(part, Severity.OK, result)
        except ConfigurationError as error:
            yield Finding(part, Severity.BROKEN, *error.problem)
        except OSError as error:
            yield Finding(part, Severity.BROKEN, f"cannot be checked: {error}")


def report_problems(problems: Iterable[SetupProblem], ok: str) -> Sequence[SetupProblem | str]:
    """Return the problems, or the message `ok` if there are none."""
    return list(problems) or [ok]
