"""Filters of the list of evaluations: by state, label and time of acceptance."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime

import attrs

from tawebeval.core.form import LABEL_FIELD, describe_label_name
from tawebeval.core.states import SHOWN_STATES
from tawebeval.errors import MalformedRequest
from tawebeval.evaluations.evaluation import Evaluation

_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})"
)  # RFC 3339


@attrs.frozen
class EvaluationFilter:
    """Condition on the evaluations of a list; the empty one holds for all.

    `state` is one of `SHOWN_STATES`. `labels` are labels that an evaluation has, among others. The
    time of acceptance, in seconds since the epoch, is at least `since` and below `until`.
    """

    state: str | None = None
    labels: Mapping[str, str] = attrs.field(factory=dict)
    since: float | None = None
    until: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the filter holds for all evaluations."""
        return self == EVERY_EVALUATION

    def matches(self, evaluation: Evaluation) -> bool:
        """Return whether the filter holds for an evaluation."""
        created = round(evaluation.state_times["created"], 6)  # as clients see it, or finer
        return (
            self.state in (None, evaluation.state.value)
            and (self.since is None or self.since <= created)
            and (self.until is None or created < self.until)
            and (not self.labels or self.labels.items() <= evaluation.metadata.items())
        )


EVERY_EVALUATION = EvaluationFilter()


def is_filter_parameter(name: str) -> bool:
    """Return whether a query parameter is part of a filter."""
    return name in ("state", "since", "until") or name.startswith("metadata[")


def parse_filter(parameters: Mapping[str, str]) -> EvaluationFilter:
    """Return the filter of the parameters of a query. Raises: MalformedRequest.

    An empty parameter is refused: it would list evaluations that the client does not expect.
    """
    labels = {}
    for name, value in parameters.items():
        if name.startswith("metadata["):
            match = LABEL_FIELD.fullmatch(name)
            if match is None:
                raise MalformedRequest(f"{name[:80]}: {describe_label_name()}")
            if not value:
                raise MalformedRequest(f"{name}: is empty; no label is")
            labels[match[1]] = value
    state = parameters.get("state")
    if state is not None and state not in SHOWN_STATES:
        raise MalformedRequest(
            f"state: {state[:80]!r} is no state; allowed: {', '.join(SHOWN_STATES)}"
        )
    return EvaluationFilter(
        state, labels, _parse_time(parameters, "since"), _parse_time(parameters, "until")
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
