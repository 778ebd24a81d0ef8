"""What is kept of a ring, and for whom (contract, sections 3 and 7).

Two kinds of readers take events away. A reader of *pages* says what it has: asking after a
cursor acknowledges the events before it. A *stream* mostly says nothing: its connection shows
what the client has taken (`tawebeval.evaluations.following`). So:

- The events that pages have acknowledged are discarded at once, save those that a live stream has
  yet to take.
- The events that streams have taken stay for a resume, up to three quarters of the capacity, for
  a proxy may have taken them and not the client. Beyond that the oldest go, in whole batches. The
  events that streams have yet to take do not count, so a slow reader finds as much behind it as a
  quick one.
- Apart from acknowledged ones, no event goes that a live stream has yet to take, or a stream that
  was cut a moment ago; nor, while a client reads pages, one that it has not acknowledged.

A quarter, at least, is for the events that no client has taken. Where the streams have all there
is the ring is never full, so a reader that takes everything always gets more.
"""

from __future__ import annotations

import attrs

from tawebeval.core.ring import Ring

_MOST_CUT = 16  # streams of one evaluation; of more the first are not expected any longer


@attrs.define(eq=False)
class Reader:
    """A live stream, whose client has taken the events before the cursor `taken`."""

    taken: int


@attrs.frozen
class Cut:
    """A stream that was cut; its client may resume `until` a time, from `taken` or up to `sent`."""

    taken: int
    sent: int
    until: float


@attrs.define
class Retention:
    """Discards from a ring what nobody needs."""

    _ring: Ring
    _acknowledged: int = 0  # by pages
    _readers: dict[Reader, None] = attrs.field(factory=dict)
    _cuts: list[Cut] = attrs.field(factory=list)  # in the order of their times

    def __len__(self) -> int:
        """Return the number of live streams."""
        return len(self._readers)

    @property
    def resumable(self) -> float | None:
        """The time until which events are kept for the stream that was cut first, if one was."""
        return self._cuts[0].until if self._cuts else None

    def enter(self, taken: int) -> Reader:
        """Return a new stream, whose client has all events before the cursor `taken`.

        It takes the place of a stream that was cut, if it may have the same client: of the one that
        was cut next to there, since a client may have read more than it has understood.
        """
        cuts = [cut for cut in self._cuts if taken <= cut.sent]
        if cuts:
            self._cuts.remove(min(cuts, key=lambda cut: abs(cut.taken - taken)))
        reader = Reader(taken)
        self._readers[reader] = None
        return reader

    def leave(self, reader: Reader) -> None:
        """Let a stream end: it holds nothing back any more."""
        del self._readers[reader]
        self._discard_acknowledged()

    def cut(self, reader: Reader, sent: int, until: float) -> None:
        """Let a stream break off that was sent the events before the cursor `sent`.

        Its client may resume `until` a time, which is not before that of any earlier call.
        """
        del self._readers[reader]
        self._cuts.append(Cut(reader.taken, sent, until))
        del self._cuts[:-_MOST_CUT]
        self._discard_acknowledged()

    def acknowledge(self, after: int) -> bool:
        """Take from pages that they have everything before `after`; tell whether that is new."""
        if after <= self._acknowledged:
            return False
        self._acknowledged = after
        self._discard_acknowledged()
        return True

    def make_room(self, capacity: int, *, now: float, paged: bool) -> None:
        """Discard what streams have taken, if it is too much; `paged` is whether pages are read.

        `capacity` is the size of the ring, in bytes, at which its evaluator has to wait now.
        """
        while self._cuts and self._cuts[0].until <= now:
            del self._cuts[0]
        self._discard_acknowledged()
        kept = capacity * 3 // 4
        if self._readers and not paged and self._ring.size > kept:
            before = min([self._taken_by_all(), *(cut.taken for cut in self._cuts)])
            self._ring.shrink(kept + self._ring.size_after(before), before)

    def _discard_acknowledged(self) -> None:
        if self._acknowledged > self._ring.oldest:
            self._ring.acknowledge(min(self._acknowledged, self._taken_by_all()))

    def _taken_by_all(self) -> int:
        return min((reader.taken for reader in self._readers), default=self._ring.newest)
