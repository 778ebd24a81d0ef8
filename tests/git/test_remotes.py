"""`git.remotes`: names are looked up once; for whom a credential is, and where its secret shows."""

from __future__ import annotations

from base64 import b64encode
from ipaddress import ip_address
from pathlib import Path
from socket import EAI_AGAIN, EAI_NONAME, gaierror
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import CredentialSettings
from tawebeval.core.hosts import HostPolicy, ResolvedGitRemote, ServerAddress, parse_server_address
from tawebeval.errors import ConfigurationError, EvaluationFailure
from tawebeval.git.remotes import (
    MAX_PASSWORD_BYTES,
    Credential,
    GitKeyring,
    Login,
    RemoteResolver,
    parse_password,
)
from tawebeval.pinned_agent import CheckedResolver
from tests.fakes.resolver import FakeResolver
from tests.fakes.world import read_again

PRIVATE = [ip_address("10.1.2.3")]
PUBLIC = [*PRIVATE, ip_address("8.8.8.8")]
PASSWORD = Credential("git.example.org", 0, "judge", (), "s3cr:t@")
KEY = Credential("git.example.org", 0, "git", (), "KEY", "/k/id", "/k/hosts")


def parse(url: str) -> ServerAddress:
    """Return the target of a URL, which is not this machine."""
    found = parse_server_address(url)
    assert found is not None
    return found


class TargetTests(SynchronousTestCase):
    def check(self, credential: Credential, expected: bool, *urls: str) -> None:
        """Check whether a credential is for the servers of these URLs."""
        for url in urls:
            self.assertEqual(credential.is_usable_for(parse(url), "bob"), expected, url)

    def test_credential_is_for_its_host(self) -> None:
        same = (
            "https://git.example.org/x",
            "http://GIT.example.org/x",
            "https://git.example.org:443",
        )
        self.check(PASSWORD, True, *same)
        others = (
            "https://example.org/git.example.org",
            "https://git.example.org.evil.net/x",
            "https://evilgit.example.org/x",
            "https://8.8.8.8/x",
            "https://git.example.org:8443/x",
            "http://git.example.org:443/x",
            "git://git.example.org/x",
            "ssh://git.example.org/x",
        )
        self.check(PASSWORD, False, *others)

    def test_pattern_is_for_all_hosts_below_domain(self) -> None:
        credential = attrs.evolve(PASSWORD, host="*.example.org")
        self.check(credential, True, "https://git.example.org/x", "https://a.b.example.org/x")
        self.check(credential, False, "https://example.org/x", "https://evilexample.org/x")

    def test_credential_with_port_is_for_that_port(self) -> None:
        credential = attrs.evolve(PASSWORD, port=8443)
        self.check(credential, True, "https://git.example.org:8443/x")
        self.check(credential, False, "https://git.example.org/x", "https://git.example.org:8444/")

    def test_ssh_key_is_used_only_for_ssh_urls(self) -> None:
        self.check(KEY, True, "ssh://git@git.example.org/x", "git@git.example.org:x")
        self.check(KEY, False, "https://git.example.org/x", "ssh://git@git.example.org:2222/x")

    def test_credential_is_usable_for_its_callers_or_for_all_if_none_are_named(self) -> None:
        target = parse("https://git.example.org/x")
        for callers, allowed in (((), ["alice", "bob", ""]), (("alice", "carol"), ["alice"])):
            credential = attrs.evolve(PASSWORD, callers=callers)
            found = [one for one in ("alice", "bob", "") if credential.is_usable_for(target, one)]
            self.assertEqual(found, allowed)

    def test_credential_id_depends_on_each_member_except_callers(self) -> None:
        changes = ({"host": "*.example.org"}, {"port": 443}, {"username": "x"}, {"secret": "x"})
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

    def test_password_over_http_is_refused_for_public_addresses_only(self) -> None:
        target = parse("http://git.example.org/x")
        error = self.assertRaises(EvaluationFailure, PASSWORD.make_login, target, PUBLIC)
        self.assertEqual(error.reason, "repository")
        self.assertIn("https", error.message)
        self.assertIsNotNone(PASSWORD.make_login(target, PRIVATE))
        self.assertIsNotNone(PASSWORD.make_login(parse("https://git.example.org/x"), PUBLIC))

    def test_ssh_key_credential_sets_ssh_options(self) -> None:
        self.assertIsNone(KEY.make_login(parse("git@git.example.org:x"), PUBLIC))
        self.assertEqual((PASSWORD.ssh_options, PASSWORD.ssh_files), ((), ()))
        self.assertEqual(KEY.ssh_files, ("/k/id", "/k/hosts"))
        expected = {"-i/k/id", "-oUser=git", "-oIdentitiesOnly=yes"}
        expected |= {"-oUserKnownHostsFile=/k/hosts", "-oStrictHostKeyChecking=yes"}
        self.assertLessEqual(expected, set(KEY.ssh_options))

    def test_password_is_removed_from_text(self) -> None:
        login = self.login(secret="pä ss/w?rd")
        basic = b64encode("judge:pä ss/w?rd".encode()).decode()
        text = f"a pä ss/w?rd b p%C3%A4%20ss%2Fw%3Frd c {basic} d {basic.rstrip('=')} e"
        self.assertEqual(login.scrub_password(text), "a *** b *** c *** d *** e")
        self.assertGreaterEqual(login.max_encoded_password_bytes, len(basic))

    def test_repr_of_credentials_and_logins_has_no_secret(self) -> None:
        for secret in ("s3cr", "KEY"):
            self.assertNotIn(secret, repr((PASSWORD, KEY, self.login())))


