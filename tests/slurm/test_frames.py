"""`slurm.frames`: messages between daemon and node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.slurm.frames import (
    GRANT,
    KILL,
    MAX_CONTENT_BYTES,
    BrokenFrame,
    DaemonLineParser,
    FrameKind,
    FrameParser,
    encode_command,
    encode_frame,
    encode_stdout_grant,
)

FRAMES = st.lists(st.tuples(st.sampled_from(FrameKind), st.binary(max_size=300)), max_size=8)


class FrameTests(SynchronousTestCase):
    """Frames arrive as they were sent, however they are cut."""

    @given(FRAMES, st.integers(1, 50))
    def test_round_trip(self, frames: list[tuple[FrameKind, bytes]], size: int) -> None:
        """Any frames, in pieces of any size."""
        sent = b"".join(encode_frame(kind, content) for kind, content in frames)
        parser, found = FrameParser(), []
        for start in range(0, len(sent), size):
            found += parser.feed(sent[start : start + size])
        self.assertEqual(found, frames)

    def test_broken(self) -> None:
        """What another program prints is no frame, and neither is one that is too long."""
        long = FrameKind.STDOUT.value + (MAX_CONTENT_BYTES + 1).to_bytes(4, "big")
        unended = encode_frame(FrameKind.STDOUT, b"x")[:-1] + b"y"
        for data in (b"bash: no such command", long, unended):
            error = self.assertRaises(BrokenFrame, list, FrameParser().feed(data))
            self.assertEqual(str(error), data.decode(errors="replace").strip())

    @given(st.integers(1, 20))
    def test_lines(self, size: int) -> None:
        """The daemon's lines, in pieces of any size."""
        sent = encode_stdout_grant(65536) + encode_command(KILL)
        parser, found = DaemonLineParser(), []
        for start in range(0, len(sent), size):
            found += parser.feed(sent[start : start + size])
        self.assertEqual(found, [(GRANT, b"65536"), (KILL, b"")])
