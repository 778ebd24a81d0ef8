"""`sandbox.disk`: what is counted of a run's files, and when."""

from __future__ import annotations

import errno
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.filetree import open_listable_directory
from tawebeval.sandbox import disk as module
from tawebeval.sandbox.disk import DiskMeter, DiskUsage
from tests.fakes.children import NO_PROCESS

BLOCK = 4096
CLONE_FILES = 0x400
FAR = 100
"""How many levels of directories are counted."""


def measure_disk_usage(
    directory: Path,
    pids: Sequence[int] = (),
    excluded: Collection[str] = (),
    since: float = 0.0,
    most: tuple[float, float] = (math.inf, math.inf),
) -> DiskUsage:
    """Return the first count of a meter."""
    meter = DiskMeter(directory, *most, lambda: pids, excluded, since)
    return meter.measure_usage()


class DiskTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        root = Path(tempfile.mkdtemp(prefix="tawebeval-test-")).resolve()
        self.addCleanup(shutil.rmtree, root)
        self.top = root / "top"
        self.beside = root / "beside"
        self.top.mkdir()
        self.beside.mkdir()

    def write(self, path: Path, blocks: int) -> int:
        with open(path, "wb") as file:
            file.write(os.urandom(blocks * BLOCK))
            file.flush()
            os.fsync(file.fileno())
        return os.stat(path).st_blocks * 512

    def start(self, script: str) -> int:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"{script}; echo; read x"], cwd=self.top, stdin=pipe, stdout=pipe
        )
        self.addCleanup(process.communicate)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    def count(self, *pids: int) -> DiskUsage:
        return measure_disk_usage(self.top, pids)


class CountTests(DiskTestCase):
    def test_files_and_directories_are_counted_and_the_largest_is_measured(self) -> None:
        (self.top / "a/b").mkdir(parents=True)
        size = self.write(self.top / "one", 3) + self.write(self.top / "a/b/two", 5)
        size += sum((self.top / name).stat().st_blocks * 512 for name in ("a", "a/b"))
        self.assertEqual(
            self.count(), DiskUsage(disk_bytes=size, file_count=4, largest_file_bytes=5 * BLOCK)
        )
        self.assertEqual(self.count().inspected_entry_count, 4 + 2, "directories count twice")
        self.assertGreaterEqual(size, 8 * BLOCK)

    def test_excluded_names_are_left_out_only_at_the_top_level(self) -> None:
        for name in ("submission", "tree/submission"):
            (self.top / name).mkdir(parents=True)
            self.write(self.top / name / "file", 2)
        self.assertEqual(measure_disk_usage(self.top, (), {"submission"}).file_count, 3)

    def test_largest_file_size_ignores_files_unchanged_by_the_run(self) -> None:
        size = self.write(self.top / "one", 4)
        later = (self.top / "one").stat().st_ctime + 0.001
        use = measure_disk_usage(self.top, (), since=later)
        self.assertEqual((use.disk_bytes, use.largest_file_bytes), (size, 0))
        self.assertEqual(
            measure_disk_usage(self.top, (), since=later - 0.001).largest_file_bytes, 4 * BLOCK
        )

    def test_bytes_of_a_hard_linked_file_count_once(self) -> None:
        (self.top / "sub").mkdir()
        size = self.write(self.top / "one", 4) + (self.top / "sub").stat().st_blocks * 512
        for path in (self.top / "two", self.top / "sub/three", self.beside / "four"):
            path.hardlink_to(self.top / "one")
        self.assertEqual(
            self.count(), DiskUsage(disk_bytes=size, file_count=4, largest_file_bytes=4 * BLOCK)
        )

    def test_sparse_file_counts_with_its_allocated_blocks(self) -> None:
        with open(self.top / "holes", "wb") as file:
            file.truncate(2**30)
        use = self.count()
        self.assertLess(use.disk_bytes, 2**20)
        self.assertEqual((use.file_count, use.largest_file_bytes), (1, 2**30))

    def test_symbolic_links_are_not_followed(self) -> None:
        self.write(self.beside / "big", 50)
        for name, target in (
            ("out", self.beside),
            ("file", self.beside / "big"),
            ("circle", self.top),
            ("nowhere", Path("/nonexistent")),
        ):
            (self.top / name).symlink_to(target)
        use = self.count()
        self.assertLess(use.disk_bytes, 50 * BLOCK)
        self.assertLess(use.largest_file_bytes, BLOCK)
        self.assertEqual(use.file_count, 4)

    def test_missing_directory_is_an_error(self) -> None:
        self.top.rmdir()
        self.assertRaises(OSError, self.count)


