"""`slurm.transport`: the process of a run, with a fake srun and a Clock."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import EvaluationFailure
from tawebeval.linux.child import StartedProcess
from tawebeval.sandbox.base import RunnerStatus
from tawebeval.slurm.frames import KILL, TERMINATE, FrameKind, encode_frame
from tawebeval.slurm.jobs import QueuedJob
from tawebeval.slurm.transport import KILL_PATIENCE, NodeTransport, wait_for_begin

GOOD = {"exit": [0, None], "over": None, "usage": [0.5, None]}


class FakeSrun:
    """An srun: what it was sent, and how it ends."""

    def __init__(self, protocol: ProcessProtocol) -> None:
        self.protocol = protocol
        self.signals: list[int] = []
        protocol.makeConnection(self)

    def signal_group(self, number: int) -> None:
        """Note a signal."""
        self.signals.append(number)

    def tell(self, kind: FrameKind, content: bytes | Mapping[str, Any] = b"") -> None:
        """Send a frame of the node."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.protocol.childDataReceived(1, encode_frame(kind, data))

    def begin(self, node: str = "one") -> None:
        """Tell that the evaluator runs."""
        self.tell(FrameKind.BEGUN, {"job": "5", "node": node})

    def say(self, words: str) -> None:
        """Print words of srun itself."""
        self.protocol.childDataReceived(2, words.encode())

    def end(self, status: int = 0) -> None:
        """End."""
        value = ProcessTerminated(status) if status else ProcessDone(0)
        self.protocol.processEnded(Failure(value))


class FakeSpawner:
    """Takes over children that are fake."""

    def __init__(self) -> None:
        self.children: list[FakeSrun] = []

    def adopt_child(self, protocol: ProcessProtocol, started: StartedProcess) -> Any:
        """Make an srun."""
        self.children.append(FakeSrun(protocol))


class FakeCommands:
    """Slurm's commands: `job` is what scontrol tells."""

    def __init__(self) -> None:
        self.job: dict[str, str] = {}
        self.watched: dict[str, Any] = {}
        self.cancelled: list[str] = []

    async def show_job(self, identifier: str) -> Mapping[str, str]:
        """Return the job."""
        return {"JobId": identifier, **self.job} if self.job else {}

    def watch_job(self, name: str, on_state: Any) -> None:
        """Note a watcher."""
        self.watched[name] = on_state

    def forget_job(self, name: str) -> None:
        """Forget it."""
        self.watched.pop(name, None)

    def cancel_job(self, name: str) -> None:
        """Note a cancellation."""
        self.cancelled.append(name)


class FakeRun(ProcessProtocol):
    """The run behind the transport, which notes what it is told."""

    def __init__(self) -> None:
        self.out = b""
        self.err = b""
        self.pieces = 0
        self.told: list[str] = []
        self.clock: list[str] = []

    def outReceived(self, data: bytes) -> None:
        self.out += data
        self.pieces += 1

    def errReceived(self, data: bytes) -> None:
        self.err += data

    def processExited(self, reason: Failure) -> None:
        self.told.append("exited")

    def processEnded(self, reason: Failure) -> None:
        self.told.append(type(reason.value).__name__)

    def suspend_clock(self) -> None:
        """Note it."""
        self.clock.append("suspend")

    def restart_clock(self) -> None:
        """Note it."""
        self.clock.append("restart")


