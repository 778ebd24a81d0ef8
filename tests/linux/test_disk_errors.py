"""`linux.filetree`: which path an error is about, and what helps."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.filetree import (
    add_path_to_errors,
    describe_disk_error,
    is_disk_full,
    mentions_disk_full,
)

PATH = Path("/state/file")


class DiskFaultsTests(SynchronousTestCase):
    def raised(self, *arguments: object) -> OSError:
        """Return such an error as it comes out of a write to the path."""
        error = OSError(*arguments)
        with self.assertRaises(OSError) as caught, add_path_to_errors(PATH):
            raise error
        self.assertIs(caught.exception, error)
        return error

    def test_error_without_path_gets_one(self) -> None:
        named = self.raised(errno.EIO, "Input/output error")
        self.assertEqual((named.errno, named.filename), (errno.EIO, str(PATH)))
        self.assertEqual(self.raised(errno.EACCES, "no", "/other").filename, "/other")
        with add_path_to_errors(PATH):
            pass

    def test_error_of_a_write_gets_its_path(self) -> None:
        with self.assertRaises(OSError) as caught, add_path_to_errors(PATH):
            Path("/dev/full").write_bytes(b"x")
        self.assertEqual(caught.exception.filename, str(PATH))

    def test_quota_counts_as_full_disk(self) -> None:
        for number, full in ((errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EROFS, False)):
            said = os.strerror(number)
            error = self.raised(number, said)
            self.assertEqual(
                (is_disk_full(error), mentions_disk_full(f"sh: {said}!")), (full, full)
            )
            remedy = "; free some disk space" if full else ""
            self.assertEqual(describe_disk_error(error), f"{PATH}: {said}{remedy}")
