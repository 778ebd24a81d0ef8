"""Filters of the list of evaluations: by state, problem, label and time of acceptance."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime

import attrs

from tawebeval.core.form import LABEL_FIELD_PATTERN, PROBLEM_NAME_PATTERN, format_label_name_error
from tawebeval.core.states import CLIENT_VISIBLE_STATES
from tawebeval.errors import MalformedRequest
from tawebeval.evaluations.details import EvaluationDetails

_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})"
)  # RFC 3339


@attrs.frozen
class EvaluationFilter:
    """Condition on the evaluations of a list; the empty one holds for all.

    `state` is one of `CLIENT_VISIBLE_STATES`, `problem` the name of a problem. `labels` are labels
    that an evaluation has, among others. The time of acceptance, in seconds since the epoch, is at
    least `since` and below `until`.
    """

    state: str | None = None
    labels: Mapping[str, str] = attrs.field(factory=dict)
    since: float | None = None
    until: float | None = None
    problem: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the filter holds for all evaluations."""
        return self == MATCH_ALL_FILTER

    @property
    def needs_problem_or_labels(self) -> bool:
        """Whether the problem or the labels of an evaluation matter."""
        return self.problem is not None or bool(self.labels)

    def matches(self, details: EvaluationDetails) -> bool:
        """Return whether the filter holds for an evaluation."""
        if not self.matches_state_and_time(details.state.value, details.state_times["created"]):
            return False
        if not self.needs_problem_or_labels:
            return True
        found = details.problem_and_labels
        return self.matches_problem_and_labels(found.problem, found.metadata)

    def matches_state_and_time(self, state: str, created: float) -> bool:
        """Return whether the filter holds for a state and a time of acceptance."""
        created = round(created, 6)  # as clients see it, or finer
        return (
            self.state in (None, state)
            and (self.since is None or created >= self.since)
            and (self.until is None or created < self.until)
        )

    def matches_problem_and_labels(self, problem: str | None, labels: Mapping[str, str]) -> bool:
        """Return whether the filter holds for a problem and labels."""
        return self.problem in (None, problem) and self.labels.items() <= labels.items()


MATCH_ALL_FILTER = EvaluationFilter()


def is_filter_parameter(name: str) -> bool:
    """Return whether a query parameter is part of a filter."""
    return name in ("state", "problem", "since", "until") or name.startswith("metadata[")


def parse_filter(parameters: Mapping[str, str]) -> EvaluationFilter:
    """Return the filter of the parameters of a query. Raises: MalformedRequest.

    An empty parameter is refused: it would list evaluations that the client does not expect.
    """
    labels = {}
    for name, value in parameters.items():
        if name.startswith("metadata["):
            match = LABEL_FIELD_PATTERN.fullmatch(name)
            if match is None:
                raise MalformedRequest(f"{name[:80]}: {format_label_name_error()}")
            if not value:
                raise MalformedRequest(f"{name}: is empty; no label is")
            labels[match[1]] = value
    state = parameters.get("state")
    if state is not None and state not in CLIENT_VISIBLE_STATES:
        raise MalformedRequest(
            f"state: {state[:80]!r} is no state; allowed: {', '.join(CLIENT_VISIBLE_STATES)}"
        )
    problem = parameters.get("problem")
    if problem is not None and not re.fullmatch(PROBLEM_NAME_PATTERN, problem):
        raise MalformedRequest(
            f"problem: {problem[:80]!r} is no name of a problem; GET /problems lists them"
        )
    return EvaluationFilter(
        state,
        labels,
        _parse_time(parameters, "since"),
        _parse_time(parameters, "until"),
        problem,
    )


def _parse_time(parameters: Mapping[str, str], name: str) -> float | None:
    if name not in parameters:
        return None
    # Clients often forget to encode the plus sign of a time zone, which then means a space.
    text = parameters[name].replace(" ", "+").upper()
    with suppress(ValueError):  # such as a 30th of February
        if _TIME.fullmatch(text):
            return datetime.fromisoformat(text).timestamp()
    raise MalformedRequest(
        f"{name}: {text[:80]!r} is no time of RFC 3339, such as 2026-11-20T20:07:08Z"
    )
