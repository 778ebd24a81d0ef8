"""`core.budgets`: quotas of callers, the room of the others, and retries of refused clients."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

import tawebeval
from tawebeval.core.budgets import Budget, RetrySchedule, SharedResource
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import CallerQuotaExceeded, ServerBusy

PACKAGE = Path(tawebeval.__file__).parent


class ShareTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.budget = Budget(SharedResource.UPLOADS, 100, 40, "your quota is used up", "full", 7)

    def refuse(self, error: type[ServerBusy], amount: int, caller: str) -> None:
        """Check that a caller cannot take an amount, and that nothing is counted."""
        used = self.budget.used
        with self.assertRaises(ServerBusy) as caught:
            self.budget.take_within_quota(amount, caller)
        self.assertIs(type(caught.exception), error)
        self.assertEqual((caught.exception.retry_after, self.budget.used), (7, used))

    def test_caller_may_take_its_quota_and_other_callers_the_rest(self) -> None:
        self.budget.take_within_quota(40, "alice")
        self.assertTrue(self.budget.is_quota_used_up("alice"))
        self.refuse(CallerQuotaExceeded, 1, "alice")
        self.budget.take_within_quota(40, "bob")
        self.budget.take_within_quota(20, "carol")
        self.refuse(ServerBusy, 1, "carol")
        self.assertTrue(self.budget.is_used_up)
        self.budget.give_back(1, "alice")
        self.budget.take_within_quota(1, "carol")
        self.assertEqual(self.budget.list_callers(), ["bob", "alice", "carol"])

    def test_caller_over_its_quota_leaves_other_callers_their_quota(self) -> None:
        self.budget.record_usage(90, "alice")
        self.refuse(CallerQuotaExceeded, 1, "alice")
        self.budget.take_within_quota(40, "bob")
        self.budget.take_within_quota(20, "carol")
        self.refuse(ServerBusy, 1, "carol")

    def test_check_reserves_nothing(self) -> None:
        for _ in range(3):
            self.budget.check_amount(40, "alice")
        self.assertEqual(self.budget.used, 0)

    def test_anonymous_caller_has_no_quota(self) -> None:
        self.budget.take_within_quota(100, ANONYMOUS_CALLER)
        self.refuse(ServerBusy, 1, ANONYMOUS_CALLER)

    def test_without_a_quota_a_full_budget_raises_server_busy(self) -> None:
        self.budget.caller_quota = None
        self.budget.take_within_quota(100, "alice")
        self.refuse(ServerBusy, 1, "alice")

    def test_make_room_is_called_for_the_caller_first_and_then_for_all(self) -> None:
        asked: list[tuple[int, str | None]] = []

        def make_room(amount: int, caller: str | None) -> bool:
            asked.append((amount, caller))
            if caller == "bob":
                return False
            self.budget.give_back(amount, "alice")
            return True

        self.budget.make_room = make_room
        self.budget.take_within_quota(40, "alice")
        self.budget.take_within_quota(3, "alice")
        self.budget.take_within_quota(40, "bob")
        self.refuse(CallerQuotaExceeded, 2, "bob")
        self.budget.take_within_quota(25, "carol")
        self.assertEqual(asked, [(3, "alice"), (2, "bob"), (5, None)])
        self.assertEqual(dict(self.budget.used_by_caller), {"alice": 35, "bob": 40, "carol": 25})

    def test_caller_that_has_given_back_everything_is_not_listed(self) -> None:
        self.budget.record_usage(7, "alice")
        self.budget.give_back(7, "alice")
        self.assertEqual((self.budget.used, self.budget.list_callers()), (0, []))

    def test_caller_cannot_give_back_what_it_has_not_taken(self) -> None:
        self.budget.record_usage(7, "alice")
        for amount, caller in ((8, "alice"), (1, "bob"), (-1, "alice")):
            self.assertRaises(AssertionError, self.budget.give_back, amount, caller)


class ListTests(SynchronousTestCase):
    def test_each_budget_is_made_in_one_place_and_documented_with_its_test(self) -> None:
        made = [
            name
            for path in PACKAGE.rglob("*.py")
            for name in re.findall(r"\bBudget\(\s*SharedResource\.(\w+)", path.read_text())
        ]
        self.assertEqual(sorted(made), sorted(SharedResource.__members__))
        page = (PACKAGE.parent / "docs/security.md").read_text()
        budgets = page.partition("## Budgets\n")[2].partition("\n## ")[0]
        rows = dict(re.findall(r"^\| ([^|]+?) \|.*\| `(test_\w+)`[^|]* \|$", budgets, re.MULTILINE))
        tests = {path.stem for path in (PACKAGE.parent / "tests").rglob("test_*.py")}
        for resource in SharedResource:
            self.assertIn(rows.get(resource.value), tests, resource.value)


def measured(interval: float, slots: int = 4) -> RetrySchedule:
    """Return a schedule after ends at this interval; the last was at 0."""
    schedule = RetrySchedule(slots)
    for number in range(-200, 1):
        schedule.record_evaluation_end(number * interval, are_all_slots_used=True)
    return schedule


class IntervalTests(SynchronousTestCase):
    def test_retry_interval_approaches_the_mean_time_between_recent_ends(self) -> None:
        self.assertEqual(RetrySchedule(4).interval, 2.5)
        schedule = measured(0.5)
        self.assertAlmostEqual(schedule.interval, 0.5, 2)
        for number in range(1, 300):
            schedule.record_evaluation_end(number * 3, are_all_slots_used=True)
        self.assertAlmostEqual(schedule.interval, 3, 1)

    def test_interval_averages_evaluations_that_end_together(self) -> None:
        schedule = RetrySchedule(100)
        schedule.record_all_slots_used(0)
        for batch in range(1, 10):
            for number in range(100):
                schedule.record_evaluation_end(batch * 60 + number / 100, are_all_slots_used=True)
                self.assertLess(abs(schedule.interval - 0.6), 0.4)

    def test_time_with_a_free_slot_is_not_in_the_interval(self) -> None:
        schedule = measured(0.5)
        schedule.record_evaluation_end(0.5, are_all_slots_used=False)
        schedule.record_all_slots_used(9999)
        schedule.record_all_slots_used(9999.2)
        schedule.record_evaluation_end(9999.5, are_all_slots_used=True)
        self.assertAlmostEqual(schedule.interval, 0.5, 2)

    def test_retry_time_grows_while_no_evaluation_ends(self) -> None:
        schedule = measured(0.5)
        self.assertEqual([schedule.schedule_retry(now) for now in (0, 0.5)], [1, 1])
        self.assertGreater(schedule.schedule_retry(900), 20)


class PlanTests(SynchronousTestCase):
    @given(
        st.integers(1, 1000),
        st.lists(
            st.tuples(
                st.sampled_from(["end", "last end", "waiter", "refuse", "refuse a caller"]),
                st.floats(0, 1e5),
                st.integers(0, 10_000),
            )
        ),
    )
    def test_retry_after_is_always_1_to_120_whole_seconds(
        self, slots: int, steps: list[tuple[str, float, int]]
    ) -> None:
        schedule, now = RetrySchedule(slots), 0.0
        for step, seconds, count in steps:
            now += seconds
            if step.endswith("end"):
                schedule.record_evaluation_end(now, are_all_slots_used=step == "end")
            elif step == "waiter":
                schedule.record_all_slots_used(now)
            else:
                caller = "alice" if step == "refuse a caller" else None
                self.assertIn(schedule.schedule_retry(now, caller, count), range(1, 121))

    def test_refused_clients_come_back_one_by_one(self) -> None:
        schedule = measured(0.5)
        found = Counter(schedule.schedule_retry(0) for _ in range(200))
        self.assertLessEqual(set(range(1, 100)), set(found))
        self.assertLessEqual(max(found), 101)
        self.assertLessEqual(max(found.values()), 3)
        schedule.record_evaluation_end(0, are_all_slots_used=False)
        self.assertEqual(schedule.schedule_retry(300), 1)

    def test_retries_later_than_two_minutes_are_spread_over_the_second_minute(
        self,
    ) -> None:
        schedule = measured(1)
        found = Counter(schedule.schedule_retry(0) for _ in range(120 + 600))
        for second in range(62, 120):
            self.assertLessEqual(abs(found[second] - 11), 2, second)
        self.assertLessEqual(max(found.values()), 13)

    def test_retries_of_one_caller_do_not_delay_retries_of_another_caller(self) -> None:
        schedule = measured(0.5)
        own = [schedule.schedule_retry(0, "alice", 10) for _ in range(3)]
        for found, expected in zip(own, (5, 10, 15), strict=True):
            self.assertLessEqual(abs(found - expected), 1)
        self.assertEqual(schedule.schedule_retry(0, "bob", 10), own[0])
        self.assertEqual(schedule.schedule_retry(0), 1)
