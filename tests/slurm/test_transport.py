"""`slurm.transport`: the process of a run, with a fake srun and a Clock."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.deferreds import OneShotEvent
from tawebeval.errors import EvaluationFailure
from tawebeval.linux.child import StartedProcess
from tawebeval.sandbox.base import RunnerStatus
from tawebeval.sandbox.workspace import FileRefused
from tawebeval.slurm import transport
from tawebeval.slurm.frames import (
    KILL,
    STDOUT_WINDOW_BYTES,
    TERMINATE,
    FrameKind,
    decode_file_request,
    encode_frame,
)
from tawebeval.slurm.job_counters import JobCounters
from tawebeval.slurm.jobs import QueuedJob
from tawebeval.slurm.node_files import ANSWER_TIMEOUT
from tawebeval.slurm.transport import (
    JOB_QUERY_TIMEOUT,
    KILL_ANSWER_TIMEOUT,
    NodeTransport,
    StartedSrun,
    wait_for_evaluator_start,
)

GOOD = {"exit": [0, None], "over": None, "usage": [0.5, None]}


class FakeSrun:
    """An srun: what it was sent, and how it ends."""

    pid = 9

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
        self.tell(FrameKind.EVALUATOR_STARTING, {"job": "5", "node": node})

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
        self.error: OSError | None = None

    def adopt_child(self, protocol: ProcessProtocol, started: StartedProcess) -> Any:
        """Make an srun."""
        if self.error is not None:
            raise self.error
        self.children.append(FakeSrun(protocol))


class FakeCommands:
    """Slurm's commands: `job` is what scontrol tells."""

    def __init__(self) -> None:
        self.job: dict[str, str] = {}
        self.is_away = False
        self.counters = JobCounters()
        self.watched: dict[str, Any] = {}
        self.cancelled: list[str] = []
        self.missing: set[str] = set()

    async def show_job(self, identifier: str) -> Mapping[str, str] | None:
        """Return the job, None while the controller is away."""
        if self.is_away:
            return None
        return {"JobId": identifier, **self.job} if self.job else {}

    def watch_job(self, name: str, on_state: Any) -> None:
        """Note a watcher."""
        self.watched[name] = on_state

    def unwatch_job(self, name: str) -> None:
        """Forget it."""
        self.watched.pop(name, None)

    def is_job_missing(self, name: str) -> bool:
        """Tell what the test has set."""
        return name in self.missing

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
        self.output_ended = OneShotEvent[None]()

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
    options: Mapping[str, Any] = MappingProxyType({})

    def setUp(self) -> None:
        self.clock = Clock()
        self.commands = FakeCommands()
        self.spawner = FakeSpawner()
        self.status = RunnerStatus("slurm")
        self.gate: Deferred[None] = succeed(None)
        self.lines, stdin = self.pipe()
        self.transport = NodeTransport(
            *(self.clock, self.spawner, self.commands, self.status),  # type: ignore[arg-type]
            self.start_again,
            self.retries,
            **self.options,
        )
        self.transport.adopt_srun(StartedSrun(StartedProcess(9, -1, -1, -1), stdin, "job-0"))
        self.run_ = FakeRun()
        self.begun = Deferred.fromCoroutine(wait_for_evaluator_start(self.transport))

    def pipe(self) -> tuple[int, int]:
        """Return a pipe; what a closed write end leaves is read to the end."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        self.addCleanup(os.close, reading)
        return reading, writing

    async def start_again(self, attempt: int) -> StartedSrun:
        """Start another srun, once `gate` is open."""
        await self.gate
        self.lines, stdin = self.pipe()
        return StartedSrun(StartedProcess(10, -1, -1, -1), stdin, f"job-{attempt}")

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

    def assert_failed(self, reason: str) -> str:
        """Hold that the run has ended by the loss of its job; return the message."""
        self.turn()
        self.assertEqual(self.run_.told, ["exited", "ProcessTerminated"])
        loss = self.transport.job_loss
        assert loss is not None
        self.assertEqual(loss.reason, reason)
        return str(loss)

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
        self.srun.tell(FrameKind.EVALUATOR_EXITED)
        self.assertEqual(self.run_.told, ["exited"])
        self.srun.tell(FrameKind.STDOUT, b" late")
        self.srun.tell(FrameKind.OUTCOME, GOOD)
        self.turn()
        self.assertEqual((self.run_.out, self.run_.err), (b"one late", b"two"))
        self.assertEqual(self.run_.told, ["exited", "ProcessDone"])
        self.assertEqual(self.read_lines(), b"")  # its stdin is closed
        self.srun.end()
        self.assertEqual((self.status.job_id, self.status.node), ("5", "one"))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_queue(self) -> None:
        """The queue's reason is shown until the evaluator runs."""
        self.commands.watched["job-0"](QueuedJob("5", "PENDING", "Resources", ""))
        self.assertEqual((self.status.job_id, self.status.queue_reason), ("5", "Resources"))
        self.assertNoResult(self.begun)
        self.connect()
        self.assertIsNone(self.status.queue_reason)
        self.assertEqual(self.commands.watched, {})

    def test_gone(self) -> None:
        """An srun whose job is gone from the queue is ended, and the run is lost.

        It is killed: srun would have its job cancelled, by a number that may be another's now.
        """
        self.commands.watched["job-0"](QueuedJob("5", "PENDING", "Resources", ""))
        self.commands.missing.add("job-0")
        self.commands.watched["job-0"](None)
        self.assertEqual(self.srun.signals, [9, 15])
        self.commands.job = {"JobState": "CANCELLED"}
        self.srun.end(1)
        error = self.failureResultOf(self.begun, EvaluationFailure).value
        self.assertEqual(error.reason, "revoked")

    def test_pause(self) -> None:
        """A paused run gets no stdout and grants none; the exit passes by."""
        self.connect()
        self.transport.pauseProducing()
        for _ in range(4):
            self.srun.tell(FrameKind.STDOUT, b"x" * 65536)
        self.srun.tell(FrameKind.EVALUATOR_EXITED)
        self.turn()
        self.assertEqual((self.run_.out, self.run_.told), (b"", ["exited"]))
        self.assertEqual(self.read_lines(), b"-")
        self.transport.resumeProducing()
        self.turn()
        self.assertEqual(len(self.run_.out), 4 * 65536)
        granted = b"".join(b"A%d\n" % (STDOUT_WINDOW_BYTES + 65536 * n) for n in range(1, 5))
        self.assertEqual(self.read_lines(), granted)

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
        self.clock.advance(KILL_ANSWER_TIMEOUT)
        self.assertEqual((self.srun.signals, self.commands.cancelled), ([15], ["job-0"]))
        self.clock.advance(KILL_ANSWER_TIMEOUT)
        self.assertEqual(self.srun.signals, [15, 9])
        self.srun.end(1)
        self.assert_failed("lost")

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
        self.assert_failed("node")

    def test_foreign(self) -> None:
        """What is no frame ends srun, which may not follow, and is told; no more is taken."""
        self.srun.protocol.childDataReceived(1, b"Welcome to the cluster!")
        self.assertEqual(self.srun.signals, [15])
        self.srun.protocol.childDataReceived(1, b"more")
        self.clock.advance(KILL_ANSWER_TIMEOUT)
        self.assertEqual(self.srun.signals, [15, 9])
        self.srun.end(1)
        error = self.failureResultOf(self.begun, EvaluationFailure).value
        self.assertIn("Welcome to the cluster!", str(error))

    def test_broken_outcomes(self) -> None:
        """Frames whose content is not as agreed end srun."""
        for kind, content in (
            (FrameKind.OUTCOME, b"[]"),
            (FrameKind.OUTCOME, b'{"exit": [0]}'),
            (FrameKind.OUTCOME, b'{"over": ["none", "", {}]}'),
            (FrameKind.EVALUATOR_STARTING, b'{"job": 5}'),
            (FrameKind.EVALUATOR_STARTING, b"{"),
        ):
            self.srun.tell(kind, content)
            self.assertEqual(self.srun.signals, [15], content)
            self.srun.end(1)
            self.failureResultOf(self.begun, EvaluationFailure)
            self.setUp()

    def test_away(self) -> None:
        """While Slurm does not answer, the clock stands still; the reason comes with the answer."""
        self.connect()
        self.commands.is_away = True
        self.srun.end(1)
        self.assertEqual(self.run_.clock, ["suspend"])
        self.clock.pump([1] * 20)
        self.assertEqual(self.run_.told, [])
        self.commands.is_away = False
        self.commands.job = {"JobState": "NODE_FAIL", "NodeList": "one"}
        self.clock.pump([1] * 3)
        self.assert_failed("node")

    def test_job_that_is_ending_is_asked_for_again(self) -> None:
        """Its reason comes with its end; a job that does not end was lost with its node."""
        for later, seconds, reason in (
            ("FAILED", 3, "lost"),
            ("NODE_FAIL", 3, "node"),
            ("COMPLETING", JOB_QUERY_TIMEOUT + 1, "node"),
        ):
            self.connect()
            self.commands.job = {"JobState": "COMPLETING", "NodeList": "one"}
            self.srun.end(1)
            self.clock.pump([1] * 20)
            self.assertEqual(self.run_.told, [])
            self.commands.job = {"JobState": later, "NodeList": "one"}
            self.clock.pump([1] * int(seconds))
            self.assert_failed(reason)
            self.setUp()

    def test_number_of_another_job(self) -> None:
        """A controller that has lost its state uses numbers again: names tell."""
        self.connect()
        self.commands.job = {"JobState": "CANCELLED", "JobName": "job-0"}
        self.srun.end(1)
        self.assert_failed("revoked")
        self.setUp()
        self.connect()
        self.commands.job = {"JobState": "CANCELLED", "JobName": "another"}
        self.srun.end(1)
        self.assertIn("the evaluator was not run by Slurm", self.assert_failed("lost"))

    def test_away_long(self) -> None:
        """A controller that stays away, and a stop, end the wait for a reason."""
        self.commands.is_away = True
        for end, seconds in (
            (lambda: None, JOB_QUERY_TIMEOUT),
            (lambda: self.transport.send_command(KILL), 2),
        ):
            self.connect()
            self.srun.end(1)
            end()
            self.clock.pump([0.5] * int(seconds * 2 + 2))
            self.assertEqual(self.run_.told, ["exited", "ProcessTerminated"])
            self.assertEqual(self.clock.getDelayedCalls(), [])
            self.setUp()
            self.commands.is_away = True

    def test_memory(self) -> None:
        """Slurm's word on the memory explains a bad exit."""
        self.connect()
        self.srun.tell(FrameKind.OUTCOME, {**GOOD, "exit": [None, 9]})
        self.turn()
        self.assertEqual(self.run_.told, ["exited"])
        self.srun.say("slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.\n")
        self.srun.end(1)
        self.assert_failed("memory")

    def test_killed_srun(self) -> None:
        """The job of an srun that was killed after the outcome is cancelled."""
        self.connect()
        self.srun.tell(FrameKind.OUTCOME, GOOD)
        self.turn()
        self.srun.protocol.processEnded(Failure(ProcessTerminated(None, 9)))
        self.assertEqual(self.commands.cancelled, ["job-0"])

    def test_output_after_kill(self) -> None:
        """A node that still sends what was printed before a kill is not given up."""
        self.connect()
        self.transport.send_command(KILL)
        for _ in range(5):
            self.clock.advance(KILL_ANSWER_TIMEOUT / 2)
            self.srun.tell(FrameKind.STDOUT, b"x")
        self.assertEqual(self.srun.signals, [])
        self.clock.advance(KILL_ANSWER_TIMEOUT)
        self.assertEqual(self.srun.signals, [15])
        self.srun.end(1)
        self.assert_failed("lost")


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
        self.assertEqual((self.status.retry_count, len(self.spawner.children)), (1, 2))
        self.srun.begin("two")
        self.assertEqual((self.run_.clock, self.status.node), (["suspend", "restart"], "two"))
        self.srun.end(1)
        self.assert_failed("node")

    def test_queued(self) -> None:
        """A job that was lost before it began is begun again, too, and not shown any more."""
        self.commands.watched["job-0"](QueuedJob("5", "PENDING", "Resources", ""))
        self.srun.end(1)
        self.assertNoResult(self.begun)
        self.assertEqual((self.status.job_id, self.status.queue_reason), (None, None))
        self.connect()
        self.assertEqual(self.status.retry_count, 1)

    def test_counts(self) -> None:
        """Jobs that wait, run, are lost and are begun again are counted."""
        counters = self.commands.counters
        self.assertEqual(counters.count_jobs(), {"waiting": 1, "running": 0})
        self.connect()
        self.assertEqual(counters.count_jobs(), {"waiting": 0, "running": 1})
        self.srun.end(1)
        self.assertEqual(counters.count_jobs(), {"waiting": 1, "running": 0})
        self.srun.begin("two")
        self.srun.end(1)
        self.turn()
        self.assertEqual(counters.count_jobs(), {"waiting": 0, "running": 0})
        self.assertEqual((counters.lost_jobs_by_reason["node"], counters.restarted_jobs), (2, 1))

    def test_not_adopted(self) -> None:
        """A second srun that cannot be adopted ends the run, and is ended itself."""
        self.connect()
        self.spawner.error = OSError(24, "Too many open files")
        killed: list[int] = []
        self.patch(transport, "kill_started_child", lambda started: killed.append(started.pid))
        self.srun.end(1)
        self.turn()
        self.assertEqual((killed, self.commands.cancelled), ([10], ["job-0", "job-1"]))
        self.assertIn("Too many open files", self.assert_failed("lost"))

    def test_not_started(self) -> None:
        """A second srun that cannot be started, for whatever reason, ends the run."""
        self.connect()
        self.gate = fail(RuntimeError("defect"))
        self.srun.end(1)
        self.assert_failed("lost")
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

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
        self.assert_failed("lost")
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
        self.assert_failed("lost")
        self.assertEqual((self.run_.clock, len(self.spawner.children)), (["suspend"] * 2, 2))

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


