"""`cli.checkout`: what a server would fetch of what is here."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.checkout import NoCheckout, look, without_user
from tests.integration.repositories import git


class CheckoutTests(SynchronousTestCase):
    """A clone of a repository."""

    def setUp(self) -> None:
        # Not below this checkout.
        root = Path(tempfile.mkdtemp(prefix="tawebeval-test-")).resolve()
        self.addCleanup(shutil.rmtree, root)
        self.upstream = root / "upstream"
        self.url = f"file://{self.upstream}"
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

    def test_no_work_tree(self) -> None:
        """Within a repository that nobody works in there is no checkout."""
        for folder in (self.clone / ".git", self.clone / ".git" / "refs", self.upstream):
            with self.assertRaises(NoCheckout) as caught:
                look(folder)
            self.assertIn("no git checkout", str(caught.exception))

    def test_given(self) -> None:
        """Nothing is said of what is not used, be it HEAD or origin."""
        self.change()
        (self.clone / "untracked").touch()
        self.assertEqual(look(self.clone, commit=self.commit).warnings, ())
        head = git(self.clone, "rev-parse", "HEAD")
        (warning,) = look(self.clone, commit=head).warnings
        self.assertIn("the commit is not pushed", warning)
        self.assertEqual(look(self.clone, commit="0" * 40).warnings, ())
        git(self.clone, "remote", "remove", "origin")
        found = look(self.clone, repository="https://example.org/a.git")
        self.assertEqual((found.repository, found.commit), ("https://example.org/a.git", head))
        (warning,) = found.warnings
        self.assertIn("not committed", warning)

    def test_damaged(self) -> None:
        """Where git cannot tell what is changed it may be something."""
        (self.clone / ".git" / "index").write_bytes(b"nonsense")
        (warning,) = look(self.clone).warnings
        self.assertIn("not committed", warning)

    def test_shown(self) -> None:
        """What is shown of a URL that is given names nobody."""
        for url, shown in (
            ("https://ghp_x@example.org/a.git", "https://example.org/a.git"),
            ("HTTPS://me:pa@ss@example.org/a@b", "HTTPS://example.org/a@b"),
            ("https://example.org/@/a.git", "https://example.org/@/a.git"),
            ("git@example.org:a.git", "git@example.org:a.git"),
        ):
            self.assertEqual(without_user(url), shown)

    def test_secret(self) -> None:
        """A password or a token in the URL goes nowhere, not even onto the screen."""
        for scheme, user in (
            ("https", "me:hunter2"),
            ("https", "hunter2"),
            ("HTTP", "hunter2"),
            ("ssh", "me:hunter2"),
        ):
            git(self.clone, "remote", "set-url", "origin", f"{scheme}://{user}@example.org/a.git")
            with self.assertRaises(NoCheckout) as caught:
                look(self.clone)
            self.assertIn("token", str(caught.exception))
            self.assertNotIn("hunter2", str(caught.exception))
        for url in ("ssh://git@example.org/a.git", "git@example.org:a.git"):
            git(self.clone, "remote", "set-url", "origin", url)
            self.assertEqual(look(self.clone).repository, url)