class TransportTests(SynchronousTestCase):
    """One run on a node."""

    retries = 0

    def setUp(self) -> None:
        self.clock = Clock()
        self.commands = FakeCommands()
        self.spawner = FakeSpawner()
        self.status = RunnerStatus("slurm")
        self.gate: Deferred[None] = succeed(None)
        self.lines, orders = self.pipe()
        self.transport = NodeTransport(
            *(self.clock, self.spawner, self.commands, self.status),  # type: ignore[arg-type]
            self.start_again,
            self.retries,
        )
        self.transport.adopt(StartedProcess(9, -1, -1, -1), "job-0", orders)
        self.run_ = FakeRun()
        self.begun = Deferred.fromCoroutine(wait_for_begin(self.transport))

    def pipe(self) -> tuple[int, int]:
        """Return a pipe; what a closed write end leaves is read to the end."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        self.addCleanup(os.close, reading)
        return reading, writing

    async def start_again(self, attempt: int) -> tuple[StartedProcess, str, int]:
        """Start another srun, once `gate` is open."""
        await self.gate
        self.lines, orders = self.pipe()
        return StartedProcess(10, -1, -1, -1), f"job-{attempt}", orders

    @property
    def srun(self) -> FakeSrun:
        """The srun that was started last."""
        return self.spawner.children[-1]

    def connect(self) -> None:
        """Begin, and connect the run."""
        self.srun.begin()
        self.successResultOf(self.begun)
        self.transport.connect(self.run_)

    def turn(self) -> None:
        """Let happen what is due."""
        self.clock.pump([0] * 8)

    def read_lines(self) -> bytes:
        """Return what the node was sent; b"" after its stdin was closed."""
        try:
            return os.read(self.lines, 1000)
        except BlockingIOError:
            return b"-"


class RunTests(TransportTests):
    """The usual life, and its ends."""

    def test_good(self) -> None:
        """Output before the exit, the exit before the end of the pipes, and nothing is left."""
        self.connect()
        self.srun.tell(FrameKind.STDOUT, b"one")
        self.srun.tell(FrameKind.STDERR, b"two")
        self.srun.tell(FrameKind.EXITED)
        self.assertEqual(self.run_.told, ["exited"])
        self.srun.tell(FrameKind.STDOUT, b" late")
        self.srun.tell(FrameKind.OUTCOME, GOOD)
        self.turn()
        self.assertEqual((self.run_.out, self.run_.err), (b"one late", b"two"))
        self.assertEqual(self.run_.told, ["exited", "ProcessDone"])
        self.assertEqual(self.read_lines(), b"")  # its stdin is closed
        self.srun.end()
        self.assertEqual((self.status.job, self.status.node), ("5", "one"))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_queue(self) -> None:
        """The queue's reason is shown until the evaluator runs."""
        self.commands.watched["job-0"](QueuedJob("5", "PENDING", "Resources", ""))
        self.assertEqual((self.status.job, self.status.queue_reason), ("5", "Resources"))
        self.assertNoResult(self.begun)
        self.connect()
        self.assertIsNone(self.status.queue_reason)
        self.assertEqual(self.commands.watched, {})

    def test_pause(self) -> None:
        """A paused run gets no stdout and grants none; the exit passes by."""
        self.connect()
        self.transport.pauseProducing()
        for _ in range(4):
            self.srun.tell(FrameKind.STDOUT, b"x" * 65536)
        self.srun.tell(FrameKind.EXITED)
        self.turn()
        self.assertEqual((self.run_.out, self.run_.told), (b"", ["exited"]))
        self.assertEqual(self.read_lines(), b"-")
        self.transport.resumeProducing()
        self.turn()
        self.assertEqual(len(self.run_.out), 4 * 65536)
        self.assertEqual(self.read_lines(), b"A65536\n" * 4)

    def test_stderr(self) -> None:
        """What comes from stderr passes stdout that a paused run holds up."""
        self.connect()
        self.transport.pauseProducing()
        self.srun.tell(FrameKind.STDOUT, b"x")
        self.srun.tell(FrameKind.STDERR, b"one")
        self.assertEqual((self.run_.out, self.run_.err), (b"", b"one"))

    def test_pieces(self) -> None:
        """Small frames that wait are joined."""
        self.connect()
        self.transport.pauseProducing()
        for _ in range(1000):
            self.srun.tell(FrameKind.STDOUT, b"x")
        self.transport.resumeProducing()
        self.turn()
        self.assertEqual((self.run_.out, self.run_.pieces), (b"x" * 1000, 1))

    def test_signals(self) -> None:
        """TERM and KILL go to the node; one that is deaf is given up, with its job."""
        self.connect()
        self.transport.send_command(TERMINATE)
        self.transport.send_command(KILL)
        self.assertEqual(self.read_lines(), b"T\nK\n")
        self.clock.advance(KILL_PATIENCE)
        self.assertEqual((self.srun.signals, self.commands.cancelled), ([15], ["job-0"]))
        self.clock.advance(KILL_PATIENCE)
        self.assertEqual(self.srun.signals, [15, 9])
        self.srun.end(1)
        self.turn()
        self.assertEqual(self.run_.told, ["exited", "ProcessTerminated"])

    def test_cancelled_in_queue(self) -> None:
        """Who is cancelled in the queue waits for the end of srun."""
        self.begun.cancel()
        self.assertNoResult(self.begun)
        self.assertEqual((self.srun.signals, self.commands.cancelled), ([15], ["job-0"]))
        self.srun.end(1)
        self.failureResultOf(self.begun)

    def test_refused(self) -> None:
        """A job that Slurm does not take fails with srun's words."""
        self.srun.say("srun: error: invalid partition specified: none\n")
        self.srun.end(1)
        error = self.failureResultOf(self.begun, EvaluationFailure).value
        self.assertIn("invalid partition", str(error))

    def test_lost(self) -> None:
        """A lost job ends the run, with Slurm's reason."""
        self.connect()
        self.commands.job = {"JobState": "NODE_FAIL", "NodeList": "one"}
        self.srun.tell(FrameKind.STDOUT, b"one")
        self.srun.end(1)
        self.turn()
        self.assertEqual(self.run_.out, b"one")
        self.assertEqual(self.run_.told, ["exited", "ProcessTerminated"])
        assert self.transport.loss is not None
        self.assertEqual(self.transport.loss.reason, "node")

    def test_foreign(self) -> None:
        """What is no frame ends srun, and is told."""
        self.srun.protocol.childDataReceived(1, b"Welcome to the cluster!")
        self.assertEqual(self.srun.signals, [15])
        self.srun.end(1)
        error = self.failureResultOf(self.begun, EvaluationFailure).value
        self.assertIn("Welcome to the cluster!", str(error))

    def test_memory(self) -> None:
        """Slurm's word on the memory explains a bad exit."""
        self.connect()
        self.srun.tell(FrameKind.OUTCOME, {**GOOD, "exit": [None, 9]})
        self.turn()
        self.assertEqual(self.run_.told, ["exited"])
        self.srun.say("slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.\n")
        self.srun.end(1)
        self.turn()
        self.assertEqual(self.run_.told, ["exited", "ProcessTerminated"])
        assert self.transport.loss is not None
        self.assertEqual(self.transport.loss.reason, "memory")


