"""`evaluations.lifecycle`: one evaluation from the queue to its end, with fakes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import msgspec
from twisted.internet.defer import Deferred
from twisted.logger import LogLevel, capturedLogs, formatEvent

from tawebeval.config import (
    Configuration,
    EnvironmentSettings,
    LimitSettings,
    ProblemSettings,
    SlurmJobSettings,
)
from tawebeval.core.evaluations import Checkout, Commit, EvaluationState
from tawebeval.core.form import Repository, SubmissionFile
from tawebeval.core.segi import MARKER_VARIABLE_NAMES
from tawebeval.deferreds import FairQueue, OneShotEvent
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.building import plan_build
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.reading import build_status_document
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.starter import LaunchSpec
from tawebeval.sandbox.base import Environment
from tawebeval.sandbox.workspace import Workspace
from tests.cases.evaluations import CANCELLED, EvaluationTestCase
from tests.fakes.sandbox import FakeSandboxedRun
from tests.fakes.world import OID, TREE, SlowThreads


class ChosenEnvironmentTests(EvaluationTestCase):
    settings = EnvironmentSettings("/srv/java", {"FLAVOUR": "sweet"})

    def configure(self, **environments: EnvironmentSettings) -> None:
        context = self.evaluation.context
        context.configuration = msgspec.structs.replace(
            context.configuration, environments=environments
        )

    def choose(self, name: str, **environments: EnvironmentSettings) -> None:
        remove_tree(self.root / "upload")
        self.evaluation = self.make(environment_name=name)
        self.configure(**environments)
        self.begin()

    def document(self) -> Any:
        return build_status_document(self.evaluation, None)["environment"]

    def test_run_has_the_chosen_environment(self) -> None:
        self.choose("java", java=self.settings)
        (environment,) = self.world.sandbox.environments
        self.assertEqual(environment, Environment("java", Path("/srv/java"), {"FLAVOUR": "sweet"}))
        (started,) = self.world.sandbox.last.started_as
        self.assertEqual(started.environment["FLAVOUR"], "sweet")
        self.configure()
        self.world.child.end()
        self.assertEqual(self.document(), {"name": "java", "digest": None})

    def test_run_has_the_job_settings_of_its_environment_and_its_problem(self) -> None:
        left, right = (SlurmJobSettings(arguments=(f"--constraint={name}",)) for name in "lr")
        remove_tree(self.root / "upload")
        self.evaluation = self.make(environment_name="java", problem_name="sum")
        problem = ProblemSettings("https://git.example/sum", "./judge", branch="b", runner=right)
        context = self.evaluation.context
        context.configuration = msgspec.structs.replace(
            context.configuration,
            environments={"java": EnvironmentSettings("/srv/java", runner=left)},
            problems={"sum": problem},
        )
        self.begin()
        self.assertEqual(self.world.sandbox.last.job_settings, [left, right])

    def test_environment_removed_before_the_start_fails_the_evaluation(self) -> None:
        self.slot.shut = True
        self.choose("java", java=self.settings)
        self.configure()
        self.assertEqual(self.document(), {"name": "java", "digest": None})
        self.slot.open()
        failure = self.evaluation.details.failure
        assert failure is not None
        self.assertEqual(failure.reason, "lost")
        self.assertIn("'java' was removed while the evaluation waited", failure.message)
        self.assertIs(self.evaluation.context.counters.latest_machine_fault, None)
        self.assertEqual(self.document(), {"name": "java", "digest": None})


class HandOverTests(EvaluationTestCase):
    def test_evaluation_handed_over_while_it_fetched_is_not_started(self) -> None:
        self.world.repositories.gate.shut = True
        self.begin()
        self.evaluation.hand_to_next_daemon()
        self.world.repositories.gate.open()
        self.assertEqual(self.world.sandbox.environments, [])
        self.assertIsNone(self.evaluation.details.limits)


class BuildTests(EvaluationTestCase):
    def renew(self) -> None:
        """Let the evaluation be one of a problem that is not configured any more."""
        remove_tree(self.root / "upload")
        self.evaluation = self.make(problem_name="sum", build_command="make")

    def test_evaluation_that_waits_for_a_build_uses_no_checkout(self) -> None:
        self.renew()
        builds, repositories = self.evaluation.context.running_builds, self.world.repositories
        checkout = Checkout(Commit(OID, TREE), self.tree, lambda: None)
        key = plan_build(self.evaluation, checkout).key
        builds[key] = OneShotEvent()
        self.begin()
        self.world.turn()
        self.assertEqual((self.evaluation.build_state, repositories.users), ("waiting", 0))
        repositories.builds.add(key)
        builds.pop(key).set_value(None)
        self.assertIs(self.evaluation.details.state, EvaluationState.RUNNING)
        self.assertEqual((self.evaluation.build_state, repositories.users), (None, 1))
        self.finish()
        self.assertIs(self.evaluation.details.state, EvaluationState.FINISHED)
        self.assertEqual(repositories.users, 0)

    def test_build_adds_no_evaluation_to_the_counts_and_leaves_no_directory(self) -> None:
        self.renew()
        for is_stopped in (False, True):
            self.begin()
            self.assertEqual(self.evaluation.build_state, "running")
            running = self.world.child
            if is_stopped:
                self.evaluation.stop(CANCELLED)
                self.assertEqual(running.signals[-1], signal.SIGKILL)
            running.end()
            self.world.turn()
            state = self.evaluation.details.state
            expected = EvaluationState.CANCELLED if is_stopped else EvaluationState.RUNNING
            self.assertIs(state, expected)
            counts = self.evaluation.context.counters.counts_by_state
            self.assertEqual({one: count for one, count in counts.items() if count}, {state: 1})
            left = {path.name for path in self.root.iterdir()}
            self.assertLessEqual(left, {"upload", "some"})
            is_build = [cell.is_build for cell in self.world.sandbox.cells[:2]]
            self.assertEqual(is_build, [True] if is_stopped else [True, False])
            self.world.sandbox.cells.clear()
            self.evaluation.stop(CANCELLED)
            self.world.end()
            self.world.repositories.builds.clear()
            self.renew()

    def test_build_cancelled_before_it_is_started_leaves_no_directory(self) -> None:
        threads = self.world.threads = SlowThreads()
        self.renew()
        self.begin()
        self.assertEqual(self.evaluation.build_state, "running")
        self.evaluation.stop(CANCELLED)
        threads.finish()
        self.assertIs(self.evaluation.details.state, EvaluationState.CANCELLED)
        self.assertEqual(list(self.root.glob("*.upload")), [])


class EvaluationLifeTests(EvaluationTestCase):
    def test_evaluation_is_queued_fetching_running_and_finished(self) -> None:
        self.slot.shut = self.world.repositories.gate.shut = True
        self.world.clock.advance(1)
        self.begin()
        self.assertIs(self.evaluation.details.state, EvaluationState.QUEUED)
        self.assertEqual(self.world.repositories.asked, [])
        self.world.clock.advance(1)
        self.slot.open()
        self.assertIs(self.evaluation.details.state, EvaluationState.FETCHING)
        request = self.evaluation.details.request
        self.assertEqual(self.world.repositories.asked, [(request.repository, OID)])
        self.assertEqual(self.world.spawn.children, [])
        self.world.clock.advance(1)
        self.world.repositories.gate.open()
        self.assertIs(self.evaluation.details.state, EvaluationState.RUNNING)
        self.assertEqual(self.evaluation.details.commit, Commit(OID, TREE))
        self.assertEqual(self.released, 0)
        self.world.child.print(b"hello\n")
        self.world.clock.advance(1)
        self.assertFalse(self.evaluation.details.state.has_ended)
        self.finish_well("hello\n")
        self.assertEqual(self.released, 1)

    def test_shell_runs_the_command_in_the_directory_of_the_request(self) -> None:
        (self.tree / "a" / "b").mkdir(parents=True)
        self.evaluation = self.make_again(directory="a/b", evaluator_cmd="echo $PWD | cat")
        self.begin()
        self.assertEqual(list(self.world.child.argv), ["/bin/sh", "-c", "echo $PWD | cat"])
        self.assertEqual(self.world.child.directory, str(self.root / "some/tree/a/b"))
        self.finish_well()

    def make_again(self, **changes: Any) -> Evaluation:
        (self.root / "upload").rename(Path(self.mktemp()))
        return self.make(**changes)

    def test_environment_has_the_variables_of_segi_the_defaults_and_the_settings(self) -> None:
        files = (SubmissionFile("source", "solution.py"), SubmissionFile("x_1", "a b"))
        self.evaluation = self.make_again(submission=files)
        self.begin()
        seen = self.world.child.environment
        root = self.root / "some"
        markers = {name: seen.pop(name) for name in list(seen) if name.startswith("EVALUATION_")}
        self.assertEqual(
            seen,
            {
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "LANG": "it",
                "PYTHONUNBUFFERED": "1",
                "TZ": "UTC",
                "HOME": f"{root}/home",
                "TEMPORARY_DIRECTORY": f"{root}/tmp",
                "TURINGARENA_SEED": "7",
                "SUBMISSION_FILE_SOURCE": f"{root}/submission/source/solution.py",
                "SUBMISSION_FILE_X_1": f"{root}/submission/x_1/a b",
            },
        )
        self.assertEqual(set(markers), set(MARKER_VARIABLE_NAMES))
        self.assertEqual(len(set(markers.values())), 4)
        self.finish_well()

    def test_file_at_a_printed_path_is_read_only_from_the_workspace(self) -> None:
        self.begin()
        block = self.write_file()
        self.world.child.print(block)
        self.world.turn()
        (event,) = self.lines()
        self.assertEqual(event["payload"]["filename"], "plot.svg")
        self.assertEqual(self.world.disk.used, len(block) + 8)
        self.world.child.print(block.replace(b"/plot.svg", b"/../../../etc/passwd"))
        self.world.turn()
        self.assertEqual(self.lines()[-1]["payload"]["reason"], "protocol")
        self.world.child.end()

    def test_evaluator_gets_the_paths_inside_the_sandbox(self) -> None:
        sandboxed = FakeSandboxedRun(
            self.world.configuration.limits,
            self.evaluation.workspace.make_sandboxed_view(Path("/inside")),
            self.world.spawn,
            workspace=self.evaluation.workspace,
        )
        self.patch(self.world.sandbox, "make_run", lambda *given: sandboxed)
        self.begin()
        child = self.world.child
        self.assertEqual(child.argv, ["/bin/sh", "-c", "./evaluate"])
        self.assertEqual(child.environment["HOME"], "/inside/home")
        self.assertEqual(child.environment["TEMPORARY_DIRECTORY"], "/inside/tmp")
        self.assertEqual(
            child.environment["SUBMISSION_FILE_SOURCE"], "/inside/submission/source/solution.py"
        )
        child.end()
        self.assert_over(EvaluationState.FINISHED, None)

    def test_evaluation_ends_only_after_the_orphaned_processes_of_the_run_ended(self) -> None:
        self.world.sandbox.orphans.shut = True
        self.begin()
        sandboxed = self.world.sandbox.last
        self.world.child.end()  # they have closed stdout and stderr
        self.world.turn()
        self.assertFalse(self.evaluation.details.state.has_ended)
        self.assertEqual(sandboxed.closed, 0)
        self.assertTrue((self.root / "some").exists())
        self.world.sandbox.orphans.open()
        self.assert_over(EvaluationState.FINISHED, None)
        self.assertEqual((len(sandboxed.started_as), sandboxed.closed), (1, 1))


class ClusterTests(EvaluationTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.world.sandbox.has_external_queue = True
        self.world.sandbox.begin.shut = True

    def test_evaluation_is_queued_until_the_cluster_runs_it(self) -> None:
        self.begin()
        self.assertIs(self.evaluation.details.state, EvaluationState.QUEUED)
        self.world.clock.advance(1000)
        self.assertIsNone(self.evaluation.run)
        self.world.sandbox.begin.open()
        self.assertIs(self.evaluation.details.state, EvaluationState.RUNNING)
        self.finish()
        self.assertIs(self.evaluation.details.state, EvaluationState.FINISHED)

    def test_stop_takes_the_evaluation_from_the_clusters_queue(self) -> None:
        self.begin()
        self.evaluation.stop(CANCELLED)
        self.assert_over(EvaluationState.CANCELLED, "cancelled")
        self.assertEqual(self.world.sandbox.begin.cancelled, 1)
        self.assertEqual(self.released, 1)


class FetchTests(EvaluationTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.slot.shut = True
        repositories = self.world.repositories
        repositories.remote = repositories.gate.shut = True
        self.fetches = self.world.fetches = FairQueue(1)
        self.evaluation.context = self.world.context()

    def test_fetched_evaluation_waits_for_a_slot_without_using_the_cache(self) -> None:
        self.begin()
        self.assertIs(self.evaluation.details.state, EvaluationState.FETCHING)
        self.assertEqual((self.reserved, len(self.slot)), (1, 0))
        following = self.fetches.acquire_slot("following", "bob")
        self.world.clock.advance(1)
        self.world.repositories.gate.open()
        self.successResultOf(following)
        self.assertIs(self.evaluation.details.state, EvaluationState.QUEUED)
        self.assertEqual((len(self.slot), self.world.repositories.users), (1, 0))
        self.assertEqual(self.evaluation.details.commit, Commit(OID, TREE))
        self.world.clock.advance(1)
        self.slot.open()
        self.assertIs(self.evaluation.details.state, EvaluationState.RUNNING)
        self.finish_well()
        self.assertEqual(self.released, 1)

    def test_evaluation_waits_for_a_fetch_slot_and_releases_it_after_the_fetch(self) -> None:
        other = self.fetches.acquire_slot("other", "")
        self.begin()
        self.assertIs(self.evaluation.details.state, EvaluationState.QUEUED)
        self.assertEqual(self.world.repositories.asked, [])
        self.fetches.release_slot("other")
        self.successResultOf(other)
        self.assertIs(self.evaluation.details.state, EvaluationState.FETCHING)
        self.world.repositories.gate.open()
        following = self.fetches.acquire_slot("following", "")
        self.assertNoResult(following)
        self.slot.open()
        self.successResultOf(following)

    def ask(self) -> None:
        """Begin an evaluation of a branch, whose commit is not known yet."""
        repository = Repository("https://example.org/problem.git", "main", 3)
        self.world.repositories.question.shut = True
        self.world.repositories.branches["main"] = OID
        remove_tree(self.root / "upload")
        self.evaluation = self.make(repository=repository, commit_oid="")
        self.begin()

    def shown_commit(self) -> str | None:
        found: str | None = build_status_document(self.evaluation, None)["commit_oid"]
        return found

    def test_branch_is_resolved_once_and_the_commit_does_not_change_afterwards(self) -> None:
        self.ask()
        repositories, repository = (
            self.world.repositories,
            self.evaluation.details.request.repository,
        )
        self.assertIs(self.evaluation.details.state, EvaluationState.FETCHING)
        self.assertEqual((self.shown_commit(), repositories.asked), (None, []))
        repositories.question.open()
        self.assertEqual(self.shown_commit(), OID)
        repositories.branches["main"] = "d" * 40
        repositories.gate.open()
        self.slot.open()
        self.assertEqual(repositories.asked, [(repository, OID)] * 2)
        self.finish_well()
        self.assertEqual(self.shown_commit(), OID)

    def test_evaluation_ends_if_its_branch_look_up_fails_or_is_cancelled(self) -> None:
        for end, state, reason in (
            (EvaluationFailure("repository", "no"), EvaluationState.FAILED, "repository"),
            (None, EvaluationState.CANCELLED, "cancelled"),
        ):
            self.setUp()
            with capturedLogs() as events:
                self.ask()
                self.world.repositories.question.error = end
                if end is None:
                    self.evaluation.stop(CANCELLED)
                self.world.repositories.question.open()
            self.assert_over(state, reason)
            self.assertIn("commit refs/heads/main", str(formatEvent(events[0])))
            self.assertIs(self.shown_commit(), None)
            self.check_nothing_kept()

    def test_evaluation_can_be_stopped_before_during_and_after_its_fetch(self) -> None:
        self.fetches.acquire_slot("other", "")
        self.stop()
        self.setUp()
        self.stop()
        self.setUp()
        self.begin()
        self.world.repositories.gate.open()
        self.assertIs(self.evaluation.details.state, EvaluationState.QUEUED)
        self.stop()

    def stop(self) -> None:
        if not self.evaluation.details.state_times:
            self.begin()
        self.evaluation.stop(CANCELLED)
        self.assert_over(EvaluationState.CANCELLED, "cancelled")
        self.fetches.release_slot("other")
        self.check_nothing_kept()

    def check_nothing_kept(self) -> None:
        self.assertEqual(self.released, 1)
        self.assertEqual((self.fetches.taken_slot_count, self.fetches.waiter_count), (0, 0))
        self.successResultOf(self.fetches.acquire_slot("next", ""))

    def test_local_branch_is_resolved_in_the_run_slot(self) -> None:
        self.world.repositories.remote = False
        self.ask()
        self.assertEqual(len(self.world.repositories.question), 0)
        self.slot.open()
        self.assertEqual(len(self.world.repositories.question), 1)
        self.world.repositories.gate.open()
        self.world.repositories.question.open()
        self.assertIs(self.evaluation.details.state, EvaluationState.RUNNING)
        self.assertEqual(self.shown_commit(), OID)


class FailureTests(EvaluationTestCase):
    configuration = Configuration(limits=LimitSettings(wall_clock=10, output=1024))

    def test_directory_outside_the_commit_is_a_failure(self) -> None:
        for directory in ("missing", "file", "out"):
            self.setUp()
            (self.tree / "file").touch()
            (self.tree / "out").symlink_to("/tmp")
            (self.root / "upload").rename(self.mktemp())
            self.evaluation = self.make(directory=directory)
            self.begin()
            error = self.assert_over(EvaluationState.FAILED, "directory")
            self.assertIn(directory, error["message"])
            self.assertEqual(self.world.spawn.children, [])

    def test_fault_of_the_machine_is_recorded_until_an_evaluation_finishes(self) -> None:
        tally = self.evaluation.context.counters
        self.world.sandbox.unable = OSError(28, "No space left on device")
        self.world.clock.advance(5)
        self.begin()
        error = self.assert_over(EvaluationState.FAILED, "lost")
        self.assertEqual(tally.latest_machine_fault, (5, error["message"]))
        self.world.sandbox.unable = None
        self.evaluation = self.make()
        object.__setattr__(self.evaluation.context, "counters", tally)
        self.begin()
        self.evaluation.stop(EvaluationFailure("lost", "nobody asked for the events"))
        self.world.end()
        self.assertEqual(
            tally.latest_machine_fault, (5, error["message"]), "that says nothing of the machine"
        )
        self.evaluation = self.make()
        object.__setattr__(self.evaluation.context, "counters", tally)
        self.begin()
        self.finish_well()
        self.assertIsNone(tally.latest_machine_fault)

    def test_evaluation_is_lost_and_logged_if_its_process_cannot_start(self) -> None:
        self.world.sandbox.unable = OSError(11, "no more processes", "/bin/x")
        with capturedLogs() as events:
            self.begin()
        message = self.assert_over(EvaluationState.FAILED, "lost")["message"]
        self.assertIn("no more processes", message)
        self.assertNotIn("/bin/x", message)
        (said,) = [formatEvent(event) for event in events if event["log_level"] == LogLevel.error]
        self.assertIn("could not be run: [Errno 11] no more processes: '/bin/x'", said)
        self.assertNotIn(EvaluationState.RUNNING.value, self.evaluation.details.state_times)
        self.assertEqual((self.released, self.world.sandbox.last.closed), (1, 1))

    def test_evaluation_is_lost_and_logged_after_a_defect_during_its_start(self) -> None:
        self.world.repositories.gate.error = ZeroDivisionError("oh")
        self.begin()
        self.assert_over(EvaluationState.FAILED, "lost")
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)


class SlowTestCase(EvaluationTestCase):
    """One for which threads may be slow."""

    def slow_threads(self) -> SlowThreads:
        """Let its threads make their calls when they are told."""
        threads = self.world.threads = SlowThreads()
        self.evaluation.context = self.world.context()
        return threads


class StopTests(SlowTestCase):
    def stop(self, reason: EvaluationFailure = CANCELLED) -> None:
        self.evaluation.stop(reason)
        self.world.turn()

    def test_stop_waits_for_a_thread_that_works_for_the_evaluation(self) -> None:
        threads = self.slow_threads()
        self.begin()
        self.stop()
        self.stop(EvaluationFailure("shutdown", "too late"))
        self.assertFalse(self.evaluation.details.state.has_ended)
        threads.finish()
        self.assert_over(EvaluationState.CANCELLED, "cancelled")
        self.assertEqual(self.world.spawn.children, [])

    def test_evaluator_that_starts_during_the_stop_is_killed(self) -> None:
        threads = self.slow_threads()
        start = FakeSandboxedRun.start_evaluator

        def stop(sandboxed: FakeSandboxedRun, *given: Any) -> LaunchSpec:
            launch = start(sandboxed, *given)
            self.evaluation.stop(CANCELLED)
            return launch

        self.patch(FakeSandboxedRun, "start_evaluator", stop)
        self.begin()
        threads.step()
        self.assertEqual(self.world.child.signals, [signal.SIGTERM, signal.SIGKILL])
        self.world.child.print(b"last words")
        self.finish(signal=signal.SIGKILL)
        threads.finish()
        self.assert_over(EvaluationState.CANCELLED, "cancelled", "last words")


class CleanUpTests(SlowTestCase):
    def test_event_log_and_run_slot_are_closed_before_directories_are_removed(self) -> None:
        threads = self.slow_threads()
        over: Deferred[None] = self.evaluation.cleanup_completion.wait()
        self.begin()
        while not self.world.spawn.children:
            threads.step()
        self.finish()
        threads.step()  # what the run has used; only the clean-up is left
        self.assertTrue(self.evaluation.events.event_log.has_ended)
        self.assertEqual(self.released, 1)
        self.assertNoResult(over)
        threads.finish()
        self.assert_over(EvaluationState.FINISHED, None)
        self.successResultOf(over)

    def test_failed_removal_of_directories_or_cgroups_is_repeated(self) -> None:
        for owner, name, are_directories_left in (
            (Workspace, "remove_all_but_output", True),
            (FakeSandboxedRun, "close", False),
        ):
            self.setUp()
            self.begin()
            remove, broken, tries = getattr(owner, name), [True], []

            def remove_later(
                one: Any, remove: Any = remove, broken: Any = broken, tries: Any = tries, **how: Any
            ) -> None:
                tries.append(not broken)
                if broken:
                    raise OSError(24, "Too many open files")
                remove(one, **how)

            self.patch(owner, name, remove_later)
            self.finish()
            self.assertTrue(self.evaluation.cleanup_completion.is_set)
            submission = self.evaluation.workspace.submission_directory
            self.assertEqual(submission.exists(), are_directories_left)
            cleanups = self.evaluation.context.cleanup_queue
            cleanups.retry_next_calls()
            broken.clear()
            for _ in range(2):
                cleanups.retry_next_calls()
            self.assert_removed()
            self.assertEqual(tries, [False, False, True])

    def test_defect_in_the_removal_is_logged_and_ends_the_clean_up(self) -> None:
        self.begin()
        self.patch(Workspace, "remove_all_but_output", lambda *_, keep_submission: 1 // 0)
        self.finish()
        self.assertTrue(self.evaluation.cleanup_completion.is_set)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
