"""`git.remotes`: names are looked up once, and only the address found is used."""

from __future__ import annotations

from pathlib import Path
from socket import EAI_AGAIN, EAI_NONAME, gaierror

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.hosts import HostPolicy, Route
from tawebeval.errors import EvaluationError
from tawebeval.git.credentials import Credential
from tawebeval.git.remotes import Remotes
from tests.fake_resolver import FakeResolver


class RemotesTests(SynchronousTestCase):
    """A resolver that the test scripts."""

    def setUp(self) -> None:
        self.clock = Clock()

    def ask(self, resolver: FakeResolver, url: str = "https://h/x") -> Deferred[Route]:
        """Ask for the route to a URL."""
        asked = Deferred.fromCoroutine(Remotes(HostPolicy(), resolver, self.clock).find_route(url))
        return asked.addCallback(lambda found: found[0])

    def test_pinned(self) -> None:
        """The first of the addresses is the one; a later, other answer is not asked for."""
        resolver = FakeResolver(["8.8.8.8", "2606:4700::1"], ["127.0.0.1"])
        found = self.successResultOf(self.ask(resolver))
        self.assertEqual(found.environment["GIT_CONFIG_VALUE_0"], "h:443:8.8.8.8")
        self.assertEqual(resolver.asked, ["h"])

    def test_refused(self) -> None:
        """One bad address among good ones is enough."""
        for bad in ("127.0.0.1", "169.254.169.254", "::1", "fe80::1%eth0"):
            asked = self.ask(FakeResolver(["8.8.8.8", bad]))
            error = self.failureResultOf(asked, EvaluationError).value
            self.assertEqual(error.reason, "repository")
            self.assertIn("private_networks", error.message)

    def test_not_looked_up(self) -> None:
        """Addresses and paths need no resolver; what is no host is refused."""
        resolver = FakeResolver()
        for url in ("https://8.8.8.8/x", "/srv/x", "file:///srv/x"):
            found = self.successResultOf(self.ask(resolver, url))
            if "srv" in url:
                expected = Route(url, source="/srv/x", readable=("/srv/x", "/srv/x.git"))
            else:
                expected = Route(url)
            self.assertEqual(found, expected)
        for url in ("http://0x7f.1/", "http://127.0.0.1/"):
            self.failureResultOf(self.ask(resolver, url), EvaluationError)
        self.assertEqual(resolver.asked, [])

    def test_key(self) -> None:
        """A key goes along with the route: its options for ssh, and the files to read."""
        key = Credential("h", 0, "git", (), b"KEY", None, "/k/id", "/k/hosts")
        remotes = Remotes(HostPolicy(), FakeResolver(["8.8.8.8"]), self.clock)
        asked = Deferred.fromCoroutine(remotes.find_route("u@h:x", key))
        found, login = self.successResultOf(asked)
        self.assertIsNone(login)
        self.assertIn("-i/k/id", found.environment["GIT_SSH_COMMAND"])
        self.assertEqual(found.readable, ("/k/id", "/k/hosts"))

    def test_source(self) -> None:
        """Of this machine everything is served but the daemon's own, and what has it in it."""
        folder = Path(self.mktemp()).resolve()
        own = folder / "cache"
        own.mkdir(parents=True)
        (folder / "link").symlink_to(own)
        (folder / "x.git").symlink_to(own)
        remotes = Remotes(HostPolicy(), FakeResolver(), self.clock, (own,))
        for path in (f"{folder}/other", f"{folder}/cached", "/srv/x", f"{own}/../y"):
            remotes.check_source(path)
        for path in (
            *(f"{own}", f"{own}/x.git", f"{folder}", "/", f"{folder}/y/../cache/x"),
            *(
                f"{folder}/link/x",
                f"{folder}/x",
                "/proc/self/cwd",
                "/dev/fd/3",
                "/proc/self/root/x",
            ),
        ):
            error = self.assertRaises(EvaluationError, remotes.check_source, path)
            self.assertEqual(error.reason, "repository")

    def test_sources_that_cannot_be_looked_at(self) -> None:
        """With a path on which the kernel fails git's sandbox would fail, as if it were broken."""
        loop = Path(self.mktemp()).absolute()
        loop.symlink_to(loop)
        remotes = Remotes(HostPolicy(), FakeResolver(), self.clock)
        for path in (f"/srv/{'x' * 300}", f"{loop}/x"):
            error = self.assertRaises(EvaluationError, remotes.check_source, path)
            self.assertEqual(error.reason, "repository")
            self.assertIn(f"{path} cannot be read: ", error.message)

    def test_unknown(self) -> None:
        """A name that does not exist is the repository's fault."""
        for answer in ([], gaierror(EAI_NONAME, "Name or service not known")):
            error = self.failureResultOf(self.ask(FakeResolver(answer)), EvaluationError).value
            self.assertEqual(error.reason, "repository")
            self.assertIn("the host h does not exist, or has no address", error.message)

    def test_resolver_fails(self) -> None:
        """Name servers that do not answer are this machine's, or at least not the repository's."""
        resolver = FakeResolver(gaierror(EAI_AGAIN, "Temporary failure in name resolution"))
        error = self.failureResultOf(self.ask(resolver), EvaluationError).value
        self.assertEqual((error.reason, error.is_alarming), ("lost", False))
        self.assertIn("could not be looked up: Temporary failure", error.message)

    def test_silent(self) -> None:
        """A resolver that does not answer is not waited for without end."""
        resolver = FakeResolver()
        resolver.silent = True
        asked = self.ask(resolver)
        self.clock.advance(29)
        self.assertNoResult(asked)
        self.clock.advance(1)
        error = self.failureResultOf(asked, EvaluationError).value
        self.assertEqual((error.reason, error.is_alarming), ("lost", False))
        self.assertIn("30 seconds", error.message)
        self.assertEqual(self.clock.getDelayedCalls(), [])
