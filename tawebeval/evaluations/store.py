"""The store: one row for each evaluation, and the links that outlive the daemon.

A change costs the reactor the packing of the row, about 5 microseconds. One thread writes all that
waits in one transaction: a process that is killed loses nothing that was committed, a power cut at
most the last moments. Only the newest row of each evaluation waits.

When the disk is full or fails, changes wait and are tried again every `WRITE_RETRY_SECONDS`; what
runs goes on, and new evaluations are refused. So at most one row waits for each evaluation that the
daemon has, and one deletion for each that it had when the disk began to fail.

The files, all of them closed to other users:

PATH                            the database of SQLite, which adds PATH-wal and PATH-shm
PATH.lock                       locked by the daemon that uses the database
PATH.damaged-TIME               a damaged database that was set aside
"""

from __future__ import annotations

import fcntl
import math
import os
import sqlite3
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeVar

import attrs
import msgspec
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.config import LimitSettings
from tawebeval.core.evaluations import ArchiveRecord, Commit, EvaluationState, ListEntry
from tawebeval.core.form import EvaluationRequest, pack_request, unpack_request
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.deferreds import FairQueue, WorkerThreads, run_in_background
from tawebeval.errors import (
    ConfigurationError,
    EvaluationFailure,
    FailureReason,
    SetupProblem,
    StoreError,
)
from tawebeval.linux.cgroups import ResourceUsage
from tawebeval.linux.filetree import DISK_FULL_REMEDY, describe_disk_error
from tawebeval.sandbox.base import ClusterJob, Environment, EvaluatorExit
from tawebeval.sandbox.workspace import derive_log_pseudonym
from tawebeval.webhooks.records import CallbackRecord
from tawebeval_client.results import ResultSummary

T = TypeVar("T")

log = Logger()

STDERR_TAIL_BYTES = 8 * 1024
"""Bytes of stderr that are kept, and bytes of UTF-8 that are shown (docs/evaluators.md)."""

_CONTINUING = bytes(range(0x80, 0xC0))  # the bytes of a character but its first


def get_utf8_tail(data: bytes, max_bytes: int) -> bytes:
    """Return the last bytes of `data`, at most `max_bytes`, beginning with a whole character.

    If `data` is not UTF-8 the result may be up to 3 bytes shorter than `max_bytes`.
    """
    if len(data) <= max_bytes:
        return data
    kept = data[len(data) - max_bytes :]
    return kept[:3].lstrip(_CONTINUING) + kept[3:]


@attrs.frozen
class RunResult:
    """Result of a run.

    `exit_status` is None if no evaluator ran. `stderr_tail` has at most `STDERR_TAIL_BYTES` bytes.
    """

    exit_status: EvaluatorExit | None
    usage: ResourceUsage
    stderr_tail: bytes = attrs.field(repr=False)

    @property
    def stderr_text(self) -> str:
        """The tail of stderr as text of at most `STDERR_TAIL_BYTES` bytes of UTF-8."""
        # U+FFFD is longer than the byte that it replaces.
        shown = self.stderr_tail.decode("utf-8", "replace").encode()
        return get_utf8_tail(shown, STDERR_TAIL_BYTES).decode()


class RunRow(msgspec.Struct, omit_defaults=True):
    """An evaluator that runs.

    - `pid`, `start_time_ticks`: its first process, and the time of its start, in clock ticks since
      the boot (proc(5)), by which a process of a later boot, or with a reused PID, is told apart.
    - `sandbox_description`: what the kind of sandbox needs to go on with the run.
    - `monotonic_deadline`: the end of `limits.wall_clock`, in seconds of that clock; None while a
      cluster tells why its job was lost.
    - `handed_to_next_daemon_at`: None after a kill; the time until that daemon goes on does not
      count.
    """

    pid: int
    start_time_ticks: int
    checkout_path: str
    monotonic_deadline: float | None
    handed_to_next_daemon_at: float | None = None
    sandbox_description: dict[str, Any] = {}


