"""`daemon.doctor`: how much free space the doctor asks for."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import (
    Configuration,
    EvaluationSettings,
    EventBufferSettings,
    LimitSettings,
    RepositoryFetchSettings,
)
from tawebeval.daemon import doctor as module
from tawebeval.daemon.doctor import check_free_space
from tawebeval.errors import SetupProblem, format_size
from tawebeval.sandbox.limits import DiskUsage

GIB = 2**30
RUNNING = 3
SPARE = 6 * GIB
CONFIGURATION = Configuration(
    evaluations=EvaluationSettings(running=RUNNING),
    limits=LimitSettings(uploads=7 * GIB, disk=11 * GIB, output=2 * GIB, free_disk=SPARE // 2),
    buffers=EventBufferSettings(disk=23 * GIB),
    repositories=RepositoryFetchSettings(
        cache=13 * GIB,
        fetches=2,
        fetch_bytes=17 * GIB,
        tree_bytes=19 * GIB,
    ),
)
STATE = (7 + 23 + RUNNING * (11 + 2 + 19)) * GIB
CACHE = (13 + (RUNNING + 2) * (17 + 19)) * GIB


class SpaceTests(SynchronousTestCase):
    """A state and a cache, of which the test says where they are and how much is free there."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.state, self.cache = self.root / "state", self.root / "cache"
        for path in (self.state, self.cache):
            path.mkdir(parents=True)
        self.daemon: Any = SimpleNamespace(
            configuration=CONFIGURATION, state=self.state, cache=self.cache
        )
        self.devices = {self.state: 1, self.cache: 2}
        self.free = {self.state: 2**60, self.cache: 2**60}
        stat = os.stat

        def look(path: Path, **more: bool) -> object:
            found = stat(path, **more)
            return SimpleNamespace(st_dev=self.devices[path]) if path in self.devices else found

        self.patch(module, "os", SimpleNamespace(stat=look))
        usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=self.free[path]))
        self.patch(module, "shutil", usage)

    def compare(self) -> list[str | SetupProblem]:
        """Return what is found of each file system."""
        return list(check_free_space(self.daemon))

    def check_bound(self, path: Path, needed: int, start: str, taken: int = 0) -> SetupProblem:
        """Hold how much is needed, to the byte; return what is said where that is not there."""
        self.free[path] = needed - taken
        self.assertEqual([said for said in self.compare() if isinstance(said, SetupProblem)], [])
        self.free[path] -= 1
        (problem,) = (said for said in self.compare() if isinstance(said, SetupProblem))
        self.assertTrue(problem.description.startswith(f"{start}: "), problem)
        self.assertIn(f"up to {format_size(needed)} may be needed", problem.description)
        return problem

    def test_each_directory_needs_what_its_settings_allow(self) -> None:
        for path, needed, settings in (
            (
                self.state,
                STATE,
                "limits.uploads, buffers.disk, limits.disk, repositories.tree_bytes",
            ),
            (self.cache, CACHE, "repositories.cache, repositories.fetch_bytes, repositories."),
        ):
            remedy = self.check_bound(path, needed + SPARE, str(path)).remedy
            self.free[path] = 2**60
            self.assertIn(f"a larger file system, or lower {settings}", remedy)
            self.assertTrue(remedy.endswith("tree_bytes or evaluations.running"), remedy)

    def test_directories_of_one_file_system_need_the_sum(self) -> None:
        self.devices[self.cache] = self.devices[self.state]
        both = f"{self.state} and {self.cache}"
        found = self.check_bound(self.state, STATE + CACHE + SPARE, both)
        self.assertEqual(len(self.compare()), 1)
        self.assertEqual(found.remedy.count("tree_bytes"), 1)

    def test_bytes_in_the_cache_need_not_be_free(self) -> None:
        for taken, counts in ((GIB, 1), (14 * GIB, 13)):

            def measure(path: Path, pids: object, taken: int = taken) -> DiskUsage:
                self.assertEqual(path, self.cache)
                return DiskUsage(disk_bytes=taken)

            self.patch(module, "measure_disk_usage", measure)
            self.check_bound(self.cache, CACHE + SPARE, str(self.cache), counts * GIB)
            self.assertNotIn("in the cache", self.compare()[0])

    def test_cache_is_measured_on_the_disk(self) -> None:
        with open(self.cache / "pack", "wb") as pack:
            pack.write(os.urandom(2**20))
            os.fsync(pack.fileno())
        self.assertIn("free or in the cache", self.compare()[1])

    def test_missing_directory_will_be_where_its_parent_is(self) -> None:
        self.cache.rmdir()
        self.devices = {self.state: 1, self.root: 1}
        (found,) = self.compare()
        self.assertIn(f"{self.state} and {self.cache}: ", found)
