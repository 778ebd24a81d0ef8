"""`git.checkouts`: trees that are checked out once, their bounds, and a restart."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.checkout import Checkout, Commit
from tawebeval.errors import EvaluationError
from tawebeval.git.checkouts import Checkouts
from tawebeval.linux.copying import walk
from tests.fakes import OID, InlineThreads, SlowThreads
from tests.gates import Gate

FILES, SIZE = 3, 10_004  # of what `CheckoutsTestCase.fill` makes
ONE, OTHER = "1" * 40, "2" * 40


class CheckoutsTestCase(SynchronousTestCase):
    """A cache in a directory of its own; `gate` holds what fills trees, `filled` has those."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.root.mkdir()
        self.gate = Gate()
        self.filled: list[Path] = []
        self.checkouts = Checkouts(self.root, InlineThreads())

    async def fill(self, tree: Path, index: Path) -> None:
        """Make a tree: a directory, a file in it, and a link."""
        self.filled.append(tree)
        self.assertEqual((list(tree.iterdir()), list(index.iterdir())), ([], []))
        (tree / "directory").mkdir()
        (index / "index").touch()
        await self.gate.wait()
        (tree / "directory" / "file").write_bytes(b"x" * 10_000)
        (tree / "link").symlink_to("gone")

    def ask(self, tree: str = ONE, repository: str = "a" * 40) -> Deferred[Checkout]:
        """Ask for a tree."""
        commit = Commit(OID, tree, FILES, SIZE)
        return Deferred.fromCoroutine(self.checkouts.provide(repository, commit, self.fill))

    def get(self, tree: str = ONE, repository: str = "a" * 40) -> Checkout:
        """Return a checkout."""
        return self.successResultOf(self.ask(tree, repository))

    def restart(self) -> None:
        """Let another daemon take over what there is, the oldest first."""
        self.checkouts = Checkouts(self.root, InlineThreads())
        for path in sorted(self.root.iterdir(), key=os.path.getmtime):
            self.checkouts.load(path)


class ProvideTests(CheckoutsTestCase):
    """Trees for those who want them."""

    def test_made_once(self) -> None:
        """A tree is made when it is first wanted, whole before it has its name, and then stays."""
        checkout = self.get()
        self.assertEqual(checkout.commit, Commit(OID, ONE, FILES, SIZE))
        self.assertEqual(os.readlink(checkout.path / "link"), "gone")
        self.assertEqual((checkout.path / "directory/file").stat().st_size, 10_000)
        self.assertEqual(list(self.root.iterdir()), [checkout.path])
        self.assertEqual(self.get().path, checkout.path)
        self.assertNotEqual(self.filled, [checkout.path])
        self.assertEqual(len(self.filled), 1)

    def test_each_its_own(self) -> None:
        """The same tree of another repository is another one, as is another tree."""
        paths = {
            self.get(tree, repository).path
            for tree in (ONE, OTHER)
            for repository in ("a" * 40, "b" * 40)
        }
        self.assertEqual(len(paths), 4)

    def test_commits_of_one_tree(self) -> None:
        """Each has its own commit; those of one commit are the same, and released one by one."""
        one, two = (
            self.successResultOf(
                Deferred.fromCoroutine(
                    self.checkouts.provide("a" * 40, Commit(oid, ONE, FILES, SIZE), self.fill)
                )
            )
            for oid in (OID, "d" * 40)
        )
        self.assertEqual((one.commit.oid, two.commit.oid), (OID, "d" * 40))
        self.assertEqual((one.path, len(self.filled)), (two.path, 1))
        again = self.get()
        self.assertEqual(again, one)
        self.assertIs(again, self.get())
        for checkout in (one, two, again):
            checkout.release()
        self.assertEqual(list(self.checkouts.detach_excess(0)), [])
        again.release()
        self.assertEqual(len(list(self.checkouts.detach_excess(0))), 1)

    def test_together(self) -> None:
        """Who wants what is just being made waits for that; each uses it."""
        self.gate.shut = True
        asked = [self.ask() for _ in range(3)]
        self.assertEqual(len(self.filled), 1)
        self.gate.open()
        self.assertEqual(len(self.filled), 1)
        for checkout in map(self.successResultOf, asked):
            self.assertEqual(list(self.checkouts.detach_excess(0)), [])
            checkout.release()
        self.assertEqual(len(list(self.checkouts.detach_excess(0))), 1)

    def test_failure(self) -> None:
        """What cannot be made is everybody's error, and leaves nothing behind."""
        self.gate.shut = True
        asked = [self.ask() for _ in range(2)]
        self.gate.error = EvaluationError("repository", "damaged")
        self.gate.open()
        errors = [self.failureResultOf(one, EvaluationError).value for one in asked]
        self.assertIsNot(errors[0], errors[1])
        self.assertEqual(list(self.root.iterdir()), [])
        self.assertEqual(self.checkouts.size, 0)
        self.gate.error = None
        self.get()

    def test_given_up(self) -> None:
        """It is given up when nobody waits for it any more, and leaves nothing behind."""
        self.gate.shut = True
        first, second = self.ask(), self.ask()
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertNoResult(second)
        second.cancel()
        self.failureResultOf(second, CancelledError)
        self.assertEqual(list(self.root.iterdir()), [])

    def test_given_up_when_it_was_finished(self) -> None:
        """One that is given up while it gets its name is whole, and serves who comes next."""
        threads = SlowThreads()
        self.checkouts = Checkouts(self.root, threads)
        given_up = self.ask()
        threads.step()
        given_up.cancel()
        threads.finish()
        self.failureResultOf(given_up, CancelledError)
        self.assertEqual([path.suffix for path in self.root.iterdir()], [".tree"])
        again = self.ask()
        threads.finish()
        self.assertEqual([self.successResultOf(again).path], list(self.root.iterdir()))

    def test_gone(self) -> None:
        """One that somebody has removed is made anew, and its size is counted once."""
        checkout = self.get()
        size = self.checkouts.size
        checkout.path.rename(self.mktemp())
        self.assertTrue((self.get().path / "directory/file").exists())
        self.assertEqual((len(self.filled), self.checkouts.size), (2, size))


