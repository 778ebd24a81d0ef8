"""`git.cache`: the size of the cache, and what is evicted."""

from __future__ import annotations

import os
from pathlib import Path

from tests.cases.git import OTHER, CacheTestCase, Running


def _set_time(path: Path, moment: int) -> None:
    os.utime(path, (moment, moment))


class EvictionTestCase(CacheTestCase):
    """A cache for three repositories with packs of 100 kB."""

    capacity = 600_000

    def setUp(self) -> None:
        super().setUp()
        self.grow = lambda repository: (repository / "pack").write_bytes(b"x" * 100_000)

    def fetch_all(self, names: str) -> None:
        """Request a commit of each of these repositories, and release it."""
        for name in names:
            self.get(f"/{name}")
            self.release()

    def find(self, name: str) -> Path:
        found = self.root.glob("*.git")
        return next(path for path in found if (path / "url").read_text() == f"/{name}\n")

    def check_cached(self, expected: str) -> None:
        """Check which repositories are in the cache, in alphabetical order."""
        found = self.root.glob("*.git")
        cached = sorted((path / "url").read_text().strip("/\n") for path in found)
        self.assertEqual("".join(cached), expected)


class EvictionTests(EvictionTestCase):
    def test_least_recently_used_repository_is_evicted_from_a_full_cache(self) -> None:
        for fetched, cached in (("abc", "abc"), ("ad", "acd"), ("e", "ade")):
            self.fetch_all(fetched)
            self.check_cached(cached)

    def test_repository_in_use_stays(self) -> None:
        self.fetch_all("abc")
        running = Running()
        self.fetches = [running]
        self.present.clear()
        requested = self.check_out("/a", oid=OTHER)
        self.fetch_all("bc")
        self.fetched = 0
        self.fetch_all("d")
        self.check_cached("acd")
        running.end()
        self.successResultOf(requested)

    def test_repository_larger_than_the_cache_stays_until_the_next_repository_comes(self) -> None:
        self.grow = lambda repository: (repository / "pack").write_bytes(b"x" * 700_000)
        for name in "ab":
            self.fetch_all(name)
            self.check_cached(name)

    def test_repository_removed_by_another_program_is_evicted_without_error(self) -> None:
        self.fetch_all("abc")
        self.find("a").rename(self.mktemp())
        self.fetch_all("d")
        self.check_cached("bcd")


class RestartTests(EvictionTestCase):
    def test_new_daemon_takes_over_the_cached_repositories_and_their_times(self) -> None:
        self.fetch_all("abca")
        for age, name in enumerate("acb"):
            _set_time(self.find(name), 1_700_000_000 - age)
        self.restart()
        self.git.commands.clear()
        self.fetch_all("c")
        self.assertEqual(self.names(), [])
        self.fetch_all("d")
        self.check_cached("acd")

    def test_new_daemon_with_less_room_evicts_at_once(self) -> None:
        self.fetch_all("abc")
        for age, name in enumerate("bca"):
            _set_time(self.find(name), 1_700_000_000 - age)
        self.capacity = 200_000
        self.restart()
        self.check_cached("b")