class PasswordTests(SynchronousTestCase):
    def test_line_end_does_not_belong_to_password(self) -> None:
        for content in (" a b", " a b\n", " a b\r\n"):
            self.assertEqual(parse_password(content), " a b")

    def test_invalid_password_file_is_refused_without_showing_its_content(self) -> None:
        for content, reason in (
            ("", "empty"),
            (" \n", "empty"),
            ("secret\nsecret", "more than one line"),
            ("secret\n\n", "more than one line"),
            ("secret\0", "control"),
            ("s" * (MAX_PASSWORD_BYTES + 1), "over 2 KiB"),
        ):
            error = self.assertRaises(ConfigurationError, parse_password, content)
            self.assertIn(reason, str(error))
            self.assertNotIn("secret", str(error))


URL = "https://git.example.org/x"


class KeyringTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()

    def write(self, name: str, content: str) -> str:
        """Write a file; return its path."""
        path = self.folder / name
        path.write_text(content)
        path.chmod(0o600)
        return str(path)

    def entry(self, **changes: Any) -> CredentialSettings:
        """Return an entry of the configuration, with the file `password` unless it has a key."""
        given = {"host": "git.example.org", "username": "judge", **changes}
        if "key_file" not in given:
            given.setdefault("password_file", str(self.folder / "password"))
        return CredentialSettings(**given)

    def keyring(self, *entries: CredentialSettings, directory: str = "") -> GitKeyring:
        return GitKeyring(entries or (self.entry(),), directory, b"key")

    def check_refused(self, *entries: CredentialSettings, words: str, setting: str) -> None:
        """Check that the error begins with the setting and a path, and has no secret."""
        error = str(self.assertRaises(ConfigurationError, self.keyring, *entries))
        self.assertTrue(error.startswith(f"repositories.credentials{setting}: "), error)
        self.assertIn(words, error)
        self.assertNotIn("s3cret", error)

    def find_password(self, keyring: GitKeyring, caller: str = "", url: str = URL) -> str | None:
        found = keyring.choose_credential(url, caller)
        return found and found.secret

    def test_password_is_read_without_its_line_end(self) -> None:
        self.write("password", "s3cret\n")
        for host in ("git.example.org", "GIT.example.ORG"):
            self.assertEqual(self.find_password(self.keyring(self.entry(host=host))), "s3cret")

    def test_file_name_without_directory_is_one_of_systemds_credentials(self) -> None:
        self.write("judge", "s3cret\n")
        entry = self.entry(password_file="judge")
        keyring = self.keyring(entry, directory=str(self.folder))
        self.assertEqual(self.find_password(keyring), "s3cret")
        self.check_refused(entry, words="LoadCredential", setting="[0].password_file")

    def test_credential_has_the_paths_of_the_key_and_of_known_hosts(self) -> None:
        key, hosts = self.write("id", "KEY"), self.write("hosts", "example ssh-ed25519 A")
        entry = self.entry(key_file=key, known_hosts_file=hosts)
        found = self.keyring(entry).choose_credential("git@git.example.org:x", "")
        assert found is not None
        self.assertEqual(
            (found.key_file, found.known_hosts_file, found.secret), (key, hosts, "KEY")
        )
        Path(hosts).unlink()
        self.check_refused(entry, words="No such file", setting="[0].known_hosts_file")

    def test_missing_unreadable_empty_or_malformed_file_is_refused(self) -> None:
        other = self.entry(password_file=self.write("other", "x"))
        for content, words in ((None, "No such file"), ("", "empty"), ("s3cret\nx", "one line")):
            if content is not None:
                self.write("password", content)
            self.check_refused(other, self.entry(), words=words, setting="[1].password_file")
        key = self.entry(
            key_file=self.write("id", "\n"), known_hosts_file=self.write("hosts", "example A")
        )
        self.check_refused(key, words="empty", setting="[0].key_file")
        entry = self.entry(password_file=str(self.folder))
        self.check_refused(entry, words="directory", setting="[0].password_file")

    def test_keyring_lists_its_files_for_the_reload(self) -> None:
        self.write("password", "s3cret")
        key, hosts = self.write("id", "KEY"), self.write("hosts", "example A")
        keyring = self.keyring(
            self.entry(password_file="password"),
            self.entry(key_file=key, known_hosts_file=hosts),
            directory=str(self.folder),
        )
        expected = [self.folder / name for name in ("password", "id", "hosts")]
        (reloadable,) = keyring.list_reloadable_files()
        self.assertEqual(list(reloadable.paths), expected)

    def test_file_that_every_user_can_read_is_warned_of(self) -> None:
        path = Path(self.write("password", "s3cret"))
        for mode, expected in ((0o600, 0), (0o644, 1)):
            path.chmod(mode)
            with capturedLogs() as events:
                self.keyring()
            self.assertEqual(len(events), expected)
        self.assertIn(str(path), repr(events))
        self.assertNotIn("s3cret", repr(events))

    def test_first_credential_for_url_and_caller_is_chosen(self) -> None:
        mine = self.entry(password_file=self.write("a", "alice's"), callers=("alice",))
        shared = self.entry(password_file=self.write("b", "everybody's"), host="*.example.org")
        for entries, caller, url, expected in (
            ((mine, shared), "alice", URL, "alice's"),
            ((mine, shared), "bob", URL, "everybody's"),
            ((mine, shared), "alice", "https://example.net/x", None),
            ((mine, shared), "alice", "file:///srv/x", None),
            ((shared, mine), "alice", URL, "everybody's"),
        ):
            found = self.find_password(self.keyring(*entries), caller, url)
            self.assertEqual(found, expected)

    def test_reload_with_any_mistake_changes_no_credential(self) -> None:
        first, second = self.write("first", "old"), self.write("second", "old")
        keyring = self.keyring(
            self.entry(password_file=first), self.entry(password_file=second, host="b")
        )
        self.write("first", "new")
        Path(second).unlink()
        error = self.assertRaises(ConfigurationError, read_again, keyring)
        self.assertIn("credentials[1].password_file", str(error))
        self.assertEqual(self.find_password(keyring), "old")

    def test_without_credentials_there_is_nothing_to_reload(self) -> None:
        self.assertEqual(list(GitKeyring((), "", b"key").list_reloadable_files()), [])


class RouteTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()

    def find(self, resolver: FakeResolver, url: str = "https://h/x") -> Deferred[ResolvedGitRemote]:
        remotes = RemoteResolver(CheckedResolver(HostPolicy(), resolver, self.clock))
        return Deferred.fromCoroutine(remotes.resolve_remote(url)).addCallback(
            lambda found: found[0]
        )

    def refuse(self, resolver: FakeResolver, url: str = "https://h/x") -> EvaluationFailure:
        return self.failureResultOf(self.find(resolver, url), EvaluationFailure).value

    def test_git_is_pinned_to_the_addresses_of_the_first_look_up(self) -> None:
        resolver = FakeResolver(["8.8.8.8", "2606:4700::1"], ["127.0.0.1"])
        route = self.successResultOf(self.find(resolver))
        self.assertEqual(
            route.environment_variables["GIT_CONFIG_VALUE_0"], "h:443:8.8.8.8,[2606:4700::1]"
        )
        self.assertEqual(resolver.asked, ["h"])

    def test_addresses_and_paths_need_no_look_up(self) -> None:
        resolver = FakeResolver()
        local = {"local_path": "/srv/x", "readable_paths": ("/srv/x", "/srv/x.git")}
        for url, expected in (
            ("https://8.8.8.8/x", {}),
            ("/srv/x", local),
            ("file:///srv/x", local),
        ):
            self.assertEqual(
                self.successResultOf(self.find(resolver, url)), ResolvedGitRemote(url, **expected)
            )
        for url in ("http://0x7f.1/", "http://127.0.0.1/"):
            self.refuse(resolver, url)
        self.assertEqual(resolver.asked, [])

    def test_git_ssh_command_has_the_key_of_the_credential(self) -> None:
        key = Credential("h", 0, "git", (), "KEY", "/k/id", "/k/hosts")
        remotes = RemoteResolver(
            CheckedResolver(HostPolicy(), FakeResolver(["8.8.8.8"]), self.clock)
        )
        found = Deferred.fromCoroutine(remotes.resolve_remote("u@h:x", key))
        route, login = self.successResultOf(found)
        self.assertIsNone(login)
        self.assertIn("-i/k/id", route.environment_variables["GIT_SSH_COMMAND"])
        self.assertEqual(route.readable_paths, ("/k/id", "/k/hosts"))

    def test_unknown_host_is_the_fault_of_the_repository_and_dns_failure_is_not(self) -> None:
        silent = gaierror(EAI_AGAIN, "Temporary failure in name resolution")
        for answer, reason, words in (
            ([], "repository", "the host h does not exist or has no address; check its spelling"),
            (gaierror(EAI_NONAME, "Name or service not known"), "repository", "does not exist"),
            (silent, "lost", "the DNS look-up of the host h failed: Temporary failure"),
        ):
            error = self.refuse(FakeResolver(answer))
            self.assertEqual(error.reason, reason)
            self.assertIn(words, error.message)
        self.assertFalse(error.is_daemon_fault)

    def test_look_up_ends_after_30_seconds(self) -> None:
        resolver = FakeResolver()
        resolver.silent = True
        found = self.find(resolver)
        self.clock.advance(29)
        self.assertNoResult(found)
        self.clock.advance(1)
        error = self.failureResultOf(found, EvaluationFailure).value
        self.assertEqual((error.reason, error.is_daemon_fault), ("lost", False))
        self.assertIn("30 seconds", error.message)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class SourceTests(SynchronousTestCase):
    def check_refused(self, remotes: RemoteResolver, path: str, words: str) -> None:
        error = self.assertRaises(EvaluationFailure, remotes.check_local_repository, path)
        self.assertEqual(error.reason, "repository")
        self.assertIn(f"{path} {words}", error.message)

    def test_directories_of_the_daemon_are_refused(self) -> None:
        folder = Path(self.mktemp()).resolve()
        own = folder / "cache"
        own.mkdir(parents=True)
        (folder / "link").symlink_to(own)
        (folder / "x.git").symlink_to(own)
        remotes = RemoteResolver(CheckedResolver(HostPolicy(), FakeResolver(), Clock()), (own,))
        for path in (f"{folder}/other", f"{folder}/cached", "/srv/x", f"{own}/../y"):
            remotes.check_local_repository(path)
        for path in (
            *(f"{own}", f"{own}/x.git", f"{folder}/y/../cache/x"),
            *(f"{folder}/link/x", f"{folder}/x"),
            *("/proc/self/cwd", "/dev/fd/3", "/proc/self/root/x", f"{folder}", "/"),
        ):
            self.check_refused(remotes, path, "is in, or contains, a directory of the daemon")

    def test_error_about_an_unreadable_repository_path_names_the_path(self) -> None:
        loop = Path(self.mktemp()).absolute()
        loop.symlink_to(loop)
        remotes = RemoteResolver(CheckedResolver(HostPolicy(), FakeResolver(), Clock()))
        for path in (f"/srv/{'x' * 300}", f"{loop}/x"):
            error = self.assertRaises(EvaluationFailure, remotes.check_local_repository, path)
            self.assertIn(f"cannot read the repository {path}: ", error.message)
