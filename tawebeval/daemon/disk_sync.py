"""What the daemon has stored, written to the disk itself: a power cut takes the last moments only.

A commit of the store, and the files that belong to it, are safe from `kill -9` at once; the kernel
writes them to the disk up to half a minute later. One call for the whole file system (syncfs(2))
costs the requests nothing, unlike one for each file and commit.
"""

from __future__ import annotations

from pathlib import Path

import attrs
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from tawebeval.deferreds import WorkerThreads, run_in_background
from tawebeval.evaluations.store import EvaluationStore
from tawebeval.linux.filetree import describe_disk_error, sync_file_system

SYNC_SECONDS = 5.0
"""Seconds from a commit to its write to the disk, besides those that the disk takes."""

log = Logger()


@attrs.define
class DiskSync:
    """Writer of the file system of `directory`, which has the store and all its files."""

    _store: EvaluationStore
    _directory: Path
    _threads: WorkerThreads
    _clock: IReactorTime
    _synced_count: int = 0  # transactions
    _is_syncing: bool = False
    _next: float = 0.0  # clock time from which the next write may begin

    def sync_if_due(self) -> None:
        """Write to the disk if something was committed. To be called once a second."""
        has_changed = self._store.transaction_count != self._synced_count
        if has_changed and not self._is_syncing and self._clock.seconds() >= self._next:
            self._is_syncing = True
            run_in_background(self._sync(), log, "defect: the disk could not be synchronized")

    async def _sync(self) -> None:
        count = self._store.transaction_count
        try:
            await self._threads.run_in_thread(sync_file_system, self._directory)
        except OSError as error:
            words = "rows and files of evaluations are not written to the disk: {error}"
            log.error(words, error=describe_disk_error(error))  # noqa: TRY400  (no defect)
        finally:
            self._synced_count, self._is_syncing = count, False
            self._next = self._clock.seconds() + SYNC_SECONDS
