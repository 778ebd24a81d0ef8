"""`tests/run.py`: nothing is left out, and nothing bad passes for good."""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from tests import run


class PartsTests(SynchronousTestCase):
    """What is run."""

    def test_each_module_is_in_one_part(self) -> None:
        found = sorted(
            ".".join(path.relative_to(run.ROOT).with_suffix("").parts)
            for path in (run.ROOT / "tests").rglob("test_*.py")
        )
        self.assertEqual(sorted(name for part in run.parts() for name in part), found)


class SummaryTests(SynchronousTestCase):
    """What the last line of trial says."""

    def test_expected_failures_have_passed(self) -> None:
        line = b"PASSED (skips=1, expectedFailures=2, successes=3)\n"
        self.assertEqual(run.read_summary(line), run.Outcome(5, 0, 1))

    def test_errors_and_unexpected_successes_are_failures(self) -> None:
        line = b"FAILED (failures=1, errors=2, unexpectedSuccesses=3, successes=4)\n"
        self.assertEqual(run.read_summary(line), run.Outcome(4, 6, 0))


class SkippedTests(SynchronousTestCase):
    """Tests that were skipped, with CI in the environment."""

    def run_main(self, outcome: run.Outcome) -> tuple[int, str]:
        """Return the exit status of a suite that came to `outcome`, and what it printed."""
        self.patch(run, "run_trial", lambda *_: outcome)
        self.patch(run.os, "environ", {"CI": "yes"})
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            return run.main(["tests.test_x"]), printed.getvalue()

    def test_only_tests_that_need_cgroups_may_be_skipped(self) -> None:
        left = "tests.test_x.A.test_a"
        status, printed = self.run_main(run.Outcome(1, 0, 1, left=(left,)))
        self.assertEqual(status, 0)
        self.assertIn(f"needs cgroups of version 2: {left}\n", printed)
        status, printed = self.run_main(run.Outcome(1, 0, 2, left=(left,)))
        self.assertEqual(status, 1)
        self.assertIn("no test may be skipped", printed)


class SignalTests(SynchronousTestCase):
    """A suite that was started by `&` in a script, by cron or by nohup."""

    def test_programs_of_tests_have_default_dispositions(self) -> None:
        ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
        script = (
            "import os, signal, subprocess, sys, tests;"
            f"[signal.raise_signal(number) for number in {[*map(int, ignored)]}];"
            "subprocess.run(['grep', 'SigIgn', '/proc/self/status'], check=True)"
        )

        def ignore() -> None:
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=run.ROOT,
            preexec_fn=ignore,
            capture_output=True,
            text=True,
            check=True,
        )
        mask = int(done.stdout.split()[1], 16)
        self.assertEqual([number for number in ignored if mask & 1 << number - 1], [], done.stdout)


class AgainTests(SynchronousTestCase):
    """Tests that failed beside others."""

    def run_parts(
        self, *outcomes: run.Outcome, again: run.Outcome | None = None
    ) -> tuple[run.Outcome, list[str]]:
        """Return what parts come to, and what is called unsteady; `again` if any is run again."""
        left = [*outcomes]
        self.again: list[str] = []

        def run_trial(names: list[str], *_: object, **__: object) -> run.Outcome:
            if left:
                return left.pop(0)
            assert again is not None
            self.again = names
            return again

        self.patch(run, "run_trial", run_trial)
        with contextlib.redirect_stdout(io.StringIO()):
            outcome, unsteady = run.run_parts([[f"tests.test_{n}"] for n, _ in enumerate(left)])
        return outcome, [*unsteady]

    def test_failed_tests_alone_are_run_again(self) -> None:
        one, other = "tests.test_x.A.test_a", "tests.integration.test_y.B.test_b"
        parts = (run.Outcome(5, 2, 1, (one, one)), run.Outcome(0, 1, 0, (other,)))
        outcome, unsteady = self.run_parts(*parts, again=run.Outcome(1, 1, 0, (other,)))
        self.assertEqual(self.again, [one, other])
        self.assertEqual(outcome, run.Outcome(6, 1, 1, (other,)))
        self.assertEqual(unsteady, [one])


class TrialTests(SynchronousTestCase):
    """How trial's end is judged."""

    def outcome(self, *program: str) -> run.Outcome:
        """Return what comes of a program in the place of trial."""
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
            return run.run_trial((), [sys.executable, "-c", *program])

    def test_missing_summary_is_a_failure(self) -> None:
        self.assertEqual(self.outcome("print('hello')"), run.Outcome(0, 1, 0))

    def test_exit_status_counts_before_the_summary(self) -> None:
        program = "print('PASSED (successes=2)'); raise SystemExit(1)"
        self.assertEqual(self.outcome(program), run.Outcome(2, 1, 0))

    def test_run_without_a_test_is_a_failure(self) -> None:
        command = [sys.executable, run.__file__, "tests.fakes.world"]
        done = subprocess.run(command, cwd=run.ROOT, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("No test ran.", done.stdout)
