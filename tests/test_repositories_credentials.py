"""`git.cache`: what was fetched with a credential is for those who may use it."""

from __future__ import annotations

from pathlib import Path

from tawebeval.config import CredentialSettings
from tawebeval.git.credentials import Login
from tawebeval.git.keyring import Keyring
from tests.fakes import OID, read_again
from tests.test_repositories import DONE, URL, RepositoriesTestCase, Running, failed

PRIVATE = failed("fatal: could not read Username for 'https://example.org'")


class CredentialTests(RepositoriesTestCase):
    """A private repository, with a password that Alice and Carol may use."""

    def setUp(self) -> None:
        super().setUp()
        folder = Path(self.mktemp()).absolute()
        folder.mkdir(mode=0o700)
        self.file = folder / "password"
        self.file.write_text("s3cret")
        self.restart()

    def restart(self, *, configured: bool = True, key: bytes = b"key") -> None:
        """Start again, over the same cache."""
        entry = CredentialSettings(
            "example.org", "judge", password_file=str(self.file), callers=("alice", "carol")
        )
        self.keyring = Keyring((entry,) if configured else (), "", key)
        self.repositories = self.make()
        self.repositories.load()

    def logins(self) -> list[Login | None]:
        """Return with which logins there was a fetch."""
        return [c.login for c in self.git.commands if c.arguments[0] == "fetch"]

    def check_private(self, *callers: str) -> None:
        """Hold that callers get nothing of what is here, but ask for themselves, with nothing."""
        for caller in callers:
            self.git.commands.clear()
            self.fetches = [PRIVATE]
            error = self.error(self.check_out(caller=caller))
            self.assertEqual(error.reason, "repository")
            self.assertEqual(self.logins(), [None])

    def test_login(self) -> None:
        """The server is told for those who may, and nobody else."""
        self.successResultOf(self.check_out(caller="alice"))
        self.assertEqual(self.logins(), [Login("https://example.org", "judge", "s3cret")])
        self.check_private("bob", "")

    def test_shared(self) -> None:
        """Those who may use it share one repository in the cache."""
        self.successResultOf(self.check_out(caller="alice"))
        self.git.commands.clear()
        self.successResultOf(self.check_out(caller="carol"))
        self.assertEqual(self.names(), [])

    def test_nothing_of_it_in_the_cache(self) -> None:
        """What was fetched shows no secret, not even in the names of its files."""
        self.successResultOf(self.check_out(caller="alice"))
        for path in self.root.rglob("*"):
            self.assertNotIn("s3cret", str(path))
            if path.is_file():
                self.assertNotIn("s3cret", path.read_text())

    def test_fetch_under_way(self) -> None:
        """A fetch that is under way is not shared with those who may not."""
        running = Running()
        self.fetches = [running, PRIVATE]
        asked = self.check_out(caller="alice")
        self.assertEqual(self.error(self.check_out(caller="bob")).reason, "repository")
        self.assertEqual(self.logins()[1], None)
        running.end(DONE)
        self.assertEqual(self.successResultOf(asked).oid, OID)

    def test_restart(self) -> None:
        """A new daemon keeps it for those who may, and from others."""
        self.successResultOf(self.check_out(caller="alice"))
        self.restart()
        self.git.commands.clear()
        self.successResultOf(self.check_out(caller="alice"))
        self.assertEqual(self.names(), [])
        self.check_private("bob", "")

    def test_removed(self) -> None:
        """When the credential is removed nobody reaches what it has opened."""
        self.successResultOf(self.check_out(caller="alice"))
        self.restart(configured=False)
        self.check_private("alice", "bob", "")

    def test_changed(self) -> None:
        """With a new secret it is fetched anew: it may be one that opens less."""
        self.successResultOf(self.check_out(caller="alice"))
        self.file.write_text("another")
        read_again(self.keyring)
        self.here.clear()
        self.fetches = [PRIVATE]
        self.error(self.check_out(caller="alice"))
        self.assertEqual(self.logins()[1], Login("https://example.org", "judge", "another"))

    def test_public_before(self) -> None:
        """What is there without a credential is another thing; one does not spoil the other."""
        self.successResultOf(self.check_out(caller="bob"))
        self.successResultOf(self.check_out(caller="alice"))
        self.assertEqual(len(self.logins()), 2)
        self.assertEqual(len(list(self.root.glob("*.git"))), 2)

    def test_in_the_clear(self) -> None:
        """Over http to a public address nothing is sent at all."""
        error = self.error(self.check_out(URL.replace("https", "http"), caller="alice"))
        self.assertIn("https only", error.message)
        self.assertEqual(self.logins(), [])
