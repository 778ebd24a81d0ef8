"""`scripts/bootstrap`, by which `make` makes the virtualenv: nothing outside the checkout."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from twisted.trial.unittest import SynchronousTestCase

from tests.cases.scripts import load_script
from tests.run import ROOT

SCRIPT = ROOT / "scripts" / "bootstrap"


class LinkTests(SynchronousTestCase):
    """A `.venv` that is a link to somebody else's."""

    def test_linked_virtualenv_is_refused_and_kept(self) -> None:
        with TemporaryDirectory() as folder:
            other, checkout = Path(folder, "other"), Path(folder, "checkout")
            other.mkdir()
            (other / "file").touch()
            (checkout / "scripts").mkdir(parents=True)
            shutil.copy(SCRIPT, checkout / "scripts")
            shutil.copy(ROOT / "pyproject.toml", checkout)
            (checkout / ".venv").symlink_to(other)
            command = [sys.executable, str(checkout / "scripts" / "bootstrap")]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(ran.returncode, 1, ran.stderr)
            self.assertIn(f".venv is a link to {other}", ran.stdout + ran.stderr)
            self.assertTrue((other / "file").exists())


class ServiceTests(SynchronousTestCase):
    """Packages that bring services, on a machine whose directories are the test's."""

    def setUp(self) -> None:
        self.module = load_script("bootstrap")
        self.units, self.policy = Path(self.mktemp()), Path(self.mktemp())
        self.units.mkdir()
        self.commands: list[tuple[str, ...]] = []
        self.module.UNITS, self.module.POLICY = self.units, self.policy
        self.module.say = lambda text: None
        self.module.run = self.run_command

    def run_command(self, *command: str) -> str:
        self.commands.append(command)
        if "--simulate" in command:
            return "Inst nginx [1.2] (1.22 Debian)\nConf nginx (1.22 Debian)\n"
        if command[:2] == ("apt-cache", "show"):
            return "Size: 1500000\nInstalled-Size: 4000\n"
        if "install" in command:
            signal.raise_signal(signal.SIGTERM)
            (self.units / "nginx.service").touch()
        return ""

    def install(self) -> None:
        """Install nginx; SIGTERM arrives meanwhile, and counts afterwards."""
        heard: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        self.addCleanup(signal.signal, signal.SIGTERM, before)
        self.module.install(["nginx"])
        self.assertEqual(heard, [signal.SIGTERM])

    def test_only_newly_installed_services_are_disabled(self) -> None:
        (self.units / "haproxy.service").touch()
        self.install()
        disabled = [command for command in self.commands if command[0] == "systemctl"]
        self.assertEqual(disabled, [("systemctl", "disable", "nginx.service")])
        self.assertFalse(self.policy.exists())

    def test_policy_forbids_starts_during_bootstrap_and_a_foreign_policy_is_kept(
        self,
    ) -> None:
        process = subprocess.Popen(["sh", "-c", "read line # bootstrap"], stdin=subprocess.PIPE)
        text = self.module.POLICY_TEXT.format(pid=process.pid)
        with process:
            self.assertEqual(subprocess.run(["sh", "-c", text]).returncode, 101)
            process.communicate()
        self.assertEqual(subprocess.run(["sh", "-c", text]).returncode, 0)
        for found, is_kept in (("exit 101\n", True), (text, False)):
            self.policy.write_text(found)
            self.install()
            self.assertEqual(self.policy.exists(), is_kept)
