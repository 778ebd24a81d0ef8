"""States of an evaluation and the transitions between them (contract, section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class State(StrEnum):
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
        return self not in (State.QUEUED, State.FETCHING, State.RUNNING)


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.FETCHING, State.FAILED, State.CANCELLED}),
    # An evaluation that was fetched before a slot was free is queued again.
    State.FETCHING: frozenset({State.QUEUED, State.RUNNING, State.FAILED, State.CANCELLED}),
    State.RUNNING: frozenset({State.FINISHED, State.FAILED, State.CANCELLED}),
    State.FINISHED: frozenset({State.DRAINED, State.EXPIRED}),
    State.FAILED: frozenset({State.DRAINED, State.EXPIRED}),
    State.CANCELLED: frozenset({State.DRAINED, State.EXPIRED}),
    State.DRAINED: frozenset(),
    State.EXPIRED: frozenset(),
}
"""The states that may follow each state; docs/api.md names the events that lead to them."""


class IllegalTransition(AssertionError):
    """A transition that `TRANSITIONS` does not have: a bug."""


def transition(state: State, following: State) -> State:
    """Return `following`, the state after `state`. Raises IllegalTransition."""
    if following not in TRANSITIONS[state]:
        raise IllegalTransition(f"an evaluation cannot become {following.value} when {state.value}")
    return following
