"""`cli.saving`: files of strangers stay in their directory."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.saving import Folder
from tawebeval.client import File


def file(name: str, content: bytes = b"new") -> File:
    """Return a file."""
    return File(name, "text/plain", content)


class SavingTests(SynchronousTestCase):
    """A directory beside something that is not to be written to."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.root.mkdir()
        (self.root / "victim").write_bytes(b"old")
        self.folder = Folder(self.root / "made" / "here")

    def test_base_name(self) -> None:
        """Only the last component of a name counts, and nothing is written elsewhere."""
        for name in ("a.txt", "../../a.txt", "/etc/a.txt", "..\\a.txt"):
            path = Folder(self.folder.path).save(file(name))
            self.assertEqual(path, self.folder.path / "a.txt")
            self.assertEqual(path.read_bytes(), b"new")
            self.assertEqual([p.name for p in self.folder.path.iterdir()], ["a.txt"])
            path.unlink()
        self.assertEqual(sorted(p.name for p in self.root.iterdir()), ["made", "victim"])

    def test_no_name(self) -> None:
        """What is no name is refused."""
        for name in ("", ".", "..", "a/", "a\0b", "x" * 300):
            with self.assertRaises(ValueError):
                self.folder.save(file(name))

    def test_links(self) -> None:
        """A link is replaced, and what it leads to stays."""
        self.folder.path.mkdir(parents=True)
        (self.folder.path / "a.txt").symlink_to((self.root / "victim").resolve())
        path = self.folder.save(file("a.txt"))
        self.assertFalse(path.is_symlink())
        self.assertEqual(path.read_bytes(), b"new")
        self.assertEqual((self.root / "victim").read_bytes(), b"old")

    def test_replaced(self) -> None:
        """A file of an earlier evaluation makes room for one of the same name, whole."""
        Folder(self.folder.path).save(file("a.txt", b"long and old"))
        self.assertEqual(self.folder.save(file("a.txt", b"new")).read_bytes(), b"new")

    def test_same_name(self) -> None:
        """Of one evaluation no file is lost, whatever they are called; what failed has no name."""
        (self.folder.path / "a.txt").mkdir(parents=True)
        with self.assertRaises(OSError):
            self.folder.save(file("a.txt"))
        (self.folder.path / "a.txt").rmdir()
        names = ["a.txt", "a-2.txt", "a.txt", "b/a.txt", "a-2.txt", "Makefile", "Makefile"]
        saved = [self.folder.save(file(n, b"%d" % i)) for i, n in enumerate(names)]
        self.assertEqual(
            [path.name for path in saved],
            ["a.txt", "a-2.txt", "a-3.txt", "a-4.txt", "a-2-2.txt", "Makefile", "Makefile-2"],
        )
        self.assertEqual([int(path.read_bytes()) for path in saved], list(range(7)))

    def test_mode(self) -> None:
        """It is a file as others are, and no program."""
        path = self.folder.save(file("a.sh"))
        plain = self.root / "plain"
        plain.touch()
        self.assertEqual(path.stat().st_mode, plain.stat().st_mode)

    def test_failure(self) -> None:
        """Where it cannot be saved nothing of it is left."""
        (self.folder.path / "a").mkdir(parents=True)
        with self.assertRaises(OSError):
            self.folder.save(file("a"))
        self.assertEqual([p.name for p in self.folder.path.iterdir()], ["a"])
