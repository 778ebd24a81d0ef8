"""`git.cache`: what is in the cache, its bounds, and a restart."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred

from tawebeval.core.checkout import Commit
from tawebeval.core.form import Repository
from tawebeval.errors import EvaluationError
from tawebeval.git import blank, repository
from tawebeval.sandbox.commands import Reach
from tests.fakes import OID, TREE, SlowThreads
from tests.test_repositories import DONE, OTHER, URL, RepositoriesTestCase, Running, failed


class CheckOutTests(RepositoriesTestCase):
    """Trees of commits, and commits that are here already."""

    def test_check_out(self) -> None:
        """The commit's tree is checked out in the cache, by an index that lies there too."""
        self.successResultOf(self.check_out())
        command = self.git.commands[-1]
        self.assertEqual(command.repository, self.path())
        (checkout,) = self.checkouts
        self.assertEqual(
            checkout.path, self.path().with_name(f"{self.path().stem}-{TREE}-0-0.tree")
        )
        unfinished = f"{checkout.path}.new1"
        self.assertEqual(
            command.arguments,
            (f"--work-tree={unfinished}/tree", "read-tree", "--reset", "-u", TREE),
        )
        self.assertEqual(command.environment, {"GIT_INDEX_FILE": f"{unfinished}/index/index"})
        self.assertEqual(
            command.reach, Reach((Path(unfinished, "tree"), Path(unfinished, "index")))
        )

    def test_known_commit(self) -> None:
        """A commit that is here is not asked for again, neither over the network nor of git."""
        self.successResultOf(self.check_out())
        self.git.commands.clear()
        for branch in (None, "main"):
            commit = self.successResultOf(self.check_out(branch=branch))
            self.assertEqual(commit, Commit(OID, TREE))
        self.assertEqual(self.names(), [])

    def test_found_commit(self) -> None:
        """One that came along with another is found without asking the network."""
        self.successResultOf(self.check_out())
        self.git.commands.clear()
        self.assertEqual(self.successResultOf(self.check_out(oid=OTHER)), Commit(OTHER, TREE))
        # It has the same tree, which is there.
        self.assertEqual(self.names(), ["log", "ls-tree"])
        self.successResultOf(self.check_out(oid=OTHER))
        self.assertEqual(self.names(), ["log", "ls-tree"])

    def test_needs_network(self) -> None:
        """A commit that was fetched needs none, and nothing of this machine; others do."""

        def needs(url: str = URL, oid: str = OID) -> bool:
            return self.repositories.needs_network(Repository(url), oid)

        self.assertTrue(needs())
        self.assertEqual(self.resolver.asked, [])
        self.successResultOf(self.check_out())
        self.assertFalse(needs())
        self.assertTrue(needs(oid=OTHER))
        self.assertTrue(needs(URL + "x"))
        self.assertFalse(needs("/srv/x"))
        self.assertFalse(needs("file:///srv/x"))
        self.assertRaises(EvaluationError, needs, "https://127.0.0.1/x")

    def test_counts(self) -> None:
        """What was there is a hit; what was not is fetched, or that has failed."""
        tally = self.repositories.tally
        self.successResultOf(self.check_out())
        self.successResultOf(self.check_out())
        self.fetches = [failed("fatal: no route to host")]
        self.error(self.check_out(url=URL + "x"))
        again = self.repositories.check_out(Repository(URL), OID, again=True)
        self.successResultOf(Deferred.fromCoroutine(again)).release()
        self.assertEqual(tally.hits, {"commits": 1, "checkouts": 1})
        self.assertEqual(tally.misses, {"commits": 2, "checkouts": 1})
        self.assertEqual(tally.fetches, {"fetched": 1, "failed": 1})

    def test_other_url(self) -> None:
        """A commit that is here by one URL is asked for again by another."""
        self.successResultOf(self.check_out())
        self.fetches = [failed("fatal: authentication failed")]
        error = self.error(self.check_out(url=URL + "x"))
        self.assertEqual(error.reason, "repository")
        self.assertEqual(self.names().count("fetch"), 2)
        self.assertEqual(len(list(self.root.glob("*.tree"))), 1)

    def test_broken_marker(self) -> None:
        """A marker with no OID in it says nothing."""
        self.successResultOf(self.check_out())
        (self.path() / "commits" / OID).write_text("7777")
        self.git.commands.clear()
        self.successResultOf(self.check_out())
        self.assertEqual(self.names(), ["log", "ls-tree"])
        self.assertEqual((self.path() / "commits" / OID).read_text(), f"{TREE} 0 0")

    def test_failure_is_not_remembered(self) -> None:
        """What could not be had is asked for again by who comes next."""
        self.fetches = [failed("fatal: no route to host")]
        self.error(self.check_out())
        self.successResultOf(self.check_out())
        self.assertEqual(len(self.ways()), 2)

    def test_failure_leaves_nothing(self) -> None:
        """URLs that somebody makes up, or gives up, leave nothing: neither on the disk nor here."""
        running = Running()
        self.fetches = [failed("fatal: no route to host")] * 3 + [running]
        for number in range(3):
            self.error(self.check_out(url=f"{URL}{number}"))
        given_up = self.check_out(url=f"{URL}3")
        given_up.cancel()
        running.end(failed("", -1))
        self.failureResultOf(given_up, CancelledError)
        self.assertEqual(list(self.root.iterdir()), [])
        self.assertEqual(self.repositories._entries, {})
        self.repositories.note_uses()
        self.assertEqual(self.repositories.tally.evictions, 0)

    def test_failure_leaves_what_was_there(self) -> None:
        """What earlier fetches have brought stays, also where that is not a whole commit."""
        self.grow = lambda repository: (repository / "objects" / "pack" / "x").touch()
        self.gained = 0
        self.fetches = [DONE, failed("fatal: no route to host")]
        self.broken["log"] = failed("fatal: bad object")
        self.error(self.check_out())
        self.error(self.check_out())
        self.assertTrue(self.path().exists())

    def test_directories_count(self) -> None:
        """A repository counts as what it is on the disk, with its directories."""
        self.successResultOf(self.check_out())
        directories = [path for path in self.path().rglob("*") if path.is_dir()]
        least = 4096 * (len(directories) + 1)
        self.assertGreaterEqual(self.repositories.sizes["repositories"], least)

    def test_cannot_be_checked_out(self) -> None:
        """A tree that git cannot check out is an error of the repository."""
        self.broken["read-tree"] = failed("fatal: unable to read tree")
        error = self.error(self.check_out())
        self.assertEqual(error.reason, "repository")
        self.assertEqual(error.members, {"stderr": "fatal: unable to read tree"})

    def test_cannot_be_initialised(self) -> None:
        """A cache in which nothing can be made has no half of a repository that looks whole."""

        def full(path: Path) -> None:
            path.mkdir()
            raise OSError(errno.ENOSPC, "disk full")

        patched = self.patch(blank, "make", full)
        self.failureResultOf(self.check_out(), OSError)
        patched.restore()
        self.assertEqual(list(self.root.glob("*.git")), [])
        self.successResultOf(self.check_out())

    def test_cache_entry(self) -> None:
        """A cached repository says of what URL it is, and is named by that alone."""
        self.successResultOf(self.check_out())
        path = self.path()
        self.assertEqual((path / "url").read_text(), URL + "\n")
        self.assertEqual((path / "commits" / OID).read_text(), f"{TREE} 0 0")
        self.assertRegex(path.name, r"\A[0-9a-f]{40}\.git\Z")
        self.assertFalse(path.with_suffix(".new").exists())


