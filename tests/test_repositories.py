"""`git.cache` with a fake git: by which ways commits are had, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.checkout import Checkout, Commit
from tawebeval.core.form import Repository
from tawebeval.core.hosts import HostPolicy
from tawebeval.deferreds import Latch, completed
from tawebeval.errors import EvaluationError
from tawebeval.git.cache import Repositories
from tawebeval.git.command import Outcome
from tawebeval.git.keyring import Keyring
from tawebeval.git.quota import FetchLimits
from tawebeval.git.remotes import Remotes
from tawebeval.git.trees import TreeLimits
from tawebeval.sandbox.commands import JUST_READ, Reach
from tests.fake_resolver import FakeResolver
from tests.fakes import OID, TREE, Command, FakeGit, InlineThreads

URL = "https://example.org/problem.git"
OTHER = "d" * 40
DONE = Outcome(0, "", "")
UNADVERTISED = Outcome(128, "", "error: Server does not allow request for unadvertised object cc")
EVERYTHING = f"--depth={2**31 - 1}"


def failed(stderr: str, status: int = 128, *, timed_out: bool = False) -> Outcome:
    """Return the outcome of a command that went wrong."""
    return Outcome(status, "", stderr, timed_out)


class Running:
    """A git command that runs until the test ends it; `killed` counts attempts on its life."""

    def __init__(self) -> None:
        self.killed = 0
        self._latch: Latch[Outcome] = Latch()

    def kill(self) -> None:
        """Take note; the process dies when the test says so."""
        self.killed += 1

    def end(self, outcome: Outcome = DONE) -> None:
        """Let the command end."""
        self._latch.set(outcome)

    async def outcome(self) -> Outcome:
        """Return how it ended, as `tawebeval.git.command.Git` does."""
        return await completed(self._latch, self.kill)


class RepositoriesTestCase(SynchronousTestCase):
    """A cache in a directory of its own, and a remote that the test scripts.

    `fetches` are the answers to `git fetch`, first one first, which may be `Running`; after
    `gained` of them the commit is in the repository.
    """

    capacity = 10**9
    size = 10**9
    policy = HostPolicy()

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.root.mkdir()
        self.git = FakeGit(self.script)
        self.here: set[tuple[str, str]] = set()  # repository, OID
        self.fetches: list[Outcome | Running] = []
        self.fetched = 0
        self.gained = 1
        self.trees: dict[str, str] = {}  # of commits that do not have `TREE`
        self.plant: Callable[[Path], object] = lambda tree: None
        self.grow: Callable[[Path], object] = lambda repository: None
        self.broken: dict[str, Outcome] = {}
        self.clock = Clock()
        self.resolver = FakeResolver()
        self.keyring = Keyring((), "", b"key")
        self.checkouts: list[Checkout] = []
        self.repositories = self.make()

    def make(self) -> Repositories:
        """Return what takes care of the cache."""
        return Repositories(
            self.root,
            self.git,
            InlineThreads(),
            Remotes(self.policy, self.resolver, self.clock, (self.root,)),
            FetchLimits(self.clock, 60, self.size, TreeLimits(3, 1000)),
            self.keyring,
            capacity=self.capacity,
        )

    def script(self, command: Command) -> Outcome | object:
        """Answer as git does."""
        name = next(a for a in command.arguments if not a.startswith("--work-tree"))
        if name in self.broken:
            return self.broken[name]
        if name == "log":
            oid = command.arguments[-2]
            if (command.repository.name, oid) not in self.here:
                return failed("fatal: bad object")
            return Outcome(0, f"{oid} {self.trees.get(oid, TREE)}\n", "")
        if name == "read-tree":
            self.plant(Path(command.arguments[0].partition("=")[2]))
        elif name == "fetch":
            answer = self.fetches.pop(0) if self.fetches else DONE
            return self.fetch(command, answer)
        return DONE

    async def fetch(self, command: Command, answer: Outcome | Running) -> Outcome:
        """Answer a fetch, which brings all commits when it is the right one."""
        self.fetched += 1
        count = self.fetched
        outcome = await answer.outcome() if isinstance(answer, Running) else answer
        if outcome.status == 0 and count >= self.gained:
            self.here |= {(command.repository.name, oid) for oid in (OID, OTHER)}
            self.grow(command.repository)
        return outcome

    def check_out(
        self,
        url: str = URL,
        oid: str = OID,
        branch: str | None = None,
        depth: int | None = None,
        caller: str = "",
    ) -> Deferred[Commit]:
        """Ask for a commit."""
        repository = Repository(url, branch, depth)
        asked = Deferred.fromCoroutine(self.repositories.check_out(repository, oid, caller))
        return asked.addCallback(self.received)

    def received(self, checkout: Checkout) -> Commit:
        """Note a checkout, which is in use until the test releases it; return its commit."""
        self.checkouts.append(checkout)
        return checkout.commit

    def release(self) -> None:
        """Let no checkout be in use any more."""
        while self.checkouts:
            self.checkouts.pop().release()

    def lose_trees(self) -> None:
        """Let all checkouts be gone: what wants one has to ask git."""
        self.release()
        for checkout in self.root.glob("*.tree"):
            checkout.rename(self.mktemp())

    def names(self) -> list[str]:
        """Return the git commands given so far, by their names."""
        return [
            next(a for a in command.arguments if not a.startswith("--work-tree"))
            for command in self.git.commands
        ]

    def ways(self) -> list[list[str]]:
        """Return the arguments of each fetch, without those that all have."""
        fetches = [c.arguments for c in self.git.commands if c.arguments[0] == "fetch"]
        for arguments in fetches:
            self.assertEqual(arguments[:2], ("fetch", "--quiet"))
            self.assertIn("--no-write-fetch-head", arguments)
            self.assertEqual(arguments[arguments.index("--end-of-options") + 1], URL)
        return [
            [a for a in arguments[7:] if a not in ("--end-of-options", URL)]
            for arguments in fetches
        ]

    def path(self) -> Path:
        """Return the one cached repository."""
        (path,) = self.root.glob("*.git")
        return path

    def error(self, asked: Deferred[Commit]) -> EvaluationError:
        """Return how asking failed."""
        return self.failureResultOf(asked, EvaluationError).value


class WaysTests(RepositoriesTestCase):
    """By which ways a commit is asked for."""

    by_oid = f"{OID}:refs/commits/1"
    all_refs = "refs/*:refs/origin/*"

    def test_by_its_oid(self) -> None:
        """The cheapest way comes first: just that commit; it is the only one where it works."""
        self.assertEqual(self.successResultOf(self.check_out()), Commit(OID, TREE))
        self.assertEqual(self.ways(), [["--depth=1", self.by_oid]])
        self.assertEqual(self.names(), ["fetch", "log", "ls-tree", "read-tree"])

    def test_depth(self) -> None:
        """As much history is fetched as the client wishes."""
        self.successResultOf(self.check_out(depth=5))
        self.assertEqual(self.ways(), [["--depth=5", self.by_oid]])

    def test_not_offered(self) -> None:
        """Where the server hands out advertised commits only, everything is fetched."""
        self.fetches = [UNADVERTISED]
        self.successResultOf(self.check_out())
        self.assertEqual(self.ways(), [["--depth=1", self.by_oid], ["--prune", self.all_refs]])

    def test_branch(self) -> None:
        """Before that, the branch, whole unless the client gives a depth."""
        branch = "refs/heads/main:refs/origin/heads/main"
        self.fetches = [UNADVERTISED]
        self.gained = 3
        self.successResultOf(self.check_out(branch="main"))
        self.assertEqual(
            self.ways(),
            [["--depth=1", self.by_oid], [branch], ["--prune", self.all_refs]],
        )

    def test_branch_with_depth(self) -> None:
        """With a depth the branch is fetched to it, and everything if that is too little."""
        branch = "refs/heads/main:refs/origin/heads/main"
        self.fetches = [UNADVERTISED]
        self.gained = 3
        self.successResultOf(self.check_out(branch="main", depth=3))
        self.assertEqual(
            self.ways(),
            [["--depth=3", self.by_oid], ["--depth=3", branch], ["--prune", self.all_refs]],
        )

    def test_branch_is_enough(self) -> None:
        """Everything is not fetched where the branch has the commit."""
        self.fetches = [UNADVERTISED]
        self.gained = 2
        self.successResultOf(self.check_out(branch="main"))
        self.assertEqual(len(self.ways()), 2)

    def test_other_reasons_to_go_on(self) -> None:
        """A missing branch and a server without shallow clones are no reason to give up."""
        for said in (
            "fatal: couldn't find remote ref cccc",
            "fatal: dumb http transport does not support shallow capabilities",
            "fatal: Server does not support shallow clients",
        ):
            self.setUp()
            self.fetches = [failed(said)]
            self.successResultOf(self.check_out())
            self.assertEqual(len(self.ways()), 2, said)

    def test_shallow(self) -> None:
        """What is shallow already is deepened where a fetch is meant to bring everything."""
        self.grow = lambda repository: (repository / "shallow").touch()
        self.successResultOf(self.check_out())
        self.here.clear()
        self.fetched = 0
        self.gained = 3
        self.fetches = [UNADVERTISED]
        self.successResultOf(self.check_out(oid=OTHER, branch="main"))
        self.assertEqual(
            self.ways()[1:],
            [
                ["--depth=1", f"{OTHER}:refs/commits/2"],
                [EVERYTHING, "refs/heads/main:refs/origin/heads/main"],
                [EVERYTHING, "--prune", self.all_refs],
            ],
        )

    def test_no_such_commit(self) -> None:
        """A server that would hand out anything, but has no such commit, is asked once."""
        for said in (
            f"fatal: remote error: upload-pack: not our ref {OID}",
            f"fatal: protocol error: want {OID} not valid",
            f"error: missing object referenced by '{OID}'",
        ):
            self.setUp()
            self.fetches = [failed(said)]
            error = self.error(self.check_out(branch="main"))
            self.assertEqual((error.reason, error.members), ("commit", {}), said)
            self.assertIn(OID, error.message)
            self.assertEqual(len(self.ways()), 1)

    def test_not_in_everything(self) -> None:
        """A commit that is in nothing that was fetched is none of that repository's."""
        self.gained = 99
        error = self.error(self.check_out(branch="main"))
        self.assertEqual(error.reason, "commit")
        self.assertEqual(len(self.ways()), 3)

    def test_tag(self) -> None:
        """The OID of a tag, for which git shows another commit, is not the commit's."""
        self.broken["log"] = Outcome(0, f"{OTHER} {TREE}\n", "")
        self.assertEqual(self.error(self.check_out()).reason, "commit")

    def test_cannot_be_fetched(self) -> None:
        """Any other failure ends it, with what git said."""
        self.fetches = [failed("fatal: could not resolve host: example.org")]
        error = self.error(self.check_out(branch="main"))
        self.assertEqual(error.reason, "repository")
        self.assertEqual(error.members, {"stderr": "fatal: could not resolve host: example.org"})
        self.assertEqual(len(self.ways()), 1)

    def test_local(self) -> None:
        """Only for a repository of this machine is upload-pack told to take others' ones."""
        self.successResultOf(self.check_out("/srv/x"))
        self.successResultOf(self.check_out())
        here, there = (c for c in self.git.commands if c.arguments[0] == "fetch")
        option = "--upload-pack=git -c safe.directory='*' upload-pack"
        self.assertLess(here.arguments.index(option), here.arguments.index("--end-of-options"))
        self.assertNotIn("safe.directory", str(there))
        self.assertEqual((here.source, there.source), ("/srv/x", None))

    def test_own(self) -> None:
        """The cache itself is no repository of this machine that somebody could ask for."""
        error = self.error(self.check_out(f"file://{self.root}/x.git"))
        self.assertIn("no place from which", error.message)
        self.assertNotIn("fetch", self.names())

    def test_reach(self) -> None:
        """What each command may do: write where it has to, and reach the network to fetch."""
        self.successResultOf(self.check_out())
        path = self.path()
        self.successResultOf(self.check_out("/srv/x"))
        self.successResultOf(self.check_out(oid=OTHER))
        fetching = Reach((path,), network=True)
        alone = [(self.names()[i], c.reach, c.follows) for i, c in enumerate(self.git.commands)]
        self.assertEqual(
            alone[:3],
            [("fetch", fetching, False), ("log", fetching, True), ("ls-tree", fetching, True)],
        )
        self.assertEqual(alone[-2:], [("log", JUST_READ, False), ("ls-tree", JUST_READ, True)])
        checked_out = self.git.commands[3]
        unfinished = f"{self.checkouts[0].path}.new1"
        self.assertEqual(
            checked_out.reach, Reach((Path(unfinished, "tree"), Path(unfinished, "index")))
        )
        fetch = next(c for c in self.git.commands if c.source)
        self.assertEqual(fetch.reach, Reach((fetch.repository,), ("/srv/x", "/srv/x.git")))


