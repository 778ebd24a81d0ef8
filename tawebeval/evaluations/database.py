"""The rows of the store, and its file: a database of SQLite, opened, checked, written and read.

PATH                            the database; SQLite adds PATH-wal and PATH-shm
PATH.lock                       locked by the daemon that uses the database
PATH.damaged-TIME               a damaged database that was set aside

All of them are closed to other users. The file PATH.lock has a word once the database was closed
well. Everything here blocks.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs
import msgspec
from twisted.logger import Logger

from tawebeval.core.evaluations import ListEntry
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.evaluations.details import StoredDetails
from tawebeval.linux.filetree import DISK_FULL_REMEDY, describe_disk_error

T = TypeVar("T")


class RunRow(msgspec.Struct, omit_defaults=True):
    """An evaluator that runs.

    - `pid`, `start_time`: its first process, and the time of its start in clock ticks since the
      boot (proc(5)), by which a process of a later boot, or with a reused PID, is told apart.
    - `sandbox_description`: what the kind of sandbox needs to go on with the run.
    - `deadline`: the end of `limits.wall_clock`, in seconds of the monotonic clock; None while the
      run waits to be begun again. `left_at`: when the daemon has left it to the next process, None
      after a kill: the time until that goes on does not count.
    """

    pid: int
    start_time: int
    checkout_path: str
    deadline: float | None
    left_at: float | None = None
    sandbox_description: dict[str, Any] = {}


@attrs.define
class EvaluationRow(StoredDetails):
    """An evaluation, besides its events.

    - `upload_directory`: the name of the directory of the form's files, None once the workspace has
      them; `upload_size`: its bytes; `shared_upload_number`: that of their `SharedUpload`.
    - `packed_result_summary`: packed (`core.results`).
    - `markers`: those of stdout (`core.segi`), None before the start.
    - `run`: None unless the evaluator runs.
    - `begin_cursor`: the acknowledged cursor. `end_cursor`: the cursor at the end, 0 before.
      `has_lost_events`: whether clients may have received newest events that are lost.
    - `is_forgotten`: whether the registry has forgotten it; the archive may still need it.

    A packed row takes 1 to 3 KiB. At most it takes the fields of the form that are no files (each
    64 KiB), 8 KiB of stderr in the result and three times that in the failure, 17
    KiB of goals, and the paths and variables of the operator's configuration.
    """

    upload_directory: str | None = None
    upload_size: int = 0
    shared_upload_number: int = 0
    is_cleaned_up: bool = False
    is_forgotten: bool = False
    packed_result_summary: bytes = b""
    markers: tuple[bytes, bytes, bytes, bytes] | None = None
    run: RunRow | None = None
    begin_cursor: int = 0
    end_cursor: int = 0
    has_lost_events: bool = False


class PendingCallback(msgspec.Struct):
    """A callback that is not delivered yet, also after its evaluation is removed.

    `document` is the body of its request.
    """

    url: str
    caller: str
    webhook_id: str
    document: bytes


class LinkRow(msgspec.Struct, frozen=True):
    """The links of one evaluation; `last_expiry` is that of the last, in seconds since the epoch.

    Links of another `link_generation` are revoked.
    """

    caller: str
    link_generation: bytes
    last_expiry: int


@attrs.frozen
class ArchivedQuery:
    """A caller's first `max_count` archived rows between two sequence numbers, the last included.

    `make_entry(row)`, called in a thread, returns what a list shows of a row, None for a row that
    the list leaves out.
    """

    caller: str
    after_sequence_number: int
    last_sequence_number: int
    max_count: int
    make_entry: Callable[[EvaluationRow], ListEntry | None]


_encoder = msgspec.msgpack.Encoder(enc_hook=str)  # of a Path


def pack(row: msgspec.Struct | EvaluationRow) -> bytes:
    """Return a row as bytes of MessagePack."""
    return _encoder.encode(row)


def _make_decoder(kind: type[T]) -> Callable[[bytes], T]:
    return msgspec.msgpack.Decoder(kind, dec_hook=lambda _, value: Path(value)).decode


unpack_evaluation = _make_decoder(EvaluationRow)
unpack_callback = _make_decoder(PendingCallback)
unpack_link = _make_decoder(LinkRow)


FORMAT = 1
"""The number of the format of tables and rows."""

MAX_SET_ASIDE = 3
"""Damaged databases that are kept, at most; the oldest are removed."""

Table = Literal["evaluations", "callbacks", "links"]
Values = tuple[Any, ...]

_SCHEMA = """
BEGIN;
CREATE TABLE evaluations (
    name TEXT PRIMARY KEY,             -- the identifier
    row BLOB NOT NULL,
    checksum INTEGER NOT NULL,         -- CRC-32 of the row
    sequence_number INTEGER NOT NULL,  -- in the order of acceptance
    caller TEXT NOT NULL,
    ended REAL,                        -- seconds since the epoch
    archived_bytes INTEGER,            -- NULL unless it is in the archive
    is_live INTEGER NOT NULL           -- 0 if it is in the archive alone
);
CREATE INDEX live ON evaluations (sequence_number) WHERE is_live;
CREATE INDEX archived ON evaluations (caller, sequence_number, archived_bytes)
    WHERE archived_bytes IS NOT NULL;
