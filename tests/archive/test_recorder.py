"""`archive.recorder`: the queue between rings and the disk, and its bounds."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import attrs
from tawebeval.archive.index import ArchiveQuery
from tawebeval.archive.recorder import (
    ARCHIVE_CLOSE_TIMEOUT,
    MAX_QUEUED_BYTES,
    MAX_QUEUED_BYTES_PER_EVALUATION,
    READ_TIMEOUT,
    STALLED_WRITE_SECONDS,
    DiskArchive,
)
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock

from tawebeval.archive.files import ArchiveFile
from tawebeval.config import ArchiveSettings
from tawebeval.core.budget import RingAllocation, RingBudget
from tawebeval.core.events import EventBatch
from tawebeval.core.ring import EventRing
from tawebeval.errors import CallerQuotaExceeded, ServerBusy
from tawebeval.evaluations.timestamps import format_rfc3339_time
from tests.cases.archive import NOW, ArchiveTestCase, make_batch, make_end
from tests.fakes.world import InlineThreads, SlowThreads

MIB = 2**20


class RecorderTestCase(ArchiveTestCase):
    """An archive whose disk answers when the test says so."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()
        self.threads = SlowThreads()
        self.rooms = 0
        self.budget = RingBudget(2**40, 2**40, 4, lambda call: self.clock.callLater(0, call))
        self.archive = self.make()

    def make(self) -> DiskArchive:
        """Return the archive of a process."""
        readers: Any = InlineThreads()
        threads: Any = self.threads
        archive = DiskArchive(self.store, threads, readers, self.clock, format_rfc3339_time)
        self.newest = archive.open()
        return archive

    def begin(
        self, name: str = "one", ring: EventRing | None = None
    ) -> tuple[EventRing, RingAllocation]:
        """Begin an evaluation."""
        ring = ring or EventRing(read_wall_clock=lambda: NOW)
        share = self.budget.allocate_ring("alice", on_room=self.count_room)
        self.archive.begin_recording(name, "alice", ring, share)
        return ring, share

    def count_room(self) -> None:
        """Count calls."""
        self.rooms += 1

    def flow(self) -> None:
        """Let all that waits be written."""
        self.clock.advance(1)
        self.threads.finish()

    def ask(self, coroutine: Any) -> Any:
        """Return what the archive answers at once."""
        return self.successResultOf(Deferred.fromCoroutine(coroutine))

    def events(self, name: str = "one") -> bytes:
        """Return all archived events."""
        found = self.ask(self.archive.read_evaluation(name, "alice", read_lines))
        return b"" if found is None else bytes(found)


def read_lines(file: ArchiveFile) -> bytes:
    """Return the events of a file, without times."""
    return file.read_events(0, 10**9, with_times=False).lines


