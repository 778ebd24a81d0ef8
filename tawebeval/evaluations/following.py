"""Following one evaluation to its end, as streams do.

What a connection was given is not yet the client's: the kernels of both ends, and proxies between
them, hold megabytes of it, which are lost when the connection is cut. So a stream says for each
piece at which place in the connection's bytes it ended, and the connection tells, whenever the
ring needs room, up to which place the client has read. A client may also say so itself; then only
its word counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from tawebeval.core.events import Batch
from tawebeval.core.retention import Reader, Retention
from tawebeval.evaluations.evaluation import Evaluation

RESUME = 30.0
"""Seconds for which events are kept for the client of a stream that was cut."""

_NOTED = 8 * 1024  # bytes of a connection between two places that are noted, at least


class Connection(Protocol):
    """A connection that shows how much of what it was given the client has read."""

    def progress(self) -> tuple[int, int]:
        """Return the bytes that were given to it, and how many of them the client has read."""

    def probe(self, wanted: bool) -> None:
        """Have the client's machine asked again and again what `progress` tells, or no more.

        Without new data it need not say that more was read.
        """


class Opaque:
    """A connection that shows nothing: all that it was given counts as read."""

    def progress(self) -> tuple[int, int]:
        """Return that nothing is on the way."""
        return 0, 0

    def probe(self, wanted: bool) -> None:
        """Do nothing."""


@attrs.define
class Readers:
    """Who reads one evaluation: live streams, and pages.

    Pages count as being read until `paged`, a time of the clock, in seconds. (Whoever waits for one
    longer has everything.) `sent` is whether a stream has sent all there was to be, and its end.
    `furthest` is the last cursor up to which anybody has read.
    """

    evaluation: Evaluation
    retention: Retention
    _clock: IReactorTime
    paged: float = float("-inf")
    sent: bool = False
    furthest: int = 0
    _followings: dict[Following, None] = attrs.field(factory=dict)
    _due: IDelayedCall | None = None

    def enter(self, following: Following) -> Reader:
        """Keep for a stream what its client has yet to take."""
        self._followings[following] = None
        return self.retention.enter(following.position)

    def leave(self, following: Following, reader: Reader, *, cut: bool) -> None:
        """Let a stream end; if it was cut its client has `RESUME` seconds to come back."""
        del self._followings[following]
        if cut:
            self.retention.cut(reader, following.position, self._clock.seconds() + RESUME)
        else:
            self.retention.leave(reader)
        self.make_room()

    def acknowledge(self, after: int) -> None:
        """Take that a page after that cursor is asked for."""
        self.furthest = max(self.furthest, after)
        if self.retention.acknowledge(after):  # most are asked for again, and make no room
            self.make_room()

    def make_room(self) -> None:
        """Discard what nobody needs, and let the evaluator print into the room.

        To be called whenever somebody needs less, and when the evaluator would have to wait.
        """
        for following in self._followings:
            following.look()
        now = self._clock.seconds()
        paged = now < self.paged
        self.retention.make_room(self.evaluation.share.limit, now=now, paged=paged)
        self.evaluation.acknowledged()
        self._look_again(now)

    def _look_again(self, now: float) -> None:
        """See to it that an evaluator goes on that waits for pages, or a resume, in vain.

        Its streams may have everything, and then nothing else would happen any more.
        """
        times = (self.paged, self.retention.resumable or self.paged)
        expected = [time - now for time in times if time > now]
        held = bool(len(self.retention) and expected) and self.evaluation.share.full
        if held and self._due is None:
            self._due = self._clock.callLater(min(expected), self._is_due)
        elif not held and self._due is not None:
            self._due.cancel()
            self._due = None

    def _is_due(self) -> None:
        self._due = None
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
    """A stream that follows an evaluation; `position` is the cursor after what it has read.

    A context manager: within it nothing is discarded that its client has yet to take, and it reads
    on also when the evaluation is forgotten. `left()` is called after it. `connection` is set
    before that, where there is one that shows what the client takes.
    """

    position: int
    _readers: Readers
    _followers: Followers
    _left: Callable[[], object]
    connection: Connection = attrs.field(factory=Opaque)
    _reader: Reader = attrs.field(init=False)
    _said: bool = False  # whether the client says by itself what it has
    # Where pieces ended: bytes given to the connection, and the cursor after the events.
    _places: deque[tuple[int, int]] = attrs.field(factory=deque)

    def __enter__(self) -> None:
        self._reader = self._readers.enter(self)
        self._followers.enter(self)
        # Where the ring is full and this stream has all of it, nothing else would make room.
        self._readers.make_room()

    def __exit__(self, broken_off: type[BaseException] | None, *_: object) -> None:
        ended = broken_off is None and self.ended
        if ended:
            self._readers.sent = True
        self._readers.leave(self, self._reader, cut=not ended)
        self._followers.leave(self)
        self._left()

    @property
    def ended(self) -> bool:
        """Whether everything was read, and no event will follow."""
        ring = self._readers.evaluation.ring
        return ring.closed and self.position == ring.newest

    def asks(self) -> bool:
        """Ask the connection how far the client has read, if the evaluator may wait for that.

        Tell whether it may: it waits, and the client was sent all events but has not shown that it
        has them.
        """
        held = self._readers.evaluation.share.full and self._reader.taken < self.position
        self.connection.probe(held and not self._said)
        return held

    def read(self, limit: int) -> Batch:
        """Return what follows, up to `limit` bytes or one event; it is empty for now, or ever."""
        batch = self._readers.evaluation.ring.read(self.position, limit)
        self.position += batch.count
        return batch

    def changed(self) -> Deferred[None]:
        """Return a Deferred of the next events, or the end."""
        return self._readers.evaluation.changed.wait()

    def handed_over(self) -> None:
        """Note that the connection was given all that was read."""
        if not self._said:
            given, _ = self.connection.progress()
            if len(self._places) > 1 and given - self._places[-2][0] < _NOTED:
                self._places.pop()
            self._places.append((given, self.position))
        self._readers.make_room()

    def look(self) -> None:
        """Note what the client has taken by now: it may be discarded when need be."""
        if self._said:
            self._places.clear()
        elif self._places:
            _, read = self.connection.progress()
            while self._places and self._places[0][0] <= read:
                self._take(self._places.popleft()[1])

    def acknowledge(self, cursor: int) -> bool:
        """Take from the client that it has all events before `cursor`; False if it cannot have.

        From the first time on nothing else shows what it has.
        """
        if cursor > self.position:
            return False
        self._said = True
        if cursor > self._reader.taken:
            self._take(cursor)
            self._readers.make_room()
        return True

    def _take(self, cursor: int) -> None:
        self._reader.taken = cursor
        self._readers.furthest = max(self._readers.furthest, cursor)
