"""Hosts of URLs, the operator's rules for hosts, routes that bind git, and clients behind proxies.

A stranger chooses the URL. The daemon must read its host exactly as git, curl and ssh do, so only
plain forms are accepted. The daemon looks a name up once and makes git connect to the addresses
that passed the check; a second DNS answer changes nothing.

A request over proxies has its client's address in `X-Forwarded-For`, to which each proxy appends
the address of the peer that connected to it. So the list is read from the right for as long as the
writer is a trusted proxy: the first address that is not a trusted proxy is the client's. The client
itself chose everything to the left of it, which is ignored.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from itertools import zip_longest
from urllib.parse import unquote_to_bytes

import attrs

from tawebeval.errors import ForbiddenURLHost, MalformedRequest

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

MAX_ADDRESSES_PER_HOST = 4
"""Addresses of one host that are tried, at most."""

SSH_COMMAND = "ssh -oBatchMode=yes"

DEFAULT_PORTS = {"http": 80, "https": 443, "git": 9418, "ssh": 22}
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)
_SCP_LIKE = re.compile(r"(?:[^/:@]*@)?([^/:@]+):.*", re.DOTALL)
_AUTHORITY = re.compile(r"(?:[^@]*@)?(\[[^\]]*\]|[^:\[\]]*)(?::([0-9]{1,5}))?")
_NAME = re.compile(r"(?!.{254})[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_][a-z0-9_-]{0,62})*")
# Numbers of inet_aton(3): curl reads `0x7f.1` and `2130706433` as addresses.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")

_GLOBAL_IPV6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


@attrs.frozen
class ServerAddress:
    """Protocol, host and port of a URL. `host` is a lower-case name, or an address as text.

    `ip_address` is the parsed address; None for a name.
    """

    protocol: str
    host: str
    port: int
    ip_address: IPAddress | None

    @property
    def url_host(self) -> str:
        """The host in the form of URLs: an IPv6 address is in brackets."""
        return self.host if self.ip_address is None else format_address(self.ip_address)


@attrs.frozen
class ResolvedGitRemote:
    """URL for git to fetch from, with the environment variables to add.

    `local_path` is the path of a local repository, served through git's own pipe; `readable_paths`
    are files that git must be able to read, such as a key.
    """

    url: str
    environment_variables: Mapping[str, str] = attrs.field(factory=dict)
    local_path: str | None = None
    readable_paths: Sequence[str] = ()


def parse_server_address(url: str) -> ServerAddress | None:
    """Return the server of a URL, or None for a local path.

    Raises ValueError, with a message for people, for a host that is not in a plain form.
    """
    if url.startswith("/"):
        return None
    match = _URL.fullmatch(url)
    if match is None:
        scp_like = _SCP_LIKE.fullmatch(url)
        if scp_like is None:
            raise ValueError("has no host")
        return _target("ssh", scp_like[1], None)
    protocol, rest = match.groups()
    if protocol == "file":
        return None
    # curl lets a query follow the host; git and ssh would take it for a part of the host.
    ends = "[/?#]" if protocol in ("http", "https") else "/"
    authority = _AUTHORITY.fullmatch(re.split(ends, rest)[0])
    if authority is None:
        raise ValueError("has a malformed host; write scheme://host/path, without escapes")
    return _target(protocol, authority[1], authority[2])


def parse_local_path(url: str) -> str:
    """Return the path of a local repository as git reads it from a URL or a path."""
    if url.startswith("/"):
        return url
    path = unquote_to_bytes(url.partition("://")[2]).decode("utf-8", "surrogateescape")
    return path if path.startswith("/") else f"//{path}"


def _target(protocol: str, host: str, port: str | None) -> ServerAddress:
    number = int(port) if port else DEFAULT_PORTS.get(protocol, 0)
    if not 0 < number < 2**16:
        raise ValueError("has an invalid port; allowed: 1 to 65535")
    host = host.lower()
    bare = host[1:-1] if host.startswith("[") else host
    try:
        address = ip_address(bare)
    except ValueError:
        if not _NAME.fullmatch(host) or _NUMBER.fullmatch(host.rpartition(".")[2]):
            raise ValueError(
                "has a host that is neither a host name nor an IP address such as 192.0.2.1"
            ) from None
        return ServerAddress(protocol, host, number, None)
    if (address.version == 6) != (bare != host) or "%" in bare:
        raise ValueError(
            "has an IP address in an unusual form; write it as 192.0.2.1 or [2001:db8::1]"
        )
    return ServerAddress(protocol, str(address), number, address)


def format_address(address: IPAddress) -> str:
    """Return an address in the form of URLs: IPv6 in brackets."""
    return f"[{address}]" if address.version == 6 else str(address)


def resolve_git_remote(
    url: str,
    server: ServerAddress,
    addresses: Sequence[IPAddress],
    ssh_options: Sequence[str] = (),
) -> ResolvedGitRemote:
    """Return the route on which git reaches `server`, the server of `url`, at `addresses` only.

    Over git and ssh it is the first one. Certificates and host keys are still checked against the
    name.
    """
    ssh = [SSH_COMMAND, shlex.join(ssh_options)] if ssh_options else [SSH_COMMAND]
    if server.ip_address is not None:
        return ResolvedGitRemote(url, {"GIT_SSH_COMMAND": " ".join(ssh)} if ssh_options else {})
    if server.protocol in ("http", "https"):
        pinned = ",".join(map(format_address, addresses))
        return ResolvedGitRemote(
            url,
            {
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "http.curloptResolve",
                "GIT_CONFIG_VALUE_0": f"{server.host}:{server.port}:{pinned}",
            },
        )
    if server.protocol == "git":
        path = url.partition("://")[2].partition("/")[2]
        return ResolvedGitRemote(
            f"git://{format_address(addresses[0])}:{server.port}/{path}",
            {"GIT_OVERRIDE_VIRTUAL_HOST": f"{server.host}:{server.port}"},
        )
    # The name of the server in known_hosts, where ssh then does not look up the address.
    alias = server.host if server.port == DEFAULT_PORTS["ssh"] else f"[{server.host}]:{server.port}"
    options = [f"-oHostName={addresses[0]}", f"-oHostKeyAlias={alias}", "-oCheckHostIP=no"]
    return ResolvedGitRemote(url, {"GIT_SSH_COMMAND": " ".join([*ssh, shlex.join(options)])})


def _effective(address: IPAddress) -> IPAddress:
    """Return the IPv4 address that an IPv6 address embeds, or the address itself."""
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


def is_public_address(address: IPAddress) -> bool:
    """Return whether an address is on the public internet, also when embedded in another."""
    address = _effective(address)
    if isinstance(address, IPv6Address) and address not in _GLOBAL_IPV6:
        return False
    return address.is_global and not address.is_multicast


@attrs.frozen
class HostPolicy:
    """The operator's rules for hosts: name patterns (`example.org`, `*.example.org`) and networks.

    An empty `allowed_hosts` allows every host.
    `allowed_private_networks` are allowed although they are not public. `settings_section` is the
    configuration table of these rules, for messages.
    """

    allowed_hosts: Sequence[str] = ()
    allowed_private_networks: Sequence[str] = ()
    settings_section: str = "repositories"
    _networks: Sequence[IPNetwork] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        networks = tuple(ip_network(network) for network in self.allowed_private_networks)
        object.__setattr__(self, "_networks", networks)

    def check_host(self, server: ServerAddress) -> None:
        """Check the host of a URL before it is looked up. Raises ForbiddenURLHost."""
        if self.allowed_hosts and not any(
            matches_host_pattern(server.host, pattern) for pattern in self.allowed_hosts
        ):
            raise _forbidden(server, f"is not in {self.settings_section}.allow_hosts")
        if server.ip_address is not None:
            self.choose_addresses(server, [server.ip_address])

    def choose_addresses(
        self, server: ServerAddress, addresses: Sequence[IPAddress]
    ) -> Sequence[IPAddress]:
        """Return up to `MAX_ADDRESSES_PER_HOST` of `addresses`, to try in turn.

        All addresses must be allowed: a name with a forbidden one among them is an attack. The
        families alternate (RFC 8305): a server may listen on one of them alone. Raises:
        ForbiddenURLHost.
        """
        for address in addresses:
            if not self._permits(address):
                # The message omits the address: it would map a private network for strangers.
                raise _forbidden(
                    server,
                    f"has a private address, and {self.settings_section}.private_networks does "
                    "not allow it",
                )
        if not addresses:
            raise _forbidden(server, "has no IP address")
        first = addresses[0].version
        families = (
            dict.fromkeys(one for one in addresses if (one.version == first) is is_first)
            for is_first in (True, False)
        )
        alternating = (one for pair in zip_longest(*families) for one in pair if one is not None)
        return tuple(alternating)[:MAX_ADDRESSES_PER_HOST]

    def _permits(self, address: IPAddress) -> bool:
        if isinstance(address, IPv6Address) and address.scope_id is not None:
            return False
        effective = _effective(address)
        return is_public_address(address) or any(effective in network for network in self._networks)


def matches_host_pattern(host: str, pattern: str) -> bool:
    """Return whether a lower-case host matches `example.org` or `*.example.org`."""
    pattern = pattern.lower()
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _forbidden(server: ServerAddress, reason: str) -> ForbiddenURLHost:
    return ForbiddenURLHost(f"the host {server.host} {reason}")


FORWARDED_FOR_HEADER = "X-Forwarded-For"
"""Header in which proxies report the client's address."""

UNIX_PROXIES_KEYWORD = "unix"
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
        networks = tuple(ip_network(each) for each in trusted if each != UNIX_PROXIES_KEYWORD)
        return cls(networks, UNIX_PROXIES_KEYWORD in trusted)

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
                    f"{FORWARDED_FOR_HEADER}: {node[:_LONGEST]!r} is not an IP address; configure"
                    " the proxy to send the client's address"
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
