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

    def test_pointers_are_found_among_links_large_files_and_texts(self) -> None:
        (self.tree / "large").write_text(POINTER + "x" * 2000)
        (self.tree / "text").write_text("version https://example.org/spec/v1\n" * 3)
        expected = [LfsPointer("deep/run", OID, 7, len(POINTER))]
        pointers, size = find_lfs_pointers(self.tree)
        self.assertEqual(pointers, expected)
        self.assertEqual(
            size, sum(path.lstat().st_size for path in self.tree.rglob("*") if path.name != "deep")
        )

    def test_malformed_lfs_pointer_is_refused_with_its_path(self) -> None:
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

    def test_pointers_that_claim_two_sizes_of_one_content_are_refused(self) -> None:
        (self.tree / "deep/same").write_text(POINTER)
        self.assertEqual(len(find_lfs_pointers(self.tree)[0]), 2)
        (self.tree / "deep/same").write_text(POINTER.replace("size 7", "size 1"))
        error = self.assertRaises(EvaluationFailure, find_lfs_pointers, self.tree)
        self.assertIn(error.extra_members["path"], ("deep/run", "deep/same"))

    def test_lfs_pointer_is_replaced_by_its_content(self) -> None:
        self.assertIs(
            replace_lfs_pointers(self.tree, self.objects, 7 + 200 + len("deep/run")), None
        )
        self.assertEqual((self.tree / "deep/run").read_text(), "content")
        self.assertEqual((self.tree / "deep/run").stat().st_mode & 0o777, 0o755)
        self.assertEqual(find_lfs_pointers(self.tree)[0], [])

    def test_nothing_is_replaced_if_a_file_is_missing_or_of_another_size(self) -> None:
        whole = 7 + 200 + len("deep/run")
        for size, oid, content in (
            (whole, "5" * 64, "content"),
            (whole - 1, OID, "content"),
            (whole, OID, "cut"),
            (whole, OID, "much more content"),
        ):
            (self.objects / OID).write_text(content)
            (self.tree / "deep/run").write_text(POINTER.replace(OID, oid))
            self.assertEqual(replace_lfs_pointers(self.tree, self.objects, size), "deep/run")
            self.assertEqual(len(find_lfs_pointers(self.tree)[0]), 1)
