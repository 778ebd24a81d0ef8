"""A deadline that costs next to nothing as long as it is met."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from twisted.internet.interfaces import IDelayedCall, IReactorTime


class Deadline:
    """What is to be done in some seconds, unless something else is asked for before that.

    Each request sets several of them and lets none pass. So a timer of the reactor that is
    there already is left alone where it comes early enough: when it does, it looks at the
    clock, and waits for the rest.
    """

    __slots__ = ("_clock", "_due", "_late", "_timer", "_timer_due")

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._due = inf  # by the clock, in seconds
        self._late: Callable[[], object] | None = None
        self._timer: IDelayedCall | None = None
        self._timer_due = inf

    @property
    def set(self) -> bool:
        """Whether there is anything to be done."""
        return self._late is not None

    def within(self, seconds: float, late: Callable[[], object]) -> None:
        """Call `late` in so many seconds, and nothing that was to be called before."""
        self._due = self._clock.seconds() + seconds
        self._late = late
        if self._due < self._timer_due:
            self._stop_timer()
            self._start_timer(seconds)

    def never(self) -> None:
        """Call nothing."""
        self._late = None

    def end(self) -> None:
        """Call nothing, and leave nothing in the reactor."""
        self._late = None
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_due = None, inf

    def _start_timer(self, seconds: float) -> None:
        self._timer = self._clock.callLater(seconds, self._look)
        self._timer_due = self._due

    def _look(self) -> None:
        """Do what is due, or wait for when it will be."""
        self._timer, self._timer_due = None, inf
        if self._late is None:
            return
        left = self._due - self._clock.seconds()
        if left > 0:
            self._start_timer(left)
        else:
            late, self._late = self._late, None
            late()
