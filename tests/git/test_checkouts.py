"""`git.checkouts`: trees that are checked out once, their eviction, and a restart."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.checkout import Checkout, Commit
from tawebeval.core.counters import GitCacheCounters
from tawebeval.errors import EvaluationFailure
from tawebeval.git import checkouts
from tawebeval.git.checkouts import CheckoutCache
from tawebeval.linux.filetree import walk_tree
from tests.fakes.gates import Gate
from tests.fakes.world import OID, InlineThreads, SlowThreads

FILES, SIZE = 3, 10_004  # of the tree that `CheckoutsTestCase.write` makes
ONE, OTHER = "1" * 40, "2" * 40


class CheckoutsTestCase(SynchronousTestCase):
    """Checkouts in a directory of their own; `gate` holds the writing of trees, in `written`."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.root.mkdir()
        self.gate = Gate()
        self.written: list[Path] = []
        self.checkouts = CheckoutCache(self.root, InlineThreads())

    async def write(self, tree: Path, index: Path) -> None:
        """Write a tree: a directory, a file in it, and a link."""
        self.written.append(tree)
        self.assertEqual((list(tree.iterdir()), list(index.iterdir())), ([], []))
        (tree / "directory").mkdir()
        (index / "index").touch()
        await self.gate.wait()
        (tree / "directory" / "file").write_bytes(b"x" * 10_000)
        (tree / "link").symlink_to("gone")

    def check_out(
        self, tree: str = ONE, repository: str = "a" * 40, oid: str = OID
    ) -> Deferred[Checkout]:
        """Request a tree."""
        commit = Commit(oid, tree, FILES, SIZE)
        return Deferred.fromCoroutine(
            self.checkouts.get_or_create_checkout(repository, commit, self.write)
        )

    def get(self, tree: str = ONE, repository: str = "a" * 40, oid: str = OID) -> Checkout:
        """Return a checkout that is there at once."""
        return self.successResultOf(self.check_out(tree, repository, oid))

    def detach(self, capacity: int = 0) -> str:
        """Return the trees that are evicted for so many bytes, by their first digits."""
        return "".join(path.name[41] for path in self.checkouts.evict_excess_checkouts(capacity))

    def restart(self) -> None:
        """Let another daemon take over the checkouts, the oldest first."""
        self.checkouts = CheckoutCache(self.root, InlineThreads())
        for path in sorted(self.root.iterdir(), key=os.path.getmtime):
            self.checkouts.load_checkout(path)


