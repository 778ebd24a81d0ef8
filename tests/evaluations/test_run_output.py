"""`evaluations.run`: from stdout to events, turn by turn; files; output that cannot be stored."""

from __future__ import annotations

import errno
import os
import signal
from typing import NoReturn

from hypothesis import given

from tawebeval.config import LimitSettings
from tawebeval.core import segi
from tawebeval.core.event_log import EventLog
from tawebeval.core.segi import PrintedFile, SegiParser
from tawebeval.evaluations.run import PARTIAL_LINE_DELAY
from tawebeval.sandbox.workspace import FileRefused
from tests.cases import reference_segi
from tests.cases.evaluations import CANCELLED, RunTestCase, make_file_block
from tests.cases.strategies import (
    MARKERS,
    MAX_FILE,
    MAX_VALUE,
    Chunk,
    ErrorEvent,
    chunkings,
    chunks_of,
    join_text,
    read_file,
    stdouts,
)
from tests.fakes.children import STDOUT

FLOOD = MARKERS.data_begin + b"\n" + b"1\n" * 32_000
PLAIN = "application/octet-stream"


class PartialLineTests(RunTestCase):
    def test_whole_lines_are_delivered_at_once(self) -> None:
        self.child.print(b"one\ntwo\nthree\n")
        self.assertEqual(self.events(), ["one", "\n", "two", "\n", "three"])
        self.assertEqual(self.batches, 1)

    def test_partial_line_waits_20_ms_for_its_rest(self) -> None:
        self.assertEqual(PARTIAL_LINE_DELAY, 0.02)
        self.child.print(b"one\nhalf a li")
        self.clock.advance(0.0199)
        self.assertEqual((self.events(), self.batches), (["one"], 1))
        self.clock.advance(0.0001)
        self.assertEqual(self.events(), ["one", "\n", "half a li"])
        self.assertEqual(self.batches, 2)

    def test_wait_is_counted_from_the_first_piece(self) -> None:
        for _ in range(4):
            self.child.print(b".")
            self.clock.advance(0.005)
        self.assertEqual(self.text(), "....")

    def test_line_whose_rest_comes_in_time_is_one_event(self) -> None:
        self.child.print(b"half a li")
        self.clock.advance(0.01)
        self.child.print(b"ne\nnext\n")
        self.clock.advance(1)
        self.assertEqual(self.events(), ["half a line", "\n", "next"])

    def test_what_may_become_a_marker_waits_however_long(self) -> None:
        self.child.print(b"one")
        self.clock.advance(1)
        self.child.print(b"\n" + MARKERS.data_begin)
        self.clock.advance(9 - self.clock.seconds())
        self.assertEqual((self.events(), self.batches), (["one"], 1))

    def test_end_of_stdout_delivers_what_is_left(self) -> None:
        self.child.print(b"half a li")
        self.child.lose(STDOUT)
        self.assertEqual((self.events(), self.batches), (["half a li"], 1))
        self.child.exit()
        self.assert_over(status=0)


class TurnTests(RunTestCase):
    limits = LimitSettings(wall_clock=100)

    def test_much_stdout_is_parsed_in_several_turns(self) -> None:
        self.child.print(FLOOD)
        sizes = [self.log.end_cursor]
        while self.child.paused:
            self.turn(1)
            sizes.append(self.log.end_cursor)
        self.assertEqual(sizes[-1], 32_000)
        self.assertGreater(len(sizes), 10)
        self.assertEqual(sizes, sorted(set(sizes)))

    def test_reactor_does_what_else_is_due_between_two_turns(self) -> None:
        self.child.print(FLOOD)
        seen: list[int] = []
        for _ in range(5):
            self.clock.callLater(0, lambda: seen.append(self.log.end_cursor))
            self.turn(1)
        self.assertEqual(seen, sorted(set(seen)))
        self.assertEqual((len(seen), self.child.paused), (5, True))

    def test_end_waits_for_all_that_came_before_it(self) -> None:
        self.child.print(FLOOD + MARKERS.data_end + b"\nhalf a line")
        self.child.end()
        self.turn(1)
        self.assertFalse(self.run_.run_ended.is_set)
        self.turn(100)
        self.assert_over(status=0)
        self.assertEqual((self.log.end_cursor, self.events()[-1]), (32_001, "half a line"))


