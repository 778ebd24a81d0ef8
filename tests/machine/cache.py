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
    without use.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder = FOLDER / f"{name}-{hashlib.sha256(ingredients.encode()).hexdigest()[:16]}"
    for how in (fcntl.LOCK_SH, fcntl.LOCK_EX):
        with _locked(_lock_of(folder), how) as lock:
            if how == fcntl.LOCK_EX and not _is_fresh(folder):
                new = _new_of(folder)
                _remove(folder, new)
                new.mkdir()
                make(new)
                (new / _MADE).touch()
                new.rename(folder)
            if _is_fresh(folder):
                os.utime(lock)
                fcntl.flock(lock, fcntl.LOCK_SH)  # others may use it, too
                _tidy(name, folder)
                yield folder
                return


def _lock_of(folder: Path) -> Path:
    return folder.with_suffix(".lock")


def _new_of(folder: Path) -> Path:
    return folder.with_suffix(".new")


def _is_fresh(folder: Path) -> bool:
    with suppress(FileNotFoundError):
        return time.time() - (folder / _MADE).stat().st_mtime < _MONTH
    return False


@contextmanager
def _locked(path: Path, how: int) -> Iterator[int]:
    """Give the descriptor of a lock. Raises BlockingIOError if `how` has LOCK_NB. Blocks."""
    lock = -1
    while lock < 0:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, how)
            removed = not path.exists() or not os.path.samestat(path.stat(), os.fstat(lock))
        except OSError:
            os.close(lock)
            raise
        if removed:  # by `_tidy`, while this waited
            os.close(lock)
            lock = -1
    try:
        yield lock
    finally:
        os.close(lock)


def _tidy(name: str, current: Path) -> None:
    """Remove directories of this name that nobody uses any more."""
    for lock in FOLDER.glob(f"{name}-*.lock"):
        other = lock.with_suffix("")
        with suppress(OSError):
            if other == current or time.time() - lock.stat().st_mtime < _WEEK:
                continue
            with _locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                _remove(other, _new_of(other))
                lock.unlink()


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)
