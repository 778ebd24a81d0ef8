"""`sandbox.disk_usage`: what is counted of a run's files, and when."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.filetree import open_directory
from tawebeval.sandbox import disk_usage as module
from tawebeval.sandbox.disk_usage import (
    DiskMeter,
    DiskUsage,
    TooManyInspections,
    measure_disk_usage,
)
from tests.fakes.children import NO_PROCESS
from tests.integration.attacks.calls import number_of

BLOCK = 4096
CLONE_FILES = 0x400
FAR = 100
"""How many levels of directories are counted."""


class DiskTestCase(SynchronousTestCase):
    """A directory, and one beside it that is not to be counted."""

    def setUp(self) -> None:
        root = Path(tempfile.mkdtemp(prefix="tawebeval-test-")).resolve()
        self.addCleanup(shutil.rmtree, root)
        self.top = root / "top"
        self.beside = root / "beside"
        self.top.mkdir()
        self.beside.mkdir()

    def write(self, path: Path, blocks: int) -> int:
        """Write a file of that many blocks, down to the disk; return how many bytes it takes."""
        with open(path, "wb") as file:
            file.write(os.urandom(blocks * BLOCK))
            file.flush()
            os.fsync(file.fileno())
        return os.stat(path).st_blocks * 512

    def start(self, script: str) -> int:
        """Start a process there that stays until the test's end; return its identifier."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"{script}; echo; read x"], cwd=self.top, stdin=pipe, stdout=pipe
        )
        self.addCleanup(process.communicate)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    def count(self, *pids: int) -> DiskUsage:
        """Return what is counted."""
        return measure_disk_usage(self.top, pids)


class CountTests(DiskTestCase):
    """What lies in a directory."""

    def test_empty(self) -> None:
        """Nothing, and the directory itself does not count."""
        self.assertEqual(self.count(), DiskUsage())

    def test_files(self) -> None:
        """Files and directories, what they take, and the length of the largest."""
        (self.top / "a/b").mkdir(parents=True)
        size = self.write(self.top / "one", 3) + self.write(self.top / "a/b/two", 5)
        size += sum((self.top / name).stat().st_blocks * 512 for name in ("a", "a/b"))
        self.assertEqual(
            self.count(), DiskUsage(disk_bytes=size, file_count=4, largest_file_bytes=5 * BLOCK)
        )
        self.assertGreaterEqual(size, 8 * BLOCK)

    def test_apart(self) -> None:
        """What is not the run's is not counted, at the top and nowhere else."""
        for name in ("submission", "tree/submission"):
            (self.top / name).mkdir(parents=True)
            self.write(self.top / name / "file", 2)
        self.assertEqual(measure_disk_usage(self.top, (), {"submission"}).file_count, 3)

    def test_since(self) -> None:
        """The largest is one that has come since, or was changed; all take room."""
        size = self.write(self.top / "one", 4)
        later = (self.top / "one").stat().st_ctime + 0.001
        use = measure_disk_usage(self.top, (), since=later)
        self.assertEqual((use.disk_bytes, use.largest_file_bytes), (size, 0))
        self.assertEqual(
            measure_disk_usage(self.top, (), since=later - 0.001).largest_file_bytes, 4 * BLOCK
        )

    def test_hard_links(self) -> None:
        """A file of several names takes its room once, and a place for each."""
        (self.top / "sub").mkdir()
        size = self.write(self.top / "one", 4) + (self.top / "sub").stat().st_blocks * 512
        for name in ("two", "sub/three"):
            (self.top / name).hardlink_to(self.top / "one")
        self.assertEqual(
            self.count(), DiskUsage(disk_bytes=size, file_count=4, largest_file_bytes=4 * BLOCK)
        )

    def test_linked_from_elsewhere(self) -> None:
        """A file that has a name elsewhere takes its room here all the same."""
        size = self.write(self.top / "one", 4)
        (self.beside / "two").hardlink_to(self.top / "one")
        self.assertEqual(
            self.count(), DiskUsage(disk_bytes=size, file_count=1, largest_file_bytes=4 * BLOCK)
        )

    def test_sparse(self) -> None:
        """A file with holes takes what is written in it, and is as large as it says."""
        with open(self.top / "holes", "wb") as file:
            file.truncate(2**30)
        use = self.count()
        self.assertLess(use.disk_bytes, 2**20)
        self.assertEqual((use.file_count, use.largest_file_bytes), (1, 2**30))

    def test_symbolic_links(self) -> None:
        """Links are not followed, whatever they lead to."""
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

    def test_other_files(self) -> None:
        """Pipes and the like are files, and nobody waits for them."""
        os.mkfifo(self.top / "pipe")
        self.assertEqual(self.count().file_count, 1)

    def test_no_directory(self) -> None:
        """A workspace that is gone is an error."""
        self.top.rmdir()
        self.assertRaises(OSError, self.count)


