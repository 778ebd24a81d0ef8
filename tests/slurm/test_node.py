"""`slurm.node`: the output of a fake evaluator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.slurm import node
from tawebeval.slurm.frames import GRANT, WINDOW, FrameKind


class FakeWriter:
    """Writer that notes frames."""

    def __init__(self, *_: Any) -> None:
        self.frames: list[tuple[FrameKind, bytes]] = []

    def write_frame(self, kind: FrameKind, content: bytes = b"") -> None:
        """Note a frame."""
        self.frames.append((kind, content))

    def loseConnection(self) -> None:
        """Do nothing."""


class FakeEvaluator:
    """The evaluator's process, and its sandbox."""

    is_running = True
    is_paused = False

    def __init__(self) -> None:
        self.signals: list[int] = []

    def pauseProducing(self) -> None:
        """Note a pause."""
        self.is_paused = True

    def resumeProducing(self) -> None:
        """Note the end of a pause."""
        self.is_paused = False

    def set_first_process(self, process: Any) -> None:
        """Do nothing."""

    def send_signal(self, process: Any, number: int) -> None:
        """Note a signal."""
        self.signals.append(number)


class OutputTests(SynchronousTestCase):
    """What the node sends, and where it stops reading stdout."""

    def setUp(self) -> None:
        self.patch(node, "FrameWriter", FakeWriter)
        self.evaluator = FakeEvaluator()
        order: Any = SimpleNamespace(limits=SimpleNamespace(stderr=99))
        unused: Any = None
        run: Any = self.evaluator
        self.clock = Clock()
        self.run_ = node.NodeRun(order, run, unused, self.clock)
        self.run_.makeConnection(self.evaluator)

    @property
    def frames(self) -> list[tuple[FrameKind, bytes]]:
        """What was sent."""
        writer: Any = self.run_._writer
        return list(writer.frames)

    def test_small_writes(self) -> None:
        """The first byte is sent at once; many come in one frame, and all before the outcome."""
        for _ in range(1000):
            self.run_.outReceived(b"x")
        self.assertEqual(self.frames, [(FrameKind.STDOUT, b"x")])
        self.clock.advance(0.002)
        self.assertEqual(self.frames[1:], [(FrameKind.STDOUT, b"x" * 999)])
        self.clock.advance(0.004)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        for data in (b"a", b"b", b"c" * 100_000, b"d"):
            self.run_.outReceived(data)
        self.run_.errReceived(b"e")
        self.run_.errReceived(b"f")
        self.assertEqual([len(content) for _, content in self.frames[2:]], [1, 100_001, 1])
        self.run_.tell_outcome({})
        self.assertEqual(
            self.frames[5:],
            [(FrameKind.STDOUT, b"d"), (FrameKind.STDERR, b"f"), (FrameKind.OUTCOME, b"{}")],
        )

    def test_many_writes(self) -> None:
        """A stream without pauses has few frames; after a pause it begins anew."""
        for _ in range(1000):
            self.run_.outReceived(b"x")
            self.clock.advance(0.001)
        self.assertLess(len(self.frames), 70)
        self.clock.pump([0.02] * 3)
        before = len(self.frames)
        self.run_.outReceived(b"y")
        self.run_.outReceived(b"z")
        self.clock.advance(0.002)
        self.assertEqual(self.frames[before:], [(FrameKind.STDOUT, b"y"), (FrameKind.STDOUT, b"z")])

    def test_grants(self) -> None:
        """It stops at the largest offset that was granted."""
        self.run_.outReceived(b"x" * (WINDOW + 5))
        self.assertTrue(self.evaluator.is_paused)
        self.run_.take_command(GRANT, b"%d" % (WINDOW + 5))
        self.assertTrue(self.evaluator.is_paused)
        self.run_.take_command(GRANT, b"%d" % (WINDOW + 6))
        self.assertFalse(self.evaluator.is_paused)
        self.run_.take_command(GRANT, b"1")
        self.run_.outReceived(b"x")
        self.assertTrue(self.evaluator.is_paused)

    def test_deserted(self) -> None:
        """Without srun it kills the evaluator, and reads to the end: nobody grants any more."""
        for printed in (WINDOW - 1, 1):
            self.run_.outReceived(b"x" * printed)
            self.run_.take_command(None, b"")
            self.run_.outReceived(b"x" * WINDOW)
            self.assertEqual(self.evaluator.signals, [9])
            self.assertFalse(self.evaluator.is_paused)
            self.setUp()
