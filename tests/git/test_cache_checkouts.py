"""`git.cache`: trees that are checked out once, their eviction, and a restart."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.evaluations import Checkout, Commit, TreeCopier
from tawebeval.errors import EvaluationFailure
from tawebeval.git.cache import RepositoryCache
from tawebeval.git.fetch_limits import TreeLimits
from tawebeval.linux.filetree import remove_tree, walk_tree
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
        self.cache = self.make()

    def make(self, threads: Any = None, **settings: str) -> RepositoryCache:
        """Return a cache without repositories."""
        threads = threads or InlineThreads()
        return RepositoryCache(self.root, None, threads, None, None, None, None, 10**9, **settings)

    @property
    def disk_bytes(self) -> int:
        return self.cache.disk_bytes_by_kind["checkouts"]

    async def write(self, tree: Path, index: Path) -> tuple[int, int]:
        """Write a tree: a directory, a file in it, and a link."""
        self.written.append(tree)
        self.assertEqual((list(tree.iterdir()), list(index.iterdir())), ([], []))
        (tree / "directory").mkdir()
        (index / "index").touch()
        await self.gate.wait()
        (tree / "directory" / "file").write_bytes(b"x" * 10_000)
        (tree / "link").symlink_to("gone")
        return FILES, SIZE

    def check_out(
        self, tree: str = ONE, repository: str = "a" * 40, oid: str = OID
    ) -> Deferred[Checkout]:
        commit = Commit(oid, tree, FILES, SIZE)
        return Deferred.fromCoroutine(
            self.cache._get_or_create_checkout(repository, commit, self.write)
        )

    def get(self, tree: str = ONE, repository: str = "a" * 40, oid: str = OID) -> Checkout:
        return self.successResultOf(self.check_out(tree, repository, oid))

    def detach(self, capacity: int = 0) -> str:
        """Return the trees that are evicted for so many bytes, by their first digits."""
        self.cache._capacity = 2 * capacity
        return "".join(path.name[41] for path in self.cache._detach_excess())

    def restart(self) -> None:
        """Let another daemon take over the checkouts, the oldest first."""
        self.cache = self.make()
        self.cache.load_from_disk()


class ProvideCheckoutTests(CheckoutsTestCase):
    def test_tree_is_written_once_for_all_requests(self) -> None:
        checkout = self.get()
        self.assertEqual(checkout.commit, Commit(OID, ONE, FILES, SIZE))
        self.assertEqual(os.readlink(checkout.path / "link"), "gone")
        self.assertEqual((checkout.path / "directory/file").stat().st_size, 10_000)
        self.assertEqual(list(self.root.iterdir()), [checkout.path])
        self.assertEqual(self.get().path, checkout.path)
        self.assertNotEqual(self.written, [checkout.path])
        self.assertEqual(len(self.written), 1)

    def test_commits_with_the_same_tree_share_one_checkout(self) -> None:
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

    def test_failed_checkout_fails_all_requests_and_can_be_repeated(self) -> None:
        self.gate.shut = True
        requested = [self.check_out() for _ in range(2)]
        self.gate.error = EvaluationFailure("repository", "damaged")
        self.gate.open()
        errors = [self.failureResultOf(one, EvaluationFailure).value for one in requested]
        self.assertIsNot(errors[0], errors[1])
        self.assertEqual(list(self.root.iterdir()), [])
        self.assertEqual(self.disk_bytes, 0)
        self.gate.error = None
        self.get()

    def test_checkout_is_not_evicted_before_it_is_used(self) -> None:
        threads = SlowThreads()
        self.cache = self.make(threads)
        requested = self.check_out()
        while threads.waiting:
            threads.step()
            self.assertEqual(self.detach(), "")
        self.assertTrue(self.successResultOf(requested).path.exists())

    def test_checkout_cancelled_during_its_rename_stays_in_the_cache(self) -> None:
        threads = SlowThreads()
        self.cache = self.make(threads)
        cancelled = self.check_out()
        threads.step()
        cancelled.cancel()
        threads.finish()
        self.failureResultOf(cancelled, CancelledError)
        self.assertEqual([path.suffix for path in self.root.iterdir()], [".tree"])
        self.assertGreaterEqual(self.disk_bytes, SIZE)
        self.assertEqual([self.get().path], list(self.root.iterdir()))

    def test_checkout_is_made_again_if_another_program_has_removed_it(self) -> None:
        checkout = self.get()
        size = self.disk_bytes
        checkout.path.rename(self.mktemp())
        self.assertTrue((self.get().path / "directory/file").exists())
        self.assertEqual((len(self.written), self.disk_bytes), (2, size))


class BuildTests(CheckoutsTestCase):
    key = "b" * 40

    def setUp(self) -> None:
        super().setUp()
        self.built = self.root.with_name(f"{self.root.name}-built")
        self.built.mkdir()
        self.addCleanup(remove_tree, self.built)

    def make(self, threads: Any = None, **settings: str) -> RepositoryCache:
        cache = super().make(threads, **settings)
        cache._limits = SimpleNamespace(tree_limits=TreeLimits(10, 20_000))  # type: ignore[assignment]
        return cache

    def store(self, checkout: Checkout) -> Deferred[Checkout]:
        """Store what is in `built`, when the gate is open."""

        async def build(take_tree: TreeCopier) -> tuple[int, int]:
            await self.gate.wait()
            return take_tree(self.built)

        return Deferred.fromCoroutine(self.cache.store_build(checkout, self.key, build))

    def test_build_is_found_by_its_checkout_and_key_over_a_restart(self) -> None:
        checkout = self.get()
        self.assertIsNone(self.cache.find_build(checkout, self.key))
        (self.built / "program").write_bytes(b"x" * 5000)
        (self.built / "program").chmod(0o755)
        (self.built / "link").symlink_to("program")
        stored = self.successResultOf(self.store(checkout))
        (self.built / "program").write_bytes(b"changed later")
        self.assertEqual(stored.commit, Commit(OID, ONE, 2, 5000))
        self.assertEqual((stored.path / "link").read_bytes(), b"x" * 5000)
        self.assertEqual((stored.path / "program").stat().st_mode & 0o777, 0o755)
        self.assertEqual(self.cache.find_build(checkout, self.key), stored)
        self.assertIsNone(self.cache.find_build(checkout, "c" * 40))
        self.assertIsNone(self.cache.find_build(self.get(repository="e" * 40), self.key))
        self.restart()
        again = self.cache.find_build(checkout, self.key)
        self.assertEqual(again, stored)
        self.assertEqual(self.cache.use_checkout_at(stored.commit, stored.path), stored)

    def test_build_counts_in_the_cache_and_is_evicted_only_without_users(self) -> None:
        checkout = self.get()
        before = self.disk_bytes
        stored = self.successResultOf(self.store(checkout))
        self.assertGreater(self.disk_bytes, before)
        checkout.release()
        self.assertEqual(self.detach(), "1")
        self.assertTrue(stored.path.exists())
        stored.release()
        self.assertEqual(self.detach(), "b")
        self.assertFalse(stored.path.exists())

    def test_build_is_refused_if_its_copy_would_be_too_large(self) -> None:
        checkout = self.get()
        (self.built / "sparse").touch()
        os.truncate(self.built / "sparse", 8000)
        for number in range(2):
            os.link(self.built / "sparse", self.built / str(number))
        error = self.failureResultOf(self.store(checkout), EvaluationFailure).value
        self.assertIn("repositories.tree_bytes", error.message)
        remove_tree(self.built / "sparse")
        for number in range(9):
            (self.built / f"empty-{number}").touch()
        error = self.failureResultOf(self.store(checkout), EvaluationFailure).value
        self.assertIn("over 10 files", error.message)
        self.assertEqual(list(self.root.iterdir()), [checkout.path])

    def test_cancelled_build_leaves_nothing(self) -> None:
        checkout = self.get()
        self.gate.shut = True
        storing = self.store(checkout)
        self.assertEqual(len(list(self.root.iterdir())), 2)
        storing.cancel()
        self.failureResultOf(storing, CancelledError)
        self.assertEqual(list(self.root.iterdir()), [checkout.path])
        self.assertIsNone(self.cache.find_build(checkout, self.key))


class EvictionTests(CheckoutsTestCase):
    def test_size_of_a_checkout_is_at_least_the_disk_blocks_of_its_files(self) -> None:
        checkout = self.get()
        top = os.open(checkout.path, os.O_RDONLY)
        self.addCleanup(os.close, top)
        used = sum(status.st_blocks * 512 for _, status in walk_tree(top))
        self.assertGreaterEqual(self.disk_bytes, used)
        self.assertEqual(self.disk_bytes, SIZE + (FILES + 1) * 4096)


class RestartTests(CheckoutsTestCase):
    def test_restarted_cache_keeps_complete_checkouts_and_their_times(self) -> None:
        for tree in (ONE, OTHER):
            self.get(tree)
        os.utime(self.get(OTHER).path, (1, 1))
        self.restart()
        self.assertEqual(self.detach(self.disk_bytes - 1), "2")
        self.get(ONE)
        self.assertEqual(len(self.written), 2)

    def test_checkouts_of_an_earlier_boot_are_written_again(self) -> None:
        path = self.get().path
        for name in ("tree.tree", f"{path.name}.new-1", f"{path.name[:-13]}00000000.tree"):
            path.with_name(name).mkdir()
        self.restart()
        self.assertEqual(list(self.root.iterdir()), [path])
        self.cache = self.make(boot="00000000")
        self.cache.load_from_disk()
        self.assertNotEqual(self.get().path, path)
        self.assertEqual(len(self.written), 2)

    def test_checkout_in_use_after_a_restart_is_not_evicted(self) -> None:
        path = self.get().path
        self.restart()
        resumed = self.cache.use_checkout_at(Commit(OID, ONE, FILES, SIZE), path)
        self.assertEqual(self.detach(), "")
        resumed.release()
        self.assertEqual(self.detach(), "1")
