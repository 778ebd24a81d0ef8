"""`slurm.job`: jobs whose files, srun and queue the test plays."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import LimitSettings, RunnerSettings
from tawebeval.errors import EvaluationFailure
from tawebeval.linux.starter_client import ProgramState
from tawebeval.linux.tail import TailedProcess
from tawebeval.sandbox.base import LeftProcess, RunnerStatus
from tawebeval.sandbox.workspace import Workspace
from tawebeval.slurm.cluster import SlurmRun
from tawebeval.slurm.commands import JobCounters, QueuedJob
from tawebeval.slurm.job import (
    JOB_QUERY_TIMEOUT,
    KILL_ANSWER_TIMEOUT,
    MAX_POLL_SECONDS,
    MIN_POLL_SECONDS,
    ClusterAccess,
    Job,
    PollingWatcher,
    remove_other_node_programs,
    write_node_program,
)
from tests.fakes.world import InlineThreads

RUSAGE = [1.5, 0.5, *[0] * 14]


class ProgramTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.parent = Path(tempfile.mkdtemp(prefix="tawebeval-test-"))
        self.addCleanup(shutil.rmtree, self.parent)

    def test_several_threads_write_it_once_beside_that_of_another_version(self) -> None:
        other = self.parent / "node-0123456789abcdef"
        other.touch()
        with ThreadPoolExecutor(8) as threads:
            found = set(threads.map(write_node_program, [self.parent] * 8))
        (program,) = found
        self.assertEqual(set(self.parent.iterdir()), {other, program})
        self.assertTrue((program / "__main__.py").is_file())
        remove_other_node_programs(self.parent)
        self.assertEqual(list(self.parent.iterdir()), [program])


class FakeStarter:
    def __init__(self) -> None:
        self.listeners: dict[Path, Any] = {}
        self.signals: list[tuple[Path, int]] = []
        self.forgotten: list[Path] = []

    def watch_program(self, directory: Path, listener: Any) -> None:
        self.listeners[directory] = listener

    def unwatch_program(self, directory: Path) -> None:
        del self.listeners[directory]

    def signal_program(self, directory: Path, number: int) -> None:
        self.signals.append((directory, number))

    def forget_program(self, directory: Path) -> None:
        self.forgotten.append(directory)

    forget_program_now = forget_program


class FakeCommands:
    """Slurm's commands: squeue says `job` of a job without srun."""

    def __init__(self) -> None:
        self.counters = JobCounters()
        self.watchers: dict[str, Any] = {}
        self.cancelled: list[str] = []
        self.job: QueuedJob | None = None
        self.misses: int | None = None

    def watch_job(self, name: str, on_state: Any, *, misses: int | None = None) -> None:
        self.watchers[name], self.misses = on_state, misses

    def unwatch_job(self, name: str) -> None:
        self.watchers.pop(name, None)

    def cancel_job(self, name: str) -> None:
        self.cancelled.append(name)


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

    def suspend_clock(self) -> None:
        self.told.append("suspended")


class JobCase(SynchronousTestCase):
    """A job that was started, and nobody has heard of."""

    def setUp(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="tawebeval-test-"))
        self.addCleanup(shutil.rmtree, folder)
        self.evaluation = Workspace(folder / "evaluation")
        self.evaluation.output_directory.mkdir(parents=True)
        self.clock, self.starter, self.commands = Clock(), FakeStarter(), FakeCommands()
        threads: Any = InlineThreads()
        self.access = ClusterAccess(
            self.clock,
            lambda: self.starter,  # type: ignore[arg-type,return-value]
            PollingWatcher(self.clock, threads),
            threads,
            self.commands,  # type: ignore[arg-type]
        )
        self.run_, self.status = FakeRun(), RunnerStatus("slurm")
        self.job = self.make_job()
        self.process: TailedProcess

    def make_job(self) -> Job:
        job = Job(self.access, self.status, "tawebeval-x-evaluation-0s", self.evaluation)
        job.make_directories()
        return job

    def follow(self) -> Deferred[None]:
        self.job.follow()
        return Deferred.fromCoroutine(self.job.wait_for_start())

    def tell(self, **members: Any) -> None:
        content = {"node": "one", "job": "7", "exceeded": None, "pid": 5, "start_time": 6}
        self.job.state_file.write_text(json.dumps({**content, **members}))
        self.pass_time()

    def tell_end(self, status: int = 0) -> None:
        self.tell(status=status, rusage=RUSAGE, is_output_complete=True)

    def print_text(self, text: str) -> None:
        own = self.job.workspace.output_directory
        moved = self.evaluation.output_directory
        for directory in (moved if (moved / "stdout").exists() else own,):
            for name, content in (("stdout", text), ("stderr", "")):
                with (directory / name).open("a") as file:
                    file.write(content)

    def pass_time(self, seconds: float = 3 * MAX_POLL_SECONDS) -> None:
        self.clock.pump([MIN_POLL_SECONDS] * int(seconds / MIN_POLL_SECONDS))

    def end_srun(self, stderr: str = "") -> None:
        (self.job.directory / "stderr").write_text(stderr)
        listener = self.starter.listeners[self.job.directory]
        listener(ProgramState(status=0, is_output_complete=True))
        if watcher := self.commands.watchers.get(self.job.job_name):
            watcher(self.commands.job)
        self.pass_time()

    def connect(self) -> None:
        started = self.follow()
        self.print_text("")
        self.tell()
        self.successResultOf(started)
        self.process = self.job.connect(self.run_)
        self.pass_time()


