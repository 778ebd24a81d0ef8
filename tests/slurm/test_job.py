"""`slurm.job`: runs whose node, srun and queue the test plays."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import LimitSettings, RunnerSettings, SlurmJobSettings
from tawebeval.errors import EvaluationFailure
from tawebeval.linux.starter import LaunchSpec, read_launch_spec
from tawebeval.linux.starter_client import ProgramState
from tawebeval.linux.tail import TailedProcess
from tawebeval.sandbox.base import ResumableProcess
from tawebeval.sandbox.bubblewrap import BubblewrapSandbox
from tawebeval.sandbox.workspace import Workspace
from tawebeval.slurm.commands import JobCounters, QueuedJob
from tawebeval.slurm.job import (
    MAX_POLL_SECONDS,
    MAX_POLLS_OF_ENDING_JOB,
    MAX_POLLS_WITHOUT_JOB,
    MIN_POLL_SECONDS,
    NODE_KILL_TIMEOUT,
    SRUN_END_TIMEOUT,
    JobWorkspace,
    SlurmRun,
    SlurmSandbox,
    write_node_program,
)
from tests.fakes.sandbox import NO_CGROUPS
from tests.fakes.world import InlineThreads

RUSAGE = [1.5, 0.5, 4096, *[0] * 13]


class FakeStarter:
    """The starter of srun: it notes what it is asked."""

    pid = 77

    def __init__(self) -> None:
        self.listeners: dict[Path, Any] = {}
        self.started: list[LaunchSpec] = []
        self.forgotten: list[Path] = []
        self.error: OSError | None = None

    def start_program(self, directory: Path, launch: LaunchSpec) -> None:
        self.started.append(launch)
        (directory / "start").write_text("SLURM_JWT")
        if self.error is not None:
            raise self.error

    def watch_program(self, directory: Path, listener: Any) -> None:
        self.listeners[directory] = listener

    def unwatch_program(self, directory: Path) -> None:
        self.listeners.pop(directory, None)

    def forget_program(self, directory: Path) -> None:
        self.forgotten.append(directory)

    forget_program_blocking = forget_program


class FakeCommands:
    """Slurm's commands: the test calls `watchers` in place of squeue."""

    def __init__(self) -> None:
        self.counters = JobCounters()
        self.watchers: dict[str, Any] = {}  # of jobs that are not cancelled
        self.names = 0

    def make_job_name(self, evaluation: str) -> str:
        self.names += 1
        return f"tawebeval-x-{evaluation}-{self.names}"

    def add_job_watcher(self, name: str, on_look: Any = lambda job: None) -> None:
        self.watchers[name] = on_look

    def abandon_job(self, name: str) -> None:
        self.watchers.pop(name, None)


class FakeRun(ProcessProtocol):
    def __init__(self) -> None:
        self.stdout = b""
        self.told: list[Any] = []

    def outReceived(self, data: bytes) -> None:
        self.stdout += data

    def processExited(self, reason: Failure) -> None:
        self.told.append("exited")

    def processEnded(self, reason: Failure) -> None:
        self.told.append(reason.value)

    def reset_clock(self) -> None:
        self.told.append("suspended")

    def restart_clock(self) -> None:
        self.told.append("restarted")


