"""Git servers of each kind, asked by a real git: branches, passwords, and what else they answer."""

from __future__ import annotations

from twisted.internet import reactor
from twisted.internet.ssl import PrivateCertificate

from tawebeval.core.form import Repository
from tawebeval.core.hosts import HostPolicy
from tawebeval.errors import EvaluationFailure
from tawebeval.git.remotes import Credential
from tawebeval.linux.filetree import remove_tree
from tawebeval.pinned_agent import CheckedResolver
from tests.cases.certificates import make_certificate
from tests.fakes.resolver import FakeResolver
from tests.fakes.world import OID
from tests.integration.bare_repositories import BareRepositoryCase
from tests.integration.ports import free_port
from tests.integration.receivers import Receiver
from tests.integration.repositories import GitDaemon, HttpServer, ScriptedServer, git, stop_after

PRIVATE = "does not exist, or needs credentials"


class ServerTests(BareRepositoryCase):
    """One repository, and servers that do not have it where it is sought."""

    def setUp(self) -> None:
        self.make()
        self.source.write("file", "content")
        self.source.commit()

    async def explain(self, url: str) -> str:
        with self.assertRaises(EvaluationFailure) as caught:
            await self.bare.fetch_commit(Repository(url), OID)
        return caught.exception.message

    def serve(self, *answers: tuple[str, int, str], **settings: bool) -> str:
        return stop_after(self, ScriptedServer(self.folder, *answers, **settings)).url

    async def test_errors_of_git_about_each_kind_of_server_are_explained(self) -> None:
        git(self.folder, "init", "--quiet", "--bare", "--object-format=sha256", "sha256.git")
        git(self.source.folder, "update-server-info")
        web = self.serve(
            ("/moved", 301, "/source/.git"),
            ("/login", 302, "/source/.git"),
            ("/page", 200, "<html>\nSign in</html>"),
            ("/private", 401, ""),
            ("/forbidden", 403, ""),
            ("/busy", 503, ""),
        )
        daemon = stop_after(self, GitDaemon(self.folder))
        pem = make_certificate(self.folder, "127.0.0.1").read_bytes()
        secure = Receiver(200, certificate=PrivateCertificate.loadPEM(pem))
        self.addCleanup(secure.stop)
        closed = free_port()
        for url, words in (
            (f"{web}/moved", "has moved"),
            (f"{web}/login", "such as a login page"),
            (f"{web}/page", "leads to a web page"),
            (f"{self.serve(dumb=True)}/source/.git", "a server of plain files"),
            (f"{web}/private", PRIVATE),
            (f"{web}/forbidden", "refuses access (HTTP status 403)"),
            (f"{web}/busy", "cannot answer now (HTTP status 503)"),
            (f"https://127.0.0.1:{secure.port}/x", "certificate verif"),
            (f"{daemon.url}/missing", "repository not exported"),
            (f"file://{self.folder}/missing", "does not appear to be a git repository"),
            (f"{daemon.url}/sha256.git", "server sha256"),
            (f"http://127.0.0.1:{closed}/x", "cannot connect to the git server"),
            (f"git://127.0.0.1:{closed}/x", "server (Connection refused)"),
        ):
            self.assertIn(words, await self.explain(url), url)

    async def test_private_repository_is_fetched_with_the_password_and_stores_none(self) -> None:
        secret = "a word/with:odd%signs"
        server = stop_after(self, HttpServer(self.folder, login=f"judge:{secret}"))
        port = int(server.url.rpartition(":")[2])
        repository = Repository(f"{server.url}/source/.git")
        commit = git(self.source.folder, "rev-parse", "HEAD")
        for password in ("another", secret):
            credential = Credential("127.0.0.1", port, "judge", (), password)
            fetching = self.bare.fetch_commit(repository, commit, credential)
            if password == secret:
                self.assertEqual((await fetching).oid, commit)
            else:
                with self.assertRaises(EvaluationFailure) as caught:
                    await fetching
                self.assertIn("refuses access", caught.exception.message)
        for file in self.path.rglob("*"):
            self.assertFalse(file.is_file() and secret.encode() in file.read_bytes(), file)


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

    async def test_branch_is_its_newest_commit_on_each_server(self) -> None:
        daemon = stop_after(self, GitDaemon(self.folder))
        servers = [HttpServer(self.folder, v2=v2) for v2 in (True, False)]
        for server in servers:
            self.addCleanup(server.stop)
        web = (f"{server.url}/source/.git" for server in servers)
        for url in (self.source.url, str(self.source.folder), f"{daemon.url}/source", *web):
            self.source.write("file", url)
            commit = self.source.commit()
            found = await self.resolve(url)
            self.assertEqual(found, commit, url)
            fetched = await self.bare.fetch_commit(Repository(url), found)
            self.assertEqual(fetched.oid, commit)
            remove_tree(self.path)  # a repository has one URL


class AddressTests(BareRepositoryCase):
    async def test_http_fetch_uses_the_address_that_accepts_connections(self) -> None:
        policy = HostPolicy(allowed_private_networks=("127.0.0.0/8", "::1/128"))
        self.make(CheckedResolver(policy, FakeResolver(["::1", "127.0.0.1"]), reactor))
        self.source.write("file", "content")
        commit = self.source.commit()
        server = stop_after(self, ScriptedServer(self.folder))
        url = server.url.replace("127.0.0.1", "pinned.invalid") + "/source/.git"
        fetched = await self.bare.fetch_commit(Repository(url), commit)
        self.assertEqual(fetched.oid, commit)
