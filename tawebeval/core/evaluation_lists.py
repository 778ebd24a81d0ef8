"""Lists of evaluations: the cursor of one daemon's list, and the list over several daemons.

A daemon lists its evaluations by their sequence numbers, so the place in its list is a number. The
list over several daemons has no common order that clocks could break: its cursor has the place in
the list of each daemon, and an answer has the next part of each. So each daemon's evaluations are
listed in that daemon's order, and none is skipped or repeated, whichever daemon answers. Within an
answer the parts are merged by the time of acceptance.

A daemon that does not answer keeps its place. It is asked again for the next part.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from heapq import merge
from operator import attrgetter
from typing import Any

import attrs
import msgspec
import orjson

from tawebeval.core.identifiers import DAEMON_NAME_PATTERN
from tawebeval.errors import InvalidCursor

DAEMON_START_ID_BYTES = 5
"""Random bytes in the cursors of lists: a daemon refuses cursors of an earlier start."""

_CURSOR_PATTERN = rf"([0-9a-f]{{{2 * DAEMON_START_ID_BYTES}}})-([1-9][0-9]{{0,17}})"
_CURSOR = re.compile(_CURSOR_PATTERN)
_PLACE = re.compile(rf"({DAEMON_NAME_PATTERN})(?:-({_CURSOR_PATTERN}))?")


@attrs.frozen
class ListCursor:
    """Place in the list of one daemon: after the evaluation of this sequence number.

    `daemon_start_id` identifies the daemon's start, in hexadecimal.
    """

    daemon_start_id: str
    sequence_number: int

    def __str__(self) -> str:
        return f"{self.daemon_start_id}-{self.sequence_number}"


def parse_list_cursor(text: str) -> ListCursor:
    """Return the list cursor of a query. Raises: InvalidCursor."""
    found = _CURSOR.fullmatch(text)
    if found is None:
        raise make_invalid_cursor_error(text)
    return ListCursor(found[1], int(found[2]))


def make_invalid_cursor_error(text: str) -> InvalidCursor:
    """Return the error about a list cursor that cannot be used."""
    return InvalidCursor(
        f"after: {text[:80]!r} is not a cursor of this list, or it is from before the daemon's"
        " start; begin again without `after`"
    )


@attrs.frozen
class MergedListCursor:
    """Place in the list over several daemons.

    `cursors_by_daemon` has the list cursor of each daemon by its name, None if its list has ended.
    A daemon that is not in it has its whole list before it.
    """

    cursors_by_daemon: Mapping[str, str | None] = attrs.field(factory=dict)

    @classmethod
    def parse(cls, text: str, daemon_names: Collection[str]) -> MergedListCursor:
        """Return the cursor of a query over these daemons. Raises: InvalidCursor."""
        places: dict[str, str | None] = {}
        for part in text.split("_") if text else ():
            place = _PLACE.fullmatch(part)
            if place is None or place[1] not in daemon_names or place[1] in places:
                raise make_invalid_cursor_error(text)
            places[place[1]] = place[2]
        return cls(places)

    def __str__(self) -> str:
        return "_".join(
            name if place is None else f"{name}-{place}"
            for name, place in sorted(self.cursors_by_daemon.items())
        )

    def find_unfinished_lists(self, daemon_names: Collection[str]) -> dict[str, str | None]:
        """Return the daemons whose lists have not ended, with their cursors, None for the start."""
        return {
            name: self.cursors_by_daemon.get(name)
            for name in sorted(daemon_names)
            if name not in self.cursors_by_daemon or self.cursors_by_daemon[name] is not None
        }


@attrs.frozen
class ListEntry:
    """An evaluation as a list shows it: the time of acceptance, and the JSON."""

    created_time: str
    encoded_json: bytes

    @property
    def json_fragment(self) -> orjson.Fragment:
        """The JSON, to be encoded as a part of a document."""
        return orjson.Fragment(self.encoded_json)


@attrs.frozen
class DaemonListPage:
    """A part of the list of one daemon; `end_cursor` is the cursor after it, None at the end."""

    end_cursor: str | None
    entries: Sequence[ListEntry]


def make_list_page(
    end_cursor: str | None, documents: Sequence[Mapping[str, Any]]
) -> DaemonListPage:
    """Return a part of these entries. Raises: TypeError, for a value that is not JSON."""
    entries = [ListEntry(one["created"], orjson.dumps(one)) for one in documents]
    return DaemonListPage(end_cursor, entries)


class _Entry(msgspec.Struct):
    evaluation_id: str
    created: str


class _Answer(msgspec.Struct):
    daemon: str
    end: str | None
    data: list[_Entry]


def parse_list_page(body: bytes, daemon_name: str) -> DaemonListPage:
    """Return the part in the answer of the daemon `daemon_name`.

    Raises: ValueError, with a message for the operator.
    """
    try:
        document = orjson.loads(body)
        answer = msgspec.convert(document, _Answer)
        part = make_list_page(answer.end, document["data"])
    except (ValueError, TypeError):  # TypeError: nested too deeply
        raise ValueError("the answer is not a list of evaluations") from None
    if answer.daemon != daemon_name:
        raise ValueError(f"the answer is of the daemon {answer.daemon[:80]!r}")
    if answer.end is not None and not _CURSOR.fullmatch(answer.end):
        raise ValueError("the answer has a malformed cursor")
    return part


@attrs.frozen
class MergedListPage:
    """A part of the list over several daemons; `end_cursor` is as in `DaemonListPage`.

    `unavailable_daemons` are the names of the daemons that have not answered.
    """

    end_cursor: str | None
    entries: Sequence[ListEntry]
    unavailable_daemons: Sequence[str]


def merge_list_pages(
    cursor: MergedListCursor, asked_daemons: Collection[str], pages: Mapping[str, DaemonListPage]
) -> MergedListPage:
    """Return the part after a cursor, of the `pages` of those `asked_daemons` that have answered.

    It is the last one if all lists have ended, or if those left belong to daemons that are away
    and nobody else was asked.
    """
    after = MergedListCursor(
        {**cursor.cursors_by_daemon, **{name: part.end_cursor for name, part in pages.items()}}
    )
    away = sorted(set(asked_daemons) - set(pages))
    has_more = bool(away) or any(part.end_cursor is not None for part in pages.values())
    ordered = merge(
        *(pages[name].entries for name in sorted(pages)), key=attrgetter("created_time")
    )
    return MergedListPage(str(after) if pages and has_more else None, list(ordered), away)
