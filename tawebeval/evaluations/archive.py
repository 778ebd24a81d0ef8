"""The archive as evaluations know it, also without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tawebeval.archive.files import ArchiveFile
from tawebeval.archive.index import ArchiveQuery, IndexedEvaluation
from tawebeval.archive.recorder import DiskArchive
from tawebeval.archive.store import RecordingEnd
from tawebeval.archive.submissions import ExtractedSubmission
from tawebeval.core.budget import RingAllocation
from tawebeval.core.ring import EventRing


class NoArchive:
    """The archive of a daemon that keeps none; the methods are those of `DiskArchive`."""

    is_enabled = False

    def is_archived(self, identifier: str) -> bool:
        """Return False."""
        return False

    def get_written_cursor(self, identifier: str) -> int | None:
        """Return None."""
        return None

    def begin_recording(
        self,
        identifier: str,
        caller: str,
        ring: EventRing,
        allocation: RingAllocation,
        on_written: Callable[[], object],
    ) -> None:
        """Do nothing."""

    def end_recording(self, identifier: str, recording_end: RecordingEnd) -> None:
        """Do nothing."""

    def add_archived_callback(self, identifier: str, on_archived: Callable[[], object]) -> None:
        """Call `on_archived`."""
        on_archived()

    async def flush(self) -> None:
        """Do nothing."""

    async def read_evaluation(
        self, identifier: str, caller: str, read_archive_file: Callable[[ArchiveFile], object]
    ) -> None:
        """Return None."""

    async def extract_submission(
        self, identifier: str, caller: str, directory: Path
    ) -> ExtractedSubmission | None:
        """Return None."""
        return None

    async def list_rows(self, query: ArchiveQuery) -> Sequence[IndexedEvaluation]:
        """Return no row."""
        return ()


EvaluationArchive = DiskArchive | NoArchive
