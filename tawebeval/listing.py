"""The list of a caller's evaluations, some at a time (contract, section 7).

Its cursors are its own, and no cursors of events: each is the number of an evaluation, in the
order in which they were accepted.
"""

from __future__ import annotations

import re
from typing import Any

import attrs

from tawebeval.errors import InvalidCursor
from tawebeval.records import Records
from tawebeval.status import summary

_MOST = 100  # evaluations in one answer
_CURSOR = re.compile(r"0|[1-9][0-9]{0,17}")


@attrs.frozen
class Listing:
    """Some of a caller's evaluations, in the order in which they were accepted.

    `end` is the cursor after the last of them, None where no other follows now.
    """

    begin: str | None
    end: str | None
    data: list[dict[str, Any]]


def list_evaluations(records: Records, after: str | None, caller: str) -> Listing:
    """Return a caller's evaluations that come after that cursor; an empty one counts as absent.

    Raises InvalidCursor.
    """
    if after and not _CURSOR.fullmatch(after):
        raise InvalidCursor(
            f"after: {after[:80]!r} is no cursor of this list; use the `end` of the part before, "
            "or none to begin"
        )
    found = records.of(caller, int(after or 0), _MOST + 1)
    return Listing(
        after or None,
        str(found[_MOST - 1].number) if len(found) > _MOST else None,
        [summary(record.evaluation) for record in found[:_MOST]],
    )
