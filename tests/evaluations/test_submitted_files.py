"""`evaluations.reading`: what an answer shows of submitted files."""

from __future__ import annotations

import os
from base64 import b64decode
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.evaluations.reading import (
    MAX_SHOWN_SUBMISSION_BYTES,
    MAX_SHOWN_SUBMISSION_FILES,
    read_submitted_files,
)


class SubmittedFileTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()

    def add(self, field: str, content: bytes, filename: str = "a.txt") -> Path:
        path = self.root / field / filename
        path.parent.mkdir()
        path.write_bytes(content)
        return path

    def test_utf_8_file_is_shown_as_text(self) -> None:
        texts = (b"", b"print()\n", b"\tb\r\n\x0c", "\u00e0\u2028".encode())
        others = (b"\xff", b"a\0", b"\x1b[0m")
        for number, content in enumerate((*texts, *others)):
            self.add(f"f{number}", content)
        found = read_submitted_files([self.root])
        self.assertEqual([one["field"] for one in found], [f"f{n}" for n in range(7)])
        self.assertEqual([one["text"].encode() for one in found[:4]], list(texts))
        self.assertEqual([b64decode(one["base64"]) for one in found[4:]], list(others))
        for one, content in zip(found, (*texts, *others), strict=True):
            self.assertEqual((one["filename"], one["size"]), ("a.txt", len(content)))
            self.assertEqual(len({"text", "base64"} & set(one)), 1)

    def test_file_over_the_response_limit_is_listed_without_its_content(self) -> None:
        self.add("a", b"x" * (MAX_SHOWN_SUBMISSION_BYTES - 1))
        self.add("b", b"xy")
        self.add("c", b"z")
        found = read_submitted_files([self.root])
        self.assertEqual(["text" in one for one in found], [True, False, True])
        self.assertEqual(found[1], {"field": "b", "filename": "a.txt", "size": 2})
        for number in range(MAX_SHOWN_SUBMISSION_FILES):
            self.add(f"d{number:04}", b"")
        self.assertEqual(len(read_submitted_files([self.root])), MAX_SHOWN_SUBMISSION_FILES)

    def test_files_are_read_from_the_first_existing_directory(self) -> None:
        self.add("a", b"1")
        missing = self.root / "missing"
        for directories in ([missing, self.root], [self.root, missing], [self.root]):
            self.assertEqual(read_submitted_files(directories)[0]["text"], "1")
        self.assertRaises(FileNotFoundError, read_submitted_files, [missing, missing])

    def test_replaced_files_are_not_read(self) -> None:
        secret = Path(self.mktemp()).absolute()
        secret.mkdir()
        (secret / "a.txt").write_text("secret")
        (self.root / "linked").symlink_to(secret)
        self.assertEqual(read_submitted_files([self.root]), [])
        path = self.add("a", b"")
        path.unlink()
        path.symlink_to(secret / "a.txt")
        self.assertRaises(FileNotFoundError, read_submitted_files, [self.root])
        path.unlink()
        os.mkfifo(path)
        self.assertRaises(FileNotFoundError, read_submitted_files, [self.root])
