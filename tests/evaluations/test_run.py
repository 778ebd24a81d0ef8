"""`evaluations.run`: the end of a run, its stderr and its stops, with a fake child and a Clock."""

from __future__ import annotations

import errno
import gc
import signal
from typing import get_args

from tawebeval.errors import EvaluationFailure, FailureReason, build_limit_failure
from tawebeval.evaluations.details import STDERR_TAIL_BYTES
from tawebeval.linux.cgroups import ResourceUsage
from tests.cases.evaluations import CANCELLED, GRACE, RunTestCase, make_file_block
from tests.fakes.children import STDOUT

RESOURCES = {"memory", "processes", "disk", "file_size", "output", "stderr"}


class EndTests(RunTestCase):
    """How runs end by themselves."""

    def test_good_end(self) -> None:
        """Status 0 is no failure; all output is there, its last line too."""
        self.child.print(b"hello\nworld")
        self.child.end()
        self.assert_over(status=0)
        self.assertIsNone(self.run_.failure)
        self.assertEqual(self.text(), "hello\nworld")
        waited = self.child.resource_usage
        assert waited is not None
        self.assertEqual(self.run_.usage, ResourceUsage(waited.ru_utime + waited.ru_stime, None))

    def test_status(self) -> None:
        """Another status is the failure `exit`, with the status and stderr."""
        self.child.complain(b"no such file\n")
        self.child.end(3)
        self.assert_over(status=3)
        failure = self.run_.failure
        assert failure is not None
        self.assertEqual(failure.reason, "exit")
        self.assertEqual(failure.extra_members, {"status": 3, "stderr": "no such file\n"})
        self.assertIn("status 3", failure.message)

    def test_signal(self) -> None:
        """A signal that nobody here sent is the failure `exit` with that signal."""
        self.child.end(signal=signal.SIGSEGV)
        self.assert_over(number=signal.SIGSEGV)
        failure = self.run_.failure
        assert failure is not None
        self.assertEqual(failure.reason, "exit")
        self.assertEqual(failure.extra_members, {"signal": 11, "stderr": ""})
        self.assertIn("signal 11 (Segmentation fault)", failure.message)

    def test_stderr_after_the_exit(self) -> None:
        """What stands in the pipes at the exit belongs to the run as well."""
        self.orphans.shut = True
        self.child.exit(1)
        self.child.print(b"late")
        self.child.complain(b"last words")
        self.orphans.open()
        self.assert_over(status=1)
        assert self.run_.failure is not None
        self.assertEqual(self.run_.failure.extra_members["stderr"], "last words")
        self.assertEqual(self.text(), "late")

    def test_the_group_is_killed(self) -> None:
        """What the process left in its group is killed when it exits, and not before."""
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

    def test_pipes_held_by_others(self) -> None:
        """Who still holds stdout when the orphans are gone is not waited for."""
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

    def test_files_hold_up_the_end(self) -> None:
        """Nor before a file that it named is read, and stands among the events."""
        self.child.print(make_file_block(b"out.txt"))
        self.child.end()
        self.turn()
        self.assertFalse(self.run_.run_ended.is_set)
        self.wanted[0][1].callback(b"content")
        self.assert_over(status=0)
        self.assertEqual(self.log.end_cursor, 1)

    def test_orphans_hold_up_the_end(self) -> None:
        """It has not ended before its orphans are gone, although its pipes are closed."""
        self.orphans.shut = True
        self.child.end()
        self.turn()
        self.assertEqual(len(self.orphans), 1)
        self.assertFalse(self.run_.run_ended.is_set)
        self.orphans.open()
        self.assert_over(status=0)

    def test_orphans_cannot_be_ended(self) -> None:
        """Where ending them goes wrong the run ends all the same."""
        self.orphans.error = RuntimeError("no /proc")
        self.child.exit()
        self.assert_over(status=0)
        self.orphans.error = None
        gc.collect()
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