class CountBoundTests(DiskTestCase):
    def test_each_thread_and_descriptor_counts_as_one_inspection(self) -> None:
        pid = self.start("exec 5</dev/null 7>&1")
        self.assertEqual(self.count(pid).inspected_entry_count, 1 + 3 + 2)

    def test_count_stops_at_the_first_entry_over_its_byte_or_file_limit(self) -> None:
        for number in range(50):
            self.write(self.top / str(number), 1)
        use = measure_disk_usage(self.top, [NO_PROCESS], most=(10 * BLOCK, 100))
        self.assertEqual((use.inspected_entry_count, use.disk_bytes), (11, 11 * BLOCK))
        use = measure_disk_usage(self.top, [NO_PROCESS], most=(100 * BLOCK, 20))
        self.assertEqual((use.inspected_entry_count, use.file_count), (21, 21))
        self.assertEqual(measure_disk_usage(self.top, (), most=(50 * BLOCK, 50)).file_count, 50)


class DepthTests(DiskTestCase):
    def dig(self, levels: int) -> int:
        place = os.open(self.top, os.O_RDONLY)
        for _ in range(levels):
            os.mkdir("d", dir_fd=place)
            place, above = os.open("d", os.O_RDONLY, dir_fd=place), place
            os.close(above)
        self.addCleanup(os.close, place)
        return place

    def test_deep_directories_are_counted(self) -> None:
        last = self.dig(FAR)
        with open(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=last), "wb") as file:
            file.write(b"x" * 70_000)
        os.symlink("/", "link", dir_fd=last)
        use = self.count()
        self.assertEqual((use.file_count, use.largest_file_bytes), (FAR + 2, 70_000))
        self.assertFalse(use.has_uncounted_deep_directories)

    def test_lack_of_descriptors_fails_the_count(self) -> None:
        self.dig(3)
        for error in (errno.EMFILE, errno.ENFILE):
            for name, place in (
                ("open_listable_directory", module),
                ("stat", os),
                ("listdir", os),
                ("scandir", os),
            ):
                with self.subTest(name=name):
                    patched = self.patch(place, name, self.failing(error, getattr(place, name)))
                    try:
                        with self.assertRaises(OSError) as caught:
                            self.count(os.getpid())
                        self.assertEqual(caught.exception.errno, error)
                    finally:
                        patched.restore()

    def failing(self, error: int, call: Any) -> Any:
        """Return a call that fails so within /proc, and where a directory is opened."""

        def failed(path: Any, *args: Any, **how: Any) -> Any:
            if args or str(path).startswith("/proc"):
                raise OSError(error, os.strerror(error))
            return call(path, *args, **how)

        return failed


class RaceTests(DiskTestCase):
    def test_replaced_directories_are_not_entered(self) -> None:
        self.write(self.beside / "big", 50)
        opened, sub = open_listable_directory, self.top / "sub"
        for number, make in enumerate(
            (partial(sub.symlink_to, self.beside), partial(os.mkfifo, sub), lambda: None)
        ):

            def racing(entry: str, parent: int, make: Any = make) -> int:
                if entry == "sub":
                    sub.rmdir()
                    make()
                return opened(entry, parent)

            self.patch(module, "open_listable_directory", racing)
            sub.unlink(missing_ok=True)
            sub.mkdir()
            (self.top / f"other{number}").mkdir()
            (self.top / f"other{number}" / "file").touch()
            before = os.listdir("/proc/self/fd")
            self.assertEqual(self.count().file_count, 1 + 2 * (number + 1))
            self.assertEqual(os.listdir("/proc/self/fd"), before)


class PermissionTests(DiskTestCase):
    def test_directories_of_other_users_are_left_out(self) -> None:
        def chmod(path: str, mode: int) -> None:
            raise PermissionError(1, "Operation not permitted", path)

        (self.top / "own").mkdir()
        (self.top / "own/file").touch()
        (self.top / "others").mkdir(mode=0)
        self.addCleanup((self.top / "others").chmod, 0o700)
        self.patch(os, "chmod", chmod)
        before = os.listdir("/proc/self/fd")
        self.assertEqual(self.count().file_count, 3)
        self.assertEqual(os.listdir("/proc/self/fd"), before)


