"""`git.remotes`: names are looked up once, and only the addresses found are used."""

from __future__ import annotations

from pathlib import Path
from socket import EAI_AGAIN, EAI_NONAME, gaierror

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.hosts import HostPolicy, ResolvedGitRemote
from tawebeval.errors import EvaluationFailure
from tawebeval.git.remotes import Credential, RemoteResolver
from tawebeval.pinned_agent import CheckedResolver
from tests.fakes.resolver import FakeResolver


class RouteTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()

    def find(self, resolver: FakeResolver, url: str = "https://h/x") -> Deferred[ResolvedGitRemote]:
        remotes = RemoteResolver(CheckedResolver(HostPolicy(), resolver, self.clock))
        return Deferred.fromCoroutine(remotes.resolve_remote(url)).addCallback(
            lambda found: found[0]
        )

    def refuse(self, resolver: FakeResolver, url: str = "https://h/x") -> EvaluationFailure:
        return self.failureResultOf(self.find(resolver, url), EvaluationFailure).value

    def test_addresses_are_pinned_later(self) -> None:
        resolver = FakeResolver(["8.8.8.8", "2606:4700::1"], ["127.0.0.1"])
        route = self.successResultOf(self.find(resolver))
        self.assertEqual(route.environment["GIT_CONFIG_VALUE_0"], "h:443:8.8.8.8,[2606:4700::1]")
        self.assertEqual(resolver.asked, ["h"])

    def test_one_forbidden_address_among_others_refuses_host(self) -> None:
        for forbidden in ("127.0.0.1", "169.254.169.254", "::1", "fe80::1%eth0"):
            error = self.refuse(FakeResolver(["8.8.8.8", forbidden]))
            self.assertEqual(error.reason, "repository")
            self.assertIn("private_networks", error.message)

    def test_addresses_and_paths_need_no_look_up(self) -> None:
        resolver = FakeResolver()
        local = {"local_path": "/srv/x", "readable_paths": ("/srv/x", "/srv/x.git")}
        for url, expected in (
            ("https://8.8.8.8/x", {}),
            ("/srv/x", local),
            ("file:///srv/x", local),
        ):
            self.assertEqual(
                self.successResultOf(self.find(resolver, url)), ResolvedGitRemote(url, **expected)
            )
        for url in ("http://0x7f.1/", "http://127.0.0.1/"):
            self.refuse(resolver, url)
        self.assertEqual(resolver.asked, [])

    def test_route_has_options_of_ssh_for_key(self) -> None:
        key = Credential("h", 0, "git", (), b"KEY", None, "/k/id", "/k/hosts")
        remotes = RemoteResolver(
            CheckedResolver(HostPolicy(), FakeResolver(["8.8.8.8"]), self.clock)
        )
        found = Deferred.fromCoroutine(remotes.resolve_remote("u@h:x", key))
        route, login = self.successResultOf(found)
        self.assertIsNone(login)
        self.assertIn("-i/k/id", route.environment["GIT_SSH_COMMAND"])
        self.assertEqual(route.readable_paths, ("/k/id", "/k/hosts"))

    def test_missing_name_is_repositorys_fault(self) -> None:
        silent = gaierror(EAI_AGAIN, "Temporary failure in name resolution")
        for answer, reason, words in (
            ([], "repository", "the host h does not exist or has no address; check its spelling"),
            (gaierror(EAI_NONAME, "Name or service not known"), "repository", "does not exist"),
            (silent, "lost", "the DNS look-up of the host h failed: Temporary failure"),
        ):
            error = self.refuse(FakeResolver(answer))
            self.assertEqual(error.reason, reason)
            self.assertIn(words, error.message)
        self.assertFalse(error.is_daemon_fault)

    def test_look_up_ends_after_30_seconds(self) -> None:
        resolver = FakeResolver()
        resolver.silent = True
        found = self.find(resolver)
        self.clock.advance(29)
        self.assertNoResult(found)
        self.clock.advance(1)
        error = self.failureResultOf(found, EvaluationFailure).value
        self.assertEqual((error.reason, error.is_daemon_fault), ("lost", False))
        self.assertIn("30 seconds", error.message)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class SourceTests(SynchronousTestCase):
    def check_refused(self, remotes: RemoteResolver, path: str, words: str) -> None:
        error = self.assertRaises(EvaluationFailure, remotes.check_local_repository, path)
        self.assertEqual(error.reason, "repository")
        self.assertIn(f"{path} {words}", error.message)

    def test_directories_of_the_daemon_are_refused(self) -> None:
        folder = Path(self.mktemp()).resolve()
        own = folder / "cache"
        own.mkdir(parents=True)
        (folder / "link").symlink_to(own)
        (folder / "x.git").symlink_to(own)
        remotes = RemoteResolver(CheckedResolver(HostPolicy(), FakeResolver(), Clock()), (own,))
        for path in (f"{folder}/other", f"{folder}/cached", "/srv/x", f"{own}/../y"):
            remotes.check_local_repository(path)
        for path in (
            *(f"{own}", f"{own}/x.git", f"{folder}/y/../cache/x"),
            *(f"{folder}/link/x", f"{folder}/x"),
            *("/proc/self/cwd", "/dev/fd/3", "/proc/self/root/x", f"{folder}", "/"),
        ):
            self.check_refused(remotes, path, "is in, or contains, a directory of the daemon")

    def test_path_that_the_kernel_refuses_is_refused(self) -> None:
        loop = Path(self.mktemp()).absolute()
        loop.symlink_to(loop)
        remotes = RemoteResolver(CheckedResolver(HostPolicy(), FakeResolver(), Clock()))
        for path in (f"/srv/{'x' * 300}", f"{loop}/x"):
            error = self.assertRaises(EvaluationFailure, remotes.check_local_repository, path)
            self.assertIn(f"cannot read the repository {path}: ", error.message)
