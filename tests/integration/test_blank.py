"""`git.repository.create_repository`, compared with what git creates."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.git.repository import create_repository
from tests.integration.repositories import git


class BlankTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).resolve()
        self.folder.mkdir()
        self.path = self.folder / "blank.git"
        create_repository(self.path)

    def test_created_repository_equals_that_of_git(self) -> None:
        made = self.folder / "made.git"
        init = ("init", "--quiet", "--bare", "--template=", "--initial-branch=main")
        git(self.folder, *init, str(made))
        for path in made.rglob("*"):
            same = self.path / path.relative_to(made)
            self.assertEqual(same.is_dir(), path.is_dir(), same)
            if path.is_file():
                self.assertEqual(same.read_text(), path.read_text(), same)

    def test_existing_repository_is_left_alone(self) -> None:
        (self.path / "HEAD").write_text("mine")
        self.assertRaises(FileExistsError, create_repository, self.path)
        self.assertEqual((self.path / "HEAD").read_text(), "mine")
