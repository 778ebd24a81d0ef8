"""`slurm.checks`: faults of a cluster, with commands that are scripts."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
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

JOB = """
import json, sys
told = json.load(sys.stdin)
(name, root, _), = told["environments"]
lacks = [[name + " in " + told["directory"], root]]
print(json.dumps({"node": "one", "python": "3", "problem": None, "has_memory_cgroup": False,
                  "token": told["token"], "environments": lacks,
                  "cache_problem": "no cache of %d" % told["cache"]}))
"""


class CheckTests(SynchronousTestCase):
    """The checks of `tawebeval doctor`."""

    def make_commands(self, **scripts: str) -> Path:
        """Make the commands of a cluster; return their directory."""
        folder = Path(self.mktemp()).resolve()
        folder.mkdir()
        for name, script in {**SCRIPTS, **scripts}.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        self.patch(os, "environ", {"PATH": f"{folder}:/usr/bin:/bin"})
        return folder

    def test_busy(self) -> None:
        """A cluster without a free node is no fault of `runner.python`."""
        folder = self.make_commands()
        self.patch(checks, "_JOB_SECONDS", 0.01)
        runner = RunnerSettings(kind="slurm", shared_directory=str(folder))
        checking = checks.check_cluster(
            Configuration(runner=runner), (folder,), None, nullcontext, os.environ
        )
        self.assertEqual(next(checking), "the controller of Slurm answers")
        error = self.assertRaises(ConfigurationError, next, checking)
        self.assertIn("no node was free within 0.01 seconds", str(error))
        self.assertIn("squeue", str(error))

    def test_stream(self) -> None:
        """Without a shared directory the job reads stdin; it names what its node lacks."""
        self.make_commands(srun=f"exec {sys.executable} -IS -c '{JOB}'")
        configuration = Configuration(
            runner=RunnerSettings(kind="slurm", node_directory="/scratch"),
            environments={"gcc": EnvironmentSettings("/roots/gcc")},
        )
        _, found, cache, missing = checks.check_cluster(
            configuration, (Path("/var"),), None, nullcontext, os.environ
        )
        self.assertIn("on the node one bubblewrap works (Python 3), /scratch is there", str(found))
        self.assertIn(f"no cache of {configuration.runner.node_cache_bytes}", str(cache))
        self.assertEqual(missing, SetupProblem("on the node one gcc in /scratch", "/roots/gcc"))
