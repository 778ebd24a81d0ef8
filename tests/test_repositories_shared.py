"""`git.cache`: fetches that are shared, given up, interrupted."""

from __future__ import annotations

import gc
import signal
from pathlib import Path
from typing import NoReturn

from twisted.internet.defer import CancelledError

from tawebeval.errors import EvaluationError
from tests.fakes import OID
from tests.test_repositories import OTHER, URL, RepositoriesTestCase, Running, failed


class SharedFetchTests(RepositoriesTestCase):
    """What is being fetched is not fetched twice."""

    def setUp(self) -> None:
        super().setUp()

        # A coroutine that spins cannot be timed out by trial.
        def hang(number: int, frame: object) -> NoReturn:
            raise AssertionError("it hangs")

        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, hang))
        self.addCleanup(signal.alarm, 0)
        signal.alarm(20)
        self.fetching = Running()
        self.fetches = [self.fetching]

    def test_shared(self) -> None:
        """Those who want the same commit wait for one fetch, and each gets its tree."""
        asked = [self.check_out() for _ in range(3)]
        for one in asked:
            self.assertNoResult(one)
        self.assertEqual(self.names().count("fetch"), 1)
        self.fetching.end()
        for one in asked:
            self.assertEqual(self.successResultOf(one).oid, OID)
        self.assertEqual(self.names().count("fetch"), 1)
        self.assertEqual(self.names().count("read-tree"), 1)

    def test_shared_failure(self) -> None:
        """If it fails it fails for all of them, each with an error of its own."""
        asked = [self.check_out() for _ in range(3)]
        self.fetching.end(failed("fatal: no"))
        errors = [self.failureResultOf(one, EvaluationError).value for one in asked]
        self.assertEqual({error.reason for error in errors}, {"repository"})
        self.assertEqual(len({id(error) for error in errors}), 3)
        self.assertEqual(self.names().count("fetch"), 1)

    def test_not_shared_later(self) -> None:
        """Who comes after a failure asks anew."""
        asked = self.check_out()
        self.fetching.end(failed("fatal: no"))
        self.failureResultOf(asked, EvaluationError)
        self.successResultOf(self.check_out())
        self.assertEqual(self.names().count("fetch"), 2)

    def test_one_at_a_time(self) -> None:
        """Two commits of one repository are fetched one after the other."""
        first, second = self.check_out(), self.check_out(oid=OTHER)
        self.assertEqual(self.names().count("fetch"), 1)
        self.fetching.end()
        self.successResultOf(first)
        self.assertEqual(self.successResultOf(second).oid, OTHER)
        # It came along with the first one.
        self.assertEqual(self.names().count("fetch"), 1)

    def test_repositories_do_not_wait(self) -> None:
        """Repositories do not wait for each other."""
        first = self.check_out()
        self.successResultOf(self.check_out(url=URL + "x"))
        self.assertNoResult(first)
        self.fetching.end()
        self.successResultOf(first)

    def test_one_gives_up(self) -> None:
        """Who gives up leaves the fetch to the others."""
        first, second = self.check_out(), self.check_out()
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertEqual(self.fetching.killed, 0)
        self.assertNoResult(second)
        self.fetching.end()
        self.successResultOf(second)

    def test_all_give_up(self) -> None:
        """The last who gives up kills the fetch, and has done so when git is gone."""
        first, second = self.check_out(), self.check_out()
        first.cancel()
        second.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertEqual(self.fetching.killed, 1)
        self.assertNoResult(second)
        self.fetching.end(failed("", -1))
        self.failureResultOf(second, CancelledError)
        self.assertEqual(list(self.root.iterdir()), [])
        self.assertEqual(self.repositories.tally.misses["commits"], 2)
        self.assertEqual(self.repositories.tally.fetches, {"cancelled": 1})

    def test_give_up_while_waiting_for_another_fetch(self) -> None:
        """Who waits for its turn can give up at once."""
        first, second = self.check_out(), self.check_out(oid=OTHER)
        second.cancel()
        self.failureResultOf(second, CancelledError)
        self.assertEqual(self.fetching.killed, 0)
        self.fetching.end()
        self.successResultOf(first)

    def test_ask_again_while_it_is_killed(self) -> None:
        """Who comes while a fetch is being killed gets one of its own, after that."""
        first = self.check_out()
        first.cancel()
        again = Running()
        self.fetches = [again]
        second = self.check_out()
        self.assertEqual(self.names().count("fetch"), 1)
        self.fetching.end(failed("", -1))
        self.failureResultOf(first, CancelledError)
        self.assertEqual(self.names().count("fetch"), 2)
        again.end()
        self.successResultOf(second)
        self.assertEqual(again.killed, 0)

    def test_git_cannot_be_started(self) -> None:
        """Where git cannot be run, that is what all who wait are told."""
        self.fetches = []
        self.git.script = lambda command: (_ for _ in ()).throw(OSError(2, "no git"))
        with self.assertRaises(OSError):
            self.failureResultOf(self.check_out()).raiseException()
        gc.collect()


