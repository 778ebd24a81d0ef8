"""`make install` and `make uninstall`, on a machine of their own."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from benchmarks.booted import missing
from tawebeval import __version__
from tests.cases.documented import INSTALL as PAGE
from tests.cases.documented import scripts
from tests.cases.links import leading_nowhere, links
from tests.cases.patience import PATIENCE
from tests.integration.service_case import SERVICE, TOKEN, TOKENS, ServiceTestCase
from tests.run import ROOT

VENV = "/usr/local/lib/tawebeval"
_BASH = """\
. /usr/local/share/bash-completion/completions/tawebeval
COMP_WORDS=(tawebeval eval) COMP_CWORD=1
_tawebeval_completion tawebeval
echo "${COMPREPLY[@]}"
"""
# Without a desktop it looks below /usr alone.
_FISH = """\
XDG_DATA_DIRS=/usr/local/share fish -c 'complete --do-complete "tawebeval eval"'
"""

INSTALL = str(ROOT / "scripts" / "install")


class InstalledTests(ServiceTestCase):
    def test_user_nobody_runs_the_installed_command(self) -> None:
        version = self.machine.run("setpriv", "--reuid=65534", "tawebeval", "--version")
        self.assertEqual(version, f"tawebeval {__version__}")

    def test_each_shell_completes_the_command(self) -> None:
        for shell, program, completed in (
            ("bash", _BASH, "evaluate"),
            ("zsh", "autoload -U compinit; compinit -u -D; print $_comps[tawebeval]", "_tawebeval"),
            ("fish", _FISH, "evaluate"),
        ):
            if shutil.which(shell):
                self.assertEqual(self.machine.run(shell, "-c", program).split()[0], completed)

    def test_example_configurations_run_under_the_unit(self) -> None:
        folder = "/usr/local/share/doc/tawebeval/etc/examples"
        self.write("/etc/tawebeval/git-password", "secret\n")
        self.machine.run("chmod", "600", "/etc/tawebeval/git-password")
        self.machine.run("mkdir", "-p", "/opt/jdk-21")
        handed_over = "LoadCredential=git-password:/etc/tawebeval/git-password"
        for name, lines in (("public", ()), ("contest", (handed_over,))):
            self.machine.run("cp", f"{folder}/{name}.toml", "/etc/tawebeval/tawebeval.toml")
            self.override(*lines)
            self.start()
            self.assertEqual(self.ask("GET", "/health/ready").answer()[0], 200)
            self.assertEqual(self.ask("GET", "/evaluations").answer()[0], 200)
            self.assertEqual(self.machine.connection().ask("GET", "/evaluations").answer()[0], 401)
            self.control("stop", SERVICE)

    def files(self) -> str:
        return self.machine.run("find", VENV, "-type", "f")

    def test_nothing_is_compiled_after_the_installation(self) -> None:
        before = self.files()
        self.machine.run("tawebeval", "--help")
        self.machine.run(f"{VENV}/bin/twistd", "tawebeval", "--help")
        modules = (
            "import pkgutil, tawebeval; "
            "names = pkgutil.walk_packages(tawebeval.__path__, 'tawebeval.'); "
            "[__import__(found.name) for found in names]"
        )
        self.machine.run(f"{VENV}/bin/python", "-c", modules)
        self.assertEqual(self.files(), before)

    def test_new_installation_has_one_caller(self) -> None:
        self.machine.run("rm", "-rf", "/etc/tawebeval")
        self.machine.run("mkdir", "/etc/tawebeval")
        # By its text: the machine does not see a checkout that is in /tmp.
        program = (
            "from pathlib import Path; from types import ModuleType; "
            "install = ModuleType('install'); install.__file__ = '/scripts/install'; "
            f"exec({Path(INSTALL).read_text()!r}, vars(install)); "
            "where = Path('/usr/local/bin/tawebeval'), Path('/etc/tawebeval'); "
            "install.make_first_token(*where); install.make_first_token(*where)"
        )
        self.machine.run("/usr/bin/python3", "-c", program)
        modes = self.machine.run("stat", "-c", "%a", "/etc/tawebeval/first-token", TOKENS)
        self.assertEqual(modes.split(), ["600", "600"])
        self.configure("")
        self.start()
        shown = self.machine.run("cat", "/etc/tawebeval/first-token").split()
        (token,) = (word for word in shown if word.startswith("tawebeval_"))
        self.assertEqual(
            self.ask("GET", "/evaluations", Authorization=f"Bearer {token}").answer()[0], 200
        )

    def test_documented_commands_set_up_nginx_and_a_caller_with_a_token(self) -> None:
        if not Path("/usr/sbin/nginx").exists():
            raise SkipTest("there is no nginx here (Debian package nginx)")
        self.configure((ROOT / "etc" / "tawebeval.toml").read_text())
        self.write("/etc/tawebeval/first-token", f"{TOKEN}\n")
        self.addCleanup(self.machine.run, "systemctl", "stop", "nginx")
        name, certbot, own = scripts(PAGE, "Get a certificate")
        self.assertIn("certbot", certbot)
        (proxy, trust), (caller,) = (
            scripts(PAGE, heading) for heading in ("Configure nginx", "Use the first token")
        )
        commands = f"set -ex; HOME=/root\n{name}{own}{proxy}{trust}{caller}".splitlines()
        script = "\n".join(line for line in commands if not line.startswith("apt-get "))
        done = self.machine.attempt("sh", "-c", script)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        ready = f'{{"status":"ready","version":"{__version__}"}}'
        header = f"{'ID':<40}  {'VERDICT':<24}  {'AGE':>6}  {'PROBLEM':<20}  LABELS\n"
        self.assertTrue(done.stdout.startswith(ready + header), done.stdout)
        self.assertIn(ready, PAGE.read_text())


class InstalledPathTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.install = runpy.run_path(INSTALL)

    def places(self, prefix: str, sysconfdir: str) -> Any:
        return self.install["Places"](str(self.folder), Path(prefix), Path(sysconfdir))

    def unit(self, prefix: str, sysconfdir: str) -> str:
        self.install["write_units"](self.places(prefix, sysconfdir))
        return Path(f"{self.folder}{prefix}/lib/systemd/system/tawebeval.service").read_text()

    def test_default_directories_leave_the_unit_file_unchanged(self) -> None:
        shipped = (ROOT / "systemd" / "tawebeval.service").read_text()
        self.assertEqual(self.unit("/usr/local", "/etc"), shipped)

    def test_prefix_and_sysconfdir_are_written_into_the_unit_file(self) -> None:
        for prefix, sysconfdir in (("/usr", "/usr/local/etc"), ("/opt/x", "/opt/etc")):
            unit = self.unit(prefix, sysconfdir)
            self.assertIn(f"ExecStart={prefix}/lib/tawebeval/bin/twistd ", unit)
            self.assertIn(f"--config {sysconfdir}/tawebeval/tawebeval.toml ", unit)
            self.assertIn(f"LoadCredential=tokens:{sysconfdir}/tawebeval/tokens\n", unit)
            # Nothing else is left, either, that begins with /etc.
            self.assertNotRegex(unit, r"(?<![\w/])/etc/")
            # systemd has that below /etc, wherever the configuration is.
            self.assertNotIn("ConfigurationDirectory", unit)

    def test_installed_documents_have_no_dead_links(self) -> None:
        places = self.places("/usr/local", "/etc")
        documents = self.folder / "usr" / "local" / "share" / "doc" / "tawebeval"
        documents.mkdir(parents=True)
        (documents / "earlier.md").touch()
        self.install["write_documents"](places)
        self.assertFalse((documents / "earlier.md").exists())
        self.assertGreater(len(list(links(documents))), 50)
        self.assertEqual(leading_nowhere(documents), [])


class RemovalTests(SynchronousTestCase):
    def attempt(self, python: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [python, INSTALL, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)

    def test_removal_keeps_configuration_and_foreign_files(self) -> None:
        folder = Path(self.mktemp()).absolute()
        ours = (
            "bin/tawebeval",
            "lib/tawebeval/bin/twistd",
            "lib/systemd/system/tawebeval.service",
            "lib/systemd/system/tawebeval.socket",
            "lib/systemd/system/tawebeval-starter.service",
            "lib/sysusers.d/tawebeval.conf",
            "share/doc/tawebeval/README.md",
            "share/man/man1/tawebeval-token-add.1",
            "share/bash-completion/completions/tawebeval",
            "share/zsh/site-functions/_tawebeval",
            "share/fish/vendor_completions.d/tawebeval.fish",
        )
        others = ("bin/other", "lib/systemd/system/other.service", "share/man/man1/other.1")
        settings = folder / "etc" / "tawebeval" / "tokens"
        profile = folder / "etc" / "apparmor.d" / "tawebeval"
        installed = (folder / "usr" / "local" / name for name in (*ours, *others))
        for path in (*installed, settings, profile):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        done = self.attempt(sys.executable, "--remove", "--destdir", str(folder))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        left = {
            str(path.relative_to(folder / "usr/local"))
            for path in (folder / "usr").rglob("*")
            if path.is_file()
        }
        self.assertEqual(left, set(others))
        self.assertTrue(settings.exists())
        self.assertFalse(profile.exists())

    def test_unreadable_python_is_refused(self) -> None:
        if missing():
            raise SkipTest(missing())
        folder = Path(self.mktemp()).absolute()
        folder.mkdir(mode=0o700)
        private = folder / "python3"
        private.write_bytes(Path("/usr/bin/python3").resolve().read_bytes())
        private.chmod(0o700)
        done = self.attempt(str(private), "--destdir", str(folder / "root"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("the daemon cannot read", done.stderr)
        self.assertFalse((folder / "root").exists())
