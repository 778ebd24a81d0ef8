"""`daemon.logging`: lines that wait for nobody, in their order, and those that are lost."""

from __future__ import annotations

import errno
import signal
from threading import Event, current_thread

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon.logging import MAX_LINE_QUEUE_BYTES, LineWriter
from tests.cases.patience import PATIENCE

LONG = "x" * (MAX_LINE_QUEUE_BYTES // 8)


class SlowFile:
    """A file that takes nothing while `gate` is not set; `began` is set when it is written to."""

    def __init__(self) -> None:
        self.gate, self.began = Event(), Event()
        self.error: Exception | None = None
        self.text = ""
        self.writers: list[str] = []

    def write(self, text: str) -> None:
        self.began.set()
        assert self.gate.wait(PATIENCE)
        self.writers.append(current_thread().name)
        if self.error is not None:
            raise self.error
        self.text += text

    def flush(self) -> None:
        """Do nothing."""

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


class LineWriterTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.file = SlowFile()
        self.writer = LineWriter(self.file)  # type: ignore[arg-type]
        self.addCleanup(self.file.gate.set)

    def get_stuck(self) -> None:
        """Have the thread wait for the file, with one line."""
        self.writer.start()
        self.writer.write_line("first")
        self.assertTrue(self.file.began.wait(PATIENCE))

    def written(self) -> list[str]:
        """Let the file take all; return what it has."""
        self.file.gate.set()
        self.writer.stop(PATIENCE)
        return self.file.lines

    def test_lines_before_the_start_and_after_the_stop_are_written_at_once(self) -> None:
        self.file.gate.set()
        self.writer.write_line("one")
        self.assertEqual(self.file.lines, ["one"])
        self.writer.start()
        self.writer.write_line("two")
        self.assertEqual(self.written(), ["one", "two"])
        self.writer.write_line("three")
        self.assertEqual(self.file.lines, ["one", "two", "three"])
        own = current_thread().name
        self.assertEqual(self.file.writers, [own, "log", own])

    def test_writers_do_not_wait_and_lines_keep_their_order(self) -> None:
        self.get_stuck()
        for number in range(1000):
            self.writer.write_line(str(number))
        self.assertEqual(self.file.text, "")
        self.assertEqual(self.written(), ["first", *map(str, range(1000))])
        self.assertEqual(self.file.writers, ["log", "log"])
        self.assertEqual(self.writer.lost_lines, 0)

    def test_lines_beyond_the_queue_are_lost_and_counted(self) -> None:
        self.get_stuck()
        for _ in range(10):
            self.writer.write_line(LONG)
        self.assertEqual(self.writer.lost_lines, 3)
        self.writer.write_line("x" * MAX_LINE_QUEUE_BYTES)
        self.assertEqual(self.writer.lost_lines, 4)
        self.writer.write_line("short")
        self.assertEqual(self.written(), ["first", *[LONG] * 7, "short"])

    def test_line_is_lost_and_counted_if_writing_fails_and_the_next_line_is_tried(self) -> None:
        self.file.error = OSError(errno.ENOSPC, "No space left on device")
        self.get_stuck()
        self.writer.write_line("second")
        self.assertEqual(self.written(), [])
        self.file.error = ValueError("I/O operation on closed file")
        self.writer.write_line("third")
        self.assertEqual(self.writer.lost_lines, 3)
        self.file.error = None
        self.writer.write_line("fourth")
        self.assertEqual((self.file.lines, self.writer.lost_lines), (["fourth"], 3))

    def test_stop_gives_up_on_a_file_that_hangs_and_later_lines_do_not_wait(self) -> None:
        self.get_stuck()
        self.writer.stop(0.01)
        self.writer.write_line("later")
        self.assertEqual(self.file.text, "")
        self.assertEqual(self.written(), ["first", "later"])

    def test_signal_handler_may_log_while_a_line_is_written(self) -> None:
        before = signal.signal(signal.SIGUSR2, lambda *_: self.writer.write_line("handler"))
        self.addCleanup(signal.signal, signal.SIGUSR2, before)
        self.file.gate.set()
        self.writer.start()
        self.writer.write_line(Interrupting("line"))
        self.assertEqual(self.written(), ["handler", "line"])


class Interrupting(str):
    """A line during whose writing a signal comes."""

    def __sizeof__(self) -> int:
        signal.raise_signal(signal.SIGUSR2)
        return super().__sizeof__()