class RecordingTests(RecorderTestCase):
    """From the ring to the archive."""

    def test_all_events(self) -> None:
        """Events are archived that readers have acknowledged long before the end."""
        ring, _ = self.begin()
        for first in range(0, 1000, 100):
            ring.append_batch(make_batch(first, 100))
            ring.acknowledge(ring.end_cursor)
            self.clock.advance(0.01)
        self.flow()
        ring.append_batch(make_batch(1000, 1))
        self.archive.end_recording("one", make_end())
        self.flow()
        self.assertEqual(self.events(), make_batch(0, 1001).lines)
        self.assertEqual(self.archive.archived_count, 1)
        self.assertEqual(self.archive.queued_bytes, 0)
        self.assertEqual(self.archive.usage.evaluation_count, 1)

    def test_gathered(self) -> None:
        """Events of some time are written together."""
        ring, _ = self.begin()
        for first in range(100):
            ring.append_batch(make_batch(first, 1))
        self.clock.advance(1)
        self.assertEqual(len(self.threads.waiting), 1)

    def test_wait_for_end(self) -> None:
        """A reader waits until an evaluation that has just ended is archived."""
        ring, _ = self.begin()
        ring.append_batch(make_batch(0, 2))
        ring.mark_end()
        self.archive.end_recording("one", make_end())
        packed: list[bool] = []
        self.archive.add_archived_callback("one", lambda: packed.append(True))
        read = Deferred.fromCoroutine(
            self.archive.read_evaluation("one", "alice", ArchiveFile.read_end_line)
        )
        listed = Deferred.fromCoroutine(
            self.archive.list_rows(ArchiveQuery("alice", 0, 10, 10, bool))
        )
        self.assertNoResult(read)
        self.assertNoResult(listed)
        self.assertEqual(packed, [])
        self.flow()
        self.assertEqual(self.successResultOf(read)["status"], {"state": "finished"})
        self.assertEqual(len(self.successResultOf(listed)), 1)
        self.assertEqual(packed, [True])

    def test_list_in_vain(self) -> None:
        """A list does not wait for long until evaluations that have ended are archived."""
        for name in ("one", "two"):
            ring, _ = self.begin(name)
            ring.append_batch(make_batch(0, 2))
            ring.mark_end()
            self.archive.end_recording(name, make_end())
            self.clock.advance(0.1)
        listed = Deferred.fromCoroutine(
            self.archive.list_rows(ArchiveQuery("alice", 0, 10, 10, bool))
        )
        self.clock.advance(READ_TIMEOUT - 1)
        self.threads.step()  # the write of the first; that of the second begins
        self.assertNoResult(listed)
        self.clock.advance(1)
        self.assertEqual(len(self.successResultOf(listed)), 1)

    def test_unknown(self) -> None:
        """What is not archived for the caller is None."""
        self.assertIsNone(
            self.ask(self.archive.read_evaluation("one", "alice", ArchiveFile.read_end_line))
        )
        self.assertEqual(self.events(), b"")
        self.assertEqual(
            self.ask(self.archive.list_rows(ArchiveQuery("alice", 0, 10, 10, bool))), []
        )

    def read_status(self, caller: str = "alice") -> Deferred[Any]:
        """Begin to read an evaluation that is not archived."""
        reading = self.archive.read_evaluation("one", caller, ArchiveFile.read_end_line)
        return Deferred.fromCoroutine(reading)

    def test_read_in_vain(self) -> None:
        """A reader does not wait for a disk that hangs."""
        readers: Any = SlowThreads()
        self.archive = DiskArchive(self.store, readers, readers, self.clock, format_rfc3339_time)
        reads = [self.read_status() for _ in range(101)]
        self.clock.advance(READ_TIMEOUT)
        self.clock.advance(READ_TIMEOUT)
        for each in reads:
            failure = self.failureResultOf(each, ServerBusy)
            self.assertIn("the disk of the archive does not answer", str(failure.value))
        self.assertEqual(len(readers.waiting), 2)
        readers.finish()
        last = self.read_status()
        readers.finish()
        self.assertIsNone(self.successResultOf(last))

    def test_another_callers_read_passes_those_of_one_caller(self) -> None:
        """However many one caller begins, the other waits for one; and those are answered, too."""
        readers: Any = SlowThreads()
        self.archive = DiskArchive(self.store, readers, readers, self.clock, format_rfc3339_time)
        greedy = [self.read_status() for _ in range(400)]
        gone = greedy.pop(200)
        gone.cancel()
        self.failureResultOf(gone, CancelledError)
        other = self.read_status("bob")
        for _ in range(4):
            readers.step()
        self.assertIsNone(self.successResultOf(other))
        readers.finish()
        for each in greedy:
            self.assertIsNone(self.successResultOf(each))

    def test_reads_that_wait_too_long_for_others_say_so(self) -> None:
        """The disk is not blamed while it answers."""
        readers: Any = SlowThreads()
        self.archive = DiskArchive(self.store, readers, readers, self.clock, format_rfc3339_time)
        first, second, _, last = [self.read_status() for _ in range(4)]
        self.clock.advance(READ_TIMEOUT - 1)
        readers.step()
        self.assertIsNone(self.successResultOf(first))
        self.clock.advance(1)
        failure = self.failureResultOf(last, CallerQuotaExceeded)
        self.assertIn("at the same time", str(failure.value))
        self.failureResultOf(second, ServerBusy)  # the disk has not answered this one
        readers.finish()

    def test_flush(self) -> None:
        """A shutdown writes what waits, and waits for a disk that hangs for some seconds only."""
        ring, _ = self.begin()
        ring.append_batch(make_batch(0, 2))
        closed = Deferred.fromCoroutine(self.archive.close())
        self.clock.advance(1)
        self.assertNoResult(closed)
        self.threads.finish()
        self.successResultOf(closed)
        self.store = self.open()
        self.assertEqual(list(self.left.values()), [2])

    def test_flush_in_vain(self) -> None:
        """A shutdown does not wait for a disk that hangs."""
        ring, _ = self.begin()
        ring.append_batch(make_batch(0, 2))
        closed = Deferred.fromCoroutine(self.archive.close())
        for _ in range(3):
            self.clock.advance(ARCHIVE_CLOSE_TIMEOUT / 2)
        self.successResultOf(closed)