class RetryTests(TransportTests):
    """A lost node, with one retry."""

    retries = 1

    def setUp(self) -> None:
        super().setUp()
        self.commands.job = {"JobState": "NODE_FAIL", "NodeList": "one"}

    def test_retry(self) -> None:
        """What has printed nothing is begun again, with all its time; once."""
        self.connect()
        self.srun.end(1)
        self.assertEqual((self.run_.told, self.run_.clock), ([], ["suspend"]))
        self.assertEqual((self.status.retries, len(self.spawner.children)), (1, 2))
        self.srun.begin("two")
        self.assertEqual((self.run_.clock, self.status.node), (["suspend", "restart"], "two"))
        self.srun.end(1)
        self.turn()
        self.assertEqual(self.run_.told, ["exited", "ProcessTerminated"])

    def test_queued(self) -> None:
        """A job that was lost before it began is begun again, too, and not shown any more."""
        self.commands.watched["job-0"](QueuedJob("5", "PENDING", "Resources", ""))
        self.srun.end(1)
        self.assertNoResult(self.begun)
        self.assertEqual((self.status.job, self.status.queue_reason), (None, None))
        self.connect()
        self.assertEqual(self.status.retries, 1)

    def test_printed(self) -> None:
        """What has printed is not begun again: events never repeat."""
        self.connect()
        self.srun.tell(FrameKind.STDERR, b"x")
        self.srun.end(1)
        self.turn()
        self.assertEqual((self.run_.told[0], len(self.spawner.children)), ("exited", 1))

    def test_cancelled(self) -> None:
        """What was stopped is not begun again, and a stop in between ends the wait."""
        self.connect()
        self.srun.end(1)
        self.transport.send_command(TERMINATE)
        self.assertEqual(self.srun.signals, [15])
        self.srun.end(1)
        self.turn()
        self.assertEqual(self.run_.told, ["exited", "ProcessTerminated"])
        self.assertEqual(len(self.spawner.children), 2)

    def test_stopped_between(self) -> None:
        """A stop while another srun is started ends that one, too."""
        self.connect()
        self.gate = Deferred()
        self.srun.end(1)
        self.transport.send_command(TERMINATE)
        self.gate.callback(None)
        self.assertEqual((self.srun.signals, self.commands.cancelled[-1]), ([15], "job-1"))
        self.srun.begin("two")
        self.srun.end(1)
        self.turn()
        self.assertEqual(self.run_.told, ["exited", "ProcessTerminated"])
        self.assertEqual((self.run_.clock, len(self.spawner.children)), (["suspend"], 2))

    def test_cancelled_between(self) -> None:
        """A cancellation between two sruns waits for the end of the second."""
        self.srun.say("srun: job 5 queued and waiting for resources\n")
        self.gate = Deferred()
        self.srun.end(1)
        self.begun.cancel()
        self.assertNoResult(self.begun)
        self.gate.callback(None)
        self.assertEqual((self.srun.signals, self.commands.cancelled[-1]), ([15], "job-1"))
        self.assertNoResult(self.begun)
        self.srun.end(1)
        self.failureResultOf(self.begun, CancelledError)
        self.assertEqual(len(self.spawner.children), 2)
