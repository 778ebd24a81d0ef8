"""`evaluations.run`: output, limits and the end of a run, with a fake child and a Clock."""

from __future__ import annotations

import errno
import gc
import os
import signal
from typing import Any, NoReturn, get_args

from hypothesis import given

from tawebeval.config import LimitSettings
from tawebeval.core import segi
from tawebeval.core.segi import PrintedFile, SegiParser
from tawebeval.errors import EvaluationFailure, FailureReason, make_limit_failure
from tawebeval.evaluations.run import PARTIAL_LINE_DELAY_SECONDS
from tawebeval.evaluations.store import STDERR_TAIL_BYTES
from tawebeval.linux.cgroups import ResourceUsage
from tawebeval.sandbox.workspace import EvaluatorFileRefused
from tests.cases import reference_segi
from tests.cases.evaluations import CANCELLED, GRACE, RunTestCase, make_file_block
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
from tests.fakes.children import STDOUT, FakeChild
from tests.fakes.sandbox import FakeRunLimits

RESOURCES = {"memory", "processes", "disk", "file_size", "output", "stderr"}


class EndTests(RunTestCase):
    def test_exit_status_0_is_no_failure(self) -> None:
        self.child.print(b"hello\nworld")
        self.end()
        self.assertIsNone(self.run_.failure)
        self.assertEqual(self.text(), "hello\nworld")
        waited = self.child.resource_usage
        assert waited is not None
        self.assertEqual(self.run_.usage, ResourceUsage(waited.ru_utime + waited.ru_stime, None))

    def test_nonzero_exit_status_fails_the_run_with_the_reason_exit(self) -> None:
        self.child.complain(b"no such file\n")
        self.end(3)
        failure = self.failure
        self.assertEqual(failure.reason, "exit")
        self.assertEqual(failure.extra_members, {"status": 3, "stderr": "no such file\n"})
        self.assertIn("status 3", failure.message)

    def test_output_left_in_the_pipes_at_the_exit_is_read(self) -> None:
        self.orphans.shut = True
        self.child.exit(1)
        self.child.print(b"late")
        self.child.complain(b"last words")
        self.orphans.open()
        self.assert_over(status=1)
        self.assertEqual(self.failure.extra_members["stderr"], "last words")
        self.assertEqual(self.text(), "late")

    def test_processes_that_cannot_be_killed_are_left_to_the_clean_up(self) -> None:
        self.sandboxed.unkillable = [OSError(errno.EMFILE, "no way")]
        self.end()
        self.assertIsNone(self.run_.failure)

    def test_run_is_lost_if_its_exit_status_cannot_be_read(self) -> None:
        self.sandboxed.unstarted = OSError(errno.EMFILE, "Too many open files")
        self.child.end()
        self.turn()
        self.assertTrue(self.run_.run_ended.is_set)
        self.assertEqual(self.failure.reason, "lost")
        self.assertIn("Too many open files", self.failure.message)

    def test_run_ends_though_its_orphans_cannot_be_ended(self) -> None:
        self.orphans.error = RuntimeError("no /proc")
        self.child.exit()
        self.assert_over(status=0)
        self.orphans.error = None
        gc.collect()
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


class StderrTests(RunTestCase):
    def test_last_8_kib_of_stderr_are_kept(self) -> None:
        for number in range(5000):
            self.child.complain(b"%d\n" % number)
        everything = "".join(f"{number}\n" for number in range(5000))
        self.assertEqual(STDERR_TAIL_BYTES, 8192)
        self.assertEqual(self.run_.stderr_text, everything[-8192:])
        self.child.complain(b"x" * 10000)
        self.assertEqual(self.run_.stderr_text, "x" * 8192)

    def test_stderr_begins_with_a_whole_character(self) -> None:
        for end in ("", "a", "ab", "abc"):
            for size in (1, 3, 20_000):
                printed = ("😀" * 3000 + end).encode()
                for at in range(0, len(printed), size):
                    self.child.complain(printed[at : at + size])
                characters = (STDERR_TAIL_BYTES - len(end)) // 4
                self.assertEqual(self.run_.stderr_text, "😀" * characters + end)

    def test_stderr_with_replacement_characters_has_at_most_8_kib(self) -> None:
        self.child.complain(b"\xff" * 10_000 + b"end")
        self.assertEqual(self.run_.stderr_text, "\ufffd" * 2729 + "end")
        self.child.complain(b"\x80")
        self.assertEqual(self.run_.stderr_text, "\ufffd" * 2728 + "end\ufffd")


