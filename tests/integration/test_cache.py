"""The cache of repositories: asked once, shared, sound after any interruption, and private."""

from __future__ import annotations

import os
import re
import signal
import socket
from hashlib import sha256
from pathlib import Path

from twisted.internet.defer import Deferred, gatherResults

from tests.integration.client import failure, joined, text
from tests.integration.harness import DaemonTestCase, until
from tests.integration.processes import command_line, everybody
from tests.integration.repositories import GitRepository, HttpServer, git
from tests.integration.unprivileged import give

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
        """Begin an evaluation with a commit that the server has."""
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

    async def test_a_commit_is_never_fetched_again(self) -> None:
        """With its server gone, a commit that was fetched is still judged with."""
        await self.check()
        self.server.stop()
        await self.check()

    async def test_concurrent_evaluations_share_one_fetch(self) -> None:
        """Many that want one commit at once cause one fetch, and each gets its own tree."""
        self.server.hold()
        identifiers = [await self.begin_here(command="cat README") for _ in range(4)]
        await until(self.server.half_sent.is_set, "a pack is half sent")
        self.server.release()
        streams = await gatherResults(
            [Deferred.fromCoroutine(self.client.follow(one)) for one in identifiers]
        )
        self.assertEqual([text(events) for events in streams], ["an evaluator\n"] * 4)
        self.assertEqual(self.server.fetches, 1)

    async def test_cancelling_one_leaves_the_shared_fetch_to_the_others(self) -> None:
        """Who began the fetch may go; who waits with it still gets what it brings."""
        self.server.hold()
        first, second = await self.begin_here(), await self.begin_here()
        await until(self.server.half_sent.is_set, "a pack is half sent")
        await self.client.cancel(first)
        failure(await self.client.follow(first), "cancelled")
        self.server.release()
        self.assertEqual(joined(await self.client.follow(second)), [self.digest])
        self.assertEqual(self.server.fetches, 1)

    async def test_a_cancelled_fetch_leaves_the_cache_sound(self) -> None:
        """Cancelled with half a pack on the disk: git is gone, and the next one works."""
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

    async def test_a_daemon_killed_in_mid_fetch_finds_a_sound_cache(self) -> None:
        """Killed with half a pack on the disk, and started again: the next one works."""
        self.server.hold()
        await self.begin_here()
        await until(self.server.half_sent.is_set, "a pack is half sent")
        await self.daemon.kill()
        self.server.release()
        self.daemon.start()
        await self.daemon.ready()
        self.assertEqual(list(self.cached.glob("objects/pack/*tmp*")), [])
        await self.check()
        git(self.cached, "fsck", "--strict")

    async def test_a_repository_of_many_files_is_packed(self) -> None:
        """The daemon tidies up what many fetches leave, here refs, soon after the last of them."""
        await self.check()
        refs = self.cached / "refs" / "origin"
        refs.mkdir()
        give(refs)
        for number in range(100):
            (refs / str(number)).write_text(f"{self.commit}\n")
            give(refs / str(number))
        self.repository.write("other", "other")
        self.commit = self.repository.commit()
        await self.check()
        await until(lambda: not list(refs.glob("*")), "the refs are packed")
        packed = self.cached / "packed-refs"
        await until(lambda: len(list(self.cached.glob("objects/pack/*.pack"))) == 1, "one pack")
        self.assertEqual(len(packed.read_text().split("refs/origin/")) - 1, 100)
        await self.check()
        git(self.cached, "fsck", "--connectivity-only")

    async def test_git_that_is_killed_is_not_blamed_on_the_repository(self) -> None:
        """The kernel kills what takes too much memory: `lost`, and the next one works."""
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

    async def test_a_failed_fetch_is_tried_again_by_the_next(self) -> None:
        """A server that comes back is asked again: failures are not remembered."""
        hidden = self.repository.folder.rename(self.folder / "hidden")
        failure(await self.client.follow(await self.begin_here()), "repository")
        hidden.rename(self.repository.folder)
        await self.check()

    async def test_a_server_that_says_nothing_does_not_outlive_a_cancel(self) -> None:
        """A connection that hangs from its beginning is ended with the evaluation."""
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            url = f"git://127.0.0.1:{silent.getsockname()[1]}/repository"
            identifier = await self.client.evaluate(url, self.commit, "true")
            connection, _ = silent.accept()
            with connection:
                status = await self.client.status(identifier)
                self.assertEqual(status["state"], "fetching")
                await self.client.cancel(identifier)
        failure(await self.client.follow(identifier), "cancelled")

    async def test_objects_are_not_reached_through_another_url(self) -> None:
        """A commit of one repository is none of another one's, also when both are cached."""
        await self.check()
        other = GitRepository(self.folder / "other")
        other.write("README", "nothing to see\n")
        known = other.commit()
        for commit, reason in ((known, None), (self.commit, "commit")):
            identifier = await self.client.evaluate(f"{self.server.url}/other/.git", commit, "true")
            events = await self.client.follow(identifier)
            if reason is None:
                self.assertEqual(events, [])
            else:
                failure(events, reason)
