"""One bound for the events of all evaluations together, and a fair part of it for each.

A ring is full when it holds as many bytes as are still free, or as `each` may have at most:
dynamic thresholds, as switches use them for queues in one memory (Choudhury and Hahne, 1998).
So n rings that want all they can get have a part of 1 / (n + 1) each, and another such part is
free for whoever comes next. Shares are neither asked for nor given back, and what one frees is
there for all.

A quarter of `total` is not free in this sense but a reserve. As many rings as are filled at once
may each have an equal part of it, however much others hold, and one such part is left over. So
what was taken from a ring stays for a while also where others are not read. No new ring is to
begin when only the reserve is left; but some may have been waiting for their turn by then. Where
they are not read either, and fill the reserve, what is left of it is divided like the rest.

A caller has a share of its own, too. It stops no ring, for what it begins with is not known then;
but as long as its rings hold that much none of it is to begin.

An empty ring is never full. Hence whoever reads all of its events always gets more of them,
whatever the others hold, and the sum is over `total` by one turn of the parser for each ring at
most (`core.segi`). What stopped processes leave in their pipes comes on top of that, and is
counted like the rest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable

import attrs

from tawebeval.core.tokens import ANONYMOUS
from tawebeval.errors import Busy

_TURN = 512 * 1024  # bytes that one turn of a parser brings, more or less


def _nothing() -> None:
    """Do nothing."""


@attrs.define(eq=False)
class Share:
    """The part of one ring of a caller's: `size` is what it holds, in bytes.

    `kept` are bytes beside the ring that count as the caller's, and do not fill it. No other share
    has its `number`.

    `full` tells that it is to take no more for now. `on_full()` is called when that begins, and may
    make room; `on_room()` when there is some again.
    """

    _budget: Budget
    number: int
    caller: str
    _on_full: Callable[[], object]
    _on_room: Callable[[], object]
    size: int = 0
    kept: int = 0
    full: bool = False
    _bound: bool = True
    _left: bool = False

    @property
    def limit(self) -> int:
        """The size from which it is full, as things stand, in bytes."""
        return self._budget.limit

    def resize(self, size: int) -> None:
        """Note what the ring holds now; there may be room for others, or itself."""
        if self._left:
            return
        was_full = self.full
        self._budget.add(self.caller, size - self.size)
        if was_full:
            self._budget.remove_waiter(self)
        shrunk, self.size = size < self.size, size
        self.full = self._bound and size >= self.limit
        if self.full:
            self._budget.add_waiter(self)
        if shrunk:
            self._budget.notify_freed()
        if was_full and not self.full:
            self._on_room()
        elif self.full and not was_full:
            self._on_full()

    def keep(self, size: int) -> None:
        """Note how many bytes are kept beside the ring."""
        self._budget.add(self.caller, size - self.kept)
        shrunk, self.kept = size < self.kept, size
        if shrunk:
            self._budget.notify_freed()

    def unbind(self) -> None:
        """Let it never be full again: little will come, and has to go somewhere."""
        self._bound = False
        self.resize(self.size)
        self._drop_callbacks()

    def release(self) -> None:
        """Give it back: there is no such ring any more."""
        self._drop_callbacks()
        self._bound = False
        self.keep(0)
        self.resize(0)
        self._left = True

    def admit(self) -> None:
        """Let it not be full any more, since others have made room."""
        self.full = False
        self._on_room()

    def _drop_callbacks(self) -> None:
        """Forget the callbacks, which refer to the owner of the ring."""
        self._on_full = self._on_room = _nothing


class Budget:
    """At most about `total` bytes in all rings, and `each` in one of them.

    `running` is how many are filled at once. `later(call)` makes a call in another turn of the
    reactor. `own` is the share of one caller, 0 for none. `used` is what all hold.
    """

    def __init__(
        self,
        total: int,
        each: int,
        running: int,
        later: Callable[[Callable[[], object]], object],
        own: int = 0,
    ) -> None:
        self.used = 0
        self._total = total
        self._each = each
        reserve = total // 4
        self._common = total - reserve
        self._reserved = min(each, reserve // (running + 1))
        # Where nobody may have more than there is, it is not a caller's own fault.
        self._own = own if own < self._common else 0
        self._held: Counter[str] = Counter()  # by caller
        self._on_relief: dict[str, Callable[[], object]] = {}  # by caller whose share is used
        self._later = later
        self._numbers = 0
        self._waiting: list[Share] = []  # who holds least is first
        self._due = False

    @property
    def limit(self) -> int:
        """The size from which a ring is full, in bytes."""
        reserved = min(self._reserved, self._total - self.used)
        return max(1, min(self._each, self._common - self.used), reserved)

    @property
    def waiting(self) -> int:
        """How many rings are full, and their evaluators paused."""
        return len(self._waiting)

    @property
    def is_spent(self) -> bool:
        """Whether nothing is free but the reserve."""
        return self.used >= self._common

    def share_used(self, caller: str) -> bool:
        """Whether the rings of a caller hold as much as they should."""
        return caller != ANONYMOUS and 0 < self._own <= self._held[caller]

    def call_on_relief(self, caller: str, call: Callable[[], object]) -> None:
        """Make a call, later, once a caller whose share is used holds less than that again.

        The call replaces an earlier one for the same caller that was not made yet.
        """
        self._on_relief[caller] = call

    def add_share(
        self,
        caller: str = ANONYMOUS,
        on_full: Callable[[], object] = _nothing,
        on_room: Callable[[], object] = _nothing,
    ) -> Share:
        """Return the share of one more ring of a caller's, which makes these calls (`Share`)."""
        self._numbers += 1
        return Share(self, self._numbers, caller, on_full, on_room)

    def add(self, caller: str, size: int) -> None:
        """Note that a caller uses so many bytes more."""
        self.used += size
        self._held[caller] += size
        if not self._held[caller]:
            del self._held[caller]
        if caller in self._on_relief and not self.share_used(caller):
            self._later(self._on_relief.pop(caller))

    def add_waiter(self, share: Share) -> None:
        """Let a share that is full wait for room."""
        insort(self._waiting, share, key=_order)

    def remove_waiter(self, share: Share) -> None:
        """Let it not wait any more; its size is still that with which it began to."""
        del self._waiting[bisect_left(self._waiting, _order(share), key=_order)]

    def notify_freed(self) -> None:
        """See to it that those are told who have room now."""
        if not self._due and self._have_room():
            self._due = True
            self._later(self._admit)

    def _have_room(self) -> bool:
        return bool(self._waiting) and self._waiting[0].size < self.limit

    def _admit(self) -> None:
        """Let some go on: as many as can print into what is free, the others after these have.

        All at once would take more than there is, the reserve too, and as many turns to stop as
        there are.
        """
        self._due = False
        for _ in range(1 + max(0, self._common - self.used) // _TURN):
            if not self._have_room():
                return
            self._waiting.pop(0).admit()
        self.notify_freed()


def _order(share: Share) -> tuple[int, int]:
    return share.size, share.number


_MEMORY = 32 * 2**20  # bytes
_RETRY_AFTER = 30  # seconds


@attrs.define
class Spool:
    """Counter of the bytes of forms; `held` never exceeds `limit`.

    `in_memory` counts the bytes that are not yet written to the disk.
    """

    limit: int
    held: int = 0
    in_memory: int = 0

    @property
    def is_crowded(self) -> bool:
        """Whether forms must wait for the disk before they receive more."""
        return self.in_memory >= _MEMORY

    def check(self, size: int) -> None:
        """Raise Busy if `size` bytes would not fit now."""
        if self.held + size > self.limit:
            raise Busy("as many uploads are stored as may; try again later", _RETRY_AFTER)

    def take(self, size: int) -> None:
        """Count `size` bytes more. Raises Busy, and counts nothing, if they do not fit."""
        self.check(size)
        self.held += size

    def give_back(self, size: int) -> None:
        """Count `size` bytes less, which were removed."""
        assert 0 <= size <= self.held
        self.held -= size