class StopTests(RunTestCase):
    def test_kill_follows_term_after_the_grace_time(self) -> None:
        self.run_.stop(CANCELLED)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        self.clock.advance(GRACE - 0.001)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        self.clock.advance(0.001)
        self.assertEqual(self.child.signals, [signal.SIGTERM, signal.SIGKILL])
        self.assertFalse(self.run_.run_ended.is_set)
        self.end(signal=signal.SIGKILL)
        self.assertIs(self.run_.failure, CANCELLED)

    def test_process_that_exits_after_sigterm_gets_no_sigkill(self) -> None:
        self.child.print(b"working\n")
        self.run_.stop(CANCELLED)
        self.clock.advance(1)
        self.child.print(b"goodbye\n")
        self.end()
        self.clock.advance(100)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        self.assertIs(self.run_.failure, CANCELLED)
        self.assertEqual(self.text(), "working\ngoodbye\n")

    def test_exceeded_limit_sends_sigkill_and_any_other_reason_sigterm(self) -> None:
        for reason in get_args(FailureReason):
            self.setUp()
            self.run_.stop(EvaluationFailure(reason, "enough"))
            expected = signal.SIGKILL if reason in RESOURCES else signal.SIGTERM
            self.assertEqual(self.child.signals, [expected], reason)

    def test_limit_exceeded_in_the_grace_time_sends_sigkill(self) -> None:
        self.run_.stop(CANCELLED)
        for _ in range(2):  # each look tells of it
            self.run_.stop(make_limit_failure("disk", "disk", "bytes", 7))
        self.assertEqual(self.child.signals, [signal.SIGTERM, signal.SIGKILL, signal.SIGKILL])
        self.end(signal=signal.SIGKILL)
        self.assertIs(self.run_.failure, CANCELLED)

    def test_run_that_has_closed_stdout_can_be_stopped(self) -> None:
        self.child.lose(STDOUT)
        self.run_.stop(CANCELLED)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        self.end(signal=signal.SIGTERM)
        self.assertIs(self.run_.failure, CANCELLED)

    def test_exited_process_gets_no_signal(self) -> None:
        self.child.exit(0)
        self.run_.stop(CANCELLED)
        self.run_.stop(make_limit_failure("memory", "memory", "bytes", 7))
        self.child.close()
        self.assert_over(status=0)
        # What it has left was killed at the exit; later its PID may be that of another process.
        self.assertEqual(self.child.group_signals, [signal.SIGKILL])
        self.assertIs(self.run_.failure, CANCELLED)


class TimeoutTests(RunTestCase):
    def test_run_is_stopped_at_its_time_limit(self) -> None:
        self.clock.advance(9.999)
        self.assertEqual(self.child.signals, [])
        self.clock.advance(0.001)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        failure = self.failure
        self.assertEqual(failure.reason, "timeout")
        self.assertEqual(failure.extra_members, {"limit": "limits.wall_clock", "value": 10})
        self.assertIn("10 seconds", failure.message)
        self.clock.advance(GRACE)
        self.end(signal=signal.SIGKILL)
        self.assertIs(self.run_.failure, failure)

    def test_suspended_run_has_its_whole_time_limit_after_the_clock_restarts(self) -> None:
        self.clock.advance(9)
        self.run_.reset_clock()
        self.clock.advance(1000)
        self.assertEqual((self.child.signals, self.run_.deadline), ([], None))
        self.assertEqual(self.changes, 1)
        self.run_.restart_clock()
        self.assertEqual((self.run_.deadline, self.changes), (1019, 2))
        self.clock.advance(9)
        self.assertEqual(self.child.signals, [])
        self.clock.advance(1)
        self.assertEqual(self.child.signals, [signal.SIGTERM])

    def test_deadline_goes_on_over_a_restart_of_the_daemon(self) -> None:
        for deadline, seconds in ((3.0, 3), (-5.0, 0.001)):
            self.setUp()
            run = self.make_run(deadline=deadline)
            child = FakeChild(self.clock, run)
            run.makeConnection(child)
            self.clock.advance(seconds - 0.001)
            self.assertEqual(child.signals, [])
            self.clock.advance(0.001)
            self.assertEqual(child.signals, [signal.SIGTERM])

    def test_evaluator_that_ended_in_time_is_not_stopped(self) -> None:
        self.child.has_exited = True
        self.clock.advance(20)
        self.assertEqual(self.child.signals, [])
        self.end()