CREATE INDEX ended ON evaluations (ended, caller) WHERE archived_bytes IS NOT NULL;
CREATE TABLE callbacks (name TEXT PRIMARY KEY, row BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE links (name TEXT PRIMARY KEY, row BLOB NOT NULL, checksum INTEGER NOT NULL);
PRAGMA user_version = 1;
COMMIT;
"""
_WAIT = 2.0  # seconds for which a transaction waits for that of another program
_CLOSED = b"closed\n"
_MAX_LOG = 16 * 2**20  # bytes of the write-ahead log that stay after a checkpoint
_CHECKED_BYTES = 64 * 2**20  # up to which a closed database is checked, too: 0.1 s
# Remedies of the errors for which the machine, or another program, is at fault and not the file.
_REMEDIES = {
    sqlite3.SQLITE_FULL: DISK_FULL_REMEDY,
    sqlite3.SQLITE_IOERR: "see the kernel's log for errors of the disk",
    sqlite3.SQLITE_NOMEM: "free some memory",
    sqlite3.SQLITE_BUSY: "end the other program that uses the file",
    sqlite3.SQLITE_CANTOPEN: "let the daemon's user read and write the file and its directory",
}
# The module sqlite3 cannot decode a message that quotes a damaged name.
_DAMAGES = (sqlite3.Error, UnicodeDecodeError)


log = Logger()


class DamagedRow(sqlite3.DatabaseError):
    """A row whose checksum is wrong, or which cannot be decoded."""


def describe_database_error(error: sqlite3.Error | UnicodeDecodeError | OSError) -> SetupProblem:
    """Return the error and its remedy."""
    if isinstance(error, OSError):
        return SetupProblem(describe_disk_error(error), "repair the disk or its permissions")
    damage_remedy = "restart the daemon, which sets a damaged file aside"
    return SetupProblem(str(error), _REMEDIES.get(_get_code(error), damage_remedy))


def _get_code(error: sqlite3.Error | UnicodeDecodeError) -> int:
    """Return the primary code of an error; that of a damage if the module has raised it itself."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF


def compute_checksum(row: bytes) -> int:
    """Return the checksum of a packed row. SQLite has none, so it returns damaged bytes as good."""
    return zlib.crc32(row)


@attrs.define(eq=False)
class EvaluationDatabase:
    """The database in the file `path`; made by `open`.

    One thread writes and another one reads, each with a connection of its own, so that neither
    waits for the other.
    """

    path: Path
    transaction_count: int = 0  # since the start
    _lock: int = -1
    _connection: sqlite3.Connection = attrs.field(init=False)
    _reading: sqlite3.Connection | None = None
    _has_failed: bool = False  # then the next start checks the whole file

    # Start

    @classmethod
    def open(cls, path: Path) -> EvaluationDatabase:
        """Open the database, and create it if it is missing.

        A damaged file is set aside, and the database begins empty. Raises: ConfigurationError, if
        another daemon uses the file, its format is newer, or the disk fails.
        """
        database = cls(path)
        try:
            database._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            database._open_locked()
        except OSError as error:
            raise ConfigurationError(*describe_database_error(error)) from None
        finally:
            if not hasattr(database, "_connection") and database._lock >= 0:
                os.close(database._lock)
        return database

    def _open_locked(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"{self.path} is in use by another tawebeval",
                "stop it, or set another STATE_DIRECTORY",
            ) from None
        was_closed = os.pread(self._lock, len(_CLOSED), 0) == _CLOSED
        os.ftruncate(self._lock, 0)
        try:
            self._connection = self._connect(was_closed=was_closed)
        except _DAMAGES as error:
            self._connection = self._replace(error)

    def _connect(self, *, was_closed: bool) -> sqlite3.Connection:
        """Return a connection for writing. Raises: OSError, sqlite3.Error, ConfigurationError."""
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = self._make_connection()
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA journal_size_limit = {_MAX_LOG}")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > FORMAT:
                raise ConfigurationError(
                    f"{self.path} has the format {version}, and this tawebeval knows {FORMAT}",
                    "install the newer version again, or move the file away to begin without its"
                    " evaluations",
                )
            if version == 0:
                connection.executescript(_SCHEMA)
            elif version != FORMAT:
                raise sqlite3.DatabaseError(f"its format is {version}")
            elif not was_closed or self.path.stat().st_size <= _CHECKED_BYTES:
                (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
                if found != "ok":
                    raise sqlite3.DatabaseError(found)
        except BaseException:
            connection.close()
            raise
        return connection

    def _make_connection(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=_WAIT, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA cell_size_check = ON")  # finds more damages, and costs nothing
        return connection

    def _replace(self, error: sqlite3.Error | UnicodeDecodeError) -> sqlite3.Connection:
        """Set a damaged file aside and begin a new one. Raises: as `_connect`."""
        what, remedy = describe_database_error(error)
        if _get_code(error) in _REMEDIES:
            raise ConfigurationError(f"{self.path} cannot be opened: {what}", remedy) from None
        name = f"{self.path}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
        for suffix in ("-wal", "-shm", ""):
            if os.path.exists(f"{self.path}{suffix}"):
                os.rename(f"{self.path}{suffix}", f"{name}{suffix}")
        log.error(
            "{path} is damaged, and the daemon begins without its evaluations: {error}; the file is"
            " set aside as {name}; what is left in it can be read by `sqlite3 {name} .recover`",
            path=self.path,
            error=what,
            name=name,
        )
        set_aside = sorted(self.path.parent.glob(f"{self.path.name}.damaged-*[0-9]"))
        for old in set_aside[:-MAX_SET_ASIDE]:
            for suffix in ("-wal", "-shm", ""):
                Path(f"{old}{suffix}").unlink(missing_ok=True)
        try:
            return self._connect(was_closed=False)
        except sqlite3.Error as error:
            what, remedy = describe_database_error(error)
            raise ConfigurationError(f"{self.path} cannot be created: {what}", remedy) from None

    def find_last_sequence_number(self) -> int:
        """Return the highest sequence number of a row, 0 without one or if the file is damaged."""
        try:
            found = self._connection.execute(
                "SELECT max(sequence_number) FROM evaluations WHERE is_live UNION ALL"
                " SELECT max(sequence_number) FROM evaluations WHERE archived_bytes IS NOT NULL"
            )
            return max(number or 0 for (number,) in found)
        except _DAMAGES as error:
            problem = describe_database_error(error)
            log.error("{path} cannot be read: {problem}", path=self.path, problem=problem)  # noqa: TRY400
            return 0

    def load(self, table: Table, unpack: Callable[[bytes], T]) -> dict[str, T]:
        """Return the rows of a table by name, the live evaluations in the order of their numbers.

        A damaged row is logged and deleted. A damaged file is set aside, and the result is empty.
        """
        found: dict[str, T] = {}
        damaged: dict[tuple[Table, str], Values | None] = {}
        query = f"SELECT name, row, checksum FROM {table}"  # noqa: S608
        if table == "evaluations":
            query += " WHERE is_live ORDER BY sequence_number"
        try:
            for name, row, checksum in self._connection.execute(query):
                try:
                    found[name] = _unpack(unpack, row, checksum)
                except DamagedRow as error:
                    words = "{path}: a row of {table} is damaged, and is lost: {error}"
                    log.error(words, path=self.path, table=table, error=error)  # noqa: TRY400
                    damaged[table, name] = None
            if damaged:
                self.write(damaged)
        except _DAMAGES as error:
            self._connection.close()
            self._connection = self._replace(error)
            return {}
        return found

    def close_reader(self) -> None:
        """Close the connection of the thread that reads; call it there."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def close(self) -> None:
        """Close the connection that writes, and let another daemon use the database."""
        self._connection.close()
        if not self._has_failed:
            with suppress(OSError):  # then the next start checks the file
                os.pwrite(self._lock, _CLOSED, 0)
        os.close(self._lock)

    # Writing, in one thread

    def write(self, changes: Mapping[tuple[Table, str], Values | None]) -> None:
        """Write rows, or delete those whose values are None, in one transaction.

        The values are those of all columns, the name first. Raises: sqlite3.Error.
        """
        try:
            with self._connection as connection:  # commits, or rolls back
                connection.execute("BEGIN IMMEDIATE")
                for (table, name), values in changes.items():
                    if values is None:
                        connection.execute(f"DELETE FROM {table} WHERE name = ?", (name,))  # noqa: S608
                    else:
                        places = ", ".join("?" * len(values))
                        insert = f"INSERT OR REPLACE INTO {table} VALUES ({places})"  # noqa: S608
                        connection.execute(insert, values)
        except sqlite3.Error:
            self._has_failed = True
            raise
        self.transaction_count += 1

    # Reading, in one other thread. Raises: sqlite3.Error

    def list_archived(self, query: ArchivedQuery) -> dict[int, ListEntry | None]:
        """Return the entries of the rows of a query, by their numbers."""
        found: dict[int, ListEntry | None] = {}
        for row, checksum in self._read(
            "SELECT row, checksum FROM evaluations WHERE archived_bytes IS NOT NULL"
            " AND caller = ? AND sequence_number > ? AND sequence_number <= ?"
            " ORDER BY sequence_number LIMIT ?",
            query.caller,
            query.after_sequence_number,
            query.last_sequence_number,
            query.max_count,
        ):
            try:
                unpacked = _unpack(unpack_evaluation, row, checksum)
            except DamagedRow as error:
                log.error("{path}: {error}", path=self.path, error=error)  # noqa: TRY400
            else:
                found[unpacked.sequence_number] = query.make_entry(unpacked)
        return found

    def find_archived(self, identifier: str) -> EvaluationRow | None:
        """Return the row of an archived evaluation, None if there is none. Raises: DamagedRow."""
        for row, checksum in self._read(
            "SELECT row, checksum FROM evaluations WHERE name = ? AND archived_bytes IS NOT NULL",
            identifier,
        ):
            return _unpack(unpack_evaluation, row, checksum)
        return None

    def list_oldest_archived(
        self, max_count: int, caller: str | None, ended_before: float
    ) -> list[tuple[str, str, int]]:
        """Return identifier, caller and bytes of up to `max_count` rows, those that ended first."""
        return self._read(
            "SELECT name, caller, archived_bytes FROM evaluations WHERE archived_bytes IS NOT NULL"
            " AND ended < ? AND coalesce(?, caller) = caller ORDER BY ended LIMIT ?",
            ended_before,
            caller,
            max_count,
        )

    def count_archived(self) -> dict[str, tuple[int, int]]:
        """Return the number of archived evaluations of each caller, and their bytes."""
        rows = self._read(
            "SELECT caller, count(*), sum(archived_bytes) FROM evaluations"
            " WHERE archived_bytes IS NOT NULL GROUP BY caller"
        )
        return {caller: (count, size) for caller, count, size in rows}

    def _read(self, statement: str, *parameters: object) -> list[Any]:
        try:
            if self._reading is None:
                self._reading = self._make_connection()
            return self._reading.execute(statement, parameters).fetchall()
        except sqlite3.Error:
            self._has_failed = True
            raise


def _unpack(unpack: Callable[[bytes], T], row: bytes, checksum: int) -> T:
    if compute_checksum(row) != checksum:
        raise DamagedRow("its checksum is wrong")
    try:
        return unpack(row)
    except msgspec.MsgspecError as error:
        raise DamagedRow(str(error)) from None