class JobCase(SynchronousTestCase):
    """A run whose job was started, and of which nobody has heard."""

    retries = 0

    def setUp(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="tawebeval-test-"))
        self.addCleanup(shutil.rmtree, folder)
        self.evaluation = Workspace(folder / "evaluation")
        self.evaluation.output_directory.mkdir(parents=True)
        self.tree = folder / "checkout"
        self.tree.mkdir()
        (self.tree / "README").write_text("an evaluator")
        self.clock, self.starter, self.commands = Clock(), FakeStarter(), FakeCommands()
        self.clock.callFromThread = lambda call, *given: call(*given)  # type: ignore[attr-defined]
        launcher: Any = SimpleNamespace(starter=self.starter)
        settings = RunnerSettings(arguments=("--partition=all", "--qos=low"), retries=self.retries)
        local = BubblewrapSandbox(
            LimitSettings(), NO_CGROUPS, launcher, "/usr/bin/bwrap", folder, (), (), False
        )
        commands: Any = self.commands
        threads: Any = InlineThreads()
        self.sandbox = SlurmSandbox.create(settings, local, commands, threads, self.clock)
        self.process: TailedProcess
        self.run_ = FakeRun()
        self.slurm_run = self.make_run()
        self.status = self.slurm_run.cluster_job
        self.slurm_run.start_evaluator("./run", {"SEED": "5"}, self.job.tree_directory)

    def make_run(self) -> SlurmRun:
        checkout: Any = SimpleNamespace(
            path=self.tree, commit=SimpleNamespace(size=0, file_count=0)
        )
        run = self.sandbox.make_run(self.evaluation, checkout, LimitSettings())
        assert isinstance(run, SlurmRun)
        return run

    @property
    def job(self) -> JobWorkspace:
        return self.slurm_run.workspace

    def follow(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self.slurm_run.wait_for_evaluator_start(self.job))

    def write_state(self, **members: Any) -> None:
        content = {"node": "one", "job": "7", "pid": 5, "start_time_ticks": 6}
        self.job.state_file.write_text(json.dumps({**content, **members}))

    def tell(self, **members: Any) -> None:
        self.write_state(**members)
        self.pass_time()

    def tell_end(self, status: int = 0) -> None:
        self.tell(wait_status=status, rusage=RUSAGE, is_output_complete=True)

    def print_text(self, text: str) -> None:
        own, moved = self.job.output_directory, self.evaluation.output_directory
        directory = own if self.slurm_run.node_program_state is None else moved
        for name, content in (("stdout", text), ("stderr", "")):
            with (directory / name).open("a") as file:
                file.write(content)

    def pass_time(self) -> None:
        self.clock.pump([MIN_POLL_SECONDS] * int(3 * MAX_POLL_SECONDS / MIN_POLL_SECONDS))

    def end_srun(self, stderr: str = "") -> None:
        (self.job.root / "stderr").write_text(stderr)
        self.starter.listeners[self.job.root](ProgramState(wait_status=0, is_output_complete=True))
        self.pass_time()

    def queue(self, state: str | None, looks: int = 1) -> None:
        """Let squeue tell the state of the job; None: it does not know it."""
        queued = state and QueuedJob("7", self.job.name, state, "Resources")
        for _ in range(looks):
            self.commands.watchers[self.job.name](queued)
            self.pass_time()

    def connect(self) -> None:
        started = self.follow()
        self.print_text("")
        self.tell()
        self.successResultOf(started)
        self.process = self.slurm_run.connect_process(self.run_, self.job)
        self.pass_time()

    def check_loss(self, reason: str) -> None:
        loss = self.slurm_run.job_loss
        assert loss is not None
        self.assertEqual(loss.reason, reason)


