"""SIGTERM and SIGINT: the first stops the daemon, more of them mean that somebody is in a hurry.

Twisted would try to stop once more for each, and log a traceback since that is not possible: also
for one that comes before the stop has begun, as two in a row do.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from twisted.application.service import Service

_NUMBERS = (signal.SIGTERM, signal.SIGINT)

_Action = Callable[[int, FrameType | None], Any]


class Interrupts(Service):
    """Takes signals from the moment when the reactor runs; has `hurry` called in it for later ones.

    They stay taken: with the services stopped the reactor has still to end, and then there is
    nobody to be hurried.
    """

    name = "interrupts"

    def __init__(self, hurry: Callable[[], object], reactor: Any) -> None:
        self._hurry = hurry
        self._reactor = reactor
        self._stopping = False

    def startService(self) -> None:
        """Take them as soon as the reactor has done so."""
        super().startService()
        self._reactor.callWhenRunning(self._take)
        self._reactor.addSystemEventTrigger("before", "shutdown", self._begin)

    def _take(self) -> None:
        for number in _NUMBERS:
            known = signal.getsignal(number)
            if callable(known):  # what is ignored stays so
                signal.signal(number, self._following(known))

    def _following(self, known: _Action) -> _Action:
        def arrived(number: int, frame: FrameType | None) -> None:
            if self._stopping:
                self._reactor.callFromThread(self._hurry)
            else:
                self._begin()
                known(number, frame)

        return arrived

    def _begin(self) -> None:
        self._stopping = True
