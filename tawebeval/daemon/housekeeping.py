"""What is done once a second, whatever else happens: expiring, reaping, mending."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from twisted.application.internet import TimerService
from twisted.logger import Logger

_EVERY = 1.0  # seconds

log = Logger()


def keep_house(chores: Iterable[Callable[[], object]], reactor: Any) -> TimerService:
    """Return a service that does all `chores` again and again; one that fails is in no other's way.

    None of them may block.
    """
    chores = tuple(chores)

    def do_all() -> None:
        for chore in chores:
            try:
                chore()
            except Exception:  # noqa: BLE001  (a timer that fails once stops for good)
                log.failure("{chore} failed", chore=chore.__name__)

    service = TimerService(_EVERY, do_all)
    service.clock = reactor
    return service
