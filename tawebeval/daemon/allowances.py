"""What `tawebeval doctor` finds of the daemon's own allowances: limits, descriptors, processes.

They hold for where it is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tawebeval.admission import count_places
from tawebeval.config import Configuration
from tawebeval.daemon.findings import Finding, Health, broken
from tawebeval.errors import ConfigurationError
from tawebeval.linux import descriptors, rlimits

WATCHES = Path("/proc/sys/fs/epoll/max_user_watches")
_WATCH = 180  # bytes of memory that the kernel takes for one watch, at least


def judge_limits(configuration: Configuration) -> Iterator[Finding]:
    """Yield what is wrong with the limits of each evaluator, if something is."""
    try:
        rlimits.check_limits(configuration.limits)
    except ConfigurationError as error:
        yield broken("limits", error)
    for name, hard in rlimits.find_lowered():
        what = (
            f"programs that set RLIMIT_{name} to unlimited fail: the daemon's hard limit is {hard}"
        )
        remedy = f"Limit{name}=infinity in the unit (or ulimit -H)"
        yield Finding("limits", Health.WEAKER, what, remedy)


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
    there, wanted = rlimits.processes_allowed(), rlimits.processes_needed(configuration)
    yield _compared("processes", there, wanted, rlimits.remedy(wanted))


def judge_watches(configuration: Configuration) -> Iterator[Finding]:
    """Yield whether evaluators, within `limits.memory`, leave one another what epoll watches.

    The daemon needs none (`polling`). Blocks, hardly. Raises: OSError.
    """
    there = int(WATCHES.read_text("ascii"))
    running = count_places(configuration.evaluations.running)
    wanted = running * configuration.limits.memory // _WATCH + configuration.http.connections
    yield _compared("watches", there, wanted, f"sysctl fs.epoll.max_user_watches={wanted}")


def _compared(part: str, there: int | None, wanted: int, remedy: str) -> Finding:
    """Return whether those that are there, any number for None, are as many as are wanted."""
    many = "any number" if there is None else there
    what = f"{many} are allowed here, and {wanted} may be needed"
    if there is None or there >= wanted:
        return Finding(part, Health.OK, what)
    return Finding(part, Health.WEAKER, what, remedy)
