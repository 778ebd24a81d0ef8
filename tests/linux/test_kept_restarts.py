"""`linux.keeper_owned_process`: readers that are killed at any moment, and those that go on."""

from __future__ import annotations

import json
import random
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

_CLOSE = 200_000 + 4 * 2**16  # bytes: what is given again, two chunks, the rest of a hole


class RestartTests(SynchronousTestCase):
    """A writer that outlives its readers."""

    def test_kills(self) -> None:
        """Thirty readers, killed or stopped, lose no byte of what is printed, and add none."""
        seed = str(random.randrange(10**9))
        done = subprocess.run(
            [sys.executable, "-m", "tests.cases.restarts", seed],
            capture_output=True,
            timeout=60,
            check=False,
        )
        self.assertEqual((done.returncode, done.stderr), (0, b""), f"seed {seed}")
        figures = json.loads(done.stdout)
        self.assertGreater(figures["chunks"], 30)
        self.assertLess(figures["memory"], _CLOSE)
