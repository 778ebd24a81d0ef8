"""`git.cache`: commits that are checked out, shared, and fetched again after damage."""

from __future__ import annotations

import errno
import gc
import json
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import NoReturn

from twisted.internet.defer import CancelledError, Deferred, fail

from tawebeval.core.evaluations import Commit
from tawebeval.core.form import Repository
from tawebeval.errors import EvaluationFailure
from tawebeval.git import cache, repository
from tawebeval.git.command import GitResult
from tawebeval.sandbox.bubblewrap import SandboxAccess
from tests.cases.git import DONE, OTHER, URL, CacheTestCase, Command, Running, failed
from tests.fakes.world import OID, TREE

CORRUPT = failed("error: inflate: data stream error\nfatal: packed object cc is corrupt")
NO_ROUTE = failed("fatal: no route to host")


class CheckOutTests(CacheTestCase):
    def test_tree_of_a_commit_is_checked_out_in_the_cache(self) -> None:
        self.get()
        command = self.git.commands[-1]
        self.assertEqual(command.repository, self.path())
        (checkout,) = self.checkouts
        self.assertRegex(
            checkout.path.name, rf"\A{self.path().stem}-{TREE}-0-0-[0-9a-f]{{8}}\.tree\Z"
        )
        unfinished = Path(command.environment["GIT_INDEX_FILE"]).parents[1]
        self.assertRegex(unfinished.name, rf"\A{self.path().stem}-{TREE}\.tree\.new-")
        self.assertEqual(
            command.arguments,
            (f"--work-tree={unfinished}/tree", "read-tree", "--reset", "-u", TREE),
        )
        self.assertEqual(command.environment, {"GIT_INDEX_FILE": f"{unfinished}/index/index"})
        self.assertEqual(command.reach, SandboxAccess((unfinished / "tree", unfinished / "index")))

    def test_commit_fetched_with_another_commit_is_found_without_network(self) -> None:
        self.get()
        self.git.commands.clear()
        for _ in range(2):
            self.assertEqual(self.get(oid=OTHER), Commit(OTHER, TREE))
            # It has the same tree, which is checked out.
            self.assertEqual(self.names(), ["log", "ls-tree"])

    def test_commit_with_a_marker_needs_no_network(self) -> None:
        def needs(url: str = URL, oid: str = OID) -> bool:
            return self.cache.checkout_needs_network(Repository(url), oid)

        self.assertTrue(needs())
        self.assertEqual(self.resolver.asked, [])
        self.get()
        self.assertFalse(needs())
        self.assertTrue(needs(oid=OTHER))
        self.assertTrue(needs(URL + "x"))
        self.assertFalse(needs("/srv/x"))
        self.assertFalse(needs("file:///srv/x"))
        self.assertRaises(EvaluationFailure, needs, "https://127.0.0.1/x")

    def test_fetches_are_counted(self) -> None:
        self.get()
        self.get()
        self.fetches = [NO_ROUTE]
        self.refuse(URL + "x")
        tally = self.cache.counters
        self.assertEqual(tally.fetch_counts, {"fetched": 1, "failed": 1, "cancelled": 0})

    def test_malformed_marker_is_ignored_and_written_again(self) -> None:
        self.get()
        marker = self.path() / "commits" / OID
        before = self.cache.disk_bytes_by_kind
        for content in ("7777", "{", '{"oid": 7}', ""):
            marker.write_text(content)
            self.git.commands.clear()
            self.get()
            self.assertEqual(self.names(), ["log", "ls-tree"])
            self.assertEqual(json.loads(marker.read_text())["tree_oid"], TREE)
            self.assertEqual(self.cache.disk_bytes_by_kind, before)

    def test_failed_and_cancelled_fetches_leave_no_files_and_no_objects(self) -> None:
        running = Running()
        self.fetches = [NO_ROUTE] * 3 + [running]
        for number in range(3):
            self.refuse(f"{URL}{number}")
        cancelled = self.check_out(f"{URL}3")
        cancelled.cancel()
        running.end(failed("", -1))
        self.failureResultOf(cancelled, CancelledError)
        self.assertEqual(list(self.root.iterdir()), [])
        gc.collect()
        bare = (o for o in gc.get_objects() if isinstance(o, repository.BareRepository))
        self.assertEqual([o for o in bare if o.path.parent == self.root], [])

    def test_repository_with_too_many_packs_is_removed_once_no_request_uses_it(self) -> None:
        def add_packs(repository: Path) -> None:
            for number in range(150):
                (repository / "objects/pack" / f"{self.fetched}-{number}").touch()

        self.grow = add_packs
        running = Running()
        self.fetches = [DONE, running]
        self.get()
        self.present.clear()
        requested = self.check_out(oid=OTHER)
        self.assertTrue(self.path().exists())
        running.end()
        self.assertEqual(self.successResultOf(requested).oid, OTHER)
        self.assertEqual(list(self.root.glob("*.git*")), [])
        self.assertEqual(len(list(self.root.glob("*.tree"))), 1)

    def test_only_the_eight_newest_commits_have_refs(self) -> None:
        for _ in range(20):
            self.present.clear()
            for marker in self.root.glob("*.git/commits/*"):
                marker.unlink()
            self.get()
        refs = [command.arguments[-1] for command in self.fetch_commands()]
        self.assertEqual(refs[:2], [f"{OID}:refs/commits/1", f"{OID}:refs/commits/2"])
        self.assertEqual(len(set(refs)), 8)

    def test_marker_adds_one_block_to_the_size_of_the_repositories(self) -> None:
        self.get()
        before = self.cache.disk_bytes_by_kind["repositories"]
        self.present.clear()
        self.get(oid=OTHER)
        self.assertEqual(self.cache.disk_bytes_by_kind["repositories"], before + 4096)
        self.restart()
        self.assertEqual(self.cache.disk_bytes_by_kind["repositories"], before + 4096)

    def test_incomplete_repository_is_removed_after_the_disk_was_full(self) -> None:
        def fill(path: Path) -> None:
            path.mkdir()
            raise OSError(errno.ENOSPC, "disk full")

        patched = self.patch(repository, "create_repository", fill)
        self.failureResultOf(self.check_out(), OSError)
        patched.restore()
        self.assertEqual(list(self.root.glob("*.git")), [])
        self.get()