@attrs.define(eq=False)
class EvaluationDetails:
    """What is known of one evaluation besides its events; a copy is its row in the store.

    The `Evaluation` changes the details, and all others read them.

    - `packed_request`: the form, after the start without the fields that only a start needs. Text
      of callers and evaluators is kept as bytes, since a `str` may take four times as much.
    - `sequence_number`: the number in the order of acceptance by the registry.
    - `idempotency_key`: the `Idempotency-Key`, None without one; `form_digest`: the digest of the
      form with that key.
    - `upload_directory`: the directory of the form's files, None once the workspace has them.
    - `upload_size`: the bytes of these files, which count for the caller.
    - `should_keep_submission`: whether its files and its request are to be left in the workspace at
      the end; `has_kept_submission`: whether they are there.
    - `state_times`: when each state began, and the keys `created` and `ended`, in seconds since the
      epoch.
    - `limits`, `environment`: those of the run; None before the start.
    - `result_summary`: what the evaluator has reported, None before the start.
    - `run_result`: set when the evaluator has ended.
    - `cluster_job`: the job that runs the evaluator, None on this machine.
    - `failure`: the failure; in a row before the end, the reason of a stop. `failure_event`: its
      event, b"" without one.
    - `counted_problem`: the problem of the request, but None for a rerun that is altered.
      `first_submission_time`: of a rerun, when its files were submitted first.
    - `archive_record`: what the archive has of it, None without an archive or before.
    - `trace`: the headers traceparent of its span and of its request, None without traces.
    - `is_directory_removed`: whether only its copy in the archive and the callback are left of it.

    `Evaluation.make_row` sets these members of the row:

    - `is_forgotten`: whether the registry has forgotten it; the archive may still need it.
    - `segi_markers`: those of stdout (`core.segi`), None before the start.
    - `run`: None unless the evaluator runs.
    - `begin_cursor`: the acknowledged cursor. `end_cursor`: the cursor at the end, 0 before.
    - `has_lost_events`: whether clients may have received newest events that are lost.

    A packed row takes 1 to 3 KiB. At most it takes the fields of the form that are no files (each
    64 KiB), 8 KiB of stderr in the result and three times that in the failure, 17 KiB of goals, and
    the paths and variables of the operator's configuration; and as much again for the document of a
    callback until that is delivered.
    """

    identifier: str
    packed_request: bytes = attrs.field(repr=False)
    seed: int
    sequence_number: int = 0
    state: EvaluationState = EvaluationState.QUEUED
    caller: str = ANONYMOUS_CALLER
    state_times: dict[str, float] = attrs.field(factory=dict)
    idempotency_key: str | None = None
    form_digest: bytes = b""
    upload_directory: Path | None = None
    upload_size: int = 0
    should_keep_submission: bool = False
    has_kept_submission: bool = False
    callback: CallbackRecord | None = None
    commit: Commit | None = None
    limits: LimitSettings | None = None
    environment: Environment | None = None
    cluster_job: ClusterJob | None = None
    result_summary: ResultSummary | None = None
    run_result: RunResult | None = None
    failure: EvaluationFailure | None = None
    failure_event: bytes = b""
    archive_record: ArchiveRecord | None = None
    is_directory_removed: bool = False
    is_cleaned_up: bool = False
    is_forgotten: bool = False
    segi_markers: tuple[bytes, bytes, bytes, bytes] | None = None
    run: RunRow | None = None
    begin_cursor: int = 0
    end_cursor: int = 0
    has_lost_events: bool = False
    counted_problem: str | None = None
    first_submission_time: float | None = None
    trace: tuple[str, str] | None = None

    @property
    def last_visible_state(self) -> EvaluationState:
        """The state, or that in which it ended once only its identifier is left."""
        if self.state not in (EvaluationState.DRAINED, EvaluationState.EXPIRED):
            return self.state
        if self.failure is None:
            return EvaluationState.FINISHED
        cancelled = self.failure.reason == "cancelled"
        return EvaluationState.CANCELLED if cancelled else EvaluationState.FAILED

    @property
    def has_pending_callback(self) -> bool:
        """Whether a callback is to be sent, now or at the end."""
        return self.callback is not None and not self.callback.state.is_final

    @property
    def log_name(self) -> str:
        """Name in the log, from which the identifier cannot be guessed."""
        return derive_log_pseudonym(self.identifier)

    @property
    def request(self) -> EvaluationRequest:
        """The form; after the start without the fields that only a start needs."""
        return unpack_request(self.packed_request)

    def drop_start_only_fields(self) -> None:
        """Drop the fields of the request that only a start needs."""
        self.packed_request = pack_request(self.request.drop_start_only_fields())

    def set_request_commit_oid(self, oid: str) -> None:
        """Put the newest commit of the branch into a request without a commit."""
        self.packed_request = pack_request(attrs.evolve(self.request, commit_oid=oid))

    def set_commit(self, commit: Commit) -> None:
        """Note the commit that was checked out; it replaces the OID of its tag in the request."""
        self.commit = commit
        if self.request.commit_oid != commit.oid:
            self.set_request_commit_oid(commit.oid)

    def pack_request_for_rerun(self) -> bytes:
        """Return the packed request with the seed in use; the callback was for this run."""
        return pack_request(
            attrs.evolve(
                self.request,
                seed=self.seed,
                callback_url=None,
                submission_time=self.submission_time,
            )
        )

    @property
    def submission_time(self) -> float:
        """When the files were submitted, of a rerun those of the first evaluation."""
        first = self.first_submission_time
        return self.state_times.get("created", 0.0) if first is None else first

    def compute_points_fraction(self) -> float | None:
        """Return the part of the points that was reached, less than any for a bad end.

        None before the end.
        """
        if not self.state.has_ended:
            return None
        if self.failure is not None and self.failure.reason in _REASONS_NOT_JUDGED:
            return _NOT_JUDGED
        if self.last_visible_state is not EvaluationState.FINISHED or self.result_summary is None:
            return _FAILED
        return self.result_summary.compute_share()


