"""`linux.kernel_files`: files in memory."""

from __future__ import annotations

import errno
import os

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.kernel_files import make_sealed_memfd


class SealedFileTests(SynchronousTestCase):
    def test_sealed_memfd_cannot_be_written_or_resized(self) -> None:
        sealed = make_sealed_memfd("it", b"content")
        self.addCleanup(os.close, sealed)
        again = os.open(f"/proc/self/fd/{sealed}", os.O_RDWR)
        self.addCleanup(os.close, again)
        for size in (0, 100):
            self.assertRaises(PermissionError, os.ftruncate, again, size)
        self.assertRaises(PermissionError, os.write, again, b"x")
        self.assertEqual(os.read(sealed, 100), b"content")

    def test_memfd_is_closed_if_the_write_fails(self) -> None:
        def fail(*_: object) -> int:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        before = os.listdir("/proc/self/fd")
        self.patch(os, "pwrite", fail)
        self.assertRaises(OSError, make_sealed_memfd, "it", b"content")
        self.assertEqual(os.listdir("/proc/self/fd"), before)
