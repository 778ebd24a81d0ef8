"""`slurm.attempt_store`: what a later process of the daemon finds of an srun."""

from __future__ import annotations

import errno
import os
import resource
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.kept_process import KEPT_STDERR_BYTES
from tawebeval.slurm import attempt_store
from tawebeval.slurm.attempt_store import AttemptStore, FramePosition

STEP = 64 * 1024


class StoreTests(SynchronousTestCase):
    """Files of one srun."""

    def setUp(self) -> None:
        reading, orders = os.pipe()
        self.addCleanup(os.close, reading)
        self.store = AttemptStore.create(orders, "job-1", 1)
        self.addCleanup(self.store.close)

    def load(self) -> AttemptStore:
        """Return what a later process loads."""
        loaded = AttemptStore.load([os.dup(each) for each in self.store.descriptors])
        self.addCleanup(loaded.close)
        return loaded

    def test_new(self) -> None:
        """A later process finds the name, and that nothing was stored."""
        found = self.load()
        self.assertEqual((found.name, found.number, found.begun), ("job-1", 1, None))
        self.assertEqual((found.position, found.output.size), (FramePosition(), 0))

    def test_progress(self) -> None:
        """A later process finds job and node, the position and the output."""
        self.store.write_begun("5", None)
        self.store.write_position(FramePosition(70, 2, 1))
        self.store.output.append(0, b"out")
        self.store.errors.append(0, b"err")
        found = self.load()
        self.assertEqual(found.begun, ("5", None))
        self.assertEqual(found.position, FramePosition(70, 2, 1))
        self.assertEqual((found.output.read(1, 9), found.errors.read(0, 2)), (b"ut", b"er"))

    def test_again(self) -> None:
        """Output that is stored already is left out, whole or in part."""
        output = self.store.output
        self.assertEqual(output.append(0, b"abc"), b"abc")
        self.assertEqual(output.append(1, b"bcd"), b"d")
        self.assertEqual(output.append(0, b"ab"), b"")
        self.assertEqual(output.read(0, 9), b"abcd")

    def test_discarded(self) -> None:
        """Memory is given back in steps; offsets stay."""
        output = self.store.output
        output.append(0, b"x" * (3 * STEP))
        before = os.fstat(output.descriptor).st_blocks
        output.discard(2 * STEP + 5)
        output.discard(STEP)
        self.assertEqual(before - os.fstat(output.descriptor).st_blocks, 2 * STEP // 512)
        output.append(3 * STEP, b"y")
        self.assertEqual(output.read(3 * STEP - 1, 9), b"xy")

    def test_full(self) -> None:
        """Bytes that the kernel has taken count once, whatever becomes of the others."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
        output = self.store.output
        error = self.assertRaises(OSError, output.append, 0, b"abcdef")
        self.assertEqual((error.errno, output.size), (errno.EFBIG, 4))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.assertEqual(output.append(0, b"abcdef"), b"ef")
        self.assertEqual(output.read(0, 9), b"abcdef")

    def test_not_discarded(self) -> None:
        """Memory that the kernel does not take back is given back later."""
        output = self.store.output
        output.append(0, b"x" * (2 * STEP))

        def refuse(*_: int) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        with patch.object(attempt_store, "punch_hole", refuse):
            output.discard(STEP)
        output.discard(2 * STEP)
        self.assertEqual(os.fstat(output.descriptor).st_blocks, 0)

    def test_stderr(self) -> None:
        """Of stderr the last bytes are there again."""
        self.store.errors.append(0, b"x" * (KEPT_STDERR_BYTES + 7))
        self.assertEqual(self.store.count_missing_stderr(), 7)

    def test_long_names(self) -> None:
        """Names that do not fit are refused."""
        self.assertRaises(ValueError, self.store.write_begun, "5", "n" * 2000)

    def test_damaged(self) -> None:
        """Descriptors that are not as expected are refused."""
        self.assertRaises(ValueError, AttemptStore.load, self.store.descriptors[:3])
        state = os.memfd_create("state")
        self.addCleanup(os.close, state)
        orders, _, output, errors = self.store.descriptors
        with self.assertRaises(Exception):  # noqa: B017  (`_UNREADABLE` of `evaluations.restart`)
            AttemptStore.load([orders, state, output, errors])

    def test_closed(self) -> None:
        """Closing again does nothing."""
        self.store.close()
        self.store.close()
        self.assertEqual(self.store.orders, -1)
