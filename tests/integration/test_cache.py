"""The cache of repositories: asked once, shared, sound after any interruption, and private."""

from __future__ import annotations

import os
import re
import signal
from hashlib import sha256
from pathlib import Path

from tests.integration.client import failure, joined
from tests.integration.harness import DaemonTestCase, until
from tests.integration.processes import command_line, everybody
from tests.integration.repositories import HttpServer, git

COMMAND = "sha256sum < big | head -c 64"


class CacheTests(DaemonTestCase):
    """A repository with a megabyte that does not compress, behind smart HTTP."""

    async def setUp(self) -> None:
        await super().setUp()
        big = os.urandom(2**20)
        self.digest = sha256(big).hexdigest()
        self.repository.write("big", big)
        self.commit = self.repository.commit()
        self.server = HttpServer(self.folder)
        self.addCleanup(self.server.stop)
        self.url = f"{self.server.url}/repository/.git"

    async def begin_here(self, commit: str | None = None, command: str = COMMAND) -> str:
        return await self.client.evaluate(self.url, commit or self.commit, command)

    async def check(self) -> None:
        """Check that an evaluation works and sees the right bytes."""
        events = await self.client.follow(await self.begin_here())
        self.assertEqual(joined(events), [self.digest])

    @property
    def cached(self) -> Path:
        """Where the daemon keeps this test's repository."""
        wanted = self.url + "\n"
        (found,) = (
            file.parent
            for file in self.daemon.cache.glob("repositories/*/url")
            if file.read_text() == wanted
        )
        return found

    async def test_a_cancelled_fetch_leaves_the_cache_sound(self) -> None:
        self.server.hold()
        identifier = await self.begin_here()
        await until(self.server.half_sent.is_set, "a pack is half sent")
        await self.client.cancel(identifier)
        failure(await self.client.follow(identifier), "cancelled")
        await self.daemon.nothing_left()
        urls = [file.read_text() for file in self.daemon.cache.glob("repositories/*/url")]
        self.assertNotIn(self.url + "\n", urls)
        self.server.release()
        await self.check()
        git(self.cached, "fsck", "--strict")

    async def test_git_that_is_killed_is_not_blamed_on_the_repository(self) -> None:
        for words in (
            rb"\S*/git\0.*\0index-pack\0",
            rb"\S*/git-remote-http\0",
            rb"git\0--git-dir=.*\0fetch\0",
        ):
            self.server.hold()
            self.server.half_sent.clear()
            identifier = await self.begin_here()
            await until(self.server.half_sent.is_set, "a pack is half sent")
            cached, url = str(self.cached).encode(), self.url.encode()

            def find_victims(
                words: bytes = words, ours: tuple[bytes, ...] = (cached, url)
            ) -> list[int]:
                lines = {pid: command_line(pid) for pid in everybody()}
                return [
                    pid
                    for pid, line in lines.items()
                    if re.match(words, line) and any(part in line for part in ours)
                ]

            for pid in await until(find_victims, "git has come so far"):
                os.kill(pid, signal.SIGKILL)
            self.server.release()
            error = failure(await self.client.follow(identifier), "lost")
            self.assertIn("git was killed", error["message"])
            self.assertEqual((await self.client.get("/health/ready")).code, 200)
        await self.check()
