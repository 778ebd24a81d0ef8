"""`evaluations.eventlog`, on real files: what readers get is what was printed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Awaitable
from itertools import count
from pathlib import Path
from typing import Any

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
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core import events as core_events
from tawebeval.core import segi
from tawebeval.core.events import (
    ALL_RECEIVED_CURSOR,
    EMPTY_BATCH,
    EVENTS_LOST_ERROR,
    EventBatch,
    EventLog,
    EventMemory,
    EventsEvicted,
    StdoutChanged,
    encode_error_event,
)
from tawebeval.deferreds import FairQueue
from tawebeval.errors import DiscardedCursor, ServerBusy
from tawebeval.evaluations import eventlog
from tawebeval.evaluations.context import make_unread_events_budget
from tawebeval.evaluations.eventlog import (
    MAX_LOADS,
    MAX_LOADS_PER_CALLER,
    EvaluationEvents,
    EventFiles,
    RecordedStdout,
    make_segment_load_slots,
    read_ended_evaluation_events,
)
from tawebeval.evaluations.reading import Subscription
from tests.cases.strategies import (
    MARKERS,
    SMALL_STEPS,
    any_bytes,
    classify,
    decode,
    join_text,
    parse,
    read_file,
    stdouts,
)
from tests.fakes.world import SlowThreads

PLENTY = 2**20
FILE = b"~FB\nX-SEGI-As: path\n\na\n~FE\n"
"""A block that names a file."""

printed = st.one_of(
    any_bytes,
    stdouts,
    st.integers(1, 60).map(lambda lines: b"".join(b"line %d\n" % n for n in range(lines))),
    st.sampled_from([b"x" * 300, b"partial", b"\n" + FILE, b"\n" * 50]),
)

MAX_OUTPUT = 2**40


def settle(recorded: RecordedStdout) -> None:
    """Let the parser finish its work, and read the files that stdout names."""
    while recorded.parser.has_pending_input or recorded.parser.awaited_file is not None:
        if recorded.parser.awaited_file is None:
            recorded.parse_pending()
        else:
            path = recorded.parser.awaited_file.path
            content = read_file(path.encode(errors="surrogateescape"))
            answer_file(recorded, "there is no such file" if content is None else content)


def answer_file(recorded: RecordedStdout, answer: bytes | str) -> None:
    """Answer the file that stdout names."""
    recorded.store_referenced_file(answer)
    recorded.supply_or_refuse_file(answer)


class LogMachine(RuleBasedStateMachine):
    """An evaluator that prints, a daemon that reads, forgets and is killed, and readers.

    With `keeps_files` acknowledgements keep the files, for the archive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.seconds = count()
        self.stdout = b""
        self.acknowledged = 0
        self.seen: list[bytes] = []

    def teardown(self) -> None:
        """End stdout, and compare all events with those of a parser that reads stdout at once."""
        try:
            while self.recorded.stdout_bytes < len(self.stdout):
                self.settle()
                self.feed(len(self.stdout))
            self.settle()
            self.recorded.finish()
            self.look()
            lines = b"".join(line[: line.rindex(b',"time"')] + b"}\n" for line in self.seen)
            events = decode(EventBatch(len(self.seen), lines))
            assert join_text(classify(events)) == join_text(classify(parse(self.stdout)))
            self.restart(b"", b"")
            if self.keeps_files:
                self.check_end()
        finally:
            self.files.close()
            shutil.rmtree(self.directory)

    def check_end(self) -> None:
        """Read all events again, the acknowledged ones and a final one, too."""
        final = encode_error_event("exit", "it has ended")
        count = len(self.seen) + 1
        rings = read_ended_evaluation_events(
            self.directory, MARKERS, final, 9, max_output=MAX_OUTPUT, end_cursor=count
        )
        found: list[bytes] = []
        for ring in rings:
            assert ring.begin_cursor == len(found)
            while len(found) < ring.end_cursor:
                batch = ring.read_events(len(found), PLENTY, str)
                found += batch.lines.splitlines(keepends=True)
        assert found[:-1] == self.seen
        assert found[-1].startswith(final.lines[:-2])

    @initialize(max_bytes=st.integers(0, 8000), keeps_files=st.booleans())
    def start(self, max_bytes: int, keeps_files: bool) -> None:
        self.max_bytes, self.keeps_files = max_bytes, keeps_files
        self.open()

    def open(self) -> None:
        self.files = EventFiles(self.directory)
        log = EventLog(EventMemory(self.max_bytes))
        self.recorded = RecordedStdout(log, self.files, MARKERS, lambda: next(self.seconds) // 3)
        self.recorded.restore_event_log()
        self.discard()

    def discard(self) -> None:
        self.recorded.event_log.acknowledge(self.acknowledged)
        while self.recorded.has_discarded_files and not self.keeps_files:
            self.recorded.free_discarded_files()

    def read(self, cursor: int, max_bytes: int) -> list[bytes]:
        log = self.recorded.event_log
        while True:
            try:
                batch = log.read_events(cursor, max_bytes, str)
            except EventsEvicted as evicted:
                ring = self.recorded.parse_evicted_segment(evicted.segment)
                log.load_segment(evicted.segment, ring)
            else:
                return batch.lines.splitlines(keepends=True)

    def look(self) -> None:
        """Read as a client does that has read everything so far."""
        while lines := self.read(len(self.seen), PLENTY):
            self.seen += lines

    @rule(output=printed)
    def print(self, output: bytes) -> None:
        with (self.directory / "stdout").open("ab") as file:
            file.write(output)
        self.stdout += output

    @precondition(
        lambda self: (
            not (self.recorded.parser.has_pending_input or self.recorded.parser.awaited_file)
        )
    )
    @rule(size=st.integers(1, 400))
    def feed(self, size: int) -> None:
        begin = self.recorded.stdout_bytes
        if chunk := self.files.read_stdout(begin, begin + size):
            self.recorded.feed(chunk)
            self.look()

    @rule()
    def flush(self) -> None:
        self.recorded.flush_partial_line()
        self.look()

    @rule()
    def settle(self) -> None:
        """Let the parser finish its work, and read the files that stdout names."""
        settle(self.recorded)
        self.look()

    @rule(part=st.floats(0, 1), max_bytes=st.integers(1, 2000))
    def read_again(self, part: float, max_bytes: int) -> None:
        kept = len(self.seen) - self.acknowledged
        cursor = self.acknowledged + int(part * kept)
        lines = self.read(cursor, max_bytes)
        assert lines == self.seen[cursor : cursor + len(lines)]
        assert bool(lines) == (cursor < len(self.seen))

    @rule(part=st.floats(0, 1))
    def acknowledge(self, part: float) -> None:
        self.acknowledged += int(part * (len(self.seen) - self.acknowledged))
        self.discard()

    @rule(
        torn_mark=st.sampled_from([b"", b"torn"]),
        torn_segment=st.sampled_from([b"", b"1234567890", bytes(50)]),
    )
    def restart(self, torn_mark: bytes, torn_segment: bytes) -> None:
        """Kill the daemon, perhaps in the middle of a write, and start it again.

        A power failure may leave zero bytes at the end.
        """
        self.files.close()
        for name, torn in (("marks", torn_mark), ("segments", torn_segment)):
            with (self.directory / name).open("ab") as file:
                file.write(torn)
        self.open()
        assert self.recorded.event_log.end_cursor >= len(self.seen)
        for cursor in range(self.acknowledged, len(self.seen), 7):
            assert self.read(cursor, 1) == self.seen[cursor : cursor + 1]
        self.look()


class SmallStepsTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        for name, size in SMALL_STEPS.items():
            self.patch(segi, name, size)
        self.patch(eventlog, "_PUNCHED", 1)
        self.patch(eventlog, "_REMOVED", 2)
        self.patch(eventlog, "_MAX_STDOUT", 300)
        self.patch(core_events, "MIN_SEGMENT_BYTES", 100)
        self.patch(core_events, "MAX_SEGMENT_BYTES", 1000)


class PropertyTests(SmallStepsTestCase):
    def test_readers_get_what_was_printed_once_and_in_order(self) -> None:
        run_state_machine_as_test(LogMachine)


class ChangedStdoutTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(core_events, "MAX_SEGMENT_BYTES", 1000)
        self.directory = Path(self.mktemp())
        self.files, self.recorded = self.open()
        (self.directory / "stdout").write_bytes(b"line\n" * 100)
        for begin in (0, 250):
            self.recorded.feed(self.files.read_stdout(begin, begin + 250))

    def open(self, max_bytes: int = 0) -> tuple[EventFiles, RecordedStdout]:
        """Open the files in the directory, with a new log."""
        files = EventFiles(self.directory)
        self.addCleanup(files.close)
        log = EventLog(EventMemory(max_bytes))
        return files, RecordedStdout(log, files, MARKERS, float)

    def print(self, output: bytes, end: int | None = None) -> None:
        """Append to the file of stdout, and feed it, from its 500th byte to `end`."""
        with (self.directory / "stdout").open("ab") as file:
            file.write(output)
        if end is not None:
            self.recorded.feed(self.files.read_stdout(500, end))

    def restore(self) -> RecordedStdout:
        """Return the log that a new daemon makes of the files."""
        recorded = self.open()[1]
        recorded.restore_event_log()
        return recorded

    def test_reading_evicted_events_fails_if_stdout_was_changed(self) -> None:
        evicted = self.assertRaises(
            EventsEvicted, self.recorded.event_log.read_events, 0, 1
        ).segment
        self.recorded.parse_evicted_segment(evicted)
        with (self.directory / "stdout").open("r+b") as file:
            file.write(b"L")
        self.assertRaises(StdoutChanged, self.recorded.parse_evicted_segment, evicted)
        evicted = self.assertRaises(
            EventsEvicted, self.restore().event_log.read_events, 0, 1
        ).segment
        self.assertRaises(StdoutChanged, self.recorded.parse_evicted_segment, evicted)

    def test_restoring_delivered_events_fails_if_stdout_was_truncated(self) -> None:
        self.recorded.flush_partial_line()
        self.assertEqual(self.restore().event_log.end_cursor, self.recorded.event_log.end_cursor)
        os.truncate(self.directory / "stdout", 260)
        self.assertRaises(StdoutChanged, self.restore)

    def test_ended_evaluation_is_read_up_to_a_change_of_stdout(self) -> None:
        self.recorded.finish()
        for place in (-1, 0):
            with (self.directory / "stdout").open("r+b") as file:
                file.seek(place, os.SEEK_END if place else os.SEEK_SET)
                file.write(b"L")
            count = self.recorded.event_log.end_cursor
            rings = read_ended_evaluation_events(
                self.directory, MARKERS, EMPTY_BATCH, 0, max_output=MAX_OUTPUT, end_cursor=count
            )
            count = 0
            with self.assertRaises(StdoutChanged):
                for ring in rings:
                    count = ring.end_cursor
            self.assertEqual(bool(count), bool(place))

    def test_stdout_beyond_the_limit_gives_no_events_when_parsed_again(self) -> None:
        self.print(b"within, beyond\n", 506)
        self.recorded.finish()
        printed = b'{"type":"text","payload":"within"}\n'
        segment = self.recorded.event_log.segments[-1]
        ring = self.recorded.parse_evicted_segment(segment)
        self.assertEqual(ring.read_events(ring.end_cursor - 1, PLENTY).lines, printed)

    def test_restoring_parses_only_the_stdout_of_delivered_events(self) -> None:
        self.print(b"\n" * 1_000_000)
        recorded = self.restore()
        self.assertGreaterEqual(recorded.event_log.end_cursor, self.recorded.event_log.end_cursor)
        self.assertLess(recorded.stdout_bytes, 70_000)

    def test_restored_parser_still_waits_for_a_file_that_was_not_read(self) -> None:
        self.print(FILE, 600)
        recorded = self.restore()
        recorded.feed(self.files.read_stdout(recorded.stdout_bytes, 600))
        self.assertIsNotNone(recorded.parser.awaited_file)
        answer_file(recorded, b"content")
        self.assertEqual(self.restore().event_log.end_cursor, recorded.event_log.end_cursor)

    def test_zero_bytes_at_the_end_of_the_segments_file_lose_no_event(self) -> None:
        self.recorded.finish()
        with (self.directory / "segments").open("ab") as file:
            file.write(bytes(50))  # by a power failure
        self.assertEqual(self.restore().event_log.end_cursor, self.recorded.event_log.end_cursor)

    def test_restoring_delivered_events_fails_if_a_printed_file_is_missing(self) -> None:
        self.print(FILE + b"end\n", 600)
        answer_file(self.recorded, b"content")
        self.recorded.finish()
        segments = (self.directory / "segments").read_bytes()
        (self.directory / "segments").write_bytes(segments[:-1])  # torn by a power failure
        shutil.rmtree(self.directory / "files")
        self.assertRaises(StdoutChanged, self.restore)

    def test_segment_of_few_events_covers_less_than_200_kb_of_stdout(self) -> None:
        self.patch(eventlog, "_MAX_STDOUT", 65536)
        self.print(b"~DB\n" + b"[\n" * 500_000 + b"1\n~DE\nend\n")
        for begin in range(500, 1_000_600, 65536):
            self.recorded.feed(self.files.read_stdout(begin, begin + 65536))
            while self.recorded.parser.has_pending_input:
                self.recorded.parse_pending()
        self.recorded.finish()
        for log in (self.recorded.event_log, self.restore().event_log):
            sources = [one.source for one in log.segments if one.source is not None]
            self.assertEqual(sources[-1].stdout_end_offset, self.recorded.stdout_bytes)
            self.assertLess(
                max(one.stdout_end_offset - one.stdout_begin_offset for one in sources), 200_000
            )

    def test_files_of_acknowledged_events_are_removed(self) -> None:
        for number in range(40):
            begin = self.files.stdout_size
            self.print(FILE if number else b"~FB\n")
            self.recorded.feed(self.files.read_stdout(begin, begin + 100))
            if self.recorded.parser.awaited_file is not None:
                answer_file(self.recorded, b"x" * 30)
        for recorded in (self.recorded, self.restore()):
            recorded.event_log.acknowledge(self.recorded.event_log.end_cursor - 20)
            recorded.free_discarded_files()
            evicted = recorded.event_log.begin_cursor
            segment = self.assertRaises(
                EventsEvicted, recorded.event_log.read_events, evicted, 1
            ).segment
            recorded.event_log.load_segment(segment, recorded.parse_evicted_segment(segment))
        self.assertLess(len(list((self.directory / "files").iterdir())), 30)

    def test_read_with_many_large_events_is_several_segments(self) -> None:
        self.recorded.feed(FILE * 100)
        parser = self.recorded.parser
        while parser.has_pending_input or parser.awaited_file is not None:
            if parser.awaited_file is None:
                self.recorded.parse_pending()
            else:
                answer_file(self.recorded, b"x" * 100_000)
        self.assertLess(self.recorded.event_log._memory.budget.used, 1_000_000)

    def test_partial_write_of_events_raises_oserror(self) -> None:
        for name in ("write", "pwrite"):
            self.patch(os, name, lambda *arguments: 5)
            self.assertRaises(OSError, self.recorded.feed, b"line\n" * 1000)

    def test_acknowledged_stdout_frees_its_disk_blocks(self) -> None:
        self.print(b"long line\n" * 400_000)
        for begin in range(500, 4_000_000, 65536):
            self.recorded.feed(self.files.read_stdout(begin, begin + 65536))
        before = (self.directory / "stdout").stat().st_blocks
        self.recorded.event_log.acknowledge(self.recorded.event_log.end_cursor - 1)
        self.recorded.free_discarded_files()
        self.assertLess((self.directory / "stdout").stat().st_blocks, before / 4)
        lines = self.recorded.event_log.read_events(self.recorded.event_log.end_cursor - 1, 1).lines
        self.assertEqual(lines, b'{"type":"text","payload":"long line"}\n')


class WatchedLog(EventLog):
    """A log that keeps the lines of all events beside it."""

    lines: list[bytes]

    def append_batch(self, batch: EventBatch, time_ms: int) -> None:
        super().append_batch(batch, time_ms)
        self.lines += batch.lines.splitlines(keepends=True)


class Source:
    """An evaluator that prints into `directory`, and the events of its evaluation."""

    def __init__(
        self, directory: Path, memory: EventMemory, threads: Any, slots: FairQueue, caller: str
    ) -> None:
        self.directory = directory
        self.files = EventFiles(directory)
        self.log = WatchedLog(memory)
        self.log.lines = []
        self.events = EvaluationEvents(
            self.log, caller, "name", threads, slots, make_unread_events_budget(2**40)
        )
        self.stdout = RecordedStdout(self.log, self.files, MARKERS, float)
        self.events.stdout = self.stdout

    def print(self, output: bytes) -> None:
        with (self.directory / "stdout").open("ab") as file:
            file.write(output)
        self.stdout.feed(output)
        settle(self.stdout)
        self.events.reader_wakeup_condition.notify()

    def end(self, last: EventBatch | None = None) -> None:
        """End the evaluation, with a last event that is not printed."""
        self.stdout.finish()
        if last is not None:
            self.log.append_batch(last, 0)
        self.log.mark_end()
        self.events.close_files()
        self.events.reader_wakeup_condition.notify()

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
        self.source = Source(self.directory, memory, self.threads, make_segment_load_slots(), "")
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
            if not self.events.keeps_acknowledged_files:
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
        self.events.reader_wakeup_condition.notify()

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

    @rule(part=st.floats(0, 1))
    def follow(self, part: float) -> None:
        """Open a stream at any cursor that is not discarded."""
        first = self.log.begin_cursor
        cursor = first + int(part * (self.log.end_cursor - first))
        self.begin(self.read_stream(cursor))

    async def read_stream(self, cursor: int) -> None:
        """Read a stream to the end, or to events that are discarded."""
        subscription = Subscription(cursor, self.events)
        try:
            with subscription.reader_context:
                while not subscription.has_ended:
                    batch = await subscription.read_events(300)
                    self.check(cursor, batch)
                    cursor += batch.count
                    assert subscription.last_read_cursor == cursor
                    if not batch.count and not subscription.has_ended:
                        await subscription.wait_for_events(60, Clock())
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
        self.events.keeps_acknowledged_files = keeps
        self.events.free_discarded_files()

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.threads.waiting:
                self.threads.step()


class ReadingPropertyTests(SmallStepsTestCase):
    def test_readers_of_all_kinds_get_what_was_printed_once_and_in_order(self) -> None:
        run_state_machine_as_test(ReadingMachine)


class ReadingTestCase(SynchronousTestCase):
    """Evaluations of 11 lines; only the last ones are in memory."""

    def setUp(self) -> None:
        self.patch(core_events, "MIN_SEGMENT_BYTES", 100)
        self.patch(core_events, "MAX_SEGMENT_BYTES", 100)
        self.patch(eventlog, "_PUNCHED", 1)
        self.threads = SlowThreads()
        self.memory = EventMemory(0)
        self.slots = make_segment_load_slots()
        self.source = self.make()
        self.events, self.log = self.source.events, self.source.log

    def make(self, caller: str = "alice") -> Source:
        """Return another evaluation; its events in memory are the last two."""
        source = Source(Path(self.mktemp()), self.memory, self.threads, self.slots, caller)
        self.addCleanup(source.files.close)
        for number in range(10):
            source.print(b"%095d\n" % number)
        return source

    def read(self, cursor: int, source: Source | None = None) -> Deferred[EventBatch]:
        return Deferred.fromCoroutine((source or self.source).events.read(cursor, 1))

    def damage(self) -> None:
        with (self.source.directory / "stdout").open("r+b") as file:
            file.write(b"?")


class LoadTests(ReadingTestCase):
    def test_events_in_memory_are_read_without_a_thread(self) -> None:
        newest = self.log.end_cursor - 1
        batch = self.events.read_now(newest, PLENTY)
        self.assertEqual(batch.lines, self.log.lines[newest])
        timed = self.events.read_now(newest, PLENTY, includes_times=True)
        self.assertIn(b'"time":"1970-01-01T00:00:00.000+00:00"', timed.lines)

    def test_readers_of_a_segment_share_one_load(self) -> None:
        self.assertRaises(EventsEvicted, self.events.read_now, 0, 1)
        found = [self.read(0) for _ in range(9)]
        self.assertEqual(len(self.threads.waiting), 1)
        self.threads.step()
        self.assertEqual({self.successResultOf(one).lines for one in found}, {self.log.lines[0]})

    def test_one_caller_does_not_use_all_loads_of_evicted_events(self) -> None:
        many = [self.read(cursor) for cursor in range(0, 16, 2)]
        self.assertEqual(len(self.threads.waiting), MAX_LOADS_PER_CALLER)
        others = [self.read(0, self.make(name)) for name in ("bob", "carol", "dave")]
        self.assertEqual(len(self.threads.waiting), MAX_LOADS)
        while self.threads.waiting:
            self.threads.step()
            self.assertLessEqual(len(self.threads.waiting), MAX_LOADS)
        for one in (*many, *others):
            self.assertEqual(self.successResultOf(one).count, 1)


class DamageTests(ReadingTestCase):
    def test_read_of_damaged_events_returns_one_lost_event(self) -> None:
        self.damage()
        for _ in range(2):
            found = self.read(0)
            if self.threads.waiting:
                self.threads.step()
            self.assertIs(self.successResultOf(found), EVENTS_LOST_ERROR)
        self.assertIs(self.events.read_now(0, 1), EVENTS_LOST_ERROR)
        self.assertEqual(self.events.read_now(self.log.end_cursor - 1, 1).count, 1)
        found = self.read(8)
        self.threads.step()
        self.assertEqual(self.successResultOf(found).lines, self.log.lines[8])

    def test_page_with_the_lost_event_is_the_last_page(self) -> None:
        self.assertFalse(self.events.has_readable_end)
        self.damage()
        found = self.read(0)
        self.threads.step()
        page = self.events.make_page("0", self.successResultOf(found))
        self.assertEqual((page.end_cursor, page.events.count), (ALL_RECEIVED_CURSOR, 1))
        self.assertTrue(self.events.has_readable_end)

    def test_reading_events_without_free_descriptors_raises_busy_and_can_be_repeated(self) -> None:
        def fail(begin: int, end: int) -> bytes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with_errors = self.patch(self.source.files, "read_stdout", fail)
        found = self.read(0)
        self.threads.step()
        self.assertIn("Too many open files", str(self.failureResultOf(found, ServerBusy).value))
        with_errors.restore()
        found = self.read(0)
        self.threads.step()
        self.assertEqual(self.successResultOf(found).lines, self.log.lines[0])


class FileTests(ReadingTestCase):
    def test_files_of_acknowledged_events_are_kept_for_the_archive(self) -> None:
        self.events.keeps_acknowledged_files = True
        self.events.acknowledge(8)
        self.assertEqual(self.threads.waiting, [])
        self.events.keeps_acknowledged_files = False
        self.events.free_discarded_files()
        self.assertEqual(len(self.threads.waiting), 1)

    def test_repeated_disk_error_in_freeing_stdout_is_logged_once(self) -> None:
        def fail(before: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        self.patch(self.source.files, "free_stdout_blocks", fail)
        for cursor in (8, 12):
            self.events.acknowledge(cursor)
            if self.threads.waiting:
                self.threads.step()
        self.assertEqual(len(self.flushLoggedErrors(OSError)), 1)

    def test_discard_waits_for_a_read_in_a_thread(self) -> None:
        found = self.read(0)
        discarded = Deferred.fromCoroutine(self.events.discard_all_events())
        self.assertNoResult(discarded)
        self.threads.step()
        self.successResultOf(discarded)
        self.failureResultOf(found, DiscardedCursor)
        self.assertEqual(self.source.open_files, [])

    def test_no_stdout_is_freed_after_the_events_are_discarded(self) -> None:
        counted: list[int] = []
        self.events.on_freeing_files = lambda: succeed(counted.append(self.log.begin_cursor))
        punch = self.source.files.free_stdout_blocks

        discarded: list[Deferred[None]] = []

        def punch_slowly(before: int) -> None:
            punch(before)
            self.events.acknowledge(8)
            discarded.append(Deferred.fromCoroutine(self.events.discard_all_events()))

        self.patch(self.source.files, "free_stdout_blocks", punch_slowly)
        self.events.acknowledge(4)
        self.threads.step()
        self.successResultOf(discarded[0])
        self.assertEqual((self.threads.waiting, counted), ([], [4]))
        self.assertEqual(self.source.open_files, [])

    def test_no_file_is_freed_before_the_acknowledgement_is_stored_or_after_the_discard(
        self,
    ) -> None:
        stored: Deferred[None] = Deferred()
        self.events.on_freeing_files = lambda: stored
        self.events.acknowledge(8)
        self.assertEqual(self.threads.waiting, [])
        discarded = Deferred.fromCoroutine(self.events.discard_all_events())
        self.successResultOf(discarded)
        stored.callback(None)
        self.assertEqual(self.threads.waiting, [])

    def test_stdout_of_acknowledged_events_is_freed_in_a_thread(self) -> None:
        calls: list[int] = []
        self.patch(self.source.files, "free_stdout_blocks", calls.append)
        self.events.acknowledge(8)
        self.events.acknowledge(10)
        self.assertEqual((len(self.threads.waiting), calls), (1, []))
        self.source.files._punched = 10**6
        self.threads.step()
        self.assertEqual(calls, [self.log.discarded_stdout_bytes])
        self.assertEqual(self.threads.waiting, [])
