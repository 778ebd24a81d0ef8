"""`linux.child`, `linux.keeper_owned_process`: one pipe, with a reactor that the test drives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource

from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.main import CONNECTION_DONE, CONNECTION_LOST
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from tawebeval.linux import child as pipes
from tawebeval.linux.child import PipeReader, open_pipe
from tawebeval.linux.keeper_owned_process import SplicedPipeReader
from tests.fakes.world import TurnClock

NAME = 1  # the child's own number for the pipe


class FakeReactor(TurnClock):
    """A Clock that knows its readers, and reads when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[PipeReader] = []

    def addReader(self, reader: PipeReader) -> None:
        """Take a reader, once."""
        assert reader not in self.readers
        self.readers.append(reader)

    def removeReader(self, reader: PipeReader) -> None:
        """Forget a reader, if it is one."""
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
    """A pipe of which the test holds the writing end."""

    def setUp(self) -> None:
        self.reactor = FakeReactor()
        self.chunks: list[bytes] = []
        self.ends = 0
        stack = contextlib.ExitStack()
        self.reading, self.writing = open_pipe(stack, stack)
        self.addCleanup(self.close)
        self.reader = self.open_reader()

    def open_reader(self) -> PipeReader:
        """Return the reader of the pipe."""
        return PipeReader(self.reactor, self.reading, NAME, self)

    def on_pipe_data(self, name: int, chunk: bytes) -> None:
        """Take what was read."""
        self.assertEqual(name, NAME)
        self.chunks.append(chunk)

    def on_pipe_end(self, name: int) -> None:
        """Count the ends."""
        self.assertEqual(name, NAME)
        self.assertTrue(self.reader.is_closed)
        self.ends += 1

    def close(self) -> None:
        """Close the writing end."""
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1

    def write(self, size: int) -> int:
        """Write so many bytes into a pipe that can hold them; return how many."""
        fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, 2**18)
        os.set_blocking(self.writing, False)
        return os.write(self.writing, b"x" * size)

    def capacity(self) -> int:
        """Return how many bytes the pipe can hold."""
        return fcntl.fcntl(self.reading, fcntl.F_GETPIPE_SZ)

    def fill(self) -> int:
        """Write as much as the pipe takes; return how much that was."""
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
    """What holds for every reader."""

    def test_reads(self) -> None:
        """What is there is read, 64 KiB at a time, until the end, which is told once."""
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

    def test_larger(self) -> None:
        """A pipe that is found full holds 256 KiB from then on, one that is not stays as it is."""
        small = self.capacity()
        self.assertLess(small, 2**18)
        os.write(self.writing, b"x" * (small - 1))
        self.reactor.read()
        self.assertEqual(self.capacity(), small)
        self.fill()
        self.reactor.read()
        self.assertEqual(self.capacity(), 2**18)

    def test_delay(self) -> None:
        """Slow reads add up, by processor time; quick ones do not count."""
        times = [0.0, 0.004, 1.0, 1.5, 2.0, 2.25]
        self.patch(pipes, "thread_time", iter(times).__next__)
        for delay in (0.0, 0.5, 0.75):
            self.write(1)
            self.reactor.read()
            self.assertEqual(self.reader.pipe_read_cpu_seconds, delay)

    def test_no_larger(self) -> None:
        """Where the kernel refuses it is read as it is, and asked for again when it is full."""
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

    def test_pause(self) -> None:
        """Paused it is no reader, resumed it is one again, and never twice."""
        for _ in range(2):
            self.reader.pauseProducing()
            self.assertEqual(self.reactor.readers, [])
        for _ in range(2):
            self.reader.resumeProducing()
            self.assertEqual(self.reactor.readers, [self.reader])

    def test_the_rest(self) -> None:
        """Of what it holds all is read, of what comes later nothing, and nobody is waited for."""
        written = self.write(150_000)
        self.reader.read_remaining_output()
        self.assertEqual((self.reactor.readers, self.chunks), ([], []))
        self.reactor.turn()
        with contextlib.suppress(BlockingIOError):
            os.write(self.writing, b"later" * 10_000)
        self.reactor.turn(10)
        self.assert_lost(b"x" * written)

    def test_nothing_left(self) -> None:
        """A pipe with nothing in it is closed at once."""
        self.reader.read_remaining_output()
        self.reactor.turn(2)
        self.assert_lost(b"")

    def test_nothing_left_while_paused(self) -> None:
        """So is one that is paused, at once or when the last of it has been read."""
        self.reader.pauseProducing()
        self.reader.read_remaining_output()
        self.reactor.turn(2)
        self.assert_lost(b"")

    def test_the_last_while_paused(self) -> None:
        """Who pauses it when the last of it has been read is told of its end all the same."""
        os.write(self.writing, b"x")
        self.reader.read_remaining_output()
        self.reactor.turn()
        self.reader.pauseProducing()
        self.reactor.turn()
        self.assert_lost(b"x")

    def test_the_rest_at_the_end(self) -> None:
        """A pipe that is at its end anyway is read to that end."""
        os.write(self.writing, b"x")
        self.close()
        self.reader.read_remaining_output()
        self.reactor.turn(3)
        self.assert_lost(b"x")

    def test_bounced_while_the_rest_is_read(self) -> None:
        """Pauses within a turn do not let more than one chunk be read in each turn."""
        written = self.write(200_000)
        self.reader.read_remaining_output()
        for count in range(1, 4):
            for _ in range(3):
                self.reader.pauseProducing()
                self.reader.resumeProducing()
            self.reactor.turn()
            self.assertEqual(len(self.chunks), count)
        self.reactor.turn(5)
        self.assert_lost(b"x" * written)

    def test_the_rest_while_paused(self) -> None:
        """The rest waits while it is paused, before or in the middle, and is whole in the end."""
        written = self.write(150_000)
        self.reader.pauseProducing()
        self.reader.read_remaining_output()
        self.reactor.turn(5)
        self.assertEqual((self.chunks, self.ends), ([], 0))
        self.reader.resumeProducing()
        self.reactor.turn()
        self.reader.pauseProducing()
        got = sum(map(len, self.chunks))
        self.reactor.turn(5)
        self.assertEqual((sum(map(len, self.chunks)), self.ends), (got, 0))
        self.reader.resumeProducing()
        self.reactor.turn(10)
        self.assert_lost(b"x" * written)

    def test_closed(self) -> None:
        """On one that is closed nothing has an effect."""
        self.reader.connectionLost(Failure(CONNECTION_DONE))
        self.reader.pauseProducing()
        self.reader.resumeProducing()
        self.reader.read_remaining_output()
        self.reactor.turn(2)
        self.assert_lost(b"")

    def test_ends(self) -> None:
        """Neither end is inherited, and only reading does not block."""
        for end in (self.reading, self.writing):
            self.assertFalse(os.get_inheritable(end))
        self.assertFalse(os.get_blocking(self.reading))
        self.assertTrue(os.get_blocking(self.writing))


