"""`git.repository`: the arguments, the timeout and the limits of fetches."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred

from tawebeval.core.evaluations import Commit
from tawebeval.core.form import Repository
from tawebeval.errors import EvaluationFailure
from tawebeval.git.command import GitResult
from tawebeval.sandbox.bubblewrap import READ_ONLY_ACCESS, SandboxAccess
from tests.cases.git import NOWHERE, OTHER, URL, CacheTestCase, Command, Running, failed
from tests.fakes.world import OID, TREE

UNADVERTISED = failed("error: Server does not allow request for unadvertised object cc")
INFINITE = f"--depth={2**31 - 1}"
BY_OID = f"{OID}:refs/commits/1"
BRANCH = "refs/heads/main:refs/origin/heads/main"
ALL = [INFINITE, "--prune", "refs/*:refs/origin/*"]


class ArgumentsTests(CacheTestCase):
    def check_fetches(self, *expected: list[str]) -> None:
        """Check the arguments of all fetches, without those that each of them has."""
        found = []
        for command in self.fetch_commands():
            arguments = command.arguments
            self.assertEqual(arguments[:2], ("fetch", "--quiet"))
            self.assertIn("--no-write-fetch-head", arguments)
            self.assertEqual(arguments[arguments.index("--end-of-options") + 1], URL)
            found.append([a for a in arguments[7:] if a not in ("--end-of-options", URL)])
        self.assertEqual(found, list(expected))

    def test_commit_is_fetched_by_oid_then_by_branch_then_with_all_branches(self) -> None:
        for branch, depth, gained, expected in (
            (None, None, 1, (["--depth=1", BY_OID],)),
            (None, 5, 1, (["--depth=5", BY_OID],)),
            (None, None, 2, (["--depth=1", BY_OID], ALL)),
            ("main", None, 2, (["--depth=1", BY_OID], [INFINITE, BRANCH])),
            ("main", None, 3, (["--depth=1", BY_OID], [INFINITE, BRANCH], ALL)),
            ("main", 3, 3, (["--depth=3", BY_OID], ["--depth=3", BRANCH], ALL)),
        ):
            self.setUp()
            self.gained = gained
            self.fetches = [UNADVERTISED] if gained > 1 else []
            self.assertEqual(self.get(branch=branch, depth=depth), Commit(OID, TREE))
            self.check_fetches(*expected)
        self.setUp()
        self.get()
        self.assertEqual(self.names(), ["fetch", "log", "ls-tree", "read-tree"])

    def test_server_that_reports_a_missing_commit_is_not_asked_again(self) -> None:
        self.fetches = [failed(f"fatal: remote error: upload-pack: not our ref {OID}")]
        error = self.refuse(branch="main")
        self.assertEqual((error.reason, error.extra_members), ("commit", {}))
        self.assertIn(f"no commit {OID}, on branch 'main' or elsewhere", error.message)
        self.assertEqual(len(self.fetch_commands()), 1)

    def test_commit_missing_after_all_three_fetches_is_refused(self) -> None:
        self.gained = 99
        self.assertEqual(self.refuse(branch="main").reason, "commit")
        self.assertEqual(len(self.fetch_commands()), 3)

    def test_tag_is_fetched_once_and_shares_the_checkout_of_its_commit(self) -> None:
        self.broken["log"] = GitResult(0, f"{OTHER} {TREE}\n", "")
        for oid in (OID, OID, OTHER):
            self.assertEqual(self.get(oid=oid), Commit(OTHER, TREE))
        self.assertEqual(self.names(), ["fetch", "log", "ls-tree", "read-tree"])
        self.restart()
        self.assertEqual(self.get().oid, OTHER)
        (self.path() / "commits" / OTHER).unlink()
        self.get()
        self.assertEqual(self.names()[4:], ["log", "ls-tree"])

    def test_fetch_does_not_list_the_commits_that_were_fetched_before(self) -> None:
        self.get()
        listed, scan = [], os.scandir

        def list_directory(path: Any) -> Any:
            listed.append(str(path))
            return scan(path)

        self.patch(os, "scandir", list_directory)
        self.get(oid=OTHER)
        self.assertIn(str(self.path() / "objects"), listed)
        self.assertNotIn(str(self.path() / "commits"), listed)
        sizes = self.cache.disk_bytes_by_kind
        self.restart()
        self.assertEqual(self.cache.disk_bytes_by_kind, sizes)

    def test_commit_does_not_count_in_the_cache_size_after_its_marker_is_removed(self) -> None:
        oid = "5" * 64
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 9\n"
        self.trees = {OTHER: "8" * 40}
        self.get(oid=OTHER)
        self.plant = lambda tree: (tree / "large").write_text(pointer)
        self.refuse()
        sizes = self.cache.disk_bytes_by_kind
        for _ in range(3):
            self.assertIn("not tracked in .gitattributes", self.refuse().message)
            self.assertEqual(self.cache.disk_bytes_by_kind, sizes)

    def test_error_about_an_oid_without_commit_says_that_it_is_a_tree_or_a_file(self) -> None:
        self.broken["log"] = GitResult(0, "", "")
        self.broken["ls-tree"] = failed("fatal: not a tree object")
        error = self.refuse()
        self.assertEqual((error.reason, error.extra_members), ("commit", {}))
        self.assertIn(f"{OID} is a tree or a file", error.message)

    def test_only_local_repositories_may_belong_to_other_users(self) -> None:
        self.get("/srv/x")
        self.get()
        local, remote = self.fetch_commands()
        option = "--upload-pack=git -c safe.directory='*' upload-pack"
        self.assertLess(local.arguments.index(option), local.arguments.index("--end-of-options"))
        self.assertNotIn("safe.directory", str(remote))
        self.assertEqual((local.source, remote.source), ("/srv/x", None))
        self.assertEqual(remote.environment["GIT_CONFIG_VALUE_0"], "example.org:443:8.8.8.8")

    def test_each_git_command_may_write_only_the_directories_it_needs(self) -> None:
        self.get()
        path = self.path()
        self.get("/srv/x")
        self.get(oid=OTHER)
        reaches = [(c.name, c.reach, c.follows) for c in self.git.commands]
        fetching = SandboxAccess((path,), has_network=True)
        index = next(c for c in self.git.commands if c.name == "read-tree").environment
        unfinished = Path(index["GIT_INDEX_FILE"]).parents[1]
        self.assertEqual(
            reaches[:4],
            [
                ("fetch", fetching, False),
                ("log", fetching, True),
                ("ls-tree", fetching, True),
                ("read-tree", SandboxAccess((unfinished / "tree", unfinished / "index")), False),
            ],
        )
        self.assertEqual(
            reaches[-2:], [("log", READ_ONLY_ACCESS, False), ("ls-tree", READ_ONLY_ACCESS, True)]
        )
        local = next(command for command in self.git.commands if command.source)
        self.assertEqual(local.reach, SandboxAccess((local.repository,), ("/srv/x", "/srv/x.git")))


class BranchTests(CacheTestCase):
    def ask(self, url: str = URL, branch: str = "main") -> Deferred[str]:
        return Deferred.fromCoroutine(self.cache.resolve_branch(Repository(url, branch), ""))

    def test_branch_resolves_to_the_oid_of_its_full_ref_name(self) -> None:
        for oid in (OID, OTHER):
            printed = f"{TREE}\trefs/heads/a/refs/heads/main\n{oid}\trefs/heads/main\n"
            self.broken["ls-remote"] = GitResult(0, printed, "")
            self.assertEqual(self.successResultOf(self.ask()), oid)
        command = self.git.commands[-1]
        self.assertEqual(
            command.arguments, ("ls-remote", "--heads", "--end-of-options", URL, "refs/heads/main")
        )
        self.assertEqual(command.reach, SandboxAccess(has_network=True))
        self.assertEqual(command.repository, NOWHERE)  # the cached one may be removed meanwhile
        self.assertEqual(list(self.root.iterdir()), [])

    def test_error_about_a_missing_branch_names_the_branch(self) -> None:
        for printed in ("", f"{OID}\trefs/heads/a/refs/heads/main\n", "0\trefs/heads/main\n"):
            self.broken["ls-remote"] = GitResult(0, printed, "")
            error = self.failureResultOf(self.ask(), EvaluationFailure).value
            self.assertEqual(
                (error.reason, error.message),
                (
                    "repository",
                    "the repository has no branch 'main'; push it, or name another branch",
                ),
            )

    def test_branch_look_up_refuses_the_urls_that_a_fetch_refuses(self) -> None:
        self.broken["ls-remote"] = failed("fatal: unable to access")
        for url, words in (
            ("https://127.0.0.1/x", "private address"),
            (str(self.root), "directory of the daemon"),
            (URL, "git could not fetch the repository: unable to access"),
        ):
            error = self.failureResultOf(self.ask(url), EvaluationFailure).value
            self.assertEqual(error.reason, "repository")
            self.assertIn(words, error.message)

    def test_branch_look_up_does_not_wait_for_a_running_fetch(self) -> None:
        fetching = Running()
        self.fetches = [fetching]
        self.addCleanup(fetching.end)
        self.check_out()
        self.broken["ls-remote"] = GitResult(0, f"{OID}\trefs/heads/main\n", "")
        self.assertEqual(self.successResultOf(self.ask()), OID)

    def test_branch_look_up_is_killed_after_fetch_timeout(self) -> None:
        asking = Running()
        self.git.script = lambda command: asking.result()
        asked = self.ask()
        self.clock.advance(59)
        self.assertEqual(asking.killed, 0)
        self.clock.advance(1)
        self.assertEqual(asking.killed, 1)
        asking.end(failed("", -9))
        error = self.failureResultOf(asked, EvaluationFailure).value
        self.assertIn("took over 60 seconds (repositories.fetch_timeout)", error.message)


class DeadlineTests(CacheTestCase):
    def test_host_look_up_ends_before_the_fetch_timeout(self) -> None:
        self.resolver.silent = True
        requested = self.check_out()
        self.clock.advance(29)
        self.assertNoResult(requested)
        self.clock.advance(1)
        self.assertEqual(self.error(requested).reason, "lost")

    def check_over(self, requested: Deferred[Commit], running: Running) -> None:
        """Check that git is killed in the next second, and the error when git has ended."""
        self.assertEqual(running.killed, 0)
        self.clock.advance(1)
        self.assertEqual(running.killed, 1)
        self.assertNoResult(requested)
        running.end(failed("", -1))
        error = self.error(requested)
        self.assertEqual(error.reason, "repository")
        self.assertIn("60 seconds", error.message)
        self.assertEqual(error.extra_members, {"limit": "repositories.fetch_timeout", "value": 60})
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_fetch_timeout_includes_the_wait_for_another_fetch(self) -> None:
        first, second = Running(), Running()
        self.fetches = [first, second]
        self.gained = 99
        self.addCleanup(self.check_out().addErrback, lambda failure: None)
        self.clock.advance(20)
        requested = self.check_out(oid=OTHER)
        self.clock.advance(30)
        first.end(failed("fatal: no"))
        self.clock.advance(29)
        self.check_over(requested, second)

    def test_checking_out_has_timeout_of_its_own(self) -> None:
        self.broken["read-tree"] = failed("", -1, timed_out=True)
        error = self.refuse()
        self.assertIn("took over 60 seconds (repositories.fetch_timeout)", error.message)
        self.assertEqual(error.extra_members["limit"], "repositories.fetch_timeout")


class LimitTests(CacheTestCase):
    def test_tree_over_limit_is_not_checked_out(self) -> None:
        self.broken["ls-tree"] = GitResult(0, "100644 blob cc 1001\tx\0", "")
        members = self.refuse().extra_members
        self.assertEqual(members, {"limit": "repositories.tree_bytes", "value": 1000})
        self.assertNotIn("read-tree", self.names())
        self.broken["ls-tree"] = GitResult(0, "100644 blob cc 1000\tx\0", "")
        self.assertEqual(self.get(), Commit(OID, TREE, 1, 1000))
        marker = {"oid": OID, "tree_oid": TREE, "file_count": 4, "size": 1000}
        (self.path() / "commits" / OID).write_text(json.dumps(marker))
        self.assertIn("the commit has over 3 files", self.refuse().message)

    def test_checkout_that_grows_over_the_limit_is_ended(self) -> None:
        self.broken["ls-tree"] = GitResult(0, "100644 blob cc 1000\t.gitattributes\0", "")
        writing, others = Running(), self.git.script

        def script(command: Command) -> GitResult | Awaitable[GitResult]:
            if command.name != "read-tree":
                return others(command)
            directory = Path(command.arguments[0].partition("=")[2], "commits")
            directory.mkdir()
            (directory / "file").write_bytes(b"x" * 1001)
            return writing.result()

        self.git.script = script
        requested = self.check_out()
        self.assertEqual(writing.killed, 0)
        self.clock.advance(0.25)
        self.assertEqual(writing.killed, 1)
        self.assertNoResult(requested)
        writing.end(failed("", -9))
        members = self.error(requested).extra_members
        self.assertEqual(members, {"limit": "repositories.tree_bytes", "value": 1000})
        self.assertEqual(list(self.root.glob("*/lfs/*")), [])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_file_in_git_lfs_fails_with_its_path(self) -> None:
        def plant(tree: Path) -> None:
            start = "version https://git-lfs.github.com/spec/v1\noid sha256:"
            (tree / "data").write_text(f"{start}{'0' * 64}\nsize 7\n")

        self.plant = plant
        error = self.refuse()
        self.assertEqual(error.extra_members, {"path": "data"})
        self.assertIn("is stored in Git LFS", error.message)
        self.assertEqual([*self.root.glob("*.tree*"), *self.root.glob("*.git/commits/*")], [])

    def test_commit_is_refused_if_git_cannot_list_its_tree(self) -> None:
        self.broken["ls-tree"] = failed("fatal: not a tree object")
        self.assertIn("could not list", self.refuse().message)


class LeftoverTests(CacheTestCase):
    leftovers = (
        *(
            "gc.pid",
            "objects/maintenance.lock",
            "shallow.lock",
            "packed-refs.lock",
            "refs/heads/main.lock",
            "refs/commits/x.lock",
        ),
        *("objects/pack/tmp_pack_abc", "objects/pack/tmp_idx_abc"),
        *("objects/pack/.tmp-7-pack-1.pack", "objects/pack/pack-1.keep"),
        *("objects/pack/pack-2.pack", "objects/pack/pack-2.rev", "objects/pack/pack-3.idx"),
        "objects/tmp_objdir-incoming-x/pack/y",
    )
    kept = (
        *("shallow", "refs/heads/lock", "commits/" + OTHER, "url"),
        *("objects/pack/pack-1.pack", "objects/pack/pack-1.idx"),
    )

    def litter(self, repository: Path) -> None:
        """Write the files of a killed git, among those that belong there."""
        for name in (*self.leftovers, *self.kept):
            path = repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")

    def check_tidy(self) -> None:
        path = self.path()
        self.assertEqual([n for n in self.leftovers if (path / n).exists()], [])
        self.assertEqual([n for n in self.kept if not (path / n).exists()], [])
        self.assertEqual(list(path.glob("objects/tmp_*")), [])

    def test_leftovers_are_removed_after_a_failed_fetch(self) -> None:
        for cancels in (False, True):
            self.setUp()
            running = Running()
            self.fetches = [running]
            requested = self.check_out()
            self.litter(self.path())
            if cancels:
                requested.cancel()
            self.assertTrue((self.path() / "shallow.lock").exists())
            running.end(failed("fatal: the remote end hung up"))
            self.failureResultOf(requested, EvaluationFailure, CancelledError)
            self.check_tidy()

    def test_restart_removes_leftovers_of_a_killed_daemon_from_the_cache(self) -> None:
        self.get()
        self.litter(self.path())
        (self.root / "0123.new").mkdir()
        (self.root / "4567.old3").mkdir()
        (self.root / "stray").write_text("x")
        (self.root / "8901.git").symlink_to("nowhere")
        self.restart()
        self.check_tidy()
        self.assertEqual(sorted(path.suffix for path in self.root.iterdir()), [".git", ".tree"])

    def test_successful_fetch_searches_for_no_leftovers(self) -> None:
        self.grow = self.litter
        self.get()
        self.assertTrue((self.path() / "shallow.lock").exists())
