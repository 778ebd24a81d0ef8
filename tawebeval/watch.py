"""The look at limits that the kernel does not enforce, or does not tell of, while a run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.errors import EvaluationError
from tawebeval.sandbox import Cell
from tawebeval.signals import Threads

_PAUSE = 0.25  # seconds from the end of one look at all cells to the next
_BLIND = 8  # looks running that may fail: one that is just being removed fails once or twice

log = Logger()


Stop = Callable[[EvaluationError], object]


class Watch:
    """Looks at all cells in turn, in one thread, as long as there are any."""

    def __init__(self, clock: Any, threads: Threads) -> None:
        self._clock = clock
        self._threads = threads
        self._watched: dict[Cell, Stop] = {}
        # How many looks have failed since the last that did not, where any have.
        self._failures: Counter[Cell] = Counter()
        self._next: IDelayedCall | None = None
        self._looking = False

    def begin(self, cell: Cell, stop: Stop) -> None:
        """Look at `cell` from now on, and call `stop` with the limit that it has gone over.

        So it is called, with `lost`, where the cell cannot be looked at several times running.
        """
        self._watched[cell] = stop
        self._plan()

    def end(self, cell: Cell) -> None:
        """Look at `cell` no more."""
        del self._watched[cell]
        self._failures.pop(cell, None)
        if not self._watched and self._next is not None:
            self._next.cancel()
            self._next = None

    def _plan(self) -> None:
        if self._watched and self._next is None and not self._looking:
            self._next = self._clock.callLater(_PAUSE, self._start)

    def _start(self) -> None:
        self._next = None
        self._looking = True
        Deferred.fromCoroutine(self._look())

    async def _look(self) -> None:
        try:
            for cell, found in await self._threads.run(exceeded, list(self._watched)):
                if cell in self._watched:  # it may have ended meanwhile
                    self._take(cell, found)
        finally:
            self._looking = False
            self._plan()

    def _take(self, cell: Cell, found: Exception | None) -> None:
        """Do what follows from a look."""
        if found is None or isinstance(found, EvaluationError):
            self._failures.pop(cell, None)
            if found is not None:
                self._watched[cell](found)
            return
        self._failures[cell] += 1
        if self._failures[cell] == _BLIND:
            log.failure("a run is stopped, for its limits cannot be looked at", Failure(found))
            self._watched[cell](
                EvaluationError("lost", "the limits could not be looked at any more")
            )


def exceeded(cells: Sequence[Cell]) -> Sequence[tuple[Cell, Exception | None]]:
    """Return of each cell which limit it has gone over, or why it could not be looked at. Blocks.

    None is one that has gone over nothing, an EvaluationError a limit.
    """
    return [(cell, _look_at(cell)) for cell in cells]


def _look_at(cell: Cell) -> Exception | None:
    try:
        return cell.exceeded()
    except Exception as error:  # noqa: BLE001  (the other cells are to be looked at)
        return error
