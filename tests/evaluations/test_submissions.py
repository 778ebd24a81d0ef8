"""`evaluations.submissions`: batches, writes, errors of the disk; what an answer shows of files."""

from __future__ import annotations

import errno
import os
import resource
from base64 import b64decode
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.evaluations.submissions import (
    MAX_LISTED_CONTENT_BYTES,
    MAX_LISTED_FILES,
    WRITE_BATCH_BYTES,
    UnwrittenUploads,
    UploadWriter,
    read_submitted_files,
)
from tests.fakes.uploads import FakeSource
from tests.fakes.world import SlowThreads

FILE = Path("submission", "a", "file")
HALF = b"x" * (WRITE_BATCH_BYTES // 2)


class WriterTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.place = Path(self.mktemp()).absolute()
        self.place.mkdir()
        self.threads: Any = SlowThreads()
        self.unwritten = UnwrittenUploads()
        self.source = FakeSource()
        self.writer = self.make("form")
        self.gone: list[str] = []

    def make(self, name: str) -> UploadWriter:
        return UploadWriter(self.place / name, self.source, self.unwritten, self.threads)

    def begin(self) -> None:
        """Have a whole batch on its way to the disk."""
        self.writer.begin_file(FILE)
        self.writer.add_content(HALF)
        self.writer.add_content(HALF)
        self.assertEqual(len(self.threads.waiting), 1)

    def finish(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self.writer.finish())

    def abandon(self) -> None:
        self.writer.stop_writing(lambda: self.gone.append("form"))

    def test_small_form_is_written_by_one_call(self) -> None:
        other = Path("submission", "b", "empty")
        self.writer.begin_file(FILE)
        self.writer.add_content(b"one, ")
        self.writer.add_content(b"two")
        self.writer.begin_file(other)
        self.assertEqual((self.threads.waiting, self.writer.has_begun_writing), ([], False))
        self.assertGreater(self.unwritten.size, 8)
        finished = self.finish()
        self.assertNoResult(finished)
        self.threads.step()
        self.successResultOf(finished)
        self.assertEqual((self.threads.waiting, self.unwritten.size), ([], 0))
        self.assertEqual((self.writer.directory / FILE).read_bytes(), b"one, two")
        self.assertEqual((self.writer.directory / other).read_bytes(), b"")

    def test_large_form_is_written_as_it_comes(self) -> None:
        sent = [bytes([number]) * (WRITE_BATCH_BYTES // 3) for number in range(20)]
        self.writer.begin_file(FILE)
        for content in sent[:-1]:
            self.writer.add_content(content)
            if self.source.paused:
                self.assertEqual(len(self.threads.waiting), 1)
                self.threads.step()
        self.writer.begin_file(FILE.parent.with_name("b") / "last")
        self.writer.add_content(sent[-1])
        finished = self.finish()
        self.threads.finish()
        self.successResultOf(finished)
        self.assertEqual((self.writer.directory / FILE).read_bytes(), b"".join(sent[:-1]))
        self.assertEqual((self.writer.directory / "submission/b/last").read_bytes(), sent[-1])
        self.assertEqual(self.unwritten.size, 0)

    def test_next_batch_is_gathered_while_one_is_written(self) -> None:
        self.begin()
        self.writer.add_content(HALF)
        self.assertFalse(self.source.paused)
        self.writer.add_content(HALF)
        self.assertTrue(self.source.paused)
        self.assertGreater(self.unwritten.size, 2 * WRITE_BATCH_BYTES)
        self.threads.step()
        self.assertFalse(self.source.paused)
        self.assertEqual(len(self.threads.waiting), 1)
        self.threads.step()
        self.assertEqual((self.threads.waiting, self.unwritten.size), ([], 0))

    def test_crowded_memory_makes_forms_be_written_at_once(self) -> None:
        self.unwritten.size = 2**30
        self.writer.begin_file(FILE)
        self.writer.add_content(b"one")
        self.assertEqual(len(self.threads.waiting), 1)
        self.assertFalse(self.source.paused)
        self.writer.add_content(b"two")
        self.assertTrue(self.source.paused)
        self.threads.step()
        self.assertEqual((self.writer.directory / FILE).read_bytes(), b"one")
        self.threads.step()
        self.assertEqual((self.writer.directory / FILE).read_bytes(), b"onetwo")
        self.assertEqual(self.unwritten.size, 2**30)

    def test_disk_error_refuses_the_form(self) -> None:
        self.begin()
        self.writer.add_content(HALF)
        self.place.rmdir()
        self.threads.step()
        (error,) = self.source.refused
        assert isinstance(error, FileNotFoundError)
        self.assertEqual(error.filename, str(self.writer.directory))
        self.writer.add_content(HALF)
        self.writer.add_content(HALF)
        self.assertEqual(self.threads.waiting, [])
        self.abandon()
        self.assertEqual((self.gone, self.unwritten.size), (["form"], 0))

    def test_disk_error_at_the_end_is_told_once(self) -> None:
        self.begin()
        self.writer.add_content(HALF)
        finished = self.finish()
        self.place.rmdir()
        self.threads.step()
        self.failureResultOf(finished, FileNotFoundError)
        self.assertEqual((self.source.refused, self.threads.waiting), ([], []))

    def test_partial_write_is_an_error_that_names_the_file(self) -> None:
        self.begin()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            self.threads.step()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        (error,) = self.source.refused
        assert isinstance(error, OSError)
        self.assertEqual(error.errno, errno.EFBIG)
        self.assertEqual(error.filename, str(self.writer.directory / FILE))
        self.assertEqual((self.writer.directory / FILE).stat().st_size, 1000)

    def test_abandoned_form_is_not_written(self) -> None:
        self.writer.begin_file(FILE)
        self.writer.add_content(HALF)
        self.abandon()
        self.assertEqual((self.gone, self.unwritten.size), (["form"], 0))
        self.writer, self.gone = self.make("other"), []
        self.begin()
        self.writer.add_content(HALF)
        self.abandon()
        self.assertEqual((self.gone, self.unwritten.size), ([], WRITE_BATCH_BYTES + 1024))
        self.threads.step()
        self.assertEqual((self.gone, self.unwritten.size), (["form"], 0))
        self.assertEqual(self.threads.waiting, [])

    def test_disk_error_of_an_abandoned_form_refuses_nothing(self) -> None:
        self.begin()
        self.abandon()
        self.place.rmdir()
        self.threads.step()
        self.assertEqual((self.gone, self.source.refused), (["form"], []))

    def test_write_goes_on_without_a_waiter(self) -> None:
        self.begin()
        self.finish().addErrback(lambda failure: None).cancel()
        finished = self.finish()
        self.threads.step()
        self.successResultOf(finished)


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

    def test_file_beyond_the_answer_limit_is_only_named(self) -> None:
        self.add("a", b"x" * (MAX_LISTED_CONTENT_BYTES - 1))
        self.add("b", b"xy")
        self.add("c", b"z")
        found = read_submitted_files([self.root])
        self.assertEqual(["text" in one for one in found], [True, False, True])
        self.assertEqual(found[1], {"field": "b", "filename": "a.txt", "size": 2})
        for number in range(MAX_LISTED_FILES):
            self.add(f"d{number:04}", b"")
        self.assertEqual(len(read_submitted_files([self.root])), MAX_LISTED_FILES)

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
