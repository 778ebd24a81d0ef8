"""`core.budget`: fair parts of the memory for all rings; bytes of uploads on the disk."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core import budget as module
from tawebeval.core.budget import RingAllocation, RingBudget, SharedUpload, UploadBudget
from tawebeval.errors import CallerQuotaExceeded, ServerBusy

# Of the total a quarter, rounded down, is the reserve; the rest is common.
TOTAL, COMMON, EACH, READ = 1333, 1000, 300, 10
RUNNING, RESERVED = 2, 111  # rings filled at once, and the part of the reserve of each


class Turns:
    """Turns of the reactor, with the calls for the next one."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_later(self, call: Callable[[], None]) -> None:
        """Make a call in the next turn."""
        self.calls.append(call)

    def turn(self) -> int:
        """Make the waiting calls; return their number."""
        calls, self.calls = self.calls, []
        for call in calls:
            call()
        return len(calls)

    def settle(self) -> None:
        """Make all calls, also those that calls add."""
        while self.turn():
            pass


class BudgetTestCase(SynchronousTestCase):
    """A budget; `reopened` has the shares whose `on_room` was called, in order.

    So many rings are filled at once that no ring has a byte of the reserve.
    """

    running = 1000

    def setUp(self) -> None:
        self.patch(module, "TYPICAL_PARSED_BYTES_PER_TURN", READ)
        self.turns = Turns()
        self.budget = RingBudget(TOTAL, EACH, self.running, self.turns.call_later)
        self.reopened: list[RingAllocation] = []

    def allocate_ring(
        self, size: int = 0, on_full: Callable[[], None] = lambda: None, reads: int = 0
    ) -> RingAllocation:
        """Return a new share of `size` bytes, which grows to `reads` bytes when reopened."""

        def on_room() -> None:
            self.reopened.append(share)
            if reads:
                share.set_used_bytes(reads)

        share = self.budget.allocate_ring(on_full=on_full, on_room=on_room)
        share.set_used_bytes(size)
        return share