class WorkTests(DiskTestCase):
    """How many looks a count takes."""

    def looks(self, needed: int, *pids: int) -> None:
        """Hold that a count takes so many, and that it is none with one less."""
        self.assertEqual(measure_disk_usage(self.top, pids, work=needed).inspection_count, needed)
        self.assertRaises(TooManyInspections, measure_disk_usage, self.top, pids, work=needed - 1)

    def test_files(self) -> None:
        """One for each file, and one more to look into each directory."""
        for name in ("one", "two", "three"):
            (self.top / name).touch()
        self.looks(3)
        (self.top / "sub").mkdir()
        (self.top / "sub/four").touch()
        self.looks(6)

    def test_processes(self) -> None:
        """One for each thread, and one for each of its descriptors, whatever they are of."""
        pid = self.start("exec 5</dev/null 7>&1")
        self.looks(1 + 3 + 2, pid)

    def test_enough(self) -> None:
        """A count that has come to too much ends there."""
        for number in range(50):
            self.write(self.top / str(number), 1)
        use = measure_disk_usage(self.top, [NO_PROCESS], most=(10 * BLOCK, 100))
        self.assertEqual((use.inspection_count, use.disk_bytes), (11, 11 * BLOCK))
        use = measure_disk_usage(self.top, [NO_PROCESS], most=(100 * BLOCK, 20))
        self.assertEqual((use.inspection_count, use.file_count), (21, 21))
        self.assertEqual(measure_disk_usage(self.top, (), most=(50 * BLOCK, 50)).file_count, 50)


