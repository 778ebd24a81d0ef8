"""Run slots, and a queue for them that is fair between callers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

from twisted.internet.defer import Deferred, succeed

UNBOUNDED = 2**62
"""Places to wait, where something else bounds those who do."""


def count_places(running: int) -> int:
    """Return the number of run slots: `running`, or the number of processors if that is 0."""
    return running or len(os.sched_getaffinity(0))


class Queue:
    """Queue for `running` slots, with at most `queued` waiters, fair between callers.

    A free slot goes to the caller whose last turn is longest ago, and among that caller's waiters
    to the first. A caller has at most `own_running` slots and `own_queued` waiters; 0 sets no such
    limit. A caller for whom `admits` is false gets no slot; call `go_on` when that may have
    changed.

    A waiter that is not ready can reserve its turn: others pass it until it enters.
    """

    def __init__(
        self,
        running: int,
        queued: int,
        own_running: int = 0,
        own_queued: int = 0,
        *,
        admits: Callable[[str], bool] = lambda caller: True,
    ) -> None:
        self._admits = admits
        self.bound(running, queued, own_running, own_queued)
        self._letting_in = False
        self._inside: dict[str, str] = {}  # of whom each is
        self._resting: dict[str, str] = {}  # likewise
        self._taken: Counter[str] = Counter()  # those inside and resting, by caller
        self._callers: dict[str, str] = {}  # of those that wait
        # By caller, in the order of their turns; none is empty. None is for who is not ready.
        self._waiting: dict[str, dict[str, Deferred[None] | None]] = {}

    def bound(self, running: int, queued: int, own_running: int = 0, own_queued: int = 0) -> None:
        """Change the bounds. Present holders and waiters stay; call `go_on` afterwards."""
        self.places = running
        self._queued = queued
        self._own_running = own_running or running
        self._own_queued = own_queued or queued

    @property
    def running(self) -> int:
        """Number of slots taken."""
        return len(self._inside)

    @property
    def waiting(self) -> int:
        """Number of waiters."""
        return len(self._callers)

    def full(self, caller: str = "") -> bool:
        """Whether one more waiter of `caller` would exceed `queued`."""
        # Who is not ready waits also where there are places, which others may have meanwhile.
        free = self.places - len(self._inside) if self._may_run(caller) else 0
        return len(self._callers) >= self._queued + free

    def share_used(self, caller: str) -> bool:
        """Whether one more waiter of `caller` would exceed `own_queued`."""
        # Where nobody may have more than there is, it is not this caller's own fault.
        if self._own_queued >= self._queued:
            return False
        free = self._own_running - self._taken[caller] if self._may_run(caller) else 0
        return len(self._waiting.get(caller, ())) >= self._own_queued + free

    def _may_run(self, caller: str) -> bool:
        return (
            len(self._inside) < self.places
            and self._taken[caller] < self._own_running
            and self._admits(caller)
        )

    def reserve(self, name: str, caller: str = "") -> None:
        """Wait without being ready: the turn counts from now, but `enter` has to be called."""
        self._callers[name] = caller
        self._waiting.setdefault(caller, {})[name] = None

    def enter(self, name: str, caller: str = "") -> Deferred[None]:
        """Return a Deferred of a slot. Cancelling it gives up waiting."""
        reserved = name in self._callers
        # Nobody waits then who could have the place, save while others are being let in.
        if not reserved and self._may_run(caller) and not self._letting_in:
            self._let_in(name, caller)
            return succeed(None)
        place: Deferred[None] = Deferred(lambda _: self._give_up(name))
        self._callers[name] = caller
        self._waiting.setdefault(caller, {})[name] = place
        if reserved:
            self.go_on()
        return place

    def _let_in(self, name: str, caller: str) -> None:
        self._inside[name] = caller
        self._taken[caller] += 1

    def _give_up(self, name: str) -> None:
        self._take_out(name)

    def _take_out(self, name: str) -> Deferred[None] | None:
        """Remove `name` from the waiters."""
        caller = self._callers.pop(name)
        own = self._waiting[caller]
        place = own.pop(name)
        if not own:
            del self._waiting[caller]
        return place

    def rest(self, name: str) -> None:
        """Give back the slot of `name`, which counts for its caller until `leave`."""
        self._resting[name] = self._inside.pop(name)
        self.go_on()

    def leave(self, name: str) -> None:
        """Give back the slot or the turn of `name`, if it has one."""
        if name in self._callers:
            self._take_out(name)
            return
        held = self._inside if name in self._inside else self._resting
        if name not in held:
            return
        caller = held.pop(name)
        self._taken[caller] -= 1
        if not self._taken[caller]:
            del self._taken[caller]
        self.go_on()

    def go_on(self) -> None:
        """Give free slots to waiters.

        Some leave as soon as they have a slot. Their successors get it in this loop, not in a
        nested call: a thousand nested calls would exceed Python's recursion limit.
        """
        if self._letting_in:
            return
        self._letting_in = True
        try:
            self._let_all_in()
        finally:
            self._letting_in = False

    def _let_all_in(self) -> None:
        while following := self._following():
            caller, name, place = following
            self._take_out(name)
            if caller in self._waiting:  # the others' turns come first
                self._waiting[caller] = self._waiting.pop(caller)
            self._let_in(name, caller)
            place.callback(None)

    def _following(self) -> tuple[str, str, Deferred[None]] | None:
        """Return the next waiter that is ready, or None."""
        for caller, own in self._waiting.items():
            if self._may_run(caller):
                for name, place in own.items():
                    if place is not None:
                        return caller, name, place
        return None

    def holders(self) -> list[tuple[str, bool]]:
        """Return all holders of slots, and for each whether it keeps a waiter out.

        A holder does if no other slot is free, or none of its caller's.
        """
        full = len(self._inside) >= self.places
        ready = [one for one, own in self._waiting.items() if any(own.values())]
        anybody = full and any(self._taken[caller] < self._own_running for caller in ready)
        kept_out = {one for one in ready if self._taken[one] >= self._own_running}
        return [(name, anybody or caller in kept_out) for name, caller in self._inside.items()]

    def place(self, name: str) -> int | None:
        """Return the number of waiters before `name`, or None if it does not wait.

        Callers that come later have their turns, too, and callers at their limit are passed over,
        so the number may change in both directions.
        """
        if name not in self._callers:
            return None
        caller = self._callers[name]
        rounds = before = list(self._waiting[caller]).index(name)
        first = 1  # whose turn is earlier takes one more
        for other, waiting in self._waiting.items():
            if other == caller:
                first = 0
            else:
                before += min(len(waiting), rounds + first)
        return before
