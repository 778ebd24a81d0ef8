"""`core.budget`: one bound for all rings, and a fair part of it for each."""

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
from tawebeval.core.budget import Budget, Share

# Of the total a quarter is the reserve, and the rest is free for all: so much.
# Of the total a quarter, rounded down, is the reserve; the rest is common.
TOTAL, COMMON, EACH, READ = 1333, 1000, 300, 10
RUNNING, RESERVED = 2, 111  # who fill rings at once, and what of the reserve each may have


class Turns:
    """Calls that are to be made later."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def later(self, call: Callable[[], None]) -> None:
        """Make a call in the next turn."""
        self.calls.append(call)

    def turn(self) -> int:
        """Make those that wait now; return how many they were."""
        calls, self.calls = self.calls, []
        for call in calls:
            call()
        return len(calls)

    def settle(self) -> None:
        """Make all, also those that follow from them."""
        while self.turn():
            pass


class BudgetTestCase(SynchronousTestCase):
    """A budget, of which `told` are the shares that were told of room, in order.

    So many rings are filled at once that none has a byte of the reserve.
    """

    running = 1000

    def setUp(self) -> None:
        self.patch(module, "_TURN", READ)
        self.turns = Turns()
        self.budget = Budget(TOTAL, EACH, self.running, self.turns.later)
        self.told: list[Share] = []

    def enter(
        self, size: int = 0, on_full: Callable[[], None] = lambda: None, reads: int = 0
    ) -> Share:
        """Return a new share that holds `size` bytes, and `reads` when it is told of room."""

        def on_room() -> None:
            self.told.append(share)
            if reads:
                share.resize(reads)

        share = self.budget.add_share(on_full=on_full, on_room=on_room)
        share.resize(size)
        return share


class LimitTests(BudgetTestCase):
    """When a ring is full."""

    def test_each(self) -> None:
        """While there is enough a ring may hold so much, and not one byte more."""
        share = self.enter(EACH - 1)
        self.assertFalse(share.full)
        share.resize(EACH)
        self.assertTrue(share.full)
        self.assertEqual(self.budget.used, EACH)

    def test_as_much_as_is_free(self) -> None:
        """Where less is free than that, a ring may hold as much as is free."""
        first, second, third = self.enter(EACH), self.enter(EACH), self.enter(199)
        self.assertEqual(third.limit, COMMON - 2 * EACH - 199)
        self.assertFalse(third.full)
        third.resize(200)
        self.assertTrue(third.full)
        self.assertEqual(self.budget.used, 800)
        self.assertFalse(self.enter(99).full)
        self.assertEqual([first.full, second.full], [True, True])

    def test_fair(self) -> None:
        """Rings that want all they can get have equal parts, and as much is left for one more."""
        shares = [self.enter() for _ in range(9)]
        while not all(share.full for share in shares):
            for share in shares:
                if not share.full:
                    share.resize(share.size + 1)
        sizes = {share.size for share in shares} | {COMMON - self.budget.used}
        self.assertLessEqual(max(sizes) - min(sizes), len(shares))

    def test_empty(self) -> None:
        """An empty ring is never full, and one with a byte is, when everything is used."""
        self.enter(COMMON + 50)
        self.assertTrue(self.budget.is_spent)
        share = self.enter()
        self.assertFalse(share.full)
        share.resize(1)
        self.assertTrue(share.full)

    def test_spent(self) -> None:
        """Nothing but the reserve is left at three quarters of the total, not one byte before."""
        share = self.enter(COMMON - 1)
        self.assertFalse(self.budget.is_spent)
        share.resize(COMMON)
        self.assertTrue(self.budget.is_spent)

    def test_kept(self) -> None:
        """What is kept beside a ring counts for all and does not fill it; giving it back helps."""
        first, second = self.enter(1), self.enter(200)
        first.keep(COMMON - 250)
        self.assertEqual((first.full, self.budget.used), (False, COMMON - 49))
        self.assertEqual(self.budget.limit, 49)
        second.resize(200)
        self.assertTrue(second.full)
        first.keep(10)
        self.turns.settle()
        self.assertEqual(self.told, [second])
        first.release()
        self.assertEqual(self.budget.used, 200)

    def test_unbound(self) -> None:
        """One that is not bound any more is never full, but counts."""
        share = self.enter(EACH)
        share.unbind()
        self.assertEqual((share.full, self.told), (False, [share]))
        share.resize(COMMON)
        self.assertEqual((share.full, self.budget.used), (False, COMMON))
        self.turns.settle()
        self.assertEqual(self.told, [share])

    def test_filled(self) -> None:
        """It is told once that it is full, and may make room at once; when it has left, not."""
        sizes: list[int] = []

        def make_room() -> None:
            sizes.append(share.size)
            if len(sizes) == 2:
                share.resize(5)

        share = self.enter(on_full=make_room)
        for size in (EACH - 1, EACH, EACH + 1, 1, EACH + 2):
            share.resize(size)
        self.assertEqual(sizes, [EACH, EACH + 2])
        self.assertEqual((share.full, share.size, self.told), (False, 5, [share, share]))
        share.release()
        self.assertEqual(sizes, [EACH, EACH + 2])

    def test_left(self) -> None:
        """One that has left holds nothing, is told nothing, and cannot come back."""
        share, other = self.enter(COMMON), self.enter(1)
        share.release()
        self.assertEqual((self.budget.used, share.full), (1, False))
        share.resize(50)
        self.assertEqual(self.budget.used, 1)
        share.release()
        self.assertEqual(self.budget.used, 1)
        self.turns.settle()
        self.assertEqual(self.told, [other])


class OwnTests(BudgetTestCase):
    """What the rings of one caller hold."""

    own = 500

    def setUp(self) -> None:
        super().setUp()
        self.relieved = 0
        self.start(self.own)

    def start(self, own: int) -> None:
        """Begin with a budget of such shares."""
        self.budget = Budget(TOTAL, EACH, self.running, self.turns.later, own)

    def count(self) -> None:
        """Count how often somebody was relieved."""
        self.relieved += 1

    def test_share(self) -> None:
        """All rings of a caller count together, and nobody else's; not one byte before."""
        first, second = self.budget.add_share("alice"), self.budget.add_share("alice")
        other = self.budget.add_share("bob")
        first.resize(200)
        second.resize(299)
        other.resize(499)
        self.assertFalse(self.budget.share_used("alice"))
        second.resize(300)
        self.assertTrue(self.budget.share_used("alice"))
        self.assertFalse(self.budget.share_used("bob"))
        self.assertFalse(self.budget.share_used("carol"))
        first.release()
        self.assertFalse(self.budget.share_used("alice"))

    def test_relieved(self) -> None:
        """That a caller has less than its share again is told in another turn, once."""
        share = self.budget.add_share("alice")
        share.resize(500)
        for _ in range(2):
            self.budget.call_on_relief("alice", self.count)
        for size in (600, 500):
            share.resize(size)
        self.budget.add_share("bob").release()
        self.turns.settle()
        self.assertEqual(self.relieved, 0)
        share.resize(499)
        self.assertEqual(self.relieved, 0)
        for size in (498, 500, 499):
            share.resize(size)
        self.turns.settle()
        self.assertEqual(self.relieved, 1)

    def test_nobody_in_particular(self) -> None:
        """Without callers there are no shares, nor with 0, or as much as there is for all."""
        self.budget.add_share().resize(COMMON)
        self.assertFalse(self.budget.share_used(""))
        for own, used in ((0, False), (COMMON, False), (COMMON - 1, True)):
            self.start(own)
            self.budget.add_share("alice").resize(COMMON)
            self.assertIs(self.budget.share_used("alice"), used)

    def test_nothing_left(self) -> None:
        """Of callers who hold nothing nothing is left."""
        share = self.budget.add_share("alice")
        share.resize(7)
        share.release()
        self.assertFalse(self.budget._held)


