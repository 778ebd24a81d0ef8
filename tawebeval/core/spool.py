"""How much of forms there is: of those that arrive, and of those that evaluations still need.

What counts is what has come. A length that is only announced is looked at and not set aside, or
whoever announces much and sends little would keep the others out.
"""

from __future__ import annotations

import attrs

from tawebeval.errors import Busy

_MEMORY = 32 * 2**20  # bytes
_RETRY_AFTER = 30  # seconds


@attrs.define
class Spool:
    """Counts the bytes of forms; `held` never exceeds `limit`.

    `in_memory` is what of them is not on the disk yet.
    """

    limit: int
    held: int = 0
    in_memory: int = 0

    @property
    def crowded(self) -> bool:
        """Whether so much is in memory that no form is to gather more before it is written."""
        return self.in_memory >= _MEMORY

    def check(self, size: int) -> None:
        """Raise Busy where so many bytes would not fit now."""
        if self.held + size > self.limit:
            raise Busy("as many uploads are stored as may; try again later", _RETRY_AFTER)

    def take(self, size: int) -> None:
        """Count so many bytes more. Raises Busy, and counts none of them."""
        self.check(size)
        self.held += size

    def give_back(self, size: int) -> None:
        """Count so many bytes less: they are removed."""
        assert 0 <= size <= self.held
        self.held -= size
