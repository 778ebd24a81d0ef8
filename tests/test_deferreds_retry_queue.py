"""`deferreds.RetryQueue`: failed calls succeed in the end, and once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.deferreds import RetryQueue
from tests.fakes.world import InlineThreads, SlowThreads


class RetryQueueTests(SynchronousTestCase):
    """Calls that fail as often as a test wants."""

    def setUp(self) -> None:
        self.threads: Any = InlineThreads()
        self.queue = RetryQueue(self.threads)
        self.done: list[str] = []
        self.failures = {"a": 0, "b": 0}
        self.error: Exception = OSError(24, "Too many open files")

    def call(self, name: str) -> Callable[[], None]:
        """Return a call that fails a number of times."""

        def make() -> None:
            if self.failures[name]:
                self.failures[name] -= 1
                raise self.error
            self.done.append(name)

        return make

    def attempt(self, name: str) -> list[str]:
        """Attempt a call; return the log's lines."""
        with capturedLogs() as events:
            self.successResultOf(
                Deferred.fromCoroutine(
                    self.queue.attempt_call(
                        f"the removal of {name}",
                        lambda prefix: self.call(name)(),
                        "an argument",
                        on_success=lambda: self.done.append("made"),
                    )
                )
            )
        return [formatEvent(event) for event in events]

    def settle(self) -> list[str]:
        """Retry kept calls; return the log's lines."""
        with capturedLogs() as events:
            self.queue.retry_next_calls()
        return [formatEvent(event) for event in events]

    def test_failure_and_late_success_are_logged_once(self) -> None:
        self.failures["a"] = 3
        (said,) = self.attempt("a")
        self.assertIn("the removal of a has failed, and will be tried again: [Errno 24]", said)
        for _ in range(2):
            self.assertEqual((self.settle(), self.done, len(self.queue)), ([], [], 1))
        self.assertEqual(self.settle(), ["the removal of a has succeeded now"])
        self.assertEqual((self.done, len(self.queue)), (["a", "made"], 0))

    def test_success_retries_all_calls(self) -> None:
        self.failures["a"] = 9 + 1
        for _ in range(9):
            self.attempt("a")
        self.settle()
        self.assertEqual((self.failures["a"], len(self.queue)), (0, 9))
        for _ in range(2):
            self.settle()
        self.assertEqual((len(self.queue), self.done), (0, 9 * ["a", "made"]))

    def test_failing_call_blocks_no_other(self) -> None:
        self.failures.update(a=1000, b=1)
        self.attempt("a")
        self.attempt("b")
        self.failures["b"] = 0
        for _ in range(3):
            self.settle()
        self.assertEqual((self.done, len(self.queue)), (["b", "made"], 1))

    def test_one_retry_runs_at_a_time(self) -> None:
        self.failures.update(a=1, b=1)
        self.attempt("a")
        self.attempt("b")
        threads = SlowThreads()
        self.patch(self.threads, "run_in_thread", threads.run_in_thread)
        for _ in range(3):
            self.queue.retry_next_calls()
        self.assertEqual(len(threads.waiting), 1)
        threads.finish()
        self.assertEqual(self.done, ["a", "made", "b", "made"])

    def test_other_exceptions_are_not_retried(self) -> None:
        self.failures["a"] = 1
        self.attempt("a")
        self.error, self.failures["a"] = ZeroDivisionError(), 1
        self.queue.retry_next_calls()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.failures["b"] = 1
        attempt = Deferred.fromCoroutine(self.queue.attempt_call("b", self.call("b")))
        self.failureResultOf(attempt, ZeroDivisionError)
        self.assertEqual(len(self.queue), 0)
        self.queue.retry_next_calls()
        self.assertEqual(self.done, [])

    def test_successful_call_is_not_kept(self) -> None:
        self.assertEqual(self.attempt("a"), [])
        self.assertEqual((self.done, len(self.queue)), (["a", "made"], 0))
        self.assertEqual(self.settle(), [])
        self.assertEqual(self.done, ["a", "made"])
