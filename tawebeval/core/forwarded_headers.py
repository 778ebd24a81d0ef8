"""Addresses of clients behind proxies: `X-Forwarded-For` and `Forwarded` (RFC 7239).

Each proxy appends the address of the peer that connected to it. So the list is read from the
right for as long as the writer is a trusted proxy: the first address that is not a trusted proxy
is the client's. The client itself chose everything to the left of it, which is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import attrs

from tawebeval.errors import MalformedRequest

UNIX_SOCKET_KEYWORD = "unix"
"""Entry of the trusted proxies for all peers on UNIX sockets."""

# Private, link-local and loopback networks.
_PRIVATE_NETWORKS = (
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
    *("100.64.0.0/10", "::1/128", "fc00::/7", "fe80::/10"),
)
_PRIVATE = tuple(map(ip_network, _PRIVATE_NETWORKS))

_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
# A pair or nothing, and its end. RFC 7239 has no spaces beside a semicolon, but some proxies write
# them.
_PAIR = re.compile(
    rf'[ \t]*+(?:(?P<name>{_WORD})=(?:(?P<token>{_WORD})|"(?P<quoted>(?:[^"\\]|\\.)*+)"))?'
    r"[ \t]*+(?P<end>[,;]|\Z)"
)
_QUOTED_PAIR = re.compile(r"\\(.)")
_HIDDEN = r"_[A-Za-z0-9._-]{1,64}"
_PORT = rf"(?::(?:[0-9]{{1,5}}|{_HIDDEN}))?"
_BRACKETED = re.compile(rf"\[([0-9A-Fa-f:.]+)\]{_PORT}")
_PLAIN = re.compile(rf"([0-9.]+|unknown|{_HIDDEN}){_PORT}", re.IGNORECASE)
_LONGEST = 80  # characters of a wrong address, in a message


@attrs.frozen
class TrustedProxies:
    """Trusted proxies, and the header in which they report the client's address.

    Only one header is read: a proxy passes the other one on as the client sent it.
    """

    networks: Sequence[IPv4Network | IPv6Network]
    trusts_unix_sockets: bool
    header: str

    @classmethod
    def parse(cls, trusted: Collection[str], header: str) -> TrustedProxies:
        """Return the proxies of the settings. Raises ValueError for an invalid network."""
        networks = tuple(ip_network(each) for each in trusted if each != UNIX_SOCKET_KEYWORD)
        return cls(networks, UNIX_SOCKET_KEYWORD in trusted, header)

    def is_trusted(self, address: str) -> bool:
        """Return whether an address, in canonical form, is a trusted proxy's."""
        if not self.networks:
            return False
        try:
            found = ip_address(address)
        except ValueError:
            return False
        return any(found in network for network in self.networks)

    def find_public_networks(self) -> list[str]:
        """Return the trusted networks that may contain strangers: not one address, not private."""
        return [
            str(network)
            for network in self.networks
            if network.num_addresses > 1 and not any(_within(network, own) for own in _PRIVATE)
        ]

    def find_client_address(self, header_values: Sequence[str]) -> str | None:
        """Return the client's address in the `header_values`, or None if they name no client.

        The result may also be an identifier that hides the address (RFC 7239, section 6.3), or
        "" if the proxy does not know the address. Raises MalformedRequest.
        """
        said = ",".join(header_values)
        nodes = self._nodes(said)
        client: str | None = None
        for node in reversed(nodes):
            client = self._node(node)
            if not self.is_trusted(client):
                break
        return client

    def _nodes(self, said: str) -> list[str]:
        if self.header == "Forwarded":
            try:
                return list(_forwarded(said))
            except ValueError as error:
                raise MalformedRequest(f"Forwarded: {error}") from None
        return [node for node in (each.strip(" \t") for each in said.split(",")) if node]

    def _node(self, node: str) -> str:
        try:
            return _name_of(node, bare=self.header != "Forwarded")
        except ValueError:
            raise MalformedRequest(
                f"{self.header}: {node[:_LONGEST]!r} is not an IP address; configure the proxy to"
                " send the client's address"
            ) from None


def canonicalize_address(address: str) -> str:
    """Return an IP address in its canonical form, without a zone. Raises ValueError."""
    found = ip_address(address.partition("%")[0])
    return str((isinstance(found, IPv6Address) and found.ipv4_mapped) or found)


def compute_address_group(address: str) -> str:
    """Return the group of a client for limits: its IPv4 address, or the /64 of its IPv6 address.

    The group of anything else is "".
    """
    try:
        found = ip_address(canonicalize_address(address))
    except ValueError:
        return ""
    if isinstance(found, IPv6Address):
        found = IPv6Address(int(found) >> 64 << 64)
    return str(found)


def _within(network: IPv4Network | IPv6Network, other: IPv4Network | IPv6Network) -> bool:
    return network[0] in other and network[-1] in other


def _forwarded(said: str) -> Iterator[str]:
    """Yield the `for` parameter of each element of `Forwarded`, `unknown` if absent.

    Raises ValueError for a value that is not of RFC 7239, section 4.
    """
    at, pairs = 0, dict[str, str]()
    while True:
        found = _PAIR.match(said, at)
        if found is None:
            raise ValueError(
                f"{said[at : at + _LONGEST]!r} is not a list of pairs such as for=192.0.2.1"
            )
        if found["name"] is not None:
            name, token = found["name"].lower(), found["token"]
            if name in pairs:
                raise ValueError(f"{name} occurs twice in one element")
            pairs[name] = _QUOTED_PAIR.sub(r"\1", found["quoted"]) if token is None else token
        if found["end"] != ";":
            if pairs:
                yield pairs.get("for", "unknown")
            pairs = {}
        if not found["end"]:
            return
        at = found.end()


def _name_of(node: str, bare: bool) -> str:
    """Return the name of a node without its port; "" for an unknown node.

    `bare` allows an IPv6 address without brackets. Raises ValueError.
    """
    bracketed, plain = _BRACKETED.fullmatch(node), _PLAIN.fullmatch(node)
    if bracketed is not None:
        return canonicalize_address(str(IPv6Address(bracketed[1])))
    if plain is None:
        if bare and node == "unix:":  # nginx's name for a peer on a UNIX socket
            return ""
        if bare and ":" in node:
            return canonicalize_address(node)
        raise ValueError(node)
    if plain[1].lower() == "unknown":
        return ""
    return plain[1] if plain[1].startswith("_") else canonicalize_address(plain[1])
