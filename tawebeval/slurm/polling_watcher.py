"""Watcher of files that other machines write, of which inotify(7) says nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.task import deferLater
from twisted.logger import Logger

from tawebeval.deferreds import WorkerThreads, run_in_background

MIN_POLL_SECONDS = 0.02
"""Seconds between two looks at a file that has just changed."""
MAX_POLL_SECONDS = 0.4
"""Seconds between two looks at a file that has not changed for long."""

_PAUSE = 0.1  # between two looks, as a part of the time since the last change

_Signature = tuple[int, int, int]  # inode, size, and time of the last change in nanoseconds

log = Logger()


@attrs.define(eq=False)
class _WatchedFile:
    path: Path
    on_change: Callable[[], object]
    changed_at: float
    signature: _Signature | None = None
    due: float = 0.0


@attrs.define(eq=False)
class PollingWatcher:
    """Watcher of files by one thread, which looks at all files in turn.

    While the file system does not answer, that thread waits, and nothing else does.
    """

    _clock: Any
    _threads: WorkerThreads
    _files: dict[Path, _WatchedFile] = attrs.field(factory=dict)
    _is_polling: bool = False

    def watch(self, path: Path, on_change: Callable[[], object]) -> None:
        """Call `on_change()` when the file has appeared or changed."""
        self._files[path] = _WatchedFile(path, on_change, self._clock.seconds())
        if not self._is_polling:
            self._is_polling = True
            run_in_background(self._poll(), log, "defect: the shared directory is not watched")

    def unwatch(self, path: Path) -> None:
        """Stop watching a file."""
        self._files.pop(path, None)

    async def _poll(self) -> None:
        try:
            while self._files:
                now = self._clock.seconds()
                if due := [file for file in self._files.values() if file.due <= now]:
                    await self._look(due)
                await deferLater(self._clock, MIN_POLL_SECONDS)
        finally:
            self._is_polling = False

    async def _look(self, files: Sequence[_WatchedFile]) -> None:
        signatures = await self._threads.run_in_thread(
            lambda: [_read_signature(file.path) for file in files]
        )
        now = self._clock.seconds()
        for file, signature in zip(files, signatures, strict=True):
            has_changed = signature not in (None, file.signature)
            if has_changed:
                file.signature, file.changed_at = signature, now
            pause = (now - file.changed_at) * _PAUSE
            file.due = now + min(max(pause, MIN_POLL_SECONDS), MAX_POLL_SECONDS)
            if has_changed and self._files.get(file.path) is file:
                file.on_change()


def _read_signature(path: Path) -> _Signature | None:
    """Return what changes with a file; None without one. Blocks.

    By open(2), at which NFS asks its server: stat(2) would be answered by the client's cache.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns
