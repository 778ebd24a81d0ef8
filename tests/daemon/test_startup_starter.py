"""Whether evaluations outlive the daemon: the starter and what the doctor says."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, EvaluationSettings, LimitSettings, SandboxSettings
from tawebeval.daemon.startup import (
    STARTER_SOCKET_VARIABLE,
    describe_limits_on_starter,
    open_starter,
)
from tawebeval.errors import ConfigurationError
from tawebeval.linux.starter import RESERVED_FD_COUNT, STARTER_FDS_PER_PROGRAM
from tests.cases.doctor_case import BROKEN, WEAKER, DoctorTestCase
from tests.cases.starters import StarterProcess


def configured(kind: Any = "bubblewrap") -> Configuration:
    """Return a configuration."""
    return Configuration(sandbox=SandboxSettings(kind))


SMALL = Configuration(
    evaluations=EvaluationSettings(running=10), limits=LimitSettings(processes=100)
)


class SettingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.starter = StarterProcess()
        self.addCleanup(self.starter.stop)
        self.environment = {STARTER_SOCKET_VARIABLE: str(self.starter.path)}

    def test_evaluations_outlast_the_daemon_only_with_a_starter_and_a_sandbox(self) -> None:
        for kind, expected in (("bubblewrap", True), ("none", False)):
            launcher, is_lasting = open_starter(configured(kind), self.environment, Path("/state"))
            self.assertIs(is_lasting, expected)
            launcher.close()
        self.assertIsNone(self.starter.process.poll(), "the daemon does not end it")
        self.assertIs(open_starter(configured(), {}, Path("/state"))[1], False)

    def test_start_is_refused_if_the_named_starter_does_not_answer(self) -> None:
        silent = {STARTER_SOCKET_VARIABLE: "/nowhere/socket"}
        error = self.assertRaises(
            ConfigurationError, open_starter, configured(), silent, Path("/state")
        )
        said = "No such file or directory; start tawebeval-starter"
        self.assertIn(said, str(error))

    def test_start_is_refused_if_limits_open_files_exceeds_the_limit_of_the_starter(self) -> None:
        resource.prlimit(self.starter.pid, resource.RLIMIT_NOFILE, (200, 200))
        error = self.assertRaises(
            ConfigurationError, open_starter, configured(), self.environment, Path("/state")
        )
        self.assertEqual(
            str(error),
            "limits.open_files: 256 is over the starter's hard limit, 200; set LimitNOFILE=256 in"
            " tawebeval-starter.service (or ulimit -H), or lower limits.open_files",
        )

    def describe(self, cgroups: str) -> list[str]:
        client = self.starter.connect()
        self.addCleanup(client.close)
        client.cgroups = cgroups
        return list(map(str, describe_limits_on_starter(SMALL, client)))

    def test_starter_needs_descriptors_for_running_evaluations(self) -> None:
        wanted = 10 * STARTER_FDS_PER_PROGRAM + RESERVED_FD_COUNT
        for there in (wanted, wanted - 1):
            resource.prlimit(self.starter.pid, resource.RLIMIT_NOFILE, (there, there))
            said, _ = self.describe("")
            self.assertIn(f"descriptors: {there} allowed, and up to {wanted} may be needed", said)
            remedy = f"; set LimitNOFILE={wanted} in tawebeval-starter.service"
            self.assertEqual(remedy in said, there < wanted)

    def test_too_low_pids_max_above_the_cgroup_of_evaluations_is_reported(self) -> None:
        unit = Path(self.mktemp()).absolute()
        parent = unit / "parent"
        parent.mkdir(parents=True)
        (parent / "pids.max").write_text("max\n")
        cgroups = json.dumps({"evaluations": str(parent), "missing": {}})
        for there in (1096, 1095):
            (unit / "pids.max").write_text(f"{there}\n")
            _, said = self.describe(cgroups)
            self.assertIn(f"processes: {there} allowed, and up to 1096 may be needed", said)
            self.assertEqual("; set TasksMax=1096 in tawebeval-starter" in said, there < 1096)


class DoctorTests(DoctorTestCase):
    def test_doctor_reports_a_starter_with_too_few_descriptors_as_weaker(self) -> None:
        starter = StarterProcess()
        self.addCleanup(starter.stop)
        self.environment[STARTER_SOCKET_VARIABLE] = str(starter.path)
        settings = "[evaluations]\nrunning = 10"
        said = [
            str(each.description) for each in self.check_ok(settings) if each.component == "starter"
        ]
        self.assertIn("evaluations outlive the daemon", said)
        resource.prlimit(starter.pid, resource.RLIMIT_NOFILE, (300, 300))
        wanted = 10 * STARTER_FDS_PER_PROGRAM + RESERVED_FD_COUNT
        remedy = f"-> set LimitNOFILE={wanted} in tawebeval-starter.service"
        words = "descriptors: 300 allowed", remedy
        self.check("starter", WEAKER, *words, settings=settings)

    def test_doctor_reports_an_unreachable_starter_as_broken(self) -> None:
        self.environment[STARTER_SOCKET_VARIABLE] = "/nowhere/socket"
        self.check("starter", BROKEN, "the starter does not answer", "tawebeval-starter.service")
