"""`slurm.checks`: faults of a cluster, with commands that are scripts."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, EnvironmentSettings, RunnerSettings
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.slurm import checks

SCRIPTS = {
    "srun": "exec sleep 600",
    "scontrol": "echo Slurmctld is UP",
    "squeue": "",
    "scancel": "",
}

RUN_HERE = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'


class CheckTests(SynchronousTestCase):
    def make_commands(self, **scripts: str) -> Path:
        folder = Path(self.mktemp()).resolve()
        folder.mkdir()
        for name, script in {**SCRIPTS, **scripts}.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        self.patch(os, "environ", {"PATH": f"{folder}:/usr/bin:/bin"})
        return folder

    def test_busy_cluster_has_no_other_fault(self) -> None:
        folder = self.make_commands()
        self.patch(checks, "_JOB_SECONDS", 0.01)
        runner = RunnerSettings(kind="slurm", shared=str(folder))
        checking = checks.check_cluster(Configuration(runner=runner), folder, os.environ)
        self.assertEqual(next(checking), "the controller of Slurm answers")
        error = self.assertRaises(ConfigurationError, next, checking)
        self.assertIn("no node was free within 0.01 seconds", str(error))
        self.assertIn("squeue", str(error))

    def test_job_tells_what_its_node_lacks(self) -> None:
        folder = self.make_commands(srun=RUN_HERE)
        configuration = Configuration(
            runner=RunnerSettings(kind="slurm", shared=str(folder)),
            environments={"gcc": EnvironmentSettings("/roots/gcc")},
        )
        _, found, missing = checks.check_cluster(configuration, folder, os.environ)
        self.assertIn("bubblewrap works", str(found))
        self.assertIsInstance(missing, SetupProblem)
        self.assertIn("/roots/gcc is missing", str(missing))
        self.assertEqual(list(folder.glob("tawebeval-doctor-*")), [])

    def test_node_without_bubblewrap_is_an_error(self) -> None:
        folder = self.make_commands(srun=RUN_HERE)
        tried = ("/bin/sh", "-c", "echo no namespaces >&2; exit 1")
        self.patch(checks, "_TRIED", {"bubblewrap": tried})
        runner = RunnerSettings(kind="slurm", shared=str(folder))
        checking = checks.check_cluster(Configuration(runner=runner), folder, os.environ)
        next(checking)
        error = self.assertRaises(ConfigurationError, next, checking)
        self.assertIn("does not work: bubblewrap: no namespaces", str(error))

    def test_state_outside_of_the_shared_directory_is_refused(self) -> None:
        configuration = Configuration(runner=RunnerSettings(kind="slurm", shared="/shared"))
        error = self.assertRaises(
            ConfigurationError, checks.check_shared_directory, configuration, Path("/var")
        )
        self.assertIn("/var is not in /shared", str(error))