class FileTests(JobCase):
    def test_broken_state_counts_as_none(self) -> None:
        self.assertIsNone(self.job.read_state())
        self.job.state_file.write_text('{"node": "o')
        self.assertIsNone(self.job.read_state())

    def test_output_is_moved_once_the_evaluator_runs(self) -> None:
        moved = self.evaluation.output_directory / "stdout"
        (self.job.workspace.output_directory / "stdout").write_text("one")
        self.job.state_file.write_text('{"node": "one", "error": "no room"}')
        self.job.read_state()
        self.assertFalse(moved.exists())
        self.job.state_file.write_text('{"node": "one", "pid": 5}')
        self.job.read_state()
        self.assertEqual(moved.read_text(), "one")


class JobTests(JobCase):
    def test_wait_ends_when_the_node_has_begun(self) -> None:
        started = self.follow()
        watcher = self.commands.watchers[self.job.job_name]
        watcher(QueuedJob("7", "a", "PENDING", "Resources"))
        self.assertEqual((self.status.job_id, self.status.queue_reason), ("7", "Resources"))
        self.assertNoResult(started)
        self.tell()
        self.successResultOf(started)
        self.assertEqual((self.status.node, self.status.queue_reason), ("one", None))
        self.assertEqual(self.commands.watchers, {})

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
        self.end_srun()
        self.assertEqual(self.starter.forgotten, [self.job.directory])
        self.assertEqual(self.commands.cancelled, [])

    def test_process_that_is_left_delivers_nothing(self) -> None:
        self.connect()
        self.process.leave()
        self.process.leave()
        self.assertFalse(self.process.is_running)
        self.print_text("one\n")
        self.tell_end()
        self.end_srun()
        self.assertEqual((self.run_.stdout, self.run_.told), (b"", []))
        self.assertEqual((self.commands.cancelled, self.commands.watchers), ([], {}))

    def test_end_of_srun_lets_the_end_be_seen_at_once(self) -> None:
        self.connect()
        state = {"node": "one", "job": "7", "pid": 5, "start_time": 6, "status": 0}
        self.job.state_file.write_text(
            json.dumps({**state, "rusage": RUSAGE, "is_output_complete": True})
        )
        listener = self.starter.listeners[self.job.directory]
        listener(ProgramState(status=0, is_output_complete=True))
        self.clock.pump([0] * 9)
        self.assertEqual(len(self.run_.told), 2)
        self.assertIsNone(self.job.loss)
        self.assertEqual(self.commands.watchers, {})

    def test_srun_that_does_not_end_is_ended_with_its_job(self) -> None:
        self.connect()
        self.tell_end()
        self.clock.advance(60)
        self.assertEqual(self.commands.cancelled, [self.job.job_name])
        self.assertEqual(self.starter.signals, [(self.job.directory, signal.SIGKILL)])

    def test_signals_are_written_and_a_deaf_node_is_given_up(self) -> None:
        self.connect()
        self.process.signal_group(signal.SIGTERM)
        self.process.signal_group(signal.SIGKILL)
        self.assertEqual((self.job.directory / "signal").read_text(), "15\n9\n")
        self.clock.advance(KILL_ANSWER_TIMEOUT)
        self.assertEqual(self.commands.cancelled, [self.job.job_name])
        self.end_srun()
        self.assertEqual(len(self.run_.told), 2)
        assert self.job.loss is not None
        self.assertEqual(self.job.loss.reason, "lost")

    def test_lost_job_is_explained_after_its_output(self) -> None:
        self.connect()
        self.print_text("said\n")
        self.commands.job = QueuedJob("7", "a", "NODE_FAIL")
        self.end_srun()
        self.assertEqual(self.run_.stdout, b"said\n")
        self.assertEqual(self.run_.told[0], "exited")
        assert self.job.loss is not None
        self.assertEqual(self.job.loss.reason, "node")
        self.assertIsNone(self.process.resource_usage)
        self.assertEqual(self.commands.counters.lost_jobs_by_reason["node"], 1)

    def test_job_goes_on_without_an_srun_that_was_killed(self) -> None:
        self.connect()
        self.commands.job = QueuedJob("7", "a", "RUNNING")
        self.end_srun()
        self.clock.advance(JOB_QUERY_TIMEOUT)
        self.print_text("late\n")
        self.tell_end()
        self.assertEqual(self.run_.stdout, b"late\n")
        self.assertIsNone(self.job.loss)
        self.assertEqual(self.commands.cancelled, [self.job.job_name])

    def test_node_has_two_minutes_to_end_a_job(self) -> None:
        self.connect()
        self.commands.job = QueuedJob("7", "a", "COMPLETING")
        self.end_srun()
        self.assertEqual(self.run_.told, ["suspended"])
        self.clock.advance(JOB_QUERY_TIMEOUT)
        assert self.job.loss is not None
        self.assertEqual(self.job.loss.reason, "node")

    def test_cancellation_ends_srun_first(self) -> None:
        started = self.follow()
        started.cancel()
        self.assertNoResult(started)
        self.assertEqual(self.starter.signals, [(self.job.directory, signal.SIGKILL)])
        self.end_srun()
        self.failureResultOf(started, CancelledError)

    def test_job_that_never_begins_ends_with_the_words_of_srun(self) -> None:
        started = self.follow()
        self.end_srun("srun: error: invalid partition specified: none\n")
        error = self.failureResultOf(started, EvaluationFailure).value
        self.assertIn("invalid partition", error.message)

    def test_node_that_cannot_start_the_evaluator_says_why(self) -> None:
        started = self.follow()
        self.tell(error="/roots/gcc: No such file or directory")
        error = self.failureResultOf(started, EvaluationFailure).value
        self.assertIn("the node one could not run the evaluator: /roots/gcc", error.message)


