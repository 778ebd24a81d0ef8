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
    def folders(self) -> tuple[Path, Path]:
        root = Path(self.mktemp())
        source, target = root / "source", root / "target"
        for folder in (source, target):
            folder.mkdir(parents=True)
        return source, target

    @given(TREES)
    def test_copy_has_the_same_names_bytes_modes_and_links(self, tree: dict[bytes, object]) -> None:
        source, target = self.folders()
        grow(tree, os.fsencode(source))
        copy_tree(source, target)
        self.assertEqual(look(target), look(source))

    def test_umask_does_not_change_the_modes_of_a_copy(self) -> None:
        source, target = self.folders()
        (source / "open").mkdir()
        (source / "open" / "program").write_text("x")
        for path in ("open", "open/program"):
            (source / path).chmod(0o777)
        self.addCleanup(os.umask, os.umask(0o077))
        copy_tree(source, target)
        self.assertEqual(look(target), look(source))

    def test_tree_may_be_deeper_than_recursion_and_paths(self) -> None:
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

    def test_memory_of_a_walk_is_bounded(self) -> None:
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
        source, target = self.folders()
        (source / "link").symlink_to("/usr")
        copy_tree(source, target)
        self.assertEqual(os.readlink(target / "link"), "/usr")
        self.assertEqual(len(look(source)), 1)

    def test_writing_to_a_copy_does_not_change_the_source(self) -> None:
        source, target = self.folders()
        (source / "file").write_text("as it was")
        copy_tree(source, target)
        (target / "file").write_text("changed")
        self.assertEqual((source / "file").read_text(), "as it was")

    def test_failed_copy_is_an_error_and_leaves_nothing_open(self) -> None:
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

    def test_other_kind_of_file_is_named(self) -> None:
        source, target = self.folders()
        os.mkfifo(source / "pipe")
        with self.assertRaises(OSError) as caught:
            copy_tree(source, target)
        self.assertIn("pipe", str(caught.exception))
