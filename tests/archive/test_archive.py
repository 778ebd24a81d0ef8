"""`archive.archive`: evaluations in the archive, for their callers, within its bounds."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.archive import archive as archive_module
from tawebeval.archive.archive import (
    MAX_REMOVALS_PER_STEP,
    WRITER_THREADS,
    ArchivedEvents,
    EndedEvaluation,
    EvaluationArchive,
)
from tawebeval.archive.files import extract_submission
from tawebeval.config import ArchiveSettings
from tawebeval.core.evaluations import ArchiveRecord
from tawebeval.core.events import (
    EVENTS_LOST_ERROR,
    EventRing,
    encode_data_event,
)
from tawebeval.core.form import SubmissionFile, pack_request
from tawebeval.errors import DiscardedCursor, StoreError
from tawebeval.evaluations.store import EvaluationDetails
from tawebeval.sandbox.workspace import Workspace, derive_directory_name
from tests.fakes.files import FakeStore
from tests.fakes.world import InlineThreads, SlowThreads, make_request


class DirectoryStore(FakeStore):
    """Rows in files, which outlive a process; `deleted` has the names of deleted rows."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.deleted: set[str] = set()
        directory.mkdir()

    def save(self, row: EvaluationDetails) -> None:
        super().save(row)
        new = self.directory / "new"
        new.write_bytes(self.rows[row.identifier])
        new.rename(self.directory / row.identifier)

    def load(self) -> None:
        self.rows = {}
        for path in self.directory.iterdir():
            if path.name.endswith("-deleted"):
                self.deleted.add(path.name.partition("-")[0])
            elif path.name != "new":
                self.rows[path.name] = path.read_bytes()

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


NOW = 1_700_000_000.0
DAY = 24 * 60 * 60.0
MIB = 2**20


async def fail_with_store_error(_: object) -> None:
    """Fail as the store does when the disk is full."""
    raise StoreError


class ArchiveTestCase(SynchronousTestCase):
    """An archive, which a test may open again."""

    settings = ArchiveSettings(enabled=True)

    def setUp(self) -> None:
        self.patch(os, "fsync", lambda descriptor: None)  # of hundreds of files
        self.root = Path(self.mktemp()).absolute()
        self.rows = FakeStore()
        self.now = NOW
        self.archive = self.open()

    def open(self, reserve: int = 0, **changes: Any) -> EvaluationArchive:
        threads: Any = InlineThreads()
        self.archive = EvaluationArchive(
            self.root,
            ArchiveSettings(**{"enabled": True, **changes}),
            reserve,
            self.rows,
            threads,
            threads,
            lambda seconds: f"{seconds:.3f}",
            lambda: self.now,
        )
        self.archive.enable_removal()
        return self.archive

    def run_now(self, coroutine: Any) -> Any:
        """Return the result of a coroutine that waits for nothing."""
        return self.successResultOf(Deferred.fromCoroutine(coroutine))

    def save_row(self, name: str, caller: str, ended: float, record: ArchiveRecord) -> None:
        row = EvaluationDetails(name, b"", 0, caller=caller, archive_record=record)
        row.state_times["ended"] = ended
        self.rows.save(row)

    def store(
        self,
        name: str = "one",
        caller: str = "alice",
        rings: Callable[[], Iterator[EventRing]] = lambda: make_ring(3),
        ended: float = NOW,
        workspace: Any = None,
    ) -> bool:
        """Archive an evaluation; return whether it was archived."""

        async def save_row(stored: ArchiveRecord) -> None:
            self.save_row(name, caller, ended, stored)

        document = {"status": {"state": "finished"}}
        evaluation = EndedEvaluation(name, caller, document, rings, workspace)
        archived: bool = self.run_now(self.archive.store_evaluation(evaluation, save_row))
        return archived

    def begin_to_store(
        self, name: str, caller: str = "alice", save_row: Any = lambda _: succeed(None)
    ) -> Deferred[bool]:
        ended = EndedEvaluation(name, caller, {"status": {}}, lambda: make_ring(3))
        return Deferred.fromCoroutine(self.archive.store_evaluation(ended, save_row))

    def find(self, name: str = "one", caller: str = "alice") -> ArchivedEvents:
        events: ArchivedEvents | None = self.run_now(self.archive.find_events(name, caller))
        assert events is not None, name
        return events

    def locate(self, name: str = "one", kind: str = "jsonl") -> Path:
        stem = derive_directory_name(name)
        return self.root / "files" / stem[:2] / f"{stem}.{kind}.zst"

    def list_names(self) -> list[str]:
        """Return the names of the archived evaluations; each must have its file."""
        files = {path.name.partition(".")[0] for path in self.root.glob("files/*/*")}
        self.assertEqual(files, {derive_directory_name(name) for name in self.rows.rows})
        return list(self.rows.rows)

    def messages(self, call: Callable[[], object]) -> list[str]:
        with capturedLogs() as logged:
            call()
        return [formatEvent(event) for event in logged]


