"""What stands in for the files of events and for the store: memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf
from typing import Any

import attrs
from twisted.internet.defer import Deferred, fail, succeed

from tawebeval.core.evaluations import ListEntry
from tawebeval.core.events import BatchMark
from tawebeval.evaluations.store import (
    EvaluationDetails,
    EvaluationLinksRow,
    Standing,
    pack_row,
    unpack_evaluation,
)


@attrs.define
class MemoryEventFiles:
    """Files of the events of one evaluation; the test appends to `stdout` what is printed.

    `error` is raised by the next write.
    """

    stdout: bytearray = attrs.field(factory=bytearray)
    marks: list[BatchMark] = attrs.field(factory=list)
    segments: list[Any] = attrs.field(factory=list)
    named: dict[int, bytes | str] = attrs.field(factory=dict)
    error: OSError | None = None
    freed: tuple[int, int] = (0, 0)
    is_open: bool = True

    def close(self) -> None:
        self.is_open = False

    @property
    def stdout_size(self) -> int:
        return len(self.stdout)

    def read_stdout(self, begin: int, end: int) -> bytes:
        return bytes(self.stdout[begin:end])

    def has_disk_space_to_free(self, stdout_bytes: int, file_count: int) -> bool:
        """Return whether there is more to free than was freed."""
        return (stdout_bytes, file_count) != self.freed

    def free_stdout_blocks(self, before: int) -> None:
        self.freed = before, self.freed[1]

    def write_batch_mark(self, number: int, mark: BatchMark) -> None:
        if self.error is not None:
            raise self.error
        self.marks[number:] = [mark]

    def read_batch_marks(self, first: int, end: int | None = None) -> list[BatchMark]:
        return self.marks[first:end]

    def append_segment_record(self, record: Any) -> None:
        self.segments.append(record)

    def read_segment_records(self) -> list[Any]:
        return self.segments[:]

    def store_referenced_file(self, number: int, content: bytes | str) -> None:
        self.named[number] = content

    def remove_referenced_files(self, before: int) -> None:
        self.freed = self.freed[0], before
        for number in [each for each in self.named if each < before]:
            del self.named[number]

    def read_referenced_file(self, number: int) -> bytes | str | None:
        return self.named.get(number)


@attrs.define
class FakeStore:
    """A store in memory, which keeps rows packed; `error` fails what is added."""

    rows: dict[str, bytes] = attrs.field(factory=dict)
    links: dict[str, EvaluationLinksRow] = attrs.field(factory=dict)
    error: Exception | None = None
    write_failure_reason: str | None = None

    def add(self, row: EvaluationDetails) -> Deferred[None]:
        if self.error is not None:
            return fail(self.error)
        self.save(row)
        return succeed(None)

    def save(self, row: EvaluationDetails) -> None:
        self.rows[row.identifier] = pack_row(row)

    def delete(self, identifier: str) -> None:
        self.rows.pop(identifier, None)

    def save_links(self, identifier: str, link: EvaluationLinksRow | None) -> None:
        self.links.pop(identifier, None)
        if link is not None:
            self.links[identifier] = link

    def load_links(self) -> dict[str, EvaluationLinksRow]:
        return dict(self.links)

    def flush(self) -> Deferred[None]:
        return fail(self.error) if self.error is not None else succeed(None)

    def flush_soon(self) -> Deferred[None]:
        return self.flush()

    async def find_archived(self, identifier: str) -> EvaluationDetails | None:
        packed = self.rows.get(identifier)
        row = None if packed is None else unpack_evaluation(packed)
        return row if row is not None and row.archive_record is not None else None

    def _list_archived(self) -> list[EvaluationDetails]:
        rows = map(unpack_evaluation, self.rows.values())
        return [row for row in rows if row.archive_record is not None]

    async def list_archived(
        self,
        reader: str,
        callers: Collection[str],
        after: int,
        last: int,
        max_count: int,
        make_entry: Callable[[EvaluationDetails], ListEntry | None],
    ) -> dict[int, ListEntry | None]:
        rows = {row.sequence_number: row for row in self._list_archived() if row.caller in callers}
        found = [number for number in sorted(rows) if number in range(after + 1, last + 1)]
        return {number: make_entry(rows[number]) for number in found[:max_count]}

    async def list_caller_standings(
        self,
        reader: str,
        callers: Collection[str],
        after: tuple[str, str],
        problem: str | None,
        make_entry: Callable[[Standing], ListEntry],
    ) -> tuple[list[tuple[tuple[str, str], ListEntry]], tuple[str, str] | None]:
        """Return a standing for each caller and problem, with the newest evaluation."""
        rows: dict[tuple[str, str], list[EvaluationDetails]] = {}
        for row in map(unpack_evaluation, self.rows.values()):
            if (
                row.caller in callers
                and row.counted_problem
                and problem in (None, row.counted_problem)
            ):
                rows.setdefault((row.caller, row.counted_problem), []).append(row)
        found = []
        for place, (*others, last) in sorted(rows.items()):
            standing = Standing(*place, 1 + len(others), 0, last.submission_time, last)
            found.append((place, make_entry(standing)))
        return [one for one in found if one[0] > after], None

    async def list_oldest_archived(
        self, max_count: int, *, caller: str | None = None, ended_before: float = inf
    ) -> list[tuple[str, str, int]]:
        rows = [
            row
            for row in self._list_archived()
            if caller in (None, row.caller) and row.state_times["ended"] < ended_before
        ]
        rows.sort(key=lambda row: row.state_times["ended"])
        return [
            (row.identifier, row.caller, row.archive_record.file_bytes if row.archive_record else 0)
            for row in rows[:max_count]
        ]

    async def count_archived(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of archived rows and their bytes."""
        found: dict[str, tuple[int, int]] = {}
        for row in self._list_archived():
            count, size = found.get(row.caller, (0, 0))
            found[row.caller] = (
                count + 1,
                size + (row.archive_record.file_bytes if row.archive_record else 0),
            )
        return found

    def load_live_rows(self) -> list[EvaluationDetails]:
        """Return the rows that not only the archive needs."""
        rows = [
            row
            for row in map(unpack_evaluation, self.rows.values())
            if row.archive_record is None or not row.is_forgotten or row.has_pending_callback
        ]
        return sorted(rows, key=lambda row: row.sequence_number)
