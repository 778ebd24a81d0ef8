"""Directories that are slow to make, kept for the next time and shared with other checkouts."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tawebeval-machine"

_MADE = "made"  # written last
_MONTH = 30 * 24 * 3600
_WEEK = 7 * 24 * 3600


@contextmanager
def cached(name: str, ingredients: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """Give the directory that `make` fills; nobody removes it meanwhile. Blocks.

    A directory with the same name and ingredients is used again for a month, so that Debian's
    updates arrive. Directories of the same name with other ingredients are removed after a week
    without use. Their locks, which are empty files, stay.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder = FOLDER / f"{name}-{hashlib.sha256(ingredients.encode()).hexdigest()[:16]}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not _is_fresh(folder):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_fresh(folder):  # nobody has made it meanwhile
            new = folder.with_suffix(".new")
            for old in (folder, new):
                shutil.rmtree(old, ignore_errors=True)
            new.mkdir()
            make(new)
            (new / _MADE).touch()
            new.rename(folder)
        fcntl.flock(lock, fcntl.LOCK_SH)  # others may use it, too
        os.utime(lock.fileno())
        _remove_unused(name)
        yield folder


def _is_fresh(folder: Path) -> bool:
    with suppress(FileNotFoundError):
        return time.time() - (folder / _MADE).stat().st_mtime < _MONTH
    return False


def _remove_unused(name: str) -> None:
    """Remove directories of a name that nobody has used for a week."""
    for path in FOLDER.glob(f"{name}-*.lock"):
        if time.time() - path.stat().st_mtime > _WEEK:
            with path.open() as lock, suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for folder in (path.with_suffix(""), path.with_suffix(".new")):
                    shutil.rmtree(folder, ignore_errors=True)
