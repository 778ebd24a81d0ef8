"""Following one evaluation to its end, as streams do."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from tawebeval.evaluation import Evaluation
from tawebeval.events import Batch
from tawebeval.retention import Reader, Retention


@attrs.define
class Readers:
    """Who reads one evaluation: live streams, and pages.

    Pages count as being read until `paged`, a time of the clock, in seconds. (Whoever waits for one
    longer has everything.) `sent` is whether a stream has sent all there was to be, and its end.
    """

    evaluation: Evaluation
    retention: Retention
    _clock: IReactorTime
    paged: float = float("-inf")
    sent: bool = False
    _unpaged: IDelayedCall | None = None

    def acknowledge(self, after: int) -> None:
        """Take that a page after that cursor is asked for."""
        if self.retention.acknowledge(after):  # most are asked for again, and make no room
            self.make_room()

    def make_room(self) -> None:
        """Discard what nobody needs, and let the evaluator print into the room.

        To be called whenever somebody needs less, and when the evaluator would have to wait.
        """
        now = self._clock.seconds()
        self.retention.make_room(self.evaluation.share.limit, paged=now < self.paged)
        self.evaluation.acknowledged()
        self._look_again(now)

    def _look_again(self, now: float) -> None:
        """See to it that an evaluator goes on that waits for pages, when nobody reads them.

        Its streams may have everything, and then nothing else would happen any more.
        """
        held = bool(len(self.retention)) and self.evaluation.share.full and now < self.paged
        if held and self._unpaged is None:
            self._unpaged = self._clock.callLater(self.paged - now, self._page_is_due)
        elif not held and self._unpaged is not None:
            self._unpaged.cancel()
            self._unpaged = None

    def _page_is_due(self) -> None:
        self._unpaged = None
        self.make_room()


@attrs.define
class Followers:
    """All who follow an evaluation just now."""

    _present: dict[Following, None] = attrs.field(factory=dict)

    def __len__(self) -> int:
        return len(self._present)

    def enter(self, following: Following) -> None:
        """Note one more."""
        self._present[following] = None

    def leave(self, following: Following) -> None:
        """Note one less."""
        del self._present[following]


@attrs.define(eq=False)
class Following:
    """One who follows an evaluation; `position` is the cursor after what it has read.

    A context manager: within it nothing is discarded that it has yet to take, and it reads on
    also when the evaluation is forgotten. `left()` is called after it.
    """

    position: int
    _readers: Readers
    _followers: Followers
    _left: Callable[[], object]
    _reader: Reader | None = None

    def __enter__(self) -> None:
        self._reader = self._readers.retention.enter(self.position)
        self._followers.enter(self)
        # Where the ring is full and this stream has all of it, nothing else would make room.
        self._readers.make_room()

    def __exit__(self, broken_off: type[BaseException] | None, *_: object) -> None:
        assert self._reader is not None
        if broken_off is None and self.ended:
            self._readers.sent = True
        self._readers.retention.leave(self._reader)
        self._readers.make_room()
        self._followers.leave(self)
        self._left()

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
        assert self._reader is not None
        self._reader.taken = self.position
        self._readers.make_room()
