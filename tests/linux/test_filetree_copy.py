"""`linux.filetree`: copies that differ in nothing, of whatever tree."""

from __future__ import annotations

import errno
import os
import stat
import tracemalloc
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux import filetree as module
from tawebeval.linux.filetree import copy_tree, remove_tree, walk_tree

NAMES = st.binary(min_size=1, max_size=20).filter(
    lambda name: name not in (b".", b"..") and not set(name) & {0, 0x2F}
)
FILES = st.tuples(st.binary(max_size=300), st.sampled_from([0o644, 0o755, 0o400, 0o4711]))
LINKS = st.binary(min_size=1, max_size=50).filter(lambda target: 0 not in target)
TREES = st.recursive(
    st.dictionaries(NAMES, st.one_of(FILES, LINKS), max_size=4),
    lambda below: st.dictionaries(NAMES, st.one_of(FILES, LINKS, below), max_size=4),
    max_leaves=12,
)


def grow(tree: dict[bytes, object], folder: bytes) -> None:
    """Make a tree on the disk."""
    for name, what in tree.items():
        path = os.path.join(folder, name)
        if isinstance(what, dict):
            os.mkdir(path)
            grow(what, path)
        elif isinstance(what, bytes):
            os.symlink(what, path)
        else:
            assert isinstance(what, tuple)
            with open(path, "wb") as file:
                file.write(what[0])
            os.chmod(path, what[1])


def look(folder: Path) -> dict[str, tuple[int, object]]:
    """Return what is below a directory: kinds and modes, bytes, and where links lead."""
    top = os.open(folder, os.O_RDONLY)
    try:
        return {
            path: (
                status.st_mode,
                os.readlink(path, dir_fd=top)
                if stat.S_ISLNK(status.st_mode)
                else (folder / path).read_bytes()
                if stat.S_ISREG(status.st_mode)
                else None,
            )
            for path, status in walk_tree(top)
        }
    finally:
        os.close(top)


class CopyTests(SynchronousTestCase):
    """A tree and its copy."""

    def folders(self) -> tuple[Path, Path]:
        """Return two new directories."""
        root = Path(self.mktemp())
        source, target = root / "source", root / "target"
        for folder in (source, target):
            folder.mkdir(parents=True)
        return source, target

    @given(TREES)
    def test_any(self, tree: dict[bytes, object]) -> None:
        """Names, bytes, modes and links are the same, whatever they are."""
        source, target = self.folders()
        grow(tree, os.fsencode(source))
        copy_tree(source, target)
        self.assertEqual(look(target), look(source))

    def test_umask(self) -> None:
        """Modes do not depend on the daemon's umask, in either direction."""
        source, target = self.folders()
        (source / "open").mkdir()
        (source / "open" / "program").write_text("x")
        for path in ("open", "open/program"):
            (source / path).chmod(0o777)
        self.addCleanup(os.umask, os.umask(0o077))
        copy_tree(source, target)
        self.assertEqual(look(target), look(source))

    def test_deep(self) -> None:
        """A tree may be deeper than Python's recursion, and its paths as long as the kernel's."""
        source, target = self.folders()
        self.addCleanup(remove_tree, source.parent.resolve())  # trial could not
        top = os.open(source, os.O_RDONLY)
        self.addCleanup(os.close, top)
        path = "."
        for _ in range(1500):
            path += "/d"
            os.mkdir(path, dir_fd=top)
        os.close(os.open(f"{path}/file", os.O_CREAT | os.O_WRONLY, dir_fd=top))
        copy_tree(source, target)
        copied = os.open(target, os.O_RDONLY)
        self.addCleanup(os.close, copied)
        self.assertEqual(len(list(walk_tree(copied))), 1501)
        os.stat(f"{path}/file", dir_fd=copied)

    def test_walk_memory(self) -> None:
        """Memory does not grow with the directories of a tree, nor with the length of paths."""
        source, _ = self.folders()
        self.addCleanup(remove_tree, source.parent.resolve())  # trial could not
        top = os.open(source, os.O_RDONLY)
        self.addCleanup(os.close, top)
        self.patch(module, "_NAMES_IN_MEMORY", 10_000)
        above = "/".join(["d" * 255] * 14)
        os.makedirs(f"/proc/self/fd/{top}/{above}")
        expected = {f"./{above}/{number:0250}" for number in range(400)}
        for path in expected:
            os.mkdir(path, dir_fd=top)
        os.mkdir(f"./{above}/{1:0250}/last", dir_fd=top)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        count = sum(1 for _ in walk_tree(top))
        _, peak = tracemalloc.get_traced_memory()
        self.assertEqual(count, 14 + 400 + 1)
        self.assertLess(peak, 400_000)  # of 1.5 million bytes of paths
        self.patch(module, "_LARGE_FILES", "/missing")
        found = {path for path, _ in walk_tree(top) if path.startswith(f"./{above}/")}
        self.assertEqual(found, expected | {f"./{above}/{1:0250}/last"})

    def test_links_are_not_followed(self) -> None:
        """A link to a directory is a link, and nothing behind it is copied or counted."""
        source, target = self.folders()
        (source / "link").symlink_to("/usr")
        copy_tree(source, target)
        self.assertEqual(os.readlink(target / "link"), "/usr")
        self.assertEqual(len(look(source)), 1)

    def test_own_bytes(self) -> None:
        """What is written into a copy does not get into the source."""
        source, target = self.folders()
        (source / "file").write_text("as it was")
        copy_tree(source, target)
        (target / "file").write_text("changed")
        self.assertEqual((source / "file").read_text(), "as it was")

    def test_failure(self) -> None:
        """Any other failure is one, such as a full disk; nothing stays open."""
        source, target = self.folders()
        (source / "file").write_text("x")

        def refuse(*_: object) -> int:
            raise OSError(errno.ENOSPC, "full")

        self.patch(os, "sendfile", refuse)
        before = os.listdir("/proc/self/fd")
        with self.assertRaises(OSError) as caught:
            copy_tree(source, target)
        self.assertEqual(caught.exception.errno, errno.ENOSPC)
        self.assertEqual(caught.exception.filename, str(target))
        self.assertEqual(os.listdir("/proc/self/fd"), before)

    def test_another_kind(self) -> None:
        """Nothing else can be in a tree; if it is, it is named."""
        source, target = self.folders()
        os.mkfifo(source / "pipe")
        with self.assertRaises(OSError) as caught:
            copy_tree(source, target)
        self.assertIn("pipe", str(caught.exception))
