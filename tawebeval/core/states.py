"""The life of an evaluation: its states, and which may follow which (contract, section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class State(Enum):
    """Where an evaluation is in its life.

    In the first three something is done for it, in the next three its events can be read, and
    in the last two nothing is left of it but its identifier.
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
    def ended(self) -> bool:
        """Whether no event will follow."""
        return self not in (State.QUEUED, State.FETCHING, State.RUNNING)


STEPS: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.FETCHING, State.FAILED, State.CANCELLED}),
    # What was fetched before there was a place to run waits for that again.
    State.FETCHING: frozenset({State.QUEUED, State.RUNNING, State.FAILED, State.CANCELLED}),
    State.RUNNING: frozenset({State.FINISHED, State.FAILED, State.CANCELLED}),
    State.FINISHED: frozenset({State.DRAINED, State.EXPIRED}),
    State.FAILED: frozenset({State.DRAINED, State.EXPIRED}),
    State.CANCELLED: frozenset({State.DRAINED, State.EXPIRED}),
    State.DRAINED: frozenset(),
    State.EXPIRED: frozenset(),
}
"""From each state those that may be next. docs/api.md says what leads to them."""


class IllegalStep(AssertionError):
    """A state that cannot follow: a defect of ours."""


def step(state: State, following: State) -> State:
    """Return the state that follows. Raises IllegalStep."""
    if following not in STEPS[state]:
        raise IllegalStep(f"an evaluation cannot become {following.value} when {state.value}")
    return following
