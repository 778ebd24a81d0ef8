"""The states of an evaluation, and the table of its transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class EvaluationState(StrEnum):
    """State of an evaluation.

    In the first three states the daemon works on the evaluation, in the next three clients may read
    its events, and in the last two only its identifier is left.
    """

    QUEUED = "queued"
    FETCHING = "fetching"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DRAINED = "drained"
    EXPIRED = "expired"

    @property
    def has_ended(self) -> bool:
        """Whether no event can follow."""
        return self not in (
            EvaluationState.QUEUED,
            EvaluationState.FETCHING,
            EvaluationState.RUNNING,
        )


_BAD_ENDS = frozenset({EvaluationState.FAILED, EvaluationState.CANCELLED})
_FORGOTTEN = frozenset({EvaluationState.DRAINED, EvaluationState.EXPIRED})

CLIENT_VISIBLE_STATES = tuple(state.value for state in EvaluationState if state not in _FORGOTTEN)
"""The states that clients can see."""

TRANSITIONS: Mapping[EvaluationState, frozenset[EvaluationState]] = {
    EvaluationState.QUEUED: _BAD_ENDS | {EvaluationState.FETCHING},
    # An evaluation that was fetched before a slot was free is queued again.
    EvaluationState.FETCHING: _BAD_ENDS | {EvaluationState.QUEUED, EvaluationState.RUNNING},
    EvaluationState.RUNNING: _BAD_ENDS | {EvaluationState.FINISHED},
    EvaluationState.FINISHED: _FORGOTTEN,
    EvaluationState.FAILED: _FORGOTTEN,
    EvaluationState.CANCELLED: _FORGOTTEN,
    EvaluationState.DRAINED: frozenset(),
    EvaluationState.EXPIRED: frozenset(),
}
"""The states that may follow each state; docs/api.md names the events that lead to them."""


class IllegalTransition(AssertionError):
    """A transition that `TRANSITIONS` does not have: a bug."""


def check_transition(before: EvaluationState, after: EvaluationState) -> EvaluationState:
    """Return `after`, the state after `before`. Raises IllegalTransition."""
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(f"an evaluation cannot become {after.value} when {before.value}")
    return after
