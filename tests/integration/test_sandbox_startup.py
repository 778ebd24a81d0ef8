"""A daemon whose sandbox is missing or does not work: it does not start, and says what to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.cases.patience import PATIENCE
from tests.integration.harness import TWISTD, environment
from tests.integration.unprivileged import SERVICE, temporary_folder


class SandboxStartupTests(SynchronousTestCase):
    """Each starts a twistd whose bwrap is another program, or none."""

    def setUp(self) -> None:
        self.folder = temporary_folder()
        self.addCleanup(shutil.rmtree, self.folder)
        self.programs = self.folder / "bin"
        self.programs.mkdir(mode=0o755)
        for name in ("git", "sh", "env"):
            (self.programs / name).symlink_to(shutil.which(name) or "")

    def bwrap(self, script: str) -> None:
        """Put a script in the place of bwrap."""
        program = self.programs / "bwrap"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def refused(self, settings: str = "") -> str:
        """Return the line that a daemon says that does not start."""
        configuration = self.folder / "tawebeval.toml"
        configuration.write_text(settings + SERVICE)
        found = environment(
            PATH=str(self.programs),
            STATE_DIRECTORY=str(self.folder / "state"),
            CACHE_DIRECTORY=str(self.folder / "cache"),
        )
        done = subprocess.run(
            [
                *(str(TWISTD), "--nodaemon", "--pidfile=", "tawebeval"),
                *("--config", str(configuration), "--listen", "tcp:0:interface=127.0.0.1"),
            ],
            cwd=self.folder,
            env=found,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        self.assertGreater(done.returncode, 0, done.stdout)
        self.assertNotIn("Traceback", done.stdout)
        (line,) = (line for line in done.stdout.splitlines() if "tawebeval: sandbox" in line)
        self.assertEqual(list(Path(self.folder, "state", "evaluations").glob("*")), [])
        return line

    def test_missing(self) -> None:
        """Without bubblewrap: how to install it, and how to do without."""
        for kind in ("", '[sandbox]\nkind = "bubblewrap"\n', '[sandbox]\nkind = "auto"\n'):
            said = self.refused(kind)
            self.assertIn("bubblewrap is not installed; run `apt-get install bubblewrap`", said)
            self.assertIn('sandbox.kind = "none"', said)

    def test_broken(self) -> None:
        """One that cannot make its sandbox: in its own words, and what can be done about it."""
        complaint = "bwrap: setting up uid map: Permission denied"
        self.bwrap(f'echo "{complaint}" >&2; exit 1')
        said = self.refused()
        self.assertIn(f"bubblewrap does not work here: {complaint}", said)
        self.assertIn("apparmor_restrict_unprivileged_userns=0", said)
        self.assertIn('set sandbox.kind = "none"', said)
