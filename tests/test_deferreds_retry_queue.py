"""`arrears`: what cannot be done is done at last, and once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.deferreds import RetryQueue
from tests.fakes.world import InlineThreads, SlowThreads


class ArrearsTests(SynchronousTestCase):
    """Calls that fail as often as a test wants."""

    def setUp(self) -> None:
        self.threads: Any = InlineThreads()
        self.arrears = RetryQueue(self.threads)
        self.done: list[str] = []
        self.failures = {"a": 0, "b": 0}
        self.error: Exception = OSError(24, "Too many open files")

    def call(self, name: str) -> Callable[[], None]:
        """Return a call that fails so often."""

        def make() -> None:
            if self.failures[name]:
                self.failures[name] -= 1
                raise self.error
            self.done.append(name)

        return make

    def attempt(self, name: str) -> list[str]:
        """Make a call for the first time; return what the log says."""
        with capturedLogs() as events:
            self.successResultOf(
                Deferred.fromCoroutine(
                    self.arrears.attempt(
                        f"the removal of {name}",
                        lambda prefix: self.call(name)(),
                        "an argument",
                        made=lambda: self.done.append("made"),
                    )
                )
            )
        return [formatEvent(event) for event in events]

    def settle(self) -> list[str]:
        """Let what is left be tried; return what the log says."""
        with capturedLogs() as events:
            self.arrears.retry_next()
        return [formatEvent(event) for event in events]

    def test_at_once(self) -> None:
        """What succeeds is done, and nothing is said or kept."""
        self.assertEqual(self.attempt("a"), [])
        self.assertEqual((self.done, len(self.arrears)), (["a", "made"], 0))
        self.assertEqual(self.settle(), [])
        self.assertEqual(self.done, ["a", "made"])

    def test_later(self) -> None:
        """What fails is said once, however often; its success, too."""
        self.failures["a"] = 3
        (said,) = self.attempt("a")
        self.assertIn("the removal of a is not done yet, and tried again: [Errno 24]", said)
        for _ in range(6):
            self.assertEqual((self.settle(), self.done, len(self.arrears)), ([], [], 1))
        self.assertEqual(self.settle(), ["the removal of a is done now"])
        self.assertEqual((self.done, len(self.arrears)), (["a", "made"], 0))

    def test_back_off(self) -> None:
        """As long as nothing succeeds the time between two trials doubles, up to a minute."""
        self.failures["a"] = 10
        self.attempt("a")
        tried: list[int] = []
        for second in range(400):
            left = self.failures["a"]
            self.settle()
            if self.failures["a"] < left or self.done:
                tried.append(second)
                if self.done:
                    break
        self.assertEqual(tried, [0, 2, 6, 14, 30, 62, 122, 182, 242, 302])

    def test_all_together(self) -> None:
        """When the machine has recovered all is done at once, by few calls of threads."""
        self.failures["a"] = 250 + 100
        for _ in range(250):
            self.attempt("a")
        self.settle()  # of which no more are tried than a thread tries at once
        self.assertEqual((self.failures["a"], len(self.arrears)), (0, 250))
        self.arrears._threads = threads = SlowThreads()  # type: ignore[assignment]
        for _ in range(2):
            self.settle()
        for _ in range(3):
            self.assertEqual(len(threads.waiting), 1)
            threads.step()
        done = [word for size in (100, 100, 50) for word in ("a", "made") for _ in range(size)]
        self.assertEqual((len(self.arrears), self.done), (0, done))

    def test_turns(self) -> None:
        """One that fails for ever is in nobody's way, and is tried when others succeed."""
        self.failures.update(a=1000, b=1)
        self.attempt("a")
        self.attempt("b")
        self.settle()
        self.assertEqual(self.done, ["b", "made"])
        self.assertEqual(self.failures["a"], 998)

    def test_one_at_a_time(self) -> None:
        """While what is left is tried nothing else is: a disk that hangs holds one thread."""
        self.failures.update(a=1, b=1)
        self.attempt("a")
        self.attempt("b")
        threads = self.arrears._threads = SlowThreads()  # type: ignore[assignment]
        for _ in range(3):
            self.arrears.retry_next()
        self.assertEqual(len(threads.waiting), 1)
        threads.finish()
        self.assertEqual(self.done, ["a", "b", "made", "made"])

    def test_defect(self) -> None:
        """What fails for another reason is a defect: raised, or logged, and not tried again."""
        self.failures["a"] = 1
        self.attempt("a")
        self.error, self.failures["a"] = ZeroDivisionError(), 1
        self.arrears.retry_next()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.failures["b"] = 1
        attempt = Deferred.fromCoroutine(self.arrears.attempt("b", self.call("b")))
        self.failureResultOf(attempt, ZeroDivisionError)
        self.assertEqual(len(self.arrears), 0)
        self.arrears.retry_next()
        self.assertEqual(self.done, [])
