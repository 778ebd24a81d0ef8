"""`daemon.startup`: when what was stored is written to the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon import startup as module
from tawebeval.daemon.startup import SYNC_PERIOD_SECONDS, DiskSync
from tawebeval.linux.filetree import sync_file_system
from tests.fakes.world import SlowThreads


class DiskSyncTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.store: Any = SimpleNamespace(transaction_count=0)
        self.threads: Any = SlowThreads()
        self.clock = Clock()
        self.synced: list[Path] = []
        self.patch(module, "sync_file_system", self.synced.append)
        self.sync = DiskSync(self.store, Path("/state"), self.threads, self.clock)

    def tick(self, seconds: float = 1) -> None:
        self.clock.advance(seconds)
        self.sync.sync_if_due()

    def test_commits_are_written_together_and_no_more_often_than_the_interval(self) -> None:
        self.store.transaction_count = 1
        self.tick()
        self.store.transaction_count = 2  # while the disk is at work
        self.tick()
        self.threads.step()
        self.tick(SYNC_PERIOD_SECONDS - 1)
        self.assertEqual((self.synced, self.threads.waiting), ([Path("/state")], []))
        self.tick()
        self.threads.step()
        self.tick(SYNC_PERIOD_SECONDS)
        self.assertEqual((len(self.synced), self.threads.waiting), (2, []))

    def test_failed_disk_sync_is_logged_and_repeated_after_the_next_commit(self) -> None:
        def fail(path: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

        self.patch(module, "sync_file_system", fail)
        with capturedLogs() as events:
            for count in (1, 2):
                self.store.transaction_count = count
                self.tick(SYNC_PERIOD_SECONDS)
                self.threads.step()
        self.assertEqual(len(events), 2)
        self.assertIn(
            "are not written to the disk: /state: Input/output error", formatEvent(events[0])
        )


class SyncTests(SynchronousTestCase):
    def test_sync_of_a_directory_succeeds_and_of_a_missing_one_raises(self) -> None:
        place = Path(self.mktemp())
        place.mkdir()
        sync_file_system(place)
        self.assertRaises(FileNotFoundError, sync_file_system, place / "missing")