class StderrTests(RunTestCase):
    """What is kept of stderr."""

    def test_tail(self) -> None:
        """Its last 8 KiB are kept, in whatever pieces they came."""
        for number in range(5000):
            self.child.complain(b"%d\n" % number)
        everything = "".join(f"{number}\n" for number in range(5000))
        self.assertEqual(STDERR_TAIL_BYTES, 8192)
        self.assertEqual(self.run_.stderr_text, everything[-8192:])
        self.child.complain(b"x" * 10000)
        self.assertEqual(self.run_.stderr_text, "x" * 8192)

    def test_bytes(self) -> None:
        """It is shown as UTF-8, with what is not replaced; it is no part of the events."""
        self.child.complain(b"\xff\xc3")
        self.child.complain(b"\xa9")
        self.assertEqual(self.run_.stderr_text, "\ufffd\u00e9")
        self.assertEqual(self.log.end_cursor, 0)

    def test_begins_with_a_character(self) -> None:
        """A character that does not fit as a whole is left out, however stderr came."""
        for end in ("", "a", "ab", "abc"):
            for size in (1, 3, 20_000):
                printed = ("😀" * 3000 + end).encode()
                for at in range(0, len(printed), size):
                    self.child.complain(printed[at : at + size])
                characters = (STDERR_TAIL_BYTES - len(end)) // 4
                self.assertEqual(self.run_.stderr_text, "😀" * characters + end)

    def test_stray_bytes(self) -> None:
        """With what is not UTF-8 replaced it is no longer either."""
        self.child.complain(b"\xff" * 10_000 + b"end")
        self.assertEqual(self.run_.stderr_text, "\ufffd" * 2729 + "end")
        self.child.complain(b"\x80")
        self.assertEqual(self.run_.stderr_text, "\ufffd" * 2728 + "end\ufffd")


class StopTests(RunTestCase):
    """How runs are ended."""

    def test_term_then_kill(self) -> None:
        """TERM at once, KILL after the grace time, and not one moment before."""
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

    def test_obedient(self) -> None:
        """One that goes on TERM gets no KILL, and what it still prints counts."""
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
        """Neither a second reason nor the exit that follows replaces the first."""
        self.run_.stop(CANCELLED)
        self.run_.stop(EvaluationFailure("shutdown", "too late"))
        self.clock.advance(20)  # over the time limit, too
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        self.assertIs(self.run_.failure, CANCELLED)
        self.assertEqual(self.child.signals, [signal.SIGTERM, signal.SIGKILL])

    def test_closed_output(self) -> None:
        """One that has closed its stdout and runs on is stopped as others are."""
        self.child.lose(STDOUT)
        self.run_.stop(CANCELLED)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        self.child.end(signal=signal.SIGTERM)
        self.assert_over(number=signal.SIGTERM)
        self.assertIs(self.run_.failure, CANCELLED)

    def test_reasons(self) -> None:
        """Time that is over, a wish, and whatever else is no such limit leave the grace time."""
        for reason in get_args(FailureReason):
            self.setUp()
            self.run_.stop(EvaluationFailure(reason, "enough"))
            expected = signal.SIGKILL if reason in RESOURCES else signal.SIGTERM
            self.assertEqual(self.child.signals, [expected], reason)

    def test_resources_in_the_grace_time(self) -> None:
        """It is killed also where it was stopped before for another reason, which stays."""
        self.run_.stop(CANCELLED)
        for _ in range(2):  # each look tells of it
            self.run_.stop(build_limit_failure("disk", "disk", "bytes", 7))
        self.assertEqual(self.child.signals, [signal.SIGTERM, signal.SIGKILL, signal.SIGKILL])
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        self.assertIs(self.run_.failure, CANCELLED)

    def test_after_the_exit(self) -> None:
        """What has exited by itself gets no signal, but its end was still asked for."""
        self.child.exit(0)
        self.run_.stop(CANCELLED)
        self.child.close()
        self.assert_over(status=0)
        self.assertEqual(self.child.signals, [])
        self.assertIs(self.run_.failure, CANCELLED)
