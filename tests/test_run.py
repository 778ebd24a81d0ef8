"""`tawebeval.run`: one run, watched over, with a fake child and a Clock."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.budget import Budget
from tawebeval.config import Limits
from tawebeval.errors import EvaluationError
from tawebeval.events import Batch
from tawebeval.fileblock import WantedFile
from tawebeval.groups import Usage
from tawebeval.intake import Intake
from tawebeval.ring import Ring
from tawebeval.run import STDERR_TAIL, Run
from tawebeval.sandbox import Exit
from tawebeval.segi import Parser
from tawebeval.workspace import Workspace
from tests.fake_cells import FakeCell
from tests.fake_children import FakeChild
from tests.fakes import InlineThreads
from tests.gates import Gate
from tests.strategies import MARKERS, read

GRACE = 2.0
CANCELLED = EvaluationError("cancelled", "enough")


class RunTestCase(SynchronousTestCase):
    """A run, its child and its ring; `capacity` is when the ring is full."""

    capacity = 2**40
    limits = Limits(wall_clock=10, output=100_000)

    def setUp(self) -> None:
        self.clock = Clock()
        self.ring = Ring()
        self.orphans = Gate()
        self.file: Deferred[bytes] = Deferred()  # of one that the evaluator names
        self.held: list[bool] = []
        self.intake = Intake(
            self.clock,
            Parser(MARKERS),
            self.ring,
            Budget(2**41, self.capacity, 1, lambda call: self.clock.callLater(0, call)).enter(),
            self,
        )
        self.cell = FakeCell(self.limits, Workspace(Path("/some")).as_it_is(), self.orphans)
        self.run = Run(self.clock, self.intake, GRACE, self.cell, InlineThreads())
        self.child = FakeChild(self.clock, self.run)
        self.run.makeConnection(self.child)

    def printed(self) -> None:
        """Tell nobody."""

    def read_file(self, wanted: WantedFile) -> Deferred[bytes]:
        """Let the test supply the file."""
        return self.file

    def hold(self, held: bool) -> None:
        """Pass on that the ring is full, or is not any more, as an evaluation does."""
        self.held.append(held)
        self.run.hold(held)

    def turn(self) -> None:
        """Let happen what is due now."""
        self.clock.pump([0] * 3)

    def text(self) -> str:
        """Return what is in the ring, which is text."""
        batch: Batch = self.ring.read(self.ring.oldest, 10**9)
        return "".join(str(event) for event in read(batch))

    def assert_over(self, status: int | None = None, number: int | None = None) -> None:
        """Hold that the run has ended so, and that nothing of it is left to happen."""
        self.turn()
        self.assertTrue(self.run.ended.is_set)
        self.assertEqual(self.run.exit, Exit(status, number))
        self.assertEqual(self.clock.getDelayedCalls(), [])


class EndTests(RunTestCase):
    """How runs end by themselves."""

    def test_good_end(self) -> None:
        """Status 0 is no failure; all output is there, its last line too."""
        self.child.print(b"hello\nworld")
        self.child.end()
        self.assert_over(status=0)
        self.assertIsNone(self.run.failure)
        self.assertEqual(self.text(), "hello\nworld")
        waited = self.child.usage
        assert waited is not None
        self.assertEqual(self.run.usage, Usage(waited.ru_utime + waited.ru_stime, None))

    def test_status(self) -> None:
        """Another status is the failure `exit`, with the status and stderr."""
        self.child.complain(b"no such file\n")
        self.child.end(3)
        self.assert_over(status=3)
        failure = self.run.failure
        assert failure is not None
        self.assertEqual(failure.reason, "exit")
        self.assertEqual(failure.members, {"status": 3, "stderr": "no such file\n"})
        self.assertIn("status 3", failure.message)

    def test_signal(self) -> None:
        """A signal that nobody here sent is the failure `exit` with that signal."""
        self.child.end(signal=signal.SIGSEGV)
        self.assert_over(number=signal.SIGSEGV)
        failure = self.run.failure
        assert failure is not None
        self.assertEqual(failure.reason, "exit")
        self.assertEqual(failure.members, {"signal": 11, "stderr": ""})
        self.assertIn("signal 11 (Segmentation fault)", failure.message)

    def test_stderr_after_the_exit(self) -> None:
        """What stands in the pipes at the exit belongs to the run as well."""
        self.orphans.shut = True
        self.child.exit(1)
        self.child.print(b"late")
        self.child.complain(b"last words")
        self.orphans.open()
        self.assert_over(status=1)
        assert self.run.failure is not None
        self.assertEqual(self.run.failure.members["stderr"], "last words")
        self.assertEqual(self.text(), "late")

    def test_the_group_is_killed(self) -> None:
        """What the process left in its group is killed when it exits, and not before."""
        self.turn()
        self.assertEqual(self.child.group_signals, [])
        self.child.end()
        self.assertEqual(self.child.group_signals, [signal.SIGKILL])
        self.assertEqual(self.child.signals, [])

    def test_pipes_held_by_others(self) -> None:
        """Who still holds stdout when the orphans are gone is not waited for."""
        self.orphans.shut = True
        self.child.print(b"printed")
        self.child.exit()
        self.turn()
        self.assertFalse(self.child.rest_wanted)
        self.assertFalse(self.run.ended.is_set)
        self.orphans.open()
        self.assertTrue(self.child.rest_wanted)
        self.assert_over(status=0)
        self.assertEqual(self.text(), "printed")

    def test_files_hold_up_the_end(self) -> None:
        """Nor before a file that it named is read, and stands among the events."""
        self.child.print(b"~FB\nX-SEGI-As: path\n\nout.txt\n~FE")
        self.child.end()
        self.turn()
        self.assertFalse(self.run.ended.is_set)
        self.file.callback(b"content")
        self.assert_over(status=0)
        self.assertEqual(self.ring.newest, 1)

    def test_orphans_hold_up_the_end(self) -> None:
        """It has not ended before its orphans are gone, although its pipes are closed."""
        self.orphans.shut = True
        self.child.end()
        self.turn()
        self.assertEqual(len(self.orphans), 1)
        self.assertFalse(self.run.ended.is_set)
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
        self.assertEqual(STDERR_TAIL, 8192)
        self.assertEqual(self.run.stderr, everything[-8192:])
        self.child.complain(b"x" * 10000)
        self.assertEqual(self.run.stderr, "x" * 8192)

    def test_bytes(self) -> None:
        """It is shown as UTF-8, with what is not replaced; it is no part of the events."""
        self.child.complain(b"\xff\xc3")
        self.child.complain(b"\xa9")
        self.assertEqual(self.run.stderr, "\ufffd\u00e9")
        self.assertEqual(self.ring.newest, 0)

    def test_begins_with_a_character(self) -> None:
        """A character that does not fit as a whole is left out, however stderr came."""
        for end in ("", "a", "ab", "abc"):
            for size in (1, 3, 20_000):
                printed = ("😀" * 3000 + end).encode()
                for at in range(0, len(printed), size):
                    self.child.complain(printed[at : at + size])
                characters = (STDERR_TAIL - len(end)) // 4
                self.assertEqual(self.run.stderr, "😀" * characters + end)

    def test_stray_bytes(self) -> None:
        """With what is not UTF-8 replaced it is no longer either."""
        self.child.complain(b"\xff" * 10_000 + b"end")
        self.assertEqual(self.run.stderr, "\ufffd" * 2729 + "end")
        self.child.complain(b"\x80")
        self.assertEqual(self.run.stderr, "\ufffd" * 2728 + "end\ufffd")


class StopTests(RunTestCase):
    """How runs are ended."""

    def test_term_then_kill(self) -> None:
        """TERM at once, KILL after the grace time, and not one moment before."""
        self.run.stop(CANCELLED)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        self.clock.advance(GRACE - 0.001)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        self.clock.advance(0.001)
        self.assertEqual(self.child.signals, [signal.SIGTERM, signal.SIGKILL])
        self.assertFalse(self.run.ended.is_set)
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        self.assertIs(self.run.failure, CANCELLED)

    def test_obedient(self) -> None:
        """One that goes on TERM gets no KILL, and what it still prints counts."""
        self.child.print(b"working\n")
        self.run.stop(CANCELLED)
        self.clock.advance(1)
        self.child.print(b"goodbye\n")
        self.child.end(0)
        self.assert_over(status=0)
        self.clock.advance(100)
        self.assertEqual(self.child.signals, [signal.SIGTERM])
        self.assertIs(self.run.failure, CANCELLED)
        self.assertEqual(self.text(), "working\ngoodbye\n")

    def test_first_reason_counts(self) -> None:
        """Neither a second reason nor the exit that follows replaces the first."""
        self.run.stop(CANCELLED)
        self.run.stop(EvaluationError("shutdown", "too late"))
        self.clock.advance(20)  # over the time limit, too
        self.child.end(signal=signal.SIGKILL)
        self.assert_over(number=signal.SIGKILL)
        self.assertIs(self.run.failure, CANCELLED)
        self.assertEqual(self.child.signals, [signal.SIGTERM, signal.SIGKILL])

    def test_after_the_exit(self) -> None:
        """What has exited by itself gets no signal, but its end was still asked for."""
        self.child.exit(0)
        self.run.stop(CANCELLED)
        self.child.close()
        self.assert_over(status=0)
        self.assertEqual(self.child.signals, [])
        self.assertIs(self.run.failure, CANCELLED)
