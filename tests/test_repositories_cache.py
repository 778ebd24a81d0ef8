"""`tawebeval.repositories`: what is in the cache, its bounds, and a restart."""

from __future__ import annotations

import os
from pathlib import Path

from tawebeval.repositories import Commit
from tests.fakes import OID, TREE
from tests.test_repositories import OTHER, URL, RepositoriesTestCase, Running, failed


class CheckOutTests(RepositoriesTestCase):
    """Trees of commits, and commits that are here already."""

    def test_check_out(self) -> None:
        """The commit's tree goes into the workspace, by an index that lies there too."""
        self.successResultOf(self.check_out())
        command = self.git.commands[-1]
        self.assertEqual(command.repository, self.path())
        self.assertEqual(
            command.arguments,
            ("--work-tree=/work/space/tree", "read-tree", "--reset", "-u", TREE),
        )
        self.assertEqual(command.environment, {"GIT_INDEX_FILE": "/work/space/checkout/index"})

    def test_known_commit(self) -> None:
        """A commit that is here is not asked for again, neither over the network nor of git."""
        self.successResultOf(self.check_out())
        self.git.commands.clear()
        for branch in (None, "main"):
            commit = self.successResultOf(self.check_out(branch=branch))
            self.assertEqual(commit, Commit(OID, TREE))
        self.assertEqual(self.names(), ["read-tree", "read-tree"])

    def test_found_commit(self) -> None:
        """One that came along with another is found without asking the network."""
        self.successResultOf(self.check_out())
        self.git.commands.clear()
        self.assertEqual(self.successResultOf(self.check_out(oid=OTHER)), Commit(OTHER, TREE))
        self.assertEqual(self.names(), ["log", "ls-tree", "read-tree"])
        self.successResultOf(self.check_out(oid=OTHER))
        self.assertEqual(self.names(), ["log", "ls-tree", "read-tree", "read-tree"])

    def test_other_url(self) -> None:
        """A commit that is here by one URL is asked for again by another."""
        self.successResultOf(self.check_out())
        self.fetches = [failed("fatal: authentication failed")]
        error = self.error(self.check_out(url=URL + "x"))
        self.assertEqual(error.reason, "repository")
        self.assertEqual(len(list(self.root.iterdir())), 2)

    def test_broken_marker(self) -> None:
        """A marker with no OID in it says nothing."""
        self.successResultOf(self.check_out())
        (self.path() / "commits" / OID).write_text("7777")
        self.git.commands.clear()
        self.successResultOf(self.check_out())
        self.assertEqual(self.names(), ["log", "ls-tree", "read-tree"])
        self.assertEqual((self.path() / "commits" / OID).read_text(), f"{TREE} 0 0")

    def test_failure_is_not_remembered(self) -> None:
        """What could not be had is asked for again by who comes next."""
        self.fetches = [failed("fatal: no route to host")]
        self.error(self.check_out())
        self.assertEqual(list((self.path() / "commits").iterdir()), [])
        self.successResultOf(self.check_out())
        self.assertEqual(len(self.ways()), 2)

    def test_cannot_be_checked_out(self) -> None:
        """A tree that git cannot check out is an error of the repository."""
        self.broken["read-tree"] = failed("fatal: unable to read tree")
        error = self.error(self.check_out())
        self.assertEqual(error.reason, "repository")
        self.assertEqual(error.members, {"stderr": "fatal: unable to read tree"})

    def test_cannot_be_initialised(self) -> None:
        """So is a cache in which nothing can be made, of which no half is left as a whole."""
        self.broken["init"] = failed("fatal: disk full")
        error = self.error(self.check_out())
        self.assertEqual(
            (error.reason, error.members["stderr"]), ("repository", "fatal: disk full")
        )
        self.assertEqual(list(self.root.glob("*.git")), [])

    def test_cache_entry(self) -> None:
        """A cached repository says of what URL it is, and is named by that alone."""
        self.successResultOf(self.check_out())
        path = self.path()
        self.assertEqual((path / "url").read_text(), URL + "\n")
        self.assertEqual((path / "commits" / OID).read_text(), f"{TREE} 0 0")
        self.assertRegex(path.name, r"\A[0-9a-f]{40}\.git\Z")
        init = self.git.commands[0]
        self.assertEqual(init.repository, path.with_suffix(".new"))
        self.assertEqual(init.arguments[0], "init")
        self.assertIn("--template=", init.arguments)
        self.assertFalse(os.path.lexists(init.repository))


