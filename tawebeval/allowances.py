"""What `tawebeval doctor` finds of the daemon's own allowances: limits, descriptors, processes.

They hold for where it is run.
"""

from __future__ import annotations

from collections.abc import Iterator

from tawebeval import ceilings, descriptors
from tawebeval.config import Configuration
from tawebeval.errors import ConfigurationError
from tawebeval.findings import Finding, Health, broken


def judge_limits(configuration: Configuration) -> Iterator[Finding]:
    """Yield what is wrong with the limits of each evaluator, if something is."""
    try:
        ceilings.check_limits(configuration.limits)
    except ConfigurationError as error:
        yield broken("limits", error)


def judge_descriptors(configuration: Configuration) -> Iterator[Finding]:
    """Yield whether there are enough file descriptors."""
    try:
        descriptors.check(configuration)
    except ConfigurationError as error:
        yield broken("descriptors", error)
    else:
        there, wanted = descriptors.allowed(), descriptors.needed(configuration)
        yield _compared("descriptors", there, wanted, descriptors.remedy(wanted))


def judge_processes(configuration: Configuration) -> Iterator[Finding]:
    """Yield whether there may be enough processes. Blocks, hardly. Raises OSError."""
    there, wanted = ceilings.processes_allowed(), ceilings.processes_needed(configuration)
    yield _compared("processes", there, wanted, ceilings.remedy(wanted))


def _compared(part: str, there: int | None, wanted: int, remedy: str) -> Finding:
    """Return whether those that are there, any number for None, are as many as are wanted."""
    many = "any number" if there is None else there
    what = f"{many} are allowed here, and {wanted} may be needed"
    if there is None or there >= wanted:
        return Finding(part, Health.OK, what)
    return Finding(part, Health.WEAKER, what, remedy)
