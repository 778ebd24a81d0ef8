"""`archive.files`: what is read at any cursor is what was written, or an error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase
from zstandard import ZstdDecompressor

from tawebeval.archive import files
from tawebeval.archive.files import (
    ArchiveFileTooLarge,
    DamagedArchiveFile,
    read_events,
    write_evaluation,
)
from tawebeval.core.events import (
    EVENTS_LOST_ERROR,
    EventBatch,
    EventRing,
    StdoutChanged,
    encode_data_event,
)

HEADER = {"archive": 1, "evaluation_id": "one", "caller": "alice"}
END = {"status": {"state": "finished"}}
PLENTY = 10**9

payloads = st.one_of(
    st.integers(0, 60).map(lambda size: b'"%b"' % (b"x" * size)),
    st.sampled_from([b'{"a":1,"time":"2023"}', rb'"\",\"time\":\"a\"}"', b'"}"', b'"}\\n"']),
)
batches = st.lists(
    st.tuples(st.lists(payloads, min_size=1, max_size=12), st.integers(0, 3)), max_size=12
)
Batches = Sequence[tuple[Sequence[bytes], int]]


def make_rings(batches: Batches, batches_per_ring: int = 2) -> Iterator[EventRing]:
    """Yield rings with the events of payloads, each batch some milliseconds after the last."""
    ring, time_ms = EventRing(), 0
    for number, (values, step) in enumerate(batches, 1):
        time_ms += step
        for value in values:
            ring.append_batch(encode_data_event(value), time_ms)
        if number % batches_per_ring == 0:
            yield ring
            ring = EventRing(ring.end_cursor, ring.end_cursor)
    yield ring


def list_events(batches: Batches) -> tuple[list[bytes], list[bytes]]:
    """Return the lines of all events, without times and with them."""
    lines, timed, time_ms = [], [], 0
    for values, step in batches:
        time_ms += step
        for value in values:
            lines.append(encode_data_event(value).lines)
            timed.append(b'%b,"time":"%d"}\n' % (lines[-1][:-2], time_ms))
    return lines, timed


def format_time(seconds: float) -> str:
    """Return a time of some milliseconds as a number."""
    return str(round(seconds * 1000))


class FileTestCase(SynchronousTestCase):
    """A file with small frames."""

    def setUp(self) -> None:
        self.patch(files, "UNCOMPRESSED_FRAME_BYTES", 500)
        self.path = Path(self.mktemp())

    def write(self, batches: Batches, batches_per_ring: int = 2, max_bytes: int = PLENTY) -> int:
        rings = make_rings(batches, batches_per_ring)
        return write_evaluation(self.path, HEADER, rings, END, format_time, max_bytes)

    def read(
        self, cursor: int = 0, max_bytes: int = PLENTY, *, includes_times: bool = False
    ) -> EventBatch:
        return read_events(self.path, cursor, max_bytes, includes_times=includes_times)


class ReadingTests(FileTestCase):
    @given(batches, st.integers(1, 5), st.integers(1, 3000), st.booleans())
    def test_page_at_any_cursor_has_as_many_events_as_fit(
        self, batches: Batches, per_ring: int, max_bytes: int, includes_times: bool
    ) -> None:
        lines = list_events(batches)[includes_times]
        self.assertEqual(self.write(batches, per_ring), len(lines))
        self.assertRaises(DamagedArchiveFile, self.read, len(lines))
        for cursor in range(len(lines)):
            batch = self.read(cursor, max_bytes, includes_times=includes_times)
            self.assertEqual(batch.lines, b"".join(lines[cursor : cursor + batch.count]))
            following = lines[cursor + batch.count : cursor + batch.count + 1]
            self.assertGreater(batch.count, 0)
            self.assertTrue(batch.count == 1 or len(batch.lines) <= max_bytes)
            self.assertTrue(not following or len(batch.lines + following[0]) > max_bytes)

    def test_event_larger_than_a_frame_is_read(self) -> None:
        self.write([([b'"%b"' % (b"x" * size) for size in (1, 10**6, 1)], 1)])
        self.assertEqual([self.read(cursor, 1).count for cursor in range(3)], [1, 1, 1])
        self.assertGreater(len(self.read(1, 1).lines), 10**6)

    def test_archive_file_is_json_lines_compressed_by_zstd(self) -> None:
        batches: Batches = [([b"1"] * 100, 1)] * 9
        self.write(batches)
        with self.path.open("rb") as file:
            output = ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
        header, *events, end = output.splitlines(keepends=True)
        self.assertEqual((orjson.loads(header), orjson.loads(end)), (HEADER, END))
        self.assertEqual(
            [re.sub(rb',"time":"[0-9]+"', b"", event) for event in events], list_events(batches)[0]
        )
        self.assertLess(self.path.stat().st_size, 10_000)

    def test_writing_an_archive_file_over_its_size_limit_raises(self) -> None:
        batches: Batches = [([b"%d" % number for number in range(1000)], 1)] * 20
        self.assertRaises(ArchiveFileTooLarge, self.write, batches, max_bytes=10_000)
        self.assertLess(self.path.stat().st_size, 11_000)

    def test_archive_file_ends_with_a_lost_event_if_stdout_has_changed(self) -> None:
        def change() -> Iterator[EventRing]:
            yield from make_rings([([b"1"], 1)])
            raise StdoutChanged

        count = write_evaluation(self.path, HEADER, change(), END, format_time, PLENTY)
        self.assertEqual(count, 2)
        self.assertEqual(self.read(1).lines, EVENTS_LOST_ERROR.lines)
        timed = EVENTS_LOST_ERROR.lines.replace(b"}\n", b',"time":"1"}\n')
        self.assertEqual(self.read(1, includes_times=True).lines, timed)


class DamageTests(FileTestCase):
    def setUp(self) -> None:
        super().setUp()
        batches: Batches = [([b'"event %d"' % number], number % 2) for number in range(60)]
        self.write(batches)
        self.lines = list_events(batches)[0]
        self.content = self.path.read_bytes()

    def assert_nothing_wrong_is_read(self) -> int:
        """Read all events as a client does; return how many there were before the damage."""
        cursor = 0
        while cursor < len(self.lines):
            try:
                batch = self.read(cursor, 700)
            except DamagedArchiveFile:
                break
            self.assertGreater(batch.count, 0)
            self.assertEqual(batch.lines, b"".join(self.lines[cursor : cursor + batch.count]))
            cursor += batch.count
        return cursor

    def test_events_before_a_changed_byte_are_read(self) -> None:
        counts = set[int]()
        for place in range(len(self.content)):
            changed = bytearray(self.content)
            changed[place] ^= 0xFF
            self.path.write_bytes(changed)
            count = self.assert_nothing_wrong_is_read()
            for cursor in range(place % 7, count, 7):
                self.assertEqual(self.read(cursor, 1).lines, self.lines[cursor])
            counts.add(count)
        self.assertTrue(counts & {*range(10, 50)}, "those of whole frames")

    def test_truncated_file_of_any_length_is_an_error(self) -> None:
        for size in range(len(self.content)):
            self.path.write_bytes(self.content[:size])
            self.assertRaises(DamagedArchiveFile, self.read)
