"""`sandbox.workspace`: directories, and paths that lead out of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.form import SubmissionFile
from tawebeval.errors import EvaluationFailure
from tawebeval.sandbox.workspace import FileRefused, Workspace


class WorkspaceTestCase(SynchronousTestCase):
    """A workspace that has been made, and a secret beside it."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.root.mkdir()
        upload = self.root / "upload"
        (upload / "submission" / "source").mkdir(parents=True)
        (upload / "submission" / "source" / "x.py").write_text("x")
        self.workspace = Workspace(self.root / "one")
        self.workspace.create_directories(
            upload, self.workspace.make_sandboxed_view(Path("/evaluation"))
        )
        self.checkout = Path(self.mktemp()).resolve() / "checkout"
        self.checkout.mkdir(parents=True)
        self.secret = self.root / "secret"
        self.secret.write_text("secret")


class DirectoryTests(WorkspaceTestCase):
    """Where things are."""

    def test_create(self) -> None:
        """The upload is taken over, and the other directories are there, empty."""
        self.assertEqual({p.name for p in self.root.iterdir()}, {"one", "secret"})
        path = self.workspace.locate_submitted_file(SubmissionFile("source", "x.py"))
        self.assertEqual(path.read_text(), "x")
        self.assertTrue(path.is_absolute())
        for directory in (
            self.workspace.tree_directory,
            self.workspace.temporary_directory,
            self.workspace.home_directory,
        ):
            self.assertEqual(list(directory.iterdir()), [])
        self.assertFalse(os.path.lexists(self.workspace.overlay_work_directory))

    def test_sandboxed_evaluator_sees_its_own_paths(self) -> None:
        view = self.workspace.make_sandboxed_view(Path("/evaluation"))
        file = self.workspace.locate_submitted_file(SubmissionFile("source", "x.py"))
        for path, seen in (
            (self.workspace.tree_directory / "a", "/evaluation/tree/a"),
            (self.workspace.temporary_directory, "/evaluation/tmp"),
            (file, "/evaluation/submission/source/x.py"),
        ):
            self.assertEqual(view.translate_path(path), Path(seen))
            self.assertEqual(self.workspace.make_unsandboxed_view().translate_path(path), path)

    def test_working_directory(self) -> None:
        """A directory of the tree, also by a link that stays within it."""
        (self.checkout / "a" / "b").mkdir(parents=True)
        (self.checkout / "link").symlink_to("a/b")
        for given, found in (("", ""), ("a", "a"), ("a/b", "a/b"), ("link", "a/b")):
            path = self.workspace.locate_working_directory(given, self.checkout)
            self.assertEqual(path, self.workspace.tree_directory / found)

    def test_no_working_directory(self) -> None:
        """What is missing, or a file, is no directory of the commit."""
        (self.checkout / "file").touch()
        (self.checkout / "loop").symlink_to("loop")
        for given in ("missing", "file", "file/x", "loop", "x" * 300):
            with self.assertRaises(EvaluationFailure) as caught:
                self.workspace.locate_working_directory(given, self.checkout)
            self.assertEqual(caught.exception.reason, "directory")

    def test_working_directory_outside(self) -> None:
        """No link leads out of the tree, not even to where the evaluator could write."""
        tree = self.checkout
        (tree / "up").symlink_to("..")
        (tree / "tmp").symlink_to(self.workspace.temporary_directory)
        (tree / "root").symlink_to("/")
        (tree / "twice").symlink_to("up")
        self.checkout.with_name("checkout2").mkdir()
        (tree / "sibling").symlink_to("../checkout2")
        for given in ("up", "tmp", "root", "root/etc", "twice", "up/home", "sibling", ".."):
            with self.assertRaises(EvaluationFailure) as caught:
                self.workspace.locate_working_directory(given, self.checkout)
            self.assertEqual(caught.exception.reason, "directory")
            self.assertIn("out of", caught.exception.message)