class TidyTests(RepositoriesTestCase):
    """What interrupted fetches leave behind."""

    leftovers = (
        "shallow.lock",
        "packed-refs.lock",
        "refs/heads/main.lock",
        "refs/commits/x.lock",
        "objects/pack/tmp_pack_abc",
        "objects/pack/tmp_idx_abc",
        "objects/pack/.tmp-7-pack-1.pack",
        "objects/pack/pack-1.keep",
        "objects/pack/pack-2.pack",
        "objects/pack/pack-2.rev",
        "objects/pack/pack-3.idx",
        "objects/tmp_objdir-incoming-x/pack/y",
    )
    kept = (
        *("shallow", "refs/heads/lock", "commits/" + OTHER, "url"),
        *("objects/pack/pack-1.pack", "objects/pack/pack-1.idx"),
    )

    def litter(self, repository: Path) -> None:
        """Leave what git leaves when it is killed, among what belongs there."""
        for name in (*self.leftovers, *self.kept):
            path = repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")

    def assert_tidy(self) -> None:
        """Hold that what is to go has gone, and that what is to stay has stayed."""
        path = self.path()
        self.assertEqual([n for n in self.leftovers if (path / n).exists()], [])
        self.assertEqual([n for n in self.kept if not (path / n).exists()], [])
        self.assertEqual(list(path.glob("objects/tmp_*")), [])

    def test_after_a_failure(self) -> None:
        """Locks and unfinished packs are removed after a fetch that failed."""
        running = Running()
        self.fetches = [running]
        asked = self.check_out()
        self.litter(self.path())
        running.end(failed("fatal: the remote end hung up"))
        self.failureResultOf(asked, EvaluationError)
        self.assert_tidy()

    def test_after_a_cancellation(self) -> None:
        """And after one that was killed."""
        running = Running()
        self.fetches = [running]
        asked = self.check_out()
        self.litter(self.path())
        asked.cancel()
        self.assertTrue((self.path() / "shallow.lock").exists())
        running.end(failed("", -1))
        asked.addErrback(lambda failure: None)
        self.assert_tidy()

    def test_after_a_restart(self) -> None:
        """And when a daemon starts after one that was killed itself."""
        self.successResultOf(self.check_out())
        self.litter(self.path())
        (self.root / "0123.new").mkdir()
        (self.root / "4567.old3").mkdir()
        (self.root / "stray").write_text("x")
        self.repositories = self.make()
        self.repositories.load()
        self.assert_tidy()
        self.assertEqual(sorted(path.suffix for path in self.root.iterdir()), [".git", ".tree"])

    def test_success_is_not_tidied(self) -> None:
        """After a fetch that went well nothing is looked for."""
        self.grow = self.litter
        self.successResultOf(self.check_out())
        self.assertTrue((self.path() / "shallow.lock").exists())