class LimitTests(RunTestCase):
    limits = LimitSettings(wall_clock=10, cpu=5)

    def test_exceeded_limit_is_the_reason_of_a_failed_run(self) -> None:
        disk, memory = (make_limit_failure(name, name, "bytes", 7) for name in ("disk", "memory"))
        cut, too_large, killed = ({"signal": number} for number in (24, 25, 9))
        for over, cpu, end, reason in (
            (None, 5.1, cut, "cpu"),
            (None, 4.99, cut, "exit"),
            (None, 5.01, {"status": 0}, "cpu"),
            (None, 0.1, too_large, "exit"),
            (disk, 0.1, killed, "disk"),
            (memory, 0.1, {"status": 0}, "memory"),
        ):
            self.setUp()
            limits = self.sandboxed.run_limits
            limits.over, limits.used = over, ResourceUsage(cpu, None)
            self.child.end(**end)
            self.turn()
            self.assertTrue(self.run_.run_ended.is_set)
            self.assertEqual(self.failure.reason, reason, (over, cpu, end))
            if end is too_large:
                self.assertEqual(limits.looks, [True])
            if over is not None:
                self.assertIs(self.run_.failure, over)
            elif reason == "cpu":
                self.assertEqual(self.failure.extra_members, {"limit": "limits.cpu", "value": 5})
            elif end is cut:
                self.assertEqual(self.failure.extra_members["signal"], signal.SIGXCPU)

    def test_exceeded_disk_limit_is_the_reason_even_if_output_was_lost(self) -> None:
        over = make_limit_failure("disk", "free_disk", "the disk is full", 7)
        for found, reason in ((over, "disk"), (None, "lost")):
            self.setUp()
            self.sandboxed.run_limits.over = found
            self.child.lost_reason = "the daemon could not store the output"
            self.end(signal=signal.SIGKILL)
            self.assertEqual(self.failure.reason, reason)

    def test_error_in_the_limit_check_keeps_the_exit_status(self) -> None:
        for error, defects in ((OSError(errno.EMFILE, "Too many open files"), 0), (KeyError(), 2)):
            self.setUp()

            def fail(*final: bool, error: Exception = error) -> None:
                raise error

            self.patch(FakeRunLimits, "find_limit_failure", fail)
            self.patch(FakeRunLimits, "read_usage", fail)
            self.end(3)
            self.assertEqual(self.failure.reason, "exit")
            self.assertEqual(len(self.flushLoggedErrors(type(error))), defects)

    def test_unstarted_sandbox_reports_its_stderr_as_lost_or_the_exceeded_limit(self) -> None:
        over = make_limit_failure("processes", "processes", "processes", 2)
        lost = EvaluationFailure("lost", "no sandbox", {"stderr": "bwrap: no"})
        for limit, expected in ((None, lost), (over, over)):
            self.setUp()
            self.sandboxed.unstarted = EvaluationFailure("lost", "no sandbox")
            self.sandboxed.run_limits.over = limit
            self.child.complain(b"bwrap: no")
            self.child.end(status=1)
            self.turn()
            self.assertEqual(self.failure.reason, expected.reason)
            self.assertEqual(self.failure.extra_members, expected.extra_members)
            self.assertIsNone(self.run_.exit_status)


