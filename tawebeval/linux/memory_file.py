"""Files in memory (memfd_create(2)), whose first part can be given back to the kernel."""

from __future__ import annotations

import ctypes
import mmap
import os

PAGE_BYTES = mmap.PAGESIZE
"""Bytes in which a file takes memory."""

_PUNCH_HOLE, _KEEP_SIZE = 2, 1  # flags of fallocate(2)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def punch_hole(descriptor: int, start: int, end: int) -> None:
    """Give back the whole pages between two offsets, which then read as zeros. Raises: OSError.

    The size of the file stays.
    """
    start = -(-start // PAGE_BYTES) * PAGE_BYTES
    end -= end % PAGE_BYTES
    if start < end and _libc.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, start, end - start):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
