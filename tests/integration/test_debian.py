"""The Debian package, as `make deb` builds it: installed, upgraded, removed, purged."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from benchmarks.booted import Machine, missing, wait_until
from tawebeval import __version__
from tests.cases.links import leading_nowhere, links
from tests.cases.patience import LONG_PATIENCE, PATIENCE
from tests.integration.service_case import GATE, WAIT, repository
from tests.run import ROOT

SERVICE = "tawebeval.service"
SOCKET = "tawebeval.socket"
STARTER = "tawebeval-starter.service"
STATE, CACHE = "/var/lib/tawebeval", "/var/cache/tawebeval"
WATCHES = Path("/proc/sys/fs/epoll/max_user_watches")


@functools.cache
def package() -> Path:
    """Build the package; return its file."""
    done = subprocess.run(
        ["make", "deb"],
        cwd=ROOT,
        env={**os.environ, "DPKG_DEB_COMPRESSOR_LEVEL": "0"},  # packing would take most of the time
        capture_output=True,
        text=True,
        timeout=LONG_PATIENCE,
    )
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    (built,) = (ROOT / "build" / "deb").glob(f"tawebeval_{__version__}_*.deb")
    return built


class ChangelogTests(SynchronousTestCase):
    def test_changelog_has_the_version(self) -> None:
        first = (ROOT / "debian" / "changelog").read_text().splitlines()[0]
        found = re.fullmatch(r"tawebeval \((.*)\) unstable; urgency=medium", first)
        assert found is not None, first
        self.assertEqual(found[1], __version__)


class PolicyTests(SynchronousTestCase):
    def test_no_document_links_to_a_missing_one(self) -> None:
        if missing():
            raise SkipTest(missing())
        folder = Path(self.mktemp())
        subprocess.run(["dpkg-deb", "--extract", package(), folder], check=True, timeout=PATIENCE)
        documents = folder / "usr" / "share" / "doc" / "tawebeval"
        self.assertGreater(len(list(links(documents))), 50)
        self.assertEqual(leading_nowhere(documents), [])

    def test_lintian_finds_no_error(self) -> None:
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
    def setUp(self) -> None:
        if missing():
            raise SkipTest(missing())
        with tempfile.TemporaryDirectory(prefix="tawebeval-layer-") as layer:
            Path(layer).chmod(0o755)
            shutil.copyfile(package(), Path(layer) / "tawebeval.deb")
            self.machine = Machine(Path(layer))
        self.addCleanup(self.machine.stop)
        # systemd is to move these, which no mount can be.
        for place in (STATE, CACHE):
            self.machine.run("umount", place)
            self.machine.run("rmdir", place)
        # dpkg would index the manual pages of the whole machine, seconds each time.
        self.machine.run("rm", "--force", "/var/lib/man-db/auto-update")
        # The package sets it for this machine, too: the kernel has no other one.
        self.addCleanup(WATCHES.write_text, WATCHES.read_text())

    def install(self) -> list[str]:
        """Install the package, or install it again, which is what an upgrade is.

        Returns what the package itself complains of.
        """
        done = self.machine.attempt(
            "env", "DEBIAN_FRONTEND=noninteractive", "dpkg", "-i", "/tawebeval.deb"
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return [line for line in done.stderr.splitlines() if line.startswith("tawebeval: ")]

    def show(self, what: str, unit: str = SERVICE) -> str:
        return self.machine.run("systemctl", "show", "--value", "--property", what, unit)

    def call(self, token: str, *words: str) -> str:
        """Return what a command of a caller prints."""
        return self.machine.run("env", f"TAWEBEVAL_TOKEN={token}", "tawebeval", *words)

    def begin(self, token: str) -> str:
        """Begin an evaluation, wait until it waits itself, and return its identifier."""
        problem, commit = repository()
        self.machine.copy(problem.folder, "/srv/problem")
        evaluator = ("--repository", "file:///srv/problem", "--commit", commit, "--directory", ".")
        command = f"echo ready; {GATE}; {WAIT}"
        self.machine.write("/srv/solution.txt", "42\n")
        identifier = self.call(
            *(token, "evaluate", "--detach", *evaluator, "--evaluator", command),
            "/srv/solution.txt",
        )
        wait_until(self.find_gate, "the evaluator runs")
        return identifier

    def find_gate(self) -> str:
        """Return the path of the pipe that the evaluator reads, "" if there is none."""
        return self.machine.run("find", f"{STATE}/evaluations", "-name", "go", "-type", "p")

    def find_files(self) -> set[str]:
        """Return the paths of files with the daemon's name, outside of homes."""
        look = ("find", "/etc", "/usr", "/var", "-xdev", "-name", "*tawebeval*")
        return set(self.machine.run(*look).splitlines())

    def test_package_serves_over_upgrades_and_a_purge_leaves_nothing(self) -> None:
        before = self.find_files()  # images of containers on this machine may have some
        self.assertEqual(self.install(), [])
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
        self.assertEqual(WATCHES.read_text(), "100000000\n")

        with self.subTest("an upgrade keeps evaluations, what is the operator's, and the socket"):
            change = 's/^protocols = .*/protocols = ["file"]/; $a # mine'
            self.machine.run("sed", "--in-place", change, "/etc/tawebeval/tawebeval.toml")
            self.machine.run("systemctl", "restart", SERVICE)
            identifier = self.begin(token)
            tokens = self.machine.run("cat", "/etc/tawebeval/tokens")
            daemon, opened = self.show("MainPID"), self.show("ActiveEnterTimestamp", SOCKET)
            self.assertEqual(self.install(), [])
            self.assertNotIn(self.show("MainPID"), ("0", daemon))
            self.assertEqual(self.show("ActiveState"), "active")
            self.assertEqual(self.show("ActiveEnterTimestamp", SOCKET), opened)
            self.assertEqual(self.machine.run("cat", "/etc/tawebeval/tokens"), tokens)
            settings = self.machine.run("cat", "/etc/tawebeval/tawebeval.toml")
            self.assertTrue(settings.endswith("# mine"))
            self.machine.run("sh", "-c", f"echo done >{self.find_gate()}")
            self.assertEqual(self.call(token, "follow", identifier), "ready\ndone")

        with self.subTest("what is removed can come back"):
            self.machine.run("dpkg", "--remove", "tawebeval")
            self.assertEqual(self.show("ActiveState", SOCKET), "inactive")
            self.assertEqual(self.show("ActiveState"), "inactive")
            self.machine.run("test", "-e", "/etc/tawebeval/tokens")
            self.machine.run("test", "-e", f"{STATE}/key")
            self.assertEqual(self.install(), [])

        with self.subTest("what is purged cannot"):
            self.machine.run("dpkg", "--purge", "tawebeval")
            self.assertEqual(self.find_files() - before, set())
            self.assertEqual(self.machine.attempt("getent", "passwd", "tawebeval").returncode, 2)

    def test_policy_to_start_nothing_is_obeyed(self) -> None:
        self.machine.write("/usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n")
        self.machine.run("chmod", "755", "/usr/sbin/policy-rc.d")
        self.assertEqual(self.install(), [])
        self.assertEqual(self.show("ActiveState"), "inactive")