class StartTests(JobCase):
    def test_launch_file_for_the_node_has_the_bwrap_command_and_limits(self) -> None:
        launch = read_launch_spec(str(self.job.output_directory))
        argv = " ".join(launch.argv)
        self.assertTrue(argv.startswith("/usr/bin/bwrap --as-pid-1 "))
        self.assertIn(f"--bind {self.job.tree_directory} /evaluation/tree ", argv)
        self.assertIn(f"{self.evaluation.root}/submission /evaluation/submission ", argv)
        self.assertTrue(argv.endswith(" /bin/sh -c ./run"))
        broker = LaunchSpec(**launch.broker_specification)
        self.assertEqual(broker.argv[0], "/usr/bin/python3")
        self.assertEqual(launch.broker_socket_path, f"{self.job.root}/runner")
        self.assertEqual((list(launch.procs_files), list(broker.procs_files)), ([], []))
        limits = LimitSettings()
        bounds = (launch.stdout_limit, launch.stderr_limit)
        self.assertEqual(bounds, (limits.output, limits.stderr))
        self.assertEqual((self.job.tree_directory / "README").read_text(), "an evaluator")

    def test_srun_runs_the_program_of_the_node_without_secrets_on_the_disk(self) -> None:
        (srun,) = self.starter.started
        options, program = " ".join(srun.argv).split(" -- ")
        self.assertIn(f"srun --job-name={self.job.name} ", options)
        self.assertIn(f"/usr/bin/python3 -I -S {self.tree.parent}/node {self.job.root} ", program)
        self.assertFalse((self.job.root / "start").exists())

    def test_srun_options_of_the_problem_follow_those_of_the_runner(self) -> None:
        self.slurm_run = self.make_run()
        self.slurm_run.job_settings = [SlurmJobSettings(arguments=("--qos=high",))]
        self.slurm_run.start_evaluator("", {}, self.job.tree_directory)
        argv = list(self.starter.started[-1].argv)
        options = argv[: argv.index("--")]
        self.assertEqual(options[-3:], ["--partition=all", "--qos=low", "--qos=high"])

    def test_close_ends_a_run_whose_start_timed_out(self) -> None:
        first = self.job.name
        self.slurm_run = self.make_run()
        self.starter.error = TimeoutError(110, "the starter of evaluators does not answer")
        self.assertRaises(
            TimeoutError, self.slurm_run.start_evaluator, "", {}, self.job.tree_directory
        )
        self.assertEqual(list(self.commands.watchers), [first, self.job.name])
        self.slurm_run.close()
        self.slurm_run.close()
        self.assertEqual(list(self.commands.watchers), [first])
        self.assertEqual(self.starter.forgotten, [self.job.root])

    def test_write_node_program_replaces_the_existing_program(self) -> None:
        program = self.tree.parent / "node"
        (program / "file").touch()
        self.assertEqual(write_node_program(self.tree.parent), program)
        self.assertFalse((program / "file").exists())
        self.assertTrue((program / "__main__.py").is_file())


