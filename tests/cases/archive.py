"""Base case of the tests of `tawebeval.archive`, and events for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.archive.files import ArchiveFile
from tawebeval.archive.index import ArchiveQuery
from tawebeval.archive.store import (
    SUBDIRECTORY_NAMES,
    ArchiveStore,
    PendingEvents,
    PendingWrites,
    RecordingEnd,
    RecordingOutcome,
)
from tawebeval.config import ArchiveSettings
from tawebeval.core.events import EventBatch, encode_data_event
from tawebeval.evaluations.status import format_rfc3339_time
from tests.cases.archived import make_workspace

__all__ = ["make_workspace"]

NOW = 1_700_000_000.0


def make_batch(first: int, count: int, size: int = 40) -> EventBatch:
    """Return `count` events of about `size` bytes, each with its number."""
    lines = [
        encode_data_event(b'"%d%s"' % (number, b"x" * size))
        for number in range(first, first + count)
    ]
    return EventBatch(count, b"".join(each.lines for each in lines))


def make_events(first: int, count: int, size: int = 40) -> PendingEvents:
    """Return events as the store gets them."""
    return PendingEvents(first, make_batch(first, count, size), format_rfc3339_time(NOW))


def make_end(number: int = 1, ended: float = NOW, **entry: Any) -> RecordingEnd:
    """Return the end of an evaluation."""
    shown = {"state": "finished", "problem": None, "metadata": {}, **entry}
    return RecordingEnd(number, NOW, ended, {"state": "finished"}, shown, None)


class ArchiveTestCase(SynchronousTestCase):
    """An archive in a directory of its own, which a test may open again."""

    settings = ArchiveSettings(is_enabled=True)

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.now = self.booted = NOW
        self.opened: list[ArchiveStore] = []
        self.addCleanup(lambda: [store.close() for store in self.opened])
        self.store = self.open()

    def open(self, **changes: Any) -> ArchiveStore:
        """Return the archive as a new process would open it, checked."""
        store = ArchiveStore(
            self.root,
            ArchiveSettings(**{"is_enabled": True, **changes}) if changes else self.settings,
            0,
            lambda: self.now,
            lambda: self.booted,
        )
        for former in self.opened:  # its process has ended
            former.close()
        self.opened.append(store)
        self.newest, self.left = store.open()
        return store

    def check(self) -> None:
        """Check index and files, as after the start."""
        self.store.check_index()
        self.store.recreate_damaged_index()
        for part in SUBDIRECTORY_NAMES:
            self.store.reconcile_index(part)
        self.store.update_usage_from_index()

    def write(
        self,
        *events: PendingEvents,
        name: str = "one",
        end: RecordingEnd | None = None,
        caller: str = "alice",
    ) -> RecordingOutcome:
        """Write events of an evaluation; return its outcome."""
        outcomes = self.store.write_recordings([PendingWrites(name, caller, events, end)])
        return next(outcome for outcome in outcomes if outcome.identifier == name)

    def read(
        self, after: int = 0, limit: int = 10**9, name: str = "one", *, with_times: bool = False
    ) -> EventBatch:
        """Return archived events."""
        file = self.get(name)
        try:
            return file.read_events(after, limit, with_times=with_times)
        finally:
            file.close()

    def get(self, name: str = "one") -> ArchiveFile:
        """Return an archived evaluation."""
        file = self.store.open_file(name, "alice")
        assert file is not None, name
        return file

    def list_numbers(self) -> Sequence[int]:
        """Return the numbers of the evaluations in the index."""
        rows = self.store.list_rows(ArchiveQuery("alice", 0, 10**6, 100, lambda row: True))
        return [row.sequence_number for row in rows]

    def list_files(self) -> Sequence[str]:
        """Return the names of all files but the index, without that of the evaluation."""
        found = (path for path in self.root.rglob("*.*") if path.parent.name != "index")
        return sorted(path.name.partition(".")[2] for path in found)
