"""Retention: which events of a ring are kept, and for which readers (contract, sections 3 and 7).

Two kinds of readers take events. A reader of *pages* acknowledges by asking: a request after a
cursor acknowledges the events before it. A *stream* acknowledges nothing by itself: its
connection shows what the client's kernel has taken (`tawebeval.evaluations.following`). So:

- Events that pages have acknowledged are discarded at once, except those that a live stream has
  yet to take.
- Events that streams have taken stay for a resume, up to three quarters of the capacity: a proxy
  may have taken them in place of the client. Beyond that the oldest go, in whole batches. Events
  that streams have yet to take do not count, so slow readers find as much behind them as quick
  ones.
- Otherwise no event is discarded that a live stream, or a stream that was cut a moment ago, has yet
  to take, nor, while a client reads pages, an event that it has not acknowledged.

At least a quarter of the capacity is left for events that no client has taken. A ring whose
streams have taken everything is never full, so a reader that keeps up always gets more.
"""

from __future__ import annotations

import attrs

from tawebeval.core.ring import Ring

_MOST_CUT = 16  # streams of one evaluation; of more the first are not expected any longer


@attrs.define(eq=False)
class Reader:
    """Live stream; its client has taken the events before the cursor `taken`."""

    taken: int


@attrs.frozen
class Cut:
    """Stream that was cut; its client may resume from `taken` to `sent`, `until` a time."""

    taken: int
    sent: int
    until: float


@attrs.define
class Retention:
    """Discards the events of a ring that no reader needs."""

    _ring: Ring
    _acknowledged: int = 0  # by pages
    _readers: dict[Reader, None] = attrs.field(factory=dict)
    _cuts: list[Cut] = attrs.field(factory=list)  # in the order of their times

    def __len__(self) -> int:
        """Return the number of live streams."""
        return len(self._readers)

    @property
    def resumable(self) -> float | None:
        """Time until which events are kept for the stream that was cut first; None without one."""
        return self._cuts[0].until if self._cuts else None

    def enter(self, taken: int) -> Reader:
        """Return a new stream, whose client has all events before the cursor `taken`.

        The new stream replaces a cut stream that may have the same client: the one cut nearest to
        `taken`, since a client may have read more than it has processed.
        """
        cuts = [cut for cut in self._cuts if taken <= cut.sent]
        if cuts:
            self._cuts.remove(min(cuts, key=lambda cut: abs(cut.taken - taken)))
        reader = Reader(taken)
        self._readers[reader] = None
        return reader

    def leave(self, reader: Reader) -> None:
        """End a stream; it holds back no events any more."""
        del self._readers[reader]
        self._discard_acknowledged()

    def cut(self, reader: Reader, sent: int, until: float) -> None:
        """Note that a stream broke off after the events before the cursor `sent` were sent.

        Its client may resume `until` a time, which must not be before that of an earlier call.
        """
        del self._readers[reader]
        self._cuts.append(Cut(reader.taken, sent, until))
        del self._cuts[:-_MOST_CUT]
        self._discard_acknowledged()

    def acknowledge(self, after: int) -> bool:
        """Note that a reader of pages has all events before `after`; return whether that is new."""
        if after <= self._acknowledged:
            return False
        self._acknowledged = after
        self._discard_acknowledged()
        return True

    def make_room(self, capacity: int, *, now: float, paged: bool) -> None:
        """Discard events that streams have taken, beyond what is kept for a resume.

        `capacity` is the size of the ring in bytes at which its evaluator is paused. `paged` is
        whether a client reads pages.
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
