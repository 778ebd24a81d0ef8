"""`systemd/`: the units are what systemd understands, and fit the command."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from click.testing import CliRunner
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tawebeval.cli import main as command
from tawebeval.config import CallerSettings, Configuration
from tawebeval.daemon.reload import compute_stop_timeout
from tawebeval.daemon.tap import Options
from tawebeval.sandbox.seccomp import ALLOWED_CALLS
from tawebeval.web.auth import find_token_file
from tests.cases.documented import doctors, properties
from tests.cases.patience import PATIENCE
from tests.run import ROOT

UNITS = ROOT / "systemd"
PROGRAMS = "/usr/local/lib/tawebeval/bin"
TWISTD = f"{PROGRAMS}/twistd"


def read_unit(name: str) -> configparser.ConfigParser:
    """Return the sections of a unit; of a repeated key the last value."""
    unit = configparser.ConfigParser(
        delimiters="=", comment_prefixes="#", interpolation=None, strict=False
    )
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((UNITS / name).read_text().replace("\\\n", " "))
    return unit


class UnitTests(SynchronousTestCase):
    def analyze(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        if shutil.which("systemd-analyze") is None:
            raise SkipTest("this machine has no systemd-analyze (Debian package systemd)")
        command = ["systemd-analyze", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        if "Failed to create directory '/run/systemd/'" in done.stderr:
            raise SkipTest("systemd-analyze needs /run/systemd, which systemd makes")
        return done

    def test_systemd_knows_each_key_and_value(self) -> None:
        folder = Path(self.mktemp())
        folder.mkdir()
        for unit in [*UNITS.glob("*.service"), *UNITS.glob("*.socket")]:
            # Where the daemon will be installed there need not be anything on this machine.
            text = unit.read_text()
            for program in ("twistd", "tawebeval"):
                text = text.replace(f"{PROGRAMS}/{program} ", "/bin/sh ")
            (folder / unit.name).write_text(text)
        run = self.analyze("verify", "--man=no", *folder.iterdir())
        # It also returns 0 where it complains of a key that it does not know.
        self.assertEqual((run.stdout, run.stderr, run.returncode), ("", "", 0))

    def test_services_are_hardened(self) -> None:
        for name in ("tawebeval.service", "tawebeval-starter.service"):
            options = ("--no-pager", "--offline=true", "--threshold=31")
            run = self.analyze("security", *options, UNITS / name)
            self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
            self.assertIn(f"Overall exposure level for {name}:", run.stdout)

    def test_service_starts_a_valid_command(self) -> None:
        command = shlex.split(read_unit("tawebeval.service")["Service"]["ExecStart"])
        twistd = [TWISTD, "--nodaemon", "--pidfile=", "tawebeval"]
        self.assertEqual(command[:4], twistd)
        options = Options()
        options.parseOptions(command[4:])
        self.assertEqual(options["config"], "/etc/tawebeval/tawebeval.toml")
        self.assertEqual(options["listen"], ("systemd:domain=INET:index=0",))

    def test_reload_checks_the_started_configuration_file_before_sighup(self) -> None:
        text = (UNITS / "tawebeval.service").read_text()
        checking, signalling = re.findall("^ExecReload=(.*)$", text, re.MULTILINE)
        program, name, *arguments = shlex.split(checking)
        self.assertEqual((program, name), (f"{PROGRAMS}/tawebeval", "check"))
        started = Options()
        started.parseOptions(
            shlex.split(read_unit("tawebeval.service")["Service"]["ExecStart"])[4:]
        )
        self.assertEqual(arguments, ["--config", started["config"]])
        self.assertEqual(shlex.split(signalling), ["/bin/sh", "-c", "kill -HUP ${MAINPID}"])

    def test_check_exits_with_2_for_an_invalid_configuration(self) -> None:
        file = Path(self.mktemp()).absolute()
        for text, message in (
            # systemd closes the files of LoadCredential= to a reload.
            ("callers.tokens = '/nonexistent'", ""),
            ("log.level = 'loud'", "log.level: "),
            ("environments.a.root = '/nonexistent'", "environments.a.root: "),
            ("sandbox.readable = ['/proc']", "sandbox.readable[0]: "),
        ):
            file.write_text(text)
            ended = CliRunner().invoke(command, ["check", "--config", str(file)])
            self.assertEqual(ended.exit_code, 2 if message else 0, ended.output)
            self.assertIn(message, ended.output)

    def test_daemon_finds_the_tokens_that_systemd_loads_as_a_credential(self) -> None:
        name, _, path = read_unit("tawebeval.service")["Service"]["LoadCredential"].partition(":")
        self.assertEqual(path, "/etc/tawebeval/tokens")
        folder = Path(self.mktemp())
        folder.mkdir()
        (folder / name).touch()
        found = find_token_file(CallerSettings(), {"CREDENTIALS_DIRECTORY": str(folder)})
        self.assertEqual(found, folder / name)

    def test_documented_doctor_command_has_the_unit_properties_relevant_to_doctor(self) -> None:
        # ProtectProc= mounts a new /proc: in a container the sandbox of the doctor fails without.
        service = read_unit("tawebeval.service")["Service"]
        looked_at = re.compile(
            "User|UMask|(State|Cache)Directory|LoadCredential|Delegate|Limit|TasksMax|AppArmor"
            "|ProtectProc"
        )
        expected = [f"{key}={value}" for key, value in service.items() if looked_at.match(key)]
        (example,) = doctors()
        self.assertCountEqual(properties(example.command), expected)
        self.assertIn("--collect", example.command)  # or each finding leaves a failed unit
        examined = service["ExecStart"].partition("--config ")[2].split()[0]
        self.assertEqual(example.command[-4:], ["tawebeval", "doctor", "--config", examined])

    def test_systemd_waits_longer_than_the_daemon_takes_to_stop(self) -> None:
        service = read_unit("tawebeval.service")["Service"]
        self.assertGreater(int(service["TimeoutStopSec"]), compute_stop_timeout(Configuration()))

    def test_unit_permits_what_bubblewrap_needs(self) -> None:
        service = read_unit("tawebeval.service")["Service"]
        self.assertEqual(set(service["Delegate"].split()), {"memory", "pids", "cpu"})
        for key in (
            *("ProtectControlGroups", "ProtectKernelTunables", "ProtectHostname"),
            *("ProcSubset", "PrivateNetwork", "MemoryDenyWriteExecute", "DynamicUser"),
        ):
            self.assertNotIn(key, service)
        # DynamicUser= would imply the first; other versions of systemd may have other defaults.
        for key in ("RestrictSUIDSGID", "ProtectKernelLogs"):
            self.assertEqual(service[key], "no")
        namespaces = {"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"}
        self.assertEqual(set(service["RestrictNamespaces"].split()), namespaces)
        self.assertIn("AF_NETLINK", service["RestrictAddressFamilies"].split())
        landlock = ALLOWED_CALLS["restrictions"].split()
        calls = {"@system-service", "@mount", "sethostname", *landlock}
        self.assertEqual(set(service["SystemCallFilter"].split()), calls)

    def test_starter_has_the_limits_and_protection_of_the_daemon(self) -> None:
        service, starter = (
            read_unit(name)["Service"]
            for name in ("tawebeval.service", "tawebeval-starter.service")
        )
        own = ("ExecStart", "Restart", "TimeoutStopSec", "RuntimeDirectory", "RuntimeDirectoryMode")
        daemons = ("WatchdogSec", "Environment", "LoadCredential", "ExecReload")
        differing = {*own, *daemons, "ConfigurationDirectory", "MemoryMax"}
        self.assertEqual(
            {key: value for key, value in starter.items() if key not in differing},
            {key: value for key, value in service.items() if key not in differing},
        )
        self.assertEqual(shlex.split(starter["ExecStart"]), [f"{PROGRAMS}/tawebeval", "starter"])
        self.assertEqual(starter["RuntimeDirectoryMode"], "0700")
        shares = [int(unit["MemoryMax"].rstrip("%")) for unit in (starter, service)]
        self.assertEqual(shares, [60, 30])

    def test_socket_has_the_default_address(self) -> None:
        host, _, port = read_unit("tawebeval.socket")["Socket"]["ListenStream"].partition(":")
        self.assertEqual(Configuration().listen, (f"tcp:{port}:interface={host}",))
