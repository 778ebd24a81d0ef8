"""`slurm.pipe_writer`: a pipe that is full, or closed."""

from __future__ import annotations

import os

from twisted.internet.defer import Deferred

from tawebeval.slurm.pipe_writer import PipeClosed, PipeWriter
from tests.cases.pipes import PipeCase


class WriterTests(PipeCase):
    """The writer waits for the pipe, and tells its end once."""

    def setUp(self) -> None:
        super().setUp()
        self.ends = 0
        self.writer = PipeWriter(self.reactor, self.writing, self.note_end)

    def note_end(self) -> None:
        """Count, and close the pipe."""
        self.ends += 1
        os.close(self.writing)

    def write(self, content: bytes) -> Deferred[None]:
        """Begin to write."""
        return Deferred.fromCoroutine(self.writer.write_and_wait(content))

    def test_large(self) -> None:
        """Pieces of any size wait until the pipe has taken them, others do not."""
        pieces = os.urandom(300_000), b"small", os.urandom(100_000)
        for piece in pieces:
            written = self.write(piece)
            if len(piece) > 2**16:
                self.reactor.write()
                self.assertNoResult(written)
                self.writer.write(b"between")
                self.assertEqual(self.pump(), piece + b"between")
            self.successResultOf(written)
            self.assertEqual(self.pump(), piece if piece == b"small" else b"")

    def test_closed(self) -> None:
        """A write ends with the writer, and no later one begins."""
        written = self.write(bytes(10**6))
        for _ in range(2):
            self.writer.connectionLost(None)  # type: ignore[arg-type]
        self.failureResultOf(written, PipeClosed)
        self.failureResultOf(self.write(b"x"), PipeClosed)
        self.assertEqual((self.reactor.writers, self.ends), (set(), 1))

    def test_no_reader(self) -> None:
        """A pipe that nobody reads any more is a closed one."""
        os.dup2(self.writing, self.reading)
        written = self.write(bytes(10**6))
        self.reactor.write()
        self.failureResultOf(written, PipeClosed)
        self.assertEqual(self.ends, 1)

    def test_close_after_all(self) -> None:
        """`loseConnection` closes once all is written, also what is waited for."""
        written = self.write(bytes(300_000))
        self.writer.loseConnection()
        self.assertEqual(len(self.pump()), 300_000)
        self.successResultOf(written)
        self.pump()
        self.assertEqual((self.reactor.writers, self.ends), (set(), 1))
