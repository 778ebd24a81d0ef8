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
    sets. `earliest` is what this clock, in an earlier process, has shown last, None without one;
    `earlier_seconds_ahead` was its `seconds_ahead`, as no process may live for a day.
    """

    _read_wall_clock: Callable[[], float]
    _read_boot_clock: Callable[[], float]
    _earliest: float | None = None
    _earlier_seconds_ahead: float = 0.0
    _offset: float = attrs.field(init=False)  # of the time of day, in seconds
    _ahead_since: float | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        latest = self._read_wall_clock() if self._earliest is None else self._earliest
        self._offset = latest - self._read_boot_clock()

    @property
    def seconds_ahead(self) -> float:
        """For how long the time of day has been set far forward, in seconds; 0 if it is not."""
        return 0.0 if self._ahead_since is None else self._read_boot_clock() - self._ahead_since

    def read(self) -> float:
        """Return the time, in seconds since the epoch. To be called now and then."""
        now = self._read_boot_clock()
        offset = self._read_wall_clock() - now
        if offset - self._offset > MAX_STEP_SECONDS:
            if self._ahead_since is None:
                self._ahead_since = now - self._earlier_seconds_ahead
            if now - self._ahead_since < CONFIRMATION_SECONDS:
                return now + self._offset
        self._offset, self._ahead_since, self._earlier_seconds_ahead = offset, None, 0.0
        return now + offset