class ProvideTests(CheckoutsTestCase):
    """Checkouts that are made or shared."""

    def test_made_once(self) -> None:
        """A tree is written at the first request, is complete before it has its name, and stays."""
        checkout = self.get()
        self.assertEqual(checkout.commit, Commit(OID, ONE, FILES, SIZE))
        self.assertEqual(os.readlink(checkout.path / "link"), "gone")
        self.assertEqual((checkout.path / "directory/file").stat().st_size, 10_000)
        self.assertEqual(list(self.root.iterdir()), [checkout.path])
        self.assertEqual(self.get().path, checkout.path)
        self.assertNotEqual(self.written, [checkout.path])
        self.assertEqual(len(self.written), 1)

    def test_each_its_own(self) -> None:
        """The same tree of another repository is another one, as is another tree."""
        paths = {
            self.get(tree, repository).path
            for tree in (ONE, OTHER)
            for repository in ("a" * 40, "b" * 40)
        }
        self.assertEqual(len(paths), 4)

    def test_commits_of_one_tree(self) -> None:
        """Commits of one tree share it; each use of a checkout is released by itself."""
        one, two = self.get(), self.get(oid="d" * 40)
        self.assertEqual((one.commit.oid, two.commit.oid), (OID, "d" * 40))
        self.assertEqual((one.path, len(self.written)), (two.path, 1))
        again = self.get()
        self.assertEqual(again, one)
        self.assertIs(again, self.get())
        for checkout in (one, two, again):
            checkout.release()
        self.assertEqual(self.detach(), "")
        again.release()
        self.assertEqual(self.detach(), "1")

    def test_together(self) -> None:
        """Concurrent requests share one writing, and each of them uses the checkout."""
        self.gate.shut = True
        requested = [self.check_out() for _ in range(3)]
        self.gate.open()
        self.assertEqual(len(self.written), 1)
        for checkout in map(self.successResultOf, requested):
            self.assertEqual(self.detach(), "")
            checkout.release()
        self.assertEqual(self.detach(), "1")

    def test_failure(self) -> None:
        """A failed writing fails for all requests, and leaves nothing."""
        self.gate.shut = True
        requested = [self.check_out() for _ in range(2)]
        self.gate.error = EvaluationFailure("repository", "damaged")
        self.gate.open()
        errors = [self.failureResultOf(one, EvaluationFailure).value for one in requested]
        self.assertIsNot(errors[0], errors[1])
        self.assertEqual(list(self.root.iterdir()), [])
        self.assertEqual(self.checkouts.disk_bytes, 0)
        self.gate.error = None
        self.get()

    def test_cancelled(self) -> None:
        """A writing is cancelled with the last request for it, and leaves nothing."""
        self.gate.shut = True
        first, second = self.check_out(), self.check_out()
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertNoResult(second)
        second.cancel()
        self.failureResultOf(second, CancelledError)
        self.assertEqual(list(self.root.iterdir()), [])

    def test_checkout_is_not_evicted_before_it_is_used(self) -> None:
        threads = SlowThreads()
        self.checkouts = CheckoutCache(self.root, threads)
        requested = self.check_out()
        while threads.waiting:
            threads.step()
            self.assertEqual(self.detach(), "")
        self.assertTrue(self.successResultOf(requested).path.exists())

    def test_cancelled_at_the_end(self) -> None:
        """A checkout that is cancelled while it gets its name is complete, counted and used."""
        threads = SlowThreads()
        self.checkouts = CheckoutCache(self.root, threads)
        cancelled = self.check_out()
        threads.step()
        cancelled.cancel()
        threads.finish()
        self.failureResultOf(cancelled, CancelledError)
        self.assertEqual([path.suffix for path in self.root.iterdir()], [".tree"])
        self.assertGreaterEqual(self.checkouts.disk_bytes, SIZE)
        self.assertEqual([self.get().path], list(self.root.iterdir()))

    def test_gone(self) -> None:
        """A checkout that somebody has removed is made again, and its size is counted once."""
        checkout = self.get()
        size = self.checkouts.disk_bytes
        checkout.path.rename(self.mktemp())
        self.assertTrue((self.get().path / "directory/file").exists())
        self.assertEqual((len(self.written), self.checkouts.disk_bytes), (2, size))


