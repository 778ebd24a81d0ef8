"""`core.counters`: histograms and counters of evaluations."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.counters import (
    LONG_DURATION_BOUNDS,
    SHORT_DURATION_BOUNDS,
    EvaluationCounters,
    Histogram,
)
from tawebeval.core.states import TRANSITIONS, EvaluationState


class HistogramTests(SynchronousTestCase):
    @given(
        st.lists(st.integers(-5, 5), unique=True, max_size=5).map(sorted),
        st.lists(st.integers(-7, 7)),
    )
    def test_bucket_counts_values_up_to_its_bound(
        self, bounds: list[int], values: list[int]
    ) -> None:
        histogram = Histogram(bounds)
        for value in values:
            histogram.record_value(value)
        expected = [(bound, sum(value <= bound for value in values)) for bound in bounds]
        self.assertEqual(list(histogram.list_buckets()), [*expected, (float("inf"), len(values))])
        self.assertEqual(histogram.sum, sum(values))

    def test_bounds_ascend(self) -> None:
        for bounds in (LONG_DURATION_BOUNDS, SHORT_DURATION_BOUNDS):
            self.assertEqual(sorted(set(bounds)), list(bounds))


@st.composite
def lives(draw: st.DrawFn) -> list[EvaluationState]:
    """Draw the states of an evaluation so far, by legal transitions."""
    life = [EvaluationState.QUEUED]
    while TRANSITIONS[life[-1]] and draw(st.booleans()):
        life.append(draw(st.sampled_from(sorted(TRANSITIONS[life[-1]], key=lambda one: one.value))))
    return life


class EvaluationTests(SynchronousTestCase):
    @given(st.lists(lives()))
    def test_each_evaluation_counts_in_its_state_and_stages(
        self, all_lives: list[list[EvaluationState]]
    ) -> None:
        tally = EvaluationCounters()
        for life in all_lives:
            tally.record_accepted_evaluation()
            for before, after in pairwise(life):
                tally.record_transition(
                    before, after, 2.0, "exit" if after is EvaluationState.FAILED else ""
                )
        self.assertEqual(tally.accepted_count, len(all_lives))
        for state in EvaluationState:
            there = sum(life[-1] is state for life in all_lives)
            been = sum(life.count(state) for life in all_lives)
            self.assertEqual(tally.counts_by_state[state], there)
            if state in (
                EvaluationState.FINISHED,
                EvaluationState.FAILED,
                EvaluationState.CANCELLED,
            ):
                reason = "exit" if state is EvaluationState.FAILED else ""
                self.assertEqual(tally.ended_counts_by_state_and_reason[state, reason], been)
            elif not state.has_ended:
                *_, (_, left) = tally.durations_by_state[state].list_buckets()
                self.assertEqual(left, been - there)
                self.assertEqual(tally.durations_by_state[state].sum, 2.0 * left)
        endings = sum(any(state.has_ended for state in life) for life in all_lives)
        self.assertEqual(tally.ended_counts_by_state_and_reason.total(), endings)

    def test_latest_end_sets_or_clears_the_fault_of_this_machine(self) -> None:
        tally = EvaluationCounters()
        self.assertIsNone(tally.latest_fault)
        tally.set_latest_fault("no sandbox", 5.0)
        self.assertEqual(tally.latest_fault, (5.0, "no sandbox"))
        tally.set_latest_fault(None, 6.0)
        self.assertIsNone(tally.latest_fault)
