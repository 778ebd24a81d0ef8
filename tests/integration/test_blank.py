"""`git.repository.create_repository`, compared with what git creates."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.git.repository import create_repository
from tests.integration.repositories import GitRepository, git


class BlankTests(SynchronousTestCase):
    """A repository that no git has made."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).resolve()
        self.folder.mkdir()
        self.path = self.folder / "blank.git"
        create_repository(self.path)

    def push(self, source: GitRepository) -> str:
        """Commit what is there, push the commit, and return its OID."""
        oid = source.commit()
        git(source.folder, "push", "--quiet", str(self.path), f"{oid}:refs/commits/{oid}")
        return oid

    def test_same(self) -> None:
        """It has what a repository of git's own has, and is configured as that is."""
        made = self.folder / "made.git"
        init = ("init", "--quiet", "--bare", "--template=", "--initial-branch=main")
        git(self.folder, *init, str(made))
        for path in made.rglob("*"):
            same = self.path / path.relative_to(made)
            self.assertEqual(same.is_dir(), path.is_dir(), same)
            if path.is_file():
                self.assertEqual(same.read_text(), path.read_text(), same)

    def test_used(self) -> None:
        """Git finds nothing wrong with it, and takes commits into it."""
        self.assertEqual(git(self.path, "rev-parse", "--is-bare-repository"), "true")
        oid = self.push(GitRepository(self.folder / "source"))
        self.assertEqual(git(self.path, "rev-parse", f"refs/commits/{oid}"), oid)
        git(self.path, "fsck", "--strict")

    def test_as_committed(self) -> None:
        """What is checked out of it is what was committed, whatever a tree's attributes say."""
        source = GitRepository(self.folder / "source")
        source.write(".gitattributes", "* text eol=crlf ident\n")
        source.write("file", "a\n$Id$\n")
        oid = self.push(source)
        tree = self.folder / "tree"
        tree.mkdir()
        where = (f"--git-dir={self.path}", f"--work-tree={tree}")
        git(self.path, *where, "read-tree", "--reset", "-u", oid)
        self.assertEqual((tree / "file").read_bytes(), b"a\n$Id$\n")

    def test_there_already(self) -> None:
        """What is there is left alone."""
        (self.path / "HEAD").write_text("mine")
        self.assertRaises(FileExistsError, create_repository, self.path)
        self.assertEqual((self.path / "HEAD").read_text(), "mine")