class JobTests(JobCase):
    def test_wait_for_the_start_ends_once_the_node_writes_its_state(self) -> None:
        started = self.follow()
        self.queue("PENDING")
        self.assertEqual((self.status.job, self.status.queue_reason), ("7", "Resources"))
        self.assertNoResult(started)
        self.job.state_file.write_text('{"node": "o')  # as NFS may show it
        self.pass_time()
        self.assertNoResult(started)
        self.tell()
        self.successResultOf(started)
        self.assertEqual((self.status.node, self.status.queue_reason), ("one", None))

    def test_output_and_exit_are_delivered(self) -> None:
        self.connect()
        self.print_text("one\n")
        self.pass_time()
        self.assertEqual(self.run_.stdout, b"one\n")
        self.print_text("two\n")
        self.tell_end(status=3 << 8)
        self.assertEqual(self.run_.stdout, b"one\ntwo\n")
        exited, ended = self.run_.told
        self.assertEqual((exited, ended.exitCode), ("exited", 3))
        usage = self.process.resource_usage
        assert usage is not None
        self.assertEqual(usage.ru_utime, 1.5)
        self.assertEqual(self.slurm_run.run_limits.read_usage(usage).peak_memory_bytes, 2**22)
        self.assertEqual((self.starter.forgotten, self.commands.watchers), ([], {}))
        self.end_srun()
        self.slurm_run.close()
        self.assertEqual(self.starter.forgotten, [self.job.root])

    def test_detached_process_delivers_nothing(self) -> None:
        self.connect()
        self.process.detach()
        self.process.detach()
        self.print_text("one\n")
        self.tell_end()
        self.end_srun()
        self.assertEqual((self.run_.stdout, self.run_.told), (b"", []))
        self.queue("FAILED")
        self.assertEqual(list(self.commands.watchers), [self.job.name])

    def test_state_file_is_read_as_soon_as_srun_ends(self) -> None:
        self.connect()
        self.write_state(wait_status=0, rusage=RUSAGE, is_output_complete=True)
        self.starter.listeners[self.job.root](ProgramState(wait_status=0, is_output_complete=True))
        self.clock.pump([0] * 9)
        self.assertEqual(len(self.run_.told), 2)
        self.assertIsNone(self.slurm_run.job_loss)

    def test_job_is_lost_if_the_node_does_not_react_to_a_signal_in_time(self) -> None:
        self.connect()
        self.process.signal_group(signal.SIGTERM)
        self.process.signal_group(signal.SIGKILL)
        self.assertEqual((self.job.root / "signal").read_text(), "15\n9\n")
        self.clock.advance(NODE_KILL_TIMEOUT)
        self.pass_time()
        self.assertEqual((self.starter.forgotten, self.commands.watchers), ([self.job.root], {}))
        self.assertEqual(len(self.run_.told), 2)
        self.check_loss("lost")

    def test_lost_job_is_explained_after_its_output(self) -> None:
        self.connect()
        self.print_text("said\n")
        self.queue("NODE_FAIL")
        self.assertEqual(self.run_.stdout, b"said\n")
        self.assertEqual(self.run_.told[0], "exited")
        self.check_loss("node")
        self.assertRaises(EvaluationFailure, self.slurm_run.interpret_exit, None, signal.SIGKILL)
        self.assertIsNone(self.process.resource_usage)
        self.assertEqual(self.commands.counters.lost_jobs_by_reason["node"], 1)

    def test_end_reported_by_the_node_overrides_the_state_in_the_queue(self) -> None:
        self.connect()
        self.write_state(wait_status=0, rusage=RUSAGE, is_output_complete=True)
        self.queue("CANCELLED")
        self.assertIsNone(self.slurm_run.job_loss)

    def test_job_continues_after_srun_ends(self) -> None:
        self.connect()
        self.end_srun()
        self.queue("RUNNING", 100)
        self.print_text("late\n")
        self.tell_end()
        self.assertEqual(self.run_.stdout, b"late\n")
        self.assertIsNone(self.slurm_run.job_loss)
        self.assertEqual(self.commands.watchers, {})

    def test_job_missing_from_the_queue_for_several_polls_is_lost(self) -> None:
        self.connect()
        self.queue(None, MAX_POLLS_WITHOUT_JOB - 1)
        self.queue("RUNNING")
        self.queue(None, MAX_POLLS_WITHOUT_JOB - 1)
        self.assertIsNone(self.slurm_run.job_loss)
        self.queue(None)
        self.check_loss("lost")

    def test_srun_may_wait_any_time_for_an_absent_controller(self) -> None:
        started = self.follow()
        self.queue(None, 100)
        self.assertNoResult(started)

    def test_node_has_two_minutes_to_end_a_job(self) -> None:
        self.connect()
        self.queue("COMPLETING", MAX_POLLS_OF_ENDING_JOB - 1)
        self.assertEqual(self.run_.told, ["suspended"])
        self.queue("COMPLETING")
        self.check_loss("node")

    def test_wall_clock_is_suspended_in_state_completing_and_restarted_in_state_running(
        self,
    ) -> None:
        self.connect()
        self.queue("COMPLETING", 2)
        self.queue("RUNNING", 2)
        self.assertEqual(self.run_.told, ["suspended", "restarted"])
        self.queue("COMPLETING", MAX_POLLS_OF_ENDING_JOB - 1)
        self.assertIsNone(self.slurm_run.job_loss)
        self.assertEqual(self.run_.told, ["suspended", "restarted", "suspended"])

    def test_srun_is_killed_if_still_running_some_time_after_the_job(self) -> None:
        self.connect()
        self.tell_end()
        self.assertEqual(self.starter.forgotten, [])
        self.clock.advance(SRUN_END_TIMEOUT)
        self.assertEqual((self.starter.forgotten, self.starter.listeners), ([self.job.root], {}))

    def test_cancellation_ends_srun_and_its_job(self) -> None:
        started = self.follow()
        started.cancel()
        self.failureResultOf(started, CancelledError)
        self.assertEqual(self.starter.forgotten, [self.job.root])
        self.assertEqual((self.commands.watchers, self.starter.listeners), ({}, {}))

    def test_job_that_never_begins_ends_with_the_message_of_srun(self) -> None:
        started = self.follow()
        self.end_srun("srun: error: invalid partition specified: none\n")
        self.queue(None, MAX_POLLS_WITHOUT_JOB)
        error = self.failureResultOf(started, EvaluationFailure).value
        self.assertIn("invalid partition", error.message)

    def test_start_fails_with_the_reason_reported_by_the_node(self) -> None:
        started = self.follow()
        self.tell(error="/roots/gcc: No such file or directory")
        error = self.failureResultOf(started, EvaluationFailure).value
        self.assertIn("the node one could not run the evaluator: /roots/gcc", error.message)
        self.assertFalse((self.evaluation.output_directory / "stdout").exists())

    def test_limit_reported_exceeded_by_the_node_is_the_failure_reason(self) -> None:
        self.connect()
        limits = self.slurm_run.run_limits
        for exceeded in ("cpu", "memory", "disk"):
            self.tell(exceeded_limit=exceeded)
            failure = limits.find_limit_failure()
            assert failure is not None
            self.assertEqual(failure.reason, exceeded)

    def test_unlinked_open_files_count_towards_the_disk_limit(self) -> None:
        self.connect()
        limits = self.slurm_run.run_limits
        self.assertIsNone(limits.find_limit_failure())
        self.tell(unlinked_bytes=LimitSettings().disk)
        (self.job.home_directory / "file").write_text("x")
        failure = limits.find_limit_failure(final=True)
        assert failure is not None
        self.assertEqual(failure.reason, "disk")
        self.tell(unlinked_bytes=0)
        self.assertIsNone(limits.find_limit_failure(final=True))

    def test_limits_are_not_checked_while_the_job_directory_is_missing(self) -> None:
        self.connect()
        self.job.root.rename(self.job.root.with_name("away"))
        self.assertIsNone(self.slurm_run.run_limits.find_limit_failure(final=True))


