"""`slurm.tree_cache`: trees that several programs of one node use."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from threading import Event, Thread

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.filetree import remove_tree, walk_tree
from tawebeval.slurm import tree_cache, tree_stream
from tawebeval.slurm.tree_cache import TreeCache
from tawebeval.slurm.tree_stream import TreeSize

ONE, TWO, THREE = (f"{number:064x}" for number in (1, 2, 3))
BLOCK = 4096


class CacheTests(SynchronousTestCase):
    """One cache, and the programs that use it."""

    def setUp(self) -> None:
        self.parent = Path(self.mktemp()).resolve()
        self.parent.mkdir()
        self.received: list[str] = []

    def open(self, limit: int = 10 * BLOCK) -> TreeCache:
        """Return the cache as another program opens it."""
        place = self.parent / f"place-{len(list(self.parent.iterdir()))}"
        place.mkdir()
        cache = TreeCache.open(self.parent, limit, place)
        self.addCleanup(cache.close)
        return cache

    def provide(self, cache: TreeCache, key: str, entries: int = 4) -> Path:
        """Return a tree of a number of entries."""

        def receive(target: Path) -> TreeSize:
            (target / "file").write_text(key)
            for number in range(1, entries):
                (target / f"empty-{number}").touch()
            self.received.append(key)
            return TreeSize(entries, len(key))

        path = cache.provide_tree(key, receive)
        self.assertEqual((path / "file").read_text(), key)
        return path

    def test_once(self) -> None:
        """A tree is received once, also for later programs."""
        first = self.provide(self.open(), ONE)
        self.assertEqual(self.provide(self.open(), ONE), first)
        self.assertEqual(self.received, [ONE])

    def test_least_recently_used(self) -> None:
        """The tree that was used longest ago goes, and no other."""
        for key in (ONE, TWO, ONE):
            with self.open() as cache:
                self.provide(cache, key)
        with self.open() as cache:
            self.provide(cache, THREE)
        for key in (ONE, THREE, TWO):
            with self.open(100 * BLOCK) as cache:
                self.provide(cache, key)
        self.assertEqual(self.received, [ONE, TWO, THREE, TWO])

    def test_used(self) -> None:
        """A tree that is in use stays; what has no room is used without the cache."""
        kept = self.provide(self.open(), ONE)
        self.provide(self.open(), TWO)
        cache = self.open()
        self.assertTrue(self.provide(cache, THREE).is_relative_to(cache.temporary_directory))
        self.assertTrue(self.provide(self.open(), ONE, 99) == kept)
        large = self.open(BLOCK)
        self.assertTrue(self.provide(large, f"{9:064x}").is_relative_to(large.temporary_directory))

    def test_at_once(self) -> None:
        """Programs that need the same tree at once wait for the first."""
        begun, go = Event(), Event()
        caches, paths = [self.open() for _ in range(4)], list[Path]()

        def receive(target: Path) -> TreeSize:
            self.received.append(ONE)
            begun.set()
            go.wait(60)
            return TreeSize(0, 0)

        def provide(cache: TreeCache) -> None:
            paths.append(cache.provide_tree(ONE, receive))

        threads = [Thread(target=provide, args=(cache,)) for cache in caches]
        threads[0].start()
        begun.wait(60)
        for thread in threads[1:]:
            thread.start()
        go.set()
        for thread in threads:
            thread.join(60)
        self.assertEqual((self.received, len(set(paths))), ([ONE], 1))

    def test_slow(self) -> None:
        """A program that waits too long receives the tree itself."""
        self.patch(tree_cache, "TREE_WAIT_SECONDS", 0.0)
        slow, fast = self.open(), self.open()
        with slow._lock_receiving(ONE):
            path = self.provide(fast, ONE)
        self.assertEqual(self.provide(slow, ONE), path)

    def test_failed(self) -> None:
        """A tree that did not arrive is no tree."""
        cache = self.open()

        def fail(target: Path) -> TreeSize:
            (target / "part").touch()
            raise OSError

        self.assertRaises(OSError, cache.provide_tree, ONE, fail)
        self.provide(self.open(), ONE)

    def test_cleaned(self) -> None:
        """A tree that has lost a file, or its size, is received again."""
        for name in ("tree/empty-1", "tree/file", "size"):
            with self.open() as cache:
                (self.provide(cache, ONE).parent / name).unlink()
        with self.open() as cache:
            remove_tree(self.provide(cache, ONE))
        with self.open(4 * BLOCK + 100) as cache:
            self.provide(cache, TWO)
        self.provide(self.open(), ONE)
        self.assertEqual(self.received, [ONE] * 4 + [TWO, ONE])

    def test_hit(self) -> None:
        """A tree that is kept is there at once, whatever others receive."""
        self.provide(self.open(), ONE)
        self.patch(time, "sleep", lambda _: self.fail("it waits"))
        receiving = self.open()
        for key in (ONE, f"{1 + tree_cache._LOCKS:064x}"):
            with receiving._lock_receiving(key):
                self.provide(self.open(), ONE)
        with receiving._lock_receiving(ONE):
            self.provide(self.open(), f"{17:064x}")
        self.assertEqual(len(self.received), 2)

    def test_evicted(self) -> None:
        """Evicted trees are off the disk at once."""
        for key in (ONE, TWO):
            with self.open() as cache:
                self.provide(cache, key)
        running = self.open()
        self.provide(running, THREE)
        self.assertEqual(list(running.temporary_directory.rglob("file")), [])

    def test_too_large(self) -> None:
        """No tree goes for one that has no room even so."""
        for key in (ONE, TWO):
            with self.open() as cache:
                self.provide(cache, key)
        used = self.open()
        self.provide(used, TWO)
        for number, entries in ((8, 8), (9, 11)):
            with self.open() as cache:
                path = self.provide(cache, f"{number:064x}", entries)
                self.assertTrue(path.is_relative_to(cache.temporary_directory))
        for key in (ONE, TWO):
            self.provide(self.open(), key)
        self.assertEqual(self.received[:2], [ONE, TWO])
        self.assertEqual(len(self.received), 4)

    def test_cleaned_meanwhile(self) -> None:
        """A tree that a cleaner removes while it is measured, or whose directory is none."""
        with self.open() as cache:
            tree = self.provide(cache, ONE)

        def fail(top: int) -> object:
            yield from walk_tree(top)
            raise FileNotFoundError

        with self.open() as cache:
            self.patch(tree_stream, "walk_tree", fail)
            self.provide(cache, ONE)
        self.patch(tree_stream, "walk_tree", walk_tree)
        remove_tree(tree)
        tree.touch()
        self.provide(self.open(), ONE)
        self.provide(self.open(), ONE)
        self.assertEqual(self.received, [ONE] * 3)

    def assert_without(self, cache: TreeCache, key: str = ONE) -> None:
        """Check that a program receives its tree for itself, and says why."""
        self.assertTrue(self.provide(cache, key).is_relative_to(cache.temporary_directory))
        self.assertIn("the cache of trees is not used: ", cache.problem or "")
        self.assertIn("the cache of trees is not used: ", sys.stderr.getvalue())  # type: ignore[attr-defined]

    def test_locked(self) -> None:
        """A lock that nobody releases is waited for only once."""
        self.patch(sys, "stderr", io.StringIO())
        self.patch(tree_cache, "LOCK_WAIT_SECONDS", 0.0)
        holding, cache = self.open(), self.open()
        with holding._lock_cache():
            self.assert_without(cache)
        with self.open() as cache:

            def receive(target: Path) -> TreeSize:
                (target / "file").touch()
                lock = holding._lock_cache()
                lock.__enter__()
                self.addCleanup(lock.__exit__, None, None, None)
                return TreeSize(1, 0)

            path = cache.provide_tree(TWO, receive)
            self.assertTrue(path.is_relative_to(cache.temporary_directory))
        said = sys.stderr.getvalue().splitlines()  # type: ignore[attr-defined]
        self.assertEqual(len(said), 2)

    def test_refused(self) -> None:
        """A directory that others have made, or can use, is no cache: not even if unlisted."""
        directory = self.open().directory
        for make in (
            lambda: directory.mkdir(mode=0o755),
            lambda: directory.symlink_to(self.parent),
            lambda: directory.symlink_to("missing"),
            directory.touch,
        ):
            self.patch(sys, "stderr", io.StringIO())
            remove_tree(directory)
            make()
            self.patch(Path, "glob", lambda *_: ())
            self.assert_without(self.open())
        self.assertEqual(len(self.received), 4)

    def test_directory(self) -> None:
        """Caches of earlier boots are removed, also if another program is first."""
        old = [self.parent / f"tawebeval-trees-{os.geteuid()}-{name}" for name in "ab"]
        for path in old:
            (path / "tree").mkdir(parents=True)
        with self.open() as cache:
            self.provide(cache, ONE)
        self.assertFalse(any(path.exists() for path in old))
        for path in old:
            path.mkdir()
        self.patch(tree_cache, "remove_tree", lambda _: [path.rmdir() for path in old])
        self.provide(self.open(), ONE)
        self.assertEqual(self.received, [ONE])