class SharingTests(CacheTestCase):
    def setUp(self) -> None:
        super().setUp()

        # A coroutine that spins cannot be timed out by trial.
        def hang(number: int, frame: object) -> NoReturn:
            raise AssertionError("it hangs")

        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, hang))
        self.addCleanup(signal.alarm, 0)
        signal.alarm(120)
        self.running = Running()
        self.fetches = [self.running]

    def test_requests_for_one_commit_wait_for_one_fetch_and_one_check_out(self) -> None:
        requested = [self.check_out() for _ in range(3)]
        for each in requested:
            self.assertNoResult(each)
        self.running.end()
        for each in requested:
            self.assertEqual(self.successResultOf(each).oid, OID)
        self.assertEqual(self.names(), ["fetch", "log", "ls-tree", "read-tree"])

    def test_cancelling_the_last_request_kills_the_fetch(self) -> None:
        first, second = self.check_out(), self.check_out()
        first.cancel()
        second.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertEqual(self.running.killed, 1)
        self.assertNoResult(second)
        self.running.end(failed("", -1))
        self.failureResultOf(second, CancelledError)
        self.assertEqual(list(self.root.iterdir()), [])
        self.assertEqual(self.cache.counters.fetch_counts["cancelled"], 1)

    def test_request_that_waits_for_another_fetch_is_cancelled_at_once(self) -> None:
        first, second = self.check_out(), self.check_out(oid=OTHER)
        second.cancel()
        self.failureResultOf(second, CancelledError)
        self.assertEqual(self.running.killed, 0)
        self.running.end()
        self.successResultOf(first)

    def test_request_during_the_kill_of_a_fetch_starts_a_new_fetch(self) -> None:
        first = self.check_out()
        first.cancel()
        again = Running()
        self.fetches = [again]
        second = self.check_out()
        self.assertEqual(len(self.fetch_commands()), 1)
        self.running.end(failed("", -1))
        self.failureResultOf(first, CancelledError)
        self.assertEqual(len(self.fetch_commands()), 2)
        again.end()
        self.successResultOf(second)
        self.assertEqual(again.killed, 0)


