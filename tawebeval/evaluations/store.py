"""The store: one row for each evaluation, and the callbacks and links that outlive the daemon.

A change costs the reactor the packing of the row, about 5 microseconds. One thread writes all that
waits in one transaction: a process that is killed loses nothing that was committed, a power cut at
most the last moments. Only the newest row of each evaluation waits.

When the disk is full or fails, changes wait and are tried again every `RETRY_SECONDS`; what runs
goes on, and new evaluations are refused. So at most one row waits for each evaluation that the
daemon has, and one deletion for each that it had when the disk began to fail.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from tawebeval.core.evaluations import ListEntry
from tawebeval.deferreds import UNLIMITED_WAITERS, FairQueue, WorkerThreads, run_in_background
from tawebeval.errors import SetupProblem, StoreError
from tawebeval.evaluations.database import (
    ArchivedQuery,
    EvaluationDatabase,
    EvaluationRow,
    LinkRow,
    PendingCallback,
    Table,
    Values,
    compute_checksum,
    describe_database_error,
    pack,
    unpack_callback,
    unpack_evaluation,
    unpack_link,
)

RETRY_SECONDS = 5
"""Seconds between two attempts to write while the disk is full or fails."""

T = TypeVar("T")
Changes = dict[tuple[Table, str], Values | None]

log = Logger()


@attrs.define(eq=False)
class EvaluationStore:
    """The store in a `database`.

    `writer` and `reader` are pools of one thread each. The methods `load_*` block; they are for the
    start, before the first change. `problem` says why changes cannot be written now, None if they
    can.
    """

    _database: EvaluationDatabase
    _writer: WorkerThreads
    _reader: WorkerThreads
    _clock: IReactorTime
    problem: str | None = None
    _waiting: Changes = attrs.field(factory=dict)
    _adding: dict[str, Deferred[None]] = attrs.field(factory=dict)  # by identifier
    _flushing: list[Deferred[None]] = attrs.field(factory=list)
    _is_writing: bool = False
    _is_closed: bool = False
    # A list takes some milliseconds of a processor.
    _lists: FairQueue = attrs.field(factory=lambda: FairQueue(1, UNLIMITED_WAITERS))
    _retry: IDelayedCall | None = None

    @classmethod
    def open(
        cls, path: Path, writer: WorkerThreads, reader: WorkerThreads, clock: IReactorTime
    ) -> EvaluationStore:
        """Return the store in the file `path`. Blocks. Raises: as `EvaluationDatabase.open`."""
        return cls(EvaluationDatabase.open(path), writer, reader, clock)

    # Start

    def find_last_sequence_number(self) -> int:
        """Return the highest sequence number of an evaluation, 0 without one. Blocks."""
        return self._database.find_last_sequence_number()

    @property
    def transaction_count(self) -> int:
        """The number of transactions that were committed since the start."""
        return self._database.transaction_count

    def load_live(self) -> list[EvaluationRow]:
        """Return the rows of all evaluations that are not in the archive alone, by number."""
        return list(self._database.load("evaluations", unpack_evaluation).values())

    def load_callbacks(self) -> dict[str, PendingCallback]:
        """Return the callbacks by name."""
        return self._database.load("callbacks", unpack_callback)

    def load_links(self) -> dict[str, LinkRow]:
        """Return the links by the identifiers of their evaluations."""
        return self._database.load("links", unpack_link)

    # Writing

    def add(self, row: EvaluationRow) -> Deferred[None]:
        """Write the row of a new evaluation; the Deferred fires once it is committed.

        It fails with StoreError if the row cannot be written; then nothing of the row is kept.
        """
        added = self._adding[row.identifier] = Deferred()
        self._set_evaluation(row)
        self._start_writing()
        return added

    def save(self, row: EvaluationRow) -> None:
        """Write a row in place of the one with its identifier."""
        self._set_evaluation(row)
        self._write_soon()

    def _set_evaluation(self, row: EvaluationRow) -> None:
        packed = pack(row)
        self._waiting["evaluations", row.identifier] = (
            row.identifier,
            packed,
            compute_checksum(packed),
            row.sequence_number,
            row.caller,
            row.state_times.get("ended"),
            None if row.archived is None else row.archived.file_bytes,
            row.archived is None or not row.is_forgotten,
        )

    def delete(self, identifier: str) -> None:
        """Delete the row of an evaluation, if there is one."""
        self._change("evaluations", identifier, None)

    def save_callback(self, name: str, callback: PendingCallback) -> None:
        """Write a callback in place of the one with its name."""
        self._change("callbacks", name, callback)

    def delete_callback(self, name: str) -> None:
        """Delete a callback, if there is one."""
        self._change("callbacks", name, None)

    def save_link(self, identifier: str, link: LinkRow) -> None:
        """Write the links of an evaluation in place of the present ones."""
        self._change("links", identifier, link)

    def delete_link(self, identifier: str) -> None:
        """Delete the links of an evaluation, if there are any."""
        self._change("links", identifier, None)

    def _change(self, table: Table, name: str, row: msgspec.Struct | None) -> None:
        packed = b"" if row is None else pack(row)
        self._waiting[table, name] = (
            None if row is None else (name, packed, compute_checksum(packed))
        )
        self._write_soon()

    def flush(self) -> Deferred[None]:
        """Return a Deferred that fires once all changes until now are committed.

        It fails with StoreError if an attempt to write them fails; they are still tried again.
        """
        flushed: Deferred[None] = Deferred()
        self._flushing.append(flushed)
        self._start_writing()
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
            log.error(words, problem=self.problem, count=len(self._waiting))
        self._cancel_retry()
        await self._reader.run_in_thread(self._database.close_reader)
        await self._writer.run_in_thread(self._database.close)

    def _write_soon(self) -> None:
        """Write what waits, but after a failure no sooner than the next attempt."""
        if self.problem is None:
            self._start_writing()

    def _start_writing(self) -> None:
        if not (self._is_writing or self._is_closed):
            self._is_writing = True
            run_in_background(self._write_all(), log, "defect: evaluations cannot be stored")

    async def _write_all(self) -> None:
        try:
            failed = False
            while not self._is_closed and (
                self._adding
                or self._flushing
                or ((self._waiting or self.problem is not None) and not failed)
            ):
                failed = not await self._write_waiting()
        finally:
            self._is_writing = False

    async def _write_waiting(self) -> bool:
        """Write all that waits in one transaction; return whether it was committed."""
        changes, adding, flushing = self._waiting, self._adding, self._flushing
        self._waiting, self._adding, self._flushing = {}, {}, []
        # After a failure a transaction without changes finds out whether others are possible.
        if changes or self.problem is not None:
            self._set_problem(await self._writer.run_in_thread(self._try_to_write, changes))
        if self.problem is None:
            for deferred in (*adding.values(), *flushing):
                deferred.callback(None)
            return True
        self._waiting = changes | self._waiting
        for identifier in adding:
            del self._waiting["evaluations", identifier]
        for deferred in (*adding.values(), *flushing):
            deferred.errback(StoreError())
        return False

    def _try_to_write(self, changes: Changes) -> SetupProblem | None:
        """Return the problem, None after a commit. Blocks."""
        try:
            self._database.write(changes)
        except (sqlite3.Error, OSError) as error:
            return describe_database_error(error)
        return None

    def _set_problem(self, problem: SetupProblem | None) -> None:
        """Note whether changes can be written, and have them tried again later if not."""
        path, had_problem = self._database.path, self.problem is not None
        self.problem = None if problem is None else f"{path} cannot be written: {problem}"
        if problem is not None and not had_problem:
            log.error(
                "{problem}; until then new evaluations are refused, and changes of the others are"
                f" tried again every {RETRY_SECONDS} seconds",
                problem=self.problem,
            )
        elif problem is None and had_problem:
            log.info("{path} can be written again", path=path)
        self._cancel_retry()
        if problem is not None:
            self._retry = self._clock.callLater(RETRY_SECONDS, self._start_writing)

    def _cancel_retry(self) -> None:
        if self._retry is not None and self._retry.active():
            self._retry.cancel()

    # Reading archived evaluations. Raises: StoreError

    async def list_archived(self, query: ArchivedQuery) -> dict[int, ListEntry | None]:
        """Return the entries of a query's archived evaluations, by their sequence numbers.

        Callers take turns, and other reads wait for one list at most.
        """
        call = partial(self._read, self._database.list_archived, query)
        return await self._lists.run_in_turn(query.caller, call)

    async def find_archived(self, identifier: str) -> EvaluationRow | None:
        """Return the row of an archived evaluation, None if there is none."""
        return await self._read(self._database.find_archived, identifier)

    async def list_oldest_archived(
        self, max_count: int, *, caller: str | None = None, ended_before: float = math.inf
    ) -> list[tuple[str, str, int]]:
        """Return identifier, caller and bytes of up to `max_count` archived evaluations.

        Those that ended first come first; of all callers if `caller` is None.
        """
        return await self._read(
            self._database.list_oldest_archived, max_count, caller, ended_before
        )

    async def count_archived(self) -> dict[str, tuple[int, int]]:
        """Return the number of archived evaluations of each caller, and their bytes."""
        return await self._read(self._database.count_archived)

    async def _read(self, call: Callable[..., T], *arguments: Any) -> T:
        try:
            return await self._reader.run_in_thread(call, *arguments)
        except sqlite3.Error as error:
            words = "{path} cannot be read: {problem}"
            problem = describe_database_error(error)
            log.error(words, path=self._database.path, problem=problem)  # noqa: TRY400
            raise StoreError from None