def format_rfc3339_time(timestamp: float) -> str:
    """Format a time, in seconds since the epoch, as in RFC 3339: as clients see it."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds")


class EvaluationLinksRow(msgspec.Struct, frozen=True):
    """The links of one evaluation; the last expires `last_expiry_time` seconds after the epoch.

    Links of another `link_generation` are revoked.
    """

    caller: str
    link_generation: bytes
    last_expiry_time: int


@attrs.frozen
class Standing:
    """What a caller has reached in a problem.

    Of `submission_count` submissions `ended_count` are evaluated; `last_submission_time` is in
    seconds since the epoch. `best_evaluation` is the row of the best one, the earliest of several.
    """

    caller: str
    problem: str
    submission_count: int
    ended_count: int
    last_submission_time: float
    best_evaluation: EvaluationDetails


_encoder = msgspec.msgpack.Encoder(enc_hook=str)  # of a Path


def pack_row(row: msgspec.Struct | EvaluationDetails) -> bytes:
    """Return a row as bytes of MessagePack."""
    return _encoder.encode(row)


def _make_decoder(kind: type[T]) -> Callable[[bytes], T]:
    return msgspec.msgpack.Decoder(kind, dec_hook=lambda _, value: Path(value)).decode


unpack_evaluation = _make_decoder(EvaluationDetails)
unpack_links = _make_decoder(EvaluationLinksRow)


_FAILED = -1e17  # points of a bad end: less than any score
_NOT_JUDGED = -1e18  # of an end that tells nothing of the submission
_REASONS_NOT_JUDGED: frozenset[FailureReason] = frozenset(
    {"repository", "node", "preempted", "revoked", "cancelled", "shutdown", "lost"}
)

STORE_FORMAT = 4
"""The number of the format of tables and rows."""

MAX_DAMAGED_DATABASES = 3
"""Damaged databases that are kept, at most; the oldest are removed."""

TableName = Literal["evaluations", "links"]
ColumnValues = tuple[Any, ...]
RowChanges = dict[tuple[TableName, str], ColumnValues | None]

_SCHEMA = f"""
BEGIN;
CREATE TABLE evaluations (
    name TEXT PRIMARY KEY,             -- the identifier
    row BLOB NOT NULL,
    checksum INTEGER NOT NULL,         -- CRC-32 of the row
    sequence_number INTEGER NOT NULL,  -- in the order of acceptance
    caller TEXT NOT NULL,
    ended REAL,                        -- seconds since the epoch
    archived_bytes INTEGER,            -- NULL unless it is in the archive
    is_live INTEGER NOT NULL,          -- 0 if only the archive needs it
    problem TEXT,                      -- its name, NULL for none
    submitted REAL,                    -- seconds since the epoch, the same for a rerun
    points REAL                        -- NULL before the end
);
CREATE INDEX live ON evaluations (sequence_number) WHERE is_live;
CREATE INDEX archived ON evaluations (caller, sequence_number, archived_bytes)
    WHERE archived_bytes IS NOT NULL;