class SplicedCase(PipeTestCase):
    """A pipe whose bytes go to a memfd first, which has `kept` already."""

    kept = b""
    begin = 0

    def open_reader(self) -> PipeReader:
        """Return the reader of the pipe."""
        self.memfd = os.memfd_create("output", os.MFD_CLOEXEC)
        self.addCleanup(os.close, self.memfd)
        os.write(self.memfd, self.kept)
        self.spliced = SplicedPipeReader(
            self.reactor, self.reading, NAME, self, self.memfd, self.begin
        )
        self.addCleanup(self.assert_kept)
        return self.spliced

    def assert_kept(self) -> None:
        """Hold that what was delivered lies in the memfd, at its place."""
        delivered = b"".join(self.chunks)
        self.assertEqual(self.spliced.delivered_bytes, self.begin + len(delivered))
        self.assertEqual(os.pread(self.memfd, len(delivered), self.begin), delivered)


class SplicedPipeTests(SplicedCase, PipeTests):
    """Such a pipe is read as any other one."""

    def test_goes_on(self) -> None:
        """When the reactor stops, nothing is closed and no end is told: the next one goes on."""
        self.write(150_000)
        self.reactor.read()
        self.reader.connectionLost(Failure(CONNECTION_LOST))
        self.assertEqual((self.ends, self.reader.is_closed), (0, False))
        # What the dead process had moved, but not delivered.
        os.splice(self.reading, self.memfd, 1000, offset_dst=2**16)
        begin = 10_000
        heard, self.chunks = b"".join(self.chunks), []
        following = FakeReactor()
        self.reader = SplicedPipeReader(following, self.reading, NAME, self, self.memfd, begin)
        following.turn(2)
        self.close()
        for _ in range(3):
            following.read()
        self.assertEqual((heard[:begin] + b"".join(self.chunks), self.ends), (b"x" * 150_000, 1))
        self.chunks = [heard]  # of the first reader

    def test_full_memfd(self) -> None:
        """Where the memfd takes no more, what it took is delivered, and an error tells the end."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        self.write(200_000)
        for _ in range(3):
            self.reactor.read()
        assert self.spliced.write_error is not None
        self.assertEqual(self.spliced.write_error.errno, errno.EFBIG)
        self.assert_lost(b"x" * 100_000)

    def test_full_memfd_at_the_end(self) -> None:
        """So does it where only the rest is read."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        self.write(200_000)
        self.reader.read_remaining_output()
        self.reactor.turn(10)
        self.assertIsNotNone(self.spliced.write_error)
        self.assert_lost(b"x" * 100_000)


