"""`git.remotes`: for whom a credential is, and where its secret shows."""

from __future__ import annotations

from base64 import b64encode
from ipaddress import ip_address
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.hosts import ServerAddress, parse_server_address
from tawebeval.errors import EvaluationFailure
from tawebeval.git.remotes import MAX_PASSWORD_SIZE, Credential, Login, parse_password

PRIVATE = [ip_address("10.1.2.3")]
PUBLIC = [*PRIVATE, ip_address("8.8.8.8")]
PASSWORD = Credential("git.example.org", 0, "judge", (), b"s3cr:t@", "s3cr:t@")
KEY = Credential("git.example.org", 0, "git", (), b"KEY", None, "/k/id", "/k/hosts")


def parse(url: str) -> ServerAddress:
    """Return the target of a URL, which is not this machine."""
    found = parse_server_address(url)
    assert found is not None
    return found


class BasicTests(SynchronousTestCase):
    def test_name_and_password_are_encoded_together(self) -> None:
        login = Login("https://host", "Aladdin", "open sesame")
        self.assertEqual(login.basic_authorization, "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==")


class TargetTests(SynchronousTestCase):
    def check(self, credential: Credential, expected: bool, *urls: str) -> None:
        """Check whether a credential is for the servers of these URLs."""
        for url in urls:
            self.assertEqual(credential.is_usable_for(parse(url), "bob"), expected, url)

    def test_credential_is_for_its_host(self) -> None:
        self.check(
            PASSWORD,
            True,
            *("https://git.example.org/x", "http://GIT.example.org/x"),
            "https://git.example.org:443",
        )
        self.check(
            PASSWORD,
            False,
            *("https://example.org/git.example.org", "https://git.example.org.evil.net/x"),
            *("https://evilgit.example.org/x", "https://8.8.8.8/x"),
            *("https://git.example.org:8443/x", "http://git.example.org:443/x"),
            *("git://git.example.org/x", "ssh://git.example.org/x"),
        )

    def test_pattern_is_for_all_hosts_below_domain(self) -> None:
        credential = attrs.evolve(PASSWORD, host="*.example.org")
        self.check(credential, True, "https://git.example.org/x", "https://a.b.example.org/x")
        self.check(credential, False, "https://example.org/x", "https://evilexample.org/x")

    def test_credential_with_port_is_for_that_port(self) -> None:
        credential = attrs.evolve(PASSWORD, port=8443)
        self.check(credential, True, "https://git.example.org:8443/x")
        self.check(credential, False, "https://git.example.org/x", "https://git.example.org:8444/")

    def test_key_is_for_ssh(self) -> None:
        self.check(KEY, True, "ssh://git@git.example.org/x", "git@git.example.org:x")
        self.check(KEY, False, "https://git.example.org/x", "ssh://git@git.example.org:2222/x")

    def test_without_callers_everybody_may_use_credential(self) -> None:
        target = parse("https://git.example.org/x")
        for callers, allowed in (((), ["alice", "bob", ""]), (("alice", "carol"), ["alice"])):
            credential = attrs.evolve(PASSWORD, callers=callers)
            found = [one for one in ("alice", "bob", "") if credential.is_usable_for(target, one)]
            self.assertEqual(found, allowed)

    def test_each_part_but_callers_changes_identity(self) -> None:
        changes = (
            {"host": "*.example.org"},
            {"port": 443},
            {"username": "x"},
            {"secret_file_content": b"x"},
        )
        credentials = [PASSWORD, *(attrs.evolve(PASSWORD, **change) for change in changes)]
        credentials += [KEY, attrs.evolve(KEY, key_file="/k/another")]
        identities = {each.derive_credential_id(b"key") for each in credentials}
        self.assertEqual(len(identities), len(credentials))
        self.assertNotIn(PASSWORD.derive_credential_id(b"another"), identities)
        same = attrs.evolve(PASSWORD, callers=("alice",))
        self.assertEqual(same.derive_credential_id(b"key"), PASSWORD.derive_credential_id(b"key"))


class LoginTests(SynchronousTestCase):
    def login(self, url: str = "https://git.example.org/", **changes: Any) -> Login:
        """Return the login for a server at a private address."""
        found = attrs.evolve(PASSWORD, **changes).make_login(parse(url), PRIVATE)
        assert found is not None
        return found

    def test_origin_is_protocol_host_and_port(self) -> None:
        for url, origin in (
            ("https://git.Example.org/a/b", "https://git.example.org"),
            ("https://git.example.org:443/a", "https://git.example.org"),
            ("http://git.example.org:8080/a", "http://git.example.org:8080"),
            ("https://[2606:4700::1]:8443/x", "https://[2606:4700::1]:8443"),
        ):
            self.assertEqual(self.login(url).origin, origin)

    def test_git_gets_name_and_password(self) -> None:
        self.assertEqual(self.login().git_credential_output, b"username=judge\npassword=s3cr:t@\n")

    def test_password_goes_over_http_to_addresses_that_are_not_public(self) -> None:
        target = parse("http://git.example.org/x")
        error = self.assertRaises(EvaluationFailure, PASSWORD.make_login, target, PUBLIC)
        self.assertEqual(error.reason, "repository")
        self.assertIn("https", error.message)
        self.assertIsNotNone(PASSWORD.make_login(target, PRIVATE))
        self.assertIsNotNone(PASSWORD.make_login(parse("https://git.example.org/x"), PUBLIC))

    def test_key_makes_options_of_ssh(self) -> None:
        self.assertIsNone(KEY.make_login(parse("git@git.example.org:x"), PUBLIC))
        self.assertEqual((PASSWORD.ssh_options, PASSWORD.ssh_files), ((), ()))
        self.assertEqual(KEY.ssh_files, ("/k/id", "/k/hosts"))
        expected = {"-i/k/id", "-oUser=git", "-oIdentitiesOnly=yes"}
        expected |= {"-oUserKnownHostsFile=/k/hosts", "-oStrictHostKeyChecking=yes"}
        self.assertLessEqual(expected, set(KEY.ssh_options))

    def test_password_is_removed_from_text(self) -> None:
        login = self.login(password="pä ss/w?rd")
        basic = b64encode("judge:pä ss/w?rd".encode()).decode()
        text = f"a pä ss/w?rd b p%C3%A4%20ss%2Fw%3Frd c {basic} d {basic.rstrip('=')} e"
        self.assertEqual(login.scrub_password(text), "a *** b *** c *** d *** e")
        self.assertGreaterEqual(login.max_encoded_password_bytes, len(basic))

    def test_no_secret_is_in_what_traceback_or_log_might_show(self) -> None:
        for secret in ("s3cr", "KEY"):
            self.assertNotIn(secret, repr((PASSWORD, KEY, self.login())))


class PasswordTests(SynchronousTestCase):
    def test_line_end_does_not_belong_to_password(self) -> None:
        for content in (b" a b", b" a b\n", b" a b\r\n"):
            self.assertEqual(parse_password(content), " a b")

    def test_other_content_is_refused_in_words_that_do_not_show_it(self) -> None:
        for content, reason in (
            (b"", "empty"),
            (b" \n", "empty"),
            (b"secret\nsecret", "more than one line"),
            (b"secret\n\n", "more than one line"),
            (b"secret\0", "control"),
            (b"secret\xff", "UTF-8"),
            (b"s" * (MAX_PASSWORD_SIZE + 1), "over 2 KiB"),
        ):
            error = self.assertRaises(ValueError, parse_password, content)
            self.assertIn(reason, str(error))
            self.assertNotIn("secret", str(error))
