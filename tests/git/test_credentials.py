"""`git.credentials`: for whom a credential is, and where its secret shows."""

from __future__ import annotations

from base64 import b64encode
from ipaddress import ip_address
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.hosts import ServerAddress, parse_server_address
from tawebeval.errors import EvaluationFailure
from tawebeval.git.credentials import MAX_PASSWORD_SIZE, Credential, Login, parse_password

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
    """The header of HTTP."""

    def test_header(self) -> None:
        """Name and password are encoded together (RFC 7617)."""
        login = Login("https://host", "Aladdin", "open sesame")
        self.assertEqual(login.basic_authorization, "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==")


class TargetTests(SynchronousTestCase):
    """The servers and callers of a credential."""

    def check(self, credential: Credential, expected: bool, *urls: str) -> None:
        """Check whether a credential is for the servers of these URLs."""
        for url in urls:
            self.assertEqual(credential.is_usable_for(parse(url), "bob"), expected, url)

    def test_host(self) -> None:
        """A credential is for its host, in any case, at the protocol's own port."""
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

    def test_pattern(self) -> None:
        """A pattern is for all hosts below a domain, not for the domain."""
        credential = attrs.evolve(PASSWORD, host="*.example.org")
        self.check(credential, True, "https://git.example.org/x", "https://a.b.example.org/x")
        self.check(credential, False, "https://example.org/x", "https://evilexample.org/x")

    def test_port(self) -> None:
        """A credential with a port is for that port."""
        credential = attrs.evolve(PASSWORD, port=8443)
        self.check(credential, True, "https://git.example.org:8443/x")
        self.check(credential, False, "https://git.example.org/x", "https://git.example.org:8444/")

    def test_key(self) -> None:
        """A key is for ssh."""
        self.check(KEY, True, "ssh://git@git.example.org/x", "git@git.example.org:x")
        self.check(KEY, False, "https://git.example.org/x", "ssh://git@git.example.org:2222/x")

    def test_callers(self) -> None:
        """Without callers everybody may use a credential; with callers only these."""
        target = parse("https://git.example.org/x")
        for callers, allowed in (((), ["alice", "bob", ""]), (("alice", "carol"), ["alice"])):
            credential = attrs.evolve(PASSWORD, callers=callers)
            found = [one for one in ("alice", "bob", "") if credential.is_usable_for(target, one)]
            self.assertEqual(found, allowed)

    def test_identity(self) -> None:
        """Each part but the callers changes the identity, and so does the daemon's key."""
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
    """User name and password for a server, and options for ssh."""

    def login(self, url: str = "https://git.example.org/", **changes: Any) -> Login:
        """Return the login for a server at a private address."""
        found = attrs.evolve(PASSWORD, **changes).make_login(parse(url), PRIVATE)
        assert found is not None
        return found

    def test_origin(self) -> None:
        """The origin is protocol, host and port as git's settings name them."""
        for url, origin in (
            ("https://git.Example.org/a/b", "https://git.example.org"),
            ("https://git.example.org:443/a", "https://git.example.org"),
            ("http://git.example.org:8080/a", "http://git.example.org:8080"),
            ("https://[2606:4700::1]:8443/x", "https://[2606:4700::1]:8443"),
        ):
            self.assertEqual(self.login(url).origin, origin)

    def test_answer(self) -> None:
        """Git gets a name and a password, a line each (git-credential(1))."""
        self.assertEqual(self.login().git_credential_output, b"username=judge\npassword=s3cr:t@\n")

    def test_unencrypted(self) -> None:
        """A password goes over http to addresses that are not public, and nowhere else."""
        target = parse("http://git.example.org/x")
        error = self.assertRaises(EvaluationFailure, PASSWORD.make_login, target, PUBLIC)
        self.assertEqual(error.reason, "repository")
        self.assertIn("https", error.message)
        self.assertIsNotNone(PASSWORD.make_login(target, PRIVATE))
        self.assertIsNotNone(PASSWORD.make_login(parse("https://git.example.org/x"), PUBLIC))

    def test_key(self) -> None:
        """A key makes options of ssh: no other key, no other name, no unknown server."""
        self.assertIsNone(KEY.make_login(parse("git@git.example.org:x"), PUBLIC))
        self.assertEqual((PASSWORD.ssh_options, PASSWORD.ssh_files), ((), ()))
        self.assertEqual(KEY.ssh_files, ("/k/id", "/k/hosts"))
        expected = {"-i/k/id", "-oUser=git", "-oIdentitiesOnly=yes"}
        expected |= {"-oUserKnownHostsFile=/k/hosts", "-oStrictHostKeyChecking=yes"}
        self.assertLessEqual(expected, set(KEY.ssh_options))

    def test_scrub(self) -> None:
        """The password is removed from a text, plain and as HTTP encodes it."""
        login = self.login(password="pä ss/w?rd")
        basic = b64encode("judge:pä ss/w?rd".encode()).decode()
        text = f"a pä ss/w?rd b p%C3%A4%20ss%2Fw%3Frd c {basic} d {basic.rstrip('=')} e"
        self.assertEqual(login.scrub_password(text), "a *** b *** c *** d *** e")
        self.assertGreaterEqual(login.max_encoded_password_bytes, len(basic))

    def test_repr(self) -> None:
        """No secret is in what a traceback or a log might show."""
        for secret in ("s3cr", "KEY"):
            self.assertNotIn(secret, repr((PASSWORD, KEY, self.login())))


class PasswordTests(SynchronousTestCase):
    """The password in a file."""

    def test_line(self) -> None:
        """The line end does not belong to the password, other space does."""
        for content in (b" a b", b" a b\n", b" a b\r\n"):
            self.assertEqual(parse_password(content), " a b")

    def test_refused(self) -> None:
        """Other content is refused, in words that do not show it."""
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
