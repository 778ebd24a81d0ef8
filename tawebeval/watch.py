"""The look at limits that the kernel does not enforce, or does not tell of, while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from tawebeval.errors import EvaluationError
from tawebeval.sandbox import Cell
from tawebeval.signals import Threads

_PAUSE = 0.25  # seconds from the end of one look at all cells to the next

log = Logger()


class Watch:
    """Looks at all cells in turn, in one thread, as long as there are any."""

    def __init__(self, clock: Any, threads: Threads) -> None:
        self._clock = clock
        self._threads = threads
        self._watched: dict[Cell, Callable[[EvaluationError], object]] = {}
        self._next: IDelayedCall | None = None
        self._looking = False

    @contextmanager
    def over(self, cell: Cell, stop: Callable[[EvaluationError], object]) -> Iterator[None]:
        """Look at `cell` meanwhile, and call `stop` with the limit that it has gone over."""
        self._watched[cell] = stop
        self._plan()
        try:
            yield
        finally:
            del self._watched[cell]
            if not self._watched and self._next is not None:
                self._next.cancel()
                self._next = None

    def _plan(self) -> None:
        if self._watched and self._next is None and not self._looking:
            self._next = self._clock.callLater(_PAUSE, self._begin)

    def _begin(self) -> None:
        self._next = None
        self._looking = True
        Deferred.fromCoroutine(self._look())

    async def _look(self) -> None:
        try:
            for cell, error in await self._threads.run(exceeded, list(self._watched)):
                if cell in self._watched:  # it may have ended meanwhile
                    self._watched[cell](error)
        finally:
            self._looking = False
            self._plan()


def exceeded(cells: Sequence[Cell]) -> Sequence[tuple[Cell, EvaluationError]]:
    """Return the cells that have gone over a limit, and over which. Blocks."""
    found = []
    for cell in cells:
        try:
            error = cell.exceeded()
        except OSError:
            continue  # it is just being removed
        except Exception:  # noqa: BLE001  (the other cells are to be looked at)
            log.failure("the limits of a run cannot be looked at")
            continue
        if error is not None:
            found.append((cell, error))
    return found
