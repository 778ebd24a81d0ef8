"""`slurm.cluster`: jobs in place of lost ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import LimitSettings, RunnerSettings, SlurmJobSettings
from tawebeval.linux.starter_client import LaunchSpec
from tawebeval.slurm.cluster import SlurmRun, SlurmSandbox
from tawebeval.slurm.node_process import Attempt
from tests.slurm.test_node_process import NodeProcessCase


class LeftoverTests(SynchronousTestCase):
    def test_jobs_of_an_earlier_process_without_an_evaluation_are_leftovers(self) -> None:
        sandbox: Any = SimpleNamespace(job_prefix="tawebeval-x-", session="5e55")
        names = ("tawebeval-x-a-1", "tawebeval-x-b-25e55", "tawebeval-x-c-3", "tawebeval-y-d-4")
        found = [SlurmSandbox.is_leftover(sandbox, {"tawebeval-x-c-3"}, name) for name in names]
        self.assertEqual(found, [True, False, False, False])


class RepeatedJobTests(NodeProcessCase):
    """A run whose job is lost, and the job in its place."""

    def setUp(self) -> None:
        super().setUp()
        tree = self.evaluation.root.parent / "checkout"
        tree.mkdir()
        self.started: list[LaunchSpec] = []
        self.error: OSError | None = None
        self.patch(shutil, "which", lambda *_, **__: "/usr/bin/srun")
        sandbox: Any = SimpleNamespace(
            access=self.access,
            commands=self.commands,
            settings=RunnerSettings(arguments=("--partition=all", "--qos=low")),
            job_prefix="tawebeval-x-",
            session="s",
            writable_trees=SimpleNamespace(starter=self),
            local=SimpleNamespace(
                sandbox_files_directory=self.evaluation.root.parent,
                make_system_view=lambda environment: None,
            ),
        )
        self.sandbox = sandbox
        commit = SimpleNamespace(size=0, file_count=0)
        checkout: Any = SimpleNamespace(path=tree, commit=commit)
        self.slurm_run = SlurmRun(self.evaluation, checkout, sandbox, LimitSettings())
        self.slurm_run.sandboxed = SimpleNamespace(workspace=None)  # type: ignore[assignment]
        self.lost = self.slurm_run.attempt
        self.lost.make_directories()
        self.lost.write_start({"argv": []})

    def start_program(self, directory: os.PathLike[str], launch: LaunchSpec) -> None:
        self.started.append(launch)
        Path(directory, "start").write_text("SLURM_JWT")
        if self.error is not None:
            raise self.error

    def start_in_place(self) -> Deferred[Attempt]:
        return Deferred.fromCoroutine(self.slurm_run._repeat(self.lost, None))

    def test_job_in_place_of_a_lost_one_leaves_its_directory(self) -> None:
        attempt = self.successResultOf(self.start_in_place())
        self.assertIs(self.slurm_run.attempt, attempt)
        self.assertTrue(self.lost.directory.exists())

    def test_options_of_environment_and_problem_follow_those_of_the_runner(self) -> None:
        self.slurm_run.job_settings = [SlurmJobSettings(arguments=("--qos=high",))]
        self.successResultOf(self.start_in_place())
        options = self.started[0].argv[: self.started[0].argv.index("--")]
        self.assertEqual(options[-3:], ["--partition=all", "--qos=low", "--qos=high"])

    def test_token_of_srun_does_not_stay_on_the_disk(self) -> None:
        attempt = self.successResultOf(self.start_in_place())
        self.assertFalse((attempt.directory / "start").exists())
        self.assertTrue((attempt.workspace.output_directory / "start").exists())
        self.error = TimeoutError(110, "the starter of evaluators does not answer")
        self.failureResultOf(self.start_in_place(), TimeoutError)
        self.assertEqual(list(self.evaluation.root.glob("job-*/start")), [])

    def test_damaged_description_starts_no_job(self) -> None:
        (self.lost.workspace.output_directory / "start").write_text('{"argv"')
        self.failureResultOf(self.start_in_place(), ValueError)
        self.assertEqual(self.started, [])

    def test_job_of_a_starter_that_does_not_answer_is_cancelled(self) -> None:
        self.error = TimeoutError(110, "the starter of evaluators does not answer")
        self.failureResultOf(self.start_in_place(), TimeoutError)
        (name,) = self.commands.cancelled
        self.assertIn(f"--job-name={name}", self.started[0].argv)
