"""`git.gitversion`: a daemon does not start with a git that it cannot rely on."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import ConfigurationError
from tawebeval.git import gitversion
from tawebeval.git.gitversion import check_git


class VersionTests(SynchronousTestCase):
    """A git that says what the test wants."""

    def play(self, script: str) -> None:
        """Have a script found in git's place."""
        folder = Path(self.mktemp()).absolute()
        folder.mkdir()
        git = folder / "git"
        git.write_text(f"#!/bin/sh\n{script}\n")
        git.chmod(0o755)
        self.patch(gitversion, "PATH", str(folder))

    def check_refused(self, words: str) -> None:
        """Hold that it is refused, with these words and the remedy."""
        error = self.assertRaises(ConfigurationError, check_git)
        self.assertIn(words, str(error))
        self.assertIn("install git 2.37", str(error))

    def test_this_machine(self) -> None:
        """The git that the tests use is good enough, wherever PATH leads."""
        self.patch(os, "environ", {"PATH": "/nonexistent"})
        self.assertTrue(check_git().startswith("git version 2."))

    def test_new_enough(self) -> None:
        """2.37 and whatever follows, however it is written."""
        for version in ("2.37.0", "2.37.0-rc1", "2.39.5 (Apple Git-154)", "2.100.1", "3.0"):
            self.play(f"echo 'git version {version}'")
            self.assertEqual(check_git(), f"git version {version}")

    def test_too_old(self) -> None:
        """2.36 and before."""
        for version in ("2.36.9", "2.9.0", "1.99"):
            self.play(f"echo 'git version {version}'")
            self.check_refused(f"git version {version} is too old")

    def test_something_else(self) -> None:
        """What calls itself git, and is another thing or broken."""
        self.play("echo hello")
        self.check_refused("'hello'")
        self.play("exit 3")
        self.check_refused("status 3")

    def test_missing(self) -> None:
        """No git at all."""
        self.patch(gitversion, "PATH", "/nonexistent")
        self.check_refused("there is no git")
