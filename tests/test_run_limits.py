"""`tawebeval.run`: the limits of a run, and how it waits for its readers."""

from __future__ import annotations

import signal

from tawebeval.config import Limits
from tawebeval.errors import EvaluationError, over_limit
from tawebeval.groups import Usage
from tests.fake_cells import FakeCell
from tests.test_run import CANCELLED, GRACE, RunTestCase


class TimeoutTests(RunTestCase):
    """The limit of time."""

    def test_timeout(self) -> None:
        """At the limit it is stopped: the failure `timeout`, with the limit's name and value."""
        self.clock.advance(9.999)
        self.assertEqual(self.child.signals, [])
        self.clock.advance(0.001)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        failure = self.run.failure
        assert failure is not None
        self.assertEqual(failure.reason, "timeout")
        self.assertEqual(failure.members, {"limit": "limits.wall_clock", "value": 10})
        self.assertIn("10 seconds", failure.message)
        self.clock.advance(GRACE)
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        self.assertIs(self.run.failure, failure)

    def test_held_time(self) -> None:
        """Time in which stdout is not read does not count, however often that happens."""
        for _ in range(3):
            self.clock.advance(3)
            self.run.hold(True)
            self.clock.advance(1000)
            self.run.hold(False)
        self.clock.advance(0.999)
        self.assertEqual(self.child.signals, [])
        self.clock.advance(0.001)
        self.assertEqual(self.child.signals, [signal.SIGTERM])

    def test_held_at_the_limit(self) -> None:
        """One whose time is used up just as it is held is stopped when it goes on."""
        self.clock.advance(9)
        self.run.hold(True)
        self.run.hold(True)
        self.run.hold(False)
        self.clock.advance(1)
        self.assertEqual(self.child.signals, [signal.SIGTERM])

    def test_no_clock_after_the_exit(self) -> None:
        """The clock stands when the process has exited, whoever holds its stdout."""
        self.orphans.shut = True
        self.child.exit(0)
        self.run.hold(True)
        self.run.hold(False)
        self.clock.advance(100)
        self.orphans.open()
        self.child.close()
        self.assert_over(status=0)
        self.assertIsNone(self.run.failure)


class CellTests(RunTestCase):
    """What the cell says of a run that has ended badly."""

    limits = Limits(wall_clock=10, cpu=5)

    def end(self, number: int, cpu: float) -> EvaluationError:
        """End by a signal, after so much processor time; return the failure."""
        self.cell.used = Usage(cpu, None)
        self.child.end(signal=number)
        self.turn()
        self.assertTrue(self.run.ended.is_set)
        assert self.run.failure is not None
        return self.run.failure

    def test_cpu(self) -> None:
        """The signal of the limit of processor time is believed when that was used."""
        error = self.end(signal.SIGXCPU, 5.1)
        self.assertEqual(error.members, {"limit": "limits.cpu", "value": 5})

    def test_no_cpu(self) -> None:
        """Anybody may end by it: then that is how it has ended."""
        error = self.end(signal.SIGXCPU, 0.1)
        self.assertEqual((error.reason, error.members["signal"]), ("exit", signal.SIGXCPU))

    def test_file_size(self) -> None:
        """So with that of a too large file, which the cell would have found."""
        self.assertEqual(self.end(signal.SIGXFSZ, 0.1).reason, "exit")
        self.assertEqual(self.cell.looks, [True])

    def test_limit(self) -> None:
        """A limit that the cell knows of explains a bad end."""
        self.cell.over = over_limit("disk", "disk", "bytes", 7)
        self.assertEqual(self.end(signal.SIGKILL, 0.1).reason, "disk")

    def test_no_answer(self) -> None:
        """A cell that cannot be asked hides no failure."""

        def fail(*final: bool) -> None:
            raise OSError(24, "Too many open files")

        self.patch(FakeCell, "exceeded", fail)
        self.patch(FakeCell, "usage", fail)
        self.child.end(status=3)
        self.assert_over(status=3)
        assert self.run.failure is not None
        self.assertEqual(self.run.failure.reason, "exit")
        self.assertEqual(len(self.flushLoggedErrors(OSError)), 2)

    def test_not_started(self) -> None:
        """A sandbox that did not start says so, with what it complained of."""
        self.cell.unstarted = EvaluationError("lost", "no sandbox")
        self.child.complain(b"bwrap: no")
        self.child.end(status=1)
        self.turn()
        failure = self.run.failure
        assert failure is not None
        self.assertEqual((failure.reason, failure.members), ("lost", {"stderr": "bwrap: no"}))
        self.assertIs(self.run.exit, None)

    def test_too_little_for_a_sandbox(self) -> None:
        """One whose own limit has kept it from starting goes by that."""
        self.cell.unstarted = EvaluationError("lost", "no sandbox")
        self.cell.over = over_limit("processes", "processes", "processes", 2)
        self.child.end(status=1)
        self.turn()
        self.assertIs(self.run.failure, self.cell.over)