class EvictionTests(RepositoriesTestCase):
    """The bounds of the cache."""

    capacity = 350_000  # three repositories of 100 kB

    def setUp(self) -> None:
        super().setUp()
        self.grow = lambda repository: (repository / "pack").write_bytes(b"x" * 100_000)

    def fetch_all(self, *names: str) -> None:
        """Ask for a commit of each of these repositories."""
        for name in names:
            self.successResultOf(self.check_out(url=f"/{name}"))

    def cached(self) -> list[str]:
        """Return the repositories that are in the cache, in alphabetical order."""
        found = [path for path in self.root.iterdir() if path.suffix == ".git"]
        self.assertEqual(len(found), len(list(self.root.iterdir())))
        return sorted((path / "url").read_text().strip("/\n") for path in found)

    def test_least_recently_used(self) -> None:
        """What was used longest ago goes when there is no room, and no more than that."""
        self.fetch_all("a", "b", "c")
        self.assertEqual(self.cached(), ["a", "b", "c"])
        self.fetch_all("a", "d")
        self.assertEqual(self.cached(), ["a", "c", "d"])
        self.fetch_all("e")
        self.assertEqual(self.cached(), ["a", "d", "e"])

    def test_comes_back(self) -> None:
        """What was evicted is fetched again when it is wanted."""
        self.fetch_all("a", "b", "c", "d")
        self.here = {(name, oid) for name, oid in self.here if (self.root / name).exists()}
        before = self.fetched
        self.fetch_all("a")
        self.assertEqual(self.fetched, before + 1)
        self.assertEqual(self.cached(), ["a", "c", "d"])

    def test_in_use(self) -> None:
        """What is in use stays, although it is the oldest; the next oldest goes."""
        self.fetch_all("a", "b", "c")
        running = Running()
        self.fetches = [running]
        self.here.clear()
        asked = self.check_out(url="/a", oid=OTHER)
        self.fetch_all("b", "c")
        self.fetched = 0
        self.fetch_all("d")
        self.assertEqual(self.cached(), ["a", "c", "d"])
        running.end()
        self.successResultOf(asked)

    def test_larger_than_the_cache(self) -> None:
        """One that is larger than the whole cache is still there for who asked for it."""
        self.grow = lambda repository: (repository / "pack").write_bytes(b"x" * 500_000)
        self.fetch_all("a")
        self.assertEqual(self.cached(), ["a"])
        self.fetch_all("b")
        self.assertEqual(self.cached(), ["b"])

    def test_vanished(self) -> None:
        """One that somebody has removed from the disk does no harm when it is evicted."""
        self.fetch_all("a", "b", "c")
        oldest = next(p for p in self.root.iterdir() if (p / "url").read_text() == "/a\n")
        oldest.rename(Path(self.mktemp()))
        self.fetch_all("d")
        self.assertEqual(self.cached(), ["b", "c", "d"])

    def test_restart(self) -> None:
        """A new daemon takes the cache over: what is there, how large, and how old."""
        self.fetch_all("a", "b", "c", "a")
        for age, name in enumerate("acb"):
            path = next(p for p in self.root.iterdir() if (p / "url").read_text() == f"/{name}\n")
            moment = 1_700_000_000 - age
            _set_time(path, moment)
        self.repositories = self.make()
        self.repositories.load()
        self.git.commands.clear()
        self.successResultOf(self.check_out(url="/c"))
        self.assertEqual(self.names(), ["read-tree"])
        self.fetch_all("d")
        self.assertEqual(self.cached(), ["a", "c", "d"])

    def test_less_room(self) -> None:
        """A new daemon with less room makes it at once; what was used last stays."""
        self.fetch_all("a", "b", "c")
        for age, name in enumerate("bca"):
            path = next(p for p in self.root.iterdir() if (p / "url").read_text() == f"/{name}\n")
            _set_time(path, 1_700_000_000 - age)
        self.capacity = 150_000
        self.repositories = self.make()
        self.repositories.load()
        self.assertEqual(self.cached(), ["b"])

    def test_use_is_seen_after_a_restart(self) -> None:
        """Using a repository leaves a trace on the disk, by which its age is known."""
        self.fetch_all("a", "b", "c")
        for path in self.root.iterdir():
            _set_time(path, 1_000_000)
        self.fetch_all("b")
        for path in self.root.iterdir():
            used = (path / "url").read_text() == "/b\n"
            self.assertEqual(path.stat().st_mtime > 1_000_000, used)


def _set_time(path: Path, moment: int) -> None:
    os.utime(path, (moment, moment))