class ReadingTests(ArchiveTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.store(rings=lambda: make_ring(2000))

    def test_other_caller_finds_no_evaluation_and_opens_no_file(self) -> None:
        self.locate().write_bytes(b"")
        self.assertIsNone(self.run_now(self.archive.find_events("one", "bob")))
        self.assertIsNone(self.run_now(self.archive.find_events("two", "alice")))
        self.assertIsNone(self.run_now(self.archive.read_submission("one", "bob", self.fail)))

    def test_file_with_fewer_events_than_its_row_is_damaged(self) -> None:
        self.locate("two").parent.mkdir(exist_ok=True)
        self.store("two")
        self.locate("two").rename(self.locate())
        events = self.find()
        self.assertIs(self.run_now(events.read(3, 100)), EVENTS_LOST_ERROR)
        self.assertEqual(events.end_cursor, 4)

    def test_other_users_cannot_read_the_archive(self) -> None:
        for path in (self.root, self.root / "files", self.locate().parent):
            self.assertEqual(path.stat().st_mode & 0o077, 0, path)

    def test_callers_take_turns_to_read_the_archive(self) -> None:
        threads: Any = SlowThreads()
        self.archive._readers = threads
        self.store("two", "bob")
        greedy = [Deferred.fromCoroutine(self.find().read(0, 100)) for _ in range(120)]
        gone = greedy.pop(60)
        gone.cancel()
        self.failureResultOf(gone, CancelledError)
        other = Deferred.fromCoroutine(self.find("two", "bob").read(0, 100))
        self.assertEqual(len(threads.waiting), 2)
        threads.waiting.pop()()
        self.assertEqual(self.successResultOf(other).count, 1)
        threads.finish()
        self.assertEqual({self.successResultOf(each).count for each in greedy}, {1})


class StoringTests(ArchiveTestCase):
    def test_one_caller_leaves_a_writer_thread_to_other_callers(self) -> None:
        threads: Any = SlowThreads()
        self.archive._writers = threads
        for caller in (*["alice"] * 50, "bob"):
            done = self.begin_to_store(caller, caller)
        self.assertEqual(len(threads.waiting), WRITER_THREADS)
        threads.waiting.pop()()
        self.assertTrue(self.successResultOf(done))
        threads.finish()

    def assert_lost(self, reason: Any, message: str) -> None:
        """Hold that an evaluation was not archived, and left nothing."""
        said = self.messages(lambda: self.assertFalse(self.store()))
        self.assertIn(f"not archived ({reason}): {message}", said[-1])
        self.assertEqual(
            self.archive.unarchived_counts_by_reason, {"disk": 0, "size": 0, "defect": 0, reason: 1}
        )
        self.assertEqual(self.list_names(), [])
        self.assertFalse(list(self.root.glob("**/*.part")))
        self.flushLoggedErrors()

    def test_archived_evaluations_and_their_bytes_are_counted(self) -> None:
        self.store("one")
        self.store("two", "bob")
        size = sum(size for _, size in self.run_now(self.rows.count_archived()).values())
        for archived in (2, 0):
            self.assertEqual(self.archive.evaluation_count, 2)
            self.assertEqual(self.archive.total_bytes, size)
            self.assertEqual(self.archive.archival_count, archived)
            self.open()

    def test_nothing_is_archived_while_free_disk_is_below_the_reserve(self) -> None:
        self.open(reserve=2**60)
        self.assert_lost("disk", "less than")

    def test_evaluation_is_not_archived_if_free_disk_falls_below_the_reserve(self) -> None:
        self.open(reserve=1000)
        free = chain([10**6] * 3, repeat(999))
        self.patch(os, "statvfs", lambda path: mock.Mock(f_bavail=next(free), f_frsize=1))

        def make_rings() -> Iterator[EventRing]:
            return chain(*map(make_ring, [3] * 5))

        said = self.messages(lambda: self.assertFalse(self.store(rings=make_rings)))
        self.assertIn("not archived (disk): less than 1000 bytes is free", said[-1])
        self.assertEqual(self.list_names(), [])

    def test_evaluation_larger_than_the_archive_is_lost_with_the_reason_size(self) -> None:
        self.open(size=100)
        self.assert_lost("size", "it alone exceeds archive.size (100 bytes)")

    def test_evaluation_is_lost_with_the_reason_disk_if_the_disk_is_full(self) -> None:
        def fail(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        self.patch(os, "fsync", fail)
        self.assert_lost("disk", str(self.locate().with_suffix(".part")) + ": No space left")

    def test_evaluation_is_lost_with_the_reason_defect_if_writing_raises(self) -> None:
        self.patch(archive_module, "write_evaluation", None)
        self.assert_lost("defect", "the log")

    def test_evaluation_without_its_acknowledged_events_is_not_archived(self) -> None:
        def make_rings() -> Iterator[EventRing]:
            yield from make_ring(3)
            raise DiscardedCursor("7")

        self.assertEqual(self.messages(lambda: self.assertFalse(self.store(rings=make_rings))), [])
        self.assertEqual(self.list_names(), [])
        self.assertFalse(list(self.root.glob("**/*.*")))

    def test_failed_commit_raises_an_error_leaves_no_file_and_allows_a_retry(self) -> None:
        async def save_row(stored: ArchiveRecord) -> None:
            self.assertTrue(self.locate().exists())
            raise StoreError

        self.failureResultOf(self.begin_to_store("one", save_row=save_row), StoreError)
        self.assertFalse(self.locate().exists())
        self.assertEqual(self.archive.total_bytes, 0)
        self.assertTrue(self.store())
        self.assertEqual(self.list_names(), ["one"])


class RemovalTests(ArchiveTestCase):
    def fill(self, count: int, caller: str = "alice") -> None:
        for number in range(count):
            self.store(f"{caller}-{number:03}", caller, ended=NOW + number)

    def remove(self) -> list[str]:
        """Remove what is due; return the names that are left."""
        self.run_now(self.archive.remove_excess_evaluations())
        return self.list_names()

    def test_evaluations_over_the_age_are_removed(self) -> None:
        self.fill(5)
        self.now = NOW + 90 * DAY + 2.5
        self.assertEqual(self.remove(), ["alice-003", "alice-004"])
        self.assertEqual(self.archive.evaluation_count, 2)

    def test_wall_clock_set_forward_removes_no_evaluation(self) -> None:
        self.patch(time, "time", lambda: self.now)
        self.store("one")
        threads: Any = InlineThreads()
        settings = ArchiveSettings(enabled=True)
        archive = EvaluationArchive(self.root, settings, 0, self.rows, threads, threads, str)
        self.now = NOW + 100 * DAY
        self.run_now(archive.remove_excess_evaluations())
        self.assertEqual(self.list_names(), ["one"])

    def test_removal_keeps_the_row_of_an_evaluation_that_the_registry_still_has(self) -> None:
        kept: list[bytes] = []

        def release(name: str) -> bool:
            if name == "live":
                kept.append(self.rows.rows.pop(name))  # it is in the archive no more
            return name == "live"

        self.archive.on_removal = release
        for name in ("live", "old"):
            self.store(name, ended=NOW - 100 * DAY)
        self.assertEqual(self.remove(), [])
        self.assertEqual(len(kept), 1)
        self.assertEqual((self.archive.evaluation_count, self.archive.total_bytes), (0, 0))

    def test_oldest_evaluations_are_removed_until_the_archive_is_within_its_size(self) -> None:
        self.fill(250)
        each = self.archive.total_bytes // 250
        self.open(size=10 * each)
        self.assertEqual(self.remove(), [f"alice-{number:03}" for number in range(240, 250)])

    def test_one_step_removes_a_bounded_number_of_evaluations(self) -> None:
        self.fill(MAX_REMOVALS_PER_STEP + 5)
        self.now = NOW + 1000 * DAY
        for left in (5, 0):
            self.assertTrue(self.run_now(self.archive._remove_some()))
            self.assertEqual(len(self.list_names()), left)
        self.assertFalse(self.run_now(self.archive._remove_some()))

    def test_full_archive_removes_the_oldest_evaluations_of_the_largest_caller(self) -> None:
        self.fill(3, "bob")
        self.fill(2, "carol")
        each = self.archive.total_bytes // 5
        self.open(size=10 * each)
        self.fill(50)
        left = self.list_names()
        self.assertEqual(left[:5], ["bob-000", "bob-001", "bob-002", "carol-000", "carol-001"])
        self.assertEqual(left[5:], [f"alice-{number:03}" for number in range(45, 50)])

    def test_evaluation_over_the_archive_size_removes_no_other_evaluation(self) -> None:
        self.open(size=MIB)
        self.fill(20, "bob")

        def noise(size: int) -> Iterator[EventRing]:
            text = random.Random(1).randbytes(size // 2).hex().encode()
            ring = EventRing()
            ring.append_batch(encode_data_event(b'"%b"' % text), 0)
            yield ring

        self.assertTrue(self.store("fits", rings=lambda: noise(2 * MIB - 200_000)))
        self.assertNotIn("fits", self.list_names())
        self.assertFalse(self.store("large", rings=lambda: noise(4 * MIB)))
        self.assertEqual(len(self.list_names()), 20)

    def test_removal_is_completed_at_the_next_try_after_a_store_error(self) -> None:
        self.fill(3)
        self.now = self.booted = NOW + 1000 * DAY

        async def fail(_: object) -> None:
            raise StoreError

        flush = self.patch(FakeStore, "flush", fail)
        delete = self.patch(FakeStore, "delete", lambda rows, name: None)
        for _ in range(2):
            removing = Deferred.fromCoroutine(self.archive.remove_excess_evaluations())
            self.failureResultOf(removing, StoreError)
        flush.restore()
        delete.restore()
        self.assertEqual(self.remove(), [])
        self.assertEqual((self.archive.evaluation_count, self.archive.total_bytes), (0, 0))

    def test_removal_gets_a_writer_thread_before_all_waiting_evaluations_are_archived(self) -> None:
        self.store("old", "")
        threads: Any = SlowThreads()
        self.archive._writers = threads
        for number in range(50):
            self.begin_to_store(f"waits {number}", "")
        self.now = NOW + 1000 * DAY
        removing = Deferred.fromCoroutine(self.archive.remove_excess_evaluations())
        for number in range(4 * WRITER_THREADS):
            self.begin_to_store(f"comes {number}", "")
            threads.step()
        self.assertNotIn("old", self.rows.rows)
        threads.finish()
        self.successResultOf(removing)

    def test_removal_stops_at_a_file_that_cannot_be_removed_and_continues_later(self) -> None:
        self.fill(5)
        stuck = self.locate("alice-002")
        stuck.unlink()
        stuck.mkdir()
        self.now = NOW + 1000 * DAY
        said = self.messages(lambda: self.assertEqual(len(self.remove()), 3))
        self.assertEqual(sum("cannot be removed: Is a directory" in one for one in said), 1)
        stuck.rmdir()
        self.assertEqual(self.remove(), [])
        self.assertEqual((self.archive.evaluation_count, self.archive.total_bytes), (0, 0))


class SubmissionTests(ArchiveTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.packed = pack_request(
            make_request(submission=(SubmissionFile("a", "ein Name mit ü"),))
        )
        self.workspace = Workspace(self.root.with_name("workspace"))
        path = self.workspace.submission_directory / "a/ein Name mit ü"
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(100_000))
        self.workspace.request_file.write_bytes(self.packed)

    def extract(self) -> Any:
        target = self.root.with_name(f"target-{len(os.listdir(self.root.parent))}")
        extract = partial(extract_submission, directory=target)
        return self.run_now(self.archive.read_submission("one", "alice", extract))

    def test_archived_submission_has_the_request_and_the_files(self) -> None:
        self.store(workspace=self.workspace)
        found = self.extract()
        self.assertEqual(pack_request(found.request), self.packed)
        self.assertEqual(found.size_bytes, 100_000)
        path = found.workspace.submission_directory / "a/ein Name mit ü"
        self.assertEqual(path.read_bytes(), bytes(100_000))

    def test_large_or_missing_submission_is_not_archived(self) -> None:
        self.open()
        self.archive.max_submission_bytes = 1000
        self.assertTrue(self.store(workspace=self.workspace))
        self.assertIsNone(self.extract())
        self.open()
        self.workspace.request_file.unlink()
        self.assertTrue(self.store(workspace=self.workspace))
        self.assertIsNone(self.extract())
        self.assertFalse(self.locate(kind="tar").exists())


class StartTests(ArchiveTestCase):
    def test_archived_evaluations_are_counted_again_after_a_store_error(self) -> None:
        self.store()
        size = self.archive.total_bytes

        with mock.patch.object(FakeStore, "count_archived", fail_with_store_error):
            self.open()
        self.store("two")
        self.assertEqual(self.archive.evaluation_count, 1)
        self.run_now(self.archive.remove_excess_evaluations())
        self.assertEqual((self.archive.evaluation_count, self.archive.total_bytes), (2, 2 * size))

    def test_evaluation_archived_during_the_count_at_the_start_is_counted_once(self) -> None:
        self.store()
        with mock.patch.object(FakeStore, "count_archived", fail_with_store_error):
            self.open()
        committed: Deferred[None] = Deferred()

        async def save_row(stored: ArchiveRecord) -> None:
            self.save_row("two", "alice", NOW, stored)
            await committed

        stored = self.begin_to_store("two", save_row=save_row)
        counted = Deferred.fromCoroutine(self.archive.remove_excess_evaluations())
        committed.callback(None)
        self.assertTrue(self.successResultOf(stored))
        self.successResultOf(counted)
        self.assertEqual(self.archive.evaluation_count, 2)

    def test_archive_files_without_rows_are_kept_and_logged(self) -> None:
        self.store()
        self.rows.rows.clear()
        said = self.messages(self.open)
        self.assertIn("evaluations that the store does not know", said[-1])
        self.assertTrue(self.locate().exists())


class KillTests(ArchiveTestCase):
    ROUNDS = 20
    SIZE = 100_000  # of the archive
    CALLS = 20_000  # of functions, until the kill at most

    def test_kill_loses_no_evaluation_and_leaves_no_file(self) -> None:
        folder = self.root.with_name("sources")
        folder.mkdir()
        rows = self.rows = DirectoryStore(self.root.with_name("rows"))
        created = 0
        for _ in range(self.ROUNDS):
            for created in range(created + 1, created + 6):  # noqa: B020
                (folder / str(created)).write_bytes(b"%d" % created)
            child = os.fork()
            if not child:
                self.run_child(folder)
            self.assertEqual(os.waitpid(child, 0)[1], signal.SIGKILL)
            rows.load()
            live = os.listdir(folder)
            self.open(size=self.SIZE)
            stems = {path.name.partition(".")[0] for path in self.root.glob("files/*/*")}
            named = {derive_directory_name(name) for name in rows.rows}
            self.assertLessEqual(named, stems)
            self.assertLessEqual(stems, named | {derive_directory_name(name) for name in live})
            for name in map(str, range(1, created + 1)):
                if name in rows.rows:
                    events = self.find(name, f"caller-{int(name) % 3}")
                    batch = self.run_now(events.read(0, MIB))
                    self.assertEqual(batch.count, int(name))
                    self.assertEqual(batch.count, events.end_cursor)
                else:
                    self.assertTrue(name in live or name in rows.deleted, name)
        self.assertGreater(len(rows.deleted), 5)

    def run_child(self, folder: Path) -> None:
        """Archive all evaluations, and remove those beyond a small size, until the kill."""
        calls = count()
        last = random.randrange(self.CALLS)

        def kill_at_last_call(*_: object) -> None:
            if next(calls) == last:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.setprofile(kill_at_last_call)
            self.open(size=self.SIZE)
            for name in sorted(os.listdir(folder), key=int):
                rings = partial(make_ring, int(name))
                self.store(name, f"caller-{int(name) % 3}", rings, int(name))
                (folder / name).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
