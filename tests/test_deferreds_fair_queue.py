"""`deferreds.FairQueue`: slots, and the queue for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import attrs
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.deferreds import FairQueue

STEPS = [*3 * ["acquire", "leave"], "reserve", "suspend", "return", "give up"]


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

    def count_free(self, caller: str) -> tuple[int, int]:
        """Return the slots that a caller may have: of all, and of its share.

        The share of callers without a token is all.
        """
        free = self.running - len(self.holders)
        most = min((caller and self.own_running) or self.running, self.running)
        of_share = most - [*self.holders.values(), *self.suspended.values()].count(caller)
        may_run = free > 0 and of_share > 0
        return (free, of_share) if may_run else (0, 0)

    def is_full(self, caller: str) -> bool:
        """Return whether the queue has no room for one more waiter."""
        return sum(map(len, self.waiting.values())) >= self.queued + self.count_free(caller)[0]

    def is_caller_quota_exhausted(self, caller: str) -> bool:
        """Return whether the caller's share of the queue has no room for one more waiter."""
        most = (caller and self.own_queued) or self.queued
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

    def turn_back(self, name: str) -> None:
        """Give back a slot, and wait without being ready before all who are ready."""
        caller = self.holders.pop(name)
        own = list(self.waiting.setdefault(caller, {}).items())
        before = next((at for at, (_, is_ready) in enumerate(own) if is_ready), len(own))
        own.insert(before, (name, False))
        self.waiting[caller] = dict(own)
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


class QueueTests(SynchronousTestCase):
    """Slots that are taken and given back."""

    def test_each_of_1000_waiters_gets_a_slot_if_each_releases_immediately(self) -> None:
        queue, order = FairQueue(2, 2), list[str]()
        for name in "ab":
            queue.acquire_slot(name)

        def let_in(name: str) -> None:
            order.append(name)
            queue.release_slot(name)
            if name == "0":
                queue.acquire_slot("late").addCallback(lambda _: let_in("late"))

        names = [str(number) for number in range(sys.getrecursionlimit())]
        for name in names:
            queue.acquire_slot(name).addCallback(lambda _, name=name: let_in(name))
        queue.release_slot("a")
        self.assertEqual(order, [*names, "late"])
        self.assertEqual((queue.taken_slot_count, queue.waiter_count), (1, 0))

    def test_suspended_slot_is_free_for_others(self) -> None:
        queue, entered = FairQueue(2, 100, running_per_caller=1), list[str]()
        for name in ("a1", "a2", "b1", "c1"):
            place = queue.acquire_slot(name, name[0])
            place.addCallback(lambda _, name=name: entered.append(name))
        self.assertEqual(entered, ["a1", "b1"])
        queue.release_slot_keep_quota("a1")
        self.assertEqual(entered, ["a1", "b1", "c1"])
        queue.release_slot("b1")
        self.assertEqual(len(entered), 3)
        queue.release_slot("a1")
        self.assertEqual(entered[3:], ["a2"])
        self.assertEqual(queue.taken_slot_count, 2)

    def test_holders_that_return_to_the_queue_keep_their_order(self) -> None:
        queue, entered = FairQueue(1), list[str]()
        returned = set[str]()

        def enter(name: str) -> None:
            if name.startswith("a") and name not in returned:
                returned.add(name)
                queue.return_to_queue(name)
            else:
                entered.append(name)

        def acquire(name: str) -> None:
            queue.acquire_slot(name).addCallback(lambda _: enter(name))

        for name in ("first", "a1", "a2", "a3", "b1", "b2"):
            acquire(name)
        queue.release_slot("first")
        self.assertEqual(entered, ["first", "b1"])
        for name in ("a2", "a1", "a3"):
            acquire(name)
        while (last := entered[-1]) != "b2":
            queue.release_slot(last)
        self.assertEqual(entered[2:], ["a1", "a2", "a3", "b2"])
        self.assertEqual((queue.taken_slot_count, queue.waiter_count), (1, 0))


