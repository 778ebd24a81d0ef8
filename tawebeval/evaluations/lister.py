"""Lists of evaluations, those in memory and those in the archive, page by page, with a filter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any

import attrs
import orjson

from tawebeval.core.evaluation_lists import (
    ListCursor,
    ListEntry,
    make_invalid_cursor_error,
    parse_list_cursor,
)
from tawebeval.core.form import LABEL_FIELD_PATTERN, PROBLEM_NAME_PATTERN, format_label_name_error
from tawebeval.core.states import CLIENT_VISIBLE_STATES
from tawebeval.errors import MalformedRequest
from tawebeval.evaluations.archive_reader import ArchiveReader
from tawebeval.evaluations.database import ArchivedEvaluation, ArchivedQuery
from tawebeval.evaluations.details import EvaluationDetails, format_rfc3339_time
from tawebeval.evaluations.records import RecordIndex
from tawebeval.evaluations.status import build_listing_entry
from tawebeval.evaluations.store import EvaluationStore

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


MAX_LISTED_EVALUATIONS = 100  # evaluations in one answer, at most
MAX_LISTED_BYTES = 64 * 1024  # from which no further evaluation follows in an answer: 1 ms
# Evaluations that a filter examines for one answer, at most: of the archive 4 ms in a thread, if
# each row is large.
MAX_EVALUATIONS_EXAMINED_PER_TURN = 100


@attrs.frozen
class ListedEvaluation:
    """An evaluation of a list: in memory, or a row of the archive.

    A row without an entry does not match the filter of the list.
    """

    details_or_row: EvaluationDetails | ArchivedEvaluation

    @property
    def sequence_number(self) -> int:
        """The number in the order of acceptance."""
        return self.details_or_row.sequence_number

    def encode_listing_entry(self) -> ListEntry:
        """Return what the list shows."""
        if isinstance(self.details_or_row, EvaluationDetails):
            entry = build_listing_entry(self.details_or_row)
            return ListEntry(entry["created"], orjson.dumps(entry))
        row = self.details_or_row
        return ListEntry(format_rfc3339_time(row.created_time), row.listing_entry)

    def matches(self, evaluation_filter: EvaluationFilter) -> bool:
        """Return whether the filter holds."""
        if isinstance(self.details_or_row, EvaluationDetails):
            return evaluation_filter.matches(self.details_or_row)
        return bool(self.details_or_row.listing_entry)


def _matches_row(wanted: EvaluationFilter, row: ArchivedEvaluation) -> bool:
    """Return whether a filter holds for a row. Called in a thread: rows may be large."""
    if not wanted.matches_state_and_time(row.state, row.created_time):
        return False
    if not wanted.needs_problem_or_labels:
        return True
    entry: dict[str, Any] = orjson.loads(row.listing_entry)
    return wanted.matches_problem_and_labels(entry["problem"], entry["metadata"])


@attrs.frozen
class EvaluationListing:
    """Some evaluations of one caller, in the order of their acceptance.

    `begin_cursor` is the cursor before the first of them, None at the start of the list;
    `end_cursor` is the cursor after the last of them, None if no other evaluation follows now.
    `entries` are the summaries.
    """

    begin_cursor: str | None
    end_cursor: str | None
    entries: list[ListEntry]


@attrs.define
class EvaluationLister:
    """Lister of the evaluations in memory and in the archive.

    `daemon_start_id` is in the cursors: those of another start of the daemon are refused by it.
    """

    _records: RecordIndex
    _archived: ArchiveReader
    _store: EvaluationStore | None
    daemon_start_id: str

    async def list_evaluations(
        self,
        after_cursor: str | None,
        caller: str = "",
        evaluation_filter: EvaluationFilter = MATCH_ALL_FILTER,
        max_count: int | None = None,
    ) -> EvaluationListing:
        """Return up to 100 evaluations of a caller, or `max_count`, accepted after a cursor.

        There are fewer beyond `MAX_LISTED_BYTES`. None and the empty cursor stand for the start of
        the list. A filter examines a bounded number of evaluations in one call, so there may be
        fewer, or none. Raises: InvalidCursor; ServerBusy, if the disk of the archive does not
        answer.
        """
        number = self._parse_list_cursor(after_cursor) if after_cursor else 0
        size = max_count or MAX_LISTED_EVALUATIONS
        examined = size if evaluation_filter.is_empty else MAX_EVALUATIONS_EXAMINED_PER_TURN
        newest = self._records.last_sequence_number
        present = self._records.list_records(caller, number, examined + 1)
        present += [
            one
            for one in self._archived.in_transit.values()
            if one.details.caller == caller and one.details.sequence_number > number
        ]
        # What is archived meanwhile is in both, what is accepted meanwhile in neither.
        archived = await self._list_archived(
            ArchivedQuery(
                caller, number, newest, examined + 1, partial(_matches_row, evaluation_filter)
            )
        )
        found = {one.sequence_number: one for one in archived}
        found |= {one.details.sequence_number: ListedEvaluation(one.details) for one in present}
        in_order = [found[number] for number in sorted(found)[: examined + 1]]
        entries: list[ListEntry] = []
        end, bytes_left = None, MAX_LISTED_BYTES
        for one, following in pairwise((*in_order, None)):
            assert one is not None, "only the last is None"
            if one.matches(evaluation_filter):
                entries.append(one.encode_listing_entry())
                bytes_left -= len(entries[-1].encoded_json)
            examined -= 1
            is_full = len(entries) == size or bytes_left <= 0 or not examined
            if following is not None and is_full:
                end = str(ListCursor(self.daemon_start_id, one.sequence_number))
                break
        return EvaluationListing(after_cursor or None, end, entries)

    async def _list_archived(self, query: ArchivedQuery) -> list[ListedEvaluation]:
        if self._store is None or not self._archived.is_enabled:
            return []
        return [ListedEvaluation(row) for row in await self._store.list_archived(query)]

    def _parse_list_cursor(self, text: str) -> int:
        cursor = parse_list_cursor(text)
        if (
            cursor.daemon_start_id != self.daemon_start_id
            or cursor.sequence_number > self._records.last_sequence_number
        ):
            raise make_invalid_cursor_error(text)
        return cursor.sequence_number