class ReadFileTests(WorkspaceTestCase):
    """Files that the evaluator names."""

    def read(self, path: str, limit: int = 100, opened: Mapping[Path, int] | None = None) -> bytes:
        """Read a file as an evaluator in the tree's directory `a` names it."""
        directory = self.workspace.tree_directory / "a"
        directory.mkdir(exist_ok=True)
        view = attrs.evolve(self.workspace.make_unsandboxed_view(), path_descriptors=opened or {})
        return self.workspace.read_file(path, directory, limit, view)

    def test_opened(self) -> None:
        """What is mounted for the evaluator alone is read by its descriptor, again and again."""
        mounted = Path(self.mktemp())
        (mounted / "a").mkdir(parents=True)
        (mounted / "a" / "file").write_text("mounted")
        (mounted / "out").symlink_to(self.secret)
        (self.workspace.tree_directory / "a").mkdir()
        (self.workspace.tree_directory / "a" / "file").write_text("beneath")
        (self.workspace.temporary_directory / "file").write_text("temporary")
        descriptor = os.open(mounted, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, descriptor)
        opened = {self.workspace.tree_directory: descriptor}
        for _ in range(2):
            self.assertEqual(self.read("file", opened=opened), b"mounted")
        self.assertEqual(self.read("../../tmp/file", opened=opened), b"temporary")
        for path in ("../out", "../../../secret", ".."):
            with self.assertRaises(FileRefused):
                self.read(path, opened=opened)

    def refuse(self, path: str, limit: int = 100) -> str:
        """Hold that a path is refused, and return with what words."""
        with self.assertRaises(FileRefused) as caught:
            self.read(path, limit)
        self.assertNotIn("secret content", str(caught.exception))
        return str(caught.exception)

    def test_read(self) -> None:
        """Files in its own writable directories, by any path that leads there."""
        for directory in (
            self.workspace.tree_directory,
            self.workspace.temporary_directory,
            self.workspace.home_directory,
        ):
            path = directory / "deep" / "er" / "file"
            path.parent.mkdir(parents=True)
            path.write_bytes(b"\0content\xff")
            self.assertEqual(self.read(str(path)), b"\0content\xff")
        for relative in ("../deep/er/file", "./../deep//er/./file", "../../tmp/deep/er/file"):
            self.assertEqual(self.read(relative), b"\0content\xff")

    def test_outside(self) -> None:
        """Nothing outside of them: neither absolute, nor by `..`, nor its own submission."""
        for path in (
            "/etc/passwd",
            str(self.secret),
            "../../../secret",
            "../../submission/source/x.py",
            "../../index",
            "../..",
            "/proc/self/environ",
            "/dev/zero",
            "//etc/passwd",
            str(self.workspace.tree_directory) + "2/x",
        ):
            self.assertIn("outside", self.refuse(path), path)

    def test_links(self) -> None:
        """No symbolic link, wherever it leads and wherever on the path it stands."""
        tree = self.workspace.tree_directory
        (tree / "real").mkdir()
        (tree / "real" / "file").write_text("x")
        (tree / "link").symlink_to("real")
        (tree / "file").symlink_to("real/file")
        (tree / "out").symlink_to(self.secret)
        (tree / "up").symlink_to("../..")
        (tree / "dangling").symlink_to("nowhere")
        for path in ("../link/file", "../file", "../out", "../up/secret", "../dangling"):
            self.refuse(path)
        self.assertEqual(self.read("../real/file"), b"x")

    def test_replaced_directories(self) -> None:
        """Not even where one of its own directories has become a link."""
        self.workspace.temporary_directory.rmdir()
        self.workspace.temporary_directory.symlink_to("/etc")
        self.refuse(str(self.workspace.temporary_directory / "passwd"))

    def test_no_regular_file(self) -> None:
        """Directories, pipes, sockets and devices are refused, and none of them is waited for."""
        os.mkfifo(self.workspace.tree_directory / "fifo")
        (self.workspace.tree_directory / "directory").mkdir()
        for path in ("../fifo", "../directory", "..", "."):
            self.refuse(path)
        self.refuse("../missing")
        self.refuse("../directory/missing/file")
        self.refuse("")

    def test_limit(self) -> None:
        """A file may be as large as the limit, and no larger."""
        for size in (100, 101):
            (self.workspace.temporary_directory / str(size)).write_bytes(b"x" * size)
        self.assertEqual(len(self.read("../../tmp/100")), 100)
        self.assertIn("over 100 bytes", self.refuse("../../tmp/101"))

    def test_endless(self) -> None:
        """One that grows for ever, or claims to be empty, is read to the limit and no further."""
        with open(self.workspace.temporary_directory / "sparse", "wb") as file:
            file.truncate(2**40)
        self.refuse("../../tmp/sparse")

    def test_parts(self) -> None:
        """A file that grows while it is read by parts is refused beyond the limit."""
        path = self.workspace.temporary_directory / "file"
        path.write_bytes(b"x" * 90)
        view = self.workspace.make_unsandboxed_view()
        parts = self.workspace.read_file_parts(str(path), Path("/"), 100, view, 40)
        self.assertEqual(next(parts), b"x" * 40)
        path.write_bytes(b"x" * 2**20)
        self.assertLess(len(next(parts) + next(parts)), 100)
        self.assertRaisesRegex(FileRefused, "over 100 bytes", next, parts)

    def test_odd_paths(self) -> None:
        """Paths that no file can have are refused; odd ones that some has are not."""
        for path in ("a\0b", "x" * 300, "x/" * 3000, "\udcff" * 200 + "x" * 100):
            self.refuse(path)
        name = "\udcff\n ü"
        (self.workspace.tree_directory / "a").mkdir(exist_ok=True)
        (self.workspace.tree_directory / "a" / name).write_text("odd")
        self.assertEqual(self.read(name), b"odd")

    def test_no_descriptor_left(self) -> None:
        """Whatever comes of it, no descriptor stays open."""
        (self.workspace.tree_directory / "file").write_text("x")
        before = os.listdir("/proc/self/fd")
        self.read("../file")
        for path in ("../file/x", "../missing", "..", "/etc/passwd"):
            self.refuse(path)
        self.refuse("../file", 0)
        self.assertEqual(os.listdir("/proc/self/fd"), before)
