"""Addresses of clients behind proxies (`X-Forwarded-For`).

Each proxy appends the address of the peer that connected to it. So the list is read from the
right for as long as the writer is a trusted proxy: the first address that is not a trusted proxy
is the client's. The client itself chose everything to the left of it, which is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import attrs

from tawebeval.errors import MalformedRequest

CLIENT_HEADER = "X-Forwarded-For"
"""Header in which proxies report the client's address."""

UNIX_SOCKET_KEYWORD = "unix"
"""Entry of the trusted proxies for all peers on UNIX sockets."""

# Private, link-local and loopback networks.
_PRIVATE_NETWORKS = (
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
    *("100.64.0.0/10", "::1/128", "fc00::/7", "fe80::/10"),
)
_PRIVATE = tuple(map(ip_network, _PRIVATE_NETWORKS))

# An IPv4 address, or an IPv6 address in brackets, as some proxies write them.
_WITH_PORT = re.compile(r"(?:([0-9.]+)|\[([0-9A-Fa-f:.]+)\])(?::[0-9]{1,5})?")
_UNKNOWN_NODES = ("unknown", "unix:")  # Squid's word, and nginx's for a peer on a UNIX socket
_LONGEST = 80  # characters of a wrong address, in a message


@attrs.frozen
class TrustedProxies:
    """Proxies that may report the client's address, in `X-Forwarded-For`."""

    networks: Sequence[IPv4Network | IPv6Network]
    trusts_unix_sockets: bool

    @classmethod
    def parse(cls, trusted: Collection[str]) -> TrustedProxies:
        """Return the proxies of the settings. Raises ValueError for an invalid network."""
        networks = tuple(ip_network(each) for each in trusted if each != UNIX_SOCKET_KEYWORD)
        return cls(networks, UNIX_SOCKET_KEYWORD in trusted)

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

        The result is "" if the proxy does not know the address. Raises MalformedRequest.
        """
        nodes = (each.strip(" \t") for each in ",".join(header_values).split(","))
        client: str | None = None
        for node in reversed([each for each in nodes if each]):
            try:
                client = _parse_node(node)
            except ValueError:
                raise MalformedRequest(
                    f"{CLIENT_HEADER}: {node[:_LONGEST]!r} is not an IP address; configure the"
                    " proxy to send the client's address"
                ) from None
            if not self.is_trusted(client):
                break
        return client


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


def _parse_node(node: str) -> str:
    """Return the address of a node without its port; "" for an unknown node. Raises ValueError."""
    if node.lower() in _UNKNOWN_NODES:
        return ""
    with_port = _WITH_PORT.fullmatch(node)
    if with_port is None:
        return canonicalize_address(node)
    return canonicalize_address(with_port[1] or str(IPv6Address(with_port[2])))
