"""The callbacks that are on their way, whose they are, and which of them are too much.

Over a bound of bytes the caller who has most there loses what has waited longest: a receiver that
is down costs only those whose it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace

import attrs
from twisted.internet.defer import Deferred

from tawebeval.deferreds import Latch
from tawebeval.webhooks.callback import Callback

_OVERHEAD = 4096  # bytes that a delivery takes besides its document, generously


@attrs.define(eq=False)
class Delivery:
    """A callback on its way: `document` is what `evaluation`, as the log names it, has come to.

    No other has its `event`. `given_up` says why it was stopped, if it was.
    """

    callback: Callback
    evaluation: str
    document: bytes = attrs.field(repr=False)
    event: str
    given_up: str = ""
    life: Deferred[None] | None = None
    over: Latch[None] = attrs.field(factory=Latch)

    @property
    def size(self) -> int:
        """The bytes of memory that it counts for."""
        return len(self.document) + _OVERHEAD

    def mark(self, why: str) -> None:
        """Let it be given up, and not begin any more; the first reason counts."""
        self.given_up = self.given_up or why

    def stop(self) -> None:
        """End what it is about; its place may go to another at once, so all are marked before."""
        if self.life is not None:
            self.life.cancel()


@attrs.define
class _Own:
    """One caller's deliveries by event, the oldest first, and their bytes."""

    deliveries: dict[str, Delivery] = attrs.field(factory=dict)
    size: int = 0


class Deliveries:
    """All that are on their way; those that were not taken out take `size` bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._all: dict[str, Delivery] = {}  # by event, the oldest first
        self._callers: dict[str, _Own] = {}  # who has none is not here

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._all)

    def __iter__(self) -> Iterator[Delivery]:
        """Yield them, the oldest first."""
        return iter(self._all.values())

    def add(self, delivery: Delivery) -> None:
        """Let one more be on its way."""
        self._all[delivery.event] = delivery
        own = self._callers.setdefault(delivery.callback.caller, _Own())
        own.deliveries[delivery.event] = delivery
        own.size += delivery.size
        self.size += delivery.size

    def remove(self, delivery: Delivery) -> None:
        """Let one that is over be gone."""
        del self._all[delivery.event]
        self._take_out(delivery)

    def _take_out(self, delivery: Delivery) -> None:
        """Let it count no more, if it still does."""
        caller = delivery.callback.caller
        own = self._callers.get(caller)
        if own is not None and own.deliveries.pop(delivery.event, None) is not None:
            own.size -= delivery.size
            self.size -= delivery.size
            if not own.deliveries:
                del self._callers[caller]

    def take_excess(self, bound: int) -> Sequence[Delivery]:
        """Take out those without which the others take `bound` bytes at most; return them.

        They do not count any more, and stay on their way until they are removed.
        """
        found: list[Delivery] = []
        left = self.size
        if left <= bound:
            return found
        most = [
            (-own.size, number, iter(own.deliveries.values()))
            for number, own in enumerate(self._callers.values())
        ]
        heapify(most)
        while left > bound:
            size, number, oldest = most[0]
            delivery = next(oldest)
            found.append(delivery)
            left -= delivery.size
            heapreplace(most, (size + delivery.size, number, oldest))
        for delivery in found:
            self._take_out(delivery)
        return found
