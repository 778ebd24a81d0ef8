"""`slurm.cluster`: the job description and srun of a run."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, LimitSettings
from tawebeval.core.checkout import Checkout, Commit
from tawebeval.linux.cgroups.manager import CgroupManager
from tawebeval.linux.child import StartedProcess
from tawebeval.sandbox.base import SandboxedRun
from tawebeval.sandbox.workspace import Workspace
from tawebeval.slurm.cluster import SlurmRun, SlurmSandbox
from tawebeval.slurm.frames import KILL
from tawebeval.slurm.job_description import (
    JOB_DESCRIPTION_FILE_NAME,
    NODE_PROTOCOL_VERSION,
    read_job_description,
)


class JobDescriptionTests(SynchronousTestCase):
    """The job description of a run, without its srun."""

    def make_run(self, root: Path, limits: LimitSettings) -> SandboxedRun:
        """Return a run in the directory `root`."""
        root.mkdir()
        unused: Any = None
        sandbox = SlurmSandbox(
            *(Configuration(), LimitSettings(), CgroupManager([], {}, {})),
            *(unused, unused, unused, unused, Clock(), "tawebeval-test-"),
        )
        checkout = Checkout(Commit("", "", 1, 1), root, lambda: None)
        return sandbox.make_run(Workspace(root), checkout, limits)

    def test_other_version(self) -> None:
        """The descriptors of a run that cannot go on are closed."""
        run = self.make_run(Path(self.mktemp()), LimitSettings())
        described = run.describe_for_resume()
        for version, count in ((NODE_PROTOCOL_VERSION - 1, 4), (NODE_PROTOCOL_VERSION, 3)):
            described["version"] = version
            descriptors = [os.memfd_create("file") for _ in range(count)]
            self.assertRaises(ValueError, run.resume, described, descriptors)
            for descriptor in descriptors:
                self.assertRaises(OSError, os.fstat, descriptor)

    def test_limits(self) -> None:
        """A node holds all limits but that of the disk which it shares."""
        root = Path(self.mktemp()).resolve()
        limits = LimitSettings(free_disk=7, disk=5000)
        run = self.make_run(root, limits)
        started = StartedProcess(9, -1, -1, -1)
        self.patch(SlurmRun, "_start_srun", lambda *_: (started, -1))
        self.assertIs(run.start_evaluator("true", {}, root), started)
        expected = msgspec.structs.replace(limits, free_disk=0)
        self.assertEqual(read_job_description(root / JOB_DESCRIPTION_FILE_NAME).limits, expected)

    def test_hurried(self) -> None:
        """A stop ends the wait for files of a node, where the daemon has none of its own."""
        run: Any = self.make_run(Path(self.mktemp()), LimitSettings())
        sent: list[bytes] = []
        run._transport = SimpleNamespace(send_command=sent.append)
        for is_streamed in (False, True):
            run._set_transfer(is_streamed)
            run.abort_remote_reads()
        self.assertEqual(sent, [KILL])
