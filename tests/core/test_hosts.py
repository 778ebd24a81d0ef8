"""`core.hosts`: the host of a URL, permitted hosts, routes of git, and clients behind proxies."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.hosts import (
    UNIX_PROXIES_KEYWORD,
    HostPolicy,
    ResolvedGitRemote,
    ServerAddress,
    TrustedProxies,
    canonicalize_address,
    compute_address_group,
    format_address,
    is_public_address,
    parse_local_path,
    parse_server_address,
    resolve_git_remote,
)
from tawebeval.errors import ForbiddenURLHost, MalformedRequest

PUBLIC = [
    "8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "2002:808:808::",
    "64:ff9b::808:808",
]  # fmt: skip
PRIVATE = [
    "127.0.0.1", "127.9.9.9", "169.254.169.254", "0.0.0.0", "0.1.2.3", "10.0.0.1",
    "172.16.0.1", "192.168.1.1", "100.64.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1",
    "255.255.255.255", "192.0.2.1", "198.18.0.1", "::", "::1", "fd00::1", "fe80::1",
    "fec0::1", "ff02::1", "ff0e::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
    "::127.0.0.1", "2002:7f00:1::", "2002:a9fe:a9fe::", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808", "2001:db8::1", "2001:0:1::1", "100::1",
]  # fmt: skip


class TargetTests(SynchronousTestCase):
    def test_name_and_port_are_found_in_each_form_of_url(self) -> None:
        for url, protocol, host, port in (
            ("https://Example.ORG/x", "https", "example.org", 443),
            ("http://h:8080", "http", "h", 8080),
            ("https://h?a@b", "https", "h", 443),
            ("https://h#a", "https", "h", 443),
            ("git://a_b.c-d/x", "git", "a_b.c-d", 9418),
            ("ssh://git@h:2222/x", "ssh", "h", 2222),
            ("git@h:path:x", "ssh", "h", 22),
            ("h:path@x/y", "ssh", "h", 22),
        ):
            self.assertEqual(
                parse_server_address(url), ServerAddress(protocol, host, port, None), url
            )

    def test_ip_address_in_a_url_is_parsed_as_an_ip_address(self) -> None:
        for url, host in (
            ("http://127.0.0.1/x", "127.0.0.1"),
            ("http://[::1]/x", "::1"),
            ("http://[0:0::1]:80/x", "::1"),
            ("127.0.0.1:x", "127.0.0.1"),
        ):
            target = parse_server_address(url)
            assert target is not None
            self.assertEqual((target.host, target.ip_address), (host, ip_address(host)))
            self.assertEqual(target.url_host, "[::1]" if host == "::1" else host)

    def test_path_of_this_machine_has_no_host(self) -> None:
        for url, path in (
            ("/srv/a%20b", "/srv/a%20b"),
            ("file:///srv/a%20b%FF", "/srv/a b\udcff"),
            ("file://localhost/srv/x", "//localhost/srv/x"),
        ):
            self.assertIsNone(parse_server_address(url))
            self.assertEqual(parse_local_path(url), path)

    def test_host_is_refused_if_git_curl_or_ssh_may_parse_it_differently(self) -> None:
        for url in (
            "http://2130706433/", "http://0x7f.1/", "http://127.1/", "http://0177.0.0.1/",
            "http://0x7f000001/", "http://0/", "http://0x/", "http://1.2.3.4.5/", "http://a.08/",
            "http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/", "http://::1/",
            "http://[1.2.3.4]/", "http://127%2e0.0.1/", "http://a..b/", "http://a./",
            "http://127.0.0.1./", "http:///x", "http://a\\b/", "http://a b/", "http://a:b@c:d/",
            "http://h:/", "http://h:0/", "http://h:65536/", "git://h?x/y", "git://h#x/y",
            "ssh://h%41/x", "-x:y", "ssh://-x/y", "https://\uff11\uff12\uff17.0.0.1/",
            "https://h\u00e9/", "nonsense", "[::1]:x", "gopher://h/x", "http://" + "a" * 64 + "/",
            "http://" + "a." * 127 + "ab/",
        ):  # fmt: skip
            self.assertRaises(ValueError, parse_server_address, url)

    @given(st.text(max_size=30), st.sampled_from(["http://", "git://", "ssh://", ""]))
    def test_accepted_host_is_safe_for_shell_and_curl(self, rest: str, scheme: str) -> None:
        try:
            target = parse_server_address(scheme + rest)
        except ValueError:
            return
        if target is not None:
            self.assertRegex(target.host, r"\A[a-z0-9_:][a-z0-9_.:-]*\Z")


class PublicTests(SynchronousTestCase):
    def test_special_addresses_are_not_public(self) -> None:
        for text in (*PUBLIC, *PRIVATE):
            self.assertEqual(is_public_address(ip_address(text)), text in PUBLIC, text)

    @given(st.ip_addresses(v=4))
    def test_mapped_or_translated_ipv6_address_is_public_like_its_ipv4_address(
        self, address: object
    ) -> None:
        inner = ip_address(str(address))
        for prefix in ("::ffff:0:0", "64:ff9b::"):
            wrapped = ip_address(int(ip_address(prefix)) | int(inner))
            self.assertEqual(is_public_address(wrapped), is_public_address(inner))


class PolicyTests(SynchronousTestCase):
    def refused(self, policy: HostPolicy, url: str, *addresses: str) -> str:
        """Return why a URL is refused, "" when it is not."""
        target = parse_server_address(url)
        assert target is not None
        try:
            policy.check_host(target)
            if target.ip_address is None:
                chosen = policy.choose_addresses(target, [ip_address(text) for text in addresses])
                self.assertEqual(chosen[0], ip_address(addresses[0]))
        except ForbiddenURLHost as error:
            self.assertIn(target.host, str(error))
            return str(error)
        return ""

    def test_hosts_at_public_addresses_are_allowed(self) -> None:
        policy = HostPolicy()
        self.assertEqual(self.refused(policy, "http://h/", *PUBLIC), "")
        for text in PRIVATE:
            refusal = self.refused(policy, "http://h/", "8.8.8.8", text)
            self.assertIn("private_networks", refusal)
            self.assertNotIn(f" {text}", refusal)
            url = f"http://{format_address(ip_address(text))}/"
            self.assertIn("private_networks", self.refused(policy, url))
        self.assertIn("no IP address", self.refused(policy, "http://h/"))

    def test_only_the_configured_private_networks_are_allowed(self) -> None:
        policy = HostPolicy(allowed_private_networks=["10.0.0.0/8", "fd00::/8", "fe80::/10"])
        for text in ("10.1.2.3", "fd00::1", "fe80::1", "::ffff:10.1.2.3"):
            self.assertEqual(self.refused(policy, "http://h/", text), "")
        for text in ("127.0.0.1", "fc00::1", "fe80::1%eth0", "::ffff:127.0.0.1"):
            self.assertIn("private_networks", self.refused(policy, "http://h/", text))

    def test_at_most_four_addresses_are_chosen_with_alternating_families(self) -> None:
        target = ServerAddress("http", "h", 80, None)
        for addresses, expected in (
            (["8.8.8.8", "8.8.8.8"], ["8.8.8.8"]),
            (
                ["2606::1", "2606::2", "2606::3", "8.8.8.8"],
                ["2606::1", "8.8.8.8", "2606::2", "2606::3"],
            ),
            ([f"8.8.8.{n}" for n in range(9)], [f"8.8.8.{n}" for n in range(4)]),
        ):
            chosen = HostPolicy().choose_addresses(target, list(map(ip_address, addresses)))
            self.assertEqual(list(map(str, chosen)), expected)
        self.refused(HostPolicy(), "http://h/", *["8.8.8.8"] * 9, "10.0.0.1")

    def test_refusal_names_the_setting_as_the_operator_wrote_it(self) -> None:
        policy = HostPolicy(["a.org"], settings_section="callbacks")
        self.assertIn(" callbacks.", self.refused(policy, "http://b.org/"))
        policy = HostPolicy(settings_section="callbacks")
        self.assertIn(" callbacks.private_networks", self.refused(policy, "http://10.0.0.1/"))

    def test_allowed_hosts_match_a_whole_name_or_names_below_a_domain(self) -> None:
        policy = HostPolicy(allowed_hosts=["a.org", "*.B.org"])
        for host, setting in (
            *(("a.org", ""), ("A.org", ""), ("c.b.org", ""), ("d.c.b.org", "")),
            *(("b.org", "allow_hosts"), ("xa.org", "allow_hosts"), ("c.a.org", "allow_hosts")),
            ("8.8.8.8", "allow_hosts"),
        ):
            found = self.refused(policy, f"https://{host}/", "8.8.8.8")
            self.assertIn(setting, found)
            self.assertEqual(bool(found), bool(setting), host)


class RouteTests(SynchronousTestCase):
    def check(self, url: str, address: str, expected: ResolvedGitRemote) -> None:
        target = parse_server_address(url)
        assert target is not None
        addresses = list(map(ip_address, address.split()))
        self.assertEqual(resolve_git_remote(url, target, addresses), expected)

    def test_curl_gets_the_resolved_addresses_of_the_host(self) -> None:
        for address, text in (
            ("8.8.8.8", "8.8.8.8"),
            ("2606:4700::1 8.8.8.8", "[2606:4700::1],8.8.8.8"),
        ):
            environment = {
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "http.curloptResolve",
                "GIT_CONFIG_VALUE_0": f"h:443:{text}",
            }
            self.check("https://H/x", address, ResolvedGitRemote("https://H/x", environment))

    def test_git_protocol_url_has_the_resolved_address_and_git_sends_the_host_name(self) -> None:
        environment = {"GIT_OVERRIDE_VIRTUAL_HOST": "h:9418"}
        self.check(
            "git://h/x/y", "8.8.8.8", ResolvedGitRemote("git://8.8.8.8:9418/x/y", environment)
        )
        self.check("git://h/x", "2606::1", ResolvedGitRemote("git://[2606::1]:9418/x", environment))

    def test_ssh_connects_to_the_address_and_checks_the_host_key_of_the_name(self) -> None:
        for url, alias in (("u@h:x", "h"), ("ssh://h:23/x", "'-oHostKeyAlias=[h]:23'")):
            command = self.ssh_command(url)
            self.assertIn(" -oHostName=8.8.8.8 ", command)
            self.assertIn(alias, command)
        for url in ("u@h:x", "u@8.8.8.8:x"):
            command = self.ssh_command(url, "-oUser=git", "-i/k y")
            self.assertTrue(command.startswith("ssh -oBatchMode=yes -oUser=git '-i/k y'"), command)
            self.assertEqual("-oHostName=8.8.8.8" in command, url == "u@h:x")

    def ssh_command(self, url: str, *options: str) -> str:
        target = parse_server_address(url)
        assert target is not None
        found = resolve_git_remote(url, target, [ip_address("8.8.8.8")], list(options))
        return found.environment_variables["GIT_SSH_COMMAND"]

    def test_url_with_an_address_is_not_changed(self) -> None:
        self.check("http://8.8.8.8/x", "8.8.8.8", ResolvedGitRemote("http://8.8.8.8/x"))


TRUSTED = ("127.0.0.1", "10.0.0.0/8", "2001:db8:1::/48", UNIX_PROXIES_KEYWORD)
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
    def test_forwarded_address_is_found_with_or_without_a_port(
        self, address: str, port: str | None
    ) -> None:
        self.assertEqual(PLAIN.find_client_address([with_port(address, port)]), address)
        self.assertEqual(PLAIN.find_client_address([address]), address)

    def test_client_address_is_empty_if_the_proxy_does_not_know_it(self) -> None:
        for value in ("unknown", "unix:", "192.0.2.1, unknown"):
            self.assertEqual(PLAIN.find_client_address([value]), "")

    def test_mapped_ipv4_address_is_reported_as_ipv4(self) -> None:
        self.assertEqual(PLAIN.find_client_address(["::ffff:192.0.2.1"]), "192.0.2.1")
        self.assertEqual(
            PLAIN.find_client_address(["192.0.2.1, [::ffff:127.0.0.1]:7"]), "192.0.2.1"
        )

    def test_forwarded_header_without_an_address_is_refused(self) -> None:
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
    def test_proxy_counts_as_the_client_if_no_address_was_forwarded(self) -> None:
        for values in ([], [""], [" , ,"]):
            self.assertIsNone(PLAIN.find_client_address(values))
        self.assertEqual(PLAIN.find_client_address([",192.0.2.1, ,", ""]), "192.0.2.1")

    def test_time_is_linear_in_the_length_of_the_header(self) -> None:
        for value in (" " * 32_000 + "x", "[" * 32_000, "1" * 32_000, ":" * 32_000):
            self.assertRaises(MalformedRequest, PLAIN.find_client_address, [value])


class TrustedProxyTests(SynchronousTestCase):
    @given(WORDS, OTHERS_MODE, st.lists(PROXIES, max_size=3), st.integers(0, 4))
    def test_addresses_forwarded_before_the_client_address_are_ignored(
        self, word: str, client: str, proxies: list[str], cut: int
    ) -> None:
        said = [with_port(each, None) for each in (client, *proxies)]
        lines = [word, ", ".join(said[:cut]), ", ".join(said[cut:])]
        self.assertEqual(PLAIN.find_client_address(lines), client)
        self.assertEqual(PLAIN.find_client_address([",".join(lines)]), client)

    @given(st.lists(PROXIES, min_size=1, max_size=3))
    def test_first_address_is_the_client_if_all_are_proxies(self, proxies: list[str]) -> None:
        self.assertEqual(PLAIN.find_client_address([",".join(proxies)]), proxies[0])

    def test_only_listed_proxies_are_trusted(self) -> None:
        for address, trusted in (
            *(("127.0.0.1", True), ("127.0.0.2", False), ("10.255.0.1", True), ("11.0.0.1", False)),
            *(("2001:db8:1:2::3", True), ("2001:db8:2::", False), ("", False), ("unix", False)),
        ):
            self.assertEqual(PLAIN.is_trusted(address), trusted, address)
            self.assertFalse(TrustedProxies.parse((UNIX_PROXIES_KEYWORD,)).is_trusted(address))
        self.assertTrue(PLAIN.trusts_unix_sockets)
        self.assertFalse(TrustedProxies.parse(("::1",)).trusts_unix_sockets)

    def test_wide_and_public_networks_of_proxies_are_found(self) -> None:
        fine = ("192.0.2.1", "2001:db8::1", "10.0.0.0/8", "127.0.0.0/30", "fd00::/8")
        wide = ("0.0.0.0/0", "::/0", "10.0.0.0/7", "192.0.2.0/31", "2001:db8::/64")
        proxies = TrustedProxies.parse((*fine, UNIX_PROXIES_KEYWORD, *wide))
        self.assertEqual(tuple(proxies.find_public_networks()), wide)


class GroupTests(SynchronousTestCase):
    def test_group_is_an_ipv4_address_or_an_ipv6_network(self) -> None:
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
    def test_each_spelling_of_an_address_has_the_same_canonical_form(
        self, address: IPv4Address | IPv6Address
    ) -> None:
        name = canonicalize_address(address.exploded)
        self.assertEqual(canonicalize_address(name), name)
        self.assertEqual(canonicalize_address(str(address).upper()), name)
