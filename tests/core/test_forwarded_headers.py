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
FORWARDED = TrustedProxies.parse(TRUSTED, "Forwarded")
PLAIN = TrustedProxies.parse(TRUSTED, "X-Forwarded-For")

HIDDEN = st.from_regex(r"\A_[A-Za-z0-9._-]{1,64}\Z")
ADDRESSES = st.ip_addresses().map(str)
OTHERS_MODE = ADDRESSES.map(canonicalize_address).filter(
    lambda address: not PLAIN.is_trusted(address)
)
PROXIES = st.sampled_from(["127.0.0.1", "10.1.2.3", "2001:db8:1::7"])
PORTS = st.none() | st.integers(0, 65535).map(str)
HIDDEN_PORTS = PORTS | HIDDEN
# The client's own word, in as many elements as it likes, but none that would swallow the next.
WORDS = st.lists(st.text("abc123.:_[] \t", max_size=12), max_size=5).map(",".join)
OTHER_PAIRS = st.sampled_from(
    [
        "proto=https",
        'host="judge.example.org:443"',
        "by=_a",
        'ext="a,b;c=\\"d\\\\"',
        "",
        " ",
        "FOO=1",
    ]
)


def with_port(address: str, port: str | None) -> str:
    """Return an address as a node: one of IPv6 is in brackets."""
    name = f"[{address}]" if ":" in address else address
    return name if port is None else f"{name}:{port}"


@st.composite
def quoted(draw: st.DrawFn, value: str) -> str:
    """Draw a value in quotes, with more of it escaped than need be."""
    return '"' + "".join("\\" * draw(st.booleans()) + each for each in value) + '"'


@st.composite
def elements(draw: st.DrawFn, node: str) -> str:
    """Draw an element of `Forwarded` with this node, among other pairs."""
    must_quote = bool(set(node) & set('[]:"'))
    value = draw(quoted(node)) if must_quote or draw(st.booleans()) else node
    name = draw(st.sampled_from(["for", "For", "FOR"]))
    pairs = draw(st.lists(OTHER_PAIRS, unique=True, max_size=3))
    pairs.insert(draw(st.integers(0, len(pairs))), f"{name}={value}")
    return draw(st.sampled_from([";", "; "])).join(pairs)


class NodeTests(SynchronousTestCase):
    @given(OTHERS_MODE, HIDDEN_PORTS, st.data())
    def test_address_comes_through_whatever_its_port_in_both_headers(
        self, address: str, port: str | None, data: st.DataObject
    ) -> None:
        node = with_port(address, port)
        self.assertEqual(FORWARDED.find_client_address([data.draw(elements(node))]), address)
        self.assertEqual(PLAIN.find_client_address([node]), address)

    @given(OTHERS_MODE)
    def test_x_forwarded_for_has_ipv6_addresses_without_brackets(self, address: str) -> None:
        self.assertEqual(PLAIN.find_client_address([address]), address)
        if ":" in address:
            self.assertRaises(MalformedRequest, FORWARDED.find_client_address, [f'for="{address}"'])

    @given(HIDDEN, HIDDEN_PORTS, st.data())
    def test_name_with_which_a_proxy_hides_an_address_is_a_name(
        self, name: str, port: str | None, data: st.DataObject
    ) -> None:
        node = name if port is None else f"{name}:{port}"
        self.assertEqual(FORWARDED.find_client_address([data.draw(elements(node))]), name)
        self.assertEqual(PLAIN.find_client_address([node]), name)
        self.assertEqual(compute_address_group(name), "")

    def test_address_that_the_proxy_does_not_know_is_empty(self) -> None:
        for value in ("for=unknown", 'for="Unknown:80"', "proto=https", "for=192.0.2.1, by=_x"):
            self.assertEqual(FORWARDED.find_client_address([value]), "")
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
            *("[fe80::1%eth0]", "example.org", "_", "_" + "a" * 65, "1.2.3.4:", "1.2.3.4:123456"),
            *("1.2.3.4:x", "-", "'1.2.3.4'", "unknown1", "1.2.3.4 5", "[::1]x"),
        ):
            error = self.assertRaises(MalformedRequest, PLAIN.find_client_address, [node])
            self.assertEqual(
                str(error),
                f"X-Forwarded-For: {node!r} is not an IP address; configure the proxy to send the"
                " client's address",
            )
            error = self.assertRaises(
                MalformedRequest, FORWARDED.find_client_address, [f'for="{node}"']
            )
            self.assertTrue(
                str(error).startswith(f"Forwarded: {node!r} is not an IP address"), error
            )