class FairQueueModelTests(SynchronousTestCase):
    """The queue beside the plain one, which looks at all waiters."""

    @given(
        st.integers(1, 4),
        st.integers(0, 6),
        st.integers(0, 3),
        st.integers(0, 3),
        st.lists(
            st.tuples(
                st.sampled_from(STEPS),
                st.sampled_from(["a", "b", "c", ""]),
                st.integers(0, 99),
            ),
            max_size=80,
        ),
    )
    def test_fair_queue_serves_waiters_as_a_simple_model_does(
        self,
        running: int,
        queued: int,
        own_running: int,
        own_queued: int,
        steps: list[tuple[str, str, int]],
    ) -> None:
        bounds = running, queued, own_running, own_queued
        plain = PlainQueue(*bounds)
        queue = FairQueue(*bounds)
        entered: list[str] = []
        slots: dict[str, Deferred[None]] = {}

        def acquire(name: str, caller: str) -> None:
            plain.acquire(name, caller)
            slots[name] = queue.acquire_slot(name, caller)
            slots[name].addCallbacks(
                lambda _: entered.append(name), lambda failure: failure.trap(CancelledError)
            )

        for number, (step, caller, choice) in enumerate(steps):
            name = f"{caller}{number}"
            waiting = {one: c for c, own in plain.waiting.items() for one in own}
            holding = [*plain.holders, *plain.suspended]
            is_by_holder = step in ("leave", "suspend", "return")
            chosen = [*(holding if is_by_holder else waiting), "nobody"]
            one = chosen[choice % len(chosen)]
            if step == "acquire":
                is_reserved = one in waiting and one not in slots
                acquire(*((one, waiting[one]) if is_reserved else (name, caller)))
            elif step == "reserve":
                plain.reserve(name, caller)
                queue.reserve_queue_place(name, caller)
            elif step == "leave":
                plain.leave(one)
                queue.release_slot(one)
            elif step == "suspend" and one in plain.holders:
                plain.suspend(one)
                queue.release_slot_keep_quota(one)
            elif step == "return" and one in plain.holders:
                plain.turn_back(one)
                del slots[one]
                queue.return_to_queue(one)
            elif step == "give up":
                plain.leave(one)
                if one in slots:
                    slots[one].cancel()
                else:
                    queue.release_slot(one)
            self.assertEqual(entered, plain.entered)
            self.assertEqual(queue.taken_slot_count, len(plain.holders))
            names = [*plain.holders, *(one for own in plain.waiting.values() for one in own)]
            self.assertEqual(
                [queue.find_waiter_position(one) for one in names],
                [plain.find_position(one) for one in names],
            )
            for each in ("a", "b", "c", ""):
                self.assertEqual(
                    (queue.is_full(each), queue.is_caller_quota_exhausted(each)),
                    (plain.is_full(each), plain.is_caller_quota_exhausted(each)),
                )
            self.assertEqual(queue.waiting_caller_count, len(plain.waiting))


def count_calls(call: Callable[..., object], *arguments: Any) -> int:
    """Return how many functions a call calls, those in C too."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call(*arguments)
    finally:
        sys.setprofile(before)
    return count


class GrowthTests(SynchronousTestCase):
    """How many waiters are looked at, by the number of calls."""

    def fill(self, callers: int, waiters: int) -> FairQueue:
        """Return a queue with one slot, and waiters of callers in turn."""
        queue = FairQueue(1, waiters)
        queue.acquire_slot("holder", "holder")
        for number in range(waiters):
            queue.acquire_slot(str(number), str(number % callers))
        return queue

    def test_cost_of_a_release_does_not_grow_with_the_number_of_waiters(self) -> None:
        for share in (1, 8):
            few, many = (
                count_calls(self.fill(count // share, count).release_slot, "holder")
                for count in (64, 4096)
            )
            self.assertLessEqual(many, 2 * few)
