"""Single-flight: work done once for all who ask for it meanwhile."""

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
    """Work in progress, and the number of its waiters."""

    deferred: Deferred[T]
    outcome: Latch[Callable[[], T]]
    waiting: int = 0


@attrs.define
class Shared(Generic[K, T]):
    """Work in progress by key; nothing is kept of finished work."""

    _works: dict[K, _Work[T]] = attrs.field(factory=dict)

    async def result(self, key: K, begin: Callable[[], Coroutine[Deferred[Any], Any, T]]) -> T:
        """Return the result of the work in progress for `key`, or else of `begin()`.

        When its last waiter is cancelled the work is cancelled, and that waiter returns after the
        work has ended; a later call begins anew.
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