class FakeSender:
    """A sender of a job description, which notes what the node has told."""

    def __init__(self, stdin: int, fail: Callable[[EvaluationFailure], object]) -> None:
        self.told: list[FrameKind] = []
        self.fail = fail
        self.is_stopped = False

    def on_frame(self, kind: FrameKind) -> None:
        """Note it."""
        self.told.append(kind)

    def stop(self) -> None:
        """Note it."""
        self.is_stopped = True


class OwnFilesCase(TransportTests):
    """Nodes without a shared directory."""

    begins = True
    parses_output = True

    def setUp(self) -> None:
        self.senders: list[FakeSender] = []
        self.options = {"make_sender": self.make_sender, "file_limit": 100}
        super().setUp()
        if self.begins:
            self.connect()

    def make_sender(self, stdin: int, fail: Callable[[EvaluationFailure], object]) -> Any:
        """Return a sender."""
        self.senders.append(FakeSender(stdin, fail))
        return self.senders[-1]

    def turn(self) -> None:
        """Let happen what is due, with all output parsed."""
        super().turn()
        if self.parses_output and self.run_.told == ["exited"]:
            self.run_.output_ended.set_value(None)
            super().turn()


class OwnFilesTests(OwnFilesCase):
    """Such a node has files until all output is parsed."""

    def ask(self, path: str) -> tuple[Deferred[bytes], bytes]:
        """Ask for a file; return the answer to come, and the token."""
        answered = Deferred.fromCoroutine(self.transport.file_reader.fetch_file(path))
        *_, line = self.read_lines().splitlines()
        return answered, decode_file_request(line[1:])[0]

    def test_last_file(self) -> None:
        """The node ends once all output is parsed, and may be asked for files until then."""
        self.srun.tell(FrameKind.STDOUT, b"named")
        self.srun.tell(FrameKind.EVALUATOR_EXITED)
        self.srun.tell(FrameKind.OUTCOME, GOOD)
        super(OwnFilesCase, self).turn()
        self.assertEqual((self.run_.out, self.run_.told), (b"named", ["exited"]))
        answered, token = self.ask("a")
        self.srun.tell(FrameKind.FILE, token + b"content")
        self.srun.tell(FrameKind.FILE_END, token + b"null")
        self.assertEqual(self.successResultOf(answered), b"content")
        self.assertEqual(self.read_lines(), b"-")
        self.turn()
        self.assertEqual((self.run_.told, self.read_lines()), (["exited", "ProcessDone"], b"E\n"))

    def test_lost(self) -> None:
        """A file of a node that is gone is refused."""
        answered, _ = self.ask("a")
        self.srun.end(1)
        self.failureResultOf(answered, FileRefused)
        self.failureResultOf(
            Deferred.fromCoroutine(self.transport.file_reader.fetch_file("a")), FileRefused
        )

    def test_silent(self) -> None:
        """A node that does not send a file is given up, with what is known of the end."""
        for has_exited in (True, False):
            self.srun.tell(FrameKind.STDOUT, b"named")
            if has_exited:
                self.srun.tell(FrameKind.EVALUATOR_EXITED)
                self.srun.tell(FrameKind.OUTCOME, GOOD)
            answered, _ = self.ask("a")
            self.clock.advance(ANSWER_TIMEOUT)
            self.failureResultOf(answered, FileRefused)
            self.assertEqual((self.srun.signals, self.commands.cancelled), ([15], ["job-0"]))
            self.srun.end(1)
            self.turn()
            loss = self.transport.job_loss
            self.assertEqual(loss and loss.reason, None if has_exited else "node")
            self.assertIs(self.transport.outcome is None, not has_exited)
            self.setUp()

    def test_stopped(self) -> None:
        """One that has been sent `KILL` after the exit has not even that time."""
        self.parses_output = False
        self.srun.tell(FrameKind.EVALUATOR_EXITED)
        self.transport.send_command(KILL)
        self.srun.tell(FrameKind.OUTCOME, GOOD)
        self.read_lines()
        answered, _ = self.ask("a")
        self.clock.advance(KILL_ANSWER_TIMEOUT)
        self.assertEqual((self.srun.signals, self.commands.cancelled), ([15], ["job-0"]))
        self.srun.end(1)
        self.failureResultOf(answered, FileRefused)
        self.parses_output = True
        self.turn()
        self.assertEqual(self.run_.told, ["exited", "ProcessDone"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_explained(self) -> None:
        """A bad end waits for the last words of srun, which ends after all output is parsed."""
        self.srun.tell(FrameKind.EVALUATOR_EXITED)
        self.srun.tell(FrameKind.OUTCOME, {"exit": [1, None]})
        self.turn()
        self.assertEqual(self.run_.told, ["exited"])
        self.srun.say("slurmstepd: error: Detected 1 oom-kill event(s)")
        self.srun.end(1)
        self.assert_failed("memory")


class TransferTests(OwnFilesCase):
    """The job description on its way to the node."""

    begins = False

    def test_sent(self) -> None:
        """The node is sent what it waits for, until the evaluator begins."""
        self.srun.tell(FrameKind.READY_FOR_JOB)
        self.srun.tell(FrameKind.TREE_WANTED)
        (sender,) = self.senders
        self.assertEqual(sender.told, [FrameKind.READY_FOR_JOB, FrameKind.TREE_WANTED])
        self.assertNoResult(self.begun)
        self.srun.begin()
        self.successResultOf(self.begun)
        self.assertTrue(sender.is_stopped)

    def test_unsent(self) -> None:
        """A job description that cannot be sent ends the evaluation, with the reason."""
        self.srun.tell(FrameKind.READY_FOR_JOB)
        self.senders[0].fail(EvaluationFailure("lost", "no files"))
        self.assertTrue(self.senders[0].is_stopped)
        self.assertEqual((self.srun.signals, self.commands.cancelled), ([15], ["job-0"]))
        self.srun.end(1)
        self.assertEqual(str(self.failureResultOf(self.begun, EvaluationFailure).value), "no files")

    def test_cancelled(self) -> None:
        """A cancellation ends the transfer."""
        self.srun.tell(FrameKind.READY_FOR_JOB)
        self.begun.cancel()
        self.assertTrue(self.senders[0].is_stopped)
        self.srun.end(1)
        self.failureResultOf(self.begun, CancelledError)