CREATE INDEX archived_order ON evaluations (sequence_number) WHERE archived_bytes IS NOT NULL;
CREATE INDEX standings ON evaluations (caller, problem, submitted, sequence_number, points, name)
    WHERE problem IS NOT NULL;
CREATE INDEX ended ON evaluations (ended, caller) WHERE archived_bytes IS NOT NULL;
CREATE TABLE links (name TEXT PRIMARY KEY, row BLOB NOT NULL, checksum INTEGER NOT NULL);
PRAGMA user_version = {STORE_FORMAT};
COMMIT;
"""
_NEXT_PROBLEM = "SELECT min(problem) FROM evaluations WHERE caller = ? AND problem > ?"
# Of the evaluations of a submission the newest counts that was judged, or a mended evaluator would
# change nothing; without such a one the newest. SQLite takes `name` from the row of the maximum
# (its manual: bare columns in an aggregate query). In the order of the index it sorts nothing.
_STANDING = f"""
WITH submissions AS (
    SELECT points, name,
        max(sequence_number - (coalesce(points, {_NOT_JUDGED}) <= {_NOT_JUDGED}) * (1 << 62))
    FROM evaluations WHERE caller = ?1 AND problem = ?2 GROUP BY submitted
), cell AS (
    SELECT count(*) AS tries, count(points) AS ended, name, max(coalesce(points, -9e999))
    FROM submissions
)
SELECT tries, cell.ended, (
    SELECT max(submitted) FROM evaluations WHERE caller = ?1 AND problem = ?2
), row, checksum FROM cell JOIN evaluations USING (name)
"""  # noqa: S608
MAX_STANDINGS_PER_PAGE = 50
"""Standings in one answer, at most: each takes a thread 0.1 ms, and 1 ms for 1,000 evaluations."""
_MAX_STANDINGS_SECONDS = 0.02  # after which no other one follows: commits wait for an answer
_WAIT = 2.0  # seconds for which a transaction waits for that of another program
_MAX_LOG = 16 * 2**20  # bytes of the write-ahead log that stay after a checkpoint
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


def _unpack(unpack: Callable[[bytes], T], row: bytes, checksum: int) -> T:
    # SQLite has no checksums, so it returns damaged bytes as good.
    if zlib.crc32(row) != checksum:
        raise DamagedRow("its checksum is wrong")
    try:
        return unpack(row)
    except msgspec.MsgspecError as error:
        raise DamagedRow(str(error)) from None


WRITE_RETRY_SECONDS = 5
"""Seconds between two attempts to write while the disk is full or fails."""
SAVE_DELAY_SECONDS = 0.05
"""Seconds until a change is written that nobody waits for, if no other one is before.