class OutputTests(RunTestCase):
    limits = LimitSettings(wall_clock=10, output=1024, stderr=10_000)

    def test_output_over_the_limit_by_a_byte_stops_the_run(self) -> None:
        self.child.print(b"x" * 1000)
        self.child.print(b"y" * 24)
        self.assertEqual(self.child.signals, [])
        self.child.print(b"z" * 5000)
        self.assertEqual(self.child.signals, [signal.SIGKILL])
        self.end(signal=signal.SIGKILL)
        failure = self.failure
        self.assertEqual(failure.reason, "output")
        self.assertEqual(failure.extra_members, {"limit": "limits.output", "value": 1024})
        self.assertEqual(self.text(), "x" * 1000 + "y" * 24)

    def test_file_larger_than_the_remaining_output_limit_stops_the_run(self) -> None:
        self.child.print(b"x" * 900 + b"\n" + make_file_block(b"a") + b"after")
        self.turn()
        self.wanted[0][1].callback(b"x" * 200)
        self.turn()
        self.assertEqual(self.child.signals, [signal.SIGKILL])
        self.assertEqual(self.failure.extra_members, {"limit": "limits.output", "value": 1024})
        self.end(signal=signal.SIGKILL)
        self.assertEqual(self.events(), ["x" * 900, ErrorEvent(), "after"])
        self.assertIn("'a' exceeds the rest of limits.output", self.files.named[0])

    def test_resumed_run_is_killed_if_its_stdout_is_over_the_limit(self) -> None:
        for size, signals in ((1024, []), (1025, [signal.SIGKILL])):
            self.setUp()
            self.stdout.feed(b"x" * size)
            run = self.make_run(deadline=100)
            child = FakeChild(self.clock, run)
            run.makeConnection(child)
            run.parse_inherited_stdout()
            self.assertEqual(child.signals, signals)

    def test_slow_reads_end_the_run(self) -> None:
        self.child.on_slow_reads()
        self.assertEqual(self.child.signals, [signal.SIGKILL])
        self.assertEqual(self.failure.reason, "output")

    def test_stderr_has_a_limit_of_its_own(self) -> None:
        self.child.complain(b"x" * self.limits.stderr)
        self.assertEqual(self.child.signals, [])
        self.child.complain(b"y")
        self.assertEqual(self.child.signals, [signal.SIGKILL])
        self.end()
        self.assertEqual(self.failure.extra_members, {"limit": "limits.stderr", "value": 10_000})
        self.assertEqual(set(self.run_.stderr_text), {"x"})


FLOOD = MARKERS.data_begin + b"\n" + b"1\n" * 32_000
PLAIN = "application/octet-stream"


class PartialLineTests(RunTestCase):
    def test_partial_line_waits_20_ms_for_its_rest(self) -> None:
        self.assertEqual(PARTIAL_LINE_DELAY_SECONDS, 0.02)
        self.child.print(b"one\nhalf a li")
        self.clock.advance(0.0199)
        self.assertEqual((self.events(), self.events_.announcements), (["one"], 1))
        self.clock.advance(0.0001)
        self.assertEqual(self.events(), ["one", "\n", "half a li"])
        self.assertEqual(self.events_.announcements, 2)

    def test_possible_beginning_of_a_marker_is_never_flushed(self) -> None:
        self.child.print(b"one")
        self.clock.advance(1)
        self.child.print(b"\n" + MARKERS.data_begin)
        self.clock.advance(9 - self.clock.seconds())
        self.assertEqual((self.events(), self.events_.announcements), (["one"], 1))

    def test_partial_line_is_delivered_at_the_end_of_stdout(self) -> None:
        self.child.print(b"half a li")
        self.child.lose(STDOUT)
        self.assertEqual((self.events(), self.events_.announcements), (["half a li"], 1))
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


