"""A time of day for what is removed by its age."""

from __future__ import annotations

from collections.abc import Callable

import attrs

MAX_STEP_SECONDS = 60.0
"""How far the time of day may be set forward, in seconds, and count at once."""

CONFIRMATION_SECONDS = 24 * 60 * 60.0
"""Seconds for which a time of day has to stay that was set forward by more."""


@attrs.define
class ExpiryClock:
    """A clock that follows the time of day, but for a day not where it is set far forward.

    Whatever looks expired by a wrong time would be gone before somebody sets the time right.
    `read_wall_clock` returns the time of day in seconds, `read_boot_clock` seconds that nobody
    sets. A process begins with the time of day.
    """

    _read_wall_clock: Callable[[], float]
    _read_boot_clock: Callable[[], float]
    _offset: float = attrs.field(init=False)  # of the time of day, in seconds
    _ahead_since: float | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._offset = self._read_wall_clock() - self._read_boot_clock()

    def read(self) -> float:
        """Return the time, in seconds since the epoch. To be called now and then."""
        now = self._read_boot_clock()
        offset = self._read_wall_clock() - now
        if offset - self._offset > MAX_STEP_SECONDS:
            if self._ahead_since is None:
                self._ahead_since = now
            if now - self._ahead_since < CONFIRMATION_SECONDS:
                return now + self._offset
        self._offset, self._ahead_since = offset, None
        return now + offset