class LimitTests(BudgetTestCase):
    """Sizes from which a ring is full."""

    def test_each(self) -> None:
        """While enough is free a ring is full at `per_ring` bytes, not one byte before."""
        share = self.allocate_ring(EACH - 1)
        self.assertFalse(share.is_full)
        self.assertEqual(self.budget.full_ring_count, 0)
        share.set_used_bytes(EACH)
        self.assertTrue(share.is_full)
        self.assertEqual(self.budget.full_ring_count, 1)
        self.assertEqual(self.budget.used_bytes, EACH)

    def test_as_much_as_is_free(self) -> None:
        """If less is free than `per_ring`, a ring may hold as much as is free."""
        first, second, third = (
            self.allocate_ring(EACH),
            self.allocate_ring(EACH),
            self.allocate_ring(199),
        )
        self.assertEqual(third.max_ring_bytes, COMMON - 2 * EACH - 199)
        self.assertFalse(third.is_full)
        third.set_used_bytes(200)
        self.assertTrue(third.is_full)
        self.assertEqual(self.budget.used_bytes, 800)
        self.assertFalse(self.allocate_ring(99).is_full)
        self.assertEqual([first.is_full, second.is_full], [True, True])

    def test_fair(self) -> None:
        """Rings that take all they can have equal parts, and one such part is left."""
        shares = [self.allocate_ring() for _ in range(9)]
        while not all(share.is_full for share in shares):
            for share in shares:
                if not share.is_full:
                    share.set_used_bytes(share.used_bytes + 1)
        sizes = {share.used_bytes for share in shares} | {COMMON - self.budget.used_bytes}
        self.assertLessEqual(max(sizes) - min(sizes), len(shares))

    def test_empty(self) -> None:
        """An empty ring is never full, and one with a byte is, when everything is used."""
        self.allocate_ring(COMMON + 50)
        self.assertTrue(self.budget.is_only_reserve_free)
        share = self.allocate_ring()
        self.assertFalse(share.is_full)
        share.set_used_bytes(1)
        self.assertTrue(share.is_full)

    def test_spent(self) -> None:
        """Nothing but the reserve is left at three quarters of the total, not one byte before."""
        share = self.allocate_ring(COMMON - 1)
        self.assertFalse(self.budget.is_only_reserve_free)
        share.set_used_bytes(COMMON)
        self.assertTrue(self.budget.is_only_reserve_free)

    def test_kept(self) -> None:
        """Bytes kept beside a ring count but do not fill the ring; freed ones reopen others."""
        first, second = self.allocate_ring(1), self.allocate_ring(200)
        first.set_bytes_outside_ring(COMMON - 250)
        self.assertEqual((first.is_full, self.budget.used_bytes), (False, COMMON - 49))
        self.assertEqual(self.budget.max_ring_bytes, 49)
        second.set_used_bytes(200)
        self.assertTrue(second.is_full)
        first.set_bytes_outside_ring(10)
        self.turns.settle()
        self.assertEqual(self.reopened, [second])
        first.release()
        self.assertEqual(self.budget.used_bytes, 200)

    def test_unbound(self) -> None:
        """A share without its limit is never full, but counts."""
        share = self.allocate_ring(EACH)
        share.disable_limit()
        self.assertEqual((share.is_full, self.reopened), (False, [share]))
        share.set_used_bytes(COMMON)
        self.assertEqual((share.is_full, self.budget.used_bytes), (False, COMMON))
        self.turns.settle()
        self.assertEqual(self.reopened, [share])

    def test_filled(self) -> None:
        """`on_full` is called once when a ring gets full and may free bytes; `release` drops it."""
        sizes: list[int] = []

        def make_room() -> None:
            sizes.append(share.used_bytes)
            if len(sizes) == 2:
                share.set_used_bytes(5)

        share = self.allocate_ring(on_full=make_room)
        for size in (EACH - 1, EACH, EACH + 1, 1, EACH + 2):
            share.set_used_bytes(size)
        self.assertEqual(sizes, [EACH, EACH + 2])
        self.assertEqual(
            (share.is_full, share.used_bytes, self.reopened), (False, 5, [share, share])
        )
        share.release()
        self.assertEqual(sizes, [EACH, EACH + 2])

    def test_left(self) -> None:
        """A released share holds nothing, calls nothing, and cannot grow again."""
        share, other = self.allocate_ring(COMMON), self.allocate_ring(1)
        share.release()
        self.assertEqual((self.budget.used_bytes, share.is_full), (1, False))
        share.set_used_bytes(50)
        self.assertEqual(self.budget.used_bytes, 1)
        share.release()
        self.assertEqual(self.budget.used_bytes, 1)
        self.turns.settle()
        self.assertEqual(self.reopened, [other])


class HoldTests(BudgetTestCase):
    """Rings that are held back, whatever their sizes are."""

    def test_held(self) -> None:
        """The end of a hold gives room, unless the ring is full."""
        share = self.allocate_ring(1)
        share.set_archive_behind(True)
        self.assertEqual(
            (share.is_archive_behind, share.is_full, self.budget.full_ring_count), (True, False, 0)
        )
        self.assertEqual(self.reopened, [])
        share.set_archive_behind(False)
        share.set_archive_behind(False)
        self.assertEqual((share.is_archive_behind, self.reopened), (False, [share]))

    def test_held_and_full(self) -> None:
        """A ring that has become full meanwhile waits on."""
        share = self.allocate_ring()
        share.set_archive_behind(True)
        share.set_used_bytes(EACH)
        share.set_archive_behind(False)
        self.assertEqual((share.is_full, self.reopened), (True, []))
        share.set_used_bytes(1)
        self.assertEqual(self.reopened, [share])


