"""`evaluations.run`: the end of a run, its stderr and its stops, with a fake child and a Clock."""

from __future__ import annotations

import errno
import gc
import signal
from typing import get_args

from tawebeval.errors import EvaluationFailure, FailureReason, build_limit_failure
from tawebeval.evaluations.store import STDERR_TAIL_BYTES
from tawebeval.linux.cgroups import ResourceUsage
from tests.cases.evaluations import CANCELLED, GRACE, RunTestCase, make_file_block
from tests.fakes.children import STDOUT

RESOURCES = {"memory", "processes", "disk", "file_size", "output", "stderr"}


class EndTests(RunTestCase):
    def test_status_0_is_no_failure(self) -> None:
        self.child.print(b"hello\nworld")
        self.child.end()
        self.assert_over(status=0)
        self.assertIsNone(self.run_.failure)
        self.assertEqual(self.text(), "hello\nworld")
        waited = self.child.resource_usage
        assert waited is not None
        self.assertEqual(self.run_.usage, ResourceUsage(waited.ru_utime + waited.ru_stime, None))

    def test_other_status_is_the_failure_exit(self) -> None:
        self.child.complain(b"no such file\n")
        self.child.end(3)
        self.assert_over(status=3)
        failure = self.run_.failure
        assert failure is not None
        self.assertEqual(failure.reason, "exit")
        self.assertEqual(failure.extra_members, {"status": 3, "stderr": "no such file\n"})
        self.assertIn("status 3", failure.message)

    def test_signal_of_a_stranger_is_the_failure_exit(self) -> None:
        self.child.end(signal=signal.SIGSEGV)
        self.assert_over(number=signal.SIGSEGV)
        failure = self.run_.failure
        assert failure is not None
        self.assertEqual(failure.reason, "exit")
        self.assertEqual(failure.extra_members, {"signal": 11, "stderr": ""})
        self.assertIn("signal 11 (Segmentation fault)", failure.message)

    def test_output_in_the_pipes_at_the_exit_counts(self) -> None:
        self.orphans.shut = True
        self.child.exit(1)
        self.child.print(b"late")
        self.child.complain(b"last words")
        self.orphans.open()
        self.assert_over(status=1)
        assert self.run_.failure is not None
        self.assertEqual(self.run_.failure.extra_members["stderr"], "last words")
        self.assertEqual(self.text(), "late")

    def test_group_is_killed_when_its_process_exits(self) -> None:
        self.turn()
        self.assertEqual(self.child.group_signals, [])
        self.child.end()
        self.assertEqual(self.child.group_signals, [signal.SIGKILL])
        self.assertEqual(self.child.signals, [])

    def test_kill_is_tried_again_while_descriptors_are_scarce(self) -> None:
        self.sandboxed.unkillable = [OSError(errno.EMFILE, "too many")] * 2
        self.child.end()
        for _ in range(2):
            self.assertEqual(self.child.group_signals, [])
            self.assertFalse(self.run_.run_ended.is_set)
            self.clock.advance(1)
        self.assert_over(status=0)
        self.assertEqual(self.child.group_signals, [signal.SIGKILL])

    def test_processes_that_cannot_be_killed_are_left_to_the_clean_up(self) -> None:
        for number, seconds in ((errno.EMFILE, 4), (errno.EIO, 0)):
            self.setUp()
            self.sandboxed.unkillable = [OSError(number, "no way")] * 9
            self.child.end()
            for _ in range(seconds):
                self.assertFalse(self.run_.run_ended.is_set)
                self.clock.advance(1)
            self.assert_over(status=0)
            self.assertIsNone(self.run_.failure)

    def test_exit_that_cannot_be_read_is_lost(self) -> None:
        self.sandboxed.unstarted = OSError(errno.EMFILE, "Too many open files")
        self.child.end()
        self.turn()
        self.assertTrue(self.run_.run_ended.is_set)
        assert self.run_.failure is not None
        self.assertEqual(self.run_.failure.reason, "lost")
        self.assertIn("Too many open files", self.run_.failure.message)

    def test_others_that_hold_stdout_are_not_waited_for(self) -> None:
        self.orphans.shut = True
        self.child.print(b"printed")
        self.child.exit()
        self.turn()
        self.assertFalse(self.child.rest_wanted)
        self.assertFalse(self.run_.run_ended.is_set)
        self.orphans.open()
        self.assertTrue(self.child.rest_wanted)
        self.assert_over(status=0)
        self.assertEqual(self.text(), "printed")

    def test_run_ends_after_its_files_are_read(self) -> None:
        self.child.print(make_file_block(b"out.txt"))
        self.child.end()
        self.turn()
        self.assertFalse(self.run_.run_ended.is_set)
        self.wanted[0][1].callback(b"content")
        self.assert_over(status=0)
        self.assertEqual(self.log.end_cursor, 1)

    def test_run_ends_after_its_orphans_are_gone(self) -> None:
        self.orphans.shut = True
        self.child.end()
        self.turn()
        self.assertEqual(len(self.orphans), 1)
        self.assertFalse(self.run_.run_ended.is_set)
        self.orphans.open()
        self.assert_over(status=0)

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

    def test_stderr_is_shown_as_utf_8(self) -> None:
        self.child.complain(b"\xff\xc3")
        self.child.complain(b"\xa9")
        self.assertEqual(self.run_.stderr_text, "\ufffd\u00e9")
        self.assertEqual(self.log.end_cursor, 0)

    def test_stderr_begins_with_a_whole_character(self) -> None:
        for end in ("", "a", "ab", "abc"):
            for size in (1, 3, 20_000):
                printed = ("😀" * 3000 + end).encode()
                for at in range(0, len(printed), size):
                    self.child.complain(printed[at : at + size])
                characters = (STDERR_TAIL_BYTES - len(end)) // 4
                self.assertEqual(self.run_.stderr_text, "😀" * characters + end)

    def test_stderr_with_replaced_bytes_is_no_longer(self) -> None:
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
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        self.assertIs(self.run_.failure, CANCELLED)

    def test_process_that_goes_on_term_gets_no_kill(self) -> None:
        self.child.print(b"working\n")
        self.run_.stop(CANCELLED)
        self.clock.advance(1)
        self.child.print(b"goodbye\n")
        self.child.end(0)
        self.assert_over(status=0)
        self.clock.advance(100)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        self.assertIs(self.run_.failure, CANCELLED)
        self.assertEqual(self.text(), "working\ngoodbye\n")

    def test_first_reason_counts(self) -> None:
        self.run_.stop(CANCELLED)
        self.run_.stop(EvaluationFailure("shutdown", "too late"))
        self.clock.advance(20)  # over the time limit, too
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        self.assertIs(self.run_.failure, CANCELLED)
        self.assertEqual(self.child.signals, [signal.SIGTERM, signal.SIGKILL])

    def test_run_without_stdout_is_stopped(self) -> None:
        self.child.lose(STDOUT)
        self.run_.stop(CANCELLED)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        self.child.end(signal=signal.SIGTERM)
        self.assert_over(number=signal.SIGTERM)
        self.assertIs(self.run_.failure, CANCELLED)

    def test_other_reasons_leave_the_grace_time(self) -> None:
        for reason in get_args(FailureReason):
            self.setUp()
            self.run_.stop(EvaluationFailure(reason, "enough"))
            expected = signal.SIGKILL if reason in RESOURCES else signal.SIGTERM
            self.assertEqual(self.child.signals, [expected], reason)

    def test_limit_in_the_grace_time_kills(self) -> None:
        self.run_.stop(CANCELLED)
        for _ in range(2):  # each look tells of it
            self.run_.stop(build_limit_failure("disk", "disk", "bytes", 7))
        self.assertEqual(self.child.signals, [signal.SIGTERM, signal.SIGKILL, signal.SIGKILL])
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        self.assertIs(self.run_.failure, CANCELLED)

    def test_exited_process_gets_no_signal(self) -> None:
        self.child.exit(0)
        self.run_.stop(CANCELLED)
        self.child.close()
        self.assert_over(status=0)
        self.assertEqual(self.child.signals, [])
        self.assertIs(self.run_.failure, CANCELLED)
