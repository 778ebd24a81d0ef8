"""Spool: the bytes of all forms that arrive or that evaluations still need.

Only received bytes count. An announced length is checked but not reserved, or a client that
announces much and sends little would keep others out.
"""

from __future__ import annotations

import attrs

from tawebeval.errors import Busy

_MEMORY = 32 * 2**20  # bytes
_RETRY_AFTER = 30  # seconds


@attrs.define
class Spool:
    """Counter of the bytes of forms; `held` never exceeds `limit`.

    `in_memory` counts the bytes that are not yet written to the disk.
    """

    limit: int
    held: int = 0
    in_memory: int = 0

    @property
    def crowded(self) -> bool:
        """Whether forms must wait for the disk before they receive more."""
        return self.in_memory >= _MEMORY

    def check(self, size: int) -> None:
        """Raise Busy if `size` bytes would not fit now."""
        if self.held + size > self.limit:
            raise Busy("as many uploads are stored as may; try again later", _RETRY_AFTER)

    def take(self, size: int) -> None:
        """Count `size` bytes more. Raises Busy, and counts nothing, if they do not fit."""
        self.check(size)
        self.held += size

    def give_back(self, size: int) -> None:
        """Count `size` bytes less, which were removed."""
        assert 0 <= size <= self.held
        self.held -= size
