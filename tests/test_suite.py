"""`tests/run.py`: nothing is left out, and nothing bad passes for good."""

from __future__ import annotations

import signal
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from tests import run


class PartsTests(SynchronousTestCase):
    def test_each_module_is_in_one_part(self) -> None:
        found = sorted(
            ".".join(path.relative_to(run.ROOT).with_suffix("").parts)
            for path in (run.ROOT / "tests").rglob("test_*.py")
        )
        self.assertEqual(sorted(name for part in run.parts() for name in part), found)


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


class TrialTests(SynchronousTestCase):
    def test_run_without_a_test_is_a_failure(self) -> None:
        command = [sys.executable, run.__file__, "tests.fakes.world"]
        done = subprocess.run(command, cwd=run.ROOT, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("No test ran.", done.stdout)
