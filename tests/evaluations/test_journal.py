"""Journals: what is read back, after a crash at any write, and after damage."""

from __future__ import annotations

import os
from typing import Any

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from tawebeval.evaluations.journal import (
    READABLE_VERSIONS,
    EvaluationJournal,
    JournalContent,
    JournaledBatch,
    JournalError,
    ParserCheckpoint,
    UnknownJournalVersion,
)
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.events import EventBatch
from tawebeval.linux.memory_file import PAGE_BYTES


def batch(cursor: int, count: int, size: int) -> JournaledBatch:
    """Return events of this size each, at this cursor."""
    line = b'"' + b"x" * size + b'"\n'
    checkpoint = ParserCheckpoint(cursor * 7, cursor * 3, b"state%d" % cursor)
    return JournaledBatch(cursor, EventBatch(count, line * count), 1000 + cursor, checkpoint)


def copy(journal: EvaluationJournal) -> int:
    """Return a descriptor of a copy of the file, as a crash would leave it."""
    copied = os.memfd_create("copy")
    size = os.fstat(journal.descriptor).st_size
    os.pwrite(copied, os.pread(journal.descriptor, size, 0), 0)
    return copied


def held(journal: EvaluationJournal) -> int:
    """Return the bytes of memory that a journal takes."""
    return os.fstat(journal.descriptor).st_blocks * 512