class CallerShareTests(BudgetTestCase):
    """The share of one caller."""

    own = 500

    def setUp(self) -> None:
        super().setUp()
        self.relieved = 0
        self.start(self.own)

    def start(self, per_caller: int) -> None:
        """Begin with a budget of such shares."""
        self.budget = RingBudget(TOTAL, EACH, self.running, self.turns.call_later, per_caller)

    def count(self) -> None:
        """Count the calls on relief."""
        self.relieved += 1

    def test_share(self) -> None:
        """All rings of a caller count together, and nobody else's; not one byte before."""
        first, second = self.budget.allocate_ring("alice"), self.budget.allocate_ring("alice")
        other = self.budget.allocate_ring("bob")
        first.set_used_bytes(200)
        second.set_used_bytes(299)
        other.set_used_bytes(499)
        self.assertFalse(self.budget.is_caller_quota_exhausted("alice"))
        second.set_used_bytes(300)
        self.assertTrue(self.budget.is_caller_quota_exhausted("alice"))
        self.assertFalse(self.budget.is_caller_quota_exhausted("bob"))
        self.assertFalse(self.budget.is_caller_quota_exhausted("carol"))
        first.release()
        self.assertFalse(self.budget.is_caller_quota_exhausted("alice"))

    def test_relieved(self) -> None:
        """The call on relief is made once, in another turn, when a caller is below its share."""
        share = self.budget.allocate_ring("alice")
        share.set_used_bytes(500)
        for _ in range(2):
            self.budget.call_when_quota_available("alice", self.count)
        for size in (600, 500):
            share.set_used_bytes(size)
        self.budget.allocate_ring("bob").release()
        self.turns.settle()
        self.assertEqual(self.relieved, 0)
        share.set_used_bytes(499)
        self.assertEqual(self.relieved, 0)
        for size in (498, 500, 499):
            share.set_used_bytes(size)
        self.turns.settle()
        self.assertEqual(self.relieved, 1)

    def test_nobody_in_particular(self) -> None:
        """Without callers there are no shares, nor with 0, or as much as there is for all."""
        self.budget.allocate_ring().set_used_bytes(COMMON)
        self.assertFalse(self.budget.is_caller_quota_exhausted(""))
        for own, used in ((0, False), (COMMON, False), (COMMON - 1, True)):
            self.start(own)
            self.budget.allocate_ring("alice").set_used_bytes(COMMON)
            self.assertIs(self.budget.is_caller_quota_exhausted("alice"), used)

    def test_nothing_left(self) -> None:
        """Nothing is stored of callers that hold nothing."""
        share = self.budget.allocate_ring("alice")
        share.set_used_bytes(7)
        share.release()
        self.assertFalse(self.budget.used_bytes_by_caller)


class ReserveTests(BudgetTestCase):
    """The part of the reserve of each ring, whatever the others hold."""

    running = RUNNING

    def fill(self, share: RingAllocation) -> int:
        """Fill a ring byte by byte; return the size at which it is full."""
        while not share.is_full:
            share.set_used_bytes(share.used_bytes + 1)
        return share.used_bytes

    def test_all_have_their_part(self) -> None:
        """As many as are filled at once each have their part, and one part is left over."""
        self.allocate_ring(COMMON).disable_limit()
        shares = [self.allocate_ring() for _ in range(RUNNING)]
        self.assertEqual([self.fill(share) for share in shares], [RESERVED] * RUNNING)
        self.assertEqual(TOTAL - self.budget.used_bytes, RESERVED)
        self.assertTrue(self.budget.is_only_reserve_free)

    def test_not_beside_what_is_common(self) -> None:
        """While more than that is free for all the reserve changes nothing."""
        self.assertEqual(self.fill(self.allocate_ring()), EACH)
        self.assertEqual(self.fill(self.allocate_ring()), EACH)
        self.assertEqual(self.fill(self.allocate_ring()), 200)
        self.assertEqual(self.fill(self.allocate_ring()), RESERVED)

    def test_never_more_than_each(self) -> None:
        """Where few are filled at once the part of each is what one may have, and no more."""
        self.budget = RingBudget(TOTAL, 100, 1, self.turns.call_later)
        self.allocate_ring(COMMON).disable_limit()
        self.assertEqual(self.fill(self.allocate_ring()), 100)

    def test_others_have_filled_it(self) -> None:
        """What is left of the reserve is divided where more than were expected hold some."""
        self.allocate_ring(TOTAL - 100).disable_limit()
        self.assertEqual([self.fill(self.allocate_ring()) for _ in range(2)], [50, 25])


