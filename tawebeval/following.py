"""Following one evaluation to its end, as streams do."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.internet.defer import Deferred

from tawebeval.evaluation import Evaluation
from tawebeval.events import Batch
from tawebeval.retention import Reader, Retention


@attrs.define
class Readers:
    """Who reads one evaluation: live streams, and pages.

    Pages count as being read until `paged`, a time of the clock, in seconds.
    """

    evaluation: Evaluation
    retention: Retention
    paged: float = float("-inf")

    def acknowledge(self, after: int, now: float, until: float) -> None:
        """Take that a page after that cursor is asked for, and the next may be `until` then."""
        self.paged = max(self.paged, until)
        self.retention.acknowledge(after)
        self.make_room(now)

    def make_room(self, now: float) -> None:
        """Discard what nobody needs, and let the evaluator print into the room."""
        self.retention.make_room(paged=now < self.paged)
        self.evaluation.acknowledged()


@attrs.define(eq=False)
class Following:
    """One who follows an evaluation; `position` is the cursor after what it has read.

    It reads from the ring that it began with, also when the evaluation is forgotten.
    `left` is called when it leaves, which it must, whatever happens.
    """

    position: int
    _readers: Readers
    _now: Callable[[], float]
    _left: Callable[[Following], object]
    _reader: Reader = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._reader = self._readers.retention.enter(self.position)

    @property
    def ended(self) -> bool:
        """Whether everything was read, and no event will follow."""
        ring = self._readers.evaluation.ring
        return ring.closed and self.position == ring.newest

    def read(self, limit: int) -> Batch:
        """Return what follows, up to `limit` bytes or one event; it is empty for now, or ever."""
        batch = self._readers.evaluation.ring.read(self.position, limit)
        self.position += batch.count
        return batch

    def changed(self) -> Deferred[None]:
        """Return a Deferred of the next events, or the end."""
        return self._readers.evaluation.changed.wait()

    def took(self) -> None:
        """Note that all that was read has been taken: it may be discarded when need be."""
        self._reader.taken = self.position
        self._readers.make_room(self._now())

    def leave(self) -> None:
        """Follow no longer; what was taken stays for whoever comes back."""
        self._readers.retention.leave(self._reader)
        self._readers.make_room(self._now())
        self._left(self)
