"""`scripts/bootstrap`, by which `make` makes the virtualenv: nothing outside the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from twisted.trial.unittest import SynchronousTestCase

SCRIPT = Path(__file__).parents[1] / "scripts" / "bootstrap"


class LinkTests(SynchronousTestCase):
    """A `.venv` that is a link to somebody else's."""

    def test_it_is_refused(self) -> None:
        """The other one, which would be emptied to be made anew, stays as it is."""
        with TemporaryDirectory() as folder:
            other, checkout = Path(folder, "other"), Path(folder, "checkout")
            other.mkdir()
            (other / "file").touch()
            (checkout / "scripts").mkdir(parents=True)
            shutil.copy(SCRIPT, checkout / "scripts")
            shutil.copy(SCRIPT.parents[1] / "pyproject.toml", checkout)
            (checkout / ".venv").symlink_to(other)
            command = [sys.executable, str(checkout / "scripts" / "bootstrap")]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(ran.returncode, 1, ran.stderr)
            self.assertIn(f".venv is a link to {other}", ran.stdout + ran.stderr)
            self.assertTrue((other / "file").exists())
