"""`evaluations.run`: the limits of a run, and how it waits for its readers."""

from __future__ import annotations

import signal

import msgspec

from tawebeval.config import LimitSettings
from tawebeval.errors import EvaluationFailure, build_limit_failure
from tawebeval.evaluations.run import MIN_READ_BYTES_PER_SECOND, EvaluatorRun
from tawebeval.linux.cgroups.manager import ResourceUsage
from tests.cases.evaluations import CANCELLED, GRACE, RunTestCase
from tests.cases.strategies import MARKERS
from tests.fakes.children import STDOUT
from tests.fakes.sandbox import FakeSandboxedRun
from tests.fakes.world import InlineThreads

FILE = MARKERS.file_begin + b"\nX-SEGI-As: path\n\na\n" + MARKERS.file_end + b"\n"


class TimeoutTests(RunTestCase):
    """The limit of time."""

    def test_timeout(self) -> None:
        """At the limit it is stopped: the failure `timeout`, with the limit's name and value."""
        self.clock.advance(9.999)
        self.assertEqual(self.child.signals, [])
        self.clock.advance(0.001)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        failure = self.evaluator_run.failure
        assert failure is not None
        self.assertEqual(failure.reason, "timeout")
        self.assertEqual(failure.extra_members, {"limit": "limits.wall_clock", "value": 10})
        self.assertIn("10 seconds", failure.message)
        self.clock.advance(GRACE)
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        self.assertIs(self.evaluator_run.failure, failure)

    def test_evaluator_that_ended_in_time_is_not_stopped(self) -> None:
        """It has ended, and the reactor, or the keeper, tells it later than the limit."""
        self.child.has_exited = True
        self.clock.advance(20)
        self.assertEqual(self.child.signals, [])
        self.child.end()
        self.assert_over(status=0)

    def test_held_time(self) -> None:
        """Time in which stdout is not read does not count, however often that happens."""
        for _ in range(3):
            self.clock.advance(3)
            self.evaluator_run.set_clock_paused(True)
            self.clock.advance(1000)
            self.evaluator_run.set_clock_paused(False)
        self.clock.advance(0.999)
        self.assertEqual(self.child.signals, [])
        self.clock.advance(0.001)
        self.assertEqual(self.child.signals, [signal.SIGTERM])

    def test_held_at_the_limit(self) -> None:
        """One whose time is used up just as it is held is stopped when it goes on."""
        self.clock.advance(9)
        self.evaluator_run.set_clock_paused(True)
        self.evaluator_run.set_clock_paused(True)
        self.evaluator_run.set_clock_paused(False)
        self.clock.advance(1)
        self.assertEqual(self.child.signals, [signal.SIGTERM])

    def test_clock_that_runs(self) -> None:
        """A clock that runs keeps its timeout: the reactor would keep a cancelled one, too."""
        timeouts = list(self.clock.getDelayedCalls())
        self.assertEqual(len(timeouts), 1)
        self.evaluator_run.set_clock_paused(False)
        self.assertEqual(self.clock.getDelayedCalls(), timeouts)

    def test_suspended(self) -> None:
        """A reader does not start the clock of a run that is to be begun again."""
        self.evaluator_run.suspend_clock()
        self.evaluator_run.set_clock_paused(True)
        self.evaluator_run.set_clock_paused(False)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertTrue(self.evaluator_run.progress.is_clock_suspended)
        self.evaluator_run.restart_clock()
        self.assertEqual(len(self.clock.getDelayedCalls()), 1)
        self.clock.advance(4)
        self.evaluator_run.restart_clock()  # told once more after a restart of the daemon
        self.assertEqual(self.evaluator_run.progress.wall_clock_seconds_left, 6)
        self.assertFalse(self.evaluator_run.progress.is_clock_suspended)

    def test_suspended_before(self) -> None:
        """A run that an earlier process has suspended has no clock until it is begun again."""
        progress = msgspec.structs.replace(
            self.evaluator_run.progress, wall_clock_seconds_left=1, is_clock_suspended=True
        )
        run = EvaluatorRun(
            *(self.clock, self.pump, GRACE, self.sandboxed, InlineThreads()), progress=progress
        )
        self.assertTrue(run.progress.is_clock_suspended)
        before = self.clock.getDelayedCalls()
        run.makeConnection(self.child)
        self.assertEqual(self.clock.getDelayedCalls(), before)
        run.restart_clock()
        self.assertEqual(run.progress.wall_clock_seconds_left, 10)

    def test_no_clock_after_the_exit(self) -> None:
        """The clock stands when the process has exited, whoever holds its stdout."""
        self.orphans.shut = True
        self.child.exit(0)
        self.evaluator_run.set_clock_paused(True)
        self.evaluator_run.set_clock_paused(False)
        self.clock.advance(100)
        self.orphans.open()
        self.child.close()
        self.assert_over(status=0)
        self.assertIsNone(self.evaluator_run.failure)


