"""`systemd/`: the units are what systemd understands, and fit the command."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tawebeval.config import CallbackSettings, Configuration
from tawebeval.tap import Options

UNITS = Path(__file__).resolve().parent.parent / "systemd"
TWISTD = "/opt/tawebeval/bin/twistd"


def read_unit(name: str) -> configparser.ConfigParser:
    """Return the sections of a unit in which no key is repeated."""
    unit = configparser.ConfigParser(
        delimiters="=", comment_prefixes="#", interpolation=None, strict=True
    )
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((UNITS / name).read_text().replace("\\\n", " "))
    return unit


class UnitTests(SynchronousTestCase):
    """The units as they are shipped."""

    def test_verified(self) -> None:
        """Neither key nor value is one that systemd does not know."""
        if shutil.which("systemd-analyze") is None:
            raise SkipTest("this machine has no systemd-analyze (Debian package systemd)")
        folder = Path(self.mktemp())
        folder.mkdir()
        for unit in UNITS.iterdir():
            # Where the daemon will be installed there need not be anything on this machine.
            (folder / unit.name).write_text(unit.read_text().replace(TWISTD, "/bin/sh"))
        command = ["systemd-analyze", "verify", "--man=no", *map(str, folder.iterdir())]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        # It also returns 0 where it complains of a key that it does not know.
        self.assertEqual((run.stdout, run.stderr, run.returncode), ("", "", 0))

    def test_command(self) -> None:
        """What the service starts is a command that tawebeval understands."""
        command = shlex.split(read_unit("tawebeval.service")["Service"]["ExecStart"])
        twistd = [TWISTD, "--nodaemon", "--pidfile=", "tawebeval"]
        self.assertEqual(command[:4], twistd)
        options = Options()
        options.parseOptions(command[4:])
        self.assertEqual(options["config"], "/etc/tawebeval/tawebeval.toml")
        self.assertEqual(options["listen"], ("systemd:domain=INET:index=0",))

    def test_directories(self) -> None:
        """The directories in the command are those that systemd makes."""
        service = read_unit("tawebeval.service")["Service"]
        for key in ("StateDirectory", "CacheDirectory", "ConfigurationDirectory"):
            self.assertEqual(service[key], "tawebeval")

    def test_time_to_stop(self) -> None:
        """By default systemd waits until the daemon has ended in order, callbacks included."""
        service = read_unit("tawebeval.service")["Service"]
        settings = Configuration(callbacks=CallbackSettings(enabled=True))
        needed = settings.service.drain + settings.evaluations.grace + settings.callbacks.timeout
        self.assertGreater(int(service["TimeoutStopSec"]), needed + 11)

    def test_sandbox(self) -> None:
        """Nothing of what keeps bubblewrap from working, or the daemon from its groups."""
        service = read_unit("tawebeval.service")["Service"]
        self.assertEqual(set(service["Delegate"].split()), {"memory", "pids", "cpu"})
        for key in (
            *("ProtectControlGroups", "ProtectKernelTunables", "ProtectHostname", "PrivateUsers"),
            *("ProcSubset", "PrivateNetwork", "MemoryDenyWriteExecute"),
        ):
            self.assertNotIn(key, service)
        namespaces = {"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"}
        self.assertEqual(set(service["RestrictNamespaces"].split()), namespaces)
        self.assertIn("AF_NETLINK", service["RestrictAddressFamilies"].split())
        calls = {"@system-service", "@mount", "sethostname"}
        self.assertEqual(set(service["SystemCallFilter"].split()), calls)

    def test_address(self) -> None:
        """With the socket, the daemon is reached where it is without systemd."""
        host, _, port = read_unit("tawebeval.socket")["Socket"]["ListenStream"].partition(":")
        self.assertEqual(Configuration().listen, (f"tcp:{port}:interface={host}",))
