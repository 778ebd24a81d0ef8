"""States of an evaluation and the transitions between them (docs/api.md)."""

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


CLIENT_VISIBLE_STATES = tuple(
    state.value
    for state in EvaluationState
    if state not in (EvaluationState.DRAINED, EvaluationState.EXPIRED)
)
"""The states that clients can see."""

TRANSITIONS: Mapping[EvaluationState, frozenset[EvaluationState]] = {
    EvaluationState.QUEUED: frozenset(
        {EvaluationState.FETCHING, EvaluationState.FAILED, EvaluationState.CANCELLED}
    ),
    # An evaluation that was fetched before a slot was free is queued again.
    EvaluationState.FETCHING: frozenset(
        {
            EvaluationState.QUEUED,
            EvaluationState.RUNNING,
            EvaluationState.FAILED,
            EvaluationState.CANCELLED,
        }
    ),
    EvaluationState.RUNNING: frozenset(
        {EvaluationState.FINISHED, EvaluationState.FAILED, EvaluationState.CANCELLED}
    ),
    EvaluationState.FINISHED: frozenset({EvaluationState.DRAINED, EvaluationState.EXPIRED}),
    EvaluationState.FAILED: frozenset({EvaluationState.DRAINED, EvaluationState.EXPIRED}),
    EvaluationState.CANCELLED: frozenset({EvaluationState.DRAINED, EvaluationState.EXPIRED}),
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
