"""`tests/programs.py`: what is installed for tests, and what is skipped without it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests import programs, run

DEBIAN = (
    "bash caddy chromium crun curl dash fakeroot firefox-esr fish g++ gcc git git-lfs jq lintian"
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
    """The programs of tests that are named."""

    def test_modules_of_the_table_exist(self) -> None:
        modules = {name for part in run.parts() for name in part}
        for use in programs.USES:
            for module in use.modules.split():
                self.assertIn(module, {*modules, "tests", "tests.integration"})
        self.assertEqual(set(programs.FOR_ROOT.split()) - modules, set())

    def test_modules_that_need_root_are_in_the_table(self) -> None:
        skips = re.compile(r"SkipTest\(.*(root|missing\(\))|import .*ServiceTestCase")
        paths = (run.ROOT / "tests").rglob("test_*.py")
        found = {
            ".".join(path.relative_to(run.ROOT).with_suffix("").parts)
            for path in paths
            if path.name != "test_programs.py" and skips.search(path.read_text())
        }
        self.assertEqual(found - set(programs.FOR_ROOT.split()), set())

    def test_modules_that_import_helpers_have_their_programs(self) -> None:
        for helper, program in (
            ("browser|browser_case", "chromium"),
            ("slurm_case", "/usr/sbin/slurmd"),
            ("proxies|proxy_case", "caddy"),
        ):
            imports = re.compile(rf"(?m)^from tests\.integration\.({helper}) import ")
            paths = (run.ROOT / "tests" / "integration").glob("test_*.py")
            found = {
                f"tests.integration.{path.stem}"
                for path in paths
                if imports.search(path.read_text())
            }
            listed = {
                module
                for use in programs.USES
                if program in use.things.split()
                for module in use.modules.split()
            }
            self.assertNotEqual(found, set())
            self.assertEqual(found - listed, set(), program)

    def test_named_tests_get_their_programs(self) -> None:
        for name in ("test_page.PageTests.test_x", "test_page.PageTests", "test_page"):
            found = list(programs.options([f"tests.integration.{name}"]))
            self.assertEqual(found[1:], ["--wants=chromium,chromedriver", "--npm=axe-core"])
        everything = list(programs.options([], optional=True))
        self.assertEqual(list(programs.options(["tests"])), everything)
        self.assertIn("--needs=git,libseccomp.so.2,/usr/bin/python3,bwrap,curl,xz", everything)

    def test_bootstrap_knows_each_package(self) -> None:
        script = (run.ROOT / "scripts" / "bootstrap").read_text()
        (packages,) = re.findall(r"(?ms)^PACKAGES = (\{.*?^\})", script)
        self.assertIn("/usr/sbin/munged", THINGS)
        self.assertIn("qemu-system-x86_64", THINGS)
        self.assertEqual(THINGS - {*DEBIAN.split()} - {*ast.literal_eval(packages)}, set())

    def test_programs_in_sbin_are_named_by_path(self) -> None:
        found = {thing for thing in THINGS if Path("/usr/sbin", thing).exists()}
        self.assertEqual({thing for thing in found if not Path("/usr/bin", thing).exists()}, set())
