"""Maintenance of a cached repository by a real git: small, whole, and still fetched into."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.internet.task import deferLater

from tawebeval.core.form import Repository
from tawebeval.errors import EvaluationFailure
from tests.integration.bare_repositories import MOST, BareRepositoryCase
from tests.integration.repositories import HttpServer, git

COMMITS = 24  # more than those that have a ref


class MaintenanceTests(BareRepositoryCase):
    """A cached repository with commits that were fetched one after the other."""

    async def setUp(self) -> None:
        self.make()
        self.source.write("big", os.urandom(2**16))
        self.commits = self.source.history("step", COMMITS)
        for commit in self.commits:
            await self.fetch(commit)

    async def fetch(self, commit: str, url: str = "", depth: int | None = None) -> None:
        await self.bare.fetch_commit(Repository(url or self.source.url, None, depth), commit)

    async def check_out(self, commit: str) -> None:
        known = self.bare.find_fetched_commit(commit)
        assert known is not None
        place = Path(tempfile.mkdtemp(dir=self.folder))
        tree, index = place / "tree", place / "index"
        tree.mkdir()
        index.mkdir()
        await self.bare.check_out_commit(known, tree, index)
        shown = git(self.source.folder, "show", f"{commit}:step")
        self.assertEqual((tree / "step").read_text().strip(), shown)

    async def check_whole(self) -> None:
        """Hold that everything is there, and nothing that git has left half done."""
        for commit in (self.commits[0], self.commits[-1]):
            await self.check_out(commit)
        git(self.path, "rev-list", "--objects", "--no-walk", *self.commits)
        git(self.path, "rev-list", "--objects", "--all")
        packs = self.path / "objects/pack"
        left = {path.with_suffix("").name for path in packs.iterdir()}
        self.assertEqual(left, {path.stem for path in packs.glob("pack-*.idx")})
        self.assertEqual(left, {path.stem for path in packs.glob("pack-*.pack")})
        self.assertEqual(list(self.path.glob("**/*.lock")), [])

    def counts(self) -> tuple[int, int, int]:
        """Return how many packs, commits with a ref, and lines of `shallow` there are."""
        packs = len(list(self.path.glob("objects/pack/*.pack")))
        refs = len(git(self.path, "for-each-ref").splitlines())
        return packs, refs, len((self.path / "shallow").read_text().splitlines())

    async def test_maintenance_leaves_few_packs_and_all_commits(self) -> None:
        self.assertEqual(self.counts(), (COMMITS, 8, COMMITS))
        for _ in range(2):
            await self.bare.maintain(MOST)
            # One of the packs has the objects without a ref.
            self.assertEqual(self.counts(), (2, 8, 8))
        await self.check_whole()

    async def test_later_fetches_build_on_the_repacked_repository(self) -> None:
        await self.bare.maintain(MOST)
        before = self.bare.measure_disk_bytes()
        self.commits += self.source.history("step", 2)
        await self.fetch(self.commits[-1])
        self.assertLess(self.bare.measure_disk_bytes() - before, 2**16)
        await self.fetch(self.commits[-2], depth=10)
        await self.check_whole()
        server = HttpServer(self.folder, v2=False)
        self.addCleanup(server.stop)
        self.source.branch("beside", self.commits[0])
        old, _ = self.source.history("other", 2)
        self.assertTrue((self.path / "shallow").exists())
        await self.fetch(old, f"{server.url}/source/.git")  # which gives it with all that it has
        self.assertFalse((self.path / "shallow").exists())
        await self.bare.maintain(MOST)
        await self.check_whole()

    async def test_commit_with_a_lost_marker_is_found(self) -> None:
        await self.bare.maintain(MOST)
        (self.path / "commits" / self.commits[0]).unlink()
        await self.fetch(self.commits[0], "file:///nowhere")
        await self.check_out(self.commits[0])

    async def test_checkouts_during_maintenance_are_whole(self) -> None:
        maintenance = Deferred.fromCoroutine(self.bare.maintain(MOST))
        checking = [Deferred.fromCoroutine(self.check_out(one)) for one in self.commits]
        await gatherResults([maintenance, *checking])

    async def test_killed_maintenance_loses_nothing(self) -> None:
        for delay in range(0, 90, 15):
            maintenance = Deferred.fromCoroutine(self.bare.maintain(MOST))
            await deferLater(reactor, delay / 1000)
            maintenance.cancel()
            try:
                await maintenance
            except CancelledError:
                await self.check_whole()
            self.commits += self.source.history("step", 1)
            await self.fetch(self.commits[-1])

    async def test_maintenance_without_room_changes_nothing(self) -> None:
        before = self.counts()
        with self.assertRaises(EvaluationFailure):
            await self.bare.maintain(1024)
        self.assertEqual(self.counts(), before)
        await self.check_whole()
