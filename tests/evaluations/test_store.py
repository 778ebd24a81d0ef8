"""`evaluations.store` over real databases: what was committed is there, and no more is said."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tawebeval.config import LimitSettings
from tawebeval.core.evaluations import (
    ArchiveRecord,
    Commit,
    EvaluationState,
    ListEntry,
    Submodule,
)
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import (
    ConfigurationError,
    EvaluationFailure,
    FailureReason,
    StoreError,
)
from tawebeval.evaluations import store as store_module
from tawebeval.evaluations.store import (
    SAVE_DELAY_SECONDS,
    WRITE_RETRY_SECONDS,
    EvaluationDetails,
    EvaluationLinksRow,
    EvaluationStore,
    RunResult,
    RunRow,
    Standing,
    pack_row,
    unpack_evaluation,
)
from tawebeval.linux.cgroups import ResourceUsage
from tawebeval.sandbox.base import ClusterJob, Environment, EvaluatorExit
from tawebeval.webhooks.records import CallbackRecord, CallbackState
from tawebeval_client.results import ResultSummary
from tests.fakes.world import InlineThreads, SlowThreads

T = TypeVar("T")
LIMITS = msgspec.json.decode(msgspec.json.encode(LimitSettings()), type=LimitSettings)


def make_row(
    number: int, caller: str = "bob", *, identifier: str = "", **members: Any
) -> EvaluationDetails:
    """Return the row of an evaluation that waits."""
    times = {"created": float(number)}
    name = identifier or f"e{number}"
    return EvaluationDetails(name, b"form", 5, number, caller=caller, state_times=times, **members)


def make_archived_row(number: int, caller: str = "bob", size: int = 10) -> EvaluationDetails:
    """Return the row of an archived evaluation, which has ended at 100 seconds less `number`."""
    row = make_row(number, caller, archive_record=ArchiveRecord(size, 3))
    row.state, row.state_times["ended"] = EvaluationState.FINISHED, 100.0 - number
    return row


WHOLE_ROW = EvaluationDetails(
    "é\0",
    bytes(range(256)),
    0,
    2**62,
    EvaluationState.FAILED,
    "bob",
    {"created": 0.5, "ended": 2.0**40},
    upload_directory=Path("/srv/ü"),
    should_keep_submission=True,
    is_forgotten=True,
    idempotency_key="",
    form_digest=b"\xff",
    callback=CallbackRecord("https://a/", "bob", CallbackState.PENDING, 7, "why"),
    commit=Commit("a", "b", 1, 2, (Submodule("c", "d"),)),
    limits=LIMITS,
    environment=Environment("java", Path("/srv/java"), {"A": ""}),
    cluster_job=ClusterJob("slurm", None, "x"),
    run=RunRow(1, 2, "/tree", None, 0.25),
    run_result=RunResult(EvaluatorExit(None, 9), ResourceUsage(0.5, None), b"\0"),
    failure=EvaluationFailure("lost", "why", {"a": 1, "b": "c"}, is_daemon_fault=False),
    begin_cursor=3,
    has_lost_events=True,
    archive_record=ArchiveRecord(1, 2),
)


class RowTests(SynchronousTestCase):
    def test_unpacked_row_equals_the_packed_one(self) -> None:
        for row in (WHOLE_ROW, make_row(1)):
            unpacked = unpack_evaluation(pack_row(row))
            self.assertEqual(pack_row(unpacked), pack_row(row))
            for name in ("state", "commit", "environment", "run", "run_result"):
                self.assertEqual(getattr(unpacked, name), getattr(row, name))


class StoreTestCase(SynchronousTestCase):
    """A store in a directory of its own."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        self.path = self.directory / "evaluations.sqlite"
        self.clock = Clock()
        self.threads: Any = InlineThreads()

    def open(self) -> EvaluationStore:
        return EvaluationStore.open(self.path, self.threads, self.clock)

    def take(self, coroutine: Coroutine[Deferred[Any], Any, T]) -> T:
        return self.successResultOf(Deferred.fromCoroutine(coroutine))

    def fill(self, count: int) -> None:
        store = self.open()
        for number in range(count):
            store.save(make_row(number))
        self.take(store.close())

    def reopen(self) -> tuple[list[str], list[str]]:
        """Open and close the store; return the live identifiers, and the lines of the log."""
        with capturedLogs() as events:
            store = self.open()
            found = [row.identifier for row in store.load_live_rows()]
            self.take(store.close())
        return found, [formatEvent(event) for event in events if event["log_level"] > LogLevel.info]


