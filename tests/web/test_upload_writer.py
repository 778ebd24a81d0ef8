"""`web.upload`: batches of a form, their writes, errors of the disk."""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.web.upload import WRITE_BATCH_BYTES, UnwrittenUploads, UploadWriter
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
        self.source: Any = FakeSource()
        self.writer = UploadWriter(self.place / "form", self.source, self.unwritten, self.threads)

    def begin(self) -> None:
        """Have a whole batch on its way to the disk."""
        self.writer.begin_file(FILE)
        self.writer.add_content(HALF)
        self.writer.add_content(HALF)
        self.assertEqual(len(self.threads.waiting), 1)

    def finish(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self.writer.finish())

    def test_small_form_is_written_by_one_call(self) -> None:
        other = Path("submission", "b", "empty")
        self.writer.begin_file(FILE)
        self.writer.add_content(b"one, ")
        self.writer.add_content(b"two")
        self.writer.begin_file(other)
        self.assertEqual((self.threads.waiting, self.writer.has_begun_writing), ([], False))
        self.assertGreater(self.unwritten.size_bytes, 8)
        finished = self.finish()
        self.assertNoResult(finished)
        self.threads.step()
        self.successResultOf(finished)
        self.assertEqual((self.threads.waiting, self.unwritten.size_bytes), ([], 0))
        self.assertEqual((self.writer.directory / FILE).read_bytes(), b"one, two")
        self.assertEqual((self.writer.directory / other).read_bytes(), b"")

    def test_next_batch_is_gathered_while_one_is_written(self) -> None:
        self.begin()
        self.writer.add_content(HALF)
        self.assertFalse(self.source.paused)
        self.writer.add_content(HALF)
        self.assertTrue(self.source.paused)
        self.assertGreater(self.unwritten.size_bytes, 2 * WRITE_BATCH_BYTES)
        self.threads.step()
        self.assertFalse(self.source.paused)
        self.assertEqual(len(self.threads.waiting), 1)
        self.threads.step()
        self.assertEqual((self.threads.waiting, self.unwritten.size_bytes), ([], 0))

    def test_form_is_written_at_once_if_unwritten_bytes_are_over_the_limit(self) -> None:
        self.unwritten.size_bytes = 2**30
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
        self.assertEqual(self.unwritten.size_bytes, 2**30)

    def test_disk_error_refuses_the_form(self) -> None:
        gone: list[str] = []
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
        self.writer.stop_writing(lambda: gone.append("form"))
        self.assertEqual((gone, self.unwritten.size_bytes), (["form"], 0))

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

    def test_cancelled_wait_does_not_stop_the_write(self) -> None:
        self.begin()
        self.finish().addErrback(lambda failure: None).cancel()
        finished = self.finish()
        self.threads.step()
        self.successResultOf(finished)
