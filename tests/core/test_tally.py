"""`core.tally`: what is counted."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.states import STEPS, State
from tawebeval.core.tally import FOREVER, MOMENTS, EvaluationTally, Histogram


class HistogramTests(SynchronousTestCase):
    """Values by how large they are."""

    @given(
        st.lists(st.integers(-5, 5), unique=True, max_size=5).map(sorted),
        st.lists(st.integers(-7, 7)),
    )
    def test_model(self, bounds: list[int], values: list[int]) -> None:
        """Beside each bound stands how many are not above it; a value on a bound is not."""
        histogram = Histogram(bounds)
        for value in values:
            histogram.observe(value)
        expected = [(bound, sum(value <= bound for value in values)) for bound in bounds]
        self.assertEqual(list(histogram.cumulative()), [*expected, (float("inf"), len(values))])
        self.assertEqual(histogram.sum, sum(values))

    def test_bounds(self) -> None:
        """The bounds ascend, or there would be values that nothing counts."""
        for bounds in (FOREVER, MOMENTS):
            self.assertEqual(sorted(set(bounds)), list(bounds))


@st.composite
def lives(draw: st.DrawFn) -> list[State]:
    """Draw how far an evaluation has come, by legal steps."""
    life = [State.QUEUED]
    while STEPS[life[-1]] and draw(st.booleans()):
        life.append(draw(st.sampled_from(sorted(STEPS[life[-1]], key=lambda one: one.value))))
    return life


class EvaluationTests(SynchronousTestCase):
    """What becomes of evaluations."""

    @given(st.lists(lives()))
    def test_model(self, all_lives: list[list[State]]) -> None:
        """Each is counted where it is, by its end, and each stage that it left."""
        tally = EvaluationTally()
        for life in all_lives:
            tally.begin()
            for before, after in pairwise(life):
                tally.step(before, after, 2.0, "exit" if after is State.FAILED else "")
        self.assertEqual(tally.accepted, len(all_lives))
        for state in State:
            there = sum(life[-1] is state for life in all_lives)
            been = sum(life.count(state) for life in all_lives)
            self.assertEqual(tally.states[state], there)
            if state in (State.FINISHED, State.FAILED, State.CANCELLED):
                reason = "exit" if state is State.FAILED else ""
                self.assertEqual(tally.ended[state, reason], been)
            elif not state.ended:
                *_, (_, left) = tally.stages[state].cumulative()
                self.assertEqual(left, been - there)
                self.assertEqual(tally.stages[state].sum, 2.0 * left)
        endings = sum(any(state.ended for state in life) for life in all_lives)
        self.assertEqual(tally.ended.total(), endings)

    def test_fault(self) -> None:
        """The last end tells whether something is wrong with this machine."""
        tally = EvaluationTally()
        self.assertIsNone(tally.fault)
        tally.judge("no sandbox", 5.0)
        self.assertEqual(tally.fault, (5.0, "no sandbox"))
        tally.judge(None, 6.0)
        self.assertIsNone(tally.fault)