class KeptOutputTests(SplicedCase):
    """A memfd with bytes that were not delivered yet."""

    begin = 5
    kept = b"knownkept" + b"k" * 150_000

    def test_kept_first(self) -> None:
        """They come first, a chunk in each turn, and then those of the pipe."""
        written = self.write(10)
        self.assertEqual(self.reactor.readers, [])
        for count in range(4):
            self.assertEqual(len(self.chunks), count)
            self.reactor.turn()
        self.assertEqual(b"".join(self.chunks), self.kept[self.begin :])
        self.assertLessEqual(max(map(len, self.chunks)), 2**16)
        self.assertEqual(self.reactor.getDelayedCalls(), [])
        self.reactor.read()
        self.assertEqual(self.chunks[3:], [b"x" * written])
        self.close()
        self.reactor.read()
        self.assert_lost(self.kept[self.begin :] + b"x" * written)

    def test_pause(self) -> None:
        """Paused, they wait, and the pipe behind them; resumed, all comes in order."""
        written = self.write(10)
        self.reader.pauseProducing()
        self.reactor.turn(5)
        self.assertEqual((self.chunks, self.reactor.readers), ([], []))
        for count in range(1, 4):
            self.reader.resumeProducing()
            self.reactor.turn()
            self.reader.pauseProducing()
            self.reactor.turn(5)
            self.assertEqual((len(self.chunks), self.reactor.readers), (count, []))
        self.reader.resumeProducing()
        self.close()
        self.reactor.read()
        self.reactor.read()
        self.assert_lost(self.kept[self.begin :] + b"x" * written)

    def test_the_rest(self) -> None:
        """They belong to the rest, and what comes later does not."""
        written = self.write(100_000)
        self.reactor.turn()
        self.reader.read_remaining_output()
        self.write(10)
        self.reader.read_remaining_output()  # twice is once, but counts anew
        self.write(10)
        self.reactor.turn(10)
        self.assert_lost(self.kept[self.begin :] + b"x" * (written + 10))

    def test_the_rest_while_paused(self) -> None:
        """The rest waits while it is paused."""
        written = self.write(10)
        self.reader.pauseProducing()
        self.reader.read_remaining_output()
        self.reactor.turn(5)
        self.assertEqual(self.chunks, [])
        self.reader.resumeProducing()
        self.reactor.turn(10)
        self.assert_lost(self.kept[self.begin :] + b"x" * written)
