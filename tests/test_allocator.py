"""`daemon.runtime`: what the C library keeps, seen by the kernel's count of pages.

The kernel counts a fault for each page that is touched for the first time since the process
got it. Each test has a process of its own, for the setting holds until the process ends.
"""

from __future__ import annotations

import json
import platform

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon import runtime
from tawebeval.daemon.runtime import KEPT, keep_freed_memory
from tests.own_python import printed_by

BLOCK = 256 * 1024
"""Bytes of one allocation: as large as what becomes of a read."""

SCRIPT = f"""
import json, resource, sys
from pathlib import Path
from tawebeval.daemon.runtime import keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

kept, size = sys.argv[1] == "kept", int(sys.argv[2])
if kept:
    assert keep_freed_memory()

# As long from the beginning: a list that grows moves, and what moved last may lie above all blocks.
blocks = [None] * (size // {BLOCK})

def use():
    for number in range(len(blocks)):
        blocks[number] = b"x" * {BLOCK}
    for number in range(len(blocks)):
        blocks[number] = None

small = resident()
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps([faults * resource.getpagesize() / 10, resident() - small]))
"""


def mapped_and_left(how: str, size: int) -> tuple[float, int]:
    """Let a process use and free `size` bytes several times, "kept" or "as it is".

    Return the bytes that the kernel has to map for it each time, and those that stay.
    """
    mapped, left = json.loads(printed_by(SCRIPT, how, str(size)))
    return mapped, left


class AllocatorTests(SynchronousTestCase):
    """Memory that is free, and used again."""

    if platform.libc_ver()[0] != "glibc":
        skip = "this C library is not glibc"

    def test_used_again(self) -> None:
        """What is freed and used again is mapped once, where else it is each time."""
        size = KEPT // 2
        self.assertGreater(mapped_and_left("as it is", size)[0], size / 2)
        self.assertLess(mapped_and_left("kept", size)[0], size / 20)

    def test_given_back(self) -> None:
        """Of much more than is to be kept the rest goes back."""
        left = mapped_and_left("kept", 8 * KEPT)[1]
        self.assertLess(left, 1.2 * KEPT)


class OtherLibraryTests(SynchronousTestCase):
    """A C library that has no such setting."""

    def test_nothing(self) -> None:
        """It stays as it is, and the daemon starts all the same."""
        self.patch(runtime.ctypes, "CDLL", lambda name: object())
        self.assertFalse(keep_freed_memory())
