"""`slurm.node_files`: files that a node reads."""

from __future__ import annotations

import json
import tracemalloc

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.sandbox.workspace import FileRefused
from tawebeval.slurm.frames import TOKEN_BYTES, DaemonLineParser, FrameKind, decode_file_request
from tawebeval.slurm.node_files import ANSWER_TIMEOUT, NodeFileReader

LIMIT = 10


class FileTests(SynchronousTestCase):
    """One file at a time."""

    def setUp(self) -> None:
        self.sent = b""
        self.can_send = True
        self.clock = Clock()
        self.silences = 0
        self.files = NodeFileReader(self.clock, LIMIT, self.send, self.note_silence)

    def note_silence(self) -> None:
        """Count."""
        self.silences += 1

    def send(self, line: bytes) -> bool:
        """Note a line."""
        self.sent = line
        return self.can_send

    def ask(self, path: str = "a") -> tuple[bytes, Deferred[bytes]]:
        """Ask for a file; return the token and the answer."""
        answered = Deferred.fromCoroutine(self.files.fetch_file(path))
        ((_, content),) = DaemonLineParser().feed(self.sent)
        token, asked = decode_file_request(content)
        self.assertEqual(asked, path)
        return token, answered

    def answer(self, token: bytes, *parts: bytes, refusal: str | None = None) -> None:
        """Send the answer of a node."""
        for part in parts:
            self.files.on_frame(FrameKind.FILE, token + part)
        self.files.on_frame(FrameKind.FILE_END, token + json.dumps(refusal).encode())

    def refused(self, answered: Deferred[bytes]) -> str:
        """Return the reason of a refusal."""
        return str(self.failureResultOf(answered, FileRefused).value)

    def test_content(self) -> None:
        """Parts are put together; a path may have any bytes."""
        for path in ("a", "b\n\udcff", "x" * 4096):
            token, answered = self.ask(path)
            self.answer(token, b"12345", b"67890")
            self.assertEqual(self.successResultOf(answered), b"1234567890")

    def test_memory(self) -> None:
        """A file is in memory once, also while its last part arrives."""
        size, part = 2**23, 2**18
        self.files = NodeFileReader(self.clock, size, self.send, self.note_silence)
        token, answered = self.ask()
        content = token + bytes(part)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        for _ in range(size // part):
            self.files.on_frame(FrameKind.FILE, content)
        self.files.on_frame(FrameKind.FILE_END, token + b"null")
        self.assertEqual(len(self.successResultOf(answered)), size)
        self.assertLess(tracemalloc.get_traced_memory()[1], 1.3 * size)

    def test_refused(self) -> None:
        """The node's reason is the reason; a file over the limit is refused here, too."""
        token, answered = self.ask()
        self.answer(token, refusal="'\udcff' is not a regular file")
        self.assertEqual(self.refused(answered), "'\udcff' is not a regular file")
        token, answered = self.ask()
        self.answer(token, *[b"x" * LIMIT] * 3)
        self.assertEqual(self.refused(answered), "'a' is over 10 bytes (limits.file)")

    def test_other_answers(self) -> None:
        """Answers to an earlier daemon, and those that nobody waits for, are left out."""
        token, answered = self.ask()
        self.answer(b"0" * TOKEN_BYTES, b"old")
        self.assertNoResult(answered)
        self.answer(token, b"new")
        self.answer(token, b"twice")
        self.assertEqual(self.successResultOf(answered), b"new")

    def test_lost(self) -> None:
        """Without a node there is no file, whether it was asked before or not."""
        _, answered = self.ask()
        self.files.fail_pending_fetch()
        self.assertIn("the node is gone", self.refused(answered))
        self.can_send = False
        _, answered = self.ask()
        self.assertIn("the node is gone", self.refused(answered))

    def test_silence(self) -> None:
        """A node may take its time for many parts, but not for one; after a file it may rest."""
        token, answered = self.ask()
        for _ in range(3):
            self.clock.advance(ANSWER_TIMEOUT - 1)
            self.files.on_frame(FrameKind.FILE, token + b"x")
        self.answer(token)
        self.successResultOf(answered)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.ask()
        self.clock.advance(ANSWER_TIMEOUT)
        self.assertEqual(self.silences, 1)
