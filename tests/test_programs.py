"""`tests/programs.py`: what is installed for tests, and what is skipped without it."""

from __future__ import annotations

import ast
import re

from twisted.trial.unittest import SynchronousTestCase

from tests import programs, run
from tests.machine import bare

DEBIAN = (
    "bash caddy chromium crun curl dash fakeroot fish g++ gcc git git-lfs jq lintian"
    " mmdebstrap perl podman zsh"
)
"""Packages of Debian that are called like their program."""

THINGS = {thing for use in programs.USES for thing in use.things.split()}.union(
    *(
        listed.split(",")
        for listed in re.findall(
            r"(?m)^[A-Z]+ := ((?:[^\s,]+,)+\S+)$", (run.ROOT / "Makefile").read_text()
        )
    )
)
"""Programs and libraries that are installed for tests, or by targets of the Makefile."""


class ProgramsTests(SynchronousTestCase):
    def test_modules_of_the_table_exist(self) -> None:
        modules = {name for part in run.parts() for name in part}
        for use in programs.USES:
            for module in use.modules.split():
                self.assertIn(module, {*modules, "tests", "tests.integration"})
        self.assertEqual(set(programs.FOR_ROOT.split()) - modules, set())
        quick = {f"tests.integration.test_{name}" for name in bare.QUICK}
        self.assertEqual(quick - modules, set(), "tests.machine.bare runs them")

    def test_bootstrap_knows_each_package(self) -> None:
        script = (run.ROOT / "scripts" / "bootstrap").read_text()
        (packages,) = re.findall(r"(?ms)^PACKAGES = (\{.*?^\})", script)
        self.assertIn("/usr/sbin/munged", THINGS)
        self.assertIn("qemu-system-x86_64", THINGS)
        self.assertEqual(THINGS - {*DEBIAN.split()} - {*ast.literal_eval(packages)}, set())
