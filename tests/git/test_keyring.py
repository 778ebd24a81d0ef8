"""`git.keyring`: secrets are read from files, at the start and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.logger import globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import CredentialSettings
from tawebeval.errors import ConfigurationError
from tawebeval.git.keyring import Keyring
from tests.fakes import read_again

URL = "https://git.example.org/x"


class KeyringTestCase(SynchronousTestCase):
    """Files in a directory."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()
        self.logged: list[str] = []
        observer = lambda event: self.logged.append(repr(event))  # noqa: E731
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)

    def write(self, name: str, content: str) -> str:
        """Write a file; return its path."""
        path = self.folder / name
        path.write_text(content)
        path.chmod(0o600)
        return str(path)

    def entry(self, **changes: Any) -> CredentialSettings:
        """Return an entry of the configuration."""
        given = {"host": "git.example.org", "username": "judge", **changes}
        if "key_file" not in given:
            given.setdefault("password_file", str(self.folder / "password"))
        return CredentialSettings(**given)

    def keyring(self, *entries: CredentialSettings, directory: str = "") -> Keyring:
        """Return a keyring of these entries."""
        return Keyring(entries or (self.entry(),), directory, b"key")

    def reload(self, keyring: Keyring) -> None:
        """Read all files again. Raises ConfigurationError."""
        self.assertEqual([one.paths for one in keyring.rereadings()], [keyring.files])
        read_again(keyring)

    def password(self, keyring: Keyring, caller: str = "", url: str = URL) -> str | None:
        """Return the password that a caller may use."""
        found = keyring.choose_credential(url, caller)
        return found and found.password


class ReadTests(KeyringTestCase):
    """What is read, and what stops the start."""

    def test_password(self) -> None:
        """A password from a file, without the end of its line."""
        self.write("password", "s3cret\n")
        self.assertEqual(self.password(self.keyring()), "s3cret")

    def test_systemd(self) -> None:
        """A name without a directory is that of what systemd hands over."""
        self.write("judge", "s3cret\n")
        entry = self.entry(password_file="judge")
        self.assertEqual(self.password(self.keyring(entry, directory=str(self.folder))), "s3cret")
        error = self.assertRaises(ConfigurationError, self.keyring, entry)
        self.assertIn("repositories.credentials[0].password_file: judge", str(error))
        self.assertIn("LoadCredential", str(error))

    def test_key(self) -> None:
        """A key stays in its file, of which ssh is told the path; both files are looked at."""
        key, hosts = self.write("id", "KEY"), self.write("hosts", "example ssh-ed25519 A")
        entry = self.entry(key_file=key, known_hosts_file=hosts)
        found = self.keyring(entry).choose_credential("git@git.example.org:x", "")
        assert found is not None
        self.assertEqual((found.key, found.known_hosts, found.secret), (key, hosts, b"KEY"))
        Path(hosts).unlink()
        error = self.assertRaises(ConfigurationError, self.keyring, entry)
        self.assertIn("credentials[0].known_hosts_file", str(error))

    def test_unusable(self) -> None:
        """Missing, unreadable, empty, two lines: with the key's path, and nothing of the file."""
        other = self.entry(password_file=self.write("other", "x"))
        for content, words in ((None, "No such file"), ("", "empty"), ("s3cret\nx", "one line")):
            if content is not None:
                self.write("password", content)
            error = self.assertRaises(ConfigurationError, self.keyring, other, self.entry())
            self.assertTrue(
                str(error).startswith("repositories.credentials[1].password_file: /"), str(error)
            )
            self.assertIn(words, str(error))
            self.assertNotIn("s3cret", str(error))
        self.write("password", "KEY")
        key = self.entry(
            key_file=self.write("id", "\n"), known_hosts_file=self.write("hosts", "example A")
        )
        error = self.assertRaises(ConfigurationError, self.keyring, key)
        self.assertIn("credentials[0].key_file: ", str(error))
        self.assertIn("empty", str(error))
        entry = self.entry(password_file=str(self.folder))
        self.assertIn("directory", str(self.assertRaises(ConfigurationError, self.keyring, entry)))

    def test_files(self) -> None:
        """It tells which files it reads, so that others can look at their rights."""
        self.write("password", "s3cret")
        key, hosts = self.write("id", "KEY"), self.write("hosts", "example A")
        entries = (
            self.entry(password_file="password"),
            self.entry(key_file=key, known_hosts_file=hosts),
        )
        keyring = self.keyring(*entries, directory=str(self.folder))
        expected = [self.folder / name for name in ("password", "id", "hosts")]
        self.assertEqual(list(keyring.files), expected)

    def test_readable_by_others(self) -> None:
        """A file that every user can read is warned of; nothing of it is logged."""
        path = Path(self.write("password", "s3cret"))
        self.keyring()
        self.assertEqual(self.logged, [])
        path.chmod(0o644)
        self.keyring()
        self.assertEqual(len(self.logged), 1)
        self.assertIn(str(path), self.logged[0])
        self.assertNotIn("s3cret", self.logged[0])


class ChooseTests(KeyringTestCase):
    """Which one is whose."""

    def test_first(self) -> None:
        """The first that is for the URL and the caller; none for others."""
        mine = self.entry(password_file=self.write("a", "alice's"), callers=("alice",))
        all_of = self.entry(password_file=self.write("b", "everybody's"), host="*.example.org")
        keyring = self.keyring(mine, all_of)
        self.assertEqual(self.password(keyring, "alice"), "alice's")
        self.assertEqual(self.password(keyring, "bob"), "everybody's")
        self.assertIsNone(self.password(keyring, "alice", "https://example.net/x"))
        self.assertIsNone(self.password(keyring, "alice", "file:///srv/x"))
        self.assertEqual(self.password(self.keyring(all_of, mine), "alice"), "everybody's")

    def test_capitals(self) -> None:
        """A host in capitals is the same one."""
        self.write("password", "s3cret")
        self.assertEqual(self.password(self.keyring(self.entry(host="GIT.example.ORG"))), "s3cret")

    def test_identity(self) -> None:
        """It depends on the secret and on the daemon's key."""
        self.write("password", "one")
        keyring = self.keyring()
        one = keyring.choose_credential(URL, "")
        assert one is not None
        self.write("password", "two")
        self.reload(keyring)
        two = keyring.choose_credential(URL, "")
        assert two is not None
        self.assertNotEqual(keyring.derive_identity(one), keyring.derive_identity(two))
        other = Keyring((self.entry(),), "", b"another")
        self.assertNotEqual(keyring.derive_identity(two), other.derive_identity(two))


class ReloadTests(KeyringTestCase):
    """What SIGHUP changes."""

    def test_changed(self) -> None:
        """A new secret counts from now on."""
        self.write("password", "old")
        keyring = self.keyring()
        self.write("password", "new")
        self.assertEqual(self.password(keyring), "old")
        self.reload(keyring)
        self.assertEqual(self.password(keyring), "new")

    def test_broken(self) -> None:
        """With any mistake all stay as they were."""
        first, second = self.write("first", "old"), self.write("second", "old")
        keyring = self.keyring(
            self.entry(password_file=first), self.entry(password_file=second, host="b")
        )
        self.write("first", "new")
        Path(second).unlink()
        error = self.assertRaises(ConfigurationError, self.reload, keyring)
        self.assertIn("credentials[1].password_file", str(error))
        self.assertEqual(self.password(keyring), "old")

    def test_none(self) -> None:
        """Without credentials there is nothing to read."""
        self.assertEqual(list(Keyring((), "", b"key").rereadings()), [])
