"""`slurm.commands`: with fake children and a Clock; the checks with commands that are scripts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import (
    Configuration,
    EnvironmentSettings,
    LimitSettings,
    RunnerSettings,
    SlurmJobSettings,
)
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.slurm import commands
from tawebeval.slurm.commands import (
    SQUEUE_PERIOD,
    QueuedJob,
    SlurmCommandFailed,
    SlurmCommands,
    build_command_environment,
    build_srun_options,
    exclude_node,
    explain_job_loss,
    parse_squeue,
)
from tests.fakes.world import InlineThreads

QUEUE = """\
7|tawebeval-0123456789abcdef-0|PENDING|Resources|
8|other|RUNNING|None|one
broken
"""


class OptionTests(SynchronousTestCase):
    def test_options_of_srun_are_limits_and_then_those_of_the_problem(self) -> None:
        limits = LimitSettings(wall_clock=61, memory=2**20 * 100)
        runner = RunnerSettings(arguments=("--partition=main", "--qos=low"))
        problem = SlurmJobSettings(("--cpus-per-task=4",))
        options = list(build_srun_options(limits, "name", runner, problem))
        for option in ("--job-name=name", "--mem=196M", "--time=4", "--cpus-per-task=1"):
            self.assertIn(option, options)
        self.assertEqual(options[-3:], ["--partition=main", "--qos=low", "--cpus-per-task=4"])

    def test_node_is_excluded_besides_those_of_the_operator(self) -> None:
        options = ["--exclude=one", "--exclude=two,three"]
        self.assertEqual(exclude_node(options, "four")[-1], "--exclude=two,three,four")
        self.assertEqual(exclude_node([], "four"), ["--exclude=four"])


class QueueTests(SynchronousTestCase):
    def test_jobs_are_read_by_name_and_other_lines_ignored(self) -> None:
        found = parse_squeue(QUEUE)
        name = "tawebeval-0123456789abcdef-0"
        self.assertEqual(found[name], QueuedJob("7", name, "PENDING", "Resources"))
        self.assertEqual((found["other"].state, found["other"].node), ("RUNNING", "one"))
        self.assertEqual(len(found), 2)


class LossTests(SynchronousTestCase):
    def test_each_state_has_its_reason_with_job_and_node(self) -> None:
        reasons = {
            "NODE_FAIL": "node",
            "BOOT_FAIL": "node",
            "PREEMPTED": "preempted",
            "OUT_OF_MEMORY": "memory",
            "TIMEOUT": "timeout",
            "DEADLINE": "timeout",
            "CANCELLED": "revoked",
            "FAILED": "lost",  # the program on the node: the next one would fail, too
            "COMPLETED": "lost",
            "COMPLETING": "node",  # while it lasts: its node does not end it
        }
        for state, reason in reasons.items():
            failure = explain_job_loss(QueuedJob("5", "a", state, node="one"), "")
            self.assertEqual(failure.reason, reason, state)
            self.assertIn("the job 5 of Slurm on the node one", failure.message)

    def test_refused_job_is_a_fault_of_the_configuration(self) -> None:
        failure = explain_job_loss(None, "srun: error: invalid partition specified: none\n")
        self.assertEqual(failure.reason, "lost")
        self.assertIn("srun said: srun: error: invalid partition specified: none", failure.message)

    def test_last_line_of_a_traceback_is_shown(self) -> None:
        lines = (
            "srun: job 5 queued and waiting for resources",
            "Traceback (most recent call last):",
            '  File "/shared/secret/node.py", line 5, in <module>',
            "    import msgspec",
            "ModuleNotFoundError: No module named 'msgspec'",
            "srun: error: one: task 0: Exited with exit code 1",
        )
        message = explain_job_loss(None, "\n".join(lines)).message
        self.assertTrue(message.endswith(" ".join((lines[0], *lines[4:]))), message)
        cut = explain_job_loss(None, "\n".join(lines[2:])).message
        self.assertNotIn("/shared/secret", cut)


SCRIPTS = {
    "srun": "exec sleep 600",
    "scontrol": "echo Slurmctld is UP",
    "squeue": "",
    "scancel": "",
}

RUN_HERE = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'


class CheckTests(SynchronousTestCase):
    def make_commands(self, **scripts: str) -> Path:
        folder = Path(self.mktemp()).resolve()
        folder.mkdir()
        for name, script in {**SCRIPTS, **scripts}.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        self.patch(os, "environ", {"PATH": f"{folder}:/usr/bin:/bin"})
        return folder

    def test_busy_cluster_has_no_other_fault(self) -> None:
        folder = self.make_commands()
        self.patch(commands, "_JOB_SECONDS", 0.01)
        runner = RunnerSettings(kind="slurm", shared=str(folder))
        checking = commands.check_cluster(Configuration(runner=runner), folder, os.environ)
        self.assertEqual(next(checking), "the controller of Slurm answers")
        error = self.assertRaises(ConfigurationError, next, checking)
        self.assertIn("no answer within 0.01 seconds", str(error))
        self.assertIn("squeue", str(error))

    def test_job_tells_what_its_node_lacks(self) -> None:
        folder = self.make_commands(srun=RUN_HERE)
        configuration = Configuration(
            runner=RunnerSettings(kind="slurm", shared=str(folder)),
            environments={"gcc": EnvironmentSettings("/roots/gcc")},
        )
        _, found, missing = commands.check_cluster(configuration, folder, os.environ)
        self.assertIn("bubblewrap works", str(found))
        self.assertIsInstance(missing, SetupProblem)
        self.assertIn("/roots/gcc is missing", str(missing))
        self.assertEqual(list(folder.glob("tawebeval-doctor-*")), [])

    def test_node_without_bubblewrap_is_an_error(self) -> None:
        folder = self.make_commands(srun=RUN_HERE)
        tried = ("/bin/sh", "-c", "echo no namespaces >&2; exit 1")
        self.patch(commands, "_TRIED", {"bubblewrap": tried})
        runner = RunnerSettings(kind="slurm", shared=str(folder))
        checking = commands.check_cluster(Configuration(runner=runner), folder, os.environ)
        next(checking)
        error = self.assertRaises(ConfigurationError, next, checking)
        self.assertIn("bubblewrap does not work: no namespaces", str(error))

    def test_state_outside_of_the_shared_directory_is_refused(self) -> None:
        configuration = Configuration(runner=RunnerSettings(kind="slurm", shared="/shared"))
        error = self.assertRaises(
            ConfigurationError, commands.check_shared_directory, configuration, Path("/var")
        )
        self.assertIn("/var is not in /shared", str(error))


class CommandTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.asked: list[Sequence[str]] = []
        self.printed, self.complaints = "", dict[str, str]()
        self.patch(commands, "run_command", self.run_command)
        threads: Any = InlineThreads()
        self.commands = SlurmCommands(self.clock, threads, {})

    def run_command(self, environment: Mapping[str, str], *argv: str) -> str:
        self.asked.append(argv)
        if argv[0] in self.complaints:
            raise SlurmCommandFailed(self.complaints[argv[0]])
        return self.printed

    def look(self, printed: str = "") -> Sequence[str]:
        """Let the next squeue end, with what it says; return its arguments."""
        self.asked.clear()
        self.printed = printed
        self.clock.advance(SQUEUE_PERIOD)
        self.assertEqual(self.asked[0][0], "squeue")
        return self.asked[0]

    def check_idle(self) -> None:
        self.asked.clear()
        self.clock.advance(SQUEUE_PERIOD)
        self.assertEqual((self.asked, self.clock.getDelayedCalls()), ([], []))

    def test_controller_that_does_not_answer_is_told(self) -> None:
        self.commands.watch_job("a", lambda _: None)
        self.complaints["squeue"] = "no answer"
        self.look()
        self.assertTrue(self.commands.counters.is_controller_unreachable)
        del self.complaints["squeue"]
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
        self.commands.watch_job("a", told.append, misses=2)
        self.look()
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
        self.commands.unwatch_job("b")
        self.check_idle()

    def test_nothing_is_asked_of_jobs_that_begin_at_once(self) -> None:
        self.commands.watch_job("a", lambda _: None)
        self.commands.unwatch_job("a")
        self.check_idle()

    def test_job_is_cancelled_also_if_it_comes_late(self) -> None:
        self.commands.cancel_job("a")
        self.complaints = {"squeue": "away", "scancel": "Invalid job id specified"}
        self.look()
        del self.complaints["squeue"]
        self.look()
        for _ in range(2):
            self.look("1|a|RUNNING||one\n2|b|RUNNING||one\n")
            self.assertEqual(self.asked[1:], [("scancel", "1")])
        for state in ("COMPLETING", "CANCELLED"):
            self.look(f"1|a|{state}||one\n")
            self.assertEqual(len(self.asked), 1)
        for _ in range(5):
            self.look()
        self.check_idle()

    def test_jobs_that_a_killed_daemon_has_left_are_cancelled_by_one_command(self) -> None:
        self.commands.cancel_jobs(lambda name: name.startswith("d-1-"))
        queue = "".join(f"{n}|d-1-{n}|PENDING||\n" for n in range(1, 301))
        self.look(queue + "301|d-2-b|RUNNING||one\n302|e-1-c|RUNNING||one\n")
        self.assertEqual(self.asked[1:], [("scancel", *map(str, range(1, 301)))])

    def test_commands_get_the_configuration_of_slurm_and_no_secret(self) -> None:
        given = {"SLURM_CONF": "/c", "PATH": "/bin", "TOKEN": "x"}
        self.assertEqual(
            build_command_environment(given), {"PATH": "/bin", "LC_ALL": "C", "SLURM_CONF": "/c"}
        )