class DepthTests(DiskTestCase):
    """Directories in directories."""

    def dig(self, levels: int) -> int:
        """Make directories in one another, as paths cannot name them; return the last one."""
        place = os.open(self.top, os.O_RDONLY)
        for _ in range(levels):
            os.mkdir("d", dir_fd=place)
            place, above = os.open("d", os.O_RDONLY, dir_fd=place), place
            os.close(above)
        self.addCleanup(os.close, place)
        return place

    def test_deep(self) -> None:
        """All that programs may make is counted."""
        last = self.dig(FAR)
        with open(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=last), "wb") as file:
            file.write(b"x" * 70_000)
        os.symlink("/", "link", dir_fd=last)
        use = self.count()
        self.assertEqual((use.file_count, use.largest_file_bytes), (FAR + 2, 70_000))
        self.assertFalse(use.has_uncounted_deep_directories)

    def test_exhausted(self) -> None:
        """Where the daemon has no descriptor left the count fails, and is not one of nothing."""
        self.dig(3)
        for error in (errno.EMFILE, errno.ENFILE):
            for name, place in (
                ("open_directory", module),
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

    def test_too_deep(self) -> None:
        """What lies below is not looked at, which is told; the other places are counted."""
        for levels in (FAR, FAR + 20, FAR):
            self.dig(levels)
            os.rename(self.top / "d", self.top / f"{len(os.listdir(self.top))}")
        (self.top / "flat").mkdir()
        use = self.count()
        self.assertTrue(use.has_uncounted_deep_directories)
        self.assertEqual(use.file_count, 3 * FAR + 1 + 1)


class RaceTests(DiskTestCase):
    """A run that changes its directories while they are counted."""

    def test_replaced(self) -> None:
        """A link is not followed, a pipe not waited for, and what is gone has nothing in it.

        What else there is is counted, and nothing stays open.
        """
        self.write(self.beside / "big", 50)
        opened, sub = open_directory, self.top / "sub"
        for number, make in enumerate(
            (partial(sub.symlink_to, self.beside), partial(os.mkfifo, sub), lambda: None)
        ):

            def racing(entry: str, parent: int, rights: int, make: Any = make) -> int:
                if entry == "sub":
                    sub.rmdir()
                    make()
                return opened(entry, parent, rights)

            self.patch(module, "open_directory", racing)
            sub.unlink(missing_ok=True)
            sub.mkdir()
            (self.top / f"other{number}").mkdir()
            (self.top / f"other{number}" / "file").touch()
            before = os.listdir("/proc/self/fd")
            self.assertEqual(self.count().file_count, 1 + 2 * (number + 1))
            self.assertEqual(os.listdir("/proc/self/fd"), before)


class PermissionTests(DiskTestCase):
    """Directories that their owner has shut."""

    @contextlib.contextmanager
    def as_nobody(self) -> Iterator[None]:
        """Be a user who is bound by permissions."""
        if os.geteuid():
            yield
            return
        nobody = pwd.getpwnam("nobody").pw_uid
        os.chmod(self.top.parent, 0o711)
        os.chown(self.top, nobody, -1)
        os.seteuid(nobody)
        try:
            yield
        finally:
            os.seteuid(0)

    def test_shut(self) -> None:
        """They are opened and counted, for they belong to the daemon's user."""
        with self.as_nobody():
            (self.top / "shut/inner").mkdir(parents=True)
            (self.top / "shut/inner/file").write_bytes(b"x" * 70_000)
            for name in ("shut/inner", "shut"):
                (self.top / name).chmod(0)
            use = self.count()
        self.assertEqual((use.file_count, use.largest_file_bytes), (3, 70_000))
        for name in ("shut", "shut/inner"):  # so that they can be removed
            self.assertEqual((self.top / name).stat().st_mode & 0o777, 0o700)

    def test_not_to_be_searched(self) -> None:
        """So are those that can be listed, but not entered."""
        with self.as_nobody():
            (self.top / "shut").mkdir()
            (self.top / "shut/file").write_bytes(b"x" * 70_000)
            (self.top / "shut").chmod(0o400)
            use = self.count()
        self.assertEqual((use.file_count, use.largest_file_bytes), (2, 70_000))

    def test_of_others(self) -> None:
        """Those of another user stay shut; what else there is is counted."""

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


class NamelessTests(DiskTestCase):
    """Files that a process has open, and that have no name any more."""

    def test_removed(self) -> None:
        """They take room until they are closed, and count for a process that is asked for."""
        pid = self.start("exec 3>file; rm file; head -c 102400 /dev/zero >&3")
        use = self.count(pid)
        self.assertGreaterEqual(use.disk_bytes, 102400)
        self.assertEqual((use.file_count, use.largest_file_bytes), (1, 102400))
        self.assertEqual(self.count(), DiskUsage())

    def start_thread(self, first: str, meanwhile: str) -> int:
        """Start a process of which a thread does `first` and then holds such a file.

        Its first thread does `meanwhile`. Returns the identifier of the process.
        """
        program = f"""
import ctypes, os, sys, threading
libc = ctypes.CDLL(None)
def hold():
    {first}
    file = open("file", "wb", buffering=0)
    file.write(bytes(102400))
    os.unlink("file")
    print(flush=True)
    sys.stdin.readline()
    os._exit(0)
thread = threading.Thread(target=hold)
thread.start()
{meanwhile}
"""
        return self.start(f"exec {sys.executable} -c '{program}'")

    def test_table_of_a_thread(self) -> None:
        """A thread may have a table of descriptors of its own."""
        pid = self.start_thread(f"libc.unshare({CLONE_FILES})", "thread.join()")
        self.assertGreaterEqual(self.count(pid).disk_bytes, 102400)

    def test_first_thread_gone(self) -> None:
        """The first thread may end before the others, and has no descriptors then."""
        pid = self.start_thread("pass", f"libc.syscall({number_of('exit')}, 0)")
        while " Z " not in Path(f"/proc/{pid}/stat").read_text():
            pass
        self.assertGreaterEqual(self.count(pid).disk_bytes, 102400)

    def test_opened_twice(self) -> None:
        """One that is open several times takes its room once."""
        pid = self.start("exec 3>file 4>>file; rm file; head -c 102400 /dev/zero >&3")
        use = self.count(pid, pid)
        self.assertGreaterEqual(use.disk_bytes, 102400)
        self.assertLess(use.disk_bytes, 2 * 102400)

    def test_with_a_name(self) -> None:
        """One that still has a name is counted where it lies."""
        pid = self.start("exec 3>file")
        self.assertEqual(self.count(pid).file_count, 1)

    def test_other_devices(self) -> None:
        """What is not on this disk takes no room there: memory, pipes, terminals."""
        program = """
import os, sys
os.write(os.memfd_create("memory"), bytes(102400))
print(flush=True)
sys.stdin.readline()
"""
        pid = self.start(f"exec {sys.executable} -c '{program}'")
        self.assertEqual(self.count(pid), DiskUsage())

    def test_no_process(self) -> None:
        """One that has ended has nothing open, and the others are counted."""
        pid = self.start("exec 3>file; rm file")
        self.assertEqual(self.count(NO_PROCESS, pid).file_count, 1)


class WatchTests(SynchronousTestCase):
    """When a new count is made. The disk may take 1000 bytes and 100 files more than it has."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.blocks, self.files = 10_000, 5_000
        self.asked: list[object] = []
        self.counts: list[tuple[Path, list[int]]] = []
        self.use = DiskUsage(disk_bytes=200, file_count=20)
        self.patch(os, "statvfs", self.statvfs)
        self.patch(module, "measure_disk_usage", self.measure)
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

    def measure(self, directory: Path, pids: Any, *more: Any) -> DiskUsage:
        """Count the counts."""
        self.counts.append((directory, list(pids)))
        *_, self.most, work = more
        if self.use.inspection_count > work:
            raise TooManyInspections
        return self.use

    def look(self, *, counts: int, again: bool = False) -> None:
        """Hold that a look makes so many counts."""
        before = len(self.counts)
        found = self.watch.measure_usage(again)
        self.assertEqual(len(self.counts) - before, counts)
        self.assertIs(found, self.use)

    def test_first(self) -> None:
        """The first look counts: that directory, and what those processes have open."""
        self.look(counts=1)
        self.assertEqual(self.counts, [(Path("/some"), [31])])
        self.assertEqual(self.asked, [Path("/some")])
        self.assertEqual(self.most, (1200, 120), "beyond which the count need not go on")

    def test_nothing_new(self) -> None:
        """While the file system is as it was, or emptier, the last count is good."""
        self.look(counts=1)
        self.look(counts=0)
        self.blocks += 5000
        self.files += 5000
        self.look(counts=0)

    def test_now_and_then(self) -> None:
        """After ten seconds it is counted anyway, and again ten seconds later."""
        self.clock.advance(1000)
        self.look(counts=1)
        for _ in range(2):
            self.clock.advance(10)
            self.look(counts=0)
            self.clock.advance(0.001)
            self.look(counts=1)
            self.look(counts=0)

    def test_asked_for(self) -> None:
        """Whoever wants a new count gets one, and the ten seconds begin with it."""
        self.look(counts=1)
        self.clock.advance(9)
        self.look(counts=1, again=True)
        self.clock.advance(9)
        self.look(counts=0)

    def test_half(self) -> None:
        """Counted when the file system has lost more than half of what may still be taken."""
        self.look(counts=1)
        for name, half in (("blocks", 250), ("files", 50)):
            setattr(self, name, getattr(self, name) - half)
            self.look(counts=0)
            setattr(self, name, getattr(self, name) - 1)
            self.look(counts=1)
            self.look(counts=0)

    def test_nearly_full(self) -> None:
        """Each look counts while less is free for this user than has to be."""
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

    def test_less_and_less(self) -> None:
        """The less may be taken, the sooner is counted; a little at a time adds up."""
        self.look(counts=1)
        self.use = DiskUsage(disk_bytes=1100, file_count=20)
        self.look(counts=1, again=True)
        for _ in range(2):
            self.blocks -= 25
            self.look(counts=0)
            self.blocks -= 1
            self.look(counts=1)

    def test_much_work(self) -> None:
        """Where a count was much work none is begun that may not be."""
        self.use = DiskUsage(disk_bytes=200, inspection_count=70)
        for counts in (1, 1):  # nobody knows yet
            with self.assertRaises(TooManyInspections):
                self.watch.measure_usage(work=50)
            self.assertEqual(len(self.counts), counts)
            self.counts.clear()
        self.look(counts=1)
        self.clock.advance(11)
        with self.assertRaises(TooManyInspections):
            self.watch.measure_usage(work=50)
        self.assertEqual(len(self.counts), 1)
        self.use = DiskUsage(disk_bytes=200, inspection_count=30)
        self.look(counts=1)
        self.clock.advance(11)
        self.watch.measure_usage(work=50)
        self.assertEqual(len(self.counts), 3)

    def test_over(self) -> None:
        """While there is too much each look counts, for it may have been removed."""
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
