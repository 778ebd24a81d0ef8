"""`slurm.srun_files`: what a later process of the daemon finds of an srun."""

from __future__ import annotations

import errno
import os
import resource
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.keeper_owned_process import REPLAYABLE_STDERR_BYTES
from tawebeval.slurm import srun_files
from tawebeval.slurm.srun_files import FramePosition, SrunFiles

STEP = 64 * 1024


class StoreTests(SynchronousTestCase):
    """Files of one srun."""

    def setUp(self) -> None:
        reading, stdin = os.pipe()
        self.addCleanup(os.close, reading)
        self.store = SrunFiles.create(stdin, "job-1", 1)
        self.addCleanup(self.store.close)

    def load(self) -> SrunFiles:
        """Return what a later process loads."""
        loaded = SrunFiles.load([os.dup(each) for each in self.store.descriptors])
        self.addCleanup(loaded.close)
        return loaded

    def test_new(self) -> None:
        """A later process finds the name, and that nothing was stored."""
        found = self.load()
        self.assertEqual(
            (found.job_name, found.attempt_number, found.job_and_node), ("job-1", 1, None)
        )
        self.assertEqual((found.resume_position, found.stdout.size), (FramePosition(), 0))

    def test_progress(self) -> None:
        """A later process finds job and node, the position and the output."""
        self.store.record_evaluator_start("5", None)
        self.store.write_resume_position(FramePosition(70, 2, 1))
        self.store.stdout.append(0, b"out")
        self.store.stderr.append(0, b"err")
        found = self.load()
        self.assertEqual(found.job_and_node, ("5", None))
        self.assertEqual(found.resume_position, FramePosition(70, 2, 1))
        self.assertEqual((found.stdout.read(1, 9), found.stderr.read(0, 2)), (b"ut", b"er"))

    def test_again(self) -> None:
        """Output that is stored already is left out, whole or in part."""
        output = self.store.stdout
        self.assertEqual(output.append(0, b"abc"), b"abc")
        self.assertEqual(output.append(1, b"bcd"), b"d")
        self.assertEqual(output.append(0, b"ab"), b"")
        self.assertEqual(output.read(0, 9), b"abcd")

    def test_discarded(self) -> None:
        """Memory is given back in steps; offsets stay."""
        output = self.store.stdout
        output.append(0, b"x" * (3 * STEP))
        before = os.fstat(output.descriptor).st_blocks
        output.discard_before(2 * STEP + 5)
        output.discard_before(STEP)
        self.assertEqual(before - os.fstat(output.descriptor).st_blocks, 2 * STEP // 512)
        output.append(3 * STEP, b"y")
        self.assertEqual(output.read(3 * STEP - 1, 9), b"xy")

    def test_full(self) -> None:
        """Bytes that the kernel has taken count once, whatever becomes of the others."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
        output = self.store.stdout
        error = self.assertRaises(OSError, output.append, 0, b"abcdef")
        self.assertEqual((error.errno, output.size), (errno.EFBIG, 4))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.assertEqual(output.append(0, b"abcdef"), b"ef")
        self.assertEqual(output.read(0, 9), b"abcdef")

    def test_not_discarded(self) -> None:
        """Memory that the kernel does not take back is given back later."""
        output = self.store.stdout
        output.append(0, b"x" * (2 * STEP))

        def refuse(*_: int) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        with patch.object(srun_files, "punch_hole", refuse):
            output.discard_before(STEP)
        output.discard_before(2 * STEP)
        self.assertEqual(os.fstat(output.descriptor).st_blocks, 0)

    def test_stderr(self) -> None:
        """Of stderr the last bytes are there again."""
        self.store.stderr.append(0, b"x" * (REPLAYABLE_STDERR_BYTES + 7))
        self.assertEqual(self.store.count_skipped_stderr_bytes(), 7)

    def test_long_names(self) -> None:
        """Names that do not fit are refused."""
        self.assertRaises(ValueError, self.store.record_evaluator_start, "5", "n" * 2000)

    def test_damaged(self) -> None:
        """Descriptors that are not as expected are refused."""
        self.assertRaises(ValueError, SrunFiles.load, self.store.descriptors[:3])
        state = os.memfd_create("state")
        self.addCleanup(os.close, state)
        stdin, _, stdout, stderr = self.store.descriptors
        with self.assertRaises(Exception):  # noqa: B017  (`_UNREADABLE` of `evaluations.restart`)
            SrunFiles.load([stdin, state, stdout, stderr])

    def test_closed(self) -> None:
        """Closing again does nothing."""
        self.store.close()
        self.store.close()
        self.assertEqual(self.store.stdin, -1)