class EvictionTests(CheckoutsTestCase):
    """The eviction of checkouts, and their size."""

    def test_size(self) -> None:
        """The size is that on the disk, with directories."""
        checkout = self.get()
        top = os.open(checkout.path, os.O_RDONLY)
        self.addCleanup(os.close, top)
        blocks = [status.st_blocks for _, status in walk_tree(top)]
        self.assertEqual((len(blocks), self.checkouts.disk_bytes), (3, sum(blocks) * 512))
        self.assertGreaterEqual(self.checkouts.disk_bytes, 10_000)

    def test_least_recently_used(self) -> None:
        """The least recently used goes, and no more than there is no room for."""
        for tree in "123":
            self.get(tree * 40).release()
        self.get("1" * 40).release()
        each = self.checkouts.disk_bytes // 3
        self.assertEqual(self.detach(3 * each), "")
        self.assertEqual(self.detach(3 * each - 1), "2")
        self.assertEqual(self.checkouts.disk_bytes, 2 * each)
        self.assertEqual(self.detach(0), "31")
        self.assertEqual(self.checkouts.disk_bytes, 0)

    def test_in_use(self) -> None:
        """A checkout in use stays until its last user releases it."""
        first, second = self.get(), self.get()
        first.release()
        self.assertEqual(self.detach(0), "")
        second.release()
        self.assertEqual(self.detach(0), "1")

    def test_renamed(self) -> None:
        """An evicted checkout loses its name at once: a request in the meantime makes a new one."""
        self.get().release()
        (detached,) = self.checkouts.evict_excess_checkouts(0)
        self.assertEqual(list(self.root.iterdir()), [detached])
        self.assertNotEqual(detached.suffix, ".tree")
        self.assertNotEqual(self.get().path, detached)
        self.assertEqual(len(self.written), 2)

    def test_of_a_repository(self) -> None:
        """The checkouts of a repository are evicted together, but for those in use."""
        used = self.get(ONE, "a" * 40)
        self.get(OTHER, "a" * 40).release()
        other = self.get(ONE, "b" * 40)
        other.release()
        (detached,) = self.checkouts.evict_repository_checkouts("a" * 40)
        self.assertIn(OTHER, detached.name)
        self.assertTrue(used.path.exists() and other.path.exists())

    def test_gone(self) -> None:
        """A checkout that somebody has removed is evicted without an error."""
        checkout = self.get()
        checkout.release()
        checkout.path.rename(self.mktemp())
        self.assertEqual(self.detach(0), "1")
        self.assertEqual(self.checkouts.disk_bytes, 0)


