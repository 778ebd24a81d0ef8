"""The same as `stdout_ours`, with an archive that records all events."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from tawebeval.archive.recorder import DiskArchive
from tawebeval.archive.store import ArchiveStore

from benchmarks.programs.stdout_ours import Store, main, reactor
from tawebeval.config import ArchiveSettings
from tawebeval.deferreds import WorkerThreads
from tawebeval.evaluations.status import format_rfc3339_time


def record(store: Store) -> None:
    """Record the events in a directory that is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="tawebeval-archive-"))
    atexit.register(shutil.rmtree, folder)
    threads = WorkerThreads.create(reactor, 1, "archive")
    threads.start()
    reactor.addSystemEventTrigger("after", "shutdown", threads.stop)
    files = ArchiveStore(folder / "archive", ArchiveSettings(is_enabled=True), 0)
    archive = DiskArchive(files, threads, threads, reactor, format_rfc3339_time)
    archive.open()
    archive.begin_recording("some", "", store.ring, store.share)
    atexit.register(check, archive)


def check(archive: DiskArchive) -> None:
    """Refuse figures of a recording that was given up."""
    assert not archive.loss_counts_by_reason.total(), archive.loss_counts_by_reason


if __name__ == "__main__":
    main(record)
