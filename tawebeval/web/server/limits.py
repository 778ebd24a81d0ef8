"""How many connections there may be: in all, and for each client.

The connections of a trusted proxy are counted in all only, and for each client behind it those
requests that are not answered yet: without the proxy each of them would have a connection.
"""

from __future__ import annotations

from collections import Counter

import attrs

from tawebeval.config import Http

RETRY_AFTER = 5
"""Seconds after which those who were too many may try again."""


@attrs.define
class Connections:
    """Counts the connections there are: in all, and for each address of a client."""

    limits: Http
    turned_away: int = 0
    total: int = 0
    _groups: Counter[str] = attrs.field(factory=Counter)

    def enter(self, group: str) -> bool:
        """Count a connection of a group, and return True, unless there are as many as may be."""
        if self.total >= self.limits.connections or not self.begin(group):
            return False
        self.total += 1
        return True

    def leave(self, group: str) -> None:
        """Count one less."""
        self.total -= 1
        self.end(group)

    def begin(self, group: str) -> bool:
        """Count a request of a group, as a connection of its own; return whether there may be one.

        An empty group is nobody's, and has no limit.
        """
        if not group:
            return True
        most = self.limits.connections_per_address
        if most and self._groups[group] >= most:
            return False
        self._groups[group] += 1
        return True

    def end(self, group: str) -> None:
        """Count one request less."""
        if group:
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]
