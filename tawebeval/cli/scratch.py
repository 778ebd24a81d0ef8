"""A directory for one trial, which goes with it; those of trials that were killed go, too.

Whoever works in one holds a lock on it, so that one without has been left behind. (A number of a
process in its name would mean nothing in another container.) Everything here blocks.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tawebeval.linux.filetree import remove
from tawebeval.linux.leftovers import end_leftovers
from tawebeval.linux.opening import LISTED, open_directory

_PREFIX = "tawebeval-try-"


@contextmanager
def scratch() -> Iterator[Path]:
    """Make one below TMPDIR; remove it after. Raises OSError."""
    around = Path(tempfile.gettempdir()).resolve()
    sweep(around)
    place, lock = _make(around)
    try:
        yield place
    finally:
        try:
            remove(place)
        finally:
            os.close(lock)


def sweep(around: Path) -> None:
    """Remove what trials of this user that have been killed have left in a directory."""
    for place in around.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is somebody else's, or has just gone
            descriptor = open_directory(str(place), None, LISTED)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    end_leftovers(place)
                    remove(place)
            finally:
                os.close(descriptor)


def _make(around: Path) -> tuple[Path, int]:
    """Return a new directory, and a descriptor that holds the lock on it."""
    while True:
        place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=around))
        lock = open_directory(str(place), None, LISTED)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return place, lock
        os.close(lock)  # somebody has taken it for one that was left, before it was locked
