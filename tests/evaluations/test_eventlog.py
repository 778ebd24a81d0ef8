"""`evaluations.eventlog`, on real files: what readers get is what was printed."""

from __future__ import annotations

import os
import shutil
import tempfile
from itertools import count
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core import event_log, segi
from tawebeval.core.event_log import EventLog, EventMemory, EventsEvicted, StdoutChanged
from tawebeval.core.events import EMPTY_BATCH, EventBatch, encode_error_event
from tawebeval.evaluations import eventlog
from tawebeval.evaluations.eventlog import (
    EventFiles,
    RecordedStdout,
    read_ended_evaluation,
)
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

PLENTY = 2**20

printed = st.one_of(
    any_bytes,
    stdouts,
    st.integers(1, 60).map(lambda lines: b"".join(b"line %d\n" % n for n in range(lines))),
    st.sampled_from([b"x" * 300, b"\n~FB\nX-SEGI-As: path\n\na\n~FE\n", b"\n" * 50]),
)

MAX_OUTPUT = 2**40


class LogMachine(RuleBasedStateMachine):
    """An evaluator that prints, a daemon that reads, forgets and is killed, and readers."""

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
            self.check_end()
        finally:
            self.files.close()
            shutil.rmtree(self.directory)

    def check_end(self) -> None:
        """Do nothing more."""

    @initialize(max_bytes=st.integers(0, 8000))
    def start(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.open()

    def open(self) -> None:
        self.files = EventFiles(self.directory)
        self.memory = EventMemory(self.max_bytes)
        self.recorded = RecordedStdout(
            EventLog(self.memory),
            self.files,
            MARKERS,
            lambda: next(self.seconds) // 3,
        )
        for _ in self.recorded.restore():
            pass
        self.discard()

    def discard(self) -> None:
        self.recorded.log.acknowledge(self.acknowledged)
        while self.recorded.has_discarded_files:
            self.recorded.free_discarded_files()

    def read(self, cursor: int, max_bytes: int) -> list[bytes]:
        log = self.recorded.log
        while True:
            try:
                batch = log.read_timed_events(cursor, max_bytes, str)
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

    @precondition(lambda self: not (self.recorded.has_pending_input or self.recorded.awaited_file))
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
        recorded = self.recorded
        while recorded.has_pending_input or recorded.awaited_file is not None:
            if recorded.awaited_file is None:
                recorded.parse_pending()
            else:
                content = read_file(recorded.awaited_file.path.encode(errors="surrogateescape"))
                answer = "there is no such file" if content is None else content
                recorded.store_file(answer)
                recorded.answer_file(answer)
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
        torn_segment=st.sampled_from([b"", b"1234567890"]),
    )
    def restart(self, torn_mark: bytes, torn_segment: bytes) -> None:
        """Kill the daemon, perhaps in the middle of a write, and start it again."""
        self.files.close()
        for name, torn in (("marks", torn_mark), ("segments", torn_segment)):
            with (self.directory / name).open("ab") as file:
                file.write(torn)
        self.open()
        assert self.recorded.log.end_cursor >= len(self.seen)
        for cursor in range(self.acknowledged, len(self.seen), 7):
            assert self.read(cursor, 1) == self.seen[cursor : cursor + 1]
        self.look()


class ArchivedLogMachine(LogMachine):
    """The same with acknowledgements that keep the files, for the archive."""

    @rule(part=st.floats(0, 1))
    def acknowledge(self, part: float) -> None:
        self.recorded.log.acknowledge(int(part * len(self.seen)))

    @rule()
    def read_again(self) -> None:
        """Do nothing."""

    def check_end(self) -> None:
        """Read all events again, the acknowledged ones and a final one, too."""
        final = encode_error_event("exit", "it has ended")
        rings = read_ended_evaluation(
            self.directory,
            MARKERS,
            final,
            9,
            max_output=MAX_OUTPUT,
            end_cursor=len(self.seen) + 1,
        )
        found: list[bytes] = []
        for ring in rings:
            assert ring.begin_cursor == len(found)
            while len(found) < ring.end_cursor:
                batch = ring.read_timed_events(len(found), PLENTY, str)
                found += batch.lines.splitlines(keepends=True)
        assert found[:-1] == self.seen
        assert found[-1].startswith(final.lines[:-2])


