"""Clients' addresses, limits of connections, and the open connections to drain."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
from twisted.internet.address import UNIXAddress
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.web.http_headers import Headers

from tawebeval.config import HttpSettings
from tawebeval.core.hosts import (
    CLIENT_HEADER,
    TrustedProxies,
    canonicalize_address,
    compute_address_group,
)
from tawebeval.deferreds import Condition, wait_until
from tawebeval.errors import ServerBusy
from tawebeval.web.server.messages import get_header_values

RETRY_AFTER_SECONDS = 5
"""Seconds of the header `Retry-After` where a limit of connections or requests is reached."""

_MAX_REFUSED = 64  # connections over the limit that are answered at the same time
_REQUEST_GRACE = 1.0  # seconds for an idle connection to begin its last request
DRAIN_TIMEOUT = 5.0
"""Seconds for all clients to take their responses."""


@attrs.frozen
class RemoteAddress:
    """The address of a client; empty if unknown.

    `address_group` is the address group that the request counts for besides its connection: set
    only for a client behind a trusted proxy.
    """

    address: str
    address_group: str = ""


@attrs.frozen
class ConnectionPeer:
    """The other end of a connection: its address, and the address group the connection counts for.

    `direct_client` is the client of all requests on it; None for a trusted proxy, which names the
    client in each request.
    """

    address: str
    address_group: str
    direct_client: RemoteAddress | None


@attrs.frozen
class ClientAddressResolver:
    """Finds the address of a client, which may be behind a trusted proxy."""

    proxies: TrustedProxies

    @classmethod
    def from_settings(cls, settings: HttpSettings) -> ClientAddressResolver:
        """Return the resolver for these settings."""
        return cls(TrustedProxies.parse(settings.trusted_proxies))

    def identify_peer(self, address: IAddress | None) -> ConnectionPeer:
        """Return the other end of a connection from `address`."""
        host = str(getattr(address, "host", ""))
        try:
            host = canonicalize_address(host)
        except ValueError:
            trusted = self.proxies.trusts_unix_sockets and isinstance(address, UNIXAddress)
        else:
            trusted = self.proxies.is_trusted(host)
        # A proxy has all the connections it needs: its clients are counted by their requests.
        return (
            ConnectionPeer(host, "", None)
            if trusted
            else ConnectionPeer(host, compute_address_group(host), RemoteAddress(host))
        )

    def resolve_client(self, peer: ConnectionPeer, headers: Headers) -> RemoteAddress:
        """Return the client's address: the peer's, or the one a trusted proxy reports.

        Raises: MalformedRequest, HeaderTooLarge.
        """
        if peer.direct_client is not None:
            return peer.direct_client
        values = get_header_values(headers, CLIENT_HEADER)
        said = self.proxies.find_client_address([value.decode("latin-1") for value in values])
        return (
            RemoteAddress(peer.address)
            if said is None
            else RemoteAddress(said, compute_address_group(said))
        )


@attrs.define
class ConnectionLimits:
    """Counts connections, in total and for each address group.

    `refusals_in_progress` is the number of connections over the limit that are being answered.
    """

    settings: HttpSettings
    refusals_in_progress: int = 0
    connection_count: int = 0
    connections_by_address_group: Counter[str] = attrs.field(factory=Counter)

    def add_connection(self, address_group: str) -> bool:
        """Count a connection of a group; return False, without counting, at a limit."""
        if self.connection_count >= self.settings.connections or not self.add_proxied_request(
            address_group
        ):
            return False
        self.connection_count += 1
        return True

    def add_refusal(self) -> bool:
        """Count a connection over the limit; return False if there are too many to answer."""
        if self.refusals_in_progress >= _MAX_REFUSED:
            return False
        self.refusals_in_progress += 1
        return True

    def remove_refusal(self) -> None:
        """Count one connection over the limit less."""
        self.refusals_in_progress -= 1

    def remove_connection(self, address_group: str) -> None:
        """Count one connection less."""
        self.connection_count -= 1
        self.remove_proxied_request(address_group)

    def add_proxied_request(self, address_group: str) -> bool:
        """Count a proxied request of a group like a connection; return False at the limit.

        An empty group has no limit.
        """
        if not address_group:
            return True
        most = self.settings.connections_per_address
        if most and self.connections_by_address_group[address_group] >= most:
            return False
        self.connections_by_address_group[address_group] += 1
        return True

    def count_request(self, client: RemoteAddress) -> str:
        """Count the request of a client; return the group to remove. Raises: ServerBusy."""
        if not self.add_proxied_request(client.address_group):
            raise ServerBusy(
                "too many requests of this client at the same time (http.connections_per_address);"
                " try again later",
                RETRY_AFTER_SECONDS,
            )
        return client.address_group

    def remove_proxied_request(self, address_group: str) -> None:
        """Count one request less."""
        if address_group:
            self.connections_by_address_group[address_group] -= 1
            if not self.connections_by_address_group[address_group]:
                del self.connections_by_address_group[address_group]


@attrs.define
class OpenConnections:
    """All open connections, which are `ApiChannel`; drained when the daemon stops.

    While `is_draining`, each response is the last one on its connection and says so.
    """

    _clock: IReactorTime
    is_draining: bool = False
    _connections: dict[Any, None] = attrs.field(factory=dict)
    _removed: Condition = attrs.field(factory=Condition)

    def add_connection(self, connection: Any) -> None:
        """Add a connection."""
        self._connections[connection] = None

    def remove_connection(self, connection: Any) -> None:
        """Remove a closed connection."""
        del self._connections[connection]
        self._removed.notify()

    def close_idle_connections(self) -> None:
        """Close idle connections, so clients connect anew while somebody still listens."""
        self.is_draining = True
        for connection in list(self._connections):
            connection.close_if_idle()

    async def drain_connections(self, timeout: float = DRAIN_TIMEOUT) -> None:
        """Close all connections; abort those that take longer than `timeout` seconds."""
        self.close_idle_connections()
        first = min(_REQUEST_GRACE, timeout / 2)
        for seconds in (first, timeout - first):
            for connection in list(self._connections):
                connection.drain_connection()
            await wait_until(lambda: not self._connections, self._removed, seconds, self._clock)
        for connection in list(self._connections):
            connection.forceAbortClient()