class WritingTests(StoreTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.threads = SlowThreads()
        self.store = self.open()
        self.database = self.store

    def commit_all(self) -> None:
        self.clock.advance(SAVE_DELAY_SECONDS)
        while self.threads.waiting:
            self.threads.step()

    def limit_pages(self, count: int) -> None:
        """Let the database grow to so many pages, as if the disk were full then."""
        self.database._connection.execute(f"PRAGMA max_page_count = {count}")

    def test_waiting_changes_share_a_transaction(self) -> None:
        added = [self.store.add(make_row(number)) for number in range(100)]
        self.threads.step()  # the first, which found the thread idle
        self.successResultOf(added[0])
        self.assertNoResult(added[1])
        self.threads.step()
        for deferred in added[1:]:
            self.successResultOf(deferred)
        self.assertEqual((self.database.transaction_count, self.threads.waiting), (2, []))

    def test_other_connection_sees_all_changes_of_a_transaction_or_none(self) -> None:
        found: list[int] = []

        def look(_: str) -> None:
            """Look, before a statement, at what would be left by a process that is killed now."""
            with closing(sqlite3.connect(self.path)) as other:
                found.extend(other.execute("SELECT count(*) FROM evaluations").fetchone())

        for number in range(3):
            self.store.save(make_row(number))
            if not number:
                self.store.flush()
                self.threads.step()
        self.database._connection.set_trace_callback(look)
        self.store.flush()
        self.threads.step()
        self.assertEqual(found, [1] * 4)
        look("")
        self.assertEqual(found[-1], 3)

    def test_changes_without_a_flush_are_saved_with_the_next_transaction_or_timer(self) -> None:
        for cursor in range(9):
            self.store.save(make_row(1, begin_cursor=cursor))
            self.store.delete("e2")
        self.assertEqual(self.threads.waiting, [])
        flushed = self.store.flush()
        self.store.save(make_row(3))  # while the thread is busy
        self.threads.step()
        self.successResultOf(flushed)
        self.assertEqual([row.begin_cursor for row in self.store.load_live_rows()], [8])
        self.assertEqual((self.database.transaction_count, self.threads.waiting), (1, []))
        self.clock.advance(SAVE_DELAY_SECONDS)
        self.threads.step()
        self.assertEqual([row.sequence_number for row in self.store.load_live_rows()], [1, 3])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_flush_soon_waits_for_the_timer_or_the_next_flush(self) -> None:
        waiting = [self.store.flush_soon()]
        self.assertEqual(self.threads.waiting, [])
        self.clock.advance(SAVE_DELAY_SECONDS)
        self.successResultOf(waiting.pop())  # nothing was to be written
        for urgent in (True, False):
            self.store.save(make_row(1))
            waiting.append(self.store.flush_soon())
            self.assertEqual(self.threads.waiting, [])
            if urgent:
                self.store.flush()
            else:
                self.clock.advance(SAVE_DELAY_SECONDS)
            self.assertNoResult(waiting[-1])
            self.threads.step()
            self.successResultOf(waiting[-1])

    def test_live_rows_are_loaded_in_the_order_of_acceptance(self) -> None:
        for number in (5, 1, 9, 3):
            self.store.save(make_row(number))
        self.store.save(make_archived_row(4))
        self.store.save(attrs.evolve(make_archived_row(6), is_forgotten=True))
        pending = CallbackRecord("http://a/", "bob", CallbackState.PENDING)
        row = attrs.evolve(make_archived_row(7), is_forgotten=True, callback=pending)
        self.store.save(row)
        self.store.save(make_row(5))
        self.commit_all()
        self.assertEqual(
            [row.sequence_number for row in self.store.load_live_rows()], [1, 3, 4, 5, 7, 9]
        )

    def test_last_sequence_number_is_the_highest_of_live_and_archived_rows(self) -> None:
        for row, highest in ((None, 0), (make_row(2), 2), (make_archived_row(9), 9)):
            if row is not None:
                self.store.save(row)
                self.commit_all()
            self.assertEqual(self.store.find_last_sequence_number(), highest)

    def test_link_row_is_kept_when_the_row_of_its_evaluation_is_deleted(self) -> None:
        link = EvaluationLinksRow("bob", b"generation", 7)
        self.store.save_links("e1", link)
        self.store.delete("e1")
        self.commit_all()
        self.assertEqual(self.store.load_links(), {"e1": link})
        self.store.save_links("e1", None)
        self.commit_all()
        self.assertEqual(self.store.load_links(), {})

    def test_full_disk_refuses_new_evaluations_and_keeps_changes_of_others(self) -> None:
        self.store.save(make_row(1))
        self.commit_all()
        self.limit_pages(1)
        with capturedLogs() as events:
            self.store.save(make_row(1, form_digest=bytes(50_000)))
            self.store.save(make_row(1, form_digest=bytes(50_001)))  # while the first fails
            added = self.store.add(make_row(2))
            self.commit_all()
            self.failureResultOf(added, StoreError)
            flushed = self.store.flush()
            self.commit_all()
            self.failureResultOf(flushed, StoreError)
            self.clock.advance(WRITE_RETRY_SECONDS)
            self.commit_all()
        (line,) = map(formatEvent, events)
        self.assertIn("is full; free some disk space", line)
        self.assertIn("is full; free some disk space", self.store.write_failure_reason or "")
        self.assertEqual([row.form_digest for row in self.store.load_live_rows()], [b""])
        # A change alone makes no attempt.
        self.store.save(make_row(3))
        self.clock.advance(WRITE_RETRY_SECONDS - 0.001)
        self.assertEqual(self.threads.waiting, [])

        self.limit_pages(2**20)
        with capturedLogs() as events:
            self.clock.advance(WRITE_RETRY_SECONDS)
            self.commit_all()
        self.assertEqual(
            ([formatEvent(event) for event in events], self.store.write_failure_reason),
            ([f"{self.path} can be written again"], None),
        )
        self.assertEqual([len(row.form_digest) for row in self.store.load_live_rows()], [50_001, 0])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_store_without_changes_notices_that_the_disk_has_room_again(self) -> None:
        self.limit_pages(1)
        added = self.store.add(make_row(1, form_digest=bytes(50_000)))
        self.commit_all()
        self.failureResultOf(added, StoreError)
        self.limit_pages(2**20)
        self.assertIsNotNone(self.store.write_failure_reason)
        self.clock.advance(WRITE_RETRY_SECONDS)
        self.commit_all()
        self.assertIsNone(self.store.write_failure_reason)

    def test_close_logs_the_number_of_changes_that_a_full_disk_loses(self) -> None:
        self.limit_pages(1)
        self.store.save(make_row(1, form_digest=bytes(50_000)))
        self.store.delete("e2")
        with capturedLogs() as events:
            closed = Deferred.fromCoroutine(self.store.close())
            self.commit_all()
            self.successResultOf(closed)
        self.assertIn("the changes that wait are lost: 2", formatEvent(events[-1]))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_changes_during_the_close_of_the_store_are_neither_committed_nor_refused(self) -> None:
        closed = Deferred.fromCoroutine(self.store.close())
        self.threads.step()  # the last transaction
        told = [self.store.add(make_row(1)), self.store.flush()]
        self.commit_all()
        told += [self.store.add(make_row(2)), self.store.flush()]
        self.commit_all()
        self.successResultOf(closed)
        for deferred in told:
            self.assertNoResult(deferred)
        self.threads = InlineThreads()
        self.assertEqual(self.reopen(), ([], []))

    def test_change_of_a_row_after_its_save_is_not_committed(self) -> None:
        row = make_row(1)
        self.store.save(row)
        row.begin_cursor = 7
        self.commit_all()
        self.assertEqual(self.store.load_live_rows()[0].begin_cursor, 0)


class ArchivedTests(StoreTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.store = self.open()
        for number in range(1, 7):
            self.store.save(make_archived_row(number, "ann" if number == 3 else "bob", number))
        self.store.save(make_row(7))
        self.clock.advance(SAVE_DELAY_SECONDS)

    def test_archive_list_has_the_rows_of_a_caller_in_a_range_of_numbers(self) -> None:
        def list_numbers(after: int, last: int, count: int) -> list[int]:
            found = self.store.list_archived("x", ["bob"], after, last, count, lambda _: None)
            return list(self.take(found))

        self.assertEqual(list_numbers(0, 9, 9), [1, 2, 4, 5, 6])
        self.assertEqual(list_numbers(1, 5, 9), [2, 4, 5])
        self.assertEqual(list_numbers(0, 9, 2), [1, 2])

    def test_lists_of_callers_alternate_and_a_status_read_waits_for_at_most_one_list(self) -> None:
        self.store._thread = threads = SlowThreads()  # type: ignore[assignment]
        ended: list[str] = []
        for caller in ("alice", "alice", "alice", "bob"):
            found = self.store.list_archived(caller, [caller], 0, 9, 9, lambda _: None)
            listing = Deferred.fromCoroutine(found)
            listing.addCallback(lambda _, caller=caller: ended.append(caller))
        status = Deferred.fromCoroutine(self.store.find_archived("e4"))
        threads.step()
        threads.step()
        self.successResultOf(status)
        threads.finish()
        self.assertEqual(ended, ["alice", "alice", "bob", "alice"])

    def test_list_of_several_callers_omits_other_callers_and_keeps_the_order(self) -> None:
        self.store.save(make_archived_row(8, "eve"))
        self.clock.advance(SAVE_DELAY_SECONDS)
        entry = ListEntry("", b"")

        def list_entries(callers: list[str], count: int = 9) -> dict[int, ListEntry | None]:
            found = self.store.list_archived("x", callers, 1, 9, count, lambda _: entry)
            return self.take(found)

        whole = dict.fromkeys((2, 4, 5, 6, 8), entry)
        self.assertEqual(list_entries(["bob", "eve"]), {**whole, 3: None})
        self.assertEqual(list_entries(["ann", "eve"], 3), {2: None, 3: entry, 4: None})
        self.assertEqual(list_entries([]), dict.fromkeys((2, 3, 4, 5, 6, 8)))

    def test_archived_row_is_found_and_a_live_one_is_not(self) -> None:
        found = self.take(self.store.find_archived("e4"))
        assert found is not None and found.archive_record is not None
        self.assertEqual(found.archive_record.event_count, 3)
        self.assertIsNone(self.take(self.store.find_archived("e7")))

    def test_oldest_rows_are_those_of_evaluations_that_ended_first(self) -> None:
        oldest = self.store.list_oldest_archived
        self.assertEqual(self.take(oldest(2)), [("e6", "bob", 6), ("e5", "bob", 5)])
        self.assertEqual(self.take(oldest(2, caller="ann")), [("e3", "ann", 3)])
        self.assertEqual(self.take(oldest(9, ended_before=95)), [("e6", "bob", 6)])

    def test_totals_are_counted_by_caller(self) -> None:
        self.assertEqual(self.take(self.store.count_archived()), {"ann": (1, 3), "bob": (5, 18)})

    def test_damaged_row_is_left_out_of_lists_and_cannot_be_read(self) -> None:
        damage_row(self.path, "e2")
        with capturedLogs() as events:
            listed = self.take(
                self.store.list_archived(
                    "x", ["bob"], 0, 4, 9, lambda row: ListEntry("", row.packed_request)
                )
            )
            failed = Deferred.fromCoroutine(self.store.find_archived("e2"))
            self.failureResultOf(failed, StoreError)
        entry = ListEntry("", b"form")
        self.assertEqual(listed, {1: entry, 2: None, 4: entry})  # so the list goes on behind it
        self.assertEqual(len(events), 2)


class StandingsTests(StoreTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.store = self.open()
        self.number = 0
        self.end: tuple[str, str] | None = None

    def add(
        self,
        caller: str,
        problem: str | None,
        share: float | None,
        first: int | None = None,
        reason: FailureReason = "exit",
    ) -> str:
        """Store an evaluation with that part of the points, -1 for a failed one, None for live."""
        self.number += 1
        row = make_row(self.number, caller, counted_problem=problem, first_submission_time=first)
        if share is not None:
            is_failed = share == -1
            row.state = EvaluationState.FAILED if is_failed else EvaluationState.FINISHED
            row.result_summary = summary = ResultSummary()
            if is_failed:
                row.failure = EvaluationFailure(reason, "it failed")
            elif share < 0:
                summary.add_if_result(b'{"type":"score","score":%f}' % share)
            else:
                summary.add_if_result(b'{"type":"score","score":%f,"maximum":1}' % share)
        self.store.save(row)
        self.clock.advance(SAVE_DELAY_SECONDS)
        return row.identifier

    def list_standings(
        self, *callers: str, after: tuple[str, str] = ("", ""), problem: str | None = None
    ) -> list[Any]:
        def make_entry(one: Standing) -> Any:
            counts = (one.submission_count, one.ended_count, one.last_submission_time)
            return (one.caller, one.problem, *counts, one.best_evaluation.identifier)

        listing = self.store.list_caller_standings("x", callers, after, problem, make_entry)
        found, self.end = self.take(listing)
        self.assertEqual([place for place, _ in found], [entry[:2] for _, entry in found])
        return [entry for _, entry in found]

    def test_standing_shows_the_latest_judged_run_of_the_best_submission(self) -> None:
        # Each evaluation has its points, -1 for a failure, None for a live one, and, if it is
        # a rerun, the place of the first one; then submissions, ended ones, the last, the best.
        first: list[Any] = [(1, None), (-1, 0, "cancelled"), (-1, 0, "lost"), (None, 0)]
        cases: dict[str, tuple[list[Any], tuple[int, int, int, int]]] = {
            "the earliest of several": ([(0.5,), (1,), (1,), (-1,), (None,)], (5, 4, 5, 1)),
            "the earliest of live ones": ([(None,), (None,), (None,)], (3, 0, 3, 0)),
            "the latest of live reruns": ([(None,), (None, 0), (None, 0)], (1, 0, 1, 2)),
            "a failure before a live one": ([(None,), (-1,)], (2, 1, 2, 1)),
            "a rerun with less": ([(1,), (0.3,), (0.4, 0)], (2, 2, 2, 2)),
            "the better of two reruns": ([(1,), (0.3,), (0.4, 0), (0.6, 1)], (2, 2, 2, 3)),
            "the first of reruns that are not judged": (first, (1, 1, 1, 0)),
            "a rerun that fails": ([*first, (-1, 0)], (1, 1, 1, 4)),
            "a score below zero before a failure": ([(-1,), (-5,), (None,)], (3, 2, 3, 1)),
        }
        for case, (evaluations, expected) in cases.items():
            before, names = self.number, list[str]()
            for share, *rerun in evaluations:
                place = rerun[0] if rerun else None
                reason = rerun[1] if rerun[1:] else "exit"
                time = None if place is None else before + 1 + place
                names.append(self.add("ann", case, share, time, reason))
            found = self.list_standings("ann", problem=case)
            submissions, ended, last, best = expected
            entry = ("ann", case, submissions, ended, before + last, names[best])
            self.assertEqual(found, [entry], case)

    def test_standings_are_read_in_parts_in_the_order_of_callers_and_problems(self) -> None:
        self.patch(store_module, "MAX_STANDINGS_PER_PAGE", 2)
        names = [(caller, problem) for caller in "abc" for problem in ("p", "q")]
        for caller, problem in reversed(names):
            self.add(caller, problem, 0)
        self.add("a", None, 0)
        after: tuple[str, str] | None = ("", "")
        read = []
        while after is not None:
            read.append([entry[:2] for entry in self.list_standings(*"cab", after=after)])
            after = self.end
        self.assertEqual(read, [names[:2], names[2:4], names[4:], []])
        listed = self.list_standings(*"abc", problem="q", after=("a", ""))
        self.assertEqual([entry[:2] for entry in listed], [("a", "q"), ("b", "q")])
        self.assertEqual(self.list_standings("c", problem="q", after=("c", "q")), [])

    def test_part_of_standings_ends_at_its_time_limit_and_the_next_continues(self) -> None:
        self.patch(store_module, "_MAX_STANDINGS_SECONDS", 0)
        damaged = [self.add("ann", problem, 0) for problem in "pqr"][1]
        damage_row(self.path, damaged)
        self.assertEqual([entry[1] for entry in self.list_standings("ann")], ["p"])
        with capturedLogs():
            self.assertEqual(self.list_standings("ann", after=("ann", "p")), [])
        self.assertEqual(self.end, ("ann", "q"))
        self.assertEqual([one[1] for one in self.list_standings("ann", after=self.end)], ["r"])

    def test_damaged_or_deleted_row_has_no_standing(self) -> None:
        self.store.delete(self.add("ann", "p", 1))
        self.clock.advance(SAVE_DELAY_SECONDS)
        self.assertEqual(self.list_standings("ann"), [])
        damage_row(self.path, self.add("ann", "p", 1))
        with capturedLogs() as events:
            self.assertEqual(self.list_standings("ann"), [])
        self.assertEqual(len(events), 1)


def damage_row(path: Path, name: str) -> None:
    """Flip bits in the row of an evaluation."""
    with closing(sqlite3.connect(path)) as connection, connection:
        ((row,),) = connection.execute("SELECT row FROM evaluations WHERE name = ?", (name,))
        damaged = row[:-1] + bytes([row[-1] ^ 64])
        connection.execute("UPDATE evaluations SET row = ? WHERE name = ?", (damaged, name))


class OpeningTests(StoreTestCase):
    def set_aside(self) -> list[Path]:
        return sorted(self.directory.glob("*.damaged-*[0-9]"))

    def test_files_can_be_read_only_by_their_owner(self) -> None:
        store = self.open()
        self.addCleanup(lambda: self.take(store.close()))
        modes = {path.name: path.stat().st_mode & 0o777 for path in self.directory.iterdir()}
        self.assertEqual(set(modes.values()), {0o600})
        self.assertIn("evaluations.sqlite-wal", modes)

    def test_second_process_is_refused(self) -> None:
        store = self.open()
        self.addCleanup(lambda: self.take(store.close()))
        code = (
            "import sys; from pathlib import Path; from tawebeval.evaluations.store import *\n"
            "EvaluationStore.open(Path(sys.argv[1]), None, None)"
        )
        command = [sys.executable, "-c", code, str(self.path)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertIn(
            f"ConfigurationError: {self.path} is in use by another tawebeval; stop it, or",
            ended.stderr,
        )

    def test_database_of_another_format_stops_the_start(self) -> None:
        self.fill(1)
        for version in (3, 5):
            with closing(sqlite3.connect(self.path)) as connection:
                connection.execute(f"PRAGMA user_version = {version}")
            error = self.assertRaises(ConfigurationError, self.open)
            self.assertIn(f"has the format {version}; this tawebeval knows 4; install", str(error))
        self.assertEqual(self.set_aside(), [])

    def test_file_that_cannot_be_opened_stops_the_start(self) -> None:
        self.path.mkdir()
        error = self.assertRaises(ConfigurationError, self.open)
        self.assertIn(f"{self.path}: Is a directory; ", str(error))
        self.path.rmdir()
        self.assertEqual(self.reopen(), ([], []))

    def test_database_locked_by_another_program_stops_the_start(self) -> None:
        self.fill(1)
        self.patch(store_module, "_WAIT", 0.0)
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("BEGIN EXCLUSIVE")
            error = self.assertRaises(ConfigurationError, self.open)
        self.assertIn("database is locked; end the other program", str(error))
        self.assertEqual(self.reopen(), (["e0"], []))

    def test_damaged_file_is_set_aside_and_the_store_begins_empty(self) -> None:
        cases: dict[str, Callable[[bytes], bytes]] = {
            "no database": lambda _: b"no database" * 1000,
            "header": lambda content: b"X" + content[1:],
            "tables": lambda content: content[:4096] + bytes(len(content) - 4096),
            "short": lambda content: content[:5000],
            "format": lambda content: content[:60] + b"\xff" + content[61:],
        }
        for number, (name, damage) in enumerate(cases.items(), 1):
            self.fill(20)
            self.path.write_bytes(damage(self.path.read_bytes()))
            found, lines = self.reopen()
            self.assertEqual(found, [], name)
            self.assertIn(f"{self.path} is damaged (", lines[0])
            self.assertEqual(len(self.set_aside()), min(number, store_module.MAX_DAMAGED_DATABASES))
            self.assertEqual(self.set_aside()[-1].stat().st_mode & 0o777, 0o600)
            self.assertEqual(self.reopen(), ([], []), name)

    def test_damaged_row_is_dropped_and_other_rows_are_loaded(self) -> None:
        self.fill(3)
        damage_row(self.path, "e1")
        found, (line,) = self.reopen()
        self.assertEqual(found, ["e0", "e2"])
        self.assertIn("a row of evaluations is damaged, and is lost: its checksum is wrong", line)
        self.assertEqual(self.reopen(), (["e0", "e2"], []))

    def test_invalid_utf_8_in_the_database_counts_as_damage(self) -> None:
        self.fill(1)
        content = self.path.read_bytes()
        for name in (b"INDEX archived", b"\x09e0"):
            self.path.write_bytes(content.replace(name, name[:-1] + b"\xe4"))
            found, (line,) = self.reopen()
            self.assertEqual(found, [])
            self.assertIn("is damaged", line)

    def test_damaged_bytes_never_stop_the_start_nor_lose_rows_silently(self) -> None:
        self.fill(60)
        content = self.path.read_bytes()
        expected = [f"e{number}" for number in range(60)]
        chance = random.Random(5)
        format_number = range(60, 64)  # a newer one stops the start
        damages = [
            (place, content[place] ^ 1 << chance.randrange(8))
            for place in chance.sample(range(len(content)), 50)
            if place not in format_number
        ]
        # Each page with one entry less.
        counts = [page + 4 for page in (100, *range(4096, len(content), 4096))]
        damages += [(place, content[place] - 1) for place in counts if content[place]]
        for place, byte in damages:
            self.path.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
            found, lines = self.reopen()
            self.assertTrue(lines or found == expected, (place, byte, found))
            self.assertLessEqual(set(found), set(expected))


class FullDiskTests(StoreTestCase):
    def setUp(self) -> None:
        super().setUp()
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(self.directory)]
        if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
            raise SkipTest("only root can mount file systems")
        self.addCleanup(subprocess.run, ["umount", "--lazy", str(self.directory)], check=True)

    def fill_disk(self) -> Path:
        """Leave no room; return the file that takes it."""
        filler = self.directory / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        return filler

    def test_full_disk_refuses_the_start_and_leaves_the_database_in_place(self) -> None:
        self.fill_disk()
        error = self.assertRaises(ConfigurationError, self.open)
        self.assertIn("free some disk space", str(error))
        (self.directory / "filler").unlink()
        self.fill(2)
        self.fill_disk()
        with contextlib.suppress(ConfigurationError):
            self.take(self.open().close())
        (self.directory / "filler").unlink()
        self.assertEqual(self.reopen(), (["e0", "e1"], []))


class StoreMachine(RuleBasedStateMachine):
    """A store whose thread makes one call at a time, whose disk fills up, and which is killed.

    After a start it has to be as after one of the changes, none before those told as committed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.numbers = count(1)
        self.state: dict[str, int] = {}  # at the start: the cursors by identifier
        self.open()

    def open(self) -> None:
        self.path = self.directory / "evaluations.sqlite"
        self.threads, self.clock = SlowThreads(), Clock()
        self.store = EvaluationStore.open(self.path, cast(WorkerThreads, self.threads), self.clock)
        self.changes: list[tuple[int, str, int | None]] = []  # their numbers, and new cursors
        self.committed = 0

    def change(self, identifier: str, *, is_deletion: bool = False) -> EvaluationDetails:
        """Note a change; return the new row."""
        number = next(self.numbers)
        row = make_row(number, identifier=identifier, begin_cursor=number)
        self.changes.append((number, row.identifier, None if is_deletion else number))
        return row

    @rule(name=st.sampled_from("abc"))
    def save(self, name: str) -> None:
        self.store.save(self.change(name))

    @rule(name=st.sampled_from("abc"))
    def delete(self, name: str) -> None:
        self.change(name, is_deletion=True)
        self.store.delete(name)

    @rule()
    def add(self) -> None:
        row = self.change("")

        def on_refused(_: object) -> None:
            self.changes = [each for each in self.changes if each[0] != row.sequence_number]

        self.store.add(row).addCallbacks(self.on_committed, on_refused, (row.sequence_number,))

    @rule()
    def wait(self) -> None:
        self.clock.advance(SAVE_DELAY_SECONDS)

    @rule(is_urgent=st.booleans())
    def flush(self, is_urgent: bool) -> None:
        number = next(self.numbers)
        (self.store.flush if is_urgent else self.store.flush_soon)().addCallbacks(
            self.on_committed, lambda failure: failure.trap(StoreError) and None, (number,)
        )

    def on_committed(self, _: object, number: int) -> None:
        self.committed = max(self.committed, number)

    @precondition(lambda self: self.threads.waiting)
    @rule()
    def step(self) -> None:
        self.threads.step()

    @rule(is_full=st.booleans())
    def change_disk(self, is_full: bool) -> None:
        """Fill the disk, or make room, and let time pass."""
        self.store._connection.execute(f"PRAGMA query_only = {is_full}")
        self.clock.advance(WRITE_RETRY_SECONDS)

    @rule()
    def kill(self) -> None:
        directory = Path(tempfile.mkdtemp())
        for suffix in ("", "-wal", ".lock"):
            shutil.copy(f"{self.path}{suffix}", directory)
        self.store._disconnect()
        shutil.rmtree(self.directory)
        self.directory = directory
        changes, committed = self.changes, self.committed
        self.open()
        self.check(changes, committed)

    @rule()
    def close(self) -> None:
        """Close the store when the disk has room, and begin anew."""
        self.change_disk(is_full=False)
        closed = Deferred.fromCoroutine(self.store.close())
        self.threads.finish()
        assert closed.called
        changes = self.changes
        self.open()
        self.check(changes, changes[-1][0] if changes else 0)

    def check(self, changes: list[tuple[int, str, int | None]], committed: int) -> None:
        """Compare what the store has with the states after the changes."""
        found = {row.identifier: row.begin_cursor for row in self.store.load_live_rows()}
        state: dict[str, int | None] = dict(self.state)
        possible = [state]
        for number, identifier, cursor in changes:
            state = {**state, identifier: cursor}
            possible = [*possible, state] if number > committed else [state]
        assert found in [
            {name: cursor for name, cursor in each.items() if cursor is not None}
            for each in possible
        ]
        self.state = found

    def teardown(self) -> None:
        self.close()
        self.store._disconnect()
        shutil.rmtree(self.directory)


class ModelTests(SynchronousTestCase):
    def test_store_has_all_committed_changes_after_each_start(self) -> None:
        run_state_machine_as_test(StoreMachine)
