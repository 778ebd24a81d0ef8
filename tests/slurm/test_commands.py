"""`slurm.commands`: squeue, scontrol and scancel, with fake children and a Clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.slurm.commands import (
    COMMAND_TIMEOUT,
    SQUEUE_PERIOD,
    SlurmCommandFailed,
    SlurmCommands,
    build_command_environment,
)
from tawebeval.slurm.jobs import QueuedJob


class FakeCommand:
    """A command that runs until the test ends it."""

    def __init__(self, protocol: ProcessProtocol, argv: Sequence[str]) -> None:
        self.protocol = protocol
        self.argv = argv
        self.signals: list[int] = []
        protocol.makeConnection(self)

    def signal_group(self, number: int) -> None:
        """Note a signal."""
        self.signals.append(number)

    def end(self, printed: str = "", complaint: str = "") -> None:
        """End, well without a complaint."""
        self.protocol.childDataReceived(1, printed.encode())
        self.protocol.childDataReceived(2, complaint.encode())
        value = ProcessTerminated(1) if complaint else ProcessDone(0)
        self.protocol.processEnded(Failure(value))


class CommandTests(SynchronousTestCase):
    """Commands that run, and the watch of the queue."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.running: list[FakeCommand] = []
        self.commands = SlurmCommands(self.clock, self.spawn, {})

    def spawn(
        self,
        protocol: ProcessProtocol,
        argv: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
    ) -> None:
        """Start a fake command."""
        self.running.append(FakeCommand(protocol, argv))

    def run_command(self, *argv: str) -> Deferred[str]:
        """Begin a command."""
        return Deferred.fromCoroutine(self.commands.run(*argv))

    def test_result(self) -> None:
        """What it prints; or what it says when it fails."""
        done = self.run_command("squeue")
        self.running.pop().end("one\n")
        self.assertEqual(self.successResultOf(done), "one\n")
        done = self.run_command("squeue")
        self.running.pop().end(complaint="Unable to contact slurm controller")
        error = self.failureResultOf(done, SlurmCommandFailed).value
        self.assertEqual(str(error), "Unable to contact slurm controller")
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_deadline(self) -> None:
        """A command that hangs is killed, and failed."""
        done = self.run_command("squeue")
        self.clock.advance(COMMAND_TIMEOUT)
        self.assertEqual(self.running[0].signals, [9])
        self.running[0].end()
        self.assertIn("no answer within 15 seconds", str(self.failureResultOf(done).value))

    def test_turns(self) -> None:
        """Four run at once; others wait."""
        for _ in range(6):
            self.run_command("scontrol")
        self.assertEqual(len(self.running), 4)
        self.running.pop().end()
        self.assertEqual(len(self.running), 4)
        while self.running:
            self.running.pop().end()

    def test_gone(self) -> None:
        """A job that has left the queue for some time is gone; one that was never there is not."""
        told: dict[str, list[QueuedJob | None]] = {"a": [], "b": []}
        for name, states in told.items():
            self.commands.watch_job(name, states.append)
        self.running.pop().end("1|a|PENDING|Resources|\n")
        self.assertFalse(self.commands.is_job_missing("a"))
        for _ in range(16):
            self.clock.advance(SQUEUE_PERIOD)
            self.running.pop().end()
            self.assertTrue(self.commands.is_job_missing("a"))
            self.assertFalse(self.commands.is_job_missing("b"))
        self.assertEqual([job and job.state for job in told["a"]], ["PENDING", None])
        self.assertEqual(told["b"], [])
        self.commands.unwatch_job("a")
        self.commands.unwatch_job("b")

    def test_watch(self) -> None:
        """One squeue tells all watchers of their jobs, until the last is forgotten."""
        told: list[Any] = []
        self.commands.watch_job("a", told.append)
        self.commands.watch_job("b", told.append)
        self.assertEqual(len(self.running), 1)
        self.running.pop().end("1|a|PENDING|Resources|\n2|b|RUNNING|None|one\n3|c|RUNNING||\n")
        self.assertEqual([job.identifier for job in told], ["1", "2"])
        self.commands.unwatch_job("a")
        self.clock.advance(SQUEUE_PERIOD)
        self.running.pop().end(complaint="away")
        self.commands.unwatch_job("b")
        self.clock.advance(SQUEUE_PERIOD)
        self.assertEqual(self.running, [])

    def test_cancel(self) -> None:
        """A job is cancelled when the controller is back, and again until it is gone."""
        self.commands.cancel_job("a")
        self.running.pop().end(complaint="away")
        for _ in range(2):
            self.clock.advance(SQUEUE_PERIOD)
            self.running.pop().end("1|a|RUNNING||one\n")
            self.assertEqual(self.running[-1].argv, ("scancel", "1"))
            self.running.pop().end()
        for _ in range(4):
            self.clock.advance(SQUEUE_PERIOD)
            if self.running:
                self.running.pop().end()
        self.assertEqual((self.running, self.clock.getDelayedCalls()), ([], []))

    def test_many_cancelled(self) -> None:
        """One scancel is for all jobs: each may wait for its deadline, and the queue meanwhile."""
        self.commands.cancel_stale_jobs(lambda name: True)
        self.running.pop().end("".join(f"{n}|d-{n}|PENDING||\n" for n in range(1, 301)))
        (scancel,) = self.running
        self.assertEqual(scancel.argv, ("scancel", *map(str, range(1, 301))))
        scancel.end(complaint="Invalid job id specified")
        self.running.clear()
        self.clock.advance(SQUEUE_PERIOD)
        self.assertEqual(self.running[0].argv[0], "squeue")
        for _ in range(4):
            self.running.pop().end()
            self.clock.advance(SQUEUE_PERIOD)
        self.assertEqual((self.running, self.clock.getDelayedCalls()), ([], []))

    def test_left(self) -> None:
        """Jobs that a killed daemon has left are cancelled, and no others."""
        self.commands.cancel_stale_jobs(lambda name: name.startswith("d-1-"))
        self.running.pop().end(complaint="away")
        self.clock.advance(SQUEUE_PERIOD)
        self.running.pop().end("1|d-1-a|PENDING||\n2|d-2-b|RUNNING||one\n3|e-1-c|RUNNING||one\n")
        self.assertEqual(self.running[0].argv, ("scancel", "1"))
        for _ in range(5):
            self.running.pop().end()
            self.clock.advance(SQUEUE_PERIOD)
        self.assertEqual((self.running, self.clock.getDelayedCalls()), ([], []))

    def test_unknown(self) -> None:
        """A job that scontrol does not know has no fields."""
        done = Deferred.fromCoroutine(self.commands.show_job("7"))
        self.assertEqual(self.running[0].argv[-1], "7")
        self.running.pop().end(complaint="Invalid job id specified")
        self.assertEqual(self.successResultOf(done), {})

    def test_away(self) -> None:
        """While squeue fails no job is asked for: many would wait for the controller."""
        self.commands.watch_job("a", lambda _: None)
        self.running.pop().end(complaint="away")
        done = Deferred.fromCoroutine(self.commands.show_job("7"))
        self.assertIsNone(self.successResultOf(done))
        self.commands.unwatch_job("a")
        self.clock.advance(SQUEUE_PERIOD)
        Deferred.fromCoroutine(self.commands.show_job("7"))
        self.assertEqual(self.running[0].argv[-1], "7")
        self.running.pop().end()

    def test_failed(self) -> None:
        """After an answer that failed, squeue finds out when the controller is back."""
        done = Deferred.fromCoroutine(self.commands.show_job("7"))
        self.running.pop().end(complaint="Unable to contact slurm controller (connect failure)")
        self.assertIsNone(self.successResultOf(done))
        self.running.pop().end(complaint="away")
        self.clock.advance(SQUEUE_PERIOD)
        again = Deferred.fromCoroutine(self.commands.show_job("7"))
        self.assertIsNone(self.successResultOf(again))
        self.running.pop().end()
        self.clock.advance(SQUEUE_PERIOD)
        Deferred.fromCoroutine(self.commands.show_job("7"))
        (scontrol,) = self.running
        self.assertEqual(scontrol.argv[0], "scontrol")
        scontrol.end("JobId=7 JobState=NODE_FAIL\n")
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_long_queue(self) -> None:
        """A queue of 10,000 jobs is read; one that is cut does not make jobs count as gone."""
        told: list[Any] = []
        self.commands.watch_job("b-9999", told.append)
        reason = "Nodes required for job are DOWN, DRAINED or reserved"
        queue = "".join(f"{n}|b-{n}|PENDING|{reason}|\n" for n in range(10_000))
        self.running.pop().end(queue)
        self.assertEqual([job.identifier for job in told], ["9999"])
        for _ in range(20):
            self.clock.advance(SQUEUE_PERIOD)
            squeue = self.running.pop()
            squeue.end("1|a|PENDING|Resources|\n" * 400_000)
            self.assertEqual(squeue.signals, [9])
        self.assertEqual((len(told), self.commands.counters.is_controller_unreachable), (1, True))
        self.commands.unwatch_job("b-9999")
        self.clock.advance(SQUEUE_PERIOD)

    def test_environment(self) -> None:
        """Commands get the path of Slurm's configuration, and no secret."""
        given = {"SLURM_CONF": "/c", "PATH": "/bin", "TOKEN": "x"}
        self.assertEqual(
            build_command_environment(given),
            {"PATH": "/bin", "LC_ALL": "C", "SLURM_CONF": "/c"},
        )