class JournalTests(SynchronousTestCase):
    """A journal that is written and read."""

    def setUp(self) -> None:
        self.journal = EvaluationJournal.create()
        self.addCleanup(self.journal.close)

    def read(self, descriptor: int | None = None) -> JournalContent:
        """Return what a later process reads."""
        opened = os.dup(self.journal.descriptor) if descriptor is None else descriptor
        self.addCleanup(os.close, opened)
        return EvaluationJournal.load(opened)[1]

    def test_last_snapshot(self) -> None:
        """The last snapshot counts, and all events."""
        self.journal.write_snapshot(b"first")
        batches = [batch(0, 3, 10), batch(3, 1, 0)]
        self.journal.write_events(batches[0])
        self.journal.write_snapshot(b"second")
        self.journal.write_events(batches[1])
        self.assertEqual(self.read(), JournalContent(b"second", 0, batches))

    def test_written_on(self) -> None:
        """A journal that was read is written on, also after events were discarded."""
        self.journal.write_snapshot(b"old")
        for cursor in range(10):
            self.journal.write_events(batch(cursor, 1, 20_000))
        self.journal.discard_acknowledged_events(7, lambda: b"new")
        other, content = EvaluationJournal.load(os.dup(self.journal.descriptor))
        self.addCleanup(other.close)
        other.write_events(batch(10, 1, 5))
        self.assertEqual(content.snapshot, b"new")
        self.assertEqual([each.begin_cursor for each in self.read().batches], [*range(7, 11)])

    def test_needed(self) -> None:
        """Acknowledged events that the archive has not written yet stay, until it has."""
        self.journal.write_snapshot(b"old")
        for cursor in range(10):
            self.journal.write_events(batch(cursor, 1, 20_000))
        self.journal.discard_acknowledged_events(9, lambda: b"new", needed_cursor=2)
        content = self.read()
        self.assertLessEqual(content.begin_cursor, 2)
        self.assertEqual(content.acknowledged_cursor, 9)
        self.journal.discard_acknowledged_events(9, lambda: b"new")
        self.assertEqual([each.begin_cursor for each in self.read().batches], [9])

    def test_memory(self) -> None:
        """Memory is bounded by the events that are not discarded, whatever was written before."""
        self.journal.write_snapshot(b"state")
        for cursor in range(0, 3000, 3):
            self.journal.write_events(batch(cursor, 3, 1000))
            self.journal.discard_acknowledged_events(cursor, lambda: b"state")
        self.assertLess(held(self.journal), 6 * 64 * 1024)
        self.assertEqual(self.read().snapshot, b"state")

    def test_each_write(self) -> None:
        """After a crash between any two writes to the file the journal is as before or after."""
        snapshots: list[int] = []
        real = os.pwritev

        def write(descriptor: int, parts: Any, offset: int) -> int:
            snapshots.append(copy(self.journal))
            half = b"".join(parts)[: len(b"".join(parts)) // 2]
            torn = copy(self.journal)
            os.pwrite(torn, half, offset)
            snapshots.append(torn)
            return real(descriptor, parts, offset)

        self.journal.write_snapshot(b"state")
        states = [self.read()]
        self.patch(os, "pwritev", write)
        for cursor in range(9):
            self.journal.write_events(batch(cursor, 1, 40_000))
            states.append(self.read())
        for before in (4, 8):  # with the second the rest moves to the beginning of the file
            self.journal.discard_acknowledged_events(before, lambda: b"later")
            states.append(self.read())
            states.append(attrs.evolve(states[-2], snapshot=b"later", acknowledged_cursor=before))
        for descriptor in snapshots:
            self.assertIn(self.read(descriptor), states)

    def test_damage(self) -> None:
        """A damaged byte is noticed, unless nothing depends on it."""
        self.journal.write_snapshot(b"state")
        for cursor in range(3):
            self.journal.write_events(batch(cursor, 2, 30))
        whole = self.read()
        size = os.fstat(self.journal.descriptor).st_size
        noticed = 0
        for at in (*range(256), *range(PAGE_BYTES, size)):
            damaged = copy(self.journal)
            byte = os.pread(damaged, 1, at)[0]
            os.pwrite(damaged, bytes([byte ^ 0x10]), at)
            try:
                found = self.read(damaged)
            except JournalError:
                noticed += 1
            else:
                # One slot is as good as the other, but for the last write.
                self.assertLess(at, PAGE_BYTES)
                self.assertEqual(found.batches, whole.batches[: len(found.batches)])
        self.assertGreaterEqual(noticed, size - PAGE_BYTES)

    def test_rewritten(self) -> None:
        """A journal without old snapshots has the same content, and takes their memory no more."""
        for cursor in range(20):
            self.journal.write_snapshot(b"x" * 9000)
            self.journal.write_events(batch(cursor, 1, 10))
        self.journal.discard_acknowledged_events(4, lambda: b"state")
        journal = self.journal.copy_live_events(b"last")
        self.addCleanup(journal.close)
        self.assertEqual(
            self.read(os.dup(journal.descriptor)), attrs.evolve(self.read(), snapshot=b"last")
        )
        self.assertGreater(held(self.journal), 100_000)
        self.assertLess(held(journal), 5 * PAGE_BYTES)

    def test_unknown_version(self) -> None:
        """A journal of a version before or after those that are read is not taken for damaged."""
        self.journal.write_snapshot(b"state")
        at = len(b"tawebeval journal")
        for version in (min(READABLE_VERSIONS) - 1, max(READABLE_VERSIONS) + 1):
            os.pwrite(self.journal.descriptor, version.to_bytes(2, "little"), at)
            self.assertRaises(UnknownJournalVersion, self.read)

    def test_no_journal(self) -> None:
        """Other files, an empty one and a journal without a snapshot are refused."""
        self.assertRaises(JournalError, self.read)
        for content in (b"", b"x" * 5000):
            other = os.memfd_create("other")
            os.pwrite(other, content, 0)
            self.assertRaises(JournalError, self.read, other)

    @settings(deadline=None)
    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("events"), st.integers(1, 20), st.integers(0, 9000)),
                st.tuples(st.just("snapshot")),
                st.tuples(st.just("discard"), st.floats(0, 1)),
            ),
            max_size=40,
        )
    )
    def test_any_order(self, steps: list[tuple[Any, ...]]) -> None:
        """All events that are not discarded are there, in order, with the last snapshot."""
        journal = EvaluationJournal.create()
        journal.write_snapshot(b"0")
        newest = oldest = number = 0
        for kind, *values in steps:
            if kind == "events":
                count, size = values
                journal.write_events(batch(newest, count, size))
                newest += count
            elif kind == "snapshot":
                number += 1
                journal.write_snapshot(b"%d" % number)
            else:
                oldest = max(oldest, int(newest * values[0]))
                journal.discard_acknowledged_events(oldest, lambda number=number: b"%d" % number)
        _, content = EvaluationJournal.load(journal.descriptor)
        journal.close()
        self.assertEqual(content.snapshot, b"%d" % number)
        self.assertLessEqual(content.begin_cursor, oldest)
        cursor = content.begin_cursor
        for each in content.batches:
            self.assertEqual(each.begin_cursor, cursor)
            self.assertEqual(each.batch.lines.count(b"\n"), each.batch.count)
            cursor += each.batch.count
        self.assertEqual(cursor, newest)
        self.assertEqual(content.acknowledged_cursor, oldest)
        self.assertTrue(content.batches or not newest, "the last checkpoint stays")
