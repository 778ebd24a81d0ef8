"""Who is at the other end: of a connection, and of a request that a proxy passes on."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import attrs
from twisted.internet.address import UNIXAddress
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.web.http_headers import Headers

from tawebeval.config import HttpSettings
from tawebeval.core.forwarded import Proxies, canonicalize, group_address
from tawebeval.deferreds import Condition, poll_until


@attrs.frozen
class RemoteAddress:
    """Who asks: an address, empty if there is none.

    `group` is for whom a request counts besides its connection: that of a client behind a proxy,
    else empty.
    """

    address: str
    group: str = ""


@attrs.frozen
class Peer:
    """The other end of a connection: its address, and as whose the connection is counted.

    `client` is who asks on it, None for a proxy, where each request says so.
    """

    address: str
    group: str
    client: RemoteAddress | None


@attrs.frozen
class AddressResolver:
    """Tells who asks."""

    proxies: Proxies

    @classmethod
    def of(cls, settings: HttpSettings) -> AddressResolver:
        """Return what the settings make of it."""
        return cls(Proxies.parse(settings.trusted_proxies, settings.client_header))

    def peer(self, address: IAddress | None) -> Peer:
        """Return who is at the other end of a connection."""
        host = str(getattr(address, "host", ""))
        try:
            host = canonicalize(host)
        except ValueError:
            trusted = self.proxies.trusts_unix and isinstance(address, UNIXAddress)
        else:
            trusted = self.proxies.is_trusted(host)
        # A proxy has all the connections it needs: its clients are counted by their requests.
        return (
            Peer(host, "", None)
            if trusted
            else Peer(host, group_address(host), RemoteAddress(host))
        )

    def asking(self, peer: Peer, headers: Headers) -> RemoteAddress:
        """Return who asks by a request with these headers. Raises MalformedRequest."""
        if peer.client is not None:
            return peer.client
        values = headers.getRawHeaders(self.proxies.header.encode(), [])
        said = self.proxies.find_client([value.decode("latin-1") for value in values])
        return (
            RemoteAddress(peer.address)
            if said is None
            else RemoteAddress(said, group_address(said))
        )


RETRY_AFTER = 5
"""Seconds after which those who were too many may try again."""


@attrs.define
class ConnectionLimits:
    """Counts the connections there are: in all, and for each address of a client."""

    limits: HttpSettings
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


_LAST_REQUEST = 1.0  # seconds after which what has begun to come meanwhile has to end, too
_LEAVE = 5.0  # seconds in which clients can still take what they are told, at the end


class DrainableConnection(Protocol):
    """A connection, as far as it matters here."""

    def take_last_request(self) -> None:
        """End, unless a request is on its way, or already here."""

    def go_away(self) -> None:
        """Answer what is asked, and then end."""

    def forceAbortClient(self) -> None:
        """End now."""


@attrs.define
class OpenConnections:
    """Those who are connected just now.

    When they are `leaving` each answer is the last one on its connection, and says so.
    """

    _clock: IReactorTime
    leaving: bool = False
    _present: dict[DrainableConnection, None] = attrs.field(factory=dict)
    _left: Condition[None] = attrs.field(factory=Condition)

    def enter(self, guest: DrainableConnection) -> None:
        """Note one more."""
        self._present[guest] = None

    def leave(self, guest: DrainableConnection) -> None:
        """Note one less."""
        del self._present[guest]
        self._left.notify(None)

    def announce(self) -> None:
        """Have nobody ask on a connection that is about to end, while others can be made."""
        self.leaving = True
        for guest in list(self._present):
            guest.take_last_request()

    async def close(self) -> None:
        """Have all go away, and return when they have; who takes too long is cut off."""
        self.announce()
        for seconds in (_LAST_REQUEST, _LEAVE - _LAST_REQUEST):
            for guest in list(self._present):
                guest.go_away()
            await poll_until(lambda: not self._present, self._left, seconds, self._clock)
        for guest in list(self._present):
            guest.forceAbortClient()