class RepeatTests(JobCase):
    """A job that is lost before the evaluator has printed anything, and the job in its place."""

    retries = 1

    def setUp(self) -> None:
        super().setUp()
        self.lost = self.job
        self.starter.started.clear()

    def list_options(self) -> Sequence[str]:
        (launch,) = self.starter.started
        argv = list(launch.argv)
        return argv[: argv.index("--")]

    def test_second_job_runs_the_evaluator_and_the_lost_job_is_removed(self) -> None:
        started = self.follow()
        self.queue("NODE_FAIL")
        self.assertEqual(list(self.commands.watchers), [self.job.name])
        self.assertFalse(self.lost.root.exists())
        self.print_text("one\n")
        self.tell(node="two")
        self.successResultOf(started)
        self.assertEqual((self.status.node, self.status.retries), ("two", 1))
        self.slurm_run.connect_process(self.run_, self.job)
        self.pass_time()
        self.assertEqual(self.run_.stdout, b"one\n")
        described = self.slurm_run.make_resume_data()
        self.assertEqual((described["retries"], described["job_name"]), (1, self.job.name))

    def test_evaluator_that_has_printed_nothing_runs_again(self) -> None:
        self.connect()
        before = self.evaluation.output_directory / "stdout"
        with before.open("a") as zombie:
            self.queue("NODE_FAIL")
            zombie.write("of a node that came back\n")
        self.process.resumeProducing()
        self.pass_time()
        self.assertEqual(self.run_.told, ["suspended"])
        self.assertEqual((self.status.job, self.status.retries), (None, 1))
        self.assertIn("--exclude=one", self.list_options())
        self.queue("PENDING")
        self.assertEqual(self.status.queue_reason, "Resources")
        self.print_text("one\n")
        self.tell(node="two", pid=8)
        self.assertEqual(self.run_.told, ["suspended", "restarted"])
        self.assertEqual((self.process.pid, self.run_.stdout), (8, b"one\n"))
        self.print_text("two\n")
        self.tell(node="two", pid=8, wait_status=0, rusage=RUSAGE, is_output_complete=True)
        self.assertEqual(self.run_.stdout, b"one\ntwo\n")
        self.assertEqual(len(self.run_.told), 4)
        self.assertIsNone(self.slurm_run.job_loss)

    def test_evaluator_that_has_printed_is_not_begun_again(self) -> None:
        for name in ("stdout", "stderr"):
            self.setUp()
            self.connect()
            (self.evaluation.output_directory / name).write_text("one\n")
            self.queue("PREEMPTED")
            self.check_loss("preempted")
            self.assertEqual((self.starter.started, self.run_.told[0]), ([], "exited"))

    def test_evaluator_that_has_ended_is_not_begun_again(self) -> None:
        self.connect()
        self.tell(wait_status=0, rusage=RUSAGE)
        self.queue("NODE_FAIL")
        self.check_loss("node")
        self.assertEqual(self.starter.started, [])

    def test_run_is_lost_if_the_output_of_the_second_job_cannot_be_read(self) -> None:
        self.connect()
        self.queue("NODE_FAIL")
        (self.evaluation.output_directory / "stderr").unlink()
        self.tell(node="two", pid=8)
        self.check_loss("lost")
        self.assertEqual(self.commands.watchers, {})

    def test_late_read_of_a_lost_job_keeps_the_output_of_the_second_job(self) -> None:
        self.connect()
        lost = attrs.evolve(self.lost)
        self.queue("NODE_FAIL")
        self.print_text("one\n")
        self.tell(node="two", pid=8)
        lost.output_directory.mkdir(parents=True)
        (lost.output_directory / "stdout").touch()
        lost.state_file.write_text('{"pid": 5, "start_time_ticks": 6}')
        self.successResultOf(Deferred.fromCoroutine(self.slurm_run._read(lost)))
        self.print_text("two\n")
        self.pass_time()
        self.assertEqual(self.run_.stdout, b"one\ntwo\n")

    def test_evaluator_is_not_run_again_if_stopped_during_the_check_of_the_output(
        self,
    ) -> None:
        self.connect()
        run_in_thread = self.sandbox.threads.run_in_thread

        async def stop_after(call: Callable[..., Any], *arguments: Any) -> Any:
            if call == self.lost.replace_empty_output_files:
                self.process.signal_group(signal.SIGTERM)
            return await run_in_thread(call, *arguments)

        self.patch(self.sandbox.threads, "run_in_thread", stop_after)
        self.queue("NODE_FAIL")
        self.check_loss("node")
        self.assertEqual(self.starter.started, [])

    def test_evaluator_that_waits_to_run_again_can_be_stopped(self) -> None:
        self.connect()
        self.queue("NODE_FAIL")
        self.process.signal_group(signal.SIGTERM)
        self.pass_time()
        self.assertEqual(self.run_.told[:2], ["suspended", "exited"])
        self.assertEqual(self.commands.watchers, {})
        self.assertIn(self.job.root, self.starter.forgotten)

    def test_node_that_cannot_start_the_evaluator_is_avoided(self) -> None:
        started = self.follow()
        self.tell(error="No space left on device")
        self.assertIn("--exclude=one", self.list_options())
        self.assertNoResult(started)
        self.end_srun("srun: error: Requested node configuration is not available\n")
        self.queue(None, MAX_POLLS_WITHOUT_JOB)
        error = self.failureResultOf(started, EvaluationFailure).value
        self.assertIn("No space left on device", error.message)

    def test_second_loss_of_a_job_ends_the_evaluation(self) -> None:
        started = self.follow()
        self.queue("NODE_FAIL")
        self.queue("NODE_FAIL")
        self.assertEqual(self.failureResultOf(started, EvaluationFailure).value.reason, "node")
        self.assertEqual(len(self.starter.started), 1)

    def test_job_cancelled_in_slurm_is_not_run_again(self) -> None:
        started = self.follow()
        self.queue("CANCELLED")
        self.assertEqual(self.failureResultOf(started, EvaluationFailure).value.reason, "revoked")
        self.assertEqual(self.starter.started, [])

    def test_second_job_is_ended_if_the_starter_does_not_answer(self) -> None:
        self.starter.error = TimeoutError(110, "the starter of evaluators does not answer")
        started = self.follow()
        self.queue("NODE_FAIL")
        self.assertEqual(self.failureResultOf(started, EvaluationFailure).value.reason, "node")
        self.assertEqual(list(self.evaluation.root.glob("*/start")), [])
        self.assertEqual(self.commands.watchers, {})
        self.assertIn(self.job.root, self.starter.forgotten)

    def test_second_job_is_ended_if_the_start_is_cancelled(self) -> None:
        run_in_thread = self.sandbox.threads.run_in_thread

        async def cancel_after(call: Callable[..., Any], *arguments: Any) -> Any:
            found = await run_in_thread(call, *arguments)
            if call == self.slurm_run._start_job:
                started.cancel()
            return found

        self.patch(self.sandbox.threads, "run_in_thread", cancel_after)
        started = self.follow()
        self.queue("NODE_FAIL")
        self.failureResultOf(started, CancelledError)
        self.assertEqual(len(self.starter.started), 1)
        self.assertIn(self.job.root, self.starter.forgotten)
        self.assertEqual(self.commands.watchers, {})
        self.assertFalse(self.job.root.exists())  # after the clean-up nobody would remove it


