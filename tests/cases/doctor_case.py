"""A machine for the doctor: the cases of `test_doctor` and others."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration
from tawebeval.daemon import doctor
from tawebeval.daemon.doctor import Finding, Severity
from tawebeval.errors import SetupProblem
from tawebeval.linux import daemon_limits
from tawebeval.linux.cgroups import CgroupManager
from tawebeval.linux.kernel_files import CgroupDirectory
from tawebeval.sandbox import probe
from tawebeval.sandbox.base import NoSandbox
from tawebeval.sandbox.bubblewrap import EVALUATOR_TOOLS_DIRECTORY_NAME, BubblewrapSandbox
from tawebeval.sandbox.probe import ProbeDirectories
from tests.fakes.sandbox import FakeLauncher

OK, WEAKER, BROKEN = Severity
RESOURCES = "memory", "processes", "cpu", "weight"


class DoctorTestCase(SynchronousTestCase):
    """A machine where all is well, seen by a user who is not root."""

    def setUp(self) -> None:
        self.replaced: list[Any] = []
        self.folder = Path(tempfile.mkdtemp()).resolve()
        self.addCleanup(subprocess.run, ["rm", "-rf", self.folder])
        self.file = self.folder / "tawebeval.toml"
        self.state, self.cache = self.folder / "state", self.folder / "cache"
        self.environment = {"STATE_DIRECTORY": str(self.state), "CACHE_DIRECTORY": str(self.cache)}
        for path in (self.state, self.cache):
            path.mkdir(mode=0o700)
        self.missing: dict[str, str] = {}
        self.closed: list[str] = []
        self.launcher: Any = FakeLauncher()
        self.places: list[ProbeDirectories] = []
        watches = self.folder / "max_user_watches"
        watches.write_text(f"{2**50}\n")
        self.free = 2**50
        usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=self.free))
        for module, name, fake in (
            (doctor, "check_user_and_locale", lambda command: None),
            (doctor, "open_cgroups", self.open_cgroups),
            (doctor, "open_sandbox", self.open_sandbox),
            (doctor, "check_git_version", lambda: "git version 2.39.5"),
            (probe, "probe_overlays_or_copies", self.probe_with_overlays),
            (daemon_limits, "EPOLL_WATCH_LIMIT_FILE", watches),
            (doctor, "shutil", usage),
            (doctor, "find_cgroup_remedy", lambda: "a unit"),
        ):
            self.replace(module, name, fake)

    def replace(self, place: Any, name: str, fake: object) -> None:
        """Replace something of the machine until `reset`."""
        self.replaced.append(self.patch(place, name, fake))

    def reset(self) -> None:
        for patch in reversed(self.replaced):
            patch.restore()
        self.setUp()

    def open_cgroups(self, name: str) -> CgroupManager:
        missing: Any = self.missing
        closed = self.closed

        class Noted(CgroupManager):
            def remove_all_cgroups(self) -> None:
                closed.append(name)

        return Noted(missing, CgroupDirectory("/cgroup"))

    def open_sandbox(
        self, configuration: Configuration, accounts: Path, cgroups: CgroupManager, launcher: object
    ) -> NoSandbox | BubblewrapSandbox:
        self.accounts, self.users = accounts, os.listdir(accounts)
        shared = configuration.limits, cgroups, self.launcher
        if configuration.sandbox.kind == "none":
            return NoSandbox(*shared, accounts / EVALUATOR_TOOLS_DIRECTORY_NAME)
        network = configuration.sandbox.network
        return BubblewrapSandbox(*shared, "/usr/bin/bwrap", accounts, (), (), network)

    def probe_with_overlays(self, sandbox: object, places: ProbeDirectories) -> SetupProblem | None:
        self.places.append(places)
        return None

    def examine(self, settings: str = "") -> list[Finding]:
        self.file.write_text(settings)
        return list(doctor.examine_system(self.file, self.environment, MemoryReactorClock()))

    def check_ok(self, settings: str = "") -> list[Finding]:
        found = self.examine(settings)
        self.assertEqual({each.severity for each in found}, {OK}, found)
        return found

    def check(self, component: str, severity: Severity, *words: str, settings: str = "") -> Finding:
        """Check that one component alone is not ok, and the words of its finding."""
        found = [each for each in self.examine(settings) if each.severity is not OK]
        self.assertEqual(
            [(each.component, each.severity) for each in found], [(component, severity)], found
        )
        for word in words:
            self.assertIn(word, f"{found[0].description} -> {found[0].remedy}")
        return found[0]

    def write(self, name: str, content: str, mode: int = 0o600) -> Path:
        path = self.folder / name
        path.write_text(content)
        path.chmod(mode)
        return path

    def forbid(self, path: Path) -> None:
        """Let the daemon's user have no right to a file."""
        access = os.access

        def may(asked: Path, mode: int, **more: bool) -> bool:
            return asked != path and access(asked, mode, **more)

        self.replace(os, "access", may)
