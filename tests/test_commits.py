"""`git.commits`: what git prints of a commit, read while it comes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.checkout import Commit
from tawebeval.errors import EvaluationError
from tawebeval.git.commits import Look, look_at
from tawebeval.git.trees import TreeLimits
from tests.fakes import OID, TREE

LINE = f"{OID} {TREE}\n".encode()
LIST = b"100755 blob 0123    12\ta\0" + b"120000 blob 0123     3\tlink\0"
LIMITS = TreeLimits(2, 15)


class LookTests(SynchronousTestCase):
    """What is found of a commit."""

    def look(self, *chunks: bytes, before: int = 0) -> Look:
        """Return what has been fed with these."""
        look = Look(OID, LIMITS, before=before)
        for chunk in chunks:
            look.feed(chunk)
        return look

    @given(st.lists(st.integers(0, 200)), st.integers(0, 2))
    def test_any_chunks(self, cuts: list[int], before: int) -> None:
        """The commit, its tree and the size of that, wherever it is cut, whatever precedes it."""
        printed = b"\0" * before + LINE + b"\0" + LIST
        edges = [0, *sorted(min(cut, len(printed)) for cut in cuts), len(printed)]
        look = self.look(*(printed[start:end] for start, end in pairwise(edges)), before=before)
        self.assertEqual(look.commit, Commit(OID, TREE, 2, 15))

    def test_begun(self) -> None:
        """The end of what precedes it is the beginning of the look."""
        self.assertTrue(self.look().has_begun())
        self.assertFalse(self.look(before=1).has_begun())
        self.assertFalse(self.look(b"said", before=1).has_begun())
        self.assertTrue(self.look(b"said\0", before=1).has_begun())
        self.assertFalse(self.look(b"\0", before=2).has_begun())

    def test_not_there(self) -> None:
        """Where git does not come to list a tree there is no commit."""
        for chunks, before in (((), 0), ((LINE,), 0), ((b"\0", LINE), 1), ((b"\0",), 0)):
            self.assertIsNone(self.look(*chunks, before=before).commit)

    def test_another(self) -> None:
        """Nor where it shows another one, as for a tag, or says something else."""
        for line in (
            LINE.replace(b"c", b"d"),
            LINE.strip(),
            b"x" + LINE,
            LINE + b"x",
            f"{OID} ../{TREE}\n".encode(),
            f"{OID} {TREE[1:]}\xe9\n".encode(),
        ):
            self.assertIsNone(self.look(line + b"\0" + LIST).commit, line)

    def test_too_large(self) -> None:
        """A tree over the limits is refused while it is listed."""
        look = self.look(LINE + b"\0", LIST)
        self.assertRaises(EvaluationError, look.feed, b"040000 tree 0123 -\tb\0")

    def test_endless(self) -> None:
        """Of a line that does not end no more is kept than lines have, and it is none."""
        look = self.look(*[b"x" * 1000] * 1000)
        self.assertLess(sum(map(len, look._said)), 2000)
        look.feed(b"\0")
        self.assertIsNone(look.commit)

    def test_commands(self) -> None:
        """Both are about the commit, which is no path and no option for git."""
        log, ls_tree = look_at(OID)
        self.assertEqual(log[-2:], (OID, "--"))
        self.assertEqual(ls_tree[-1], OID)
