"""`core.states`: the table of transitions."""

from __future__ import annotations

import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.states import (
    TRANSITIONS,
    EvaluationState,
    IllegalTransition,
    check_transition,
)

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"


class StepTests(SynchronousTestCase):
    def test_every_state_has_a_row_in_the_table_of_transitions(self) -> None:
        self.assertEqual(set(TRANSITIONS), set(EvaluationState))
        for state in EvaluationState:
            for following in EvaluationState:
                if following in TRANSITIONS[state]:
                    self.assertIs(check_transition(state, following), following)
                else:
                    error = self.assertRaises(IllegalTransition, check_transition, state, following)
                    self.assertIn(following.value, str(error))
                    self.assertIn(state.value, str(error))

    def test_ended_states_lead_only_to_ended_states(self) -> None:
        for state in EvaluationState:
            for following in TRANSITIONS[state]:
                self.assertLessEqual(state.has_ended, following.has_ended)
        self.assertEqual(
            [state for state in EvaluationState if not state.has_ended],
            [EvaluationState.QUEUED, EvaluationState.FETCHING, EvaluationState.RUNNING],
        )

    def test_documented_states_are_those_of_the_table(self) -> None:
        section = API.read_text("utf-8").partition("### States")[2]
        rows = re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", section.partition("\n#")[0], re.M)
        shown = {name: set(re.findall(r"`(\w+)`", following)) for name, following in rows}
        self.assertEqual(
            shown,
            {state.value: {one.value for one in TRANSITIONS[state]} for state in EvaluationState},
        )
