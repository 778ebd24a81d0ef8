"""Lists of evaluations, those in memory and those in the archive, page by page."""

from __future__ import annotations

from itertools import pairwise

import attrs

from tawebeval.core.evaluation_lists import (
    ListCursor,
    ListEntry,
    make_invalid_cursor_error,
    parse_list_cursor,
)
from tawebeval.evaluations.archive_reader import ArchiveReader, ListedEvaluation
from tawebeval.evaluations.filters import MATCH_ALL_FILTER, EvaluationFilter
from tawebeval.evaluations.records import RecordIndex

MAX_LISTED_EVALUATIONS = 100  # evaluations in one answer, at most
MAX_LISTED_BYTES = 64 * 1024  # from which no further evaluation follows in an answer: 1 ms
# Evaluations that a filter examines for one answer, at most: about 2 ms.
MAX_EVALUATIONS_EXAMINED_PER_TURN = 500


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
        archived = await self._archived.list_evaluations(
            caller, number, newest, examined + 1, evaluation_filter
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

    def _parse_list_cursor(self, text: str) -> int:
        cursor = parse_list_cursor(text)
        if (
            cursor.daemon_start_id != self.daemon_start_id
            or cursor.sequence_number > self._records.last_sequence_number
        ):
            raise make_invalid_cursor_error(text)
        return cursor.sequence_number
