"""`git.quota`: a fetch that brings too much, by whatever files, leaves nothing."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import EvaluationError
from tawebeval.git.command import Outcome
from tawebeval.git.quota import FetchLimits, bounded
from tawebeval.git.trees import TreeLimits
from tests.fakes import InlineThreads

LIMIT = 100_000


class BoundedTests(SynchronousTestCase):
    """A repository in which the test plays git."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.path = Path(self.mktemp())
        (self.path / "objects").mkdir(parents=True)
        (self.path / "refs").mkdir()
        self.write("objects/old", 50_000)
        self.git: Deferred[Outcome] = Deferred()
        self.complete = False

        async def fetch() -> Outcome:
            return await self.git

        limits = FetchLimits(self.clock, 60, LIMIT, TreeLimits(1, 1))
        self.asked = Deferred.fromCoroutine(
            bounded(limits, InlineThreads(), fetch, self.path, lambda: self.complete)
        )

    def end(self) -> None:
        """Let git come to a good end."""
        self.complete = True
        self.git.callback(Outcome(0, "", ""))

    def write(self, name: str, size: int) -> None:
        """Write a file into the repository."""
        (self.path / name).write_bytes(b"x" * size)

    def names(self) -> list[str]:
        """Return the objects that are there."""
        return sorted(path.name for path in (self.path / "objects").iterdir())

    def check_refused(self) -> None:
        """Check that the limit is told, and nothing goes on."""
        error = self.failureResultOf(self.asked, EvaluationError).value
        self.assertEqual(error.reason, "repository")
        self.assertEqual(error.members, {"limit": "repositories.fetch_bytes", "value": LIMIT})
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_within(self) -> None:
        """What is within the limit stays, and git's outcome is passed on."""
        self.write("objects/new", LIMIT // 2)
        self.clock.advance(1)
        self.end()
        self.assertEqual(self.successResultOf(self.asked), Outcome(0, "", ""))
        self.assertEqual(self.names(), ["new", "old"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_other_failure(self) -> None:
        """Git's failure for another reason is passed on, too."""
        self.write("objects/new", 10)
        self.git.callback(Outcome(128, "", "no"))
        self.assertEqual(self.successResultOf(self.asked).status, 128)

    def test_other_limit(self) -> None:
        """What is refused for another limit leaves nothing, either."""
        self.write("objects/new", 10)
        self.git.errback(EvaluationError("repository", "too much memory"))
        error = self.failureResultOf(self.asked, EvaluationError).value
        self.assertEqual(error.message, "too much memory")
        self.assertEqual(self.names(), ["old"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_killed_by_the_limit(self) -> None:
        """Git whose child dies of the limit of files does not say so; the file does."""
        self.write("objects/tmp_pack", LIMIT)
        self.git.errback(EvaluationError("lost", "git was killed"))
        self.check_refused()
        self.assertEqual(self.names(), ["old"])

    def test_failure_before_the_end(self) -> None:
        """A fetch that fails by itself does so for its own reason, though no file is too large."""
        for number in range(4):
            self.write(f"objects/new{number}", LIMIT // 2)
        self.git.callback(Outcome(128, "", "no"))
        self.assertEqual(self.successResultOf(self.asked).stderr, "no")
        self.setUp()
        for number in range(4):
            self.write(f"objects/new{number}", LIMIT // 2)
        self.git.errback(EvaluationError("repository", "too much memory"))
        error = self.failureResultOf(self.asked, EvaluationError).value
        self.assertEqual(error.message, "too much memory")
        self.assertEqual(self.names(), ["old"])

    def test_failure_after_the_fetch(self) -> None:
        """What is refused once all was fetched is refused for that, if there is not too much."""
        self.write("objects/new", 10)
        self.write("refs/new", 41)
        self.complete = True
        self.git.errback(EvaluationError("repository", "too many files"))
        error = self.failureResultOf(self.asked, EvaluationError).value
        self.assertEqual(error.message, "too many files")
        self.assertEqual(self.names(), ["new", "old"])

    def test_failure_after_too_much(self) -> None:
        """If there is too much it goes, whatever else is wrong, or has not been looked at yet."""
        for wrong in (
            lambda: self.git.errback(EvaluationError("repository", "too many files")),
            lambda: self.git.callback(Outcome(128, "", "no such commit")),
            lambda: self.clock.advance(0.25),
        ):
            self.setUp()
            for number in range(4):
                self.write(f"objects/new{number}", LIMIT // 2)
            self.write("refs/new", 41)
            self.complete = True
            wrong()
            self.check_refused()
            self.assertFalse(self.path.exists())

    def test_quicker_than_the_looks(self) -> None:
        """A fetch that is complete before anybody looks takes the whole cache with it."""
        for number in range(4):
            self.write(f"objects/new{number}", LIMIT // 2)
        self.write("refs/new", 10)
        self.end()
        self.check_refused()
        self.assertFalse(self.path.exists())

    def test_file(self) -> None:
        """A file that has come up to the limit made git fail."""
        self.write("objects/new", LIMIT)
        self.git.callback(Outcome(128, "", "died of signal 25"))
        self.check_refused()
        self.assertEqual(self.names(), ["old"])

    def test_sum(self) -> None:
        """Many files that are too large in sum: git is ended."""
        for number in range(4):
            self.write(f"objects/{number}", LIMIT // 3)
        self.clock.advance(0.25)
        self.check_refused()
        self.assertEqual(self.names(), ["old"])

    def test_at_its_end(self) -> None:
        """Objects that refs name already are not removed alone: if there is too much, all goes."""
        self.write("objects/new", 10)
        self.write("refs/new", 41)
        self.git.errback(EvaluationError("repository", "too much memory"))
        self.failureResultOf(self.asked, EvaluationError)
        self.assertEqual(self.names(), ["new", "old"])
        self.setUp()
        self.write("objects/new", 2 * LIMIT)
        self.write("refs/new", 41)
        self.clock.advance(0.25)
        self.check_refused()
        self.assertFalse(self.path.exists())

    def test_cancelled(self) -> None:
        """Who cancels is told that, and nothing of limits."""
        self.asked.cancel()
        self.failureResultOf(self.asked, CancelledError)
        self.assertEqual(self.clock.getDelayedCalls(), [])