class DeadlineTests(RepositoriesTestCase):
    """The time that a fetch has, from the request to its end."""

    def test_silent_resolver(self) -> None:
        """A look-up ends before the fetch as a whole does, and is not the repository's fault."""
        self.resolver.silent = True
        asked = self.check_out()
        self.clock.advance(29)
        self.assertNoResult(asked)
        self.clock.advance(1)
        self.assertEqual(self.error(asked).reason, "lost")
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def check_over(self, asked: Deferred[Commit], running: Running) -> None:
        """Hold that git is killed now, and what is said when it has gone."""
        self.assertEqual(running.killed, 1)
        self.assertNoResult(asked)
        running.end(failed("", -1))
        error = self.error(asked)
        self.assertEqual(error.reason, "repository")
        self.assertIn("60 seconds", error.message)
        self.assertEqual(error.members, {"limit": "repositories.fetch_timeout", "value": 60})
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_all_attempts(self) -> None:
        """A second attempt has the time that the first has left."""
        first, second = Running(), Running()
        self.fetches = [first, second]
        asked = self.check_out(branch="main")
        self.clock.advance(40)
        first.end(UNADVERTISED)
        self.clock.advance(19)
        self.assertEqual(second.killed, 0)
        self.clock.advance(1)
        self.check_over(asked, second)

    def test_turn(self) -> None:
        """Who waits for another fetch of the repository loses the time of that."""
        running, another = Running(), Running()
        self.fetches = [running, another]
        self.gained = 99
        self.addCleanup(self.check_out().addErrback, lambda failure: None)
        self.clock.advance(20)
        asked = self.check_out(oid=OTHER)
        self.clock.advance(30)
        running.end(failed("fatal: no"))
        self.clock.advance(29)
        self.assertEqual(another.killed, 0)
        self.clock.advance(1)
        self.check_over(asked, another)

    def test_no_turn(self) -> None:
        """Who does not come to its turn is told so, and leaves the fetch under way alone."""
        running = Running()
        self.fetches = [running]
        first = self.check_out()
        self.clock.advance(10)
        second = self.check_out(oid=OTHER)
        self.clock.advance(50)
        self.assertNoResult(second)
        self.assertEqual(running.killed, 1)
        self.clock.advance(10)
        self.assertIn("60 seconds", self.error(second).message)
        running.end(failed("", -1))
        self.error(first)

    def test_check_out(self) -> None:
        """Checking out has its own time, and what it says is no word of git's."""
        self.broken["read-tree"] = failed("", -1, timed_out=True)
        error = self.error(self.check_out())
        self.assertIn("checked out within 60 seconds", error.message)
        self.assertEqual(error.members["limit"], "repositories.fetch_timeout")


