"""`slurm.commands`: squeue, scontrol and scancel, with fake children and a Clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.slurm.commands import (
    COMMAND_TIMEOUT,
    SQUEUE_PERIOD,
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

    def look(self, printed: str = "", complaint: str = "") -> FakeCommand:
        """Let the next squeue end, with what it says."""
        self.clock.advance(SQUEUE_PERIOD)
        (squeue,) = self.running
        self.running.clear()
        self.assertEqual(squeue.argv[0], "squeue")
        squeue.end(printed, complaint)
        return squeue

    def test_command_that_hangs_is_killed(self) -> None:
        self.commands.watch_job("a", lambda _: None)
        self.clock.advance(SQUEUE_PERIOD)
        self.clock.advance(COMMAND_TIMEOUT)
        self.assertEqual(self.running[0].signals, [9])
        self.running.pop().end()
        self.assertTrue(self.commands.counters.is_controller_unreachable)
        self.look()
        self.assertFalse(self.commands.counters.is_controller_unreachable)

    def test_job_that_left_the_queue_is_gone(self) -> None:
        told: dict[str, list[QueuedJob | None]] = {"a": [], "b": []}
        for name, states in told.items():
            self.commands.watch_job(name, states.append)
        self.look("1|a|PENDING|Resources|\n")
        for _ in range(16):
            self.look()
        self.assertEqual([job and job.state for job in told["a"]], ["PENDING", None])
        self.assertEqual(told["b"], [])

    def test_end_of_a_job_without_srun_is_told(self) -> None:
        told: list[Any] = []
        self.commands.watch_job("a", told.append)
        self.assertNotIn("--states=all", self.look().argv)
        self.commands.watch_job("a", told.append, misses=2)
        self.assertIn("--states=all", self.look().argv)
        self.assertEqual(told, [])
        self.look("1|a|NODE_FAIL|None|one\n")
        self.assertEqual(told, [QueuedJob("1", "a", "NODE_FAIL", "None", "one")])
        self.commands.watch_job("a", told.append, misses=2)
        self.look()
        self.look()
        self.assertIsNone(told[1])

    def test_one_squeue_tells_all_watchers(self) -> None:
        told: list[Any] = []
        self.commands.watch_job("a", told.append)
        self.commands.watch_job("b", told.append)
        self.look("1|a|PENDING|Resources|\n2|b|RUNNING|None|one\n3|c|RUNNING||\n")
        self.assertEqual([job.identifier for job in told], ["1", "2"])
        self.commands.unwatch_job("a")
        self.look(complaint="away")
        self.commands.unwatch_job("b")
        self.clock.advance(SQUEUE_PERIOD)
        self.assertEqual((self.running, self.clock.getDelayedCalls()), ([], []))

    def test_nothing_is_asked_of_jobs_that_begin_at_once(self) -> None:
        self.commands.watch_job("a", lambda _: None)
        self.commands.unwatch_job("a")
        self.clock.advance(SQUEUE_PERIOD)
        self.assertEqual((self.running, self.clock.getDelayedCalls()), ([], []))

    def test_job_is_cancelled_also_if_it_comes_late(self) -> None:
        self.commands.cancel_job("a")
        self.look(complaint="away")
        self.look()
        for _ in range(2):
            self.look("1|a|RUNNING||one\n2|b|RUNNING||one\n")
            self.assertEqual(self.running[-1].argv, ("scancel", "1"))
            self.running.pop().end(complaint="Invalid job id specified")
        for state in ("COMPLETING", "CANCELLED"):
            self.look(f"1|a|{state}||one\n")
        for _ in range(5):
            self.look()
        self.clock.advance(SQUEUE_PERIOD)
        self.assertEqual((self.running, self.clock.getDelayedCalls()), ([], []))

    def test_jobs_that_a_killed_daemon_has_left_are_cancelled_by_one_command(self) -> None:
        self.commands.cancel_jobs(lambda name: name.startswith("d-1-"))
        queue = "".join(f"{n}|d-1-{n}|PENDING||\n" for n in range(1, 301))
        self.look(queue + "301|d-2-b|RUNNING||one\n302|e-1-c|RUNNING||one\n")
        self.assertEqual(self.running.pop().argv, ("scancel", *map(str, range(1, 301))))

    def test_commands_get_the_configuration_of_slurm_and_no_secret(self) -> None:
        given = {"SLURM_CONF": "/c", "PATH": "/bin", "TOKEN": "x"}
        self.assertEqual(
            build_command_environment(given), {"PATH": "/bin", "LC_ALL": "C", "SLURM_CONF": "/c"}
        )