class ResumeTests(JobCase):
    """Jobs of an earlier process of the daemon, whose starter has ended."""

    def resume(self) -> None:
        self.process = self.job.resume(self.run_, 0)
        self.starter.listeners[self.job.directory](ProgramState(is_unknown=True))
        self.pass_time()

    def begin(self) -> None:
        self.print_text("one\n")
        state = {"node": "one", "job": "7", "pid": 5, "start_time": 6}
        self.job.state_file.write_text(json.dumps(state))

    def test_job_goes_on_without_srun_and_is_cancelled_in_the_end(self) -> None:
        self.begin()
        self.resume()
        self.assertEqual(self.run_.stdout, b"one\n")
        self.assertIn(self.job.job_name, self.commands.watchers)
        self.tell_end()
        self.assertEqual(self.run_.told[0], "exited")
        self.assertEqual(self.commands.cancelled, [self.job.job_name])

    def test_job_that_has_ended_meanwhile_is_told(self) -> None:
        self.begin()
        self.job.read_state()
        self.tell_end()
        self.resume()
        self.assertEqual(self.run_.stdout, b"one\n")
        self.assertEqual(self.run_.told[0], "exited")

    def test_failed_resumption_leaves_nothing_and_may_be_repeated(self) -> None:
        self.begin()
        self.job.read_state()
        stderr = self.evaluation.output_directory / "stderr"
        stderr.rename(stderr.with_suffix(".away"))
        self.assertRaises(OSError, self.job.resume, self.run_, 0)
        self.assertEqual((self.commands.watchers, self.starter.listeners), ({}, {}))
        stderr.with_suffix(".away").rename(stderr)
        self.job = Job(self.access, self.status, self.job.job_name, self.evaluation)
        self.run_ = FakeRun()
        self.resume()
        self.tell_end()
        self.assertEqual(self.run_.stdout, b"one\n")
        exited, _ = self.run_.told
        self.assertEqual(exited, "exited")

    def test_run_that_cannot_be_resumed_ends_its_job(self) -> None:
        self.begin()
        self.job.read_state()
        (self.evaluation.output_directory / "stdout").unlink()
        sandbox: Any = SimpleNamespace(
            access=self.access,
            settings=RunnerSettings(),
            job_prefix="tawebeval-x-",
            session="s",
            writable_trees=SimpleNamespace(starter=self.starter),
            local=SimpleNamespace(has_network=False),
        )
        checkout: Any = SimpleNamespace(commit=SimpleNamespace(size=0, file_count=0))
        run = SlurmRun(self.evaluation, checkout, sandbox, LimitSettings())
        described = {**self.status.build_json_object(), "job_name": self.job.job_name}
        left = LeftProcess(described, 5, 6, 0)
        self.assertRaises(OSError, run.resume_process, self.run_, left)
        self.access.reactor.callFromThread = lambda call, *given: call(*given)
        run.close()
        self.assertEqual(self.starter.forgotten, [self.job.directory])
        self.assertEqual(self.commands.cancelled, [self.job.job_name])

    def test_job_that_the_queue_has_forgotten_meanwhile_is_lost(self) -> None:
        self.begin()
        self.job.resume(self.run_, 0)
        self.starter.listeners[self.job.directory](None)
        self.assertEqual(self.commands.misses, 15)
        self.commands.watchers[self.job.job_name](None)
        assert self.job.loss is not None
        self.assertEqual(self.job.loss.reason, "lost")

    def test_job_that_has_left_the_queue_is_lost(self) -> None:
        self.begin()
        self.resume()
        self.commands.watchers[self.job.job_name](QueuedJob("7", "a", "CANCELLED"))
        assert self.job.loss is not None
        self.assertEqual(self.job.loss.reason, "revoked")
        self.assertEqual(self.run_.stdout, b"one\n")