class EvictionTests(RepositoriesTestCase):
    """The bounds of the cache."""

    capacity = 400_000  # three repositories of 100 kB, and what makes them repositories

    def setUp(self) -> None:
        super().setUp()
        self.grow = lambda repository: (repository / "pack").write_bytes(b"x" * 100_000)
        self.patch(repository, "_DIRECTORIES", 0)

    def fetch_all(self, *names: str) -> None:
        """Ask for a commit of each of these repositories."""
        for name in names:
            self.successResultOf(self.check_out(url=f"/{name}"))
            self.release()

    def of(self, name: str) -> Path:
        """Return where a repository lies."""
        found = self.root.glob("*.git")
        return next(path for path in found if (path / "url").read_text() == f"/{name}\n")

    def cached(self) -> list[str]:
        """Return the repositories that are in the cache, in alphabetical order."""
        found = [path for path in self.root.iterdir() if path.suffix == ".git"]
        checkouts = {path.name[:40] for path in self.root.glob("*.tree")}
        self.assertLessEqual(checkouts, {path.stem for path in found})
        self.assertEqual(len(found) + len(checkouts), len(list(self.root.iterdir())))
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

    def test_checkouts_have_half(self) -> None:
        """Of what is checked out that goes which was used longest ago; repositories stay."""
        self.grow = lambda repository: None
        self.plant = lambda tree: (tree / "file").write_bytes(b"x" * 50_000)
        self.fetch_all("a", "b", "c", "d", "a", "e")
        self.assertEqual(len(list(self.root.glob("*.git"))), 5)
        left = {path.name[:40] for path in self.root.glob("*.tree")}
        self.assertEqual(left, {self.of(name).stem for name in "dae"})
        self.git.commands.clear()
        self.fetch_all("b")
        self.assertEqual(self.names(), ["read-tree"])

    def test_checkout_in_use(self) -> None:
        """What an evaluation has below its tree stays as long as that lasts."""
        self.grow = lambda repository: None
        self.plant = lambda tree: (tree / "file").write_bytes(b"x" * 150_000)
        self.successResultOf(self.check_out(url="/a"))
        (used,) = self.checkouts
        self.checkouts.clear()
        self.fetch_all("b", "c")
        self.assertEqual(
            {path.name[:40] for path in self.root.glob("*.tree")},
            {self.of(name).stem for name in "ac"},
        )
        used.release()
        self.fetch_all("d")
        self.assertFalse(used.path.exists())

    def test_no_room_for_other_checkouts(self) -> None:
        """A repository in use that fills the cache leaves no room for what is just kept."""
        self.trees = {OTHER: "5" * 40}
        self.grow = lambda repository: (repository / "pack").write_bytes(b"x" * 370_000)
        self.plant = lambda tree: (tree / "file").write_bytes(b"x" * 20_000)
        self.fetch_all("a")
        self.successResultOf(self.check_out(url="/a", oid=OTHER))
        (left,) = self.root.glob("*.tree")
        self.assertIn("5" * 40, left.name)

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
        oldest = self.of("a")
        oldest.rename(Path(self.mktemp()))
        self.fetch_all("d")
        self.assertEqual(self.cached(), ["b", "c", "d"])

    def test_restart(self) -> None:
        """A new daemon takes the cache over: what is there, how large, and how old."""
        self.fetch_all("a", "b", "c", "a")
        for age, name in enumerate("acb"):
            path = self.of(name)
            moment = 1_700_000_000 - age
            _set_time(path, moment)
        self.repositories = self.make()
        self.repositories.load()
        self.git.commands.clear()
        self.successResultOf(self.check_out(url="/c"))
        self.assertEqual(self.names(), [])
        self.fetch_all("d")
        self.assertEqual(self.cached(), ["a", "c", "d"])

    def test_less_room(self) -> None:
        """A new daemon with less room makes it at once; what was used last stays."""
        self.fetch_all("a", "b", "c")
        for age, name in enumerate("bca"):
            path = self.of(name)
            _set_time(path, 1_700_000_000 - age)
        self.capacity = 150_000
        self.repositories = self.make()
        self.repositories.load()
        self.assertEqual(self.cached(), ["b"])

    def test_use_is_seen_after_a_restart(self) -> None:
        """Using a repository leaves a trace on the disk, by which its age is known."""
        self.fetch_all("a", "b", "c")
        self.repositories.note_uses()
        for path in self.root.iterdir():
            _set_time(path, 1_000_000)
        self.fetch_all("b")
        self.repositories.note_uses()
        for path in self.root.glob("*.git"):
            used = (path / "url").read_text() == "/b\n"
            for each in (path, *self.root.glob(f"{path.stem}-*.tree")):
                self.assertEqual(each.stat().st_mtime > 1_000_000, used)

    def test_use_is_noted_by_threads(self) -> None:
        """Uses are noted by a thread, one call at a time, with all that there were meanwhile."""
        self.repositories._threads = threads = SlowThreads()  # type: ignore[assignment]
        self.repositories.note_uses()
        self.assertEqual(threads.waiting, [])
        paths = [self.root / name for name in "abc"]
        for path in paths:
            self.repositories._use_path(path)
            self.repositories.note_uses()
        self.assertEqual(len(threads.waiting), 1)
        self.repositories._use_path(paths[1])
        for path in paths:
            path.touch()
            _set_time(path, 1_000_000)
        threads.step()
        self.repositories.note_uses()
        self.assertGreater(paths[0].stat().st_mtime, 1_000_000)
        self.assertEqual(paths[1].stat().st_mtime, 1_000_000)
        paths[2].unlink()  # what is gone meanwhile stays so
        threads.step()
        self.assertGreater(paths[1].stat().st_mtime, 1_000_000)
        self.assertFalse(paths[2].exists())


def _set_time(path: Path, moment: int) -> None:
    os.utime(path, (moment, moment))
