"""The Debian package, as `make deb` builds it; `make test-machine` installs it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from benchmarks.booted import missing
from tawebeval import __version__
from tests.cases.links import leading_nowhere, links
from tests.cases.patience import LONG_PATIENCE, PATIENCE
from tests.run import ROOT


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
    def test_manual_completions_and_documents_are_in_their_places(self) -> None:
        if missing():
            raise SkipTest(missing())
        folder = Path(self.mktemp())
        subprocess.run(["dpkg-deb", "--extract", package(), folder], check=True, timeout=PATIENCE)
        share = folder / "usr" / "share"
        for path in (
            "man/man1/tawebeval.1.gz",
            "bash-completion/completions/tawebeval",
            "zsh/vendor-completions/_tawebeval",
            "fish/vendor_completions.d/tawebeval.fish",
        ):
            self.assertTrue((share / path).exists(), path)
        documents = share / "doc" / "tawebeval"
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