class CellTests(RunTestCase):
    """What the sandboxed run says of a run that has ended badly."""

    limits = LimitSettings(wall_clock=10, cpu=5)

    def end(self, number: int, cpu: float) -> EvaluationFailure:
        """End by a signal, after so much processor time; return the failure."""
        self.sandboxed.used = ResourceUsage(cpu, None)
        self.child.end(signal=number)
        self.turn()
        self.assertTrue(self.evaluator_run.run_ended.is_set)
        assert self.evaluator_run.failure is not None
        return self.evaluator_run.failure

    def test_cpu(self) -> None:
        """The signal of the limit of processor time is believed when that was used."""
        error = self.end(signal.SIGXCPU, 5.1)
        self.assertEqual(error.extra_members, {"limit": "limits.cpu", "value": 5})

    def test_no_cpu(self) -> None:
        """Anybody may end by it: then that is how it has ended, also just below the limit."""
        error = self.end(signal.SIGXCPU, 4.99)
        self.assertEqual((error.reason, error.extra_members["signal"]), ("exit", signal.SIGXCPU))

    def test_good_exit_over_the_limit_of_processor_time_fails(self) -> None:
        self.sandboxed.used = ResourceUsage(5.01, None)
        self.child.end(status=0)
        self.turn()
        assert self.evaluator_run.failure is not None
        self.assertEqual(self.evaluator_run.failure.reason, "cpu")

    def test_file_size(self) -> None:
        """So with that of a too large file, which the sandboxed run would have found."""
        self.assertEqual(self.end(signal.SIGXFSZ, 0.1).reason, "exit")
        self.assertEqual(self.sandboxed.looks, [True])

    def test_limit(self) -> None:
        """A limit that the sandboxed run knows of explains a bad end."""
        self.sandboxed.over = build_limit_failure("disk", "disk", "bytes", 7)
        self.assertEqual(self.end(signal.SIGKILL, 0.1).reason, "disk")

    def test_memory(self) -> None:
        """A run over its memory has failed, also if the evaluator has gone on and succeeded."""
        self.sandboxed.over = build_limit_failure("memory", "memory", "bytes", 7)
        self.child.end(status=0)
        self.turn()
        self.assertIs(self.evaluator_run.failure, self.sandboxed.over)

    def test_no_answer(self) -> None:
        """A sandboxed run that cannot be asked hides no failure."""

        def fail(*final: bool) -> None:
            raise OSError(24, "Too many open files")

        self.patch(FakeSandboxedRun, "check_limits", fail)
        self.patch(FakeSandboxedRun, "read_usage", fail)
        self.child.end(status=3)
        self.assert_over(status=3)
        assert self.evaluator_run.failure is not None
        self.assertEqual(self.evaluator_run.failure.reason, "exit")
        self.assertEqual(len(self.flushLoggedErrors(OSError)), 2)

    def test_not_started(self) -> None:
        """A sandbox that did not start says so, with what it complained of."""
        self.sandboxed.unstarted = EvaluationFailure("lost", "no sandbox")
        self.child.complain(b"bwrap: no")
        self.child.end(status=1)
        self.turn()
        failure = self.evaluator_run.failure
        assert failure is not None
        self.assertEqual((failure.reason, failure.extra_members), ("lost", {"stderr": "bwrap: no"}))
        self.assertIs(self.evaluator_run.exit_status, None)

    def test_too_little_for_a_sandbox(self) -> None:
        """One whose own limit has kept it from starting goes by that."""
        self.sandboxed.unstarted = EvaluationFailure("lost", "no sandbox")
        self.sandboxed.over = build_limit_failure("processes", "processes", "processes", 2)
        self.child.end(status=1)
        self.turn()
        self.assertIs(self.evaluator_run.failure, self.sandboxed.over)


class OutputTests(RunTestCase):
    """The limit of output."""

    limits = LimitSettings(wall_clock=10, output=1024)

    def test_exactly(self) -> None:
        """As much as the limit is allowed."""
        self.child.print(b"x" * 1000)
        self.child.print(b"y" * 24)
        self.assertEqual(self.child.signals, [])
        self.child.end()
        self.assert_over(status=0)
        self.assertIsNone(self.evaluator_run.failure)
        self.assertEqual(self.text(), "x" * 1000 + "y" * 24)

    def test_one_more(self) -> None:
        """One byte more stops it: the failure `output`; what was within the limit stays."""
        self.child.print(b"x" * 1000)
        self.child.print(b"y" * 25)
        self.assertEqual(self.child.signals, [signal.SIGKILL])
        self.child.print(b"z" * 5000)
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        failure = self.evaluator_run.failure
        assert failure is not None
        self.assertEqual(failure.reason, "output")
        self.assertEqual(failure.extra_members, {"limit": "limits.output", "value": 1024})
        self.assertEqual(self.text(), "x" * 1000 + "y" * 24)

    def test_one_byte_after_the_limit(self) -> None:
        """It is noticed also when the limit was reached exactly before."""
        self.child.print(b"x" * 1024)
        self.child.print(b"y")
        self.assertEqual(self.child.signals, [signal.SIGKILL])
        self.child.end()
        self.assert_over(status=0)
        self.assertEqual(self.text(), "x" * 1024)

    def test_files_count(self) -> None:
        """Files count as what they become, beside what is printed."""
        self.child.print(b"x" * 1000)
        self.assertEqual(self.evaluator_run.count_output_within_limit(20), 20)
        self.assertEqual(self.child.signals, [])
        self.assertEqual(self.evaluator_run.count_output_within_limit(20), 4)
        self.assertEqual(self.child.signals, [signal.SIGKILL])
        self.assertEqual(self.evaluator_run.count_output_within_limit(20), 0)
        assert self.evaluator_run.failure is not None
        self.assertEqual(
            self.evaluator_run.failure.extra_members, {"limit": "limits.output", "value": 1024}
        )

    def test_delay(self) -> None:
        """Reads that take the reactor too long, of stdout or stderr, end the run at once."""
        self.child.pipe_read_cpu_seconds = 0.25
        self.child.print(b"a\n")
        self.assertEqual(self.child.signals, [])
        self.child.pipe_read_cpu_seconds = 0.26
        self.child.complain(b"b\n")
        self.assertEqual(self.child.signals, [signal.SIGKILL])
        assert self.evaluator_run.failure is not None
        self.assertEqual(self.evaluator_run.failure.reason, "output")

    def test_stderr_does_not_count(self) -> None:
        """stderr, of which only the end is kept, has no limit."""
        self.child.complain(b"x" * 10_000)
        self.assertEqual(self.child.signals, [])
        self.child.end()
        self.assert_over(status=0)


