"""`slurm.node`: the window of stdout, with a fake evaluator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.slurm import node
from tawebeval.slurm.frames import GRANT, WINDOW


class FakeWriter:
    """Writer of frames that nobody reads."""

    def __init__(self, *_: Any) -> None:
        """Ignore reactor and descriptor."""

    def write_frame(self, *_: Any) -> None:
        """Ignore a frame."""


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


class WindowTests(SynchronousTestCase):
    """Where the node stops reading stdout."""

    def setUp(self) -> None:
        self.patch(node, "FrameWriter", FakeWriter)
        self.evaluator = FakeEvaluator()
        order: Any = SimpleNamespace(limits=SimpleNamespace(stderr=0))
        unused: Any = None
        run: Any = self.evaluator
        self.run_ = node.NodeRun(order, run, unused, unused)
        self.run_.makeConnection(self.evaluator)

    def test_grants(self) -> None:
        """It stops at the largest offset that was granted."""
        self.run_.outReceived(b"x" * (WINDOW + 5))
        self.assertTrue(self.evaluator.is_paused)
        self.run_.take_command(GRANT, WINDOW + 5)
        self.assertTrue(self.evaluator.is_paused)
        self.run_.take_command(GRANT, WINDOW + 6)
        self.assertFalse(self.evaluator.is_paused)
        self.run_.take_command(GRANT, 1)
        self.run_.outReceived(b"x")
        self.assertTrue(self.evaluator.is_paused)

    def test_deserted(self) -> None:
        """Without srun it kills the evaluator, and reads to the end: nobody grants any more."""
        for printed in (WINDOW - 1, 1):
            self.run_.outReceived(b"x" * printed)
            self.run_.take_command(None, 0)
            self.run_.outReceived(b"x" * WINDOW)
            self.assertEqual(self.evaluator.signals, [9])
            self.assertFalse(self.evaluator.is_paused)
            self.setUp()
