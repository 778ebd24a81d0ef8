"""`core.forwarded_headers`: for whom a proxy asks, whoever else has written into its header."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.forwarded_headers import (
    UNIX_SOCKET_KEYWORD,
    TrustedProxies,
    canonicalize_address,
    compute_address_group,
)
from tawebeval.errors import MalformedRequest

TRUSTED = ("127.0.0.1", "10.0.0.0/8", "2001:db8:1::/48", UNIX_SOCKET_KEYWORD)
PLAIN = TrustedProxies.parse(TRUSTED)

ADDRESSES = st.ip_addresses().map(str)
OTHERS_MODE = ADDRESSES.map(canonicalize_address).filter(
    lambda address: not PLAIN.is_trusted(address)
)
PROXIES = st.sampled_from(["127.0.0.1", "10.1.2.3", "2001:db8:1::7"])
PORTS = st.none() | st.integers(0, 65535).map(str)
# The client's own word, in as many elements as it likes, but none that would swallow the next.
WORDS = st.lists(st.text("abc123.:_[] \t", max_size=12), max_size=5).map(",".join)


def with_port(address: str, port: str | None) -> str:
    """Return an address as a node: one of IPv6 is in brackets."""
    name = f"[{address}]" if ":" in address else address
    return name if port is None else f"{name}:{port}"


class NodeTests(SynchronousTestCase):
    @given(OTHERS_MODE, PORTS)
    def test_address_comes_through_whatever_its_port(self, address: str, port: str | None) -> None:
        self.assertEqual(PLAIN.find_client_address([with_port(address, port)]), address)
        self.assertEqual(PLAIN.find_client_address([address]), address)

    def test_address_that_the_proxy_does_not_know_is_empty(self) -> None:
        for value in ("unknown", "unix:", "192.0.2.1, unknown"):
            self.assertEqual(PLAIN.find_client_address([value]), "")

    def test_mapped_ipv4_address_is_that_address(self) -> None:
        self.assertEqual(PLAIN.find_client_address(["::ffff:192.0.2.1"]), "192.0.2.1")
        self.assertEqual(
            PLAIN.find_client_address(["192.0.2.1, [::ffff:127.0.0.1]:7"]), "192.0.2.1"
        )

    def test_what_is_no_address_is_refused_with_the_header(self) -> None:
        for node in (
            *("1.2.3", "1.2.3.4.5", "256.1.1.1", "01.2.3.4", "[::1", "::1]", "[1.2.3.4]", "[]"),
            *("[fe80::1%eth0]", "example.org", "_", "_hidden", "1.2.3.4:", "1.2.3.4:123456"),
            *("1.2.3.4:x", "-", "'1.2.3.4'", "unknown1", "1.2.3.4 5", "[::1]x"),
        ):
            error = self.assertRaises(MalformedRequest, PLAIN.find_client_address, [node])
            self.assertEqual(
                str(error),
                f"X-Forwarded-For: {node!r} is not an IP address; configure the proxy to send the"
                " client's address",
            )


class EmptyTests(SynchronousTestCase):
    def test_without_an_element_a_proxy_asks_for_itself(self) -> None:
        for values in ([], [""], [" , ,"]):
            self.assertIsNone(PLAIN.find_client_address(values))
        self.assertEqual(PLAIN.find_client_address([",192.0.2.1, ,", ""]), "192.0.2.1")

    def test_time_is_linear_in_the_length_of_the_header(self) -> None:
        for value in (" " * 32_000 + "x", "[" * 32_000, "1" * 32_000, ":" * 32_000):
            self.assertRaises(MalformedRequest, PLAIN.find_client_address, [value])


class TrustTests(SynchronousTestCase):
    @given(WORDS, OTHERS_MODE, st.lists(PROXIES, max_size=3), st.integers(0, 4))
    def test_address_that_a_client_claims_does_not_count(
        self, word: str, client: str, proxies: list[str], cut: int
    ) -> None:
        said = [with_port(each, None) for each in (client, *proxies)]
        lines = [word, ", ".join(said[:cut]), ", ".join(said[cut:])]
        self.assertEqual(PLAIN.find_client_address(lines), client)
        self.assertEqual(PLAIN.find_client_address([",".join(lines)]), client)

    @given(st.lists(PROXIES, min_size=1, max_size=3))
    def test_where_all_are_proxies_the_first_of_them_is_who_asks(self, proxies: list[str]) -> None:
        self.assertEqual(PLAIN.find_client_address([",".join(proxies)]), proxies[0])

    def test_only_listed_proxies_are_trusted(self) -> None:
        for address, trusted in (
            *(("127.0.0.1", True), ("127.0.0.2", False), ("10.255.0.1", True), ("11.0.0.1", False)),
            *(("2001:db8:1:2::3", True), ("2001:db8:2::", False), ("", False), ("unix", False)),
        ):
            self.assertEqual(PLAIN.is_trusted(address), trusted, address)
            self.assertFalse(TrustedProxies.parse((UNIX_SOCKET_KEYWORD,)).is_trusted(address))
        self.assertTrue(PLAIN.trusts_unix_sockets)
        self.assertFalse(TrustedProxies.parse(("::1",)).trusts_unix_sockets)

    def test_networks_in_which_strangers_may_be_are_found(self) -> None:
        fine = (
            "192.0.2.1",
            "2001:db8::1",
            "10.0.0.0/8",
            "127.0.0.0/30",
            "fd00::/8",
            UNIX_SOCKET_KEYWORD,
        )
        self.assertEqual(TrustedProxies.parse(fine).find_public_networks(), [])
        wide = ("0.0.0.0/0", "::/0", "10.0.0.0/7", "192.0.2.0/31", "2001:db8::/64")
        self.assertEqual(tuple(TrustedProxies.parse((*fine, *wide)).find_public_networks()), wide)


class GroupTests(SynchronousTestCase):
    def test_an_ipv4_address_however_written(self) -> None:
        for address, group in (
            ("2001:db8::1", "2001:db8::"),
            ("2001:db8:0:0:ffff::1", "2001:db8::"),
            ("2001:db8:0:1::1", "2001:db8:0:1::"),
            ("fe80::1%eth0", "fe80::"),
            ("::1", "::"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            ("192.0.2.1", "192.0.2.1"),
            ("", ""),
        ):
            self.assertEqual(compute_address_group(address), group)

    @given(st.ip_addresses())
    def test_address_has_one_spelling_whichever_it_came_in(
        self, address: IPv4Address | IPv6Address
    ) -> None:
        name = canonicalize_address(address.exploded)
        self.assertEqual(canonicalize_address(name), name)
        self.assertEqual(canonicalize_address(str(address).upper()), name)
