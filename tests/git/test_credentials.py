"""`git.credentials`: whom a credential is for, and where its secret shows."""

from __future__ import annotations

from base64 import b64encode
from ipaddress import ip_address
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.hosts import Target, target_of
from tawebeval.errors import EvaluationError
from tawebeval.git.credentials import MAX_PASSWORD_SIZE, Credential, Login, parse_password

PUBLIC, PRIVATE = ip_address("8.8.8.8"), ip_address("10.1.2.3")


def password(**changes: Any) -> Credential:
    """Return a credential for HTTP."""
    found = Credential("git.example.org", 0, "judge", (), b"s3cr:t@", "s3cr:t@")
    return attrs.evolve(found, **changes)


def key(**changes: Any) -> Credential:
    """Return a credential for ssh."""
    found = Credential("git.example.org", 0, "git", (), b"KEY", None, "/k/id", "/k/hosts")
    return attrs.evolve(found, **changes)


def target(url: str) -> Target:
    """Return where a URL leads, which is not this machine."""
    found = target_of(url)
    assert found is not None
    return found


class ServesTests(SynchronousTestCase):
    """For which servers, and for whom."""

    def check(self, credential: Credential, yes: tuple[str, ...], no: tuple[str, ...]) -> None:
        """Check for which URLs it is, whoever calls."""
        for url in yes:
            self.assertTrue(credential.is_for(target(url), "bob"), url)
        for url in no:
            self.assertFalse(credential.is_for(target(url), "bob"), url)

    def test_host(self) -> None:
        """That host only, however it is written, at the protocol's own port."""
        self.check(
            password(),
            (
                "https://git.example.org/x",
                "http://GIT.example.org/x",
                "https://git.example.org:443",
            ),
            (
                "https://example.org/git.example.org",
                "https://git.example.org.evil.net/x",
                "https://evilgit.example.org/x",
                "https://git.example.org:8443/x",
                "http://git.example.org:443/x",
                "git://git.example.org/x",
                "ssh://git.example.org/x",
                "https://8.8.8.8/x",
            ),
        )

    def test_pattern(self) -> None:
        """All hosts below a domain, not that itself."""
        self.check(
            password(host="*.example.org"),
            ("https://git.example.org/x", "https://a.b.example.org/x"),
            ("https://example.org/x", "https://evilexample.org/x"),
        )

    def test_port(self) -> None:
        """With a port that one only."""
        self.check(
            password(port=8443),
            ("https://git.example.org:8443/x",),
            ("https://git.example.org/x", "https://git.example.org:8444/x"),
        )

    def test_key(self) -> None:
        """A key is for ssh only."""
        self.check(
            key(),
            ("ssh://git@git.example.org/x", "git@git.example.org:x"),
            ("https://git.example.org/x", "ssh://git@git.example.org:2222/x"),
        )

    def test_callers(self) -> None:
        """Those who are named, everybody where nobody is; nobody is not everybody."""
        where = target("https://git.example.org/x")
        for callers, allowed in (((), ["alice", "bob", ""]), (("alice", "carol"), ["alice"])):
            one = password(callers=callers)
            found = [caller for caller in ("alice", "bob", "") if one.is_for(where, caller)]
            self.assertEqual(found, allowed)


class IdentityTests(SynchronousTestCase):
    """By what the things are kept apart that were fetched with different credentials."""

    def test_different(self) -> None:
        """Whatever is different but the callers makes another identity; so does the key."""
        ones = [
            password(),
            password(host="*.example.org"),
            password(port=443),
            password(username="another"),
            password(secret=b"new"),
            key(),
            key(key="/k/another"),
        ]
        found = {one.derive_identity(b"key") for one in ones} | {
            password().derive_identity(b"another")
        }
        self.assertEqual(len(found), len(ones) + 1)

    def test_equal(self) -> None:
        """Who may use it does not matter, nor when it was read."""
        self.assertEqual(
            password(callers=("alice",)).derive_identity(b"key"), password().derive_identity(b"key")
        )


class LoginTests(SynchronousTestCase):
    """What a server is told."""

    def login(self, url: str, **changes: Any) -> Login:
        """Return what a server at a private address is told."""
        found = password(**changes).make_login(target(url), PRIVATE)
        assert found is not None
        return found

    def test_origin(self) -> None:
        """Protocol, host and port as git's settings name them, for this server alone."""
        for url, origin in (
            ("https://git.Example.org/a/b", "https://git.example.org"),
            ("https://git.example.org:443/a", "https://git.example.org"),
            ("http://git.example.org:8080/a", "http://git.example.org:8080"),
            ("https://[2606:4700::1]:8443/x", "https://[2606:4700::1]:8443"),
        ):
            self.assertEqual(self.login(url).origin, origin)

    def test_answer(self) -> None:
        """A name and a password, a line each, as git reads it."""
        answer = self.login("https://git.example.org/").answer
        self.assertEqual(answer, b"username=judge\npassword=s3cr:t@\n")

    def test_in_the_clear(self) -> None:
        """No password over http to a public address; where the operator has opened it, yes."""
        where = target("http://git.example.org/x")
        error = self.assertRaises(EvaluationError, password().make_login, where, PUBLIC)
        self.assertEqual(error.reason, "repository")
        self.assertIn("https", error.message)
        self.assertIsNotNone(password().make_login(where, PRIVATE))
        self.assertIsNotNone(password().make_login(target("https://git.example.org/x"), PUBLIC))

    def test_key(self) -> None:
        """A key is no login, but options of ssh: no other key, no other name, no unknown server."""
        self.assertIsNone(key().make_login(target("git@git.example.org:x"), PUBLIC))
        self.assertEqual(password().ssh_options, ())
        options = key().ssh_options
        for option in (
            "-i/k/id",
            "-oUser=git",
            "-oIdentitiesOnly=yes",
            "-oUserKnownHostsFile=/k/hosts",
            "-oStrictHostKeyChecking=yes",
        ):
            self.assertIn(option, options)

    def test_scrub(self) -> None:
        """The password does not show, as it is or as HTTP encodes it."""
        login = self.login("https://git.example.org/", password="pä ss/w?rd")
        basic = b64encode("judge:pä ss/w?rd".encode()).decode()
        said = f"a pä ss/w?rd b p%C3%A4%20ss%2Fw%3Frd c {basic} d {basic.rstrip('=')} e"
        self.assertEqual(login.scrub(said), "a *** b *** c *** d *** e")
        self.assertGreaterEqual(login.max_length, len(basic))

    def test_repr(self) -> None:
        """No secret stands in what a traceback or a log might show."""
        for one in (password(), key(), self.login("https://git.example.org/")):
            for secret in ("s3cr", "KEY"):
                self.assertNotIn(secret, repr(one))


class ParseTests(SynchronousTestCase):
    """What stands in a file."""

    def test_line(self) -> None:
        """One line; its end does not belong to it, other space does."""
        for content in (b" a b", b" a b\n", b" a b\r\n"):
            self.assertEqual(parse_password(content), " a b")

    def test_none(self) -> None:
        """What is no password, in words that do not show it."""
        for content, why in (
            (b"", "empty"),
            (b" \n", "empty"),
            (b"secret\nsecret", "more than one line"),
            (b"secret\n\n", "more than one line"),
            (b"secret\0", "control"),
            (b"secret\xff", "UTF-8"),
            (b"s" * (MAX_PASSWORD_SIZE + 1), "2048"),
        ):
            error = self.assertRaises(ValueError, parse_password, content)
            self.assertIn(why, str(error))
            self.assertNotIn("secret", str(error))