class FullRingTests(RunTestCase):
    """Runs whose readers are slow."""

    capacity = 100

    def fill(self) -> None:
        """Print so much that the ring is full."""
        self.child.print(b"some line or other\n" * 20)
        self.assertTrue(self.child.paused)
        self.assertEqual(self.held, [True])

    def test_full_ring_stops_the_clock(self) -> None:
        """While the ring is full no time passes for the run; then it goes on where it was."""
        self.clock.advance(4)
        self.fill()
        self.clock.advance(1000)
        self.assertEqual(self.child.signals, [])
        self.ring.acknowledge(self.ring.end_cursor)
        self.pump.on_acknowledge()
        self.assertEqual(self.held, [True, False])
        self.clock.advance(5.9)
        self.assertEqual(self.child.signals, [])
        self.clock.advance(0.1)
        self.assertEqual(self.child.signals, [signal.SIGTERM])

    def read_all(self) -> str:
        """Return the text in the ring, and discard it."""
        text = self.text()
        self.ring.acknowledge(self.ring.end_cursor)
        self.pump.on_acknowledge()
        self.turn()
        return text

    def test_rest_waits_for_nobody(self) -> None:
        """What the pipe still holds at the exit is taken, so that the end waits for no reader."""
        self.fill()
        self.child.print(b"kept in the pipe\n" * 5000)
        self.child.end()
        self.turn()
        self.assert_over(status=0)
        self.assertIsNone(self.evaluator_run.failure)
        self.assertEqual(self.text().count("kept in the pipe\n"), 5000)

    def test_files_of_the_rest_wait(self) -> None:
        """A file that the rest names is read when there is room for its event."""
        self.fill()
        self.child.print(b"kept in the pipe\n" + FILE)
        self.child.end()
        self.turn()
        self.clock.advance(1000)
        self.assertFalse(self.evaluator_run.run_ended.is_set)
        self.assertIn("kept in the pipe", self.read_all())
        self.file.callback(b"content")
        self.assert_over(status=0)
        self.assertIsNone(self.evaluator_run.failure)
        self.assertIn("Y29udGVudA==", self.text())

    def test_closed_output(self) -> None:
        """No reader stops the clock of a run that has closed its stdout."""
        self.fill()
        self.clock.advance(1000)
        self.child.lose(STDOUT)
        self.assertEqual(self.held, [True, False])
        self.clock.advance(10)
        self.assertEqual(self.child.signals, [signal.SIGTERM])

    def test_stop_while_a_file_waits(self) -> None:
        """A stop refuses the file, takes the rest, and its reason counts."""
        self.fill()
        self.child.print(FILE + b"kept in the pipe")
        self.child.end()
        self.turn()
        self.assertFalse(self.evaluator_run.run_ended.is_set)
        self.evaluator_run.stop(CANCELLED)
        self.assert_over(status=0)
        self.assertIs(self.evaluator_run.failure, CANCELLED)
        self.assertEqual(self.child.signals, [])
        self.assertIn("kept in the pipe", self.text())

    def test_stop_before_the_orphans_are_gone(self) -> None:
        """So does one that comes between the exit and the end of the tree."""
        self.orphans.shut = True
        self.fill()
        self.child.print(FILE + b"kept in the pipe")
        self.child.exit()
        self.evaluator_run.stop(CANCELLED)
        self.turn()
        self.assertTrue(self.child.paused)
        self.orphans.open()
        self.assert_over(status=0)
        self.assertIn("kept in the pipe", self.text())

    def test_full_after_the_exit(self) -> None:
        """Output that is read after the exit may fill the ring, and none of it is lost."""
        self.orphans.shut = True
        self.child.exit()
        self.fill()
        self.child.print(b"kept in the pipe")
        self.orphans.open()
        self.assert_over(status=0)
        self.assertIn("kept in the pipe", self.text())

    def test_stop_takes_all_at_the_exit(self) -> None:
        """One that is stopped is held back until it has exited; then all it printed is taken."""
        self.fill()
        self.child.print(b"kept in the pipe")
        self.evaluator_run.stop(CANCELLED)
        self.turn()
        self.assertTrue(self.child.paused)
        self.child.print(b"\nlast words" * 100)
        self.child.end(signal=signal.SIGTERM)
        self.assert_over(number=signal.SIGTERM)
        self.assertIn("kept in the pipe", self.text())
        self.assertEqual(self.text().count("last words"), 100)


