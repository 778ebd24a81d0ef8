"""Work that is done once for all who want the same meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred

from tawebeval.deferreds import Latch, completed, outcome
from tawebeval.errors import EvaluationError

K = TypeVar("K")
T = TypeVar("T")


@attrs.define
class _Work(Generic[T]):
    """Work under way, and how many wait for it."""

    deferred: Deferred[T]
    outcome: Latch[Callable[[], T]]
    waiting: int = 0


@attrs.define
class Shared(Generic[K, T]):
    """What is under way, by what it is for; nothing is kept of what has ended."""

    _works: dict[K, _Work[T]] = attrs.field(factory=dict)

    async def result(self, key: K, begin: Callable[[], Coroutine[Deferred[Any], Any, T]]) -> T:
        """Return the result of what is under way for `key`, or else of `begin()`.

        It is cancelled when the last one who waits is, who learns of that when it has ended;
        whoever comes later begins anew.
        """
        work = self._works.get(key)
        if work is None:
            deferred = Deferred.fromCoroutine(begin())
            work = self._works[key] = _Work(deferred, outcome(deferred))
        work.waiting += 1
        try:
            result = await work.outcome.wait()
        except CancelledError:
            if work.waiting == 1:
                self._works.pop(key, None)
                work.deferred.cancel()
                await completed(work.outcome)
            raise
        finally:
            work.waiting -= 1
            if work.outcome.is_set and self._works.get(key) is work:
                del self._works[key]
        try:
            return result()
        except EvaluationError as error:
            raise attrs.evolve(error) from None  # each who shares it gets a traceback of its own
