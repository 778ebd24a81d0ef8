"""Errors of writing to the disk: with a path, and what helps where there is no room."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAKE_ROOM = "make room there"
"""What helps where the disk is full."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within it an error of the system that names no path names this one.

    Those of opening a file name it by themselves, those of writing to it do not.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def is_full(error: OSError) -> bool:
    """Tell whether there is no room, or none for this user."""
    return error.errno in _FULL


def says_full(said: str) -> bool:
    """Tell whether a program says so."""
    return any(os.strerror(number) in said for number in _FULL)


def told(error: OSError) -> str:
    """Return an error as the start says it: the path, why, and what helps if that is known."""
    remedy = f"; {MAKE_ROOM}" if is_full(error) else ""
    return f"{error.filename}: {error.strerror}{remedy}"
