"""`tests/run.py`: nothing bad passes for good."""

from __future__ import annotations

import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from tests import run


class TrialTests(SynchronousTestCase):
    def test_run_without_a_test_is_a_failure(self) -> None:
        command = [sys.executable, run.__file__, "tests.fakes.world"]
        done = subprocess.run(command, cwd=run.ROOT, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("No test ran.", done.stdout)