class FileTests(RunTestCase):
    def answer(self, content: bytes) -> None:
        """Give the content of the file that is wanted now."""
        self.wanted[-1][1].callback(content)
        self.turn()

    def test_later_events_wait_for_the_file(self) -> None:
        self.child.print(b"before\n" + make_file_block(b"out/a.txt") + b"after\n")
        self.turn()
        self.child.print(b"more\n")
        self.clock.advance(5)
        self.assertEqual([path for path, _ in self.wanted], ["out/a.txt"])
        self.assertEqual((self.events(), self.child.paused), (["before"], True))
        self.answer(b"content")
        file = PrintedFile("a.txt", PLAIN, b"content")
        self.assertEqual(self.events(), ["before", file, "after", "\n", "more"])
        self.assertFalse(self.child.paused)
        self.assertEqual(self.files.named, {0: b"content"})

    def test_files_are_read_one_after_the_other(self) -> None:
        self.child.print(
            make_file_block(b"a") + make_file_block(b"b") + b"text\n" + make_file_block(b"c")
        )
        self.child.end()
        self.turn()
        for name in "abc":
            self.assertFalse(self.run_.run_ended.is_set)
            self.assertEqual(self.wanted[-1][0], name)
            self.assertTrue(self.child.paused)
            self.answer(name.encode())
        self.assert_over(status=0)
        a, b, c = (PrintedFile(name, PLAIN, name.encode()) for name in "abc")
        self.assertEqual(self.events(), [a, b, "text", c])

    def test_refused_file_is_a_protocol_error(self) -> None:
        self.child.print(make_file_block(b"/etc/shadow") + b"after")
        self.turn()
        self.wanted[0][1].errback(FileRefused("'/etc/shadow' is none of yours"))
        self.child.end()
        self.assert_over(status=0)
        self.assertEqual(self.events(), [ErrorEvent(), "after"])
        self.assertIn(b"none of yours", self.log.read_events(0, 10**9).lines)
        self.assertEqual(self.files.named, {0: "'/etc/shadow' is none of yours"})

    def test_file_that_an_earlier_process_has_not_read_is_read(self) -> None:
        self.child.print(make_file_block(b"a") + b"after\n")
        run = self.make_run(deadline=100)
        child = self.child
        child._protocol = run
        run.makeConnection(child)
        self.turn()
        self.wanted.clear()
        run.go_on()
        self.turn()
        self.assertEqual([path for path, _ in self.wanted], ["a"])


class LostOutputTests(RunTestCase):
    def break_(self, owner: object, name: str) -> None:
        def fail(*_: object) -> NoReturn:
            raise RuntimeError("a defect")

        self.patch(owner, name, fail)

    def print_file(self) -> None:
        self.child.print(make_file_block(b"a"))
        self.turn()

    def assert_lost(self) -> None:
        """Hold that the run is killed and lost, once and logged, and that it ends."""
        self.assertEqual(self.child.signals, [signal.SIGTERM, signal.SIGKILL])
        self.child.print(b"more\n")
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        assert self.run_.failure is not None
        self.assertEqual(self.run_.failure.reason, "lost")
        self.assertIn("defect of the daemon", self.run_.failure.message)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_defect_in_parsing_ends_the_run(self) -> None:
        self.child.print(b"good\n")
        self.break_(SegiParser, "feed")
        self.child.print(b"bad\n")
        self.assert_lost()
        self.assertEqual(self.text(), "good")

    def test_defect_in_a_later_turn(self) -> None:
        self.break_(SegiParser, "parse_pending")
        self.child.print(b"\n" * 100_000)
        self.turn()
        self.assert_lost()

    def test_defect_in_the_flush_of_a_partial_line(self) -> None:
        self.break_(SegiParser, "flush_partial_line")
        self.child.print(b"a")
        self.clock.advance(PARTIAL_LINE_DELAY)
        self.assert_lost()

    def test_defect_in_taking_a_file(self) -> None:
        self.break_(SegiParser, "supply_file")
        self.print_file()
        self.wanted[0][1].callback(b"content")
        self.assert_lost()

    def test_defect_in_reading_a_file(self) -> None:
        self.print_file()
        self.wanted[0][1].errback(RuntimeError("a defect"))
        self.assert_lost()

    def test_defect_in_the_log(self) -> None:
        self.break_(EventLog, "append_batch")
        self.child.print(b"a\n")
        self.assert_lost()

    def test_defect_at_the_end_of_stdout_after_a_good_exit(self) -> None:
        self.break_(SegiParser, "finish")
        self.child.print(b"a\nb")
        self.child.end(0)
        self.assert_over(status=0)
        assert self.run_.failure is not None
        self.assertEqual(self.run_.failure.reason, "lost")
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_stopped_run_keeps_its_reason(self) -> None:
        self.run_.stop(CANCELLED)
        self.break_(SegiParser, "feed")
        self.child.print(b"bad\n")
        self.child.end(0)
        self.assert_over(status=0)
        self.assertIs(self.run_.failure, CANCELLED)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_full_disk_ends_the_run_with_its_message(self) -> None:
        self.child.print(b"good\n")
        self.clock.advance(1)
        self.files.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.child.print(b"bad\n")
        self.assertEqual(self.child.signals, [signal.SIGTERM, signal.SIGKILL])
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        assert self.run_.failure is not None
        self.assertEqual(self.run_.failure.reason, "lost")
        self.assertIn("No space left on device", self.run_.failure.message)
        self.assertEqual(self.text(), "good")


class PropertyTests(RunTestCase):
    limits = LimitSettings(wall_clock=10**6)

    def setUp(self) -> None:
        self.patch(segi, "MAX_VALUE_BYTES", MAX_VALUE)
        self.patch(segi, "MAX_FILE_BYTES", MAX_FILE)
        super().setUp()
        self.patch(segi, "MAX_BYTES_PARSED_PER_CALL", 300)

    @given(stdouts, chunkings)
    def test_events_are_those_of_the_reference(self, stdout: bytes, chunking: list[Chunk]) -> None:
        self.setUp()
        for chunk, _ in chunks_of(stdout, chunking):
            self.child.print(chunk)
            self.turn(1)
        self.child.end()
        while not self.run_.run_ended.is_set:
            self.turn()
            for path, content in self.wanted:
                if not content.called:
                    found = read_file(path.encode("utf-8", "surrogateescape"))
                    if found is None:
                        content.errback(FileRefused("no"))
                    else:
                        content.callback(found)
        expected = reference_segi.parse_events(
            stdout, MARKERS, max_value=MAX_VALUE, max_file=MAX_FILE, files=read_file
        )
        self.assertEqual(join_text(self.events()), expected)
        self.assert_over(status=0)
