"""`PipeWriter`, by which daemon and node write to pipes that may be full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.abstract import FileDescriptor
from twisted.internet.defer import Deferred
from twisted.internet.fdesc import setNonBlocking, writeToFD
from twisted.python.failure import Failure


class PipeClosed(Exception):
    """The pipe was closed before all was written."""


class PipeWriter(FileDescriptor):
    """Writer to a pipe; `on_lost` is called once, at a close or if nobody reads any more."""

    def __init__(self, reactor: Any, descriptor: int, on_lost: Callable[[], object]) -> None:
        super().__init__(reactor)
        setNonBlocking(descriptor)
        self._descriptor = descriptor
        self._on_lost = on_lost
        self._room: Deferred[None] | None = None
        self.connected = 1

    def fileno(self) -> int:
        """Return the descriptor of the pipe."""
        return self._descriptor

    async def write_and_wait(self, data: bytes) -> None:
        """Write, and return once the buffer has room: one call at a time. Raises: PipeClosed."""
        if not self.connected:
            raise PipeClosed
        self.registerProducer(self, True)
        try:
            self.write(data)
            if self._room is not None:
                await self._room
        finally:
            self.unregisterProducer()

    def pauseProducing(self) -> None:
        """Let `write_and_wait` wait."""
        self._room = self._room or Deferred()

    def resumeProducing(self) -> None:
        """Let `write_and_wait` return."""
        room, self._room = self._room, None
        if room is not None:
            room.callback(None)

    def stopProducing(self) -> None:
        """Let `write_and_wait` fail."""
        room, self._room = self._room, None
        if room is not None:
            room.errback(PipeClosed())

    def writeSomeData(self, data: bytes) -> int | Exception:
        """Write what the pipe takes."""
        written: int | Exception = writeToFD(self._descriptor, data)
        return written

    def connectionLost(self, reason: Failure) -> None:
        """Tell the end."""
        if self.connected:
            super().connectionLost(reason)  # type: ignore[no-untyped-call]
            self._on_lost()
