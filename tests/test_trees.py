"""`git.trees`: a list of git's, measured while it comes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import EvaluationError
from tawebeval.git.trees import TreeLimits, TreeMeter

LIST = (
    b"040000 tree 0123     -\tbin\0"
    b"100755 blob 0123    12\tbin/a\tb\nc\0"
    b"120000 blob 0123     3\tlink\0"
    b"160000 commit 0123   -\tsub\0"
)


class MeterTests(SynchronousTestCase):
    """What is counted."""

    @given(st.lists(st.integers(0, len(LIST))))
    def test_any_chunks(self, cuts: list[int]) -> None:
        """Entries and bytes are the same, wherever the list is cut."""
        meter = TreeMeter(TreeLimits(4, 15))
        edges = [0, *sorted(cuts), len(LIST)]
        for start, end in pairwise(edges):
            meter.feed(LIST[start:end])
        self.assertEqual((meter.files, meter.size), (4, 15))

    def check(self, limits: TreeLimits, content: bytes, **members: object) -> None:
        """Check which limit is said to be exceeded."""
        error = self.assertRaises(EvaluationError, TreeMeter(limits).feed, content)
        self.assertEqual((error.reason, error.members), ("repository", members))

    def test_limits(self) -> None:
        """What is over a limit is refused, with the limit and its value."""
        self.check(TreeLimits(3, 99), LIST, limit="repositories.tree_files", value=3)
        self.check(TreeLimits(9, 14), LIST, limit="repositories.tree_bytes", value=14)

    def test_path(self) -> None:
        """A path that no system call takes is refused, before it is there as a whole."""
        for end in (b"\0", b""):
            self.check(TreeLimits(9, 9), b"100644 blob 01 1\t" + b"x" * 4097 + end)
