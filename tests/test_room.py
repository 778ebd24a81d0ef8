"""`daemon.room`: the sums of docs/operations.md, and what there is for them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, Health, Limits, Repositories
from tawebeval.daemon import room as module
from tawebeval.daemon.findings import Finding
from tawebeval.daemon.findings import Health as Found
from tawebeval.daemon.room import judge_room
from tawebeval.sandbox.disk import DiskUse

GIB = 2**30
RUNNING = 3
SPARE = 5 * GIB
CONFIGURATION = Configuration(
    limits=Limits(uploads=7 * GIB, disk=11 * GIB),
    repositories=Repositories(cache=13 * GIB, fetches=2, fetch_bytes=17 * GIB, tree_bytes=19 * GIB),
    health=Health(free_disk=SPARE),
)
STATE = (7 + RUNNING * (11 + 19)) * GIB
CACHE = (13 + (RUNNING + 2) * (17 + 19)) * GIB


class RoomTests(SynchronousTestCase):
    """A state and a cache, of which the test says where they are and how much is free there."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.state, self.cache = self.root / "state", self.root / "cache"
        for path in (self.state, self.cache):
            path.mkdir(parents=True)
        self.devices = {self.state: 1, self.cache: 2}
        self.free = {self.state: 2**60, self.cache: 2**60}
        stat = os.stat

        def look(path: Path, **more: bool) -> object:
            found = stat(path, **more)
            return SimpleNamespace(st_dev=self.devices[path]) if path in self.devices else found

        self.patch(module, "os", SimpleNamespace(stat=look))
        usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=self.free[path]))
        self.patch(module, "shutil", usage)

    def judge(self) -> list[Finding]:
        """Return what is found."""
        return list(judge_room(CONFIGURATION, RUNNING, self.state, self.cache))

    def check_bound(self, path: Path, needed: int, index: int, taken: int = 0) -> Finding:
        """Hold how much is needed, to the byte; return what is said where that is not there."""
        self.free[path] = needed - taken
        self.assertEqual({each.health for each in self.judge()}, {Found.OK})
        self.free[path] -= 1
        found = self.judge()
        weaker = found.pop(index)
        self.assertEqual(weaker.health, Found.WEAKER)
        self.assertEqual([each for each in found if each.health is not Found.OK], [])
        self.assertIn(f"{needed / GIB:.1f} GiB may be needed", weaker.what)
        return weaker

    def test_state(self) -> None:
        """Uploads, and what each evaluation may write and have as a copy."""
        found = self.check_bound(self.state, STATE + SPARE, 0)
        self.assertTrue(found.what.startswith(f"{self.state}: "), found)
        for setting in ("limits.uploads", "limits.disk", "tree_bytes", "evaluations.running"):
            self.assertIn(setting, found.remedy)

    def test_cache(self) -> None:
        """What is kept, and what each may fetch and check out beside that."""
        found = self.check_bound(self.cache, CACHE + SPARE, 1)
        self.assertTrue(found.what.startswith(f"{self.cache}: "), found)
        for setting in ("repositories.cache", "fetch_bytes", "tree_bytes", "evaluations.running"):
            self.assertIn(setting, found.remedy)

    def test_one_file_system(self) -> None:
        """Where both are on one there has to be room for the sum, with one reserve."""
        self.devices[self.cache] = self.devices[self.state]
        found = self.check_bound(self.state, STATE + CACHE + SPARE, 0)
        self.assertEqual(len(self.judge()), 1)
        self.assertTrue(found.what.startswith(f"{self.state} and {self.cache}: "), found)
        self.assertEqual(found.remedy.count("tree_bytes"), 1)

    def test_taken(self) -> None:
        """What the cache has of its size already need not be free, however much more it has."""
        for taken, counts in ((GIB, 1), (14 * GIB, 13)):

            def measure(path: Path, pids: object, taken: int = taken) -> DiskUse:
                self.assertEqual(path, self.cache)
                return DiskUse(size=taken)

            self.patch(module, "measure", measure)
            self.check_bound(self.cache, CACHE + SPARE, 1, counts * GIB)
            self.assertNotIn("in the cache", self.judge()[0].what)

    def test_measured(self) -> None:
        """That is looked up on the disk."""
        with open(self.cache / "pack", "wb") as pack:
            pack.write(os.urandom(2**20))
            os.fsync(pack.fileno())
        self.assertIn("free or in the cache", self.judge()[1].what)

    def test_not_there(self) -> None:
        """What is not there yet will be on the file system of what is above it."""
        self.cache.rmdir()
        self.devices = {self.state: 1, self.root: 1}
        (found,) = self.judge()
        self.assertIn(f"{self.state} and {self.cache}: ", found.what)
