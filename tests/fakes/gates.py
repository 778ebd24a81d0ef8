"""Something to wait for, which a test opens and shuts."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred


class Gate:
    """Something to wait for: open at first, until a test shuts it."""

    def __init__(self) -> None:
        self.shut = False
        self.error: Exception | None = None
        self.cancelled = 0
        self._waiting: list[Deferred[None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self) -> None:
        """Return when the gate is open, or raise its error."""
        if self.shut:
            waiter: Deferred[None] = Deferred()
            self._waiting.append(waiter)
            try:
                await waiter
            except CancelledError:
                self._waiting.remove(waiter)
                self.cancelled += 1
                raise
        if self.error is not None:
            raise self.error

    def open(self) -> None:
        """Let all in who wait, and who come."""
        self.shut = False
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.callback(None)
