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
    def __init__(self, protocol: ProcessProtocol, argv: Sequence[str]) -> None:
        self.protocol = protocol
        self.argv = argv
        self.signals: list[int] = []
        protocol.makeConnection(self)

    def signal_group(self, number: int) -> None:
        self.signals.append(number)

    def end(self, printed: str = "", complaint: str = "") -> None:
        self.protocol.childDataReceived(1, printed.encode())
        self.protocol.childDataReceived(2, complaint.encode())
        value = ProcessTerminated(1) if complaint else ProcessDone(0)
        self.protocol.processEnded(Failure(value))


class CommandTests(SynchronousTestCase):
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
        self.running.append(FakeCommand(protocol, argv))

    def run_command(self, *argv: str) -> Deferred[str]:
        return Deferred.fromCoroutine(self.commands.run(*argv))

    def test_output_or_complaint_is_the_result(self) -> None:
        done = self.run_command("squeue")
        self.running.pop().end("one\n")
        self.assertEqual(self.successResultOf(done), "one\n")
        done = self.run_command("squeue")
        self.running.pop().end(complaint="Unable to contact slurm controller")
        error = self.failureResultOf(done, SlurmCommandFailed).value
        self.assertEqual(str(error), "Unable to contact slurm controller")
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_command_that_hangs_is_killed(self) -> None:
        done = self.run_command("squeue")
        self.clock.advance(COMMAND_TIMEOUT)
        self.assertEqual(self.running[0].signals, [9])
        self.running[0].end()
        self.assertIn("no answer within 15 seconds", str(self.failureResultOf(done).value))

    def test_four_commands_run_at_once(self) -> None:
        for _ in range(6):
            self.run_command("scontrol")
        self.assertEqual(len(self.running), 4)
        self.running.pop().end()
        self.assertEqual(len(self.running), 4)
        while self.running:
            self.running.pop().end()

    def test_job_that_left_the_queue_is_gone(self) -> None:
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

    def test_one_squeue_tells_all_watchers(self) -> None:
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

    def test_job_is_cancelled_until_it_is_gone(self) -> None:
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

    def test_one_scancel_is_for_all_jobs(self) -> None:
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

    def test_jobs_of_a_killed_daemon_are_cancelled(self) -> None:
        self.commands.cancel_stale_jobs(lambda name: name.startswith("d-1-"))
        self.running.pop().end(complaint="away")
        self.clock.advance(SQUEUE_PERIOD)
        self.running.pop().end("1|d-1-a|PENDING||\n2|d-2-b|RUNNING||one\n3|e-1-c|RUNNING||one\n")
        self.assertEqual(self.running[0].argv, ("scancel", "1"))
        for _ in range(5):
            self.running.pop().end()
            self.clock.advance(SQUEUE_PERIOD)
        self.assertEqual((self.running, self.clock.getDelayedCalls()), ([], []))

    def test_unknown_job_has_no_fields(self) -> None:
        done = Deferred.fromCoroutine(self.commands.show_job("7"))
        self.assertEqual(self.running[0].argv[-1], "7")
        self.running.pop().end(complaint="Invalid job id specified")
        self.assertEqual(self.successResultOf(done), {})

    def test_no_job_is_asked_for_while_squeue_fails(self) -> None:
        self.commands.watch_job("a", lambda _: None)
        self.running.pop().end(complaint="away")
        done = Deferred.fromCoroutine(self.commands.show_job("7"))
        self.assertIsNone(self.successResultOf(done))
        self.commands.unwatch_job("a")
        self.clock.advance(SQUEUE_PERIOD)
        Deferred.fromCoroutine(self.commands.show_job("7"))
        self.assertEqual(self.running[0].argv[-1], "7")
        self.running.pop().end()

    def test_squeue_finds_out_when_the_controller_is_back(self) -> None:
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

    def test_queue_of_10000_jobs_is_read_and_a_cut_one_loses_no_job(self) -> None:
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

    def test_commands_get_the_configuration_of_slurm_and_no_secret(self) -> None:
        given = {"SLURM_CONF": "/c", "PATH": "/bin", "TOKEN": "x"}
        self.assertEqual(
            build_command_environment(given), {"PATH": "/bin", "LC_ALL": "C", "SLURM_CONF": "/c"}
        )
