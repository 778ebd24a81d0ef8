"""How much of forms is on the disk: those that arrive, and those that evaluations still need.

What counts is what has come. A length that is only announced is looked at and not set aside, or
whoever announces much and sends little would keep the others out.
"""

from __future__ import annotations

import attrs

from tawebeval.errors import Busy

_RETRY_AFTER = 30  # seconds


@attrs.define
class Spool:
    """Counts the bytes of forms; `held` never exceeds `limit`."""

    limit: int
    held: int = 0

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
