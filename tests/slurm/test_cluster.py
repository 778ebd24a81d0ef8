"""`slurm.cluster`: jobs in place of those that were lost before the evaluator ran."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import LimitSettings, RunnerSettings, SlurmJobSettings
from tawebeval.errors import EvaluationFailure
from tawebeval.linux.starter import LaunchSpec
from tawebeval.slurm.cluster import SlurmRun, SlurmSandbox
from tawebeval.slurm.commands import QueuedJob
from tests.slurm.test_job import JobCase


class LeftoverTests(SynchronousTestCase):
    def test_jobs_of_an_earlier_process_without_an_evaluation_are_leftovers(self) -> None:
        sandbox: Any = SimpleNamespace(job_prefix="tawebeval-x-", session="5e55")
        names = ("tawebeval-x-a-1", "tawebeval-x-b-25e55", "tawebeval-x-c-3", "tawebeval-y-d-4")
        found = [SlurmSandbox.is_leftover(sandbox, {"tawebeval-x-c-3"}, name) for name in names]
        self.assertEqual(found, [True, False, False, False])


class RepeatTests(JobCase):
    """A run whose job is lost before the evaluator runs, and the job in its place."""

    def setUp(self) -> None:
        super().setUp()
        tree = self.evaluation.root.parent / "checkout"
        tree.mkdir()
        self.started: list[LaunchSpec] = []
        self.error: OSError | None = None
        self.patch(shutil, "which", lambda *_, **__: "/usr/bin/srun")
        sandbox: Any = SimpleNamespace(
            access=self.access,
            settings=RunnerSettings(arguments=("--partition=all", "--qos=low"), retries=1),
            job_prefix="tawebeval-x-",
            session="s",
            writable_trees=SimpleNamespace(starter=self),
            local=SimpleNamespace(
                has_network=False, sandbox_files_directory=self.evaluation.root.parent
            ),
        )
        self.sandbox = sandbox
        commit = SimpleNamespace(size=0, file_count=0)
        checkout: Any = SimpleNamespace(path=tree, commit=commit)
        self.slurm_run = SlurmRun(self.evaluation, checkout, sandbox, LimitSettings())
        self.status = self.slurm_run.runner_status
        self.job = self.lost = self.slurm_run.job
        local_run = SimpleNamespace(make_launch_spec=lambda *_: LaunchSpec([], {}, "/"))
        self.patch(self.slurm_run, "_make_local_run", lambda: local_run)
        self.slurm_run.start_evaluator("", {}, Path())
        self.started.clear()

    def start_program(self, directory: os.PathLike[str], launch: LaunchSpec) -> None:
        self.started.append(launch)
        Path(directory, "start").write_text("SLURM_JWT")
        if self.error is not None:
            raise self.error

    def wait(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self.slurm_run.wait_for_evaluator_start(self.lost))

    def lose(self) -> None:
        self.commands.job = QueuedJob("7", "a", "NODE_FAIL")
        self.end_srun()

    def fail_to_start(self) -> None:
        self.tell(error="No space left on device")
        self.job = self.slurm_run.job

    def list_options(self) -> Sequence[str]:
        (launch,) = self.started
        return launch.argv[: launch.argv.index("--")]

    def test_other_job_runs_the_evaluator_and_the_lost_one_is_removed(self) -> None:
        started = self.wait()
        self.lose()
        self.job = self.slurm_run.job
        self.assertIn(self.lost.job_name, self.commands.cancelled)
        self.assertFalse(self.lost.directory.exists())
        self.print_text("one\n")
        self.tell(node="two")
        self.successResultOf(started)
        self.assertEqual((self.status.node, self.status.retry_count), ("two", 1))
        self.slurm_run.connect_process(self.run_, self.lost)
        self.pass_time()
        self.assertEqual(self.run_.stdout, b"one\n")
        described = self.slurm_run.describe_for_resume()
        self.assertEqual((described["retries"], described["job_name"]), (1, self.job.job_name))

    def test_options_of_environment_and_problem_follow_those_of_the_runner(self) -> None:
        self.slurm_run.job_settings = [SlurmJobSettings(arguments=("--qos=high",))]
        self.wait()
        self.lose()
        self.assertEqual(self.list_options()[-3:], ["--partition=all", "--qos=low", "--qos=high"])

    def test_node_that_cannot_start_the_evaluator_is_avoided(self) -> None:
        started = self.wait()
        self.fail_to_start()
        self.assertEqual(self.list_options()[-1], "--exclude=one")
        self.assertNoResult(started)
        self.end_srun("srun: error: Requested node configuration is not available\n")
        error = self.failureResultOf(started, EvaluationFailure).value
        self.assertIn("No space left on device", error.message)

    def test_second_loss_is_the_end(self) -> None:
        started = self.wait()
        self.lose()
        self.job = self.slurm_run.job
        self.lose()
        self.assertEqual(self.failureResultOf(started, EvaluationFailure).value.reason, "node")
        self.assertEqual(len(self.started), 1)

    def test_cancelled_job_is_not_replaced(self) -> None:
        started = self.wait()
        self.commands.job = QueuedJob("7", "a", "CANCELLED")
        self.end_srun()
        self.assertEqual(self.failureResultOf(started, EvaluationFailure).value.reason, "revoked")
        self.assertEqual(self.started, [])

    def test_token_of_srun_does_not_stay_on_the_disk(self) -> None:
        self.wait()
        self.lose()
        directory = self.slurm_run.job.directory
        self.assertFalse((directory / "start").exists())
        self.assertTrue((directory / "output" / "start").exists())

    def test_job_of_a_starter_that_does_not_answer_is_ended(self) -> None:
        self.error = TimeoutError(110, "the starter of evaluators does not answer")
        started = self.wait()
        self.lose()
        self.assertEqual(self.failureResultOf(started, EvaluationFailure).value.reason, "node")
        self.assertEqual(self.status.retry_count, 0)
        self.assertEqual(list(self.evaluation.root.glob("job-*/start")), [])
        self.access.reactor.callFromThread = lambda call, *given: call(*given)
        self.slurm_run.close()
        job = self.slurm_run.job
        self.assertIn(f"--job-name={job.job_name}", self.started[0].argv)
        self.assertIn(job.job_name, self.commands.cancelled)
        self.assertIn(job.directory, self.starter.forgotten)

    def test_job_whose_start_is_cancelled_is_ended(self) -> None:
        run_in_thread = self.access.threads.run_in_thread

        async def cancel_after(call: Callable[..., Any], *arguments: Any) -> Any:
            found = await run_in_thread(call, *arguments)
            if arguments:  # the start, not a look at a file
                raise CancelledError
            return found

        self.patch(self.access.threads, "run_in_thread", cancel_after)
        started = self.wait()
        self.lose()
        self.failureResultOf(started, CancelledError)
        self.access.reactor.callFromThread = lambda call, *given: call(*given)
        self.slurm_run.close()
        self.assertIn(self.slurm_run.job.job_name, self.commands.cancelled)