class ReserveTests(BudgetTestCase):
    """What each may have however much the others hold."""

    running = RUNNING

    def fill(self, share: Share) -> int:
        """Let a ring take what it may, byte by byte; return how much that is."""
        while not share.full:
            share.resize(share.size + 1)
        return share.size

    def test_all_have_their_part(self) -> None:
        """As many as are filled at once each have their part, and one part is left over."""
        self.enter(COMMON).unbind()
        shares = [self.enter() for _ in range(RUNNING)]
        self.assertEqual([self.fill(share) for share in shares], [RESERVED] * RUNNING)
        self.assertEqual(TOTAL - self.budget.used, RESERVED)
        self.assertTrue(self.budget.is_spent)

    def test_not_beside_what_is_common(self) -> None:
        """While more than that is free for all the reserve changes nothing."""
        self.assertEqual(self.fill(self.enter()), EACH)
        self.assertEqual(self.fill(self.enter()), EACH)
        self.assertEqual(self.fill(self.enter()), 200)
        self.assertEqual(self.fill(self.enter()), RESERVED)

    def test_never_more_than_each(self) -> None:
        """Where few are filled at once the part of each is what one may have, and no more."""
        self.budget = Budget(TOTAL, 100, 1, self.turns.later)
        self.enter(COMMON).unbind()
        self.assertEqual(self.fill(self.enter()), 100)

    def test_others_have_filled_it(self) -> None:
        """What is left of the reserve is divided where more than were expected hold some."""
        self.enter(TOTAL - 100).unbind()
        self.assertEqual([self.fill(self.enter()) for _ in range(2)], [50, 25])