class ResumeTests(JobCase):
    """Jobs of an earlier process of the daemon, whose starter has ended."""

    def setUp(self) -> None:
        super().setUp()
        self.print_text("one\n")
        self.write_state()
        described = {**self.slurm_run.make_resume_data(), "job": "7", "node": "one"}
        self.left = ResumableProcess(described, 5, 6, 0)
        name = self.job.name
        self.slurm_run = self.make_run()
        self.status = self.slurm_run.cluster_job
        self.commands.watchers.clear()
        self.left_job = JobWorkspace(self.evaluation.root / name)

    def resume(self) -> None:
        self.process = self.slurm_run.resume_process(self.run_, self.left)
        self.starter.listeners[self.job.root](ProgramState(is_unknown=True))
        self.pass_time()

    def test_job_goes_on_without_srun_and_is_cancelled_in_the_end(self) -> None:
        self.resume()
        self.assertEqual(self.job, self.left_job)
        self.assertEqual(self.run_.stdout, b"one\n")
        self.queue("RUNNING")
        self.tell_end()
        self.assertEqual(self.run_.told[0], "exited")
        self.assertEqual(self.commands.watchers, {})

    def test_resume_reports_a_job_that_ended_while_no_daemon_ran(self) -> None:
        ended = {"wait_status": 0, "rusage": RUSAGE, "is_output_complete": True}
        content = json.loads(self.left_job.state_file.read_text())
        exceeded = {"exceeded_limit": "memory"}
        self.left_job.state_file.write_text(json.dumps({**content, **ended, **exceeded}))
        self.resume()
        self.assertEqual(self.run_.stdout, b"one\n")
        self.assertEqual(self.run_.told[0], "exited")
        failure = self.slurm_run.run_limits.find_node_limit_failure()
        assert failure is not None
        self.assertEqual(failure.reason, "memory")
        self.assertEqual(self.commands.watchers, {})

    def test_resume_reports_a_job_that_was_cancelled_in_slurm(self) -> None:
        self.resume()
        self.queue("CANCELLED")
        self.assertEqual(self.run_.stdout, b"one\n")
        self.assertEqual(self.run_.told[0], "exited")
        self.check_loss("revoked")
        self.assertEqual(self.commands.watchers, {})

    def test_close_ends_the_job_after_a_failed_resume(self) -> None:
        for name in ("stdout", "stderr"):
            self.setUp()
            self.left_job.read_state()
            (self.evaluation.output_directory / name).unlink()
            self.assertRaises(OSError, self.slurm_run.resume_process, self.run_, self.left)
            self.slurm_run.close()
            self.assertEqual((self.commands.watchers, self.starter.listeners), ({}, {}))
            self.assertEqual(self.starter.forgotten, [self.left_job.root])

    def test_job_with_another_process_number_is_not_resumed(self) -> None:
        self.left = ResumableProcess(self.left.resume_data, 4, 6, 0)
        self.assertRaises(OSError, self.slurm_run.resume_process, self.run_, self.left)