class PropertyTests(SynchronousTestCase):
    def setUp(self) -> None:
        for name, size in SMALL_STEPS.items():
            self.patch(segi, name, size)
        self.patch(eventlog, "_PUNCHED", 1)
        self.patch(eventlog, "_REMOVED", 2)
        self.patch(eventlog, "_MAX_STDOUT", 300)
        self.patch(event_log, "MIN_SEGMENT_BYTES", 100)
        self.patch(event_log, "MAX_SEGMENT_BYTES", 1000)

    def test_readers_get_what_was_printed_once_and_in_order(self) -> None:
        run_state_machine_as_test(LogMachine)

    def test_ended_evaluation_has_all_events(self) -> None:
        run_state_machine_as_test(ArchivedLogMachine)


class ChangedStdoutTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(event_log, "MAX_SEGMENT_BYTES", 1000)
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

    def restore(self) -> RecordedStdout:
        """Return the log that a new daemon makes of the files."""
        recorded = self.open()[1]
        for _ in recorded.restore():
            pass
        return recorded

    def test_evicted_events_are_an_error_if_their_bytes_are_others(self) -> None:
        evicted = self.assertRaises(EventsEvicted, self.recorded.log.read_events, 0, 1).segment
        self.recorded.parse_evicted_segment(evicted)
        with (self.directory / "stdout").open("r+b") as file:
            file.write(b"L")
        self.assertRaises(StdoutChanged, self.recorded.parse_evicted_segment, evicted)
        evicted = self.assertRaises(EventsEvicted, self.restore().log.read_events, 0, 1).segment
        self.assertRaises(StdoutChanged, self.recorded.parse_evicted_segment, evicted)

    def test_delivered_events_are_an_error_if_the_file_has_shrunk(self) -> None:
        self.recorded.flush_partial_line()
        self.assertEqual(self.restore().log.end_cursor, self.recorded.log.end_cursor)
        os.truncate(self.directory / "stdout", 260)
        self.assertRaises(StdoutChanged, self.restore)

    def test_events_before_the_change_are_read_at_the_end(self) -> None:
        self.recorded.finish()
        for place in (-1, 0):
            with (self.directory / "stdout").open("r+b") as file:
                file.seek(place, os.SEEK_END if place else os.SEEK_SET)
                file.write(b"L")
            rings = read_ended_evaluation(
                self.directory,
                MARKERS,
                EMPTY_BATCH,
                0,
                max_output=MAX_OUTPUT,
                end_cursor=self.recorded.log.end_cursor,
            )
            count = 0
            with self.assertRaises(StdoutChanged):
                for ring in rings:
                    count = ring.end_cursor
            self.assertEqual(bool(count), bool(place))

    def test_stdout_beyond_the_limit_is_in_no_event_that_is_made_again(self) -> None:
        with (self.directory / "stdout").open("ab") as file:
            file.write(b"within, beyond\n")
        self.recorded.feed(self.files.read_stdout(500, 506))
        self.recorded.finish()
        printed = b'{"type":"text","payload":"within"}\n'
        segment = self.recorded.log.segments[-1]
        ring = self.recorded.parse_evicted_segment(segment)
        self.assertEqual(ring.read_events(ring.end_cursor - 1, PLENTY).lines, printed)

    def test_file_that_was_not_kept_is_read_by_the_next_daemon(self) -> None:
        with (self.directory / "stdout").open("ab") as file:
            file.write(b"~FB\nX-SEGI-As: path\n\na\n~FE\n")
        self.recorded.feed(self.files.read_stdout(500, 600))
        recorded = self.restore()
        self.assertIsNotNone(recorded.awaited_file)
        recorded.store_file(b"content")
        recorded.answer_file(b"content")
        self.assertEqual(self.restore().log.end_cursor, recorded.log.end_cursor)

    def test_delivered_events_are_an_error_if_a_file_that_they_name_is_gone(self) -> None:
        with (self.directory / "stdout").open("ab") as file:
            file.write(b"~FB\nX-SEGI-As: path\n\na\n~FE\nend\n")
        self.recorded.feed(self.files.read_stdout(500, 600))
        self.recorded.store_file(b"content")
        self.recorded.answer_file(b"content")
        self.recorded.finish()
        segments = (self.directory / "segments").read_bytes()
        (self.directory / "segments").write_bytes(segments[:-1])  # torn by a power failure
        shutil.rmtree(self.directory / "files")
        self.assertRaises(StdoutChanged, self.restore)

    def test_segment_of_few_events_has_little_of_stdout(self) -> None:
        self.patch(eventlog, "_MAX_STDOUT", 65536)
        with (self.directory / "stdout").open("ab") as file:
            file.write(b"~DB\n" + b"[\n" * 500_000 + b"1\n~DE\nend\n")
        for begin in range(500, 1_000_600, 65536):
            self.recorded.feed(self.files.read_stdout(begin, begin + 65536))
            while self.recorded.has_pending_input:
                self.recorded.parse_pending()
        self.recorded.finish()
        for log in (self.recorded.log, self.restore().log):
            sources = [one.source for one in log._segments if one.source is not None]
            self.assertEqual(sources[-1].stdout_end, self.recorded.stdout_bytes)
            self.assertLess(max(one.stdout_end - one.stdout_begin for one in sources), 200_000)

    def test_files_of_acknowledged_events_are_removed(self) -> None:
        for number in range(40):
            begin = self.files.stdout_size
            with (self.directory / "stdout").open("ab") as file:
                file.write(b"~FB\nX-SEGI-As: path\n\na\n~FE\n" if number else b"~FB\n")
            self.recorded.feed(self.files.read_stdout(begin, begin + 100))
            if self.recorded.awaited_file is not None:
                self.recorded.store_file(b"x" * 30)
                self.recorded.answer_file(b"x" * 30)
        for recorded in (self.recorded, self.restore()):
            recorded.log.acknowledge(self.recorded.log.end_cursor - 20)
            recorded.free_discarded_files()
            evicted = recorded.log.begin_cursor
            segment = self.assertRaises(EventsEvicted, recorded.log.read_events, evicted, 1).segment
            recorded.log.load_segment(segment, recorded.parse_evicted_segment(segment))
        self.assertLess(len(list((self.directory / "files").iterdir())), 30)

    def test_read_with_many_large_events_is_several_segments(self) -> None:
        self.recorded.feed(b"~FB\nX-SEGI-As: path\n\na\n~FE\n" * 100)
        while self.recorded.awaited_file is not None or self.recorded.has_pending_input:
            if self.recorded.awaited_file is None:
                self.recorded.parse_pending()
            else:
                self.recorded.store_file(b"x" * 100_000)
                self.recorded.answer_file(b"x" * 100_000)
        self.assertLess(self.recorded.log._memory.share.used, 1_000_000)

    def test_full_disk_is_an_error(self) -> None:
        for name in ("write", "pwrite"):
            self.patch(os, name, lambda *arguments: 5)
            self.assertRaises(OSError, self.recorded.feed, b"line\n" * 1000)

    def test_acknowledged_stdout_gives_its_blocks_back(self) -> None:
        with (self.directory / "stdout").open("ab") as file:
            file.write(b"long line\n" * 400_000)
        for begin in range(500, 4_000_000, 65536):
            self.recorded.feed(self.files.read_stdout(begin, begin + 65536))
        before = (self.directory / "stdout").stat().st_blocks
        self.recorded.log.acknowledge(self.recorded.log.end_cursor - 1)
        self.recorded.free_discarded_files()
        self.assertLess((self.directory / "stdout").stat().st_blocks, before / 4)
        lines = self.recorded.log.read_events(self.recorded.log.end_cursor - 1, 1).lines
        self.assertEqual(lines, b'{"type":"text","payload":"long line"}\n')