class UnlinkedFileTests(DiskTestCase):
    def test_descriptor_tables_of_threads_are_counted(self) -> None:
        program = f"""
import ctypes, os, sys, threading
def hold():
    ctypes.CDLL(None).unshare({CLONE_FILES})
    file = open("file", "wb", buffering=0)
    file.write(bytes(102400))
    os.unlink("file")
    print(flush=True)
    sys.stdin.readline()
    os._exit(0)
threading.Thread(target=hold).start()
"""
        pid = self.start(f"exec {shlex.quote(sys.executable)} -c '{program}'")
        self.assertGreaterEqual(self.count(pid).disk_bytes, 102400)

    def test_unlinked_file_open_on_two_descriptors_counts_once(self) -> None:
        pid = self.start("exec 3>file 4>>file; rm file; head -c 102400 /dev/zero >&3")
        use = self.count(pid, pid)
        self.assertGreaterEqual(use.disk_bytes, 102400)
        self.assertLess(use.disk_bytes, 2 * 102400)

    def test_open_file_with_a_name_counts_once(self) -> None:
        pid = self.start("exec 3>file")
        self.assertEqual(self.count(pid).file_count, 1)

    def start_with_file_in_memory(self) -> int:
        """Start a process with an unlinked file on another device."""
        program = """
import os, sys
os.write(os.memfd_create("memory"), bytes(102400))
print(flush=True)
sys.stdin.readline()
"""
        return self.start(f"exec {shlex.quote(sys.executable)} -c '{program}'")

    def test_open_files_on_other_devices_do_not_count(self) -> None:
        pid = self.start_with_file_in_memory()
        self.assertEqual(self.count(pid), DiskUsage())

    def test_overlay_is_recognized_though_the_number_of_inodes_changes(self) -> None:
        files = count()  # as XFS that is nearly full: inodes that fit into the free blocks
        self.patch(
            os,
            "statvfs",
            lambda path: SimpleNamespace(
                f_frsize=BLOCK,
                f_blocks=100_000,
                f_files=next(files),
                f_bavail=1,
                f_bfree=1,
                f_ffree=1,
            ),
        )
        pid = self.start_with_file_in_memory()
        self.assertGreaterEqual(self.count(pid).disk_bytes, 102400)

    def test_ended_process_has_nothing_open(self) -> None:
        pid = self.start("exec 3>file; rm file")
        self.assertEqual(self.count(NO_PROCESS, pid).file_count, 1)


class WatchTests(SynchronousTestCase):
    """When a new count is made. The disk may take 1000 bytes and 100 files more than it has."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.blocks, self.files = 10_000, 5_000
        self.asked: list[object] = []
        self.count = 0
        self.use = DiskUsage(disk_bytes=200, file_count=20)
        self.patch(os, "statvfs", self.statvfs)
        self.patch(DiskMeter, "_count", lambda meter: self.measure())
        self.watch = DiskMeter(Path("/some"), 1200, 120, lambda: [31], time=self.clock.seconds)

    def statvfs(self, path: object) -> Any:
        """Return what the file system says, whose blocks have two bytes."""
        self.asked.append(path)
        return SimpleNamespace(
            f_blocks=100_000,
            f_bfree=self.blocks,
            f_bavail=self.blocks - 1000,  # the rest is for root
            f_frsize=2,
            f_bsize=9999,
            f_ffree=self.files,
            f_favail=0,
        )

    def measure(self) -> DiskUsage:
        self.count += 1
        return self.use

    def look(self, *, counts: int, again: bool = False) -> None:
        before = self.count
        found = self.watch.measure_usage(again)
        self.assertEqual(self.count - before, counts)
        self.assertIs(found, self.use)

    def test_count_is_kept_while_the_file_system_does_not_fill_up(self) -> None:
        self.look(counts=1)
        self.assertEqual(self.asked, [Path("/some")])
        self.look(counts=0)
        self.blocks += 5000
        self.files += 5000
        self.look(counts=0)

    def test_count_is_repeated_after_ten_seconds(self) -> None:
        self.clock.advance(1000)
        self.look(counts=1)
        for _ in range(2):
            self.clock.advance(10)
            self.look(counts=0)
            self.clock.advance(0.001)
            self.look(counts=1)
            self.look(counts=0)

    def test_count_is_repeated_when_over_half_of_the_remaining_limit_is_used(self) -> None:
        self.look(counts=1)
        for name, half in (("blocks", 250), ("files", 50)):
            setattr(self, name, getattr(self, name) - half)
            self.look(counts=0)
            setattr(self, name, getattr(self, name) - 1)
            self.look(counts=1)
            self.look(counts=0)

    def test_each_check_counts_files_while_free_space_is_below_the_floor(self) -> None:
        self.watch = DiskMeter(
            Path("/some"), 1200, 120, lambda: [31], time=self.clock.seconds, floor=18_000
        )
        self.look(counts=1)
        self.assertEqual(self.watch.free_bytes, 18_000)
        self.look(counts=0)
        self.blocks -= 1
        self.look(counts=1)
        self.look(counts=1)
        self.assertEqual((self.watch.free_bytes, self.watch.last_usage), (17_998, self.use))

    def test_free_bytes_are_measured_without_a_count(self) -> None:
        self.assertEqual(self.watch.measure_usage(counts=False), DiskUsage())
        self.assertEqual((self.watch.free_bytes, self.count), (18_000, 0))

    def test_each_check_counts_files_while_the_disk_limit_is_exceeded(self) -> None:
        for use in (
            DiskUsage(disk_bytes=1201, file_count=20),
            DiskUsage(disk_bytes=200, file_count=121),
        ):
            self.use = use
            self.look(counts=1, again=True)
            self.look(counts=1)
        self.use = DiskUsage(disk_bytes=200, file_count=20)
        self.look(counts=1)
        self.look(counts=0)
