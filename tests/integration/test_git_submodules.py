"""Commits with submodules, from real servers: what evaluators find."""

from __future__ import annotations

from tests.integration.client import Event, text
from tests.integration.harness import DaemonTestCase
from tests.integration.repositories import GitRepository, HttpServer, git


class SubmoduleTests(DaemonTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.server = HttpServer(self.folder)
        self.addCleanup(self.server.stop)

    def make(self, name: str) -> GitRepository:
        """Return a new repository with a file `code`, which has the name, and a link."""
        made = GitRepository(self.folder / name)
        made.write("code", f"code of {name}\n")
        made.link("outside", "/etc/passwd")
        made.commit()
        return made

    def add(self, parent: GitRepository, name: str, url: str) -> str:
        """Add the newest commit of a repository as a submodule; return the parent's new commit."""
        commit = git(self.folder / name, "rev-parse", "HEAD")
        for key, value in (("path", f"lib/{name}"), ("url", url)):
            setting = f"submodule.{name}.{key}"
            git(parent.folder, "config", "--file", ".gitmodules", setting, value)
        git(parent.folder, "update-index", "--add", "--cacheinfo", f"160000,{commit},lib/{name}")
        git(parent.folder, "add", ".gitmodules")
        git(parent.folder, "commit", "--quiet", "--message=A submodule")
        return git(parent.folder, "rev-parse", "HEAD")

    async def look(self, commit: str, url: str | None = None) -> list[Event]:
        command = "find . -name code | sort | xargs cat"
        identifier = await self.client.evaluate(
            url or f"{self.server.url}/problem/.git", commit, command
        )
        return await self.client.follow(identifier)

    async def test_evaluator_finds_nested_submodules_after_one_fetch(self) -> None:
        problem, one = self.make("problem"), self.make("one")
        self.make("two")
        self.add(one, "two", "../../two/.git")
        commit = self.add(problem, "one", "../../one/.git")
        expected = "code of problem\ncode of one\ncode of two\n"
        self.assertEqual(text(await self.look(commit)), expected)
        fetches = self.server.fetches
        await self.daemon.stop()
        self.daemon.start()
        await self.daemon.ready()
        self.assertEqual(text(await self.look(commit)), expected)
        self.assertEqual(self.server.fetches, fetches)

    async def test_local_repository_has_local_submodules(self) -> None:
        problem = self.make("problem")
        commit = self.add(problem, "one", self.make("one").url)
        events = await self.look(commit, problem.url)
        self.assertEqual(text(events), "code of problem\ncode of one\n")