class RoomTests(BudgetTestCase):
    """Who is told that there is room."""

    def test_own(self) -> None:
        """A ring that makes room itself is told at once; with too little it is not."""
        share = self.enter(EACH + 50)
        share.resize(EACH)
        self.assertEqual(self.told, [])
        share.resize(EACH - 1)
        self.assertEqual((self.told, share.full), ([share], False))
        share.resize(EACH - 2)
        self.turns.settle()
        self.assertEqual(self.told, [share])

    def test_others(self) -> None:
        """When others make room it is told in another turn, if that is enough for it."""
        large, small = self.enter(800), self.enter(150)
        self.assertTrue(small.full)
        large.resize(701)
        self.assertEqual(self.turns.calls, [])
        large.resize(699)
        self.assertEqual(self.told, [])
        self.turns.settle()
        self.assertEqual((self.told, small.full), ([small], False))
        self.assertTrue(large.full)

    def test_smallest_first(self) -> None:
        """Who holds least is told first, and those for whom there is not enough are not."""
        large = self.enter(900)
        shares = [self.enter(size) for size in (70, 40, 60, 50)]
        self.assertTrue(all(share.full for share in shares))
        large.resize(900 - 120 - 61)
        self.turns.settle()
        self.assertEqual([share.size for share in self.told], [40, 50, 60])
        self.assertTrue(shares[0].full)

    def test_taken_again(self) -> None:
        """Where the room is taken before its turn comes nobody is told."""
        large, small = self.enter(900), self.enter(50)
        self.assertTrue(small.full)
        large.resize(500)
        large.resize(900)
        self.turns.settle()
        self.assertEqual((self.told, small.full), ([], True))

    def test_a_few_at_a_time(self) -> None:
        """No more are told in a turn than can read into what is free, in the end all."""
        large = self.enter(COMMON - 1)
        shares = [self.enter(1) for _ in range(20)]
        self.assertTrue(all(share.full for share in shares))
        large.resize(COMMON - 20 - 45)
        large.resize(COMMON - 20 - 46)
        counts = []
        while self.turns.turn():
            counts.append(len(self.told))
        self.assertEqual(counts, [5, 10, 15, 20])
        self.assertEqual(set(self.told), set(shares))

    def test_they_read(self) -> None:
        """Those who are told and read leave less for those after them, who then wait on."""
        large = self.enter(COMMON - 1)
        for _ in range(20):
            self.enter(1, reads=READ)
        large.resize(COMMON - 20 - 45)
        self.turns.settle()
        self.assertEqual(len(self.told), 5)
        self.assertLessEqual(self.budget.used, COMMON)


class Machine(RuleBasedStateMachine):
    """Rings of all sizes, of which some read, some are read, some come and some go."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns()
        self.budget = Budget(TOTAL, EACH, RUNNING, self.turns.later)
        self.shares: list[Share] = []
        self.reading: set[Share] = set()  # as who drives them knows from `full` and `room`

    @rule()
    def enter(self) -> None:
        share = self.budget.add_share(on_room=lambda: self.reading.add(share))
        self.shares.append(share)
        self.reading.add(share)

    def note(self, share: Share) -> None:
        """Do as an intake does after each change of its own."""
        if share.full:
            self.reading.discard(share)

    @precondition(lambda self: self.reading)
    @rule(number=st.integers(0, 99), size=st.integers(1, READ))
    def read(self, number: int, size: int) -> None:
        shares = [share for share in self.shares if share in self.reading]
        share = shares[number % len(shares)]
        share.resize(share.size + size)
        self.note(share)

    @precondition(lambda self: self.shares)
    @rule(number=st.integers(0, 99), part=st.floats(0, 1))
    def be_read(self, number: int, part: float) -> None:
        share = self.shares[number % len(self.shares)]
        share.resize(int(share.size * part))
        self.note(share)

    @precondition(lambda self: self.shares)
    @rule(number=st.integers(0, 99), size=st.integers(0, 4 * READ))
    def end(self, number: int, size: int) -> None:
        """Let its process end, which leaves something in its pipe, and let it be forgotten."""
        share = self.shares.pop(number % len(self.shares))
        share.unbind()
        share.resize(share.size + size)
        assert not share.full
        assert share in self.reading
        share.release()
        self.reading.discard(share)

    @rule()
    def turn(self) -> None:
        self.turns.turn()

    @invariant()
    def bounded(self) -> None:
        """Count what there is, which is over the total by one read for each at most."""
        assert self.budget.used == sum(share.size for share in self.shares)
        assert self.budget.used <= TOTAL + READ * len(self.shares)
        assert all(share.size < EACH + READ for share in self.shares)

    @invariant()
    def nobody_is_passed_over(self) -> None:
        """Let only those not read who have no room, or are about to be told; the empty do."""
        for share in self.shares:
            assert share.full == (share not in self.reading)
            assert share.size or share in self.reading
            if share.full and not self.turns.calls:
                assert share.size >= self.budget.limit

    @invariant()
    def the_reserve_is_there(self) -> None:
        """Let nobody wait with less than its part of the reserve, as long as that is free."""
        for share in self.shares:
            if share.size < RESERVED and self.budget.used <= TOTAL - RESERVED:
                assert not share.full or self.turns.calls

    def teardown(self) -> None:
        """When all is read everybody reads."""
        for share in self.shares:
            share.resize(0)
        self.turns.settle()
        assert self.reading == set(self.shares)
        assert self.budget.used == 0


class InterleavingTests(BudgetTestCase):
    """What holds in any order."""

    def test_any_order(self) -> None:
        """The bound holds, and whoever has room is told of it."""
        run_state_machine_as_test(Machine, settings=settings(stateful_step_count=60))