Most evaluations change again meanwhile, and each transaction switches threads ten times.
"""


@attrs.define(eq=False)
class EvaluationStore:
    """The store in the database `path`; made by `open`.

    `thread` is a pool of one thread, which reads and writes. The methods `load_*` block; they are
    for the start, before the first change. `write_failure_reason` says why changes cannot be
    written now, None if they can. `transaction_count` is the number of transactions that were
    committed since the start.
    """

    _path: Path
    _thread: WorkerThreads
    _clock: IReactorTime
    write_failure_reason: str | None = None
    transaction_count: int = 0
    _lock: int = -1
    _connection: sqlite3.Connection = attrs.field(init=False)
    _waiting: RowChanges = attrs.field(factory=dict)
    _flushing: list[Deferred[None]] = attrs.field(factory=list)
    _is_writing: bool = False
    _is_closed: bool = False
    # A list takes some milliseconds of a processor.
    _lists: FairQueue = attrs.field(factory=lambda: FairQueue(1))
    _next_attempt: IDelayedCall | None = None

    # Start

    @classmethod
    def open(cls, path: Path, thread: WorkerThreads, clock: IReactorTime) -> EvaluationStore:
        """Open the database, and create it if it is missing. Blocks.

        A damaged file is set aside, and the database begins empty. Raises: ConfigurationError, if
        another daemon uses the file, its format is another, or the disk fails.
        """
        store = cls(path, thread, clock)
        try:
            store._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(store._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                store._connection = store._connect()
            except _DAMAGES as error:
                store._connection = store._replace(error)
        except BlockingIOError:
            raise ConfigurationError(
                f"{path} is in use by another tawebeval",
                "stop it, or set another STATE_DIRECTORY",
            ) from None
        except OSError as error:
            raise ConfigurationError(*describe_database_error(error)) from None
        finally:
            if not hasattr(store, "_connection") and store._lock >= 0:
                os.close(store._lock)
        return store

    def _connect(self) -> sqlite3.Connection:
        """Return the connection. Raises: OSError, sqlite3.Error, ConfigurationError."""
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(
            self._path, timeout=_WAIT, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA cell_size_check = ON")  # finds more damages for nothing
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA journal_size_limit = {_MAX_LOG}")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version < 0:
                raise sqlite3.DatabaseError(f"its format is {version}")
            if version not in (0, STORE_FORMAT):
                raise ConfigurationError(
                    f"{self._path} has the format {version}; this tawebeval knows {STORE_FORMAT}",
                    "install the version that wrote it, or move the file with its evaluations away",
                )
            if version == 0:
                connection.executescript(_SCHEMA)
            else:  # takes 0.1 s for 64 MiB
                (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
                if found != "ok":
                    raise sqlite3.DatabaseError(found)
        except BaseException:
            connection.close()
            raise
        return connection

    def _replace(self, error: sqlite3.Error | UnicodeDecodeError) -> sqlite3.Connection:
        """Set a damaged file aside and begin a new one. Raises: as `_connect`."""
        what, remedy = describe_database_error(error)
        if _get_code(error) in _REMEDIES:
            raise ConfigurationError(f"{self._path} cannot be opened: {what}", remedy) from None
        name = f"{self._path}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
        for suffix in ("-wal", "-shm", ""):
            if os.path.exists(f"{self._path}{suffix}"):
                os.rename(f"{self._path}{suffix}", f"{name}{suffix}")
        log.error(
            "{path} is damaged ({what}), and the daemon begins without its evaluations and links;"
            " the file is set aside as {name}; what is left in it can be read by `sqlite3 {name}"
            " .recover`",
            path=self._path,
            what=what,
            name=name,
        )
        set_aside = sorted(self._path.parent.glob(f"{self._path.name}.damaged-*[0-9]"))
        for old in set_aside[:-MAX_DAMAGED_DATABASES]:
            for suffix in ("-wal", "-shm", ""):
                Path(f"{old}{suffix}").unlink(missing_ok=True)
        try:
            return self._connect()
        except sqlite3.Error as error:
            what, remedy = describe_database_error(error)
            raise ConfigurationError(f"{self._path} cannot be created: {what}", remedy) from None

    def find_last_sequence_number(self) -> int:
        """Return the highest sequence number of a row, 0 without one."""
        found = self._connection.execute(
            "SELECT max(sequence_number) FROM evaluations WHERE is_live UNION ALL"
            " SELECT max(sequence_number) FROM evaluations WHERE archived_bytes IS NOT NULL"
        )
        return max(number or 0 for (number,) in found)

    def load_live_rows(self) -> list[EvaluationDetails]:
        """Return the rows that not only the archive needs, in the order of their numbers."""
        return list(self._load("evaluations", unpack_evaluation).values())

    def load_links(self) -> dict[str, EvaluationLinksRow]:
        """Return the links by the identifiers of their evaluations."""
        return self._load("links", unpack_links)

    def _load(self, table: TableName, unpack: Callable[[bytes], T]) -> dict[str, T]:
        """Return the rows of a table by name, the live evaluations in the order of their numbers.

        A damaged row is logged and deleted. A damaged file is set aside, and the result is empty.
        """
        found: dict[str, T] = {}
        damaged: RowChanges = {}
        query = f"SELECT name, row, checksum FROM {table}"  # noqa: S608
        if table == "evaluations":
            query += " WHERE is_live ORDER BY sequence_number"
        try:
            for name, row, checksum in self._connection.execute(query):
                try:
                    found[name] = _unpack(unpack, row, checksum)
                except DamagedRow as error:
                    words = "{path}: a row of {table} is damaged, and is lost: {error}"
                    log.error(words, path=self._path, table=table, error=error)  # noqa: TRY400
                    damaged[table, name] = None
            if damaged:
                self._write_changes(damaged)
        except _DAMAGES as error:
            self._connection.close()
            self._connection = self._replace(error)
            return {}
        return found

    # Writing

    def add(self, row: EvaluationDetails) -> Deferred[None]:
        """Write the row of a new evaluation; the Deferred fires once it is committed.

        It fails with StoreError if the row cannot be written; then nothing of the row is kept.
        """
        self._set_evaluation(row)

        def drop(failure: Failure) -> Failure:
            self._waiting.pop(("evaluations", row.identifier), None)
            return failure

        return self.flush().addErrback(drop)

    def save(self, row: EvaluationDetails) -> None:
        """Write a row in place of the one with its identifier, soon or with the next flush."""
        self._set_evaluation(row)
        self._write_soon()

    def _set_evaluation(self, row: EvaluationDetails) -> None:
        packed = pack_row(row)
        self._waiting["evaluations", row.identifier] = (
            row.identifier,
            packed,
            zlib.crc32(packed),
            row.sequence_number,
            row.caller,
            row.state_times.get("ended"),
            None if row.archive_record is None else row.archive_record.file_bytes,
            row.archive_record is None or not row.is_forgotten or row.has_pending_callback,
            row.counted_problem,
            row.submission_time,
            row.compute_points_fraction(),
        )

    def delete(self, identifier: str) -> None:
        """Delete the row of an evaluation, if there is one."""
        self._change("evaluations", identifier, None)

    def save_links(self, identifier: str, link: EvaluationLinksRow | None) -> None:
        """Write the links of an evaluation in place of the present ones; None deletes them."""
        self._change("links", identifier, link)

    def _change(self, table: TableName, name: str, row: msgspec.Struct | None) -> None:
        packed = b"" if row is None else pack_row(row)
        values = None if row is None else (name, packed, zlib.crc32(packed))
        self._waiting[table, name] = values
        self._write_soon()

    def flush(self) -> Deferred[None]:
        """Return a Deferred that fires once all changes until now are committed.

        It fails with StoreError if an attempt to write them fails; they are still tried again.
        """
        flushed: Deferred[None] = Deferred()
        self._flushing.append(flushed)
        self._start_writing()
        return flushed

    def flush_soon(self) -> Deferred[None]:
        """Return such a Deferred where no client waits for it: it starts no transaction now."""
        flushed: Deferred[None] = Deferred()
        self._flushing.append(flushed)
        self._write_soon()
        return flushed

    async def close(self) -> None:
        """Write what waits, and close the database. What cannot be written is logged.

        What changes later is not written, and its Deferreds never fire: it must not be told.
        """
        with suppress(StoreError):
            await self.flush()
        self._is_closed = True
        if self._waiting:
            words = "{problem}; the changes that wait are lost: {count}"
            log.error(words, problem=self.write_failure_reason, count=len(self._waiting))
        self._cancel_attempt()
        await self._thread.run_in_thread(self._disconnect)

    def _disconnect(self) -> None:
        """Close the connection, and let another daemon use the database."""
        self._connection.close()
        os.close(self._lock)

    def _write_soon(self) -> None:
        """Write what waits in `SAVE_DELAY_SECONDS`, but after a failure with the next attempt."""
        is_planned = self._next_attempt is not None and self._next_attempt.active()
        if not (is_planned or self._is_writing or self._is_closed):
            self._next_attempt = self._clock.callLater(SAVE_DELAY_SECONDS, self._start_writing)

    def _start_writing(self) -> None:
        if not (self._is_writing or self._is_closed):
            self._is_writing = True
            run_in_background(self._write_all(), log, "defect: evaluations cannot be stored")

    async def _write_all(self) -> None:
        """Write what waits, and what is to be flushed meanwhile."""
        is_due = True
        try:
            while not self._is_closed and (is_due or self._flushing):
                is_due = False
                changes, flushing = self._waiting, self._flushing
                self._waiting, self._flushing = {}, []
                # After a failure a transaction without changes finds out if others are possible.
                if changes or self.write_failure_reason is not None:
                    problem = None
                    try:
                        await self._thread.run_in_thread(self._write_changes, changes)
                    except (sqlite3.Error, OSError) as error:
                        problem = describe_database_error(error)
                    self._set_problem(problem)
                if self.write_failure_reason is None:
                    for deferred in flushing:
                        deferred.callback(None)
                    continue
                self._waiting = changes | self._waiting
                for deferred in flushing:
                    deferred.errback(StoreError())
        finally:
            self._is_writing = False
            if self._waiting:
                self._write_soon()

    def _write_changes(self, changes: RowChanges) -> None:
        """Write rows, or delete those whose values are None, in one transaction.

        The values are those of all columns, the name first. Raises: sqlite3.Error.
        """
        with self._connection as connection:  # commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            for (table, name), values in changes.items():
                if values is None:
                    connection.execute(f"DELETE FROM {table} WHERE name = ?", (name,))  # noqa: S608
                else:
                    places = ", ".join("?" * len(values))
                    insert = f"INSERT OR REPLACE INTO {table} VALUES ({places})"  # noqa: S608
                    connection.execute(insert, values)
        self.transaction_count += 1

    def _set_problem(self, problem: SetupProblem | None) -> None:
        """Note whether changes can be written, and have them tried again later if not."""
        path, had_problem = self._path, self.write_failure_reason is not None
        self.write_failure_reason = problem and f"{path} cannot be written: {problem}"
        if problem is not None and not had_problem:
            log.error(
                "{problem}; until then new evaluations are refused, and changes of the others are"
                f" tried again every {WRITE_RETRY_SECONDS} seconds",
                problem=self.write_failure_reason,
            )
        elif problem is None and had_problem:
            log.info("{path} can be written again", path=path)
        self._cancel_attempt()
        if problem is not None:
            self._next_attempt = self._clock.callLater(WRITE_RETRY_SECONDS, self._start_writing)

    def _cancel_attempt(self) -> None:
        if self._next_attempt is not None and self._next_attempt.active():
            self._next_attempt.cancel()

    # Reading archived evaluations. Raises: StoreError

    async def list_archived(
        self,
        reader: str,
        callers: Collection[str],
        after_sequence_number: int,
        last_sequence_number: int,
        max_count: int,
        make_entry: Callable[[EvaluationDetails], ListEntry | None],
    ) -> dict[int, ListEntry | None]:
        """Return the entries of the first archived evaluations of `callers` in a range of numbers.

        They are by their sequence numbers. `make_entry(row)`, called in a thread, returns what a
        list shows of a row, None for a row that the list leaves out. For several callers, those of
        others count as left out. Readers take turns, and other reads wait for one list at most.
        """
        query = (
            "SELECT row, checksum, caller, sequence_number FROM evaluations"
            " WHERE archived_bytes IS NOT NULL AND sequence_number > ? AND sequence_number <= ?"
        )
        only = callers if len(callers) == 1 else ()
        query += " AND caller = ?" if only else ""
        query += " ORDER BY sequence_number LIMIT ?"
        values = after_sequence_number, last_sequence_number, *only, max_count

        def list_rows() -> dict[int, ListEntry | None]:
            found: dict[int, ListEntry | None] = {}
            for row, checksum, caller, number in self._select(query, *values):
                if caller not in callers:
                    found[number] = None
                    continue
                try:
                    unpacked = _unpack(unpack_evaluation, row, checksum)
                except DamagedRow as error:
                    log.error("{path}: {error}", path=self._path, error=error)  # noqa: TRY400
                    found[number] = None  # or the list would end here
                else:
                    found[number] = make_entry(unpacked)
            return found

        return await self._lists.run_in_turn(reader, partial(self._read, list_rows))

    async def list_caller_standings(
        self,
        reader: str,
        callers: Iterable[str],
        after: tuple[str, str],
        problem: str | None,
        make_entry: Callable[[Standing], ListEntry],
    ) -> tuple[list[tuple[tuple[str, str], ListEntry]], tuple[str, str] | None]:
        """Return entries of standings by caller and problem, in this order, from `after` on.

        They are those of the callers and, unless it is None, of `problem`. There are up to
        `MAX_STANDINGS_PER_PAGE`, and fewer if they take long. The second value is where the next
        part begins, None at the end. `make_entry` is called in a thread. Readers take turns, as at
        lists.
        """

        def list_rows() -> tuple[list[tuple[tuple[str, str], ListEntry]], tuple[str, str] | None]:
            found: list[tuple[tuple[str, str], ListEntry]] = []
            count, deadline = 0, monotonic() + _MAX_STANDINGS_SECONDS
            for caller, name in self._list_places(callers, after, problem):
                for tries, ended, last, row, checksum in self._select(_STANDING, caller, name):
                    count += 1
                    try:
                        best = _unpack(unpack_evaluation, row, checksum)
                    except DamagedRow as error:
                        log.error("{path}: {error}", path=self._path, error=error)  # noqa: TRY400
                    else:
                        standing = Standing(caller, name, tries, ended, last, best)
                        found.append(((caller, name), make_entry(standing)))
                if count >= MAX_STANDINGS_PER_PAGE or monotonic() >= deadline:
                    return found, (caller, name)
            return found, None

        return await self._lists.run_in_turn(reader, partial(self._read, list_rows))

    def _list_places(
        self, callers: Iterable[str], after: tuple[str, str], problem: str | None
    ) -> Iterator[tuple[str, str]]:
        """Yield callers and problems after a place; with `problem` also where there is no row."""
        for caller in sorted(caller for caller in callers if caller >= after[0]):
            name = after[1] if caller == after[0] else ""
            if problem is not None:
                if problem > name:
                    yield caller, problem
                continue
            while (name := self._select(_NEXT_PROBLEM, caller, name)[0][0]) is not None:
                yield caller, name

    async def find_archived(self, identifier: str) -> EvaluationDetails | None:
        """Return the row of an archived evaluation, None if there is none."""

        def find() -> EvaluationDetails | None:
            for row, checksum in self._select(
                "SELECT row, checksum FROM evaluations"
                " WHERE name = ? AND archived_bytes IS NOT NULL",
                identifier,
            ):
                return _unpack(unpack_evaluation, row, checksum)
            return None

        return await self._read(find)

    async def list_oldest_archived(
        self, max_count: int, *, caller: str | None = None, ended_before: float = math.inf
    ) -> list[tuple[str, str, int]]:
        """Return identifier, caller and bytes of up to `max_count` archived evaluations.

        Those that ended first come first; of all callers if `caller` is None.
        """
        return await self._read(
            self._select,
            "SELECT name, caller, archived_bytes FROM evaluations WHERE archived_bytes IS NOT NULL"
            " AND ended < ? AND coalesce(?, caller) = caller ORDER BY ended LIMIT ?",
            ended_before,
            caller,
            max_count,
        )

    async def count_archived(self) -> dict[str, tuple[int, int]]:
        """Return the number of archived evaluations of each caller, and their bytes."""
        rows = await self._read(
            self._select,
            "SELECT caller, count(*), sum(archived_bytes) FROM evaluations"
            " WHERE archived_bytes IS NOT NULL GROUP BY caller",
        )
        return {caller: (count, size) for caller, count, size in rows}

    async def _read(self, call: Callable[..., T], *arguments: Any) -> T:
        try:
            return await self._thread.run_in_thread(call, *arguments)
        except sqlite3.Error as error:
            words = "{path} cannot be read: {problem}"
            problem = describe_database_error(error)
            log.error(words, path=self._path, problem=problem)  # noqa: TRY400
            raise StoreError from None

    def _select(self, statement: str, *parameters: object) -> list[Any]:
        return self._connection.execute(statement, parameters).fetchall()