class RoomTests(BudgetTestCase):
    """Shares that are reopened when bytes are freed."""

    def test_own(self) -> None:
        """A ring that frees enough of its own bytes is reopened at once."""
        share = self.allocate_ring(EACH + 50)
        share.set_used_bytes(EACH)
        self.assertEqual(self.reopened, [])
        share.set_used_bytes(EACH - 1)
        self.assertEqual((self.reopened, share.is_full), ([share], False))
        share.set_used_bytes(EACH - 2)
        self.turns.settle()
        self.assertEqual(self.reopened, [share])

    def test_others(self) -> None:
        """Bytes that others free reopen a share in another turn, if they are enough."""
        large, small = self.allocate_ring(800), self.allocate_ring(150)
        self.assertTrue(small.is_full)
        large.set_used_bytes(701)
        self.assertEqual(self.turns.calls, [])
        large.set_used_bytes(699)
        self.assertEqual(self.reopened, [])
        self.turns.settle()
        self.assertEqual((self.reopened, small.is_full), ([small], False))
        self.assertTrue(large.is_full)

    def test_smallest_first(self) -> None:
        """The smallest share is reopened first; shares without enough room are not."""
        large = self.allocate_ring(900)
        shares = [self.allocate_ring(size) for size in (70, 40, 60, 50)]
        self.assertTrue(all(share.is_full for share in shares))
        large.set_used_bytes(900 - 120 - 61)
        self.turns.settle()
        self.assertEqual([share.used_bytes for share in self.reopened], [40, 50, 60])
        self.assertTrue(shares[0].is_full)

    def test_taken_again(self) -> None:
        """No share is reopened if the room is taken before the turn comes."""
        large, small = self.allocate_ring(900), self.allocate_ring(50)
        self.assertTrue(small.is_full)
        large.set_used_bytes(500)
        large.set_used_bytes(900)
        self.turns.settle()
        self.assertEqual((self.reopened, small.is_full), ([], True))

    def test_a_few_at_a_time(self) -> None:
        """A turn reopens only as many shares as can read into the free bytes; in the end all."""
        large = self.allocate_ring(COMMON - 1)
        shares = [self.allocate_ring(1) for _ in range(20)]
        self.assertTrue(all(share.is_full for share in shares))
        large.set_used_bytes(COMMON - 20 - 45)
        large.set_used_bytes(COMMON - 20 - 46)
        counts = []
        while self.turns.turn():
            counts.append(len(self.reopened))
        self.assertEqual(counts, [5, 10, 15, 20])
        self.assertEqual(set(self.reopened), set(shares))

    def test_they_read(self) -> None:
        """Reopened shares that read leave less for the next shares, which then wait on."""
        large = self.allocate_ring(COMMON - 1)
        for _ in range(20):
            self.allocate_ring(1, reads=READ)
        large.set_used_bytes(COMMON - 20 - 45)
        self.turns.settle()
        self.assertEqual(len(self.reopened), 5)
        self.assertLessEqual(self.budget.used_bytes, COMMON)


