"""Lists of evaluations, those in memory and those in the archive, page by page, with a filter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from itertools import pairwise

import attrs
import orjson

from tawebeval.core.evaluations import (
    CLIENT_VISIBLE_STATES,
    ListCursor,
    ListEntry,
    make_invalid_cursor_error,
    parse_list_cursor,
)
from tawebeval.core.form import LABEL_FIELD_PATTERN, PROBLEM_NAME_PATTERN, format_label_name_error
from tawebeval.errors import MalformedRequest
from tawebeval.evaluations.archive_reader import ArchiveReader
from tawebeval.evaluations.database import ArchivedQuery
from tawebeval.evaluations.details import EvaluationDetails
from tawebeval.evaluations.records import RecordIndex
from tawebeval.evaluations.restoring import load_details
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

    def matches(self, details: EvaluationDetails) -> bool:
        """Return whether the filter holds for an evaluation."""
        created = round(details.state_times["created"], 6)  # as clients see it, or finer
        if (
            self.state not in (None, details.state.value)
            or (self.since is not None and created < self.since)
            or (self.until is not None and created >= self.until)
        ):
            return False
        if self.problem is None and not self.labels:
            return True
        found = details.problem_and_labels
        return self.problem in (None, found.problem) and (
            self.labels.items() <= found.metadata.items()
        )


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
        present = [
            record.details for record in self._records.list_records(caller, number, examined + 1)
        ]
        present += [
            one.details
            for one in self._archived.in_transit.values()
            if one.details.caller == caller and one.details.sequence_number > number
        ]
        found: dict[int, ListEntry | None] = {}
        # What is archived meanwhile is in both, what is accepted meanwhile in neither.
        if self._store is not None and self._archived.is_enabled:
            found = await self._store.list_archived(
                ArchivedQuery(
                    caller,
                    number,
                    newest,
                    examined + 1,
                    lambda row: _make_entry(load_details(row, None), evaluation_filter),
                )
            )
        found |= {one.sequence_number: _make_entry(one, evaluation_filter) for one in present}
        entries: list[ListEntry] = []
        end, bytes_left = None, MAX_LISTED_BYTES
        for one, following in pairwise((*sorted(found)[: examined + 1], None)):
            assert one is not None, "only the last is None"
            entry = found[one]
            if entry is not None:
                entries.append(entry)
                bytes_left -= len(entry.encoded_json)
            examined -= 1
            is_full = len(entries) == size or bytes_left <= 0 or not examined
            if following is not None and is_full:
                end = str(ListCursor(self.daemon_start_id, one))
                break
        return EvaluationListing(after_cursor or None, end, entries)

    def _parse_list_cursor(self, text: str) -> int:
        cursor = parse_list_cursor(text)
        if (
            cursor.daemon_start_id != self.daemon_start_id
            or cursor.sequence_number > self._records.last_sequence_number
        ):
            raise make_invalid_cursor_error(text)
        return cursor.sequence_number


def _make_entry(details: EvaluationDetails, wanted: EvaluationFilter) -> ListEntry | None:
    """Return what a list shows of an evaluation, None if the filter does not hold for it."""
    if not wanted.matches(details):
        return None
    entry = build_listing_entry(details)
    return ListEntry(entry["created"], orjson.dumps(entry))
