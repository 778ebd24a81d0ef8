"""What `tawebeval doctor` finds out: about one part each, and how bad it is."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import attrs

from tawebeval.errors import ConfigurationError


class Health(IntEnum):
    """How a part of it is, the worst last: also the command's exit status."""

    OK = 0
    WEAKER = 1
    BROKEN = 2


@attrs.frozen
class Finding:
    """What was found out about one part, and what can be done where it is not ok."""

    part: str
    health: Health
    what: str
    remedy: str = ""


def broken(part: str, error: ConfigurationError) -> Finding:
    """Return what an error means that would stop the daemon's start.

    Such errors have their remedy, if they know one, after a semicolon.
    """
    what, _, remedy = str(error).partition("; ")
    return Finding(part, Health.BROKEN, what, remedy)


def judged(part: str, look: Callable[[], object], what: str = "") -> Finding:
    """Return that `look` finds nothing wrong: `what`, or what it says itself."""
    try:
        said = look()
    except ConfigurationError as error:
        return broken(part, error)
    return Finding(part, Health.OK, what or str(said))