class LimitTests(RepositoriesTestCase):
    """What is too large, and which hosts are not asked."""

    def test_tree(self) -> None:
        """A tree over a limit is not checked out; nor a cached one, under a limit set later."""
        self.broken["ls-tree"] = Outcome(0, "100644 blob cc 1001\tx\0", "")
        error = self.error(self.check_out())
        self.assertEqual(error.members, {"limit": "repositories.tree_bytes", "value": 1000})
        self.assertNotIn("read-tree", self.names())
        self.broken["ls-tree"] = Outcome(0, "100644 blob cc 1000\tx\0", "")
        self.assertEqual(self.successResultOf(self.check_out()), Commit(OID, TREE, 1, 1000))
        marker = self.path() / "commits" / OID
        marker.write_text(f"{TREE} 4 1000")
        self.assertEqual(self.error(self.check_out()).members["limit"], "repositories.tree_files")

    def test_host(self) -> None:
        """A host that is refused is not asked, and nothing is made for it where its name tells."""
        self.resolver.answers = [["127.0.0.1"]]
        self.assertIn("private_networks", self.error(self.check_out()).message)
        self.assertNotIn("fetch", self.names())
        self.git.commands.clear()
        self.assertIn("private_networks", self.error(self.check_out("http://127.0.0.1/")).message)
        self.assertEqual(self.names(), [])

    def test_bytes(self) -> None:
        """Each fetch is given the limit of bytes, and git its pinned address."""
        self.successResultOf(self.check_out())
        (fetch,) = (c for c in self.git.commands if c.arguments[0] == "fetch")
        self.assertEqual(fetch.largest, self.size)
        self.assertEqual(fetch.environment["GIT_CONFIG_VALUE_0"], "example.org:443:8.8.8.8")
