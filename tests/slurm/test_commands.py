"""`slurm.commands`: with fake children and a Clock; the checks with commands that are scripts."""

from __future__ import annotations

import os
import subprocess
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
    build_job_loss_failure,
    build_srun_options,
)
from tests.fakes.world import InlineThreads


class OptionTests(SynchronousTestCase):
    def test_srun_gets_options_of_limits_then_runner_then_problem(self) -> None:
        limits = LimitSettings(wall_clock=61, memory=2**20 * 100)
        runner = RunnerSettings(arguments=("--partition=main", "--qos=low"))
        problem = SlurmJobSettings(("--cpus-per-task=4",))
        options = list(build_srun_options(limits, "name", runner, problem))
        for option in ("--job-name=name", "--mem=196M", "--time=4", "--cpus-per-task=1"):
            self.assertIn(option, options)
        self.assertEqual(options[-3:], ["--partition=main", "--qos=low", "--cpus-per-task=4"])

    def test_exclude_option_for_the_lost_node_precedes_the_option_of_the_operator(self) -> None:
        runner = RunnerSettings(arguments=("--exclude=two",))
        options = list(build_srun_options(LimitSettings(), "name", runner, excluded_node="one"))
        self.assertEqual(options[-2:], ["--exclude=one", "--exclude=two"])


class LossTests(SynchronousTestCase):
    def test_each_state_of_a_lost_job_maps_to_a_failure_reason(self) -> None:
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
            failure = build_job_loss_failure(QueuedJob("5", "a", state, node="one"), "")
            self.assertEqual(failure.reason, reason, state)
            self.assertIn(
                f"the job 5 of Slurm on the node one ended without an outcome ({state})",
                failure.message,
            )

    def test_failure_shows_only_messages_of_srun_and_of_the_node_program(self) -> None:
        lines = (
            "srun: job 5 queued and waiting for resources",
            "Traceback (most recent call last):",
            '  File "/shared/secret/node.py", line 5, in <module>',
            "tawebeval on one: [Errno 28] No space left on device",
            "srun: error: one: task 0: Exited with exit code 1",
        )
        failure = build_job_loss_failure(None, "\n".join(lines))
        said = "; ".join((lines[0], *lines[3:]))
        self.assertEqual(failure.reason, "lost")
        self.assertEqual(failure.message, f"the evaluator was not run by Slurm; srun said: {said}")


SCRIPTS = {"srun": "exec sleep 600", "squeue": "", "scancel": ""}

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

    def check(self, folder: Path, **settings: Any) -> Any:
        runner = RunnerSettings(kind="slurm", shared=str(folder))
        configuration = Configuration(runner=runner, **settings)
        return commands.check_cluster(configuration, folder, os.environ)

    def test_cluster_that_runs_no_job_is_an_error(self) -> None:
        waiting, folder = "srun: job 5 queued and waiting for resources", self.make_commands()

        def run_too_long(argv: Sequence[str], **_: object) -> None:
            raise subprocess.TimeoutExpired(argv, 90, stderr=f"{waiting}\n".encode())

        self.patch(subprocess, "run", run_too_long)
        error = self.assertRaises(ConfigurationError, next, self.check(folder))
        self.assertIn(f"no answer within 90 seconds; {waiting}", str(error))
        self.assertIn("`sinfo`", str(error))

    def test_check_reports_an_environment_that_the_node_lacks(self) -> None:
        folder = self.make_commands(srun=RUN_HERE)
        found, missing = self.check(folder, environments={"gcc": EnvironmentSettings("/roots/gcc")})
        self.assertIn("bubblewrap works", str(found))
        self.assertIsInstance(missing, SetupProblem)
        self.assertIn("/roots/gcc is missing", str(missing))

    def test_node_without_bubblewrap_is_an_error(self) -> None:
        folder = self.make_commands(srun=RUN_HERE)
        (folder / "bwrap").write_text("#!/bin/sh\necho bwrap: no namespaces >&2; exit 1\n")
        (folder / "bwrap").chmod(0o755)
        error = self.assertRaises(ConfigurationError, next, self.check(folder))
        self.assertIn("bwrap: no namespaces", str(error))

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
        self.commands = SlurmCommands(self.clock, threads, "d", {})

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

    def test_controller_is_unreachable_while_squeue_fails(self) -> None:
        self.commands.add_job_watcher("a", lambda _: None)
        self.complaints["squeue"] = "no answer"
        self.look()
        self.assertTrue(self.commands.counters.is_controller_unreachable)
        del self.complaints["squeue"]
        self.look()
        self.assertFalse(self.commands.counters.is_controller_unreachable)

    def test_one_squeue_call_reports_to_all_watchers(self) -> None:
        told: list[Any] = []
        for name in ("a", "b", "d"):
            self.commands.add_job_watcher(name, told.append)
        self.look("1|a|PENDING|Resources|\n2|b|RUNNING|None|one\nbroken\n3|c|RUNNING||\n")
        queued = QueuedJob("1", "a", "PENDING", "Resources")
        self.assertEqual(told, [queued, QueuedJob("2", "b", "RUNNING", "None", "one"), None])

    def test_squeue_polls_stop_some_time_after_the_last_job(self) -> None:
        self.commands.add_job_watcher("a", lambda _: None)
        for _ in range(20):
            self.look()
        self.commands.abandon_job("a")
        self.complaints["squeue"] = "no answer"
        for _ in range(20):
            self.look()
        del self.complaints["squeue"]
        for _ in range(10):
            self.look()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_unwatched_jobs_are_cancelled_by_one_scancel(self) -> None:
        queue = "".join(f"{n}|tawebeval-d-{n}|PENDING||\n" for n in range(1, 301))
        own = self.commands.make_job_name("0123456789abcdef0123")
        self.assertIn("tawebeval-d-0123456789abcdef-", own)
        self.commands.add_job_watcher(own, lambda _: None)
        queue += f"301|{own}|RUNNING||one\n302|tawebeval-e-c|RUNNING||one\n"
        self.look(queue)
        self.assertEqual(len(self.asked), 1)
        self.complaints["scancel"] = "Invalid job id specified"
        self.look(queue)
        (scancel,) = self.asked[1:]
        self.assertEqual(sorted(scancel), [*sorted(map(str, range(1, 301))), "scancel"])
        self.assertFalse(self.commands.counters.is_controller_unreachable)
        self.commands.abandon_job(own)
        for _ in range(20):  # until it is
            self.look("1|tawebeval-d-1|RUNNING||\n")
        self.look()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_abandoned_job_that_ends_before_the_second_look_is_not_cancelled(self) -> None:
        name = self.commands.make_job_name("a")
        self.commands.add_job_watcher(name, lambda _: None)
        for state in ("RUNNING", "RUNNING", "COMPLETING", "COMPLETED"):
            self.look(f"1|{name}|{state}||one\n")
            self.commands.abandon_job(name)
            self.assertEqual(len(self.asked), 1)

    def test_commands_get_the_configuration_of_slurm_and_no_secret(self) -> None:
        given = {"SLURM_CONF": "/c", "PATH": "/bin", "TOKEN": "x"}
        self.assertEqual(
            build_command_environment(given), {"PATH": "/bin", "LC_ALL": "C", "SLURM_CONF": "/c"}
        )
