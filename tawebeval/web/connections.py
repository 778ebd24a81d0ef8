"""How many connections there may be: in all, and for each client."""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv6Address, ip_address

import attrs
from twisted.internet.interfaces import IAddress

from tawebeval.config import Http


@attrs.define
class Connections:
    """Counts the connections there are: in all, and for each address of a client."""

    limits: Http
    turned_away: int = 0
    total: int = 0
    _groups: Counter[str] = attrs.field(factory=Counter)

    def enter(self, group: str) -> bool:
        """Count a connection of a group, and return True, unless there are as many as may be."""
        most = self.limits.connections_per_address
        if self.total >= self.limits.connections or (
            group and most and self._groups[group] >= most
        ):
            return False
        self.total += 1
        self._groups[group] += 1
        return True

    def leave(self, group: str) -> None:
        """Count one less."""
        self.total -= 1
        self._groups[group] -= 1
        if not self._groups[group]:
            del self._groups[group]


def group_of(address: IAddress | None) -> str:
    """Return what stands for a client: its IPv4 address, or the /64 of its IPv6 address.

    It is empty for one that has none, such as the other end of a Unix socket.
    """
    try:
        found = ip_address(getattr(address, "host", "").partition("%")[0])
    except ValueError:
        return ""
    if not isinstance(found, IPv6Address):
        return str(found)
    return str(found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64))
