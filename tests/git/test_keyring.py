"""`git.remotes`: secrets are read from files, at the start and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import CredentialSettings
from tawebeval.errors import ConfigurationError
from tawebeval.git.remotes import GitKeyring
from tests.fakes.world import read_again

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
        return found and found.password

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

    def test_key_stays_in_its_file(self) -> None:
        key, hosts = self.write("id", "KEY"), self.write("hosts", "example ssh-ed25519 A")
        entry = self.entry(key_file=key, known_hosts_file=hosts)
        found = self.keyring(entry).choose_credential("git@git.example.org:x", "")
        assert found is not None
        self.assertEqual(
            (found.key_file, found.known_hosts_file, found.secret_file_content),
            (key, hosts, b"KEY"),
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

    def test_keyring_names_its_files(self) -> None:
        self.write("password", "s3cret")
        key, hosts = self.write("id", "KEY"), self.write("hosts", "example A")
        keyring = self.keyring(
            self.entry(password_file="password"),
            self.entry(key_file=key, known_hosts_file=hosts),
            directory=str(self.folder),
        )
        expected = [self.folder / name for name in ("password", "id", "hosts")]
        self.assertEqual(list(keyring.secret_files), expected)

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

    def test_reload_reads_new_secret(self) -> None:
        self.write("password", "old")
        keyring = self.keyring()
        old = keyring.choose_credential(URL, "")
        self.write("password", "new")
        self.assertEqual(self.find_password(keyring), "old")
        self.assertEqual(
            [each.paths for each in keyring.list_reloadable_files()], [keyring.secret_files]
        )
        read_again(keyring)
        new = keyring.choose_credential(URL, "")
        assert old is not None
        assert new is not None
        self.assertEqual(new.password, "new")
        other = GitKeyring((self.entry(),), "", b"another")
        identities = {keyring.derive_credential_id(old), keyring.derive_credential_id(new)}
        self.assertEqual(len(identities | {other.derive_credential_id(new)}), 3)

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
