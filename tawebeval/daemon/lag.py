"""How late the reactor is: what it was asked to do at a time, and when it came to it."""

from __future__ import annotations

import attrs
from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from tawebeval.core.tally import MOMENTS, Histogram

_EVERY = 0.5  # seconds


@attrs.define(eq=False, slots=False)
class Lag(Service):
    """Measures twice a second by how much it is called too late, while it runs."""

    name = "lag"

    _clock: IReactorTime
    seconds: Histogram = attrs.field(factory=lambda: Histogram(MOMENTS))
    _next: IDelayedCall | None = None

    def startService(self) -> None:
        """Begin."""
        super().startService()
        self._wait()

    def stopService(self) -> None:
        """Measure no more."""
        super().stopService()
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _wait(self) -> None:
        due = self._clock.seconds() + _EVERY
        self._next = self._clock.callLater(_EVERY, self._look, due)

    def _look(self, due: float) -> None:
        self.seconds.observe(max(0.0, self._clock.seconds() - due))
        self._wait()
