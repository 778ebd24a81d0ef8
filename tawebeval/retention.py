"""What is kept of a ring, and for whom (contract, sections 3 and 7).

Two kinds of readers take events away. One who reads by *pages* says what it has: asking
after a cursor acknowledges what lies before it. A *stream* says nothing; what its connection
has taken counts as read, though some of that may yet get lost on the way. So:

- What pages have acknowledged is discarded at once, save what a live stream has yet to take.
- What streams have taken stays for a resume, up to three quarters of the capacity: enough for
  what connections hold. The oldest of what is more goes, in whole batches. What they have yet
  to take does not count, so a slow reader finds as much behind it as a quick one.
- Nothing goes that a live stream has yet to take; nor, while somebody reads by pages, what
  these have not acknowledged.

A quarter, at least, is for what nobody has taken. Where the streams have all there is the ring
is never full, so a reader who takes everything always gets more.
"""

from __future__ import annotations

import attrs

from tawebeval.ring import Ring


@attrs.define(eq=False)
class Reader:
    """A live stream; its connection has taken the events before the cursor `taken`."""

    taken: int


@attrs.define
class Retention:
    """Discards from a ring what nobody needs."""

    _ring: Ring
    _acknowledged: int = 0  # by pages
    _readers: dict[Reader, None] = attrs.field(factory=dict)

    def __len__(self) -> int:
        """Return the number of live streams."""
        return len(self._readers)

    def enter(self, taken: int) -> Reader:
        """Return a new stream, which has everything before the cursor `taken`."""
        reader = Reader(taken)
        self._readers[reader] = None
        return reader

    def leave(self, reader: Reader) -> None:
        """Let a stream end: it holds nothing back any more."""
        del self._readers[reader]
        self._discard_acknowledged()

    def acknowledge(self, after: int) -> bool:
        """Take from pages that they have everything before `after`; tell whether that is new."""
        if after <= self._acknowledged:
            return False
        self._acknowledged = after
        self._discard_acknowledged()
        return True

    def make_room(self, capacity: int, *, paged: bool) -> None:
        """Discard what streams have taken, if it is too much; `paged` is whether pages are read.

        `capacity` is the size of the ring, in bytes, at which its evaluator has to wait now.
        """
        self._discard_acknowledged()
        kept = capacity * 3 // 4
        if self._readers and not paged and self._ring.size > kept:
            before = self._taken_by_all()
            self._ring.shrink(kept + self._ring.size_after(before), before)

    def _discard_acknowledged(self) -> None:
        self._ring.acknowledge(min(self._acknowledged, self._taken_by_all()))

    def _taken_by_all(self) -> int:
        return min((reader.taken for reader in self._readers), default=self._ring.newest)