class QueueTests(RecorderTestCase):
    """A disk that is slower than evaluators, or hangs."""

    def fill(self, ring: EventRing, size: int) -> None:
        """Let an evaluator print so many bytes in batches of a MiB."""
        lines = b'{"type":"text","payload":"%s"}\n' % (b"x" * (MIB - 40))
        for _ in range(size // MIB):
            ring.append_batch(EventBatch(1, lines))
            ring.acknowledge(ring.end_cursor)

    def test_held(self) -> None:
        """Evaluators are held back while much waits, and go on afterwards; nothing is missing."""
        ring, share = self.begin()
        other, other_share = self.begin("two")
        other.append_batch(make_batch(0, 1))
        self.fill(ring, MAX_QUEUED_BYTES_PER_EVALUATION - MIB)
        self.assertFalse(share.is_archive_behind)
        self.fill(ring, 2 * MIB)
        self.assertEqual((share.is_archive_behind, other_share.is_archive_behind), (True, False))
        self.flow()
        self.assertEqual((share.is_archive_behind, self.rooms), (False, 1))
        self.archive.end_recording("one", make_end())
        self.flow()
        self.assertEqual(self.events().count(b"\n"), ring.end_cursor)

    def test_hangs(self) -> None:
        """While the disk hangs an evaluator is held back for a while only, and nothing gathers."""
        ring, share = self.begin()
        other, _ = self.begin("two")
        other.append_batch(make_batch(0, 1))
        self.fill(ring, MAX_QUEUED_BYTES_PER_EVALUATION)
        self.clock.pump([0.1, STALLED_WRITE_SECONDS - 1])
        self.assertTrue(share.is_archive_behind)
        self.clock.advance(1)
        self.assertFalse(share.is_archive_behind)
        self.assertEqual(self.archive.loss_counts_by_reason["queue"], 2)
        self.fill(ring, MAX_QUEUED_BYTES_PER_EVALUATION)
        self.assertFalse(share.is_archive_behind)
        late, _ = self.begin("three")
        self.assertIsNone(late.on_append)
        for name in ("one", "two", "three"):
            self.archive.end_recording(name, make_end())
        self.flow()
        self.assertEqual(self.archive.queued_bytes, 0)
        self.assertEqual((self.events(), self.list_files()), (b"", []))
        self.archive_again()

    def test_ended_while_it_hangs(self) -> None:
        """An evaluation that ends while the disk hangs is forgotten."""
        first, _ = self.begin()
        first.append_batch(make_batch(0, 1))
        self.clock.advance(1)
        ring, share = self.begin("two")
        ring.append_batch(make_batch(0, 1))
        self.archive.end_recording("two", make_end())
        kept = weakref.ref(ring)
        del ring, share
        self.clock.advance(STALLED_WRITE_SECONDS)
        gc.collect()
        self.assertIsNone(kept())

    def archive_again(self) -> None:
        """Hold that the next evaluation is archived."""
        ring, _ = self.begin("next")
        ring.append_batch(make_batch(0, 1))
        self.archive.end_recording("next", make_end())
        self.flow()
        self.assertEqual(self.events("next"), make_batch(0, 1).lines)

    def test_many_ends(self) -> None:
        """Ended evaluations count, too: while the disk is slow not any number waits."""
        self.begin()[0].append_batch(make_batch(0, 1))
        self.clock.advance(1)
        count = 0
        while not self.archive.loss_counts_by_reason["queue"]:
            count += 1
            self.begin(f"number {count}")
            self.archive.end_recording(f"number {count}", make_end())
        self.assertLess(count, 5000)
        self.assertLessEqual(self.archive.queued_bytes, MAX_QUEUED_BYTES)
        self.flow()
        self.assertEqual(self.archive.archived_count, count - 1)

    def test_most(self) -> None:
        """An evaluation that would make too much wait is not archived."""
        ring, share = self.begin()
        self.fill(ring, MAX_QUEUED_BYTES + MIB)
        self.assertEqual(
            (self.archive.loss_counts_by_reason["queue"], share.is_archive_behind), (1, False)
        )
        self.assertEqual(self.archive.queued_bytes, 0)
        self.assertIsNone(ring.on_append)
        self.flow()
        self.assertEqual(self.list_files(), [])

    def test_failing(self) -> None:
        """An evaluation whose events cannot be written goes on; its files are removed."""
        ring, _ = self.begin()
        ring.append_batch(make_batch(0, 2))
        self.flow()
        self.store.min_free_bytes = 2**60
        ring.append_batch(make_batch(2, 2))
        self.flow()
        self.assertEqual(self.archive.loss_counts_by_reason["disk"], 1)
        ring.append_batch(make_batch(4, 2))
        self.archive.end_recording("one", make_end())
        self.flow()
        self.assertEqual((self.events(), self.list_files()), (b"", []))
        self.assertEqual(self.archive.archived_count, 0)

    def test_defect(self) -> None:
        """An unexpected error gives up one evaluation, and no other."""
        for name in ("one", "two"):
            self.begin(name)
        end = make_end()
        self.archive.end_recording("one", attrs.evolve(end, status={"no JSON": object()}))
        self.archive.end_recording("two", end)
        self.flow()
        self.assertEqual(
            (self.archive.loss_counts_by_reason["defect"], self.archive.archived_count), (1, 1)
        )
        self.assertEqual(len(self.flushLoggedErrors(TypeError)), 1)


class RemovalTests(RecorderTestCase):
    """Removal beyond `archive.size`."""

    def test_stuck(self) -> None:
        """Each write brings a removal along, unless the last one met files that have to stay."""
        self.store.settings = ArchiveSettings(is_enabled=True, max_bytes=1)
        for has_unremovable_files, count in ((True, 1), (False, 0)):
            self.store.has_unremovable_files = has_unremovable_files
            self.begin()
            self.archive.end_recording("one", make_end())
            self.flow()
            self.archive.start_maintenance()
            self.threads.finish()
            self.assertEqual(len(self.list_files()), count)


class RestartTests(RecorderTestCase):
    """A new process, with evaluations that go on and others that do not."""

    def restart(self) -> None:
        """Begin a new process; the old one does nothing more."""
        for call in self.clock.getDelayedCalls():
            call.cancel()
        self.store.close()
        self.store = self.open()
        self.archive = self.make()

    def test_continued(self) -> None:
        """A recording is continued by what the ring has of the events after it."""
        ring, _ = self.begin()
        ring.append_batch(make_batch(0, 10))
        self.flow()
        self.restart()
        ring.on_append = None
        ring.append_batch(make_batch(10, 5))
        ring.acknowledge(8)
        self.begin(ring=ring)
        ring.append_batch(make_batch(15, 5))
        self.assertFalse(self.archive.is_archived("one"))
        self.archive.end_recording("one", make_end())
        self.flow()
        self.assertEqual(self.events(), make_batch(0, 20).lines)
        self.assertTrue(self.archive.is_archived("one"))

    def test_written(self) -> None:
        """The archive tells which events it may still need from a journal."""
        ring, _ = self.begin()
        ring.append_batch(make_batch(0, 10))
        self.assertEqual(self.archive.get_written_cursor("one"), 0)
        self.flow()
        ring.append_batch(make_batch(10, 5))
        self.assertEqual(self.archive.get_written_cursor("one"), 10)
        self.restart()
        ring.on_append = None
        self.begin(ring=ring)
        self.assertEqual(self.archive.get_written_cursor("one"), 10)
        self.archive.end_recording("one", make_end())
        self.assertIsNotNone(self.archive.get_written_cursor("one"))
        self.flow()
        self.assertIsNone(self.archive.get_written_cursor("one"))

    def test_gap(self) -> None:
        """One that lacks events which the ring has discarded is given up."""
        ring, _ = self.begin()
        ring.append_batch(make_batch(0, 10))
        ring.acknowledge(10)
        self.restart()
        self.begin(ring=ring)
        self.archive.end_recording("one", make_end())
        self.flow()
        self.assertEqual(self.archive.loss_counts_by_reason["gap"], 1)
        self.assertEqual(self.list_files(), [])

    def test_unclaimed(self) -> None:
        """One that no evaluation continues is removed."""
        ring, _ = self.begin()
        ring.append_batch(make_batch(0, 10))
        self.flow()
        self.restart()
        self.archive.discard_orphaned_recordings()
        self.threads.finish()
        self.assertEqual(self.list_files(), [])

    def test_newest(self) -> None:
        """The highest number is known."""
        self.begin()
        self.archive.end_recording("one", make_end(5))
        self.flow()
        self.restart()
        self.assertEqual(self.newest, 5)

    def test_unusable(self) -> None:
        """A directory that cannot be opened archives nothing until it can."""
        self.store.close()
        parked = self.root.rename(self.root.with_name("parked"))
        self.root.write_bytes(b"")
        self.store = type(self.store)(self.root, self.settings, 0)
        self.opened.append(self.store)
        self.archive = self.make()
        self.assertFalse(self.archive.is_enabled)
        ring, _ = self.begin()
        self.assertIsNone(ring.on_append)
        self.archive.discard_orphaned_recordings()
        self.threads.finish()
        self.assertFalse(self.archive.is_enabled)
        self.root.unlink()
        parked.rename(self.root)
        self.clock.advance(100)
        self.archive.start_maintenance()
        self.threads.finish()
        self.assertTrue(self.archive.is_enabled)
