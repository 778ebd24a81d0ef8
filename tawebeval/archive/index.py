"""The index of the archive: a table of SQLite, for lists and for removals by age and size.

The table has only what the files have, too: when it is damaged, the store makes it again from them.
Every method blocks, and may raise `sqlite3.Error`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from threading import Lock

import attrs

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS evaluations (
    name TEXT PRIMARY KEY,           -- of the files
    caller TEXT NOT NULL,
    sequence_number INTEGER NOT NULL,  -- in the order of acceptance
    created REAL NOT NULL,           -- seconds since the epoch
    ended REAL NOT NULL,
    state TEXT NOT NULL,
    size INTEGER NOT NULL,           -- bytes on the disk
    entry BLOB NOT NULL              -- JSON, as lists show it
);
CREATE INDEX IF NOT EXISTS by_caller ON evaluations (caller, sequence_number);
CREATE INDEX IF NOT EXISTS by_end ON evaluations (ended);
CREATE INDEX IF NOT EXISTS by_share ON evaluations (caller, ended, size);
"""
_WAIT = 2.0  # seconds for which one thread waits for the transaction of another
_MAX_LOG = 16 * 2**20  # bytes of the write-ahead log that stay after a checkpoint


@attrs.frozen
class IndexedEvaluation:
    """A row: an evaluation in the archive. Times are in seconds since the epoch."""

    file_stem: str
    caller: str
    sequence_number: int
    created_time: float
    ended_time: float
    state: str
    size: int
    listing_entry: bytes = attrs.field(repr=False)


@attrs.frozen
class ArchiveQuery:
    """A caller's first `max_count` rows between two sequence numbers, the last one included.

    Rows for which `matches` is false have no entry, which saves memory.
    """

    caller: str
    after_sequence_number: int
    last_sequence_number: int
    max_count: int
    matches: Callable[[IndexedEvaluation], bool]


class DamagedIndex(sqlite3.DatabaseError):
    """An index of another version, or with errors."""


class IncompleteIndex(Exception):
    """An index to which the rows of older files are being added."""


@attrs.define(eq=False)
class ArchiveIndex:
    """The index in the file `path`, which is created.

    One thread writes; `check_integrity` and `list_rows`, for any thread, have connections of their
    own. The version in the file is 0 until the index is complete.
    """

    path: Path
    _file_lock: Lock = attrs.field(factory=Lock)  # no reader may use a file that is removed
    _connection: sqlite3.Connection | None = None

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self.path, timeout=_WAIT, isolation_level=None, check_same_thread=False
        )

    @property
    def _writer(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._connect()
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(f"PRAGMA journal_size_limit = {_MAX_LOG}")
        return self._connection

    def open(self) -> None:
        """Create what is missing in the file. Raises: DamagedIndex for another version."""
        version = _read_version(self._writer)
        if version not in (0, SCHEMA_VERSION):
            raise DamagedIndex(f"version {version} in place of {SCHEMA_VERSION}")
        self._writer.executescript(f"BEGIN; {_SCHEMA} COMMIT;")

    def mark_index_complete(self) -> None:
        """Note that each file has its row."""
        self._writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def close(self) -> None:
        """Close the connection of the thread that writes."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def check_integrity(self) -> None:
        """Read the whole index. Raises: DamagedIndex."""
        with closing(self._connect()) as connection:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise DamagedIndex(found)

    def recreate(self) -> None:
        """Remove the file, and begin a new one."""
        self.close()
        with self._file_lock:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
            self.open()

    def add_rows(self, rows: Sequence[IndexedEvaluation]) -> None:
        """Add rows in one transaction, in place of those of the same names."""
        self._execute(
            "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [attrs.astuple(row) for row in rows],
        )

    def remove_rows(self, file_stems: Sequence[str]) -> None:
        """Remove rows by their names."""
        self._execute("DELETE FROM evaluations WHERE name = ?", [(name,) for name in file_stems])

    def _execute(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Execute a statement for each row, in one transaction."""
        with self._writer as connection:  # commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(statement, rows)

    def list_rows(self, query: ArchiveQuery) -> list[IndexedEvaluation]:
        """Return the rows of a query, in the order of their numbers. Raises: IncompleteIndex."""
        with self._file_lock, closing(self._connect()) as connection:
            if _read_version(connection) != SCHEMA_VERSION:
                raise IncompleteIndex
            rows = connection.execute(
                "SELECT * FROM evaluations WHERE caller = ? AND sequence_number > ?"
                " AND sequence_number <= ? ORDER BY sequence_number LIMIT ?",
                (
                    query.caller,
                    query.after_sequence_number,
                    query.last_sequence_number,
                    query.max_count,
                ),
            )
            found = [IndexedEvaluation(*row) for row in rows]
        return [
            row if query.matches(row) else attrs.evolve(row, listing_entry=b"") for row in found
        ]

    def list_expired_evaluations(
        self, max_count: int, ended_before: float
    ) -> list[tuple[str, str, int]]:
        """Return name, caller and size of up to `max_count` rows, those that ended first."""
        rows = self._writer.execute(
            "SELECT name, caller, size FROM evaluations WHERE ended < ? ORDER BY ended LIMIT ?",
            (ended_before, max_count),
        )
        return list(rows)

    def list_oldest_evaluations(self, max_count: int, caller: str) -> list[tuple[str, str, int]]:
        """Return name, caller and size of a caller's rows, as `list_expired_evaluations`."""
        rows = self._writer.execute(
            "SELECT name, caller, size FROM evaluations WHERE caller = ? ORDER BY ended LIMIT ?",
            (caller, max_count),
        )
        return list(rows)

    def list_file_stems(self, file_stem_prefix: str) -> Iterator[str]:
        """Yield the names that begin with `file_stem_prefix`, two hexadecimal digits."""
        rows = self._writer.execute(
            "SELECT name FROM evaluations WHERE name >= ? AND name < ?",
            (file_stem_prefix, f"{file_stem_prefix}g"),
        )
        return (row[0] for row in rows)

    def count_by_caller(self) -> Iterator[tuple[str, int, int]]:
        """Yield for each caller the number of rows and the sum of their sizes, from an index."""
        rows: Iterator[tuple[str, int, int]] = self._writer.execute(
            "SELECT caller, count(*), sum(size) FROM evaluations GROUP BY caller"
        )
        return rows

    def find_highest_sequence_number(self) -> int:
        """Return the highest sequence number, from an index of the table."""
        row = self._writer.execute("SELECT max(sequence_number) FROM evaluations").fetchone()
        return row[0] or 0


def _read_version(connection: sqlite3.Connection) -> int:
    row: tuple[int] = connection.execute("PRAGMA user_version").fetchone()
    return row[0]
