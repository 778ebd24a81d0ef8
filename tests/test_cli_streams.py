"""`cli.streams`: stdout and stderr that break."""

from __future__ import annotations

import errno
import os
from typing import TextIO

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.streams import Notes, Output, OutputLost


class StreamTests(SynchronousTestCase):
    """Files and pipes."""

    def stream(self, descriptor: int) -> TextIO:
        """Return a stream as stdout is one."""
        stream = open(descriptor, "w", encoding="utf-8")
        self.addCleanup(stream.close)
        return stream

    def closed_pipe(self) -> TextIO:
        """Return one that nobody reads."""
        reader, writer = os.pipe()
        os.close(reader)
        return self.stream(writer)

    def test_full(self) -> None:
        """A full disk is named, once; what comes then, also at the end, goes nowhere."""
        stream = self.stream(os.open("/dev/full", os.O_WRONLY))
        output = Output(stream)
        output.write("a")
        with self.assertRaises(OutputLost) as caught:
            output.flush()
        self.assertEqual(str(caught.exception), f"stdout: {os.strerror(errno.ENOSPC)}")
        self.assertFalse(caught.exception.unread)
        output.write("b" * 100_000)
        output.flush()
        stream.close()  # which writes what is left

    def test_unread(self) -> None:
        """A pipe that nobody reads is told from that, also while it is written to."""
        stream = self.closed_pipe()
        with self.assertRaises(OutputLost) as caught:
            Output(stream).write("a" * 1_000_000)
        self.assertTrue(caught.exception.unread)
        stream.close()

    def test_notes(self) -> None:
        """Stderr may be lost, for nobody could be told."""
        stream = self.closed_pipe()
        notes = Notes(stream)
        notes.write("a")
        notes.write("b")
        stream.close()
