"""`linux.child`: one pipe, with a reactor that the test drives."""

from __future__ import annotations

import contextlib
import fcntl
import os

from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.main import CONNECTION_DONE
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from tawebeval.linux.child import PipeReader, open_pipe
from tests.fakes.world import TurnClock

NAME = 1  # the child's own number for the pipe


class FakeReactor(TurnClock):
    """A Clock that knows its readers, and reads when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[PipeReader] = []

    def addReader(self, reader: PipeReader) -> None:
        if reader not in self.readers:
            self.readers.append(reader)

    def removeReader(self, reader: PipeReader) -> None:
        if reader in self.readers:
            self.readers.remove(reader)

    def read(self) -> None:
        """Let each reader read once, as the reactor does when there is something to read."""
        for reader in list(self.readers):
            why = reader.doRead()
            if why is not None:
                self.removeReader(reader)
                reader.connectionLost(Failure(why))


class PipeTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.reactor = FakeReactor()
        self.chunks: list[bytes] = []
        self.ends = 0
        stack = contextlib.ExitStack()
        self.reading, self.writing = open_pipe(stack, stack)
        self.addCleanup(self.close)
        self.reader = self.open_reader()

    def open_reader(self) -> PipeReader:
        return PipeReader(self.reactor, self.reading, NAME, self)

    def on_pipe_data(self, name: int, chunk: bytes) -> None:
        self.assertEqual(name, NAME)
        self.chunks.append(chunk)

    def on_pipe_end(self, name: int) -> None:
        self.assertEqual(name, NAME)
        self.assertTrue(self.reader.is_closed)
        self.ends += 1

    def close(self) -> None:
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1

    def write(self, size: int) -> int:
        fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, 2**18)
        os.set_blocking(self.writing, False)
        return os.write(self.writing, b"x" * size)

    def capacity(self) -> int:
        return fcntl.fcntl(self.reading, fcntl.F_GETPIPE_SZ)

    def fill(self) -> int:
        os.set_blocking(self.writing, False)
        written = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                written += os.write(self.writing, b"x" * 4096)
        return written

    def assert_lost(self, received: bytes) -> None:
        """Hold that just this was read, that the end was told once, and that nothing is left."""
        self.assertEqual((b"".join(self.chunks), self.ends), (received, 1))
        self.assertEqual((self.reactor.readers, self.reactor.getDelayedCalls()), ([], []))
        self.assertEqual(self.reader.fileno(), -1)
        with self.assertRaises(OSError):
            os.fstat(self.reading)


class PipeTests(PipeTestCase):
    def test_pipe_is_read_by_64_kib_until_its_end(self) -> None:
        verifyObject(IReadDescriptor, self.reader)
        self.assertEqual(self.reader.fileno(), self.reading)
        written = self.write(200_000)
        self.reactor.read()
        self.assertEqual(list(map(len, self.chunks)), [2**16])
        while sum(map(len, self.chunks)) < written:
            self.reactor.read()
        self.reactor.read()  # in vain
        self.assertEqual(self.ends, 0)
        self.close()
        self.reactor.read()
        self.assert_lost(b"x" * written)
        self.reader.connectionLost(Failure(CONNECTION_DONE))
        self.assertEqual(self.ends, 1)

    def test_full_pipe_is_enlarged_to_256_kib(self) -> None:
        small = self.capacity()
        self.assertLess(small, 2**18)
        os.write(self.writing, b"x" * (small - 1))
        self.reactor.read()
        self.assertEqual(self.capacity(), small)
        self.fill()
        self.reactor.read()
        self.assertEqual(self.capacity(), 2**18)

    def test_pipe_that_cannot_be_enlarged_is_asked_for_again_when_full(self) -> None:
        refused: list[int] = []
        real = fcntl.fcntl

        def refuse(descriptor: int, command: int, argument: int = 0) -> int:
            if command == fcntl.F_SETPIPE_SZ:
                refused.append(argument)
                raise PermissionError
            return real(descriptor, command, argument)

        self.patch(fcntl, "fcntl", refuse)
        written = self.fill()
        self.reactor.read()
        self.assertEqual((sum(map(len, self.chunks)), refused), (written, [2**18]))
        written += self.fill()
        self.patch(fcntl, "fcntl", real)
        self.reactor.read()
        self.assertEqual((sum(map(len, self.chunks)), self.capacity()), (written, 2**18))

    def test_rest_is_read_and_nothing_that_comes_later(self) -> None:
        written = self.write(150_000)
        self.reader.read_remaining_output()
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self.writing, b"later")
        self.reactor.turn()
        self.assert_lost(b"x" * written)

    def test_rest_of_an_empty_pipe_is_its_end(self) -> None:
        self.reader.read_remaining_output()
        self.reactor.turn()
        self.assert_lost(b"")

    def test_number_of_the_descriptor_is_not_free_in_the_same_turn(self) -> None:
        """epoll_wait(2) may have reported the pipe together with what led to its close."""
        for _ in range(2):
            self.reader.read_remaining_output()
        self.assertEqual((self.reactor.readers, self.ends), ([], 0))
        os.fstat(self.reading)
        self.reactor.turn()
        self.assert_lost(b"")

    def test_closed_reader_does_nothing(self) -> None:
        self.reader.connectionLost(Failure(CONNECTION_DONE))
        self.reader.read_remaining_output()
        self.assert_lost(b"")

    def test_ends_are_not_inherited_and_only_reading_does_not_block(self) -> None:
        for end in (self.reading, self.writing):
            self.assertFalse(os.get_inheritable(end))
        self.assertFalse(os.get_blocking(self.reading))
        self.assertTrue(os.get_blocking(self.writing))
