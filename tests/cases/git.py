"""A cache of repositories over a scripted git."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.evaluations import Checkout, Commit
from tawebeval.core.form import Repository
from tawebeval.core.hosts import HostPolicy
from tawebeval.deferreds import OneShotEvent, wait_despite_cancellation
from tawebeval.errors import EvaluationFailure
from tawebeval.git.cache import RepositoryCache
from tawebeval.git.command import GitResult
from tawebeval.git.fetch_limits import FetchLimits, TreeLimits
from tawebeval.git.remotes import GitKeyring, Login, RemoteResolver
from tawebeval.pinned_agent import CheckedResolver
from tawebeval.sandbox.bubblewrap import READ_ONLY_ACCESS, SandboxAccess
from tests.fakes.resolver import FakeResolver
from tests.fakes.world import OID, TREE, InlineThreads

URL = "https://example.org/problem.git"
OTHER = "d" * 40
DONE = GitResult(0, "", "")
NOWHERE = Path("/nowhere")
"""The repository of commands that have none."""


def failed(stderr: str, status: int = 128, *, timed_out: bool = False) -> GitResult:
    """Return the result of a command that failed."""
    return GitResult(status, "", stderr, timed_out)


@attrs.frozen
class Command:
    """A command given to `FakeGit`; `follows`: it runs in the sandbox of the one before."""

    repository: Path
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    follows: bool
    timeout: float | None = None
    max_file_size: int | None = None
    login: Login | None = None
    source: str | None = None
    reach: SandboxAccess = READ_ONLY_ACCESS

    @property
    def name(self) -> str:
        return next(word for word in self.arguments if word[0] != "-" and "." not in word)


class FakeGit:
    """A git that records commands, and answers each with the result of `script`."""

    def __init__(self, script: Callable[[Command], GitResult | Awaitable[GitResult]]) -> None:
        self.script = script
        self.commands: list[Command] = []

    async def run_command(
        self,
        repository: Path | None,
        *arguments: str,
        next_commands: Iterable[Sequence[str]] = (),
        environment: Mapping[str, str] | None = None,
        on_stdout: Callable[[bytes], object] | None = None,
        **settings: Any,
    ) -> GitResult:
        """Return the result of the last command; `on_stdout` gets the stdout of all."""
        printed: list[str] = []
        for words in (arguments, *next_commands):
            command = Command(
                repository or NOWHERE,
                tuple(words),
                environment or {},
                follows=bool(printed),
                **settings,
            )
            self.commands.append(command)
            answer = self.script(command)
            result = answer if isinstance(answer, GitResult) else await answer
            printed.append(result.stdout)
            if result.status:
                break
        stdout = "\0".join(printed)
        if on_stdout is not None:
            on_stdout(stdout.encode())
        return attrs.evolve(result, stdout=stdout)


class Running:
    """A git command that runs until the test ends it; `killed` counts the kills."""

    def __init__(self) -> None:
        self.killed = 0
        self._latch: OneShotEvent[GitResult] = OneShotEvent()

    def kill(self) -> None:
        """Count; the process ends when the test calls `end`."""
        self.killed += 1

    def end(self, result: GitResult = DONE) -> None:
        self._latch.set_value(result)

    async def result(self) -> GitResult:
        """Return the result, as `GitRunner.run_command` does."""
        return await wait_despite_cancellation(self._latch, self.kill)


class CacheTestCase(SynchronousTestCase):
    """A cache in a directory of its own, over a git that the test scripts.

    `fetches`: results of `git fetch`, in order, or `Running`; after `gained` fetches the repository
    has the commits `OID` and `OTHER`. `broken`: results of other commands, by name. `trees`: the
    trees of commits that do not have `TREE`. `grow` and `plant` write what a fetch adds to the
    repository, and a check-out to the tree.
    """

    capacity = 10**9
    size = 10**9
    tree_bytes = 1000
    most = 0  # submodules
    files = 3

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.root.mkdir()
        self.git = FakeGit(self.script)
        self.present: set[tuple[str, str]] = set()  # repository, OID
        self.fetches: list[GitResult | Running] = []
        self.fetched = 0
        self.gained = 1
        self.trees: dict[str, str] = {}
        self.plant: Callable[[Path], object] = lambda tree: None
        self.grow: Callable[[Path], object] = lambda repository: None
        self.broken: dict[str, GitResult] = {}
        self.clock = Clock()
        self.resolver = FakeResolver()
        self.keyring = GitKeyring((), "", b"key")
        self.checkouts: list[Checkout] = []
        self.cache = self.make()

    def make(self, threads: Any = None) -> RepositoryCache:
        return RepositoryCache(
            self.root,
            self.git,
            threads or InlineThreads(),
            RemoteResolver(CheckedResolver(HostPolicy(), self.resolver, self.clock), (self.root,)),
            FetchLimits(
                self.clock, 60, self.size, TreeLimits(self.files, self.tree_bytes, self.most)
            ),
            self.keyring,
            None,
            self.capacity,
        )

    def restart(self, threads: Any = None) -> None:
        """Let another daemon take the cache over."""
        self.cache = self.make(threads)
        self.cache.load_from_disk()

    def script(self, command: Command) -> GitResult | Awaitable[GitResult]:
        if command.name in self.broken:
            return self.broken[command.name]
        if command.name == "log":
            oid = command.arguments[-2]
            if (command.repository.name, oid) not in self.present:
                return failed("fatal: bad object")
            return GitResult(0, f"{oid} {self.trees.get(oid, TREE)}\n", "")
        if command.name == "read-tree":
            self.plant(Path(command.arguments[0].partition("=")[2]))
        elif command.name == "fetch":
            return self.fetch(command, self.fetches.pop(0) if self.fetches else DONE)
        return DONE

    async def fetch(self, command: Command, answer: GitResult | Running) -> GitResult:
        """Answer a fetch, which brings both commits once enough of them have succeeded."""
        self.fetched += 1
        count = self.fetched
        result = await answer.result() if isinstance(answer, Running) else answer
        if result.status == 0 and count >= self.gained:
            self.present |= {(command.repository.name, oid) for oid in (OID, OTHER)}
            self.grow(command.repository)
        return result

    def check_out(
        self,
        url: str = URL,
        oid: str = OID,
        branch: str | None = None,
        depth: int | None = None,
        caller: str = "",
    ) -> Deferred[Commit]:
        """Request a checkout, which is in use until the test releases it."""

        def use(checkout: Checkout) -> Commit:
            self.checkouts.append(checkout)
            return checkout.commit

        repository = Repository(url, branch, depth)
        requested = Deferred.fromCoroutine(self.cache.check_out_commit(repository, oid, caller))
        return requested.addCallback(use)

    def get(self, *where: str, **settings: Any) -> Commit:
        """Return a commit that is checked out at once."""
        return self.successResultOf(self.check_out(*where, **settings))

    def error(self, requested: Deferred[Commit]) -> EvaluationFailure:
        return self.failureResultOf(requested, EvaluationFailure).value

    def refuse(self, *where: str, **settings: Any) -> EvaluationFailure:
        """Return the error of a request that fails at once."""
        return self.error(self.check_out(*where, **settings))

    def release(self) -> None:
        """Let no checkout be in use any more."""
        while self.checkouts:
            self.checkouts.pop().release()

    def lose_trees(self) -> None:
        """Remove all checkouts, so that a request for one runs git."""
        self.release()
        for checkout in self.root.glob("*.tree"):
            checkout.rename(self.mktemp())

    def names(self) -> list[str]:
        return [command.name for command in self.git.commands]

    def fetch_commands(self) -> list[Command]:
        return [command for command in self.git.commands if command.name == "fetch"]

    def path(self) -> Path:
        (path,) = self.root.glob("*.git")
        return path
