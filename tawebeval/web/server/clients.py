"""Who is at the other end: of a connection, and of a request that a proxy passes on."""

from __future__ import annotations

import attrs
from twisted.internet.address import UNIXAddress
from twisted.internet.interfaces import IAddress
from twisted.web.http_headers import Headers

from tawebeval.config import Http
from tawebeval.core.forwarded import Proxies, canonical, group_of


@attrs.frozen
class Client:
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
    client: Client | None


@attrs.frozen
class Clients:
    """Tells who asks."""

    proxies: Proxies

    @classmethod
    def of(cls, settings: Http) -> Clients:
        """Return what the settings make of it."""
        return cls(Proxies.of(settings.trusted_proxies, settings.client_header))

    def peer(self, address: IAddress | None) -> Peer:
        """Return who is at the other end of a connection."""
        host = str(getattr(address, "host", ""))
        try:
            host = canonical(host)
        except ValueError:
            trusted = self.proxies.unix and isinstance(address, UNIXAddress)
        else:
            trusted = self.proxies.trusts(host)
        # A proxy has all the connections it needs: its clients are counted by their requests.
        return Peer(host, "", None) if trusted else Peer(host, group_of(host), Client(host))

    def asking(self, peer: Peer, headers: Headers) -> Client:
        """Return who asks by a request with these headers. Raises MalformedRequest."""
        if peer.client is not None:
            return peer.client
        values = headers.getRawHeaders(self.proxies.header.encode(), [])
        said = self.proxies.client([value.decode("latin-1") for value in values])
        return Client(peer.address) if said is None else Client(said, group_of(said))
