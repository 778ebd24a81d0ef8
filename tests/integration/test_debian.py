"""The Debian package, as `make deb` builds it: installed, upgraded, removed, purged."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tawebeval import __version__
from tests.integration.machine import Machine, missing, wait_until
from tests.links import leading_nowhere, links
from tests.patience import LONG_PATIENCE, PATIENCE
from tests.run import ROOT

SERVICE = "tawebeval.service"
SOCKET = "tawebeval.socket"


@functools.cache
def package() -> Path:
    """Build the package; return its file."""
    done = subprocess.run(
        ["make", "deb"], cwd=ROOT, capture_output=True, text=True, timeout=LONG_PATIENCE
    )
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    (built,) = (ROOT / "build" / "deb").glob(f"tawebeval_{__version__}_*.deb")
    return built


class ChangelogTests(SynchronousTestCase):
    """What the package says of itself."""

    def test_version(self) -> None:
        """Its version is that of tawebeval."""
        first = (ROOT / "debian" / "changelog").read_text().splitlines()[0]
        found = re.fullmatch(r"tawebeval \((.*)\) unstable; urgency=medium", first)
        assert found is not None, first
        self.assertEqual(found[1], __version__)


class PolicyTests(SynchronousTestCase):
    """What Debian expects of packages, and what is not to become of that."""

    def test_documents(self) -> None:
        """No document is packed away from those that lead to it."""
        if missing():
            raise SkipTest(missing())
        folder = Path(self.mktemp())
        subprocess.run(["dpkg-deb", "--extract", package(), folder], check=True, timeout=PATIENCE)
        documents = folder / "usr" / "share" / "doc" / "tawebeval"
        self.assertGreater(len(list(links(documents))), 50)
        self.assertEqual(leading_nowhere(documents), [])

    def test_lintian(self) -> None:
        """Debian's own look at packages finds no error; what is overridden has a reason."""
        if missing() or shutil.which("lintian") is None:
            raise SkipTest("this needs root, and lintian (Debian package lintian)")
        done = subprocess.run(
            ["lintian", "--allow-root", "--no-cfg", "--fail-on=error,warning", package()],
            capture_output=True,
            text=True,
            timeout=LONG_PATIENCE,
        )
        self.assertEqual((done.stdout, done.returncode), ("", 0))


class PackageTests(SynchronousTestCase):
    """One machine, over the life of a package."""

    def setUp(self) -> None:
        if missing():
            raise SkipTest(missing())
        with tempfile.TemporaryDirectory(prefix="tawebeval-layer-") as layer:
            Path(layer).chmod(0o755)
            shutil.copyfile(package(), Path(layer) / "tawebeval.deb")
            self.machine = Machine(Path(layer))
        self.addCleanup(self.machine.stop)

    def install(self) -> None:
        """Install the package, or install it again, which is what an upgrade is."""
        self.machine.run("env", "DEBIAN_FRONTEND=noninteractive", "dpkg", "-i", "/tawebeval.deb")

    def show(self, what: str, unit: str = SERVICE) -> str:
        """Return a property of a unit."""
        return self.machine.run("systemctl", "show", "--value", "--property", what, unit)

    def test_life(self) -> None:
        """It serves when it is installed, and over upgrades; a purge leaves nothing."""
        self.install()
        for unit in (SOCKET, SERVICE):
            self.assertEqual(self.show("ActiveState", unit), "active")
            self.assertEqual(self.show("UnitFileState", unit), "enabled")
        self.assertEqual(self.machine.connection().ask("GET", "/health").answer()[0], 200)
        self.assertEqual(self.machine.run("tawebeval", "--version"), f"tawebeval {__version__}")
        shown = self.machine.run("cat", "/etc/tawebeval/first-token").split()
        (token,) = (word for word in shown if word.startswith("tawebeval_"))
        asked = self.machine.connection().ask(
            "GET", "/evaluations", Authorization=f"Bearer {token}"
        )
        self.assertEqual(asked.answer()[0], 200)
        for path in (
            "man/man1/tawebeval.1.gz",
            "bash-completion/completions/tawebeval",
            "zsh/vendor-completions/_tawebeval",
            "fish/vendor_completions.d/tawebeval.fish",
        ):
            self.machine.run("test", "-e", f"/usr/share/{path}")

        with self.subTest("an upgrade keeps what is the operator's, and the socket open"):
            self.machine.run("sh", "-c", "echo '# mine' >>/etc/tawebeval/tawebeval.toml")
            tokens = self.machine.run("cat", "/etc/tawebeval/tokens")
            daemon, opened = self.show("MainPID"), self.show("ActiveEnterTimestamp", SOCKET)
            self.install()
            wait_until(lambda: self.show("MainPID") not in ("0", daemon), "there is another one")
            wait_until(lambda: self.show("ActiveState") == "active", "it serves again")
            self.assertEqual(self.show("ActiveEnterTimestamp", SOCKET), opened)
            self.assertEqual(self.machine.run("cat", "/etc/tawebeval/tokens"), tokens)
            settings = self.machine.run("cat", "/etc/tawebeval/tawebeval.toml")
            self.assertTrue(settings.endswith("# mine"))

        with self.subTest("what is removed can come back"):
            self.machine.run("dpkg", "--remove", "tawebeval")
            self.assertEqual(self.show("ActiveState", SOCKET), "inactive")
            self.assertEqual(self.show("ActiveState"), "inactive")
            self.machine.run("test", "-e", "/etc/tawebeval/tokens")
            self.machine.run("test", "-e", "/var/lib/private/tawebeval/key")

        with self.subTest("what is purged cannot"):
            self.machine.run("dpkg", "--purge", "tawebeval")
            look = ("find", "/etc", "/usr", "/var", "-xdev", "-name", "*tawebeval*")
            self.assertEqual(self.machine.run(*look), "")
