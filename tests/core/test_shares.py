"""`core.shares`: parts of callers, the room of the others, and their list in docs/security.md."""

from __future__ import annotations

import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import tawebeval
from tawebeval.core.shares import Share, SharedResource
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import CallerQuotaExceeded, ServerBusy

PACKAGE = Path(tawebeval.__file__).parent


class ShareTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.share = Share(SharedResource.UPLOADS, 100, 40, "your part is used up", "full", 7)

    def refuse(self, error: type[ServerBusy], amount: int, caller: str) -> None:
        """Check that a caller cannot take an amount, and that nothing is counted."""
        used = self.share.used
        with self.assertRaises(ServerBusy) as caught:
            self.share.take_within_part(amount, caller)
        self.assertIs(type(caught.exception), error)
        self.assertEqual((caught.exception.retry_after, self.share.used), (7, used))

    def test_greedy_caller_gets_its_part_and_others_get_theirs(self) -> None:
        self.share.take_within_part(40, "alice")
        self.assertTrue(self.share.is_part_used_up("alice"))
        self.refuse(CallerQuotaExceeded, 1, "alice")
        self.share.take_within_part(40, "bob")
        self.share.take_within_part(20, "carol")
        self.refuse(ServerBusy, 1, "carol")
        self.assertTrue(self.share.is_used_up)
        self.share.give_back(1, "alice")
        self.share.take_within_part(1, "carol")
        self.assertEqual(self.share.list_callers(), ["bob", "alice", "carol"])

    def test_what_a_caller_has_beyond_its_part_is_not_taken_from_others(self) -> None:
        self.share.take(90, "alice")
        self.refuse(CallerQuotaExceeded, 1, "alice")
        self.share.take_within_part(40, "bob")
        self.share.take_within_part(20, "carol")
        self.refuse(ServerBusy, 1, "carol")

    def test_check_reserves_nothing(self) -> None:
        for _ in range(3):
            self.share.check(40, "alice")
        self.assertEqual(self.share.used, 0)

    def test_clients_without_tokens_may_take_all(self) -> None:
        self.share.take_within_part(100, ANONYMOUS_CALLER)
        self.refuse(ServerBusy, 1, ANONYMOUS_CALLER)

    def test_caller_is_not_blamed_for_others_if_its_part_is_all(self) -> None:
        self.share.part = None
        self.share.take_within_part(100, "alice")
        self.refuse(ServerBusy, 1, "alice")

    def test_room_is_made_by_what_a_caller_can_spare_then_by_what_all_can(self) -> None:
        asked: list[tuple[int, str | None]] = []

        def make_room(amount: int, caller: str | None) -> bool:
            asked.append((amount, caller))
            if caller == "bob":
                return False
            self.share.give_back(amount, "alice")
            return True

        self.share.make_room = make_room
        self.share.take_within_part(40, "alice")
        self.share.take_within_part(3, "alice")
        self.share.take_within_part(40, "bob")
        self.refuse(CallerQuotaExceeded, 2, "bob")
        self.share.take_within_part(25, "carol")
        self.assertEqual(asked, [(3, "alice"), (2, "bob"), (5, None)])
        self.assertEqual(dict(self.share.used_by_caller), {"alice": 35, "bob": 40, "carol": 25})

    def test_callers_that_have_nothing_are_not_kept(self) -> None:
        self.share.take(7, "alice")
        self.share.give_back(7, "alice")
        self.assertEqual((self.share.used, self.share.list_callers()), (0, []))

    def test_caller_cannot_give_back_what_it_has_not_taken(self) -> None:
        self.share.take(7, "alice")
        for amount, caller in ((8, "alice"), (1, "bob"), (-1, "alice")):
            self.assertRaises(AssertionError, self.share.give_back, amount, caller)


class ListTests(SynchronousTestCase):
    def test_each_share_is_made_in_one_place_and_documented_with_its_test(self) -> None:
        made = [
            name
            for path in PACKAGE.rglob("*.py")
            for name in re.findall(r"\bShare\(\s*SharedResource\.(\w+)", path.read_text())
        ]
        self.assertEqual(sorted(made), sorted(SharedResource.__members__))
        page = (PACKAGE.parent / "docs/security.md").read_text()
        budgets = page.partition("## Budgets\n")[2].partition("\n## ")[0]
        rows = dict(re.findall(r"^\| ([^|]+?) \|.*\| `(test_\w+)`[^|]* \|$", budgets, re.MULTILINE))
        tests = {path.stem for path in (PACKAGE.parent / "tests").rglob("test_*.py")}
        for resource in SharedResource:
            self.assertIn(rows.get(resource.value), tests, resource.value)
