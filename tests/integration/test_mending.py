"""A cache in which something is damaged, by a disk, a hand or a cancelled fetch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.integration.client import failure, text
from tests.integration.harness import DaemonTestCase, until
from tests.integration.repositories import HttpServer, git


def truncate(path: Path, size: int) -> None:
    """Cut a file off, though it is read-only."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.truncate(size)


def scribble(path: Path) -> None:
    """Overwrite bytes in the midst of a file."""
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)


class MendingTests(DaemonTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        with open("/dev/urandom", "rb") as random:
            self.repository.write("large", random.read(100_000))
        self.commit = self.repository.commit()
        self.server = HttpServer(self.folder)
        self.addCleanup(self.server.stop)
        self.url = f"{self.server.url}/repository/.git"

    async def evaluate(self) -> str:
        identifier = await self.client.evaluate(self.url, self.commit, "cat README; wc -c <large")
        return text(await self.client.follow(identifier))

    def cached(self) -> Path:
        (found,) = (
            file.parent
            for file in self.daemon.cache.glob("repositories/*/url")
            if file.read_text().strip() == self.url
        )
        return found

    async def check(self, harm: Callable[[Path], object]) -> None:
        """Check that harm to the cache costs one more fetch, and nothing else."""
        await self.evaluate()
        asked = self.server.fetches
        self.lose_tree()
        harm(self.cached())
        self.assertEqual(await self.evaluate(), "an evaluator\n100000\n")
        self.assertEqual(self.server.fetches, asked + 1)
        await self.evaluate()
        self.assertEqual(self.server.fetches, asked + 1)
        self.assertEqual(list(self.daemon.cache.glob("repositories/*.old-*")), [])

    def lose_tree(self) -> None:
        """Remove what is checked out: without it git has to read the repository."""
        (checkout,) = self.cached().parent.glob(f"{self.cached().stem}-*.tree")
        shutil.rmtree(checkout)

    def each(self, pattern: str, harm: Callable[[Path], object]) -> Callable[[Path], None]:
        def all_of(repository: Path) -> None:
            files = list(repository.glob(pattern))
            self.assertTrue(files)
            for file in files:
                harm(file)

        return all_of

    async def test_damaged_packs_are_fetched_again(self) -> None:
        for pattern in ("objects/pack/*.pack", "objects/pack/*.idx"):
            await self.check(self.each(pattern, Path.unlink))
            await self.check(self.each(pattern, lambda file: truncate(file, 1000)))
            await self.check(self.each(pattern, lambda file: truncate(file, 0)))
        await self.check(self.each("objects/pack/*.pack", scribble))

    async def test_damaged_repository_is_fetched_again(self) -> None:
        for name in ("objects", "refs"):
            await self.check(lambda repository, name=name: shutil.rmtree(repository / name))
        await self.check(lambda repository: (repository / "HEAD").unlink())
        await self.check(lambda repository: (repository / "config").write_text("[x"))
        await self.check(shutil.rmtree)

    async def test_cancelled_fetch_leaves_the_cache_sound(self) -> None:
        self.server.hold()
        identifier = await self.client.evaluate(self.url, self.commit, "true")
        await until(self.server.half_sent.is_set, "a pack is half sent")
        await self.client.cancel(identifier)
        failure(await self.client.follow(identifier), "cancelled")
        await self.daemon.nothing_left()
        urls = [file.read_text() for file in self.daemon.cache.glob("repositories/*/url")]
        self.assertNotIn(self.url + "\n", urls)
        self.server.release()
        self.assertEqual(await self.evaluate(), "an evaluator\n100000\n")
        git(self.cached(), "fsck", "--strict")
