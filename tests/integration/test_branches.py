"""Branches that the daemon resolves, by a real git over each kind of server."""

from __future__ import annotations

from tawebeval.core.form import Repository
from tawebeval.errors import EvaluationFailure
from tawebeval.linux.filetree import remove_tree
from tests.integration.bare_repositories import BareRepositoryCase
from tests.integration.repositories import GitDaemon, HttpServer, git


class BranchTests(BareRepositoryCase):
    """A repository with two branches, one of which ends in the name of the other."""

    def setUp(self) -> None:
        self.make()
        self.source.write("file", "one")
        self.source.commit()
        self.source.branch("a/main")
        self.source.write("file", "other")
        self.source.commit()
        git(self.source.folder, "checkout", "--quiet", "main")

    async def resolve(self, url: str, branch: str = "main") -> str:
        return await self.servers.resolve_branch(Repository(url, branch))

    def serve(self, *, login: str | None = None, v2: bool = True) -> HttpServer:
        server = HttpServer(self.folder, login=login, v2=v2)
        self.addCleanup(server.stop)
        return server

    async def test_branch_is_its_newest_commit_on_each_server(self) -> None:
        daemon = GitDaemon(self.folder)
        self.addCleanup(daemon.stop)
        servers = self.serve(), self.serve(v2=False)
        web = (f"{server.url}/source/.git" for server in servers)
        for url in (self.source.url, str(self.source.folder), f"{daemon.url}/source", *web):
            self.source.write("file", url)
            commit = self.source.commit()
            found = await self.resolve(url)
            self.assertEqual(found, commit, url)
            fetched = await self.bare.fetch_commit(Repository(url), found)
            self.assertEqual(fetched.oid, commit)
            remove_tree(self.path)  # a repository has one URL

    async def test_missing_branch_is_refused_by_its_name(self) -> None:
        git(self.source.folder, "tag", "v1")
        git(self.folder, "init", "--quiet", "--bare", "empty.git")
        for url, branch in (
            (self.source.url, "missing"),
            (self.source.url, "v1"),
            (f"file://{self.folder}/empty.git", "main"),
        ):
            with self.assertRaises(EvaluationFailure) as caught:
                await self.resolve(url, branch)
            self.assertIn(f"no branch {branch!r}", caught.exception.message)
