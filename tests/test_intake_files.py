"""`tawebeval.intake`: files that an evaluator names, read while its stdout waits."""

from __future__ import annotations

from tawebeval.fileblock import File
from tawebeval.intake import PARTIAL_LINE
from tawebeval.workspace import FileRefused
from tests.strategies import MARKERS, Broken, joined
from tests.test_intake import IntakeTestCase


class FileTests(IntakeTestCase):
    """Files that the evaluator names by a path."""

    capacity = 5000

    def block(self, path: bytes) -> bytes:
        """Return a block that names a file."""
        lines = (MARKERS.file_begin, b"X-SEGI-As: path", b"", path, MARKERS.file_end, b"")
        return b"\n".join(lines)

    def supply(self, content: bytes) -> None:
        """Supply the file that is wanted now."""
        _, reading = self.files[-1]
        reading.callback(content)

    def test_order(self) -> None:
        """What is printed after the block waits for the file: events keep their order."""
        self.intake.received(b"before\n" + self.block(b"out/a.txt") + b"after\n")
        self.assertEqual([wanted.path for wanted, _ in self.files], ["out/a.txt"])
        self.assertEqual(self.events(), ["before"])
        self.intake.received(b"more\n")
        self.clock.advance(10)
        self.assertEqual(self.events(), ["before"])
        self.supply(b"content")
        file = File("a.txt", "application/octet-stream", b"content")
        self.assertEqual(self.events(), ["before", file, "after", "\n", "more"])
        self.assertEqual(self.changes, 2)
        self.end()

    def test_pause(self) -> None:
        """Meanwhile the producer is paused, but the run's clock is not stopped."""
        self.intake.received(self.block(b"a") + b"rest")
        self.assertEqual(self.producer.calls, ["pause"])
        self.intake.received(b" of it")
        self.supply(b"")
        self.assertEqual((self.producer.calls, self.held), (["pause", "resume"], []))
        self.clock.advance(PARTIAL_LINE)
        self.assertEqual(joined(self.events())[1:], ["rest of it"])

    def test_several(self) -> None:
        """Files are read one after the other, however close their blocks stand."""
        self.intake.received(self.block(b"a") + self.block(b"b") + b"text\n" + self.block(b"c"))
        for name in "abc":
            self.assertEqual(self.files[-1][0].path, name)
            self.assertTrue(self.producer.paused)
            self.supply(name.encode())
        self.assertFalse(self.producer.paused)
        self.end()
        contents = [e.content if isinstance(e, File) else e for e in self.events()]
        self.assertEqual(contents, [b"a", b"b", "text", b"c"])
        self.assertEqual(len(self.files), 3)

    def test_at_once(self) -> None:
        """A file that is there at once keeps the order, too."""
        self.read_file = lambda wanted: _succeed(wanted.path.encode())
        self.intake.received(b"1\n" + self.block(b"2") + self.block(b"3") + b"4")
        self.end()
        contents = [e.content if isinstance(e, File) else e for e in self.events()]
        self.assertEqual(contents, ["1", b"2", b"3", "4"])
        self.assertFalse(self.producer.paused)

    def test_refused(self) -> None:
        """A file that may not be read becomes a protocol error, and the run goes on."""
        self.intake.received(self.block(b"/etc/shadow") + b"after")
        self.files[-1][1].errback(FileRefused("'/etc/shadow' is none of yours"))
        self.end()
        self.assertEqual(self.events(), [Broken(), "after"])
        self.assertIn(b"none of yours", self.ring.read(0, 10**9).lines)
        self.assertFalse(self.producer.paused)

    def test_defect(self) -> None:
        """So does one that cannot be read for a reason of ours, which is logged and not told."""
        self.intake.received(self.block(b"a") + b"after")
        self.files[-1][1].errback(RuntimeError("secret of the daemon"))
        self.end()
        self.assertEqual(self.events(), [Broken(), "after"])
        self.assertNotIn(b"secret", self.ring.read(0, 10**9).lines)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_end_while_reading(self) -> None:
        """Where stdout ends while a file is read, all is done when the file is there."""
        self.intake.received(b"before\n" + self.block(b"a") + b"after" + b"\nhalf")
        self.intake.ended()
        self.assertFalse(self.intake.done.is_set)
        self.supply(b"a")
        self.assertTrue(self.intake.done.is_set)
        file = File("a", "application/octet-stream", b"a")
        self.assertEqual(joined(self.events()), ["before", file, "after\nhalf"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_end_with_several(self) -> None:
        """The end waits for every file that the rest of stdout names."""
        self.intake.received(self.block(b"a") + self.block(b"b")[:-1])
        self.intake.ended()
        self.supply(b"a")
        self.assertFalse(self.intake.done.is_set)
        self.assertEqual(self.files[-1][0].path, "b")
        self.supply(b"b")
        self.assertTrue(self.intake.done.is_set)
        self.assertEqual([e.content for e in self.events() if isinstance(e, File)], [b"a", b"b"])
        self.assertEqual(len(self.events()), 2)

    def test_end_makes_the_last_one_wanted(self) -> None:
        """A block whose last line ends with stdout itself names a file as well."""
        self.intake.received(self.block(b"a")[:-1])
        self.assertEqual(self.files, [])
        self.intake.ended()
        self.assertFalse(self.intake.done.is_set)
        self.supply(b"a")
        self.assertTrue(self.intake.done.is_set)
        self.assertEqual(len(self.events()), 1)

    def test_full_after_the_file(self) -> None:
        """A file that fills the ring keeps the producer paused, until there is room."""
        self.capacity = 100
        self.setUp()
        self.intake.received(self.block(b"a") + b"after\n")
        self.supply(b"x" * 100)
        self.assertEqual((self.producer.calls, self.held), (["pause"], [True]))
        self.ring.acknowledge(self.ring.newest)
        self.intake.acknowledged()
        self.assertEqual((self.producer.calls, self.held), (["pause", "resume"], [True, False]))

    def test_room_while_reading(self) -> None:
        """Room in the ring does not resume the producer while a file is read."""
        self.capacity = 300
        self.setUp()
        self.intake.received(b"line\n" * 10 + self.block(b"a"))
        self.assertEqual((self.producer.calls, self.held), (["pause"], [True]))
        self.ring.acknowledge(self.ring.newest)
        self.intake.acknowledged()
        self.assertEqual((self.producer.calls, self.held), (["pause"], [True, False]))
        self.supply(b"a")
        self.assertFalse(self.producer.paused)


async def _succeed(content: bytes) -> bytes:
    return content
