"""`tests.machine.bare`: what is run on a bare Debian, and what is installed there."""

from __future__ import annotations

import os

from twisted.trial.unittest import SynchronousTestCase

from tests.machine import bare
from tests.machine.roots import README_PACKAGES
from tests.run import ROOT


class BareTests(SynchronousTestCase):
    """The commands of README.md."""

    def test_modules_and_packages_exist(self) -> None:
        folder = ROOT / "tests" / "integration"
        missing = [name for name in bare.QUICK if not (folder / f"test_{name}.py").exists()]
        self.assertEqual(missing, [])
        self.assertLess({"bubblewrap", "curl", "make"}, {*README_PACKAGES.split()})

    def test_ordinary_user_is_refused(self) -> None:
        self.patch(os, "geteuid", lambda: 1000)
        self.assertIn("only root", bare.find_problem())
