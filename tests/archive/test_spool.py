"""`archive.spool`: recordings that a new process continues, wherever the old one was killed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from tawebeval.archive.spool import SpooledRecording, recover_recordings
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.archive.files import ArchiveFile, encode_header_frame
from tests.cases.archive import make_batch

NAME = "0" * 32
HEADER = encode_header_frame("one", "alice")
STEP = 900
"""Events of one write: some writes fill a frame, and others do not."""


class RecordingTests(SynchronousTestCase):
    """A recording that is written in several steps."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.root.mkdir()

    def write(self, recording: SpooledRecording, until: int) -> None:
        """Write events up to a number."""
        while recording.event_count < until:
            count = min(STEP, until - recording.event_count)
            recording.write_events([make_batch(recording.event_count, count)], HEADER)

    def recover(self) -> SpooledRecording:
        """Return the recording as a new process finds it."""
        return recover_recordings(self.root).get(NAME) or SpooledRecording(self.root, NAME)

    def finish(self, recording: SpooledRecording, count: int) -> None:
        """End the recording, and hold that it has so many events."""
        target = self.root / "target"
        recording.finish([], HEADER, {"status": {}}, target)
        file = ArchiveFile.open(target)
        self.addCleanup(file.close)
        self.assertEqual(file.event_count, count)
        lines = file.read_events(0, 10**9, with_times=False).lines
        self.assertEqual(lines, make_batch(0, count).lines)
        self.assertEqual(os.listdir(self.root), ["target"])

    def test_continued(self) -> None:
        """A recording goes on where it was, with frames or without."""
        for count in (1, STEP, 20 * STEP, 21 * STEP):
            with self.subTest(count=count):
                self.write(SpooledRecording(self.root, NAME), count)
                recording = self.recover()
                self.assertEqual(recording.event_count, count)
                self.write(recording, count + 10 * STEP)
                self.finish(self.recover(), count + 10 * STEP)
                (self.root / "target").unlink()

    def test_killed(self) -> None:
        """However often the process is killed in the middle, no event is lost or doubled."""
        delays, written = random.Random(1), 0
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        self.addCleanup(os.close, writing)
        for _ in range(30):
            child = os.fork()
            if not child:
                self.write_for_ever(writing)
            os.read(reading, 1)
            time.sleep(delays.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            count = self.recover().event_count
            self.assertGreater(count, written)
            written = count
        self.finish(self.recover(), written)

    def write_for_ever(self, ready: int) -> None:
        """Write until the process is killed; `ready` is a pipe that gets a byte after a step."""
        try:
            recording = self.recover()
            self.write(recording, recording.event_count + STEP)
            os.write(ready, b"x")
            while True:
                self.write(recording, recording.event_count + STEP)
        finally:
            os._exit(1)

    def test_leftovers(self) -> None:
        """Frames without lines, and lines without frames, are removed; other files are not."""
        for name in (f"{NAME}.frames", f"{NAME}.new", "other"):
            (self.root / name).write_bytes(b"content")
        (self.root / f"{'1' * 32}.5.100.lines").write_bytes(b"")
        self.assertEqual(recover_recordings(self.root), {})
        self.assertEqual(os.listdir(self.root), ["other"])