class OutputTests(RunTestCase):
    """The limit of output."""

    limits = Limits(wall_clock=10, output=1024)

    def test_exactly(self) -> None:
        """As much as the limit is allowed."""
        self.child.print(b"x" * 1000)
        self.child.print(b"y" * 24)
        self.assertEqual(self.child.signals, [])
        self.child.end()
        self.assert_over(status=0)
        self.assertIsNone(self.run.failure)
        self.assertEqual(self.text(), "x" * 1000 + "y" * 24)

    def test_one_more(self) -> None:
        """One byte more stops it: the failure `output`; what was within the limit stays."""
        self.child.print(b"x" * 1000)
        self.child.print(b"y" * 25)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        self.child.print(b"z" * 5000)
        self.child.end(signal=signal.SIGTERM)
        self.assert_over(number=signal.SIGTERM)
        failure = self.run.failure
        assert failure is not None
        self.assertEqual(failure.reason, "output")
        self.assertEqual(failure.members, {"limit": "limits.output", "value": 1024})
        self.assertEqual(self.text(), "x" * 1000 + "y" * 24)

    def test_one_byte_after_the_limit(self) -> None:
        """It is noticed also when the limit was reached exactly before."""
        self.child.print(b"x" * 1024)
        self.child.print(b"y")
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        self.child.end()
        self.assert_over(status=0)
        self.assertEqual(self.text(), "x" * 1024)

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
        self.ring.acknowledge(self.ring.newest)
        self.intake.acknowledged()
        self.assertEqual(self.held, [True, False])
        self.clock.advance(5.9)
        self.assertEqual(self.child.signals, [])
        self.clock.advance(0.1)
        self.assertEqual(self.child.signals, [signal.SIGTERM])

    def test_ends_without_readers(self) -> None:
        """What the pipe still holds at the exit is taken, so that the end waits for no reader."""
        self.fill()
        self.child.print(b"kept in the pipe")
        self.child.end()
        self.assert_over(status=0)
        self.assertIsNone(self.run.failure)
        self.assertIn("kept in the pipe", self.text())

    def test_full_after_the_exit(self) -> None:
        """Output that is read after the exit may fill the ring, and none of it is lost."""
        self.orphans.shut = True
        self.child.exit()
        self.fill()
        self.child.print(b"kept in the pipe")
        self.orphans.open()
        self.turn()
        self.assert_over(status=0)
        self.assertIn("kept in the pipe", self.text())

    def test_stop_takes_all_at_the_exit(self) -> None:
        """One that is stopped is held back until it has exited; then all it printed is taken."""
        self.fill()
        self.child.print(b"kept in the pipe")
        self.run.stop(CANCELLED)
        self.turn()
        self.assertTrue(self.child.paused)
        self.child.print(b"\nlast words" * 100)
        self.child.end(signal=signal.SIGTERM)
        self.assert_over(number=signal.SIGTERM)
        self.assertIn("kept in the pipe", self.text())
        self.assertEqual(self.text().count("last words"), 100)
