"""`evaluations.run`: the limits of a run."""

from __future__ import annotations

import errno
import signal

from tawebeval.config import LimitSettings
from tawebeval.errors import EvaluationFailure, build_limit_failure
from tawebeval.linux.cgroups import ResourceUsage
from tawebeval.linux.starter import MAX_SLOW_READ_SECONDS
from tests.cases.evaluations import GRACE, RunTestCase, make_file_block
from tests.cases.strategies import ErrorEvent
from tests.fakes.children import FakeChild
from tests.fakes.sandbox import FakeRunLimits


class TimeoutTests(RunTestCase):
    def test_run_is_stopped_at_its_time_limit(self) -> None:
        self.clock.advance(9.999)
        self.assertEqual(self.child.signals, [])
        self.clock.advance(0.001)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        failure = self.run_.failure
        assert failure is not None
        self.assertEqual(failure.reason, "timeout")
        self.assertEqual(failure.extra_members, {"limit": "limits.wall_clock", "value": 10})
        self.assertIn("10 seconds", failure.message)
        self.clock.advance(GRACE)
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        self.assertIs(self.run_.failure, failure)

    def test_evaluator_that_ended_in_time_is_not_stopped(self) -> None:
        self.child.has_exited = True
        self.clock.advance(20)
        self.assertEqual(self.child.signals, [])
        self.child.end()
        self.assert_over(status=0)

    def test_suspended_run_has_no_time_limit(self) -> None:
        self.clock.advance(9)
        self.run_.suspend_clock()
        self.clock.advance(1000)
        self.assertEqual((self.child.signals, self.run_.deadline), ([], None))
        self.assertEqual(self.changes, 1)

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

    def test_evaluator_that_has_exited_has_no_time_limit(self) -> None:
        self.orphans.shut = True
        self.child.exit(0)
        self.clock.advance(100)
        self.orphans.open()
        self.child.close()
        self.assert_over(status=0)
        self.assertIsNone(self.run_.failure)


class CellTests(RunTestCase):
    limits = LimitSettings(wall_clock=10, cpu=5)

    def end(self, number: int, cpu: float) -> EvaluationFailure:
        """End by a signal, after so much processor time; return the failure."""
        self.sandboxed.run_limits.used = ResourceUsage(cpu, None)
        self.child.end(signal=number)
        self.turn()
        self.assertTrue(self.run_.run_ended.is_set)
        assert self.run_.failure is not None
        return self.run_.failure

    def test_signal_of_the_cpu_limit_is_believed_when_the_time_was_used(self) -> None:
        error = self.end(signal.SIGXCPU, 5.1)
        self.assertEqual(error.extra_members, {"limit": "limits.cpu", "value": 5})

    def test_signal_of_the_cpu_limit_below_the_limit_is_an_exit(self) -> None:
        error = self.end(signal.SIGXCPU, 4.99)
        self.assertEqual((error.reason, error.extra_members["signal"]), ("exit", signal.SIGXCPU))

    def test_run_whose_output_was_lost_by_its_own_use_of_the_disk_is_over_that_limit(self) -> None:
        over = build_limit_failure("disk", "free_disk", "the disk is full", 7)
        for found, reason in ((over, "disk"), (None, "lost")):
            self.setUp()
            self.sandboxed.run_limits.over = found
            self.child.lost_reason = "the daemon could not store the output"
            self.child.end(signal=signal.SIGKILL)
            self.assert_over(number=signal.SIGKILL)
            assert self.run_.failure is not None
            self.assertEqual(self.run_.failure.reason, reason)

    def test_good_exit_over_the_limit_of_processor_time_fails(self) -> None:
        self.sandboxed.run_limits.used = ResourceUsage(5.01, None)
        self.child.end(status=0)
        self.turn()
        assert self.run_.failure is not None
        self.assertEqual(self.run_.failure.reason, "cpu")

    def test_signal_of_the_file_size_limit_is_believed(self) -> None:
        self.assertEqual(self.end(signal.SIGXFSZ, 0.1).reason, "exit")
        self.assertEqual(self.sandboxed.run_limits.looks, [True])

    def test_limit_that_the_sandboxed_run_knows_of_explains_a_bad_end(self) -> None:
        self.sandboxed.run_limits.over = build_limit_failure("disk", "disk", "bytes", 7)
        self.assertEqual(self.end(signal.SIGKILL, 0.1).reason, "disk")

    def test_run_over_its_memory_fails_though_it_succeeded(self) -> None:
        self.sandboxed.run_limits.over = build_limit_failure("memory", "memory", "bytes", 7)
        self.child.end(status=0)
        self.turn()
        self.assertIs(self.run_.failure, self.sandboxed.run_limits.over)

    def test_sandboxed_run_that_cannot_be_asked_hides_no_failure(self) -> None:
        for error, defects in ((OSError(errno.EMFILE, "Too many open files"), 0), (KeyError(), 2)):
            self.setUp()

            def fail(*final: bool, error: Exception = error) -> None:
                raise error

            self.patch(FakeRunLimits, "check", fail)
            self.patch(FakeRunLimits, "read_usage", fail)
            self.child.end(status=3)
            self.assert_over(status=3)
            assert self.run_.failure is not None
            self.assertEqual(self.run_.failure.reason, "exit")
            self.assertEqual(len(self.flushLoggedErrors(type(error))), defects)

    def test_sandbox_that_did_not_start_says_so_with_what_it_complained_of(self) -> None:
        self.sandboxed.unstarted = EvaluationFailure("lost", "no sandbox")
        self.child.complain(b"bwrap: no")
        self.child.end(status=1)
        self.turn()
        failure = self.run_.failure
        assert failure is not None
        self.assertEqual((failure.reason, failure.extra_members), ("lost", {"stderr": "bwrap: no"}))
        self.assertIs(self.run_.exit_status, None)

    def test_limit_that_kept_the_sandbox_from_starting_is_named(self) -> None:
        self.sandboxed.unstarted = EvaluationFailure("lost", "no sandbox")
        self.sandboxed.run_limits.over = build_limit_failure(
            "processes", "processes", "processes", 2
        )
        self.child.end(status=1)
        self.turn()
        self.assertIs(self.run_.failure, self.sandboxed.run_limits.over)


