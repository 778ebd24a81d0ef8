"""Frames: the messages between the daemon and a node.

A frame from the node is a byte for its kind, the length of its content in 4 bytes (big-endian), the
content and a line feed. Slurm passes stdout of a job on by lines, so the line feed makes a frame
arrive at once. srun writes its own messages to stderr, never between frames.

To the node the daemon sends lines: `GRANT` and an offset in stdout, `TERMINATE`, `KILL`, and `READ`
with a token and a path, for a file that the evaluator has named (without a shared directory), and
`END` when no more files are asked for. Slurm keeps megabytes of output on the way, so the node
stops sending the evaluator's stdout at the largest offset that the daemon has granted, which is
`STDOUT_WINDOW_BYTES` at first. Nothing waits behind a full pipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import attrs

STDOUT_WINDOW_BYTES = 256 * 1024
"""Bytes of stdout, and one read of it, that may be on the way or wait in the daemon."""

UNLIMITED_OFFSET = 2**60
"""An offset beyond all output."""

GRANT, TERMINATE, KILL, READ, END = b"A", b"T", b"K", b"F", b"E"
"""First bytes of the daemon's lines; that of a grant is followed by its offset in decimal."""

TOKEN_BYTES = 8
"""The size of a token, which tells the answers to a `READ` from those to an earlier one."""

MAX_CONTENT_BYTES = 2**20
"""The most bytes of one frame: a read of a pipe, or the JSON of an outcome."""

_HEADER = 5


class FrameKind(Enum):
    """What a frame has."""

    EVALUATOR_STARTING = b"B"  # JSON: the evaluator is about to be started; names job and node
    STDOUT = b"O"
    STDERR = b"E"
    EVALUATOR_EXITED = (
        b"D"  # nothing: the evaluator's processes have ended; their output may follow
    )
    OUTCOME = b"X"  # JSON: the last frame but those of files
    # Without a shared directory:
    READY_FOR_JOB = b"R"  # nothing: the node waits for the job description
    TREE_WANTED = b"W"  # nothing: the node does not have the tree
    FILE = b"F"  # a token, and a part of a file
    FILE_END = b"G"  # a token, and JSON: why the file was refused, or null


class BrokenFrame(Exception):
    """Bytes that are no frame: the program on the node is not the one that was asked for."""


def encode_frame(kind: FrameKind, content: bytes = b"") -> bytes:
    """Return a frame."""
    return b"%b%b%b\n" % (kind.value, len(content).to_bytes(4, "big"), content)


@attrs.define
class FrameParser:
    """Parser of the frames of one job."""

    _pending: bytearray = attrs.field(factory=bytearray)

    def feed(self, data: bytes) -> Iterator[tuple[FrameKind, bytes]]:
        """Yield the frames that `data` completes. Raises: BrokenFrame."""
        pending = self._pending
        pending += data
        while len(pending) >= _HEADER:
            try:
                kind = FrameKind(bytes(pending[:1]))
            except ValueError:
                raise BrokenFrame(_show(pending)) from None
            size = int.from_bytes(pending[1:_HEADER], "big")
            if size > MAX_CONTENT_BYTES:
                raise BrokenFrame(_show(pending))
            end = _HEADER + size
            if len(pending) <= end:
                return
            if pending[end : end + 1] != b"\n":
                raise BrokenFrame(_show(pending))
            content = bytes(pending[_HEADER:end])
            del pending[: end + 1]
            yield kind, content


def _show(data: bytearray) -> str:
    return bytes(data[:200]).decode(errors="replace").strip()


def encode_stdout_grant(offset: int) -> bytes:
    """Return the line by which the daemon grants stdout up to an offset."""
    return b"%b%d\n" % (GRANT, offset)


def encode_file_request(token: bytes, path: str) -> bytes:
    """Return the line by which the daemon asks for a file that the evaluator has named."""
    return b"%b%b%b\n" % (READ, token, path.encode("utf-8", "surrogateescape").hex().encode())


def decode_file_request(content: bytes) -> tuple[bytes, str]:
    """Return token and path of a line of `encode_file_request`, without its first byte."""
    path = bytes.fromhex(content[TOKEN_BYTES:].decode())
    return content[:TOKEN_BYTES], path.decode("utf-8", "surrogateescape")


def encode_command(command: bytes) -> bytes:
    """Return the line of `TERMINATE`, `KILL` or `END`."""
    return command + b"\n"


@attrs.define
class DaemonLineParser:
    """Parser of the daemon's lines, on the node."""

    _pending: bytes = b""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the first byte of each whole line, and what is behind it."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            yield line[:1], line[1:]
