"""`tests.machine.cache`: what is slow to make for machines is made once, and does not pile up."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.machine import cache

DAY = 24 * 3600


class CachedTests(SynchronousTestCase):
    """A cache of its own, whose directories each hold what the test wants."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp())
        self.patch(cache, "FOLDER", self.folder)
        self.made: list[Path] = []

    def make(self, folder: Path) -> None:
        """Note that a directory is made, and fill it."""
        self.made.append(folder)
        (folder / "content").write_text("all of it")

    def use(self, ingredients: str = "flour") -> Path:
        """Return a directory after its use."""
        with cache.cached("cake", ingredients, self.make) as folder:
            self.assertEqual((folder / "content").read_text(), "all of it")
            return folder

    def age(self, path: Path, days: int) -> None:
        """Let a file be that old."""
        then = time.time() - days * DAY
        os.utime(path, (then, then))

    def test_made_once(self) -> None:
        """Of those who want the same at the same time one makes it."""
        with ThreadPoolExecutor(4) as threads:
            found = set(threads.map(lambda _: self.use(), range(8)))
        self.assertEqual((len(found), len(self.made)), (1, 1))

    def test_used_together(self) -> None:
        """Who uses a directory does not wait for others who do."""
        with cache.cached("cake", "flour", self.make) as ours:
            self.assertEqual(self.use(), ours)
        self.assertEqual(len(self.made), 1)

    def test_other_ingredients(self) -> None:
        """What is made of something else is something else."""
        self.assertNotEqual(self.use("flour"), self.use("rye"))

    def test_failure(self) -> None:
        """What was made in part is not used, and the error is the maker's own."""

        def fail(folder: Path) -> None:
            (folder / "content").touch()
            raise FileNotFoundError("an ingredient")

        with self.assertRaises(FileNotFoundError), cache.cached("cake", "flour", fail):
            self.fail("there is nothing to give")
        self.use()

    def test_error_of_the_user(self) -> None:
        """An error of who uses it is handed on, and the lock is free."""
        with self.assertRaises(FileNotFoundError), cache.cached("cake", "flour", self.make):
            raise FileNotFoundError("a spoon")
        self.use()
        self.assertEqual(len(self.made), 1)

    def test_old(self) -> None:
        """After a month it is made anew."""
        self.age(self.use() / "made", 31)
        self.use()
        self.assertEqual(len(self.made), 2)

    def test_tidied(self) -> None:
        """What nobody has used for a week goes, with its lock; what is in use stays."""
        with cache.cached("cake", "rye", self.make) as used:
            unused = self.use("spelt")
            for folder in (used, unused):
                self.age(folder.with_suffix(".lock"), 8)
            current = self.use("flour")
        kept = {path.with_suffix("") for path in self.folder.iterdir()}
        self.assertEqual(kept, {used, current})