class EvictionTests(CheckoutsTestCase):
    """The bounds."""

    def taken(self, capacity: int) -> set[str]:
        """Return the trees that go when there is so much room, by their first digits."""
        return {path.name[41] for path in self.checkouts.detach_excess(capacity)}

    def test_size(self) -> None:
        """What is on the disk counts, directories as well."""
        checkout = self.get()
        top = os.open(checkout.path, os.O_RDONLY)
        self.addCleanup(os.close, top)
        blocks = [status.st_blocks for _, status in walk(top)]
        self.assertEqual((len(blocks), self.checkouts.size), (3, sum(blocks) * 512))
        self.assertGreaterEqual(self.checkouts.size, 10_000)

    def test_least_recently_used(self) -> None:
        """What was used longest ago goes, and no more than there is no room for."""
        for tree in "123":
            self.get(tree * 40).release()
        self.get("1" * 40).release()
        each = self.checkouts.size // 3
        self.assertEqual(self.taken(3 * each), set())
        self.assertEqual(self.taken(3 * each - 1), {"2"})
        self.assertEqual(self.checkouts.size, 2 * each)
        self.assertEqual(self.taken(0), {"1", "3"})
        self.assertEqual(self.checkouts.size, 0)

    def test_in_use(self) -> None:
        """What is in use stays until the last one who uses it releases it."""
        first, second = self.get(), self.get()
        first.release()
        self.assertEqual(self.taken(0), set())
        second.release()
        self.assertEqual(self.taken(0), {"1"})

    def test_renamed(self) -> None:
        """What goes loses its name at once: one that is wanted meanwhile is made anew."""
        self.get().release()
        (doomed,) = self.checkouts.detach_excess(0)
        self.assertEqual(list(self.root.iterdir()), [doomed])
        self.assertNotEqual(doomed.suffix, ".tree")
        self.assertNotEqual(self.get().path, doomed)
        self.assertEqual(len(self.filled), 2)

    def test_of_a_repository(self) -> None:
        """All of a repository go with it, but for those in use."""
        used = self.get(ONE, "a" * 40)
        self.get(OTHER, "a" * 40).release()
        other = self.get(ONE, "b" * 40)
        other.release()
        (doomed,) = self.checkouts.detach_all("a" * 40)
        self.assertIn(OTHER, doomed.name)
        self.assertTrue(used.path.exists() and other.path.exists())

    def test_gone(self) -> None:
        """One that is not there any more does no harm when its turn comes."""
        checkout = self.get()
        checkout.release()
        checkout.path.rename(self.mktemp())
        self.assertEqual(self.taken(0), {"1"})
        self.assertEqual(self.checkouts.size, 0)


class RestartTests(CheckoutsTestCase):
    """What an earlier daemon has left."""

    def test_whole(self) -> None:
        """What is whole is taken over, with its size and its age."""
        for tree in (ONE, OTHER):
            self.get(tree)
        size = self.checkouts.size
        os.utime(self.get(OTHER).path, (1, 1))
        self.restart()
        self.assertEqual(self.checkouts.size, size)
        (doomed,) = self.checkouts.detach_excess(size - 1)
        self.assertIn(OTHER, doomed.name)
        self.get(ONE)
        self.assertEqual(len(self.filled), 2)

    def test_use_is_told(self) -> None:
        """Each use is told, since its age is that of its last use."""
        used: list[Path] = []
        self.checkouts = Checkouts(self.root, InlineThreads(), on_use=used.append)
        for tree in (ONE, OTHER, ONE):
            path = self.get(tree).path
            self.assertEqual(used.pop(), path)
        self.assertEqual(used, [])

    def test_damaged(self) -> None:
        """What has lost a file, or bytes, or has too much, is removed, and made anew."""

        def lose(tree: Path) -> None:
            (tree / "link").unlink()

        def cut(tree: Path) -> None:
            (tree / "directory" / "file").write_bytes(b"")

        def add(tree: Path) -> None:
            (tree / "more").mkdir()

        def rename(tree: Path) -> None:
            tree.rename(tree.with_name("tree.tree"))

        def replace(tree: Path) -> None:
            tree.rename(self.mktemp())
            tree.touch()

        for damage in (lose, cut, add, rename, replace):
            damage(self.get().path)
            made = len(self.filled)
            self.restart()
            self.assertEqual(list(self.root.iterdir()), [], damage.__name__)
            self.assertEqual(self.checkouts.size, 0)
            self.get().release()
            self.assertEqual(len(self.filled), made + 1)