class PauseTests(RunTestCase):
    """How long a run waits for its readers: `LIMIT` seconds, unless they read."""

    LIMIT = 600.0
    capacity = 100
    taken = 0  # bytes that have been read

    def check(self, seconds: float, *, wanted: bool = False) -> bool:
        """Look once a second, for so long, whether it has waited for too long; tell whether."""
        for _ in range(int(seconds)):
            self.clock.advance(1)
            self.evaluator_run.check_reader_timeout(self.LIMIT, self.taken, is_slot_wanted=wanted)
        return bool(self.child.signals)

    def test_not_read(self) -> None:
        """At the limit it is stopped: the failure `unread`, with the setting and its value."""
        self.clock.advance(5)
        self.evaluator_run.set_clock_paused(True)
        self.assertFalse(self.check(599))
        self.assertEqual(self.evaluator_run.result.paused_seconds, 599)
        self.assertTrue(self.check(1))
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        failure = self.evaluator_run.failure
        assert failure is not None
        self.assertEqual(failure.reason, "unread")
        self.assertEqual(failure.extra_members, {"limit": "evaluations.paused", "value": 600})
        self.assertIn("for 600 seconds", failure.message)
        self.child.end(signal=signal.SIGTERM)
        self.assert_over(number=signal.SIGTERM)
        self.assertEqual(self.evaluator_run.result.paused_seconds, 600)

    def test_wanted(self) -> None:
        """While another waits for its place it is a quarter, also when that comes later."""
        self.evaluator_run.set_clock_paused(True)
        self.assertFalse(self.check(149, wanted=True))
        self.assertFalse(self.check(200))
        self.assertTrue(self.check(1, wanted=True))
        failure = self.evaluator_run.failure
        assert failure is not None
        self.assertEqual(failure.extra_members, {"limit": "evaluations.paused", "value": 600})
        self.assertIn("for 350 seconds", failure.message)
        self.assertIn("other evaluations waited", failure.message)

    def test_in_parts(self) -> None:
        """Pauses add up; and it is stopped in a pause, not while it gets on."""
        for _ in range(5):
            self.evaluator_run.set_clock_paused(True)
            self.assertFalse(self.check(110))
            self.evaluator_run.set_clock_paused(False)
            self.assertFalse(self.check(1, wanted=True))
        self.evaluator_run.set_clock_paused(True)
        self.assertFalse(self.check(49))
        self.assertTrue(self.check(1))

    def test_a_slow_reader(self) -> None:
        """Who takes 100 KB a second is quick enough, also while others wait."""
        self.evaluator_run.set_clock_paused(True)
        for second in range(5900):
            self.taken = 100_000 * second
            self.assertFalse(self.check(1, wanted=second < 1400))

    def test_asleep_for_a_minute(self) -> None:
        """A reader who is away for a minute now and then, and takes what there is, comes back."""
        for minute in range(90):
            self.evaluator_run.set_clock_paused(True)
            self.assertFalse(self.check(60, wanted=minute < 20))
            self.taken = 4 * 2**20 * (minute + 1)
            self.evaluator_run.set_clock_paused(False)

    def test_nothing_is_saved_up(self) -> None:
        """What was read before a pause does not make it longer."""
        self.taken = 2**30
        self.check(1)
        self.evaluator_run.set_clock_paused(True)
        self.assertFalse(self.check(599))
        self.assertTrue(self.check(1))

    def test_an_event_a_minute(self) -> None:
        """Who takes next to nothing holds its place for as long as who takes nothing, or so."""
        self.evaluator_run.set_clock_paused(True)
        for minute in range(10):
            self.assertEqual(self.child.signals, [])
            self.check(60)
            self.taken = 100 * minute
        self.assertTrue(self.check(1))

    def test_most(self) -> None:
        """However much is read, all pauses together are ten times as long at most."""
        self.evaluator_run.set_clock_paused(True)
        for second in range(5999):
            self.taken = MIN_READ_BYTES_PER_SECOND * second
            self.assertFalse(self.check(1))
        self.taken = MIN_READ_BYTES_PER_SECOND * 6000
        self.assertTrue(self.check(1))
        failure = self.evaluator_run.failure
        assert failure is not None
        self.assertEqual((failure.reason, failure.extra_members["value"]), ("unread", 600))
        self.assertIn("for 6000 seconds in all", failure.message)

    def test_most_while_wanted(self) -> None:
        """While another waits for its place it is a quarter of that, too."""
        self.evaluator_run.set_clock_paused(True)
        for second in range(1500):
            self.assertEqual(self.child.signals, [])
            self.taken = MIN_READ_BYTES_PER_SECOND * second
            self.check(1, wanted=True)
        failure = self.evaluator_run.failure
        assert failure is not None
        self.assertIn("for 1500 seconds in all while other", failure.message)

    def test_exited(self) -> None:
        """A run that has exited, and has a file that waits for room, is stopped at the limit."""
        self.child.print(b"some line or other\n" * 20)
        self.child.print(FILE + b"kept in the pipe")
        self.check(10)
        self.child.end()
        self.turn()
        self.check(589)
        self.assertFalse(self.evaluator_run.run_ended.is_set)
        self.check(1)
        self.assert_over(status=0)
        self.assertEqual(self.child.signals, [])
        failure = self.evaluator_run.failure
        assert failure is not None
        self.assertEqual(failure.reason, "unread")
        self.assertEqual(self.evaluator_run.result.paused_seconds, 600)
        self.assertIn("kept in the pipe", self.text())

    def test_nothing_left_at_the_exit(self) -> None:
        """One that has exited, and of whose output nothing is left, waits for nobody."""
        self.orphans.shut = True
        self.child.print(b"some line or other\n" * 20)
        self.check(10)
        self.child.end()
        self.orphans.open()
        self.assert_over(status=0)
        self.assertIsNone(self.evaluator_run.failure)
        self.assertEqual(self.evaluator_run.result.paused_seconds, 10)