class ForwardedTests(SynchronousTestCase):
    def test_examples_of_rfc_7239(self) -> None:
        for value, client in (
            ('for="_gazonk"', "_gazonk"),
            ('For="[2001:db8:cafe::17]:4711"', "2001:db8:cafe::17"),
            ("for=192.0.2.60;proto=http;by=203.0.113.43", "192.0.2.60"),
            ("for=192.0.2.43, for=198.51.100.17", "198.51.100.17"),
            ('for=192.0.2.43, for="[2001:db8:cafe::17]", for=10.0.0.1', "2001:db8:cafe::17"),
            ("for=_hidden, for=_SEVKISEK", "_SEVKISEK"),
        ):
            self.assertEqual(FORWARDED.find_client_address([value]), client)

    def test_without_an_element_a_proxy_asks_for_itself(self) -> None:
        for values in ([], [""], [" , ,"], [";"]):
            self.assertIsNone(FORWARDED.find_client_address(values))
        self.assertEqual(FORWARDED.find_client_address([",for=192.0.2.1, ,", ""]), "192.0.2.1")

    def test_malformed_header_is_refused_as_a_whole(self) -> None:
        for value in (
            *('for="192.0.2.1', 'for="a, for=192.0.2.1', "for", "=a", "for=", "for =192.0.2.1"),
            *("for= 192.0.2.1", "for=192.0.2.1 for=192.0.2.2", "for=[::1]", 'for="a"b', 'x="\\'),
            *("for=192.0.2.1;x", "for=1.2.3.4:80", "ä=1"),
        ):
            error = self.assertRaises(MalformedRequest, FORWARDED.find_client_address, [value])
            self.assertIn("is not a list of pairs", str(error))
        for value in ("for=192.0.2.1;for=192.0.2.2", "a=1;A=2"):
            error = self.assertRaises(MalformedRequest, FORWARDED.find_client_address, [value])
            self.assertIn("occurs twice", str(error))

    def test_time_is_linear_in_the_length_of_the_header(self) -> None:
        for value in (" " * 32_000 + "x", '"' * 32_000, 'a="' + "\\\\" * 16_000, "a=b;" * 8_000):
            self.assertRaises(MalformedRequest, FORWARDED.find_client_address, [value])
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

    @given(st.data(), st.lists(ADDRESSES, max_size=3), OTHERS_MODE, st.lists(PROXIES, max_size=3))
    def test_address_that_a_client_claims_in_forwarded_does_not_count(
        self, data: st.DataObject, word: list[str], client: str, proxies: list[str]
    ) -> None:
        nodes = [with_port(each, None) for each in (*word, client, *proxies)]
        said = [data.draw(elements(node)) for node in nodes]
        self.assertEqual(FORWARDED.find_client_address(said), client)
        self.assertEqual(FORWARDED.find_client_address([" , ".join(said)]), client)

    @given(st.lists(PROXIES, min_size=1, max_size=3))
    def test_where_all_are_proxies_the_first_of_them_is_who_asks(self, proxies: list[str]) -> None:
        self.assertEqual(PLAIN.find_client_address([",".join(proxies)]), proxies[0])

    def test_only_listed_proxies_are_trusted(self) -> None:
        for address, trusted in (
            *(("127.0.0.1", True), ("127.0.0.2", False), ("10.255.0.1", True), ("11.0.0.1", False)),
            *(("2001:db8:1:2::3", True), ("2001:db8:2::", False), ("", False), ("unix", False)),
        ):
            self.assertEqual(PLAIN.is_trusted(address), trusted, address)
            self.assertFalse(
                TrustedProxies.parse((UNIX_SOCKET_KEYWORD,), "Forwarded").is_trusted(address)
            )
        self.assertTrue(PLAIN.trusts_unix_sockets)
        self.assertFalse(TrustedProxies.parse(("::1",), "Forwarded").trusts_unix_sockets)

    def test_networks_in_which_strangers_may_be_are_found(self) -> None:
        fine = (
            "192.0.2.1",
            "2001:db8::1",
            "10.0.0.0/8",
            "127.0.0.0/30",
            "fd00::/8",
            UNIX_SOCKET_KEYWORD,
        )
        self.assertEqual(TrustedProxies.parse(fine, "Forwarded").find_public_networks(), [])
        wide = ("0.0.0.0/0", "::/0", "10.0.0.0/7", "192.0.2.0/31", "2001:db8::/64")
        self.assertEqual(
            tuple(TrustedProxies.parse((*fine, *wide), "Forwarded").find_public_networks()), wide
        )


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
            ("_hidden", ""),
        ):
            self.assertEqual(compute_address_group(address), group)

    @given(st.ip_addresses())
    def test_address_has_one_spelling_whichever_it_came_in(
        self, address: IPv4Address | IPv6Address
    ) -> None:
        name = canonicalize_address(address.exploded)
        self.assertEqual(canonicalize_address(name), name)
        self.assertEqual(canonicalize_address(str(address).upper()), name)
