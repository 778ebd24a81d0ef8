"""The reference for `deferreds.FairQueue`: the same order, found by a look at each waiter."""

from __future__ import annotations

from collections import Counter

import attrs


@attrs.define
class PlainQueue:
    """A queue for slots, as `FairQueue` describes it; `entered` has the holders of slots so far."""

    running: int
    queued: int
    own_running: int
    own_queued: int
    entered: list[str] = attrs.field(factory=list)
    holders: dict[str, str] = attrs.field(factory=dict)
    suspended: dict[str, str] = attrs.field(factory=dict)
    # By caller, in the order of turns; of each waiter whether it is ready.
    waiting: dict[str, dict[str, bool]] = attrs.field(factory=dict)

    def count_slots(self, caller: str) -> int:
        return Counter([*self.holders.values(), *self.suspended.values()])[caller]

    def count_free(self, caller: str) -> tuple[int, int]:
        """Return the slots that a caller may have: of all, and of its share."""
        free = self.running - len(self.holders)
        of_share = (self.own_running or self.running) - self.count_slots(caller)
        may_run = free > 0 and of_share > 0
        return (free, of_share) if may_run else (0, 0)

    def is_full(self, caller: str) -> bool:
        """Return whether the queue has no room for one more waiter."""
        return sum(map(len, self.waiting.values())) >= self.queued + self.count_free(caller)[0]

    def is_caller_quota_exhausted(self, caller: str) -> bool:
        """Return whether the caller's share of the queue has no room for one more waiter."""
        most = self.own_queued or self.queued
        free = self.count_free(caller)[1]
        return most < self.queued and len(self.waiting.get(caller, ())) >= most + free

    def reserve(self, name: str, caller: str) -> None:
        """Wait without being ready."""
        self.waiting.setdefault(caller, {})[name] = False

    def acquire(self, name: str, caller: str) -> None:
        """Take a slot, or wait for it."""
        is_new = name not in self.waiting.get(caller, ())
        if is_new and self.count_free(caller)[0]:
            self.enter(name, caller)
        else:
            self.waiting.setdefault(caller, {})[name] = True
            if not is_new:
                self.dispatch()

    def enter(self, name: str, caller: str) -> None:
        """Give a slot to a waiter."""
        self.holders[name] = caller
        self.entered.append(name)

    def leave(self, name: str) -> None:
        """Give back a slot or a turn."""
        for caller, own in list(self.waiting.items()):
            if name in own:
                self.remove(name, caller)
                return
        held = self.holders if name in self.holders else self.suspended
        if held.pop(name, None) is not None:
            self.dispatch()

    def suspend(self, name: str) -> None:
        """Give back a slot but for the share."""
        self.suspended[name] = self.holders.pop(name)
        self.dispatch()

    def remove(self, name: str, caller: str) -> None:
        del self.waiting[caller][name]
        if not self.waiting[caller]:
            del self.waiting[caller]

    def dispatch(self) -> None:
        """Give free slots to waiters."""
        while found := self.find_next():
            name, caller = found
            self.remove(name, caller)
            if caller in self.waiting:
                self.waiting[caller] = self.waiting.pop(caller)
            self.enter(name, caller)

    def find_next(self) -> tuple[str, str] | None:
        for caller, own in self.waiting.items():
            for name, is_ready in own.items():
                if is_ready and self.count_free(caller)[0]:
                    return name, caller
        return None

    def find_position(self, name: str) -> int | None:
        """Return the number of waiters before one, if all of each round get slots in turn."""
        if not any(name in own for own in self.waiting.values()):
            return None
        left = {caller: list(own) for caller, own in self.waiting.items()}
        before = 0
        while True:
            for caller, own in list(left.items()):
                if own.pop(0) == name:
                    return before
                before += 1
                if not own:
                    del left[caller]
