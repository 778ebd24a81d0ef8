"""`git.cache`: a cached repository that is damaged is fetched anew, once."""

from __future__ import annotations

from twisted.internet.defer import fail

from tawebeval.errors import EvaluationError
from tawebeval.git.command import Outcome
from tests.fakes import OID, Command
from tests.test_repositories import DONE, OTHER, RepositoriesTestCase, Running, failed

CORRUPT = failed("error: inflate: data stream error\nfatal: packed object cc is corrupt")


class DamageTests(RepositoriesTestCase):
    """A repository that was whole when it was fetched, and is not now."""

    def setUp(self) -> None:
        super().setUp()
        self.successResultOf(self.check_out())
        self.lose_trees()
        self.git.commands.clear()
        self.said = CORRUPT
        self.broken_once: set[str] = set()
        (self.path() / "damaged").touch()

    def script(self, command: Command) -> Outcome | object:
        """Answer as git does: commands of `broken_once` fail while the old repository is there."""
        name = next(a for a in command.arguments if not a.startswith("--work-tree"))
        if name in getattr(self, "broken_once", ()) and (command.repository / "damaged").exists():
            return self.said
        if name == "fetch" and not (command.repository / "damaged").exists():
            self.here.clear()
        return super().script(command)

    def check_mended(self, oid: str = OID) -> None:
        """Hold that who asks gets what it wants, from a new repository."""
        self.assertEqual(self.successResultOf(self.check_out(oid=oid)).oid, oid)
        self.assertFalse((self.path() / "damaged").exists())
        self.assertEqual(sorted(path.suffix for path in self.root.iterdir()), [".git", ".tree"])

    def test_check_out(self) -> None:
        """It is seen when a tree that should be there cannot be checked out."""
        for said in (
            CORRUPT.stderr,
            "fatal: failed to unpack tree object 77",
            f"fatal: unable to read tree {OID}",
            "error: file /c/x.pack is far too short to be a packfile",
            "fatal: not a git repository: '/c/x.git'",
            "fatal: bad config line 1 in file /c/x.git/config",
        ):
            self.setUp()
            self.said = failed(said)
            self.broken_once = {"read-tree"}
            self.check_mended()

    def test_fetch(self) -> None:
        """Or when another commit cannot be fetched into it, or measured."""
        for name in ("fetch", "ls-tree"):
            self.setUp()
            self.here.clear()
            self.broken_once = {name}
            self.check_mended(OTHER)

    def test_once(self) -> None:
        """A repository that is fetched anew, and no better, is an error."""
        self.broken["read-tree"] = CORRUPT
        error = self.error(self.check_out())
        self.assertEqual((error.reason, error.members["stderr"]), ("repository", CORRUPT.stderr))
        self.assertEqual(self.names().count("fetch"), 1)

    def test_another_reason(self) -> None:
        """It stays where something else is wrong, or a server says such words."""
        for said in (
            "error: unable to create file x: No space left on device",
            "remote: corrupt",
            "fatal: aborting due to possible repository corruption on the remote side.",
        ):
            self.broken["read-tree"] = failed(said)
            self.error(self.check_out())
            self.assertEqual(self.names(), ["read-tree"])
            self.git.commands.clear()

    def test_full_disk(self) -> None:
        """What a full disk leaves looks damaged, and is no reason to throw away what was whole."""
        said = "error: No space left on device\nfatal: packed object cc is corrupt"
        full = EvaluationError("lost", "the disk is full", {"stderr": said})
        self.git.script = lambda command: fail(full)
        self.assertEqual(self.error(self.check_out()).reason, "lost")
        self.assertEqual(self.names(), ["read-tree"])

    def test_never_whole(self) -> None:
        """One that could never be fetched is not tried twice: it is the server's that is broken."""
        self.fetches = [CORRUPT]
        self.error(self.check_out(url="https://example.org/another"))
        self.assertEqual(self.names().count("fetch"), 1)

    def test_together(self) -> None:
        """Of several who find it damaged one throws it away; all wait until it is fetched anew."""
        fetching, reading = Running(), Running()
        self.fetches = [fetching]
        held = [reading]

        def script(command: Command) -> Outcome | object:
            if "read-tree" in command.arguments and held:
                return held.pop().outcome()
            return self.script(command)

        self.git.script = script
        asked = [self.check_out() for _ in range(3)]
        reading.end(CORRUPT)
        for one in asked:
            self.assertNoResult(one)
        fetching.end(DONE)
        for one in asked:
            self.assertEqual(self.successResultOf(one).oid, OID)
        self.assertEqual(self.names().count("fetch"), 1)
        self.assertTrue((self.path() / "commits" / OID).exists())
