"""`cli.servers`: the file of servers, and the keyring."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import keyring
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.servers import (
    Keyring,
    StoredServer,
    StoredServers,
    edit_stored_servers,
    locate_server_file,
    read_servers,
)
from tawebeval.errors import ConfigurationError
from tests.fakes.keyring import FakeKeyring

URL = "https://judge.example.org"


class FileTests(SynchronousTestCase):
    """The file, in a directory that does not exist yet."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.path = self.folder / "tawebeval" / "servers.json"

    def write(self) -> None:
        """Store a server."""
        with edit_stored_servers(self.path) as stored:
            stored.servers["judge"] = StoredServer(URL, "secret")
            stored.default = "judge"

    def test_only_the_owner_has_access_to_the_stored_servers(self) -> None:
        self.assertEqual(read_servers(self.path), StoredServers())
        self.addCleanup(os.umask, os.umask(0))
        self.write()
        found = read_servers(self.path)
        self.assertEqual(found.servers, {"judge": StoredServer(URL, "secret")})
        self.assertEqual(found.default, "judge")
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)
        self.assertEqual(stat.S_IMODE(self.path.parent.stat().st_mode), 0o700)
        self.assertEqual([path.name for path in self.path.parent.iterdir()], ["servers.json"])

    def test_symbolic_link_stays_and_its_target_is_replaced(self) -> None:
        self.write()
        link = self.folder / "link"
        link.symlink_to(self.path)
        with edit_stored_servers(link) as stored:
            stored.default = None
        self.assertTrue(link.is_symlink())
        self.assertIsNone(read_servers(self.path).default)

    def test_error_leaves_the_file_unchanged(self) -> None:
        self.write()

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        self.patch(os, "replace", fail)
        with (
            self.assertRaises(ConfigurationError) as caught,
            edit_stored_servers(self.path) as stored,
        ):
            stored.default = None
        self.assertIn("cannot write the file: No space left on device", str(caught.exception))
        self.assertEqual(read_servers(self.path).default, "judge")
        self.assertEqual([path.name for path in self.path.parent.iterdir()], ["servers.json"])

    def test_broken_file_and_file_that_others_can_access_are_refused(self) -> None:
        self.write()
        for mode in (0o640, 0o604, 0o620, 0o602, 0o601):
            self.path.chmod(mode)
            error = self.assertRaises(ConfigurationError, read_servers, self.path)
            self.assertIn(f"(mode {mode:04o}", str(error))
            self.assertIn(f"; chmod 600 {self.path}", str(error))
        self.path.chmod(0o600)
        for content, words in (
            (b"{", "mend or remove the file"),
            (b"[" * 100_000, "mend or remove the file"),
            (b'{"servers":{"a":{"url":1}}}', "Expected `str`"),
        ):
            self.path.write_bytes(content)
            error = self.assertRaises(ConfigurationError, read_servers, self.path)
            self.assertIn(words, str(error))
        error = self.assertRaises(ConfigurationError, read_servers, self.path / "x")
        self.assertIn("cannot read the file", str(error))
        with self.assertRaises(ConfigurationError), edit_stored_servers(self.path / "x" / "y"):
            self.fail("it cannot be written")

    def test_file_lies_in_the_configuration_directory_of_the_user(self) -> None:
        for given, expected in (
            ({"XDG_CONFIG_HOME": "/x"}, "/x/tawebeval/servers.json"),
            ({"XDG_CONFIG_HOME": "x"}, str(Path.home() / ".config/tawebeval/servers.json")),
        ):
            self.assertEqual(str(locate_server_file(given)), expected)

        def fail() -> Path:
            raise RuntimeError("Could not determine home directory.")

        self.patch(Path, "home", fail)
        self.assertRaises(ConfigurationError, locate_server_file, {})


class KeyringTests(SynchronousTestCase):
    """The keyring."""

    def setUp(self) -> None:
        self.backend = FakeKeyring()
        self.patch(keyring, "get_keyring", lambda: self.backend)

    def test_token_belongs_to_a_name_and_a_url(self) -> None:
        stored = StoredServer(URL, keyring=True)
        found = Keyring.open()
        found.store_token("judge", URL, "secret")
        self.assertEqual(stored.read_token("judge"), "secret")
        for name, url in (("judge", "https://other.example.org"), ("other", URL)):
            with self.assertRaises(ConfigurationError) as caught:
                StoredServer(url, keyring=True).read_token(name)
            self.assertIn(f"tawebeval login --name {name} {url}", str(caught.exception))
        found.remove_token("judge", URL)
        found.remove_token("judge", URL)
        self.assertEqual(self.backend.passwords, {})

    def test_missing_and_failing_keyrings_are_reported(self) -> None:
        self.backend.error = RuntimeError("locked")
        with self.assertRaises(ConfigurationError) as caught:
            Keyring.open().get_token("judge", URL)
        self.assertIn("the keyring does not answer: locked", str(caught.exception))
        self.backend.priority = 0
        with self.assertRaises(ConfigurationError) as caught:
            Keyring.open()
        self.assertIn("no keyring", str(caught.exception))
        found = sys.modules["keyring"]
        self.addCleanup(sys.modules.__setitem__, "keyring", found)
        sys.modules["keyring"] = None  # type: ignore[assignment]
        with self.assertRaises(ConfigurationError) as caught:
            Keyring.open()
        self.assertIn("pip install 'tawebeval[keyring]'", str(caught.exception))
