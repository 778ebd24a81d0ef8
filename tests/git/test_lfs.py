"""`git.lfs`: pointers in trees, which strangers have written."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import EvaluationFailure
from tawebeval.git.lfs import LfsPointer, find_lfs_pointers, replace_lfs_pointers

START = "version https://git-lfs.github.com/spec/v1\n"
OID = "4" * 64
POINTER = f"{START}oid sha256:{OID}\nsize 7\n"


class PointerTests(SynchronousTestCase):
    """A tree with a link, an executable file and a pointer."""

    def setUp(self) -> None:
        folder = Path(self.mktemp()).resolve()
        self.tree, self.objects = folder / "tree", folder / "objects"
        (self.tree / "deep").mkdir(parents=True)
        self.objects.mkdir()
        (self.tree / "deep/run").write_text(POINTER)
        (self.tree / "deep/run").chmod(0o755)
        (self.tree / "other").write_text("x" * 200)
        os.symlink("deep/run", self.tree / "link")
        (self.objects / OID).write_text("content")

    def test_found(self) -> None:
        """Pointers are found; links, large files and other texts are none."""
        (self.tree / "large").write_text(POINTER + "x" * 2000)
        (self.tree / "text").write_text("version https://example.org/spec/v1\n" * 3)
        expected = [LfsPointer("deep/run", OID, 7, len(POINTER))]
        self.assertEqual(find_lfs_pointers(self.tree), expected)

    def test_malformed(self) -> None:
        """What only begins like a pointer is refused, with its path."""
        for rest in (
            f"oid sha256:{OID}\nsize -7\n",
            f"oid sha256:{OID}\nsize {'9' * 16}\n",
            "oid sha256:../../x\nsize 7\n",
            f"ext-0-x sha256:{OID}\noid sha256:{OID}\nsize 7\n",
            f"oid sha256:{OID}\nsize 7\nmore\n",
        ):
            (self.tree / "deep/run").write_text(START + rest)
            error = self.assertRaises(EvaluationFailure, find_lfs_pointers, self.tree)
            self.assertEqual(
                (error.reason, error.extra_members["path"]), ("repository", "deep/run")
            )

    def test_two_sizes(self) -> None:
        """Pointers that claim two sizes of one content are refused, with the path of one."""
        (self.tree / "deep/same").write_text(POINTER)
        self.assertEqual(len(find_lfs_pointers(self.tree)), 2)
        (self.tree / "deep/same").write_text(POINTER.replace("size 7", "size 1"))
        error = self.assertRaises(EvaluationFailure, find_lfs_pointers, self.tree)
        self.assertIn(error.extra_members["path"], ("deep/run", "deep/same"))

    def test_filled(self) -> None:
        """The content takes the place of the pointer, with the pointer's mode."""
        self.assertIs(
            replace_lfs_pointers(self.tree, self.objects, 7 + 200 + len("deep/run")), None
        )
        self.assertEqual((self.tree / "deep/run").read_text(), "content")
        self.assertEqual((self.tree / "deep/run").stat().st_mode & 0o777, 0o755)
        self.assertEqual(find_lfs_pointers(self.tree), [])

    def test_not_filled(self) -> None:
        """Nothing is replaced if a file is missing, or the tree would have another size."""
        for size, oid in ((7 + 200 + 8, "5" * 64), (7 + 200 + 7, OID)):
            (self.tree / "deep/run").write_text(POINTER.replace(OID, oid))
            self.assertEqual(replace_lfs_pointers(self.tree, self.objects, size), "deep/run")
            self.assertEqual(len(find_lfs_pointers(self.tree)), 1)

    def test_other_size(self) -> None:
        """A file that has not the size in its pointer, such as a cut one, replaces nothing."""
        for content in ("cut", "much more content"):
            (self.objects / OID).write_text(content)
            self.assertEqual(replace_lfs_pointers(self.tree, self.objects, 7 + 200 + 8), "deep/run")
            self.assertEqual(len(find_lfs_pointers(self.tree)), 1)