class Machine(RuleBasedStateMachine):
    """Rings of all sizes that read, are read, come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns()
        self.budget = RingBudget(TOTAL, EACH, RUNNING, self.turns.call_later)
        self.shares: list[RingAllocation] = []
        self.reading: set[RingAllocation] = (
            set()
        )  # as their owner knows from `is_full` and `on_room`

    @rule()
    def enter(self) -> None:
        share = self.budget.allocate_ring(on_room=lambda: self.reading.add(share))
        self.shares.append(share)
        self.reading.add(share)

    def note(self, share: RingAllocation) -> None:
        """Do as an intake does after each change of its own."""
        if share.is_full:
            self.reading.discard(share)

    @precondition(lambda self: self.reading)
    @rule(number=st.integers(0, 99), size=st.integers(1, READ))
    def read(self, number: int, size: int) -> None:
        shares = [share for share in self.shares if share in self.reading]
        share = shares[number % len(shares)]
        share.set_used_bytes(share.used_bytes + size)
        self.note(share)

    @precondition(lambda self: self.shares)
    @rule(number=st.integers(0, 99), part=st.floats(0, 1))
    def be_read(self, number: int, part: float) -> None:
        share = self.shares[number % len(self.shares)]
        share.set_used_bytes(int(share.used_bytes * part))
        self.note(share)

    @precondition(lambda self: self.shares)
    @rule(number=st.integers(0, 99), size=st.integers(0, 4 * READ))
    def end(self, number: int, size: int) -> None:
        """Let its process end, which leaves something in its pipe, and let it be forgotten."""
        share = self.shares.pop(number % len(self.shares))
        share.disable_limit()
        share.set_used_bytes(share.used_bytes + size)
        assert not share.is_full
        assert share in self.reading
        share.release()
        self.reading.discard(share)

    @rule()
    def turn(self) -> None:
        self.turns.turn()

    @invariant()
    def bounded(self) -> None:
        """Count what there is, which is over the total by one read for each at most."""
        assert self.budget.used_bytes == sum(share.used_bytes for share in self.shares)
        assert self.budget.used_bytes <= TOTAL + READ * len(self.shares)
        assert all(share.used_bytes < EACH + READ for share in self.shares)

    @invariant()
    def nobody_is_passed_over(self) -> None:
        """Only shares without room, or about to be reopened, do not read; empty ones read."""
        for share in self.shares:
            assert share.is_full == (share not in self.reading)
            assert share.used_bytes or share in self.reading
            if share.is_full and not self.turns.calls:
                assert share.used_bytes >= self.budget.max_ring_bytes

    @invariant()
    def the_reserve_is_there(self) -> None:
        """Let nobody wait with less than its part of the reserve, as long as that is free."""
        for share in self.shares:
            if share.used_bytes < RESERVED and self.budget.used_bytes <= TOTAL - RESERVED:
                assert not share.is_full or self.turns.calls

    def teardown(self) -> None:
        """When all is read everybody reads."""
        for share in self.shares:
            share.set_used_bytes(0)
        self.turns.settle()
        assert self.reading == set(self.shares)
        assert self.budget.used_bytes == 0


class InterleavingTests(BudgetTestCase):
    """Any order of calls."""

    def test_any_order(self) -> None:
        """The bound holds, and every share with room is reopened."""
        run_state_machine_as_test(Machine, settings=settings(stateful_step_count=60))


class SpoolTests(SynchronousTestCase):
    """`UploadBudget`: bytes of uploads."""

    def test_limit(self) -> None:
        """Bytes up to the limit fit, not one more; the error says when to retry."""
        spool = UploadBudget(100)
        spool.add_stored_bytes(60)
        spool.add_stored_bytes(40)
        error = self.assertRaises(ServerBusy, spool.add_stored_bytes, 1)
        self.assertGreater(error.retry_after, 0)
        self.assertEqual(spool.stored_bytes, 100)
        spool.remove_stored_bytes(10)
        spool.add_stored_bytes(10)

    def test_check(self) -> None:
        """A check of an announced size reserves nothing."""
        spool = UploadBudget(100)
        for _ in range(3):
            spool.check_space(100)
        self.assertEqual(spool.stored_bytes, 0)
        spool.add_stored_bytes(1)
        self.assertRaises(ServerBusy, spool.check_space, 100)
        spool.check_space(99)

    def test_refused(self) -> None:
        """A size that does not fit is not counted."""
        spool = UploadBudget(100)
        self.assertRaises(ServerBusy, spool.add_stored_bytes, 101)
        spool.add_stored_bytes(100)

    def test_kept(self) -> None:
        """What is only kept makes room, as much as is needed, and stays where it is too little."""
        kept = [30, 30, 30]

        def discard(size: int, caller: str | None = None) -> bool:
            if sum(kept) < size:
                return False
            end = spool.stored_bytes - size
            while spool.stored_bytes > end:
                spool.remove_stored_bytes(kept.pop())
            return True

        spool = UploadBudget(100, discard)
        spool.add_stored_bytes(sum(kept))
        spool.add_stored_bytes(10)
        self.assertEqual(len(kept), 3)
        spool.add_stored_bytes(40)
        self.assertEqual((len(kept), spool.stored_bytes), (1, 80))
        self.assertRaises(ServerBusy, spool.add_stored_bytes, 60)
        self.assertEqual((len(kept), spool.stored_bytes), (1, 80))

    def test_shared(self) -> None:
        """Bytes that several hold are given back by the last."""
        spool = UploadBudget(100)
        spool.add_stored_bytes(60)
        share = SharedUpload(spool, 60)
        share.add_reference()
        share.remove_reference()
        self.assertEqual((share.reference_count, spool.stored_bytes), (1, 60))
        share.remove_reference()
        self.assertEqual(spool.stored_bytes, 0)

    def test_one_caller_leaves_room_for_another(self) -> None:
        """Beyond its part a caller makes room by its own kept submissions, or is refused."""
        discarded: list[tuple[int, str | None]] = []

        def discard(size: int, caller: str | None = None) -> bool:
            discarded.append((size, caller))
            return caller == "carol"

        spool = UploadBudget(100, discard, max_bytes_per_caller=40)
        spool.add_stored_bytes(40, "alice")
        self.assertRaises(CallerQuotaExceeded, spool.check_space, 1, "alice")
        self.assertRaises(CallerQuotaExceeded, spool.add_stored_bytes, 1, "alice")
        self.assertEqual(discarded, [(1, "alice")] * 2)
        spool.add_stored_bytes(40, "bob")
        spool.release_share("alice", 10)
        spool.add_stored_bytes(10, "alice")
        spool.add_stored_bytes(3, "carol")
        self.assertEqual((spool.stored_bytes, len(discarded)), (93, 2))
        spool.max_bytes = 1000
        spool.add_stored_bytes(40, "carol")
        self.assertEqual(discarded[2:], [(3, "carol")])
        share = SharedUpload(spool, 40, caller="bob")
        share.remove_reference()
        self.assertEqual(dict(spool.bytes_by_caller), {"alice": 40, "carol": 43})

    def test_clients_without_tokens_have_no_part(self) -> None:
        """Nobody knows whether they are one."""
        spool = UploadBudget(100, max_bytes_per_caller=40)
        spool.add_stored_bytes(100)
        self.assertRaises(ServerBusy, spool.add_stored_bytes, 1)

    def test_crowded(self) -> None:
        """Forms must wait for the disk from 32 MiB in memory on."""
        spool = UploadBudget(100)
        self.assertFalse(spool.is_memory_full)
        spool.unwritten_bytes = 32 * 2**20
        self.assertTrue(spool.is_memory_full)

    def test_too_much_back(self) -> None:
        """More bytes than were added cannot be removed."""
        spool = UploadBudget(100)
        spool.add_stored_bytes(10)
        self.assertRaises(AssertionError, spool.remove_stored_bytes, 11)
        self.assertRaises(AssertionError, spool.remove_stored_bytes, -1)
