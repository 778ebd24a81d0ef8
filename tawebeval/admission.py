"""Places to run, and the queue of those who wait for one."""

from __future__ import annotations

from twisted.internet.defer import Deferred, succeed


class Queue:
    """Lets at most `running` in at once, in the order in which they came; `queued` may wait."""

    def __init__(self, running: int, queued: int) -> None:
        self._running = running
        self._queued = queued
        self._inside: set[str] = set()
        self._waiting: dict[str, Deferred[None]] = {}

    @property
    def full(self) -> bool:
        """Whether the next to enter would have no place even to wait."""
        return len(self._inside) >= self._running and len(self._waiting) >= self._queued

    def enter(self, name: str) -> Deferred[None]:
        """Return a Deferred of a place to run. Cancelling it gives up waiting."""
        if len(self._inside) < self._running:
            self._inside.add(name)
            return succeed(None)
        place: Deferred[None] = Deferred(lambda _: self._give_up(name))
        self._waiting[name] = place
        return place

    def _give_up(self, name: str) -> None:
        del self._waiting[name]

    def leave(self, name: str) -> None:
        """Give back the place of `name`, to who has waited longest."""
        self._inside.remove(name)
        if self._waiting:
            following = next(iter(self._waiting))
            self._inside.add(following)
            self._waiting.pop(following).callback(None)

    def place(self, name: str) -> int | None:
        """Return how many wait before `name`; None if it does not wait."""
        for index, waiting in enumerate(self._waiting):
            if waiting == name:
                return index
        return None