class RestartTests(CheckoutsTestCase):
    """Checkouts of an earlier daemon, which are looked at when they are requested."""

    def damage(self) -> Path:
        """Let another daemon take over a checkout that lacks a file; return its path."""
        path = self.get().path
        (path / "link").unlink()
        self.restart()
        return path

    def resume(self, path: Path) -> Checkout:
        """Return a checkout that an evaluation of the earlier daemon uses."""
        return self.checkouts.resume_checkout(Commit(OID, ONE, FILES, SIZE), path)

    def restart_slowly(self) -> SlowThreads:
        """Let another daemon take over a checkout; return its threads."""
        path = self.get().path
        threads = SlowThreads()
        self.checkouts = CheckoutCache(self.root, threads)
        self.checkouts.load_checkout(path)
        return threads

    def test_whole(self) -> None:
        """Complete checkouts are taken over, with their last uses."""
        for tree in (ONE, OTHER):
            self.get(tree)
        os.utime(self.get(OTHER).path, (1, 1))
        self.restart()
        (detached,) = self.checkouts.evict_excess_checkouts(self.checkouts.disk_bytes - 1)
        self.assertIn(OTHER, detached.name)
        self.get(ONE)
        self.assertEqual(len(self.written), 2)

    def test_size(self) -> None:
        """A size is estimated until the first use, from above; what is evicted was counted."""
        for tree in (ONE, OTHER):
            self.get(tree)
        size = self.checkouts.disk_bytes // 2
        self.restart()
        estimate = SIZE + FILES * 4096
        self.assertEqual(self.checkouts.disk_bytes, 2 * estimate)
        self.assertGreaterEqual(estimate, size)
        self.get().release()
        self.assertEqual(self.checkouts.disk_bytes, estimate + size)
        self.assertEqual(self.detach(size), "2")
        self.assertEqual(self.checkouts.disk_bytes, size)
        self.assertEqual(self.detach(), "1")
        self.assertEqual(self.checkouts.disk_bytes, 0)

    def test_looked_at_once(self) -> None:
        """A start looks at no checkout; requests share one look, and later ones need none."""
        threads = self.restart_slowly()
        requested = [self.check_out() for _ in range(2)]
        self.assertEqual(self.detach(), "")  # it may not change meanwhile
        threads.step()
        self.assertEqual(threads.waiting, [])
        for one in requested:
            self.successResultOf(one).release()
        self.get().release()
        self.assertEqual(self.detach(), "1")

    def test_cancelled(self) -> None:
        """A request that is cancelled decides nothing."""
        threads = self.restart_slowly()
        requested = self.check_out()
        requested.cancel()
        threads.finish()
        self.failureResultOf(requested, CancelledError)
        again = self.check_out()
        threads.finish()
        self.successResultOf(again).release()
        self.assertEqual((self.detach(), len(self.written)), ("1", 1))

    def test_damaged(self) -> None:
        """A checkout with missing or additional files or bytes is removed, and made again."""
        for damage in (
            lambda tree: (tree / "link").unlink(),
            lambda tree: (tree / "directory" / "file").write_bytes(b""),
            lambda tree: (tree / "more").mkdir(),
            lambda tree: (tree.rename(self.mktemp()), tree.touch()),
        ):
            path = self.get().path
            size = self.checkouts.disk_bytes
            damage(path)
            made = len(self.written)
            self.restart()
            requested = [self.check_out() for _ in range(2)]
            for checkout in map(self.successResultOf, requested):
                self.assertEqual((checkout.path, os.readlink(path / "link")), (path, "gone"))
                self.assertEqual((path / "directory/file").stat().st_size, 10_000)
                self.assertFalse((path / "more").exists())
                checkout.release()
            self.assertEqual(len(self.written), made + 1)
            self.assertEqual(list(self.root.iterdir()), [path])
            self.assertEqual(self.checkouts.disk_bytes, size)

    def test_unknown(self) -> None:
        """A directory with a name that no checkout has is removed at the start."""
        path = self.get().path
        path.rename(path.with_name("tree.tree"))
        self.restart()
        self.assertEqual((list(self.root.iterdir()), self.checkouts.disk_bytes), ([], 0))

    def test_lookups(self) -> None:
        """A damaged checkout does not count as found."""
        self.damage()
        tally = GitCacheCounters()
        self.checkouts = CheckoutCache(self.root, InlineThreads(), tally)
        for path in self.root.iterdir():
            self.checkouts.load_checkout(path)
        for _ in range(2):
            self.get()
        counts = {kind: tally.lookup_counts["checkouts", kind] for kind in ("hit", "miss")}
        self.assertEqual(counts, {"hit": 1, "miss": 1})

    def test_damaged_in_use(self) -> None:
        """A damaged checkout stays as long as evaluations use it; others get a complete one."""
        path = self.damage()
        resumed = [self.resume(path) for _ in range(2)]
        one, two = self.get(), self.get(oid="d" * 40)
        self.assertEqual(one.path, two.path)
        self.assertEqual(os.readlink(one.path / "link"), "gone")
        self.assertEqual(os.listdir(path), ["directory"])
        resumed.pop().release()
        self.assertEqual(self.get().path, one.path)
        self.assertEqual(len(self.written), 2)
        resumed.pop().release()
        self.assertEqual(self.get().path, path)
        self.assertEqual(os.readlink(path / "link"), "gone")
        self.assertEqual(len(self.written), 3)

    def test_damaged_in_use_again(self) -> None:
        """The next daemon does the same; what it evicts was counted."""
        path = self.damage()
        self.resume(path)
        other = self.get().path
        self.restart()
        resumed = self.resume(path)
        self.assertEqual(self.get().path, other)
        self.assertEqual(len(self.written), 2)
        self.assertEqual((self.detach(), os.listdir(path)), ("", ["directory"]))
        resumed.release()
        self.assertEqual(self.detach(), "1")
        self.assertFalse(path.exists())

    def test_exhausted(self) -> None:
        """A daemon without free descriptors or memory takes no checkout for damaged."""
        path = self.get().path
        self.restart()
        for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):

            def fail(_: int, number: int = number) -> None:
                raise OSError(number, os.strerror(number))

            patch = self.patch(checkouts, "walk_tree", fail)
            self.assertEqual(self.failureResultOf(self.check_out(), OSError).value.errno, number)
            patch.restore()
        inode = path.stat().st_ino
        self.assertEqual((self.get().path.stat().st_ino, len(self.written)), (inode, 1))
