"""`tawebeval.cli.checkout`: what a server would fetch of what is here."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.checkout import NoCheckout, look
from tests.integration.repositories import git


class CheckoutTests(SynchronousTestCase):
    """A clone of a repository."""

    def setUp(self) -> None:
        # Not below this checkout.
        root = Path(tempfile.mkdtemp(prefix="tawebeval-test-")).resolve()
        self.addCleanup(shutil.rmtree, root)
        self.url = f"file://{root}/upstream"
        git(root, "init", "--quiet", "--bare", "upstream")
        git(root, "clone", "--quiet", self.url, "clone")
        self.clone = root / "clone"
        (self.clone / "word_count").mkdir()
        (self.clone / "word_count" / "evaluator.sh").write_text("true\n")
        self.change()
        git(self.clone, "push", "--quiet", "origin", "HEAD:main")
        self.commit = git(self.clone, "rev-parse", "HEAD")

    def change(self) -> None:
        """Commit something in the clone."""
        git(self.clone, "add", ".")
        git(self.clone, "commit", "--quiet", "--allow-empty", "-m", "new")

    def test_clean(self) -> None:
        """origin, HEAD and the directory; nothing to warn of."""
        found = look(self.clone / "word_count")
        self.assertEqual(found.repository, self.url)
        self.assertEqual(found.commit, self.commit)
        self.assertEqual(found.directory, "word_count")
        self.assertEqual(found.warnings, ())
        self.assertEqual(look(self.clone).directory, "")

    def test_not_pushed(self) -> None:
        """A commit that origin does not have is warned of until it has it."""
        self.change()
        (warning,) = look(self.clone).warnings
        self.assertIn("not pushed", warning)
        git(self.clone, "push", "--quiet", "origin", "HEAD:other")
        self.assertEqual(look(self.clone).warnings, ())

    def test_dirty(self) -> None:
        """So are changes that are not committed, also new files."""
        for name in ("word_count/evaluator.sh", "untracked"):
            (self.clone / name).write_text("false\n")
            (warning,) = look(self.clone).warnings
            self.assertIn("not committed", warning)
            git(self.clone, "clean", "--quiet", "--force")
            git(self.clone, "checkout", "--quiet", ".")

    def test_none(self) -> None:
        """Where there is nothing to fetch it is said what to do."""
        for prepare, words in (
            (lambda: git(self.clone, "remote", "remove", "origin"), "--repository"),
            (lambda: git(self.clone, "update-ref", "-d", "HEAD"), "nothing is committed"),
            (lambda: (self.clone / ".git" / "HEAD").unlink(), "no git checkout"),
        ):
            prepare()
            with self.assertRaises(NoCheckout) as caught:
                look(self.clone)
            self.assertIn(words, str(caught.exception))

    def test_password(self) -> None:
        """A password in the URL goes nowhere, not even onto the screen."""
        git(self.clone, "remote", "set-url", "origin", "https://me:hunter2@example.org/a.git")
        with self.assertRaises(NoCheckout) as caught:
            look(self.clone)
        self.assertIn("password", str(caught.exception))
        self.assertNotIn("hunter2", str(caught.exception))
        for url in ("ssh://git@example.org/a.git", "git@example.org:a.git"):
            git(self.clone, "remote", "set-url", "origin", url)
            self.assertEqual(look(self.clone).repository, url)
