"""What is said about git servers that answer with something else, by a real git."""

from __future__ import annotations

from twisted.internet import reactor
from twisted.internet.ssl import PrivateCertificate

from tawebeval.core.form import Repository
from tawebeval.core.hosts import HostPolicy
from tawebeval.errors import EvaluationFailure
from tawebeval.pinned_agent import CheckedResolver
from tests.cases.certificates import make_certificate
from tests.fakes.resolver import FakeResolver
from tests.fakes.world import OID
from tests.integration.bare_repositories import BareRepositoryCase
from tests.integration.ports import free_port
from tests.integration.receivers import Receiver
from tests.integration.repositories import GitDaemon, ScriptedServer, git

PRIVATE = "does not exist, or needs credentials"


class ServerTests(BareRepositoryCase):
    """One repository, and servers that do not have it where it is sought."""

    def setUp(self) -> None:
        self.make()
        self.source.write("file", "content")
        self.source.commit()

    async def explain(self, url: str, branch: str | None = None) -> str:
        """Return the message about a failed fetch."""
        with self.assertRaises(EvaluationFailure) as caught:
            await self.bare.fetch_commit(Repository(url, branch), OID)
        return caught.exception.message

    def serve(self, *answers: tuple[str, int, str], **settings: bool) -> str:
        """Return the URL of a server."""
        server = ScriptedServer(self.folder, *answers, **settings)
        self.addCleanup(server.stop)
        return server.url

    async def test_redirect_names_the_new_url(self) -> None:
        for status in (301, 307):
            url = self.serve(
                ("/old", status, "/source/.git"),
                ("/login", status, "/users/sign_in?x="),
                ("/bad", status, "http://[::1"),
            )
            for path, words in (
                ("/old", f"has moved to {url}/source/.git; use this URL"),
                ("/login/", f"redirects to {url}/users/sign_in: the repository {PRIVATE}"),
                ("/bad", "has moved, and redirects are not followed"),
            ):
                self.assertIn(words, await self.explain(url + path), path)
            with self.assertRaises(EvaluationFailure) as caught:
                await self.servers.resolve_branch(Repository(f"{url}/old", "main"))
            self.assertIn("has moved to", caught.exception.message)

    async def test_web_page_is_no_missing_commit(self) -> None:
        page = "<html>Sign in</html>"
        url = self.serve(("/page", 200, page), ("/lines", 200, page.replace(">", ">\n")))
        for path in ("/page", "/lines", "/page/"):
            for branch in (None, "main"):
                message = await self.explain(url + path, branch)
                self.assertIn("leads to a web page", message)
                self.assertIn("git clone", message)

    async def test_server_of_plain_files_is_refused(self) -> None:
        git(self.source.folder, "update-server-info")
        plain = self.serve(dumb=True)
        self.assertIn("a server of plain files", await self.explain(f"{plain}/source/.git"))

    async def test_statuses_are_told(self) -> None:
        for status, words in (
            (401, PRIVATE),
            (403, "refuses access (HTTP status 403)"),
            (404, PRIVATE),
            (429, "cannot answer now (HTTP status 429)"),
            (503, "cannot answer now (HTTP status 503)"),
        ):
            url = self.serve(("/x", status, ""))
            self.assertIn(words, await self.explain(f"{url}/x.git"))

    async def test_server_without_the_repository(self) -> None:
        git(self.folder, "init", "--quiet", "--bare", "headless.git")
        (self.folder / "headless.git/HEAD").unlink()
        git(self.folder, "init", "--quiet", "--bare", "--object-format=sha256", "sha256.git")
        daemon = GitDaemon(self.folder)
        self.addCleanup(daemon.stop)
        refused = free_port()
        for url, words in (
            (f"{daemon.url}/missing", "no git repository at the path"),
            (f"file://{self.folder}/missing", "no git repository at the path"),
            (f"file://{self.folder}/headless.git", "no git repository at the path"),
            (f"{daemon.url}/sha256.git", "SHA-256"),
            (f"file://{self.folder}/sha256.git", "SHA-256"),
            (f"http://127.0.0.1:{refused}/x", "cannot connect to the git server"),
            (f"git://127.0.0.1:{refused}/x", "server (Connection refused)"),
        ):
            self.assertIn(words, await self.explain(url), url)

    async def test_tls_of_the_server(self) -> None:
        pem = make_certificate(self.folder, "127.0.0.1").read_bytes()
        secure = Receiver(200, certificate=PrivateCertificate.loadPEM(pem))
        plain = Receiver(200)
        for receiver, words in ((secure, "not trusted"), (plain, "does not speak TLS")):
            self.addCleanup(receiver.stop)
            self.assertIn(words, await self.explain(f"https://127.0.0.1:{receiver.port}/x"))


class AddressTests(BareRepositoryCase):
    async def test_http_takes_the_address_that_works(self) -> None:
        policy = HostPolicy(allowed_private_networks=("127.0.0.0/8", "::1/128"))
        self.make(CheckedResolver(policy, FakeResolver(["::1", "127.0.0.1"]), reactor))
        self.source.write("file", "content")
        commit = self.source.commit()
        server = ScriptedServer(self.folder)
        self.addCleanup(server.stop)
        url = server.url.replace("127.0.0.1", "pinned.invalid") + "/source/.git"
        fetched = await self.bare.fetch_commit(Repository(url), commit)
        self.assertEqual(fetched.oid, commit)
