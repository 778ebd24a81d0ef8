"""`archive.files`: reading the events of an archived evaluation from any cursor."""

from __future__ import annotations

import orjson
import zstandard

from tawebeval.archive.files import MAX_FRAME_BYTES, ArchiveFile, DamagedArchiveFile
from tests.cases.archive import ArchiveTestCase, make_batch, make_end, make_events

COUNT = 20_000
WRITE = 500  # events


class FileTests(ArchiveTestCase):
    """An evaluation of several frames."""

    def setUp(self) -> None:
        super().setUp()
        for first in range(0, COUNT, 2 * WRITE):
            self.write(make_events(first, WRITE), make_events(first + WRITE, WRITE))
        self.write(end=make_end(), name="one")

    def test_any_cursor(self) -> None:
        """A page begins at its cursor, has at most its limit of bytes, and the next one follows."""
        for limit in (1000, 300_000, 10**9):
            after, lines = 0, []
            while after < COUNT:
                batch = self.read(after, limit)
                self.assertEqual(batch.count, batch.lines.count(b"\n"))
                self.assertLessEqual(len(batch.lines), limit)
                lines.append(batch.lines)
                after += batch.count
            self.assertEqual(b"".join(lines), make_batch(0, COUNT).lines)
        for after in (0, 1, 3333, COUNT - 1, COUNT):
            self.assertEqual(self.read(after).lines, make_batch(after, COUNT - after).lines)

    def test_one_event(self) -> None:
        """A page has at least one event, however large it is."""
        self.assertEqual(self.read(7, 1).lines, make_batch(7, 1).lines)

    def test_times(self) -> None:
        """Events have their times if those are wanted."""
        lines = self.read(5, 1000, with_times=True).lines
        for line in lines.splitlines():
            self.assertEqual(orjson.loads(line)["time"], "2023-11-14T22:13:20.000+00:00")

    def test_frames(self) -> None:
        """No frame has more than its size, so a page decodes a few."""
        file = self.get()
        self.addCleanup(file.close)
        content = next(self.root.rglob("*.jsonl.zst")).read_bytes()
        sizes = []
        while content[:4] == zstandard.FRAME_HEADER:
            decoder = zstandard.ZstdDecompressor().decompressobj()
            sizes.append(len(decoder.decompress(content)))
            content = decoder.unused_data
        self.assertGreater(len(sizes), 6)
        self.assertLessEqual(max(sizes), MAX_FRAME_BYTES + WRITE * 100)

    def test_lines(self) -> None:
        """A file is JSON Lines for other programs: header, events, status."""
        content = next(self.root.rglob("*.jsonl.zst")).read_bytes()
        reader = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True)
        header, *events, end = reader.read().splitlines()
        self.assertEqual(
            orjson.loads(header), {"archive": 1, "evaluation_id": "one", "caller": "alice"}
        )
        self.assertEqual(len(events), COUNT)
        self.assertEqual(orjson.loads(end)["status"], {"state": "finished"})

    def test_damaged(self) -> None:
        """A file that is cut or changed is found to be damaged; nothing wrong is returned."""
        path = next(self.root.rglob("*.jsonl.zst"))
        content = path.read_bytes()
        for size in (0, 10, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:size])
            self.assertRaises(DamagedArchiveFile, ArchiveFile.open, path)
        for place in range(0, len(content), len(content) // 150):
            changed = bytearray(content)
            changed[place] ^= 0xFF
            path.write_bytes(changed)
            try:
                file = ArchiveFile.open(path)
            except DamagedArchiveFile:
                continue
            try:
                found = file.read_events(0, 10**9, with_times=False)
                self.assertEqual(found, make_batch(0, found.count))
            except DamagedArchiveFile:
                pass
            finally:
                file.close()


class SmallFileTests(ArchiveTestCase):
    """Evaluations that print little, or one large event."""

    def test_empty(self) -> None:
        """One without events has an empty end."""
        self.write(end=make_end())
        self.assertEqual(self.read().count, 0)

    def test_large_event(self) -> None:
        """An event above the size of a frame has a frame of its own."""
        self.write(make_events(0, 1), make_events(1, 1, 10**6), make_events(2, 2), end=make_end())
        expected = make_batch(0, 1) + make_batch(1, 1, 10**6) + make_batch(2, 2)
        self.assertEqual(self.read(), expected)
        self.assertEqual(self.read(1, 100), make_batch(1, 1, 10**6))

    def test_payload_like_time(self) -> None:
        """What an evaluator prints in place of a time stays."""
        value = b'{"type":"data","payload":{"a":1,"time":"2023"}}\n'
        events = make_events(0, 1)
        batch = type(events.batch)(1, value)
        self.write(type(events)(0, batch, events.time_of_first_event), end=make_end())
        self.assertEqual(self.read().lines, value)
