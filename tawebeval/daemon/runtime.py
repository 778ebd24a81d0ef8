"""The C library's allocator, told to keep the memory that events pass through.

A block of stdout becomes several times as large, is kept until it is acknowledged, and makes
room for the next. glibc gives what is free at the end of its heap back to the kernel as soon as
that is 128 KiB, and a large allocation at once (mallopt(3)). Then each block is written to
pages that the kernel has to find, clear and map first, which costs more than all the rest.
"""

from __future__ import annotations

import ctypes

KEPT = 16 * 1024 * 1024
"""Bytes that may be free at the end of the heap; when they are more, they are given back."""

_LARGE = 1024 * 1024  # bytes from which an allocation has a mapping of its own

# From malloc.h. To set one of them ends the adjustment of both by glibc itself, so that
# either without the other makes things worse.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let it keep as much, from now on; tell whether it can. That of musl cannot."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(option, size)
        for option, size in ((_M_TRIM_THRESHOLD, KEPT), (_M_MMAP_THRESHOLD, _LARGE))
    )
