"""`slurm.cluster`: the job description and srun of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, LimitSettings, RunnerSettings
from tawebeval.core.checkout import Checkout, Commit
from tawebeval.linux.cgroups import CgroupManager
from tawebeval.sandbox.base import LeftProcess, SandboxedRun
from tawebeval.sandbox.workspace import Workspace
from tawebeval.slurm.cluster import SlurmRun, SlurmSandbox
from tawebeval.slurm.frames import KILL
from tawebeval.slurm.job_description import (
    JOB_DESCRIPTION_FILE_NAME,
    read_job_description,
)


class JobDescriptionTests(SynchronousTestCase):
    """The job description of a run, without its srun."""

    def make_run(
        self, root: Path, limits: LimitSettings, configuration: Configuration | None = None
    ) -> SandboxedRun:
        """Return a run in the directory `root`."""
        root.mkdir()
        unused: Any = None
        sandbox = SlurmSandbox(
            *(configuration or Configuration(), LimitSettings(), CgroupManager({})),
            *(unused, unused, unused, unused, Clock(), unused, "tawebeval-test-"),
        )
        checkout = Checkout(Commit("", "", 1, 1), root, lambda: None)
        return sandbox.make_run(Workspace(root), checkout, limits)

    def test_other_process_of_the_daemon(self) -> None:
        """A run does not go on, and its description tells so to daemons without a cluster."""
        run = self.make_run(Path(self.mktemp()), LimitSettings())
        described = run.launch.describe_for_resume()
        self.assertEqual(described["kind"], "slurm")
        left = LeftProcess(described, 1, 1, 0)
        self.assertRaises(OSError, run.launch.resume_process, ProcessProtocol(), left)

    def test_limits(self) -> None:
        """A node holds all limits but that of the disk which it shares."""
        root = Path(self.mktemp()).resolve()
        limits = LimitSettings(free_disk=7, disk=5000)
        run = self.make_run(root, limits)
        started = object()
        self.patch(SlurmRun, "_start_srun", lambda *_: started)
        self.assertIs(run.launch.start_evaluator("true", {}, root), started)
        expected = msgspec.structs.replace(limits, free_disk=0)
        self.assertEqual(read_job_description(root / JOB_DESCRIPTION_FILE_NAME).limits, expected)

    def test_hurried(self) -> None:
        """A stop ends the wait for files of a node, where the daemon has none of its own."""
        for shared, expected in (("/shared", []), ("", [KILL])):
            settings = msgspec.structs.replace(RunnerSettings(), shared_directory=shared)
            configuration = msgspec.structs.replace(Configuration(), runner=settings)
            run: Any = self.make_run(Path(self.mktemp()), LimitSettings(), configuration)
            sent: list[bytes] = []
            run.launch.transport = SimpleNamespace(send_command=sent.append)
            run.end.abort_remote_reads()
            self.assertEqual(sent, expected)
