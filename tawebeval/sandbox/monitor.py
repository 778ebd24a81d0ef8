"""The look at limits that the kernel does not enforce, or does not tell of, while a run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.deferreds import Threads
from tawebeval.errors import EvaluationError
from tawebeval.sandbox.base import Cell
from tawebeval.sandbox.disk import LITTLE, MUCH, TooMuchWork

_PAUSE = 0.25  # seconds from the end of one look at all cells to the next
_PATIENCE = 4  # looks after a stop until the files of a run have been removed, as a rule
_BLIND = 8  # looks running that may fail: one that is just being removed fails once or twice

log = Logger()


Stop = Callable[[EvaluationError], object]


@attrs.define
class Relief:
    """Chooses which run to stop while the disk is nearly full: the one that has most on it.

    The next one is chosen when the files of the first can have been removed, or at once if the disk
    goes on filling up. If no run has much there, and the disk goes on filling up, a run hides what
    it writes: then all are chosen, one after the other, the youngest first.
    """

    _mark: float = 0  # bytes that were free; a MiB less means that the disk goes on filling up
    _patience: int = 0  # looks for which nobody is chosen

    def choose(self, cells: Iterable[Cell]) -> Cell | None:
        """Return which of the cells, the oldest first, to stop now, after a look at each."""
        short = [cell for cell in cells if cell.short]
        if not short:
            self._mark, self._patience = 0, 0
            return None
        free = min(cell.free for cell in short)
        filling = free < self._mark - MUCH
        if filling or free > self._mark:
            self._mark = free
        if self._patience and not filling:
            self._patience -= 1
            return None
        chosen = max(short, key=lambda cell: cell.written)
        if chosen.written < MUCH:
            if not filling:
                return None
            chosen = short[-1]  # without whom it was not nearly full before
        self._patience = _PATIENCE
        return chosen


class Watch:
    """Looks at all cells in turn, in one thread, as long as there are any.

    A cell that takes more than `LITTLE` work is looked at by `others`, and delays only its like.
    """

    def __init__(self, clock: Any, threads: Threads, others: Threads) -> None:
        self._clock = clock
        self._threads = threads
        self._others = others
        self._watched: dict[Cell, Stop] = {}
        # How many looks have failed since the last that did not, where any have.
        self._failures: Counter[Cell] = Counter()
        self._apart: set[Cell] = set()  # those that the others look at just now
        self._relief = Relief()
        self._relieved: set[Cell] = set()  # those that it has chosen
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
        self._relieved.discard(cell)
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
            cells = {cell: 0 if cell in self._apart else LITTLE for cell in self._watched}
            for cell, found in await self._threads.run(exceeded, cells):
                if cell in self._watched:  # it may have ended meanwhile
                    self._take(cell, found)
            self._relieve()
        finally:
            self._looking = False
            self._plan()

    def _relieve(self) -> None:
        chosen = self._relief.choose(cell for cell in self._watched if cell not in self._relieved)
        if chosen is not None:
            self._relieved.add(chosen)
            log.warn(
                "{free} bytes of the disk are free, less than limits.free_disk ({least} bytes): the"
                " run that has most there, {written} bytes, is stopped",
                free=chosen.free,
                least=chosen.limits.free_disk,
                written=chosen.written,
            )
            self._watched[chosen](chosen.nearly_full())

    async def _look_apart(self, cell: Cell) -> None:
        self._apart.add(cell)
        try:
            ((_, found),) = await self._others.run(exceeded, {cell: inf})
        finally:
            self._apart.remove(cell)
        if cell in self._watched:
            self._take(cell, found)

    def _take(self, cell: Cell, found: Exception | None) -> None:
        """Do what follows from a look."""
        if isinstance(found, TooMuchWork):
            if cell not in self._apart:
                Deferred.fromCoroutine(self._look_apart(cell))
            return
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


def exceeded(cells: Mapping[Cell, float]) -> Sequence[tuple[Cell, Exception | None]]:
    """Return of each cell which limit it has gone over, or why it could not be looked at. Blocks.

    None is one that has gone over nothing, an EvaluationError a limit. With each cell comes how
    many looks at the disk it may take.
    """
    return [(cell, _look_at(cell, work)) for cell, work in cells.items()]


def _look_at(cell: Cell, work: float) -> Exception | None:
    try:
        return cell.exceeded(work=work)
    except Exception as error:  # noqa: BLE001  (the other cells are to be looked at)
        return error
