"""`slurm.checks`: faults of a cluster, with commands that are scripts."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, RunnerSettings
from tawebeval.errors import ConfigurationError
from tawebeval.slurm import checks

SCRIPTS = {
    "srun": "exec sleep 600",
    "scontrol": "echo Slurmctld is UP",
    "squeue": "",
    "scancel": "",
}


class CheckTests(SynchronousTestCase):
    """The checks of `tawebeval doctor`."""

    def test_busy(self) -> None:
        """A cluster without a free node is no fault of `runner.python`."""
        folder = Path(self.mktemp()).resolve()
        folder.mkdir()
        for name, script in SCRIPTS.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        self.patch(os, "environ", {"PATH": f"{folder}:/usr/bin:/bin"})
        self.patch(checks, "_JOB_SECONDS", 0.01)
        runner = RunnerSettings(kind="slurm", shared=str(folder))
        checking = checks.check_cluster(
            Configuration(runner=runner), (folder,), None, nullcontext, os.environ
        )
        self.assertEqual(next(checking), "the controller of Slurm answers")
        error = self.assertRaises(ConfigurationError, next, checking)
        self.assertIn("no node was free within 0.01 seconds", str(error))
        self.assertIn("squeue", str(error))
