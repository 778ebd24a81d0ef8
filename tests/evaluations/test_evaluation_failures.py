"""`evaluations.starting`, `lifecycle`: failures, stops from outside, and what is removed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, NoReturn

from twisted.internet.defer import Deferred
from twisted.logger import LogLevel, capturedLogs, formatEvent

from tawebeval.config import Configuration, LimitSettings
from tawebeval.core.evaluations import EvaluationState
from tawebeval.core.segi import SegiParser
from tawebeval.errors import EvaluationFailure
from tawebeval.linux.starter_client import LaunchSpec
from tawebeval.sandbox.workspace import Workspace
from tests.cases.evaluations import CANCELLED, EvaluationTestCase
from tests.fakes.sandbox import FakeSandboxedRun
from tests.fakes.world import SlowThreads


class FailureTests(EvaluationTestCase):
    configuration = Configuration(limits=LimitSettings(wall_clock=10, output=1024))

    def test_failed_repository_has_gits_own_words(self) -> None:
        self.world.repositories.fail("repository", "could not be fetched", stderr="fatal: no")
        self.begin()
        error = self.assert_over(EvaluationState.FAILED, "repository")
        self.assertEqual(error["stderr"], "fatal: no")
        self.assertEqual((self.world.spawn.children, self.released), ([], 1))
        self.assertNotIn("running", self.evaluation.details.state_times)

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

    def test_loss_by_a_caller_is_no_fault_of_the_machine(self) -> None:
        lost = EvaluationFailure("lost", "git was killed", is_daemon_fault=False)
        self.world.repositories.gate.error = lost
        self.begin()
        self.assert_over(EvaluationState.FAILED, "lost")
        self.assertIsNone(self.evaluation.context.counters.latest_fault)

    def test_fault_of_the_machine_is_noted_until_another_end(self) -> None:
        tally = self.evaluation.context.counters
        self.world.sandbox.unable = OSError(28, "No space left on device")
        self.world.clock.advance(5)
        self.begin()
        error = self.assert_over(EvaluationState.FAILED, "lost")
        self.assertEqual(tally.latest_fault, (5, error["message"]))
        self.world.sandbox.unable = None
        self.evaluation = self.make()
        object.__setattr__(self.evaluation.context, "counters", tally)
        self.begin()
        self.evaluation.stop(EvaluationFailure("lost", "nobody asked for the events"))
        self.world.end()
        self.assertEqual(
            tally.latest_fault, (5, error["message"]), "that says nothing of the machine"
        )
        self.evaluation = self.make()
        object.__setattr__(self.evaluation.context, "counters", tally)
        self.begin()
        self.world.child.end()
        self.assert_over(EvaluationState.FINISHED, None)
        self.assertIsNone(tally.latest_fault)

    def test_defect_that_loses_events_kills_the_run_as_lost(self) -> None:
        def fail(*_: object) -> NoReturn:
            raise ZeroDivisionError("oh")

        self.world.spawn.obeys = (signal.SIGKILL,)
        self.begin()
        self.world.child.print(b"good\n")
        self.patch(SegiParser, "feed", fail)
        self.world.child.print(b"bad\n")
        self.assert_over(EvaluationState.FAILED, "lost", "good")
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_protocol_error_is_not_final(self) -> None:
        self.begin()
        begin = self.world.child.environment["EVALUATION_DATA_BEGIN"]
        self.world.child.print(f"{begin}\n".encode())
        self.world.child.end()
        self.world.turn()
        self.assertIs(self.evaluation.details.state, EvaluationState.FINISHED)
        self.assertEqual([e["payload"]["reason"] for e in self.lines()], ["protocol"])

    def test_process_that_cannot_be_started_is_lost_and_logged(self) -> None:
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

    def test_defect_on_the_way_is_lost_and_logged(self) -> None:
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

    def run_to_the_clean_up(self, threads: SlowThreads) -> None:
        """Let it run and end, until there is only the cleaning up for a thread to do."""
        self.begin()
        while not self.world.spawn.children:
            threads.step()
        self.world.child.end()
        self.world.turn()
        threads.step()  # what the run has used


class StopTests(SlowTestCase):
    def stop(self, reason: EvaluationFailure = CANCELLED) -> None:
        self.evaluation.stop(reason)
        self.world.turn()

    def test_queued_evaluation_stops_at_once(self) -> None:
        self.slot.shut = True
        self.begin()
        self.stop()
        self.assert_over(EvaluationState.CANCELLED, "cancelled")
        self.assertEqual((self.slot.cancelled, len(self.slot)), (1, 0))

    def test_fetching_evaluation_gives_up_its_fetch(self) -> None:
        self.world.repositories.gate.shut = True
        self.begin()
        self.stop()
        self.assertEqual(self.world.repositories.gate.cancelled, 1)
        self.assert_over(EvaluationState.CANCELLED, "cancelled")
        self.assertEqual(self.released, 1)

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
        self.world.child.end(signal=signal.SIGKILL)
        self.world.turn()
        threads.finish()
        self.assert_over(EvaluationState.CANCELLED, "cancelled", "last words")

    def test_every_reason_other_than_cancelled_makes_it_a_failure(self) -> None:
        for reason in ("shutdown", "lost"):
            self.setUp()
            self.world.repositories.gate.shut = True
            self.begin()
            self.stop(EvaluationFailure(reason, "so it is"))
            self.assert_over(EvaluationState.FAILED, reason)

    def test_only_the_first_reason_counts(self) -> None:
        for prepare in self.states():
            self.setUp()
            prepare()
            self.begin()
            self.stop()
            self.stop(EvaluationFailure("shutdown", "too late"))
            for child in self.world.spawn.children:
                child.end(signal=signal.SIGTERM)
            self.assert_over(EvaluationState.CANCELLED, "cancelled")

    def states(self) -> list[Callable[[], None]]:
        """Return what makes an evaluation be queued, fetching or running when it begins."""
        return [
            lambda: setattr(self.slot, "shut", True),
            lambda: setattr(self.world.repositories.gate, "shut", True),
            lambda: None,
        ]

    def test_evaluation_that_is_cleaned_up_stays_as_it_is(self) -> None:
        threads = self.slow_threads()
        self.run_to_the_clean_up(threads)
        self.stop()
        threads.finish()
        self.assert_over(EvaluationState.FINISHED, None)


class CleanUpTests(SlowTestCase):
    def test_events_are_closed_and_the_place_is_free_before_directories_are_removed(self) -> None:
        threads = self.slow_threads()
        over: Deferred[None] = self.evaluation.cleanup_event.wait()
        self.run_to_the_clean_up(threads)
        self.assertTrue(self.evaluation.events.log.has_ended)
        self.assertEqual(self.released, 1)
        self.assertNoResult(over)
        threads.finish()
        self.assert_over(EvaluationState.FINISHED, None)
        self.successResultOf(over)

    def test_removal_that_fails_is_tried_again(self) -> None:
        self.begin()
        remove, broken = Workspace.remove_evaluator_content, [True]

        def remove_later(workspace: Workspace, *, keep_submission: bool) -> None:
            if broken:
                raise OSError(24, "Too many open files")
            remove(workspace, keep_submission=keep_submission)

        self.patch(Workspace, "remove_evaluator_content", remove_later)
        self.world.child.end()
        self.world.turn()
        self.assertTrue(self.evaluation.cleanup_event.is_set)
        submission = self.evaluation.workspace.submission_directory
        cleanups = self.evaluation.context.cleanup_queue
        cleanups.retry_next_calls()
        self.assertTrue(submission.exists())
        broken.clear()
        for _ in range(2):
            cleanups.retry_next_calls()
        self.assert_removed()

    def test_group_that_does_not_go_is_removed_later(self) -> None:
        self.begin()
        close, closed, broken = FakeSandboxedRun.close, [], [True]

        def close_later(sandboxed: FakeSandboxedRun) -> None:
            closed.append(not broken)
            if broken:
                raise OSError(16, "Device or resource busy")
            close(sandboxed)

        self.patch(FakeSandboxedRun, "close", close_later)
        self.world.child.end()
        self.world.turn()
        self.assertTrue(self.evaluation.cleanup_event.is_set)
        self.assert_removed()
        cleanups = self.evaluation.context.cleanup_queue
        cleanups.retry_next_calls()
        broken.clear()
        for _ in range(2):
            cleanups.retry_next_calls()
        self.assertEqual(closed, [False, False, True])

    def test_evaluation_is_over_without_the_removal_and_that_is_logged(self) -> None:
        self.begin()
        self.patch(Workspace, "remove_evaluator_content", lambda *_, keep_submission: 1 // 0)
        self.world.child.end()
        self.world.turn()
        self.assertTrue(self.evaluation.cleanup_event.is_set)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
