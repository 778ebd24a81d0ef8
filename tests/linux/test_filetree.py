"""`linux.filetree`: copies that differ in nothing, and removals, of whatever tree; disk errors."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import tracemalloc
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux import filetree as module
from tawebeval.linux.filetree import (
    add_path_to_errors,
    copy_tree,
    describe_disk_error,
    is_disk_full_error,
    measure_tree,
    mentions_disk_full,
    remove_tree,
    walk_tree,
)

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
        source.chmod(0o555)
        target.chmod(0o700)
        copy_tree(source, target)
        self.assertEqual(look(target), look(source))
        self.assertEqual(stat.S_IMODE(target.stat().st_mode), 0o700)

    def test_copy_handles_trees_deeper_than_recursion_and_path_limits(self) -> None:
        source, target = self.folders()
        self.addCleanup(remove_tree, source.parent.resolve())  # trial could not
        top = os.open(source, os.O_RDONLY)
        self.addCleanup(os.close, top)
        path = "."
        for _ in range(1100):
            path += "/d"
            os.mkdir(path, dir_fd=top)
        os.close(os.open(f"{path}/file", os.O_CREAT | os.O_WRONLY, dir_fd=top))
        copy_tree(source, target)
        copied = os.open(target, os.O_RDONLY)
        self.addCleanup(os.close, copied)
        self.assertEqual(len(list(walk_tree(copied))), 1101)
        os.stat(f"{path}/file", dir_fd=copied)

    def test_measure_tree_counts_files_and_fails_on_an_unreadable_path(self) -> None:
        source, _ = self.folders()
        self.addCleanup(remove_tree, source.parent.resolve())  # trial could not
        (source / "directory").mkdir()
        (source / "directory" / "file").write_text("x" * 9)
        (source / "link").symlink_to("gone")
        counted = list[tuple[int, int]]()
        found = measure_tree(source, lambda files, size: counted.append((files, size)))
        self.assertEqual((found, counted[-1], len(counted)), ((3, 9), (3, 9), 3))
        for path, mode in (("directory/file", 0o200), ("directory", 0o600), (".", 0o300)):
            (source / path).chmod(mode)
            error = self.assertRaises(
                PermissionError, measure_tree, source, lambda files, size: None
            )
            self.assertEqual(error.errno, errno.EACCES)
            (source / path).chmod(0o700)
        (source / "/".join(["d" * 255] * 14)).mkdir(parents=True)
        error = self.assertRaises(OSError, measure_tree, source, lambda files, size: None)
        self.assertEqual(error.errno, errno.ENAMETOOLONG)

    def test_walk_of_deep_directories_takes_less_memory_than_the_paths(self) -> None:
        source, _ = self.folders()
        self.addCleanup(remove_tree, source.parent.resolve())  # trial could not
        top = os.open(source, os.O_RDONLY)
        self.addCleanup(os.close, top)
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
        found = {path for path, _ in walk_tree(top) if path.startswith(f"./{above}/")}
        self.assertEqual(found, expected | {f"./{above}/{1:0250}/last"})

    def test_copy_has_the_times_of_the_source_except_the_top_directory(self) -> None:
        source, target = self.folders()
        (source / "directory").mkdir()
        (source / "directory" / "program").write_text("x")
        (source / "directory" / "link").symlink_to("gone")
        paths = ("directory/program", "directory/link", "directory", ".")
        for number, path in enumerate(paths, 1):
            times = (0, number * 1_000_000_001)
            os.utime(source / path, ns=times, follow_symlinks=False)
        copy_tree(source, target)
        found = [(target / path).lstat().st_mtime_ns for path in paths]
        self.assertEqual(found[:-1], [1_000_000_001, 2_000_000_002, 3_000_000_003])
        self.assertGreater(found[-1], 10**18)

    def test_writing_to_a_copy_does_not_change_the_source(self) -> None:
        source, target = self.folders()
        (source / "file").write_text("as it was")
        copy_tree(source, target)
        (target / "file").write_text("changed")
        self.assertEqual((source / "file").read_text(), "as it was")

    def test_failed_or_killed_copy_is_an_error_and_leaves_nothing_open(self) -> None:
        source, target = self.folders()
        (source / "file").write_text("x")
        program = Path(_write_program(self.mktemp(), "No space left on device"))
        self.patch(module, "_CP", str(program))
        before = os.listdir("/proc/self/fd")
        for number, words in ((errno.ENOSPC, "No space left"), (errno.EIO, "exit status -9")):
            error = self.assertRaises(OSError, copy_tree, source, target)
            self.assertEqual((error.errno, error.filename), (number, str(target)))
            self.assertIn(words, str(error))
            program.write_text("#!/bin/sh\nkill -9 $$\n")
        self.assertEqual(os.listdir("/proc/self/fd"), before)

    def test_copy_into_a_subdirectory_does_not_follow_links(self) -> None:
        source, target = self.folders()
        (source / "file").write_text("x")
        (target / "a" / "b").mkdir(parents=True)
        copy_tree(source, target, "a/b")
        self.assertEqual((target / "a" / "b" / "file").read_text(), "x")
        (target / "link").symlink_to("a")
        self.assertRaises(OSError, copy_tree, source, target, "link/b")


class RemoveTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.tree = self.root / "one" / "tree"
        self.tree.mkdir(parents=True)
        (self.tree.parent / "file").write_text("x")
        self.secret = self.root / "secret"
        self.secret.write_text("secret")

    def assert_removed(self) -> None:
        remove_tree(self.tree.parent)
        self.assertEqual([p.name for p in self.root.iterdir()], ["secret"])
        self.assertEqual(self.secret.read_text(), "secret")

    def test_links_are_not_followed(self) -> None:
        (self.tree / "out").symlink_to(self.root)
        (self.tree / "file").symlink_to(self.secret)
        os.link(self.secret, self.tree / "hard")
        self.assert_removed()

    def test_directories_without_permissions_are_removed(self) -> None:
        for name in ("a", "b"):
            deep = self.tree / name / "deep"
            deep.mkdir(parents=True)
            (deep / "file").touch()
            deep.chmod(0)
            deep.parent.chmod(0)
        self.tree.chmod(0o500)
        self.remove_as_nobody()
        self.assert_removed()

    def remove_as_nobody(self) -> None:
        """As another user than root, for whom modes mean something, try it, too."""
        if os.geteuid() != 0:
            return
        copy = Path(self.mktemp()).resolve()
        subprocess.run(["cp", "-a", self.tree.parent, copy], check=True)
        subprocess.run(["chown", "-R", "nobody", copy], check=True)
        (copy.parent).chmod(0o777)
        for parent in copy.parents:
            if not os.access(parent, os.X_OK) or not parent.stat().st_mode & 1:
                return  # nobody does not get there
        child = os.fork()
        if not child:
            try:
                os.setgid(65534)
                os.setuid(65534)
                remove_tree(copy)
            finally:
                os._exit(os.path.lexists(copy))
        _, status = os.waitpid(child, 0)
        self.assertEqual(os.waitstatus_to_exitcode(status), 0)

    def test_very_deep_directories_are_removed(self) -> None:
        self.dig(1100)
        self.assert_removed()

    def dig(self, levels: int) -> None:
        here = os.open(self.tree, os.O_DIRECTORY)
        for _ in range(levels):
            os.mkdir("dddd", dir_fd=here)
            below = os.open("dddd", os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)

    def test_failed_removal_names_the_directory_and_the_message_of_rm(self) -> None:
        self.dig(100)
        for name in ("rm", "chmod"):
            program = _write_program(self.mktemp(), f"{name}: No way")
            self.patch(module, f"_{name.upper()}", program)
        error = self.assertRaises(OSError, remove_tree, self.tree.parent)
        self.assertEqual(error.filename, str(self.tree.parent))
        self.assertEqual(error.strerror, "rm: No way")

    def test_few_entries_are_removed_without_running_rm(self) -> None:
        self.dig(3)
        closed = self.tree.parent / "closed"
        closed.mkdir()
        closed.chmod(0)
        self.patch(module, "_RM", "/nonexistent")
        remove_tree(self.tree.parent)
        self.assert_removed()

    def test_many_directories_with_few_entries_each_are_removed(self) -> None:
        for number in range(100):
            (self.tree / str(number)).mkdir()
            (self.tree / str(number) / "file").touch()
        self.assert_removed()
        self.assert_removed()  # without error

    def test_files_with_names_like_options_or_not_in_utf_8_are_removed(self) -> None:
        for name in (b"-rf", b"--", b"\xff\n", b" "):
            os.mkdir(os.fsencode(self.tree) + b"/" + name)
        odd = self.root / "-x"
        odd.mkdir()
        odd.chmod(0)
        remove_tree(odd)
        self.assert_removed()

    def test_file_link_and_fifo_are_removed(self) -> None:
        path = self.root / "file"
        path.touch()
        remove_tree(path)
        path.symlink_to(self.secret)
        remove_tree(path)
        os.mkfifo(path)
        remove_tree(path)
        self.assertFalse(os.path.lexists(path))
        self.assertEqual(self.secret.read_text(), "secret")


def _write_program(path: str, words: str) -> str:
    """Write a program that says many lines, of which `words` is the first; return its path."""
    program = Path(path).absolute()
    program.write_text(
        f"#!/bin/sh\necho '{words}' >&2\n"
        "i=0; while [ $i -lt 9999 ]; do echo more and more >&2; i=$((i+1)); done\n"
    )
    program.chmod(0o755)
    return str(program)


PATH = Path("/state/file")


class DiskFaultsTests(SynchronousTestCase):
    def raised(self, *arguments: object) -> OSError:
        """Return such an error as it comes out of a write to the path."""
        error = OSError(*arguments)
        with self.assertRaises(OSError) as caught, add_path_to_errors(PATH):
            raise error
        self.assertIs(caught.exception, error)
        return error

    def test_os_error_without_a_path_gets_the_given_path(self) -> None:
        named = self.raised(errno.EIO, "Input/output error")
        self.assertEqual((named.errno, named.filename), (errno.EIO, str(PATH)))
        self.assertEqual(self.raised(errno.EACCES, "no", "/other").filename, "/other")
        with self.assertRaises(OSError) as caught, add_path_to_errors(PATH):
            Path("/dev/full").write_bytes(b"x")
        self.assertEqual(caught.exception.filename, str(PATH))
        with add_path_to_errors(PATH):
            pass

    def test_exceeded_quota_counts_as_full_disk(self) -> None:
        for number, full in ((errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EROFS, False)):
            said = os.strerror(number)
            error = self.raised(number, said)
            self.assertEqual(
                (is_disk_full_error(error), mentions_disk_full(f"sh: {said}!")), (full, full)
            )
            remedy = "; free some disk space" if full else ""
            self.assertEqual(describe_disk_error(error), f"{PATH}: {said}{remedy}")