class FileTests(RunTestCase):
    def test_later_events_wait_for_the_file(self) -> None:
        self.child.print(b"before\n" + make_file_block(b"out/a.txt") + b"after\n")
        self.turn()
        self.child.print(b"more\n")
        self.clock.advance(5)
        self.assertEqual([path for path, _ in self.wanted], ["out/a.txt"])
        self.assertEqual((self.events(), self.child.paused), (["before"], True))
        self.wanted[-1][1].callback(b"content")
        self.turn()
        file = PrintedFile("a.txt", PLAIN, b"content")
        self.assertEqual(self.events(), ["before", file, "after", "\n", "more"])
        self.assertFalse(self.child.paused)
        self.assertEqual(self.files.named, {0: b"content"})

    def test_resumed_run_reads_a_printed_file_that_was_not_read_before(self) -> None:
        self.child.print(make_file_block(b"a") + b"after\n")
        run = self.make_run(deadline=100)
        child = self.child
        child._protocol = run
        run.makeConnection(child)
        self.turn()
        self.wanted.clear()
        run.parse_inherited_stdout()
        self.turn()
        self.assertEqual([path for path, _ in self.wanted], ["a"])

    def test_refused_file_is_a_protocol_error(self) -> None:
        self.child.print(make_file_block(b"/etc/shadow") + b"after")
        self.turn()
        self.wanted[0][1].errback(EvaluatorFileRefused("'/etc/shadow' is none of yours"))
        self.end()
        self.assertEqual(self.events(), [ErrorEvent(), "after"])
        self.assertIn(b"none of yours", self.log.read_events(0, 10**9).lines)
        self.assertEqual(self.files.named, {0: "'/etc/shadow' is none of yours"})


class LostOutputTests(RunTestCase):
    def break_(self, name: str) -> Any:
        """Let a method of the parser fail."""

        def fail(*_: object) -> NoReturn:
            raise RuntimeError("a defect")

        return self.patch(SegiParser, name, fail)

    def assert_lost(self) -> None:
        """Hold that the run is killed and lost, once and logged, and that it ends."""
        self.assertEqual(self.child.signals, [signal.SIGTERM, signal.SIGKILL])
        self.child.print(b"more\n")
        self.end(signal=signal.SIGKILL)
        self.assertEqual(self.failure.reason, "lost")
        self.assertIn("defect of the daemon", self.failure.message)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_defect_between_stdout_and_the_events_ends_the_run(self) -> None:
        for method, output in (("feed", b"bad\n"), ("parse_pending", b"\n" * 100_000)):
            self.setUp()
            broken = self.break_(method)
            self.child.print(output)
            self.turn()
            self.assert_lost()
            broken.restore()
        self.setUp()
        self.child.print(b"good\n" + make_file_block(b"a"))
        self.turn()
        self.wanted[0][1].errback(RuntimeError("a defect"))
        self.assert_lost()
        self.assertEqual(self.text(), "good")

    def test_defect_at_the_end_of_stdout_fails_the_run(self) -> None:
        self.break_("finish")
        self.child.print(b"a\nb")
        self.end()
        self.assertEqual(self.failure.reason, "lost")
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_full_disk_ends_the_run_with_its_message(self) -> None:
        self.child.print(b"good\n")
        self.clock.advance(1)
        self.files.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.child.print(b"bad\n")
        self.assertEqual(self.child.signals, [signal.SIGTERM, signal.SIGKILL])
        self.end(signal=signal.SIGKILL)
        self.assertEqual(self.failure.reason, "lost")
        self.assertIn("No space left on device", self.failure.message)
        self.assertEqual(self.text(), "good")


class PropertyTests(RunTestCase):
    limits = LimitSettings(wall_clock=10**6)

    def setUp(self) -> None:
        self.patch(segi, "MAX_DATA_VALUE_BYTES", MAX_VALUE)
        self.patch(segi, "MAX_SENT_FILE_BYTES", MAX_FILE)
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
                        content.errback(EvaluatorFileRefused("no"))
                    else:
                        content.callback(found)
        expected = reference_segi.parse_events(
            stdout, MARKERS, max_value=MAX_VALUE, max_file=MAX_FILE, files=read_file
        )
        self.assertEqual(join_text(self.events()), expected)
        self.assert_over(status=0)
