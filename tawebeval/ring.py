"""The ring: one evaluation's events between being printed and being acknowledged.

Events are numbered from 0. A *cursor* is a place between two events: n lies before event
n. The ring holds the events from `oldest` to `newest` (two cursors), as batches of JSON
Lines. It grows at one end as the evaluator prints and shrinks at the other as readers
acknowledge; nothing else ever discards an event.

Places where a reader stopped become borders between batches, so the usual
acknowledgement, of just what was read, drops whole batches and looks into none.
"""

from __future__ import annotations

from collections import deque

import attrs

from tawebeval.events import Batch

_GATHER = 16 * 1024  # bytes up to which small batches are put together


@attrs.define
class Ring:
    """Events from `oldest` to `newest`; `size` is what their JSON Lines take, in bytes."""

    oldest: int = 0
    newest: int = 0
    size: int = 0
    closed: bool = False
    _batches: deque[Batch] = attrs.field(factory=deque)
    _border: bool = True  # the last batch ends where a reader stopped: leave it as it is

    def append(self, batch: Batch) -> None:
        """Take the next events. The ring must not be closed."""
        assert not self.closed, "a closed ring takes no events"
        if not batch.count:
            return
        self.newest += batch.count
        self.size += len(batch.lines)
        if not self._border and len(self._batches[-1].lines) + len(batch.lines) <= _GATHER:
            self._batches[-1] += batch
        else:
            self._batches.append(batch)
            self._border = False

    def close(self) -> None:
        """No event will follow."""
        self.closed = True

    def read(self, after: int, limit: int) -> Batch:
        """Return the events that follow the cursor `after`, `oldest <= after <= newest`.

        They take at most `limit` bytes, save that one event is always let through.
        """
        assert self.oldest <= after <= self.newest
        taken: list[Batch] = []
        index = self._border_at(after)
        while index < len(self._batches):
            batch = self._batches[index]
            if len(batch.lines) > limit:
                count = batch.lines.count(b"\n", 0, limit) or (0 if taken else 1)
                if count:
                    self._split(index, count)
                    taken.append(self._batches[index])
                break
            limit -= len(batch.lines)
            taken.append(batch)
            index += 1
        else:
            self._border = True
        return Batch(sum(batch.count for batch in taken), b"".join(batch.lines for batch in taken))

    def acknowledge(self, after: int) -> None:
        """Discard the events before the cursor `after`; one that is older changes nothing."""
        assert after <= self.newest
        if after <= self.oldest:
            return
        for _ in range(self._border_at(after)):
            self.size -= len(self._batches.popleft().lines)
        self.oldest = after
        self._border = self._border or not self._batches

    def _border_at(self, cursor: int) -> int:
        """Return the index of the batch that begins at `cursor`, made so if need be."""
        first = self.oldest
        for index, batch in enumerate(self._batches):
            if cursor == first:
                return index
            if cursor < first + batch.count:
                self._split(index, cursor - first)
                return index + 1
            first += batch.count
        return len(self._batches)

    def _split(self, index: int, count: int) -> None:
        """Make two of a batch, the first of which has `count` events."""
        batch = self._batches[index]
        if count == batch.count:
            return
        at = 0
        for _ in range(count):
            at = batch.lines.index(b"\n", at) + 1
        self._batches[index] = Batch(count, batch.lines[:at])
        self._batches.insert(index + 1, Batch(batch.count - count, batch.lines[at:]))
