"""`archive.store`: one directory with recordings, files and index, and its bounds."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from tawebeval.archive.index import ArchiveQuery
from tawebeval.archive.store import (
    MAX_REMOVALS_PER_CALL,
    SUBDIRECTORY_NAMES,
    ArchiveStore,
    PendingEvents,
    PendingWrites,
)
from twisted.logger import capturedLogs, formatEvent

from tawebeval.config import ArchiveSettings
from tawebeval.core.events import EMPTY_BATCH, EventBatch
from tawebeval.core.form import SubmissionFile, pack_request
from tawebeval.errors import ServerBusy
from tawebeval.sandbox.workspace import derive_directory_name
from tests.cases.archive import (
    NOW,
    ArchiveTestCase,
    make_batch,
    make_end,
    make_events,
    make_workspace,
)
from tests.fakes.world import make_request

DAY = 24 * 3600.0


def make_noise(size: int) -> EventBatch:
    """Return one event that hardly can be compressed."""
    return EventBatch(1, b'{"a":"%b"}\n' % os.urandom(size // 2).hex().encode())


class StoreTests(ArchiveTestCase):
    """What is written can be read, by the caller, also by the next process."""

    def test_archived(self) -> None:
        """Events come back in order, whether they were written at once or in many steps."""
        self.write(make_events(0, 3), make_events(3, 2))
        self.assertIsNone(self.store.open_file("one", "alice"))
        self.write(make_events(5, 1))
        self.assertIsNone(self.write(make_events(6, 1), end=make_end()).loss_reason)
        self.assertEqual(self.read(), make_batch(0, 7))
        file = self.get()
        self.addCleanup(file.close)
        self.assertEqual(file.read_end_line()["status"], {"state": "finished"})
        self.assertEqual(self.list_files(), ["jsonl.zst"])

    def test_caller(self) -> None:
        """Another caller finds nothing."""
        self.write(make_events(0, 3), end=make_end())
        self.assertIsNone(self.store.open_file("one", "bob"))
        self.assertEqual(self.store.list_rows(ArchiveQuery("bob", 0, 10, 10, bool)), [])

    def test_closed(self) -> None:
        """Other users cannot look into the archive, also in a directory that they may enter."""
        for path in self.root.iterdir():
            self.assertEqual(path.stat().st_mode & 0o077, 0, path)

    def test_second_process(self) -> None:
        """Another process cannot use the archive meanwhile, and removes nothing."""
        self.write(make_events(0, 3))
        second = ArchiveStore(self.root, self.settings, 0)
        with self.assertRaisesRegex(OSError, "another daemon uses this archive"):
            second.open()
        self.write(make_events(3, 3), end=make_end())
        self.assertEqual(self.list_files(), ["jsonl.zst"])

    def test_lines_lost(self) -> None:
        """A recording whose lines were removed is not archived, rather than with a gap."""
        self.write(make_events(0, 3))
        for path in (self.root / "spool").iterdir():
            path.unlink()
        self.write(make_events(3, 3))
        self.assertEqual(self.write(make_events(6, 1), end=make_end()).loss_reason, "disk")

    def test_next_process(self) -> None:
        """The next process has evaluations and the highest number."""
        self.write(make_events(0, 3), end=make_end(7))
        self.store.close()
        self.store = self.open()
        self.check()
        self.assertEqual((self.newest, self.left), (7, {}))
        self.assertEqual(self.read(), make_batch(0, 3))
        self.assertEqual((self.list_numbers(), self.store.usage.evaluation_count), ([7], 1))

    def test_continued(self) -> None:
        """A recording that the next process goes on with is complete."""
        self.write(make_events(0, 10))
        self.store = self.open()
        self.assertEqual(self.left, {derive_directory_name("one"): 10})
        self.write(make_events(10, 2), end=make_end())
        self.assertEqual(self.read(), make_batch(0, 12))

    def test_gap(self) -> None:
        """A recording that lacks events, or has them twice, is given up, and leaves nothing."""
        for first in (9, 11):
            self.write(make_events(0, 10))
            self.store = self.open()
            self.assertEqual(self.write(make_events(first, 1), end=make_end()).loss_reason, "gap")
            self.assertIsNone(self.store.open_file("one", "alice"))
            self.assertEqual(self.list_files(), [])

    def test_unclaimed(self) -> None:
        """Recordings that no evaluation continues are removed."""
        for name in ("one", "two"):
            self.write(make_events(0, 10_000), name=name)
        self.store = self.open()
        self.store.discard_recordings(list(self.left))
        self.assertEqual(self.list_files(), [])

    def test_ended_in_between(self) -> None:
        """Lines that the end of the process has left beside a complete file are removed."""
        self.write(make_events(0, 3), end=make_end())
        name = derive_directory_name("one")
        (self.root / "spool" / f"{name}.0.0.lines").write_bytes(make_batch(0, 3).lines)
        self.store = self.open()
        self.assertEqual((self.left, self.list_files()), ({}, ["jsonl.zst"]))

    def test_lost(self) -> None:
        """A recording that is given up leaves nothing."""
        self.write(make_events(0, 10_000))
        self.store.write_recordings(
            [PendingWrites("one", "alice", [], make_end(), is_recording_lost=True)]
        )
        self.assertEqual(self.list_files(), [])
        self.assertEqual(self.store.usage.spooled_bytes, 0)


class IndexTests(ArchiveTestCase):
    """An index that is damaged, or differs from the files."""

    def setUp(self) -> None:
        super().setUp()
        for number in (1, 2, 3):
            self.write(make_events(0, 3), name=str(number), end=make_end(number))
        self.store.close()

    def reopen(self) -> None:
        """Open the archive as the next process, and check it."""
        self.store = self.open()
        self.check()

    def test_damaged(self) -> None:
        """An index with wrong bytes is made again, with the same rows."""
        path = self.root / "index/evaluations.sqlite"
        size = path.stat().st_size
        for place in (0, 100, size // 2, size - 2000):
            with open(path, "r+b") as file:
                file.seek(place)
                file.write(os.urandom(2000))
            self.reopen()
            self.assertEqual(self.list_numbers(), [1, 2, 3])
            self.store.close()

    def test_no_index(self) -> None:
        """So is one that is missing or of another version."""
        path = self.root / "index/evaluations.sqlite"
        path.unlink()
        self.reopen()
        self.assertEqual(self.list_numbers(), [1, 2, 3])
        self.store.close()
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 99")
        connection.close()
        self.reopen()
        self.assertEqual((self.list_numbers(), self.store.usage.evaluation_count), ([1, 2, 3], 3))

    def test_damaged_in_use(self) -> None:
        """Lists fail from an index that is damaged meanwhile; the next check mends it."""
        self.reopen()
        self.store.close()
        for path in self.root.glob("index/*"):
            path.write_bytes(b"no index" * 1000)
        self.assertRaisesRegex(ServerBusy, "cannot be read; try again", self.list_numbers)
        self.assertTrue(self.store.needs_index_check)
        self.check()
        self.assertEqual(self.list_numbers(), [1, 2, 3])
        self.assertFalse(self.store.needs_index_check)

    def test_incomplete(self) -> None:
        """Lists fail while an index is made again, also if the process ends meanwhile."""
        (self.root / "index/evaluations.sqlite").write_bytes(b"no index" * 1000)
        self.store = self.open()
        self.store.check_index()
        self.store.recreate_damaged_index()
        for part in SUBDIRECTORY_NAMES:
            self.assertRaisesRegex(ServerBusy, "being made again", self.list_numbers)
            self.store.reconcile_index(part)
        self.store = self.open()
        self.assertRaisesRegex(ServerBusy, "being made again", self.list_numbers)
        self.check()
        self.assertEqual(self.list_numbers(), [1, 2, 3])

    def test_unreadable_file(self) -> None:
        """A file that cannot be read is in no list, and keeps no other one out."""
        paths = sorted(self.root.rglob("*.jsonl.zst"))
        paths[0].unlink()
        paths[0].symlink_to(paths[0].name)  # ELOOP
        (self.root / "index/evaluations.sqlite").unlink()
        self.reopen()
        self.assertEqual(len(self.list_numbers()), 2)
        self.assertTrue(paths[0].is_symlink())

    def test_failed_meanwhile(self) -> None:
        """If the index fails during the check, the next check follows, and lists wait for it."""
        (self.root / "index/evaluations.sqlite").unlink()
        self.store = self.open()
        self.store.check_index()
        self.store.recreate_damaged_index()
        for part in SUBDIRECTORY_NAMES:
            self.store.reconcile_index(part)
        (self.root / "index/evaluations.sqlite").rename(self.root / "index/away")
        (self.root / "index/evaluations.sqlite").mkdir()
        self.assertRaisesRegex(ServerBusy, "cannot be read", self.list_numbers)
        (self.root / "index/evaluations.sqlite").rmdir()
        (self.root / "index/away").rename(self.root / "index/evaluations.sqlite")
        self.store.update_usage_from_index()
        self.assertTrue(self.store.needs_index_check)
        self.assertRaisesRegex(ServerBusy, "being made again", self.list_numbers)
        self.check()
        self.assertEqual(self.list_numbers(), [1, 2, 3])

    def test_files(self) -> None:
        """Rows without a file go, and so do incomplete files; a file without a row gets one."""
        names = {number: derive_directory_name(str(number)) for number in (1, 2, 3)}
        paths = {number: next(self.root.rglob(f"{name}*")) for number, name in names.items()}
        paths[1].unlink()
        connection = sqlite3.connect(self.root / "index/evaluations.sqlite")
        connection.execute("DELETE FROM evaluations WHERE sequence_number > 1")
        connection.commit()
        connection.close()
        paths[3].write_bytes(paths[3].read_bytes()[:-20])
        self.reopen()
        self.assertEqual(self.list_numbers(), [2])
        self.assertEqual(self.list_files(), ["jsonl.zst"])

    def test_other_version(self) -> None:
        """A file of another version, and a file of the operator, are left alone."""
        paths = sorted(self.root.rglob("*.jsonl.zst"))
        paths[0].write_bytes(paths[0].read_bytes()[:-1] + b"2")
        own = paths[1].with_name("README")
        own.write_bytes(b"")
        (self.root / "index/evaluations.sqlite").unlink()
        self.reopen()
        self.assertEqual(len(self.list_numbers()), 2)
        self.assertTrue(paths[0].exists() and own.exists())


class RemovalTests(ArchiveTestCase):
    """Removal by age and by size."""

    def fill(self, count: int) -> None:
        """Archive evaluations that end a day after each other."""
        for number in range(1, count + 1):
            end = make_end(number, NOW + number * DAY)
            self.write(make_events(0, 3), name=str(number), end=end)

    def test_age(self) -> None:
        """Evaluations are removed so many days after their end."""
        self.fill(5)
        self.now = self.booted = NOW + 92.5 * DAY
        self.assertTrue(self.store.remove_old_evaluations())
        self.assertFalse(self.store.remove_old_evaluations())
        self.assertEqual(self.list_numbers(), [3, 4, 5])
        self.assertEqual(self.list_files(), ["jsonl.zst"] * 3)
        self.assertEqual(self.store.usage.evaluation_count, 3)

    def test_wrong_time_removes_nothing(self) -> None:
        """Neither while the daemon runs nor at its next start, unless it stays for a day."""
        self.fill(5)
        self.store.remove_old_evaluations()
        self.now += 100 * DAY
        self.assertFalse(self.store.remove_old_evaluations())
        self.store = self.open()
        self.assertFalse(self.store.remove_old_evaluations())
        self.booted += DAY
        self.now += DAY
        self.assertTrue(self.store.remove_old_evaluations())
        self.assertEqual(self.list_numbers(), [])

    def test_daemon_that_runs_by_day_only_removes_by_age(self) -> None:
        self.fill(5)
        self.store.remove_old_evaluations()
        for _ in range(100):
            self.now += DAY * 0.4
            self.store = self.open()
            self.store.remove_old_evaluations()
            self.now += DAY * 0.6
            self.booted += DAY * 0.6
            self.store.remove_old_evaluations()
        self.assertEqual(self.list_numbers(), [])

    def test_size(self) -> None:
        """The oldest are removed until the rest has the allowed size."""
        self.fill(300)
        size = self.store.usage.archived_bytes
        self.store = self.open(max_bytes=2**20)
        self.check()
        self.assertEqual(self.store.usage.archived_bytes, size)
        while self.store.remove_old_evaluations():
            pass
        kept = self.list_numbers()
        self.assertEqual(self.store.usage.evaluation_count, len(self.list_files()))
        self.assertEqual(kept, list(range(301 - self.store.usage.evaluation_count, 301))[:100])
        self.assertLessEqual(self.store.usage.archived_bytes, 2**20)
        self.assertGreater(self.store.usage.archived_bytes, 2**20 - 2 * size // 300)

    def list_callers(self) -> list[str]:
        """Return the callers of the evaluations in the archive, without duplicates."""
        callers = ("alice", "bob", "carol")
        queries = (ArchiveQuery(caller, 0, 10**6, 100, bool) for caller in callers)
        return [query.caller for query in queries if self.store.list_rows(query)]

    def test_caller_that_holds_most_loses_the_oldest_evaluations(self) -> None:
        """Also after the next start; callers that hold little keep all."""
        for number, caller in enumerate(("alice", "bob"), 1):
            self.write(make_events(0, 3), name=caller, caller=caller, end=make_end(number))
        for number in range(3, 40):
            content = PendingEvents(0, make_noise(100_000), None)
            end = make_end(number, NOW + number)
            self.write(content, name=str(number), caller="carol", end=end)
        self.store = self.open(max_bytes=2**20)
        self.check()
        while self.store.remove_old_evaluations():
            pass
        self.assertEqual(self.list_callers(), ["alice", "bob", "carol"])
        self.assertLessEqual(self.store.usage.archived_bytes, 2**20)
        self.assertGreater(self.store.usage.archived_bytes, 2**20 - 120_000)

    def test_recordings_count_for_their_callers(self) -> None:
        """Those of one caller neither remove nor end those of the others."""
        self.store = self.open(max_bytes=2**20)
        self.write(make_events(0, 3), name="old", caller="bob", end=make_end())
        self.write(make_events(0, 3), name="running", caller="bob")
        for number in range(15):
            content = PendingEvents(0, make_noise(131_000), None)
            self.write(content, name=str(number), caller="carol")
            while self.store.remove_old_evaluations():
                pass
        outcome = self.write(make_events(3, 3), name="running", caller="bob", end=make_end(2))
        self.assertIsNone(outcome.loss_reason)
        self.assertEqual(len(self.store.list_rows(ArchiveQuery("bob", 0, 9, 9, bool))), 2)
        self.assertLessEqual(self.store.usage.total_bytes, 2**20)
        self.assertGreater(self.store.usage.spooled_bytes, 800_000)

    def test_other_callers_recording_is_given_up_if_it_is_larger(self) -> None:
        """The caller that holds most pays, also if it is not the one that writes."""
        self.store = self.open(max_bytes=2**20)
        for number in range(10):
            content = PendingEvents(0, make_noise(100_000), None)
            self.write(content, name=str(number), caller="carol")
        work = PendingWrites("own", "bob", [PendingEvents(0, make_noise(100_000), None)])
        goes_on = PendingWrites("9", "carol", [], make_end())
        lost = {
            outcome.identifier: outcome.loss_reason
            for outcome in self.store.write_recordings([work, goes_on])
        }
        self.assertEqual(lost.pop("own"), None)
        self.assertIn("size", lost.values())
        self.assertEqual(self.list_callers(), [] if lost["9"] else ["carol"])

    def test_recording_of_an_earlier_process_is_not_given_up_for_another(self) -> None:
        """It goes on without its first events, or its end would be archived without events."""
        self.write(PendingEvents(0, make_noise(1_600_000), None), name="left", caller="carol")
        self.store.close()
        self.store = self.open(max_bytes=2**20)
        self.write(make_events(0, 3), name="other", caller="bob")
        content = PendingEvents(3, make_noise(400_000), None)
        self.write(content, name="other", caller="bob")
        outcome = self.write(name="left", caller="carol", end=make_end())
        self.assertIsNone(outcome.loss_reason)
        file = self.store.open_file("left", "carol")
        assert file is not None
        self.addCleanup(file.close)
        self.assertEqual(file.event_count, 1)

    def stick(self, number: int) -> Path:
        """Have a file that cannot be removed; return it."""
        name = derive_directory_name(str(number))
        path = self.root / "files" / name[:2] / f"{name}.tar.zst"
        (path / "below").mkdir(parents=True)
        return path

    def test_stuck(self) -> None:
        """What cannot be removed stays, counts and is said once; others go in its place."""
        self.fill(5)
        each = self.store.usage.archived_bytes // 5
        paths = [self.stick(1), self.stick(2)]
        self.store.settings = ArchiveSettings(is_enabled=True, max_bytes=3 * each)
        with capturedLogs() as logged:
            while self.store.remove_old_evaluations():
                pass
        self.assertEqual(self.list_numbers(), [1, 2, 5])
        self.assertEqual(self.read(name="1"), make_batch(0, 3))
        self.assertEqual(
            (self.store.usage.evaluation_count, self.store.usage.archived_bytes), (3, 3 * each)
        )
        self.assertTrue(self.store.has_unremovable_files)
        (said,) = map(formatEvent, logged)
        self.assertIn(f"{paths[0]} cannot be removed: Is a directory; let the daemon's user", said)
        for path in paths:
            (path / "below").rmdir()
            path.rmdir()
        self.now = self.booted = NOW + 92.5 * DAY
        while self.store.remove_old_evaluations():
            pass
        self.assertEqual(self.list_numbers(), [5])
        self.assertEqual(self.store.usage.evaluation_count, 1)
        self.assertFalse(self.store.has_unremovable_files)

    def test_stuck_in_check(self) -> None:
        """Nor does a file of a write that was cut off, or an incomplete one, end the check."""
        self.fill(1)
        path = self.stick(2)
        cut = path.with_suffix(".new")
        path.rename(cut)
        self.stick(3)
        with capturedLogs() as logged:
            self.store = self.open()
            self.check()
        self.assertEqual(self.list_numbers(), [1])
        said = [formatEvent(event) for event in logged]
        self.assertEqual(sum("cannot be removed: Is a directory" in one for one in said), 2, said)

    def test_all_stuck(self) -> None:
        """Where nothing can be removed the removal ends, and nothing is lost."""
        self.fill(MAX_REMOVALS_PER_CALL + 2)
        for number in range(1, MAX_REMOVALS_PER_CALL + 3):
            self.stick(number)
        usage = self.store.usage
        self.now = NOW + 1000 * DAY
        with capturedLogs() as logged:
            for goes_on in (True, False):
                self.assertEqual(self.store.remove_old_evaluations(), goes_on)
        self.assertEqual((self.store.usage, len(logged)), (usage, 1))

    def test_recordings_count(self) -> None:
        """Recordings count, too; those that alone exceed the size are given up."""
        self.store = self.open(max_bytes=2**20)
        self.fill(30)
        lines = os.urandom(2**20 - 100_000).replace(b"\n", b"")
        self.write(
            PendingEvents(0, type(EMPTY_BATCH)(1, b'{"a":' + lines + b'"}\n'), None),
            name="running",
        )
        while self.store.remove_old_evaluations():
            pass
        self.assertLess(self.store.usage.evaluation_count, 30)
        self.assertGreater(self.store.usage.evaluation_count, 0)
        outcome = self.write(
            PendingEvents(1, type(EMPTY_BATCH)(1, b'{"a":' + lines + b'"}\n'), None),
            name="running",
        )
        self.assertEqual(outcome.loss_reason, "size")
        self.assertEqual(self.store.usage.spooled_bytes, 0)


class SubmissionTests(ArchiveTestCase):
    """The submission of an evaluation, to run it again."""

    packed = pack_request(
        make_request(
            submission=(SubmissionFile("a", "x.py"), SubmissionFile("b", "ein Name mit ü"))
        )
    )
    files = {"a/x.py": b"print()", "b/ein Name mit ü": bytes(100_000)}  # noqa: RUF012

    def archive(self, name: str = "one") -> None:
        """Archive an evaluation with its submission."""
        root = self.root.with_name(f"workspace-{name}")
        workspace = make_workspace(root, self.packed, self.files)
        end = make_end()
        self.write(
            name=name,
            end=type(end)(1, NOW, NOW, end.status, end.listing_entry, workspace),
        )

    def test_extracted(self) -> None:
        """The files are as they were, also where the names are unusual."""
        self.archive()
        self.assertEqual(self.list_files(), ["jsonl.zst", "tar.zst"])
        target = self.root.with_name("target")
        found = self.store.extract_submission("one", "alice", target)
        assert found is not None
        self.assertEqual(pack_request(found.evaluation_request), self.packed)
        self.assertEqual(found.size, 100_007)
        for name, content in self.files.items():
            self.assertEqual((target / "submission" / name).read_bytes(), content)
        self.assertIsNone(self.store.extract_submission("one", "bob", self.root.with_name("other")))

    def test_too_large(self) -> None:
        """A submission over `archive.submission` is not archived; the events are."""
        self.store = self.open(max_submission_bytes=1000)
        self.archive()
        self.assertEqual(self.list_files(), ["jsonl.zst"])
        self.assertIsNone(
            self.store.extract_submission("one", "alice", self.root.with_name("target"))
        )

    def test_removed(self) -> None:
        """A submission that is gone, or is no file any more, is not archived; the events are."""
        workspace = make_workspace(self.root.with_name("gone"), self.packed, self.files)
        for path in (workspace.submission_directory / "a/x.py", workspace.request_file):
            path.unlink()
            path.symlink_to("/etc/passwd")
            end = make_end()
            self.write(end=type(end)(1, NOW, NOW, end.status, end.listing_entry, workspace))
            self.assertEqual(self.list_files(), ["jsonl.zst"])


class DiskTests(ArchiveTestCase):
    """A disk that is nearly full, or fails."""

    def test_reserve(self) -> None:
        """Nothing is written while less than the reserve is free."""
        self.write(make_events(0, 3))
        self.store.min_free_bytes = 2**60
        self.assertEqual(self.write(make_events(3, 3)).loss_reason, "disk")
        self.assertEqual(self.list_files(), [])

    def test_failing(self) -> None:
        """A recording that cannot be written is given up; others are not."""
        self.write(make_events(0, 3))
        self.write(make_events(0, 3), name="two")
        name = derive_directory_name("one")
        (self.root / "spool" / f"{name}.0.0.lines").unlink()
        (self.root / "spool" / f"{name}.0.0.lines").mkdir()
        outcomes = self.store.write_recordings(
            [
                PendingWrites("one", "alice", [make_events(3, 3)], make_end(1)),
                PendingWrites("two", "alice", [make_events(3, 3)], make_end(2)),
            ]
        )
        self.assertEqual([outcome.loss_reason for outcome in outcomes], ["disk", None])
        self.assertEqual(self.read(name="two"), make_batch(0, 6))
