"""`git.cache`: what was fetched with a credential is reached with that credential alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tawebeval.config import CredentialSettings
from tawebeval.git.remotes import GitKeyring, Login
from tests.cases.git import URL, CacheTestCase, Running, failed
from tests.fakes.world import OID, read_again

PRIVATE = failed("fatal: could not read Username for 'https://example.org'")
LOGIN = Login("https://example.org", "judge", "s3cret")


class CredentialTests(CacheTestCase):
    def setUp(self) -> None:
        super().setUp()
        folder = Path(self.mktemp()).absolute()
        folder.mkdir(mode=0o700)
        self.file = folder / "password"
        self.file.write_text("s3cret")
        self.entries: tuple[CredentialSettings, ...] = (
            CredentialSettings(
                "example.org", "judge", password_file=str(self.file), callers=("alice", "carol")
            ),
        )
        self.restart()

    def restart(self, threads: Any = None) -> None:
        """Let another daemon take the cache over, with the credentials of `entries`."""
        self.keyring = GitKeyring(self.entries, "", b"key")
        super().restart(threads)

    def logins(self) -> list[Login | None]:
        return [command.login for command in self.fetch_commands()]

    def check_private(self, *callers: str) -> None:
        """Check that callers get nothing from the cache, and a fetch of their own has no login."""
        for caller in callers:
            self.git.commands.clear()
            self.fetches = [PRIVATE]
            self.assertEqual(self.refuse(caller=caller).reason, "repository")
            self.assertEqual(self.logins(), [None])

    def test_callers_of_credential_share_one_repository(self) -> None:
        self.get(caller="alice")
        self.assertEqual(self.logins(), [LOGIN])
        self.git.commands.clear()
        self.get(caller="carol")
        self.assertEqual(self.names(), [])
        self.check_private("bob", "")

    def test_no_file_in_the_cache_has_the_secret(self) -> None:
        self.get(caller="alice")
        for path in self.root.rglob("*"):
            self.assertNotIn("s3cret", str(path))
            if path.is_file():
                self.assertNotIn("s3cret", path.read_text())

    def test_fetch_with_credential_is_not_shared_with_callers_who_may_not_use_it(self) -> None:
        running = Running()
        self.fetches = [running, PRIVATE]
        requested = self.check_out(caller="alice")
        self.assertEqual(self.refuse(caller="bob").reason, "repository")
        self.assertEqual(self.logins(), [LOGIN, None])
        running.end()
        self.assertEqual(self.successResultOf(requested).oid, OID)

    def test_new_daemon_keeps_repository_for_its_callers(self) -> None:
        self.get(caller="alice")
        self.restart()
        self.git.commands.clear()
        self.get(caller="alice")
        self.assertEqual(self.names(), [])
        self.check_private("bob", "")

    def test_changed_password_requires_a_new_fetch(self) -> None:
        self.get(caller="alice")
        self.file.write_text("another")
        read_again(self.keyring)
        self.present.clear()
        self.fetches = [PRIVATE]
        self.refuse(caller="alice")
        self.assertEqual(self.logins()[1], Login("https://example.org", "judge", "another"))

    def test_no_password_is_sent_over_http_to_a_public_address(self) -> None:
        error = self.refuse(URL.replace("https", "http"), caller="alice")
        self.assertIn("https only", error.message)
        self.assertEqual(self.logins(), [])
