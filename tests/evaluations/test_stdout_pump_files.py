"""`evaluations.stdout_pump`: files that an evaluator names, read while its stdout waits."""

from __future__ import annotations

from tawebeval.core.fileblock import PrintedFile
from tawebeval.evaluations.stdout_pump import PARTIAL_LINE_DELAY
from tawebeval.sandbox.workspace import FileRefused
from tests.cases.evaluations import PumpTestCase
from tests.cases.strategies import MARKERS, ErrorEvent, Event, join_text


class FilesTestCase(PumpTestCase):
    """An evaluator that names files by a path."""

    capacity = 5000

    def block(self, path: bytes) -> bytes:
        """Return a block that names a file."""
        lines = (MARKERS.file_begin, b"X-SEGI-As: path", b"", path, MARKERS.file_end, b"")
        return b"\n".join(lines)

    def print(self, stdout: bytes) -> None:
        """Print, and let a turn pass in which a file may be asked for."""
        self.pump.feed(stdout)
        self.turn()

    def supply(self, content: bytes) -> None:
        """Supply the file that is wanted now, and let a turn pass."""
        _, reading = self.files[-1]
        reading.callback(content)
        self.turn()

    def contents(self) -> list[Event]:
        """Return the events in the ring, of files only the contents."""
        return [e.content if isinstance(e, PrintedFile) else e for e in self.events()]


