"""The list of a caller's evaluations, some at a time (contract, section 7).

Its cursors are its own, and no cursors of events: each is the number of an evaluation, in the
order in which they were accepted, behind a mark that the daemon has drawn at its start. For after
a restart, and at another daemon, the same numbers are of other evaluations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs

from tawebeval.errors import InvalidCursor
from tawebeval.evaluations.records import Records
from tawebeval.evaluations.status import summary

_MOST = 100  # evaluations in one answer
_MARK = 5  # bytes
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")


@attrs.frozen
class Listing:
    """Some of a caller's evaluations, in the order in which they were accepted.

    `end` is the cursor after the last of them, None where no other follows now.
    """

    begin: str | None
    end: str | None
    data: list[dict[str, Any]]


@attrs.frozen
class Lists:
    """What one daemon lists from its start to its end; `random` is as `os.urandom`."""

    _records: Records
    _random: Callable[[int], bytes]
    _mark: str = attrs.field(init=False)

    @_mark.default
    def _drawn(self) -> str:
        return self._random(_MARK).hex()

    def evaluations(self, after: str | None, caller: str) -> Listing:
        """Return a caller's evaluations that come after that cursor; an empty one is as none.

        Raises InvalidCursor for one that was not given out here.
        """
        found = self._records.of(caller, self._number(after) if after else 0, _MOST + 1)
        return Listing(
            after or None,
            f"{self._mark}-{found[_MOST - 1].number}" if len(found) > _MOST else None,
            [summary(record.evaluation) for record in found[:_MOST]],
        )

    def _number(self, cursor: str) -> int:
        mark, _, number = cursor.partition("-")
        if (
            mark != self._mark
            or not _NUMBER.fullmatch(number)
            or int(number) > self._records.accepted
        ):
            raise InvalidCursor(
                f"after: {cursor[:80]!r} is no cursor of this list that the daemon has given out"
                " since its start; begin again without `after`"
            )
        return int(number)
