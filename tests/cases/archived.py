"""Rows of archived evaluations, as the store has them, and events for the archive."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs
import orjson

from tawebeval.archive.archive import StoredEvaluation
from tawebeval.core.events import encode_data_event
from tawebeval.core.ring import EventRing
from tawebeval.sandbox.workspace import Workspace


@attrs.frozen
class FakeRow:
    """The row of an archived evaluation."""

    identifier: str
    caller: str
    ended: float
    archived: StoredEvaluation


@attrs.define
class FakeRows:
    """Rows in memory."""

    rows: dict[str, FakeRow] = attrs.field(factory=dict)

    def save(self, row: FakeRow) -> None:
        self.rows[row.identifier] = row

    async def find_archived(self, identifier: str) -> FakeRow | None:
        return self.rows.get(identifier)

    async def list_oldest_archived(
        self, max_count: int, *, caller: str | None = None, ended_before: float = math.inf
    ) -> list[tuple[str, str, int]]:
        found = sorted(self.rows.values(), key=lambda row: row.ended)
        return [
            (row.identifier, row.caller, row.archived.file_bytes)
            for row in found
            if caller in (None, row.caller) and row.ended < ended_before
        ][:max_count]

    async def count_archived(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of rows and of bytes by caller."""
        counts = Counter(row.caller for row in self.rows.values())
        return {
            caller: (
                count,
                sum(row.archived.file_bytes for row in self.rows.values() if row.caller == caller),
            )
            for caller, count in counts.items()
        }

    def delete(self, identifier: str) -> None:
        del self.rows[identifier]

    async def flush(self) -> None:
        """Do nothing: it is memory."""


class DirectoryRows(FakeRows):
    """Rows in files, which outlive a process; `deleted` has the names of deleted rows."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.deleted: set[str] = set()
        directory.mkdir()

    def save(self, row: FakeRow) -> None:
        super().save(row)
        new = self.directory / "new"
        new.write_bytes(orjson.dumps(attrs.asdict(row)))
        new.rename(self.directory / row.identifier)

    def load(self) -> None:
        self.rows = {}
        for path in self.directory.iterdir():
            if path.name.endswith("-deleted"):
                self.deleted.add(path.name.partition("-")[0])
            elif path.name != "new":
                row = orjson.loads(path.read_bytes())
                row["archived"] = StoredEvaluation(**row["archived"])
                self.rows[path.name] = FakeRow(**row)

    def delete(self, identifier: str) -> None:
        super().delete(identifier)
        self.deleted.add(identifier)
        (self.directory / identifier).rename(self.directory / f"{identifier}-deleted")


def make_ring(count: int, size: int = 40) -> Iterator[EventRing]:
    """Yield `count` events of about `size` bytes, each with its number."""
    ring = EventRing()
    for number in range(count):
        ring.append_batch(encode_data_event(b'"%d%s"' % (number, b"x" * size)), 1000 * number)
    yield ring


def make_workspace(root: Path, packed: bytes, files: dict[str, bytes]) -> Workspace:
    """Return a workspace with a kept submission; `files` are by their paths below it."""
    workspace = Workspace(root)
    for name, content in files.items():
        path = workspace.submission_directory / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    workspace.request_file.write_bytes(packed)
    return workspace
