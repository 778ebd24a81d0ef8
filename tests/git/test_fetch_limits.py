"""`git.fetch_limits`: git's output about a commit and its tree, in any chunks; bytes of fetches."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.evaluations import Commit, Submodule
from tawebeval.errors import EvaluationFailure
from tawebeval.git.command import GitResult
from tawebeval.git.fetch_limits import (
    CommitInspectionParser,
    FetchBudget,
    FetchLimits,
    TreeLimits,
    fetch_within_byte_budget,
)
from tests.cases.git import DONE
from tests.fakes.world import OID, TREE, InlineThreads

LINE = f"{OID} {TREE}\n".encode()
LIST = (
    b"040000 tree 0123     -\tbin\0"
    b"100755 blob 0123    12\tbin/a\tb\nc\0"
    b"120000 blob 0123     3\tlink\0"
    b"160000 commit 0123   -\tsub\0"
)


class MeterTests(SynchronousTestCase):
    def check(self, limits: TreeLimits, content: bytes, **members: object) -> None:
        inspection = CommitInspectionParser(limits)
        inspection.feed(LINE + b"\0")
        error = self.assertRaises(EvaluationFailure, inspection.feed, content)
        self.assertEqual((error.reason, error.extra_members), ("repository", members))

    def test_tree_over_limit_is_refused(self) -> None:
        self.check(TreeLimits(3, 99, 1), LIST)
        self.check(TreeLimits(9, 14, 1), LIST, limit="repositories.tree_bytes", value=14)

    def test_commit_with_more_submodules_than_the_limit_is_refused(self) -> None:
        self.check(TreeLimits(9, 99), LIST, path="sub")
        self.check(TreeLimits(9, 99, 1), LIST + LIST, path="sub")

    def test_gitattributes_file_is_found_in_any_directory(self) -> None:
        for path, expected in (("a/.gitattributes", True), (".gitattributes", True), ("a", False)):
            inspection = CommitInspectionParser(TreeLimits(9, 9))
            inspection.feed(LINE + b"\0" + f"100644 blob 01 1\t{path}\0".encode())
            assert inspection.commit is not None
            self.assertEqual(inspection.commit.has_gitattributes, expected)

    def test_path_longer_than_4096_bytes_is_refused(self) -> None:
        for end in (b"\0", b""):
            self.check(TreeLimits(9, 9), b"100644 blob 01 1\t" + b"x" * 4097 + end)


class InspectionTests(SynchronousTestCase):
    def feed(self, *chunks: bytes, before: int = 0) -> CommitInspectionParser:
        inspection = CommitInspectionParser(TreeLimits(4, 15, 1), before=before)
        for chunk in chunks:
            inspection.feed(chunk)
        return inspection

    @given(st.lists(st.integers(0, 250)), st.integers(0, 2))
    def test_result_does_not_depend_on_chunks(self, cuts: list[int], before: int) -> None:
        printed = b"\0" * before + LINE + b"\0" + LIST
        edges = [0, *sorted(min(cut, len(printed)) for cut in cuts), len(printed)]
        chunks = (printed[start:end] for start, end in pairwise(edges))
        expected = Commit(OID, TREE, 4, 15, (Submodule("sub", "0123"),))
        self.assertEqual(self.feed(*chunks, before=before).commit, expected)

    def test_inspection_begins_when_commands_before_it_have_succeeded(self) -> None:
        for chunks, before, expected in (
            ((), 0, True),
            ((), 1, False),
            ((b"said",), 1, False),
            ((b"said\0",), 1, True),
            ((b"\0",), 2, False),
        ):
            self.assertEqual(self.feed(*chunks, before=before).has_inspection_begun(), expected)

    def test_malformed_output_of_git_log_or_ls_tree_gives_no_commit(self) -> None:
        for chunks, before in (((), 0), ((LINE,), 0), ((b"\0", LINE), 1), ((b"\0",), 0)):
            self.assertIsNone(self.feed(*chunks, before=before).commit)
        for line in (
            LINE.strip(),
            b"x" + LINE,
            LINE + b"x",
            f"{OID} ../{TREE}\n".encode(),
            f"{OID} {TREE[1:]}\xe9\n".encode(),
        ):
            self.assertIsNone(self.feed(line + b"\0" + LIST).commit, line)

    def test_endless_line_takes_under_100_kb_of_memory(self) -> None:
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        inspection = self.feed(*[b"x" * 1000] * 1000)
        self.assertLess(tracemalloc.get_traced_memory()[1], 100_000)
        inspection.feed(b"\0")
        self.assertIsNone(inspection.commit)


LIMIT = 100_000
MEMORY = EvaluationFailure("repository", "too much memory")
NO = GitResult(128, "", "no")


class FetchLimitTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.path = Path(self.mktemp())
        (self.path / "objects").mkdir(parents=True)
        self.write("objects/old", 50_000)
        self.git: Deferred[GitResult] = Deferred()
        self.is_complete = False

        async def fetch() -> GitResult:
            return await self.git

        self.budget = FetchBudget(FetchLimits(self.clock, 60, LIMIT, TreeLimits(1, 1)))
        self.fetched = Deferred.fromCoroutine(
            fetch_within_byte_budget(
                self.clock, self.budget, InlineThreads(), fetch, self.path, lambda: self.is_complete
            )
        )

    def write(self, name: str, size: int) -> None:
        (self.path / name).write_bytes(b"x" * size)

    def write_much(self) -> None:
        for number in range(4):
            self.write(f"objects/new{number}", LIMIT // 2)

    def check(self, *objects: str) -> None:
        """Check which objects are left, no name for no repository, and that nothing goes on."""
        folder = self.path / "objects"
        left = sorted(path.name for path in folder.iterdir()) if self.path.exists() else []
        self.assertEqual(left, list(objects))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def check_refused(self, *objects: str) -> None:
        """Check that the error names the limit, and which objects are left."""
        error = self.failureResultOf(self.fetched, EvaluationFailure).value
        self.assertEqual(error.reason, "repository")
        self.assertEqual(error.extra_members, {"limit": "repositories.fetch_bytes", "value": LIMIT})
        self.check(*objects)

    def test_objects_within_limit_stay(self) -> None:
        for result, is_complete in ((DONE, True), (NO, False)):
            self.setUp()
            self.write("objects/new", LIMIT // 2)
            self.clock.advance(1)
            self.is_complete = is_complete
            self.git.callback(result)
            self.assertEqual(self.successResultOf(self.fetched), result)
            self.check("new", "old")
            self.assertEqual(
                self.budget.spent_bytes, (self.path / "objects/new").stat().st_blocks * 512
            )

    def test_failure_for_another_limit_is_raised_unchanged(self) -> None:
        for is_complete in (False, True):
            self.setUp()
            self.write("objects/tmp_pack", 10)
            self.is_complete = is_complete
            self.git.errback(MEMORY)
            error = self.failureResultOf(self.fetched, EvaluationFailure).value
            self.assertEqual(error.message, "too much memory")
            self.check("old", "tmp_pack")

    def test_git_failure_with_a_file_at_the_limit_is_refused_as_too_large(self) -> None:
        for end in (
            lambda: self.git.errback(EvaluationFailure("lost", "git was killed")),
            lambda: self.git.callback(GitResult(128, "", "died of signal 25")),
        ):
            self.setUp()
            self.write("objects/tmp_pack", LIMIT)
            end()
            self.check_refused("old", "tmp_pack")

    def test_complete_fetch_that_is_too_large_removes_repository(self) -> None:
        for end in (
            lambda: self.git.errback(EvaluationFailure("repository", "too many files")),
            lambda: self.git.callback(GitResult(128, "", "no such commit")),
            lambda: self.git.callback(DONE),
        ):
            self.setUp()
            self.write_much()
            self.is_complete = True
            end()
            self.check_refused()

    def test_git_is_killed_when_its_ref_files_and_directories_exceed_the_limit(self) -> None:
        self.write_refs(20)
        self.clock.advance(0.25)
        self.assertNoResult(self.fetched)
        self.write_refs(30)
        self.clock.advance(0.25)
        self.check_refused("old")
        self.assertFalse((self.path / "refs/origin").exists())

    def write_refs(self, count: int) -> None:
        """Write refs as git does: each with a directory."""
        for number in range(count):
            directory = self.path / f"refs/origin/{number}"
            directory.mkdir(parents=True, exist_ok=True)
            self.write(f"refs/origin/{number}/x", 0)