class OutputTests(RunTestCase):
    limits = LimitSettings(wall_clock=10, output=1024, stderr=10_000)

    def test_output_of_exactly_the_limit_is_allowed(self) -> None:
        self.child.print(b"x" * 1000)
        self.child.print(b"y" * 24)
        self.assertEqual(self.child.signals, [])
        self.child.end()
        self.assert_over(status=0)
        self.assertIsNone(self.run_.failure)
        self.assertEqual(self.text(), "x" * 1000 + "y" * 24)

    def test_one_byte_more_stops_it(self) -> None:
        self.child.print(b"x" * 1000)
        self.child.print(b"y" * 25)
        self.assertEqual(self.child.signals, [signal.SIGKILL])
        self.child.print(b"z" * 5000)
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        failure = self.run_.failure
        assert failure is not None
        self.assertEqual(failure.reason, "output")
        self.assertEqual(failure.extra_members, {"limit": "limits.output", "value": 1024})
        self.assertEqual(self.text(), "x" * 1000 + "y" * 24)

    def test_byte_after_a_limit_that_was_reached_exactly_is_noticed(self) -> None:
        self.child.print(b"x" * 1024)
        self.child.print(b"y")
        self.assertEqual(self.child.signals, [signal.SIGKILL])
        self.child.end()
        self.assert_over(status=0)
        self.assertEqual(self.text(), "x" * 1024)

    def test_file_counts_as_its_event(self) -> None:
        self.child.print(b"x" * 900 + b"\n" + make_file_block(b"a") + b"after")
        self.turn()
        self.wanted[0][1].callback(b"x" * 200)
        self.turn()
        self.assertEqual(self.child.signals, [signal.SIGKILL])
        assert self.run_.failure is not None
        self.assertEqual(self.run_.failure.extra_members, {"limit": "limits.output", "value": 1024})
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        self.assertEqual(self.events(), ["x" * 900, ErrorEvent(), "after"])
        self.assertIn("'a' exceeds the rest of limits.output", self.files.named[0])

    def test_output_of_an_earlier_process_of_the_daemon_counts(self) -> None:
        self.child.print(b"x" * 1000)
        run = self.make_run(deadline=100)
        child = FakeChild(self.clock, run)
        run.makeConnection(child)
        child.print(b"y" * 24)
        self.assertEqual(child.signals, [])
        child.print(b"z")
        self.assertEqual(child.signals, [signal.SIGKILL])

    def test_evaluator_that_exceeded_the_limit_meanwhile_is_stopped(self) -> None:
        for size, signals in ((1024, []), (1025, [signal.SIGKILL])):
            self.setUp()
            self.stdout.feed(b"x" * size)
            run = self.make_run(deadline=100)
            child = FakeChild(self.clock, run)
            run.makeConnection(child)
            run.go_on()
            self.assertEqual(child.signals, signals)

    def test_slow_read_ends_the_run(self) -> None:
        self.child.pipe_read_cpu_seconds = MAX_SLOW_READ_SECONDS - 0.01
        self.child.print(b"a\n")
        self.assertEqual(self.child.signals, [])
        self.child.pipe_read_cpu_seconds = MAX_SLOW_READ_SECONDS
        self.child.complain(b"b\n")
        self.assertEqual(self.child.signals, [signal.SIGKILL])
        assert self.run_.failure is not None
        self.assertEqual(self.run_.failure.reason, "output")

    def test_stderr_has_a_limit_of_its_own(self) -> None:
        self.child.complain(b"x" * self.limits.stderr)
        self.assertEqual(self.child.signals, [])
        self.child.complain(b"y")
        self.assertEqual(self.child.signals, [signal.SIGKILL])
        self.child.end()
        self.assert_over(status=0)
        assert self.run_.failure is not None
        self.assertEqual(
            self.run_.failure.extra_members, {"limit": "limits.stderr", "value": 10_000}
        )
        self.assertEqual(set(self.run_.stderr_text), {"x"})
