"""`evaluations.reading`, on real files: each reader gets what was printed, once and in order."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twisted.internet.defer import Deferred, succeed
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core import event_log, segi
from tawebeval.core.event_log import LOST_EVENT, EventLog, EventMemory, EventsEvicted
from tawebeval.core.events import ALL_RECEIVED_CURSOR, EventBatch, encode_error_event
from tawebeval.errors import DiscardedCursor, ServerBusy
from tawebeval.evaluations import eventlog
from tawebeval.evaluations.eventlog import (
    MAX_LOADS,
    MAX_LOADS_PER_CALLER,
    EvaluationEvents,
    EventFiles,
    RecordedStdout,
    SegmentLoader,
)
from tawebeval.evaluations.reading import Subscription
from tests.cases.strategies import MARKERS, SMALL_STEPS, read_file, stdouts
from tests.fakes.world import SlowThreads

PLENTY = 2**20

printed = st.one_of(
    stdouts,
    st.integers(1, 60).map(lambda lines: b"".join(b"line %d\n" % n for n in range(lines))),
    st.sampled_from([b"partial", b"\n~FB\nX-SEGI-As: path\n\na\n~FE\n"]),
)


class WatchedLog(EventLog):
    """A log that keeps the lines of all events beside it."""

    lines: list[bytes]

    def append_batch(self, batch: EventBatch, time_ms: int) -> None:
        super().append_batch(batch, time_ms)
        self.lines += batch.lines.splitlines(keepends=True)


class Source:
    """An evaluator that prints into `directory`, and the events of its evaluation."""

    def __init__(
        self, directory: Path, memory: EventMemory, loader: SegmentLoader, caller: str = "alice"
    ) -> None:
        self.directory = directory
        self.files = EventFiles(directory)
        self.log = WatchedLog(memory)
        self.log.lines = []
        self.events = EvaluationEvents(self.log, caller, "name", loader)
        self.stdout = RecordedStdout(self.log, self.files, MARKERS, float)
        self.events.stdout = self.stdout

    def print(self, output: bytes) -> None:
        with (self.directory / "stdout").open("ab") as file:
            file.write(output)
        self.stdout.feed(output)
        while self.stdout.has_pending_input or self.stdout.awaited_file is not None:
            if self.stdout.awaited_file is None:
                self.stdout.parse_pending()
            else:
                path = self.stdout.awaited_file.path
                content = read_file(path.encode(errors="surrogateescape"))
                answer = "there is no such file" if content is None else content
                self.stdout.store_file(answer)
                self.stdout.answer_file(answer)
        self.events.change_condition.notify()

    def end(self, last: EventBatch | None = None) -> None:
        """End the evaluation, with a last event that is not printed."""
        self.stdout.finish()
        if last is not None:
            self.log.append_batch(last, 0)
        self.log.mark_end()
        self.events.close_files()
        self.events.change_condition.notify()

    @property
    def open_files(self) -> list[str]:
        """Files of the event log that the process has open."""
        found = [os.readlink(f"/proc/self/fd/{name}") for name in descriptors()]
        return sorted(one for one in found if one.startswith(str(self.directory.resolve())))


def descriptors() -> list[str]:
    """Return the numbers of open descriptors."""
    return [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]


class ReadingMachine(RuleBasedStateMachine):
    """An evaluator, threads that take their time, and readers of all kinds."""

    @initialize(max_bytes=st.integers(0, 4000))
    def start(self, max_bytes: int) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.threads = SlowThreads()
        memory = EventMemory(max_bytes)
        self.source = Source(self.directory, memory, SegmentLoader(self.threads))  # type: ignore[arg-type]
        self.events, self.log = self.source.events, self.source.log
        self.page_cursors = {"first": 0, "second": 0}
        self.pending: list[Deferred[None]] = []
        self.failures: list[Failure] = []
        self.has_ended = False

    def teardown(self) -> None:
        """Let everything come to its end: streams have all events, files are closed."""
        try:
            if not self.has_ended:
                self.end()
            while self.threads.waiting:
                self.threads.step()
            self.no_reader_has_failed()
            assert all(one.called for one in self.pending)
            assert self.source.open_files == []
            if not self.events.keeps_files:
                assert not self.source.stdout.has_discarded_files
        finally:
            self.source.files.close()
            shutil.rmtree(self.directory)

    def begin(self, work: Awaitable[None]) -> None:
        reading: Deferred[None] = Deferred.fromCoroutine(work)  # type: ignore[arg-type]
        self.pending = [one for one in self.pending if not one.called]
        self.pending.append(reading)
        reading.addErrback(self.failures.append)

    @invariant()
    def no_reader_has_failed(self) -> None:
        for failure in self.failures:
            failure.raiseException()

    def check(self, cursor: int, batch: EventBatch) -> None:
        lines = batch.lines.splitlines(keepends=True)
        assert lines == self.log.lines[cursor : cursor + batch.count]
        assert batch.count or cursor == self.log.end_cursor

    @precondition(lambda self: not self.has_ended)
    @rule(output=printed)
    def print(self, output: bytes) -> None:
        self.source.print(output)

    @precondition(lambda self: not self.has_ended)
    @rule()
    def flush(self) -> None:
        self.source.stdout.flush_partial_line()
        self.events.change_condition.notify()

    @precondition(lambda self: not self.has_ended)
    @rule()
    def end(self) -> None:
        self.source.end(encode_error_event("exit", "it has failed"))
        self.has_ended = True

    @rule(name=st.sampled_from(["first", "second"]), max_bytes=st.integers(1, 500))
    def read_page(self, name: str, max_bytes: int) -> None:
        """Ask for the next page, which acknowledges what is before it."""
        self.begin(self.next_page(name, max_bytes))

    async def next_page(self, name: str, max_bytes: int) -> None:
        """Read a page; where another reader has acknowledged more, go on there."""
        cursor = self.page_cursors[name]
        try:
            batch = await self.events.read(cursor, max_bytes)
        except DiscardedCursor:
            assert cursor < self.log.begin_cursor
            self.page_cursors[name] = self.log.begin_cursor
            return
        self.check(cursor, batch)
        self.events.acknowledge(cursor)
        self.page_cursors[name] = max(self.page_cursors[name], cursor + batch.count)

    @rule(part=st.floats(0, 1), is_observer=st.booleans())
    def follow(self, part: float, is_observer: bool) -> None:
        """Open a stream at any cursor that is not discarded."""
        first = self.log.begin_cursor
        cursor = first + int(part * (self.log.end_cursor - first))
        self.begin(self.read_stream(cursor, is_observer))

    async def read_stream(self, cursor: int, is_observer: bool) -> None:
        """Read a stream to the end, or to events that are discarded."""
        ignore = lambda subscription: None  # noqa: E731
        subscription = Subscription(cursor, self.events, is_observer, ignore, ignore)
        try:
            with subscription:
                while not subscription.has_ended:
                    batch = await subscription.read_events(300)
                    self.check(cursor, batch)
                    cursor += batch.count
                    assert subscription.read_cursor == cursor
                    if not batch.count and not subscription.has_ended:
                        await subscription.wait_for_events()
        except DiscardedCursor:
            assert cursor < self.log.begin_cursor
        else:
            assert cursor == len(self.log.lines)

    @rule(part=st.floats(0, 1))
    def acknowledge(self, part: float) -> None:
        first = self.log.begin_cursor
        self.events.acknowledge(first + int(part * (self.log.end_cursor - first)))

    @rule(keeps=st.booleans())
    def keep_files(self, keeps: bool) -> None:
        """Let the archive need the files, or not any more."""
        self.events.keeps_files = keeps
        self.events.free_discarded_files()

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.threads.waiting:
                self.threads.step()


class PropertyTests(SynchronousTestCase):
    def test_readers_get_what_was_printed_once_and_in_order(self) -> None:
        for name, size in SMALL_STEPS.items():
            self.patch(segi, name, size)
        self.patch(eventlog, "_PUNCHED", 1)
        self.patch(eventlog, "_REMOVED", 2)
        self.patch(eventlog, "_MAX_STDOUT", 300)
        self.patch(event_log, "MIN_SEGMENT_BYTES", 100)
        self.patch(event_log, "MAX_SEGMENT_BYTES", 1000)
        run_state_machine_as_test(ReadingMachine)


class ReadingTestCase(SynchronousTestCase):
    """Evaluations of 11 lines; only the last ones are in memory."""

    def setUp(self) -> None:
        self.patch(event_log, "MIN_SEGMENT_BYTES", 100)
        self.patch(event_log, "MAX_SEGMENT_BYTES", 100)
        self.patch(eventlog, "_PUNCHED", 1)
        self.threads = SlowThreads()
        self.memory = EventMemory(0)
        self.loader = SegmentLoader(self.threads)  # type: ignore[arg-type]
        self.source = self.make()
        self.events, self.log = self.source.events, self.source.log

    def make(self, caller: str = "alice") -> Source:
        """Return another evaluation; its events in memory are the last two."""
        source = Source(Path(self.mktemp()), self.memory, self.loader, caller)
        self.addCleanup(source.files.close)
        for number in range(10):
            source.print(b"%095d\n" % number)
        return source

    def read(self, cursor: int, source: Source | None = None) -> Deferred[EventBatch]:
        return Deferred.fromCoroutine((source or self.source).events.read(cursor, 1))

    def damage(self, content: bytes = b"?") -> None:
        with (self.source.directory / "stdout").open("r+b") as file:
            file.write(content)


class LoadTests(ReadingTestCase):
    def test_events_in_memory_need_no_thread(self) -> None:
        newest = self.log.end_cursor - 1
        batch = self.events.read_now(newest, PLENTY)
        self.assertEqual(batch.lines, self.log.lines[newest])
        timed = self.events.read_now(newest, PLENTY, with_times=True)
        self.assertIn(b'"time":"1970-01-01T00:00:00.000+00:00"', timed.lines)

    def test_evicted_events_are_loaded_by_a_thread(self) -> None:
        self.assertRaises(EventsEvicted, self.events.read_now, 0, 1)
        found = self.read(0)
        self.assertNoResult(found)
        self.threads.step()
        self.assertEqual(self.successResultOf(found).lines, self.log.lines[0])

    def test_readers_of_a_segment_share_one_load(self) -> None:
        found = [self.read(0) for _ in range(9)]
        self.assertEqual(len(self.threads.waiting), 1)
        self.threads.step()
        self.assertEqual({self.successResultOf(one).lines for one in found}, {self.log.lines[0]})

    def test_one_caller_does_not_take_all_loads(self) -> None:
        many = [self.read(cursor) for cursor in range(0, 16, 2)]
        self.assertEqual(len(self.threads.waiting), MAX_LOADS_PER_CALLER)
        others = [self.read(0, self.make(name)) for name in ("bob", "carol", "dave")]
        self.assertEqual(len(self.threads.waiting), MAX_LOADS)
        while self.threads.waiting:
            self.threads.step()
            self.assertLessEqual(len(self.threads.waiting), MAX_LOADS)
        for one in (*many, *others):
            self.assertEqual(self.successResultOf(one).count, 1)

    def test_reader_that_has_gone_frees_its_place(self) -> None:
        gone = [self.read(cursor) for cursor in range(0, 8, 2)]
        for one in reversed(gone):
            one.cancel()
            one.addErrback(lambda _: None)
        while self.threads.waiting:
            self.threads.step()
        found = self.read(0)
        self.threads.step()
        self.assertEqual(self.successResultOf(found).count, 1)

    def test_events_acknowledged_meanwhile_are_discarded(self) -> None:
        for is_punched in (False, True):
            begin = self.log.begin_cursor
            found = self.read(begin)
            self.log.acknowledge(begin + 4)
            if is_punched:
                self.damage(bytes(1000))
            self.threads.step()
            error = self.failureResultOf(found, DiscardedCursor).value
            self.assertEqual(error.extra_members["oldest"], str(begin + 4))
            self.assertFalse(self.events.has_readable_end)


class DamageTests(ReadingTestCase):
    def test_reader_is_told_once_that_events_are_lost(self) -> None:
        self.damage()
        for _ in range(2):
            found = self.read(0)
            if self.threads.waiting:
                self.threads.step()
            self.assertIs(self.successResultOf(found), LOST_EVENT)
        self.assertIs(self.events.read_now(0, 1), LOST_EVENT)
        self.assertEqual(self.events.read_now(self.log.end_cursor - 1, 1).count, 1)
        found = self.read(8)
        self.threads.step()
        self.assertEqual(self.successResultOf(found).lines, self.log.lines[8])

    def test_page_of_lost_events_is_the_last(self) -> None:
        self.assertFalse(self.events.has_readable_end)
        self.damage()
        found = self.read(0)
        self.threads.step()
        page = self.events.make_page("0", self.successResultOf(found))
        self.assertEqual((page.end_cursor, page.events.count), (ALL_RECEIVED_CURSOR, 1))
        self.assertTrue(self.events.has_readable_end)

    def test_stream_ends_with_the_lost_event(self) -> None:
        self.damage()
        left: list[Subscription] = []
        subscription = Subscription(0, self.events, False, left.append, left.append)
        with subscription:
            found = Deferred.fromCoroutine(subscription.read_events(PLENTY))
            self.threads.step()
            self.assertIs(self.successResultOf(found), LOST_EVENT)
            self.assertTrue(subscription.has_ended)
        self.assertEqual(subscription.read_cursor, self.log.end_cursor)
        self.assertEqual(left, [subscription] * 2)

    def test_lack_of_descriptors_loses_nothing(self) -> None:
        def fail(segment: object) -> object:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with_errors = self.patch(self.source.files, "read_stdout", lambda *_: fail(None))
        found = self.read(0)
        self.threads.step()
        self.assertIn("Too many open files", str(self.failureResultOf(found, ServerBusy).value))
        with_errors.restore()
        found = self.read(0)
        self.threads.step()
        self.assertEqual(self.successResultOf(found).lines, self.log.lines[0])


class FileTests(ReadingTestCase):
    def test_thread_frees_what_is_acknowledged(self) -> None:
        calls: list[int] = []
        self.patch(self.source.files, "punch_stdout", calls.append)
        self.events.acknowledge(8)
        self.events.acknowledge(10)
        self.assertEqual((len(self.threads.waiting), calls), (1, []))
        self.source.files._punched = 10**6
        self.threads.step()
        self.assertEqual(calls, [self.log.discarded_stdout_bytes])
        self.assertEqual(self.threads.waiting, [])

    def test_archive_keeps_the_files(self) -> None:
        self.events.keeps_files = True
        self.events.acknowledge(8)
        self.assertEqual(self.threads.waiting, [])
        self.events.keeps_files = False
        self.events.free_discarded_files()
        self.assertEqual(len(self.threads.waiting), 1)

    def test_disk_error_is_logged_once(self) -> None:
        def fail(before: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        self.patch(self.source.files, "punch_stdout", fail)
        for cursor in (8, 12):
            self.events.acknowledge(cursor)
            if self.threads.waiting:
                self.threads.step()
        self.assertEqual(len(self.flushLoggedErrors(OSError)), 1)

    def test_ended_evaluation_has_no_open_files(self) -> None:
        self.assertEqual(len(self.source.open_files), 2)
        self.source.end()
        self.assertEqual(self.source.open_files, [])
        found = self.read(0)
        self.threads.step()
        self.assertEqual(self.successResultOf(found).count, 1)
        self.assertEqual(self.source.open_files, [])

    def test_discard_waits_for_threads(self) -> None:
        found = self.read(0)
        discarded = Deferred.fromCoroutine(self.events.discard())
        self.assertNoResult(discarded)
        self.threads.step()
        self.successResultOf(discarded)
        self.failureResultOf(found, DiscardedCursor)
        self.assertEqual(self.source.open_files, [])

    def test_nothing_is_freed_after_the_discard(self) -> None:
        counted: list[int] = []
        self.events.on_discard = lambda: succeed(counted.append(self.log.begin_cursor))
        punch = self.source.files.punch_stdout

        discarded: list[Deferred[None]] = []

        def punch_slowly(before: int) -> None:
            punch(before)
            self.events.acknowledge(8)
            discarded.append(Deferred.fromCoroutine(self.events.discard()))

        self.patch(self.source.files, "punch_stdout", punch_slowly)
        self.events.acknowledge(4)
        self.threads.step()
        self.successResultOf(discarded[0])
        self.assertEqual((self.threads.waiting, counted), ([], [4]))
        self.assertEqual(self.source.open_files, [])

    def test_files_are_freed_once_that_is_stored(self) -> None:
        stored: Deferred[None] = Deferred()
        self.events.on_discard = lambda: stored
        self.events.acknowledge(8)
        self.assertEqual(self.threads.waiting, [])
        discarded = Deferred.fromCoroutine(self.events.discard())
        self.successResultOf(discarded)
        stored.callback(None)
        self.assertEqual(self.threads.waiting, [])


class SubscriptionTests(ReadingTestCase):
    def follow(self, cursor: int, *, is_observer: bool = False) -> Subscription:
        ignore: Callable[[Subscription], None] = lambda subscription: None  # noqa: E731
        return Subscription(cursor, self.events, is_observer, ignore, ignore)

    def test_only_a_readers_stream_to_the_end_counts_as_sent(self) -> None:
        self.source.end(encode_error_event("exit", "it has failed"))
        newest = self.log.end_cursor - 1
        cases = ((True, False, False), (False, True, False), (False, False, True))
        for is_observer, is_cut, was_sent in cases:
            subscription = self.follow(newest, is_observer=is_observer)
            with subscription:
                counts = (self.events.stream_count, self.events.observer_count)
                self.assertEqual(counts, (int(not is_observer), int(is_observer)))
                if not is_cut:
                    batch = Deferred.fromCoroutine(subscription.read_events(PLENTY))
                    self.assertGreater(self.successResultOf(batch).count, 0)
            self.assertEqual(self.events.was_sent_completely, was_sent)
            self.assertEqual((self.events.stream_count, self.events.observer_count), (0, 0))