class DamageTests(CacheTestCase):
    def setUp(self) -> None:
        self.broken_once: set[str] = set()  # commands that fail in the damaged repository
        self.printed = CORRUPT
        super().setUp()
        self.get()
        self.lose_trees()
        self.git.commands.clear()
        (self.path() / "damaged").touch()

    def script(self, command: Command) -> GitResult | Awaitable[GitResult]:
        """Answer as git does, in a repository that is damaged until it is removed."""
        is_damaged = (command.repository / "damaged").exists()
        if command.name in self.broken_once and is_damaged:
            return self.printed
        if command.name == "fetch" and not is_damaged:
            self.present.clear()
        return super().script(command)

    def check_mended(self, oid: str = OID) -> None:
        """Check that a request gets its commit, from a new repository."""
        self.assertEqual(self.get(oid=oid).oid, oid)
        self.assertFalse((self.path() / "damaged").exists())
        self.assertEqual(sorted(path.suffix for path in self.root.iterdir()), [".git", ".tree"])

    def test_damaged_repository_is_fetched_again_once_git_reports_the_damage(self) -> None:
        self.broken_once = {"read-tree"}
        self.check_mended()
        for name in ("fetch", "ls-tree"):
            self.setUp()
            self.present.clear()
            self.broken_once = {name}
            self.check_mended(OTHER)

    def test_repository_damaged_again_after_a_new_fetch_is_an_error(self) -> None:
        self.broken["read-tree"] = CORRUPT
        error = self.refuse()
        self.assertEqual(
            (error.reason, error.extra_members["stderr"]), ("repository", CORRUPT.stderr)
        )
        self.assertEqual(len(self.fetch_commands()), 1)

    def test_failure_other_than_damage_does_not_fetch_the_repository_again(self) -> None:
        self.broken["read-tree"] = failed("remote: corrupt")
        self.refuse()
        self.assertEqual(self.names(), ["read-tree"])

    def test_damage_reported_on_full_disk_does_not_cause_a_new_fetch(self) -> None:
        printed = "error: No space left on device\nfatal: packed object cc is corrupt"
        full = EvaluationFailure("lost", "the disk is full", {"stderr": printed})
        self.git.script = lambda command: fail(full)
        self.assertEqual(self.refuse().reason, "lost")
        self.assertEqual(self.names(), ["read-tree"])

    def test_failed_removal_does_not_stop_the_next_removal(self) -> None:
        def fail_to_remove(path: Path) -> NoReturn:
            raise OSError(errno.EIO, "the disk fails")

        patched = self.patch(cache, "remove_tree", fail_to_remove)
        self.broken_once = {"read-tree"}
        self.failureResultOf(self.check_out(), OSError)
        patched.restore()
        self.get()
        self.lose_trees()
        (self.path() / "damaged").touch()
        self.assertEqual(self.get().oid, OID)
        self.assertFalse((self.path() / "damaged").exists())

    def test_damage_during_the_first_fetch_does_not_cause_a_new_fetch(self) -> None:
        self.fetches = [CORRUPT]
        self.refuse("https://example.org/another")
        self.assertEqual(len(self.fetch_commands()), 1)

    def fetch_while_repository_leaves_the_cache(self) -> tuple[Running, Deferred[Commit]]:
        """Return a running fetch of OTHER, after another user has found the repository damaged."""
        running = Running()
        self.present.clear()
        self.fetches = [running]
        self.broken_once = {"read-tree"}
        fetching = self.check_out(oid=OTHER)
        self.assertEqual(self.get().oid, OID)
        self.broken_once.clear()
        return running, fetching

    def test_fetch_is_repeated_if_it_fails_while_its_repository_is_removed(self) -> None:
        running, fetching = self.fetch_while_repository_leaves_the_cache()
        printed = "fatal: --stdin requires a git repository"
        running.end(failed(f"{printed}\nfatal: fetch-pack: invalid index-pack output"))
        self.assertEqual(self.successResultOf(fetching).oid, OTHER)

    def test_fetch_succeeds_though_its_repository_is_removed_from_the_cache(self) -> None:
        running, fetching = self.fetch_while_repository_leaves_the_cache()
        self.lose_trees()
        running.end()
        self.assertEqual(self.successResultOf(fetching).oid, OTHER)
        self.assertEqual(sorted(path.suffix for path in self.root.iterdir()), [".git", ".tree"])