class FileTests(FilesTestCase):
    """Files for which there is room."""

    def test_order(self) -> None:
        """What is printed after the block waits for the file: events keep their order."""
        self.print(b"before\n" + self.block(b"out/a.txt") + b"after\n")
        self.assertEqual([wanted.path for wanted, _ in self.files], ["out/a.txt"])
        self.assertEqual(self.events(), ["before"])
        self.print(b"more\n")
        self.clock.advance(10)
        self.assertEqual(self.events(), ["before"])
        self.supply(b"content")
        file = PrintedFile("a.txt", "application/octet-stream", b"content")
        self.assertEqual(self.events(), ["before", file, "after", "\n", "more"])
        self.assertEqual(self.changes, 2)
        self.end()

    def test_pause(self) -> None:
        """Meanwhile the producer is paused, but the run's clock is not stopped."""
        self.print(self.block(b"a") + b"rest")
        self.assertEqual(self.producer.calls, ["pause"])
        self.print(b" of it")
        self.supply(b"")
        self.assertEqual((self.producer.calls, self.held), (["pause", "resume"], []))
        self.clock.advance(PARTIAL_LINE_DELAY)
        self.assertEqual(join_text(self.events())[1:], ["rest of it"])

    def test_several(self) -> None:
        """Files are read one after the other, however close their blocks stand."""
        self.print(self.block(b"a") + self.block(b"b") + b"text\n" + self.block(b"c"))
        for name in "abc":
            self.assertEqual(self.files[-1][0].path, name)
            self.assertTrue(self.producer.paused)
            self.supply(name.encode())
        self.assertFalse(self.producer.paused)
        self.end()
        self.assertEqual(self.contents(), [b"a", b"b", "text", b"c"])
        self.assertEqual(len(self.files), 3)

    def test_many_at_once(self) -> None:
        """A thousand files that are there at once keep the order, and the stack is not deep."""
        self.capacity = 2**40
        self.setUp()
        self.read_referenced_file = lambda wanted: _succeed(wanted.path.encode())
        names = [b"%d" % number for number in range(1000)]
        self.print(b"1\n" + b"".join(map(self.block, names)) + b"4")
        self.turn(2000)
        self.end()
        self.assertEqual(self.contents(), ["1", *names, "4"])
        self.assertFalse(self.producer.paused)

    def test_refused(self) -> None:
        """A file that may not be read becomes a protocol error, and the run goes on."""
        self.print(self.block(b"/etc/shadow") + b"after")
        self.files[-1][1].errback(FileRefused("'/etc/shadow' is none of yours"))
        self.end()
        self.assertEqual(self.events(), [ErrorEvent(), "after"])
        self.assertIn(b"none of yours", self.ring.read_events(0, 10**9).lines)
        self.assertFalse(self.producer.paused)

    def test_end_while_reading(self) -> None:
        """Where stdout ends while a file is read, all is done when the file is there."""
        self.print(b"before\n" + self.block(b"a") + b"after" + b"\nhalf")
        self.pump.on_stdout_end()
        self.assertFalse(self.pump.output_stored_event.is_set)
        self.supply(b"a")
        self.assertTrue(self.pump.output_stored_event.is_set)
        file = PrintedFile("a", "application/octet-stream", b"a")
        self.assertEqual(join_text(self.events()), ["before", file, "after\nhalf"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_end_with_several(self) -> None:
        """The end waits for every file that the rest of stdout names."""
        self.print(self.block(b"a") + self.block(b"b"))
        self.pump.on_stdout_end()
        self.supply(b"a")
        self.assertFalse(self.pump.output_stored_event.is_set)
        self.assertEqual(self.files[-1][0].path, "b")
        self.supply(b"b")
        self.assertTrue(self.pump.output_stored_event.is_set)
        self.assertEqual(self.contents(), [b"a", b"b"])


class RoomTests(FilesTestCase):
    """Files for which there is no room: an evaluator can name any number in a few bytes."""

    def test_each_waits_for_room(self) -> None:
        """A file that fills the ring is the last that is read until a reader makes room."""
        self.print(self.block(b"a") * 400)
        for count in range(1, 400):
            self.assertEqual(len(self.files), count)
            self.supply(b"x" * self.capacity)
            self.turn(5)
            self.assertEqual(len(self.files), count)
            self.assertLess(self.ring.line_bytes, 2 * self.capacity)
            self.assertEqual((self.producer.paused, self.held[-1]), (True, True))
            self.read_all()
            self.turn()
        self.assertEqual(self.held, [True, False] * 399)

    def test_after_the_end(self) -> None:
        """So it is when stdout has ended: the rest comes as readers make room."""
        self.print(self.block(b"a") * 3 + b"text")
        self.pump.on_stdout_end()
        contents: list[Event] = []
        for count in range(1, 4):
            self.assertEqual(
                (len(self.files), self.pump.output_stored_event.is_set), (count, False)
            )
            self.supply(b"x" * self.capacity)
            self.turn(5)
            contents += self.contents()
            self.read_all()
            self.turn()
        self.assertTrue(self.pump.output_stored_event.is_set)
        self.assertEqual(contents, [*[b"x" * self.capacity] * 3, "text"])

    def test_released(self) -> None:
        """After the exit files wait for room; after a stop what is too much of them is refused."""
        self.print(self.block(b"a") + self.block(b"b") + b"some text\n" + self.block(b"c"))
        self.supply(b"x" * self.capacity)
        self.pump.on_stdout_end()
        self.turn(5)
        self.pump.accept_remaining_output()
        self.turn(5)
        self.assertEqual((self.pump.output_stored_event.is_set, self.held), (False, [True]))
        self.pump.refuse_referenced_files()
        self.turn(5)
        self.assertTrue(self.pump.output_stored_event.is_set)
        self.assertEqual(self.events()[1:], [ErrorEvent(), "some text", ErrorEvent()])
        self.assertIn(b"before the buffers had room", self.ring.read_events(1, 10**9).lines)
        self.assertEqual(len(self.files), 1)

    def test_released_with_room(self) -> None:
        """A file for which there is room is read all the same."""
        self.print(self.block(b"a") + self.block(b"b"))
        self.pump.accept_remaining_output()
        self.supply(b"a")
        self.supply(b"b")
        self.assertEqual(self.contents(), [b"a", b"b"])
        self.end()

    def test_others_take_the_room(self) -> None:
        """The bound of all rings together counts, too, at the moment when a file is to be read."""
        other = self.budget.allocate_ring()
        self.print(b"text\n")
        self.pump.feed(self.block(b"a"))
        other.set_used_bytes(2**41)
        self.turn(5)
        self.assertEqual((self.files, self.held), ([], [True]))
        other.set_used_bytes(0)
        self.turn(5)
        self.assertEqual((len(self.files), self.held), (1, [True, False]))

    def test_full_after_the_file(self) -> None:
        """A file that fills the ring keeps the producer paused, until there is room."""
        self.capacity = 100
        self.setUp()
        self.print(self.block(b"a") + b"after\n")
        self.supply(b"x" * 100)
        self.assertEqual((self.producer.calls, self.held), (["pause"], [True]))
        self.read_all()
        self.turn()
        self.assertEqual((self.producer.calls, self.held), (["pause", "resume"], [True, False]))

    def test_room_while_reading(self) -> None:
        """Room in the ring does not resume the producer while a file is read."""
        self.print(b"line\n" * 10 + self.block(b"a"))
        self.assertEqual((self.producer.calls, self.held), (["pause"], []))
        self.read_all()
        self.turn()
        self.assertEqual((self.producer.calls, self.held), (["pause"], []))
        self.supply(b"a")
        self.assertFalse(self.producer.paused)


async def _succeed(content: bytes) -> bytes:
    return content
