"""`tawebeval.disk`: files that have no name any more and that nobody has open, but mapped."""

from __future__ import annotations

import builtins
import ctypes
import errno
import mmap
import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.disk import Count, DiskUse, measure

KIB = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


class MappedTests(SynchronousTestCase):
    """This process has mapped what it asks for; C is asked, since Python holds a descriptor."""

    def setUp(self) -> None:
        self.top = Path(self.mktemp()).resolve()
        self.top.mkdir()
        self.path = self.top / "file"
        self.path.write_bytes(b"x" * 128 * KIB)
        self.file = self.path.open("rb")
        self.addCleanup(self.file.close)

    def map(self, size: int, offset: int = 0) -> int:
        """Map a part of the file until the test's end; return where."""
        place = _libc.mmap(
            None,
            ctypes.c_size_t(size),
            mmap.PROT_READ,
            mmap.MAP_SHARED,
            self.file.fileno(),
            ctypes.c_long(offset),
        )
        assert place != ctypes.c_void_p(-1).value
        self.addCleanup(_libc.munmap, ctypes.c_void_p(place), ctypes.c_size_t(size))
        return int(place)

    def use(self, *pids: int) -> DiskUse:
        """Return what is counted for these processes."""
        return measure(self.top, pids)

    def test_named(self) -> None:
        """What has a name is counted by it."""
        self.map(64 * KIB)
        self.file.close()
        self.assertEqual(self.use(os.getpid()), self.use())

    def test_open(self) -> None:
        """What is open as well is counted once, and exactly."""
        self.map(64 * KIB)
        self.path.unlink()
        use = self.use(os.getpid())
        self.assertEqual((use.files, use.largest), (1, 128 * KIB))
        self.assertGreaterEqual(use.size, 128 * KIB)

    def test_closed(self) -> None:
        """What is just mapped counts as far as it is, once for however many processes."""
        self.map(64 * KIB)
        self.path.unlink()
        self.file.close()
        self.assertEqual(self.use(), DiskUse())
        use = self.use(os.getpid(), os.getpid())
        self.assertEqual((use.files, use.size), (1, 64 * KIB))

    def test_parts(self) -> None:
        """Of several parts of a file the one that reaches furthest counts."""
        self.map(16 * KIB, 64 * KIB)
        self.map(16 * KIB)
        self.map(16 * KIB, 96 * KIB)
        self.path.unlink()
        self.file.close()
        use = self.use(os.getpid())
        self.assertEqual((use.files, use.size), (1, 112 * KIB))

    def test_names(self) -> None:
        """Whatever a file is called, it is seen, and those after it, too."""
        for name in ("a\rb", "a\r", "\r (deleted)", "a\nb", " ", "\x85\u2028", "\udcff"):
            self.path = self.path.rename(self.top / name)
            use = self.use(os.getpid())
            self.assertEqual(use.files, 1, repr(name))
        self.map(64 * KIB)
        self.path = self.path.rename(self.top / "a\rb c")
        self.path.unlink()
        self.file.close()
        use = self.use(os.getpid())
        self.assertEqual((use.files, use.size), (1, 64 * KIB))

    def test_unknown_lines(self) -> None:
        """A line that cannot be read is passed over, and the next one counts."""
        device = self.top.stat().st_dev
        numbers = f"{os.major(device):x}:{os.minor(device):x}"
        lines = (
            "nonsense (deleted)",
            f"x-y r--s 0 {numbers} 7 /f (deleted)",
            f"1000 r--s 0 {numbers} 7 /f (deleted)",
            f"1000-3000 r--s 0 {numbers} 7 /f (deleted)",
        )
        maps = Path(self.mktemp())
        maps.write_text("".join(f"{line}\n" for line in lines))
        self.patch(builtins, "open", lambda path, **how: maps.open(**how))
        use = Count()
        use.add_mapped(os.getpid(), {device})
        self.assertEqual((use.files, use.size), (1, 0x2000))

    def test_exhausted(self) -> None:
        """Where the daemon has no descriptor left it is told, and not taken for no mapping."""

        def fail(path: str, **how: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files", path)

        self.patch(builtins, "open", fail)
        with self.assertRaises(OSError) as caught:
            Count().add_mapped(os.getpid(), {0})
        self.assertEqual(caught.exception.errno, errno.EMFILE)

    def test_gone(self) -> None:
        """A process that has ended has mapped nothing."""
        self.assertEqual(self.use(2**22 + 1).files, 1)
