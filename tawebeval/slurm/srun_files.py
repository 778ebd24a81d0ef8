"""Files in memory with all that a later process of the daemon needs of one srun.

The keeper holds them beside srun's pipes. Whatever comes out of srun is first in the file of frames
(`linux.keeper_owned_process`). From there the output of the evaluator goes into two more files, and
the frames are given back to the kernel. The file `state` says which: up to which frame, and how
many bytes of stdout and stderr came before it. A later process parses the frames from there, and
leaves out what the two files have already.

All of `state` lies in one page, whose parts the kernel writes whole or not at all when the process
is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Sequence
from typing import Any

import attrs

from tawebeval.linux.keeper_owned_process import REPLAYABLE_STDERR_BYTES
from tawebeval.linux.memory_file import punch_hole

_FILES = ("state", "output", "errors")
_HOLE = 64 * 1024
_POSITION = struct.Struct("<QQQ")
_SIZE = struct.Struct("<H")
_SENDING_AT, _NAME_AT, _START_AT, _END = 32, 64, 2048, 4096  # offsets in `state`
_MOST = 1900  # bytes between them


@attrs.frozen
class FramePosition:
    """A place between two frames of srun, and the bytes of stdout and stderr before it."""

    frame_offset: int = 0
    stdout_offset: int = 0
    stderr_offset: int = 0


class OutputMemfd:
    """File with one stream of the evaluator's output; `size` counts what was discarded, too."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._discarded = 0

    def append(self, offset: int, data: bytes) -> bytes:
        """Add bytes that begin at an offset of the stream; return those that are new.

        Raises: OSError, if the kernel has no memory for them; a part of them may be stored.
        """
        new = left = data[max(0, self.size - offset) :]
        while left:
            written = os.pwrite(self.descriptor, left, self.size)
            self.size += written
            left = left[written:]
        return new

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes from an offset on, at most `size`."""
        return os.pread(self.descriptor, min(size, self.size - offset), offset)

    def discard_before(self, offset: int) -> None:
        """Give back the memory before an offset, in steps. If the kernel refuses, keep it."""
        offset -= offset % _HOLE
        if offset > self._discarded:
            with contextlib.suppress(OSError):
                punch_hole(self.descriptor, self._discarded, offset)
                self._discarded = offset


@attrs.define(eq=False)
class SrunFiles:
    """The files of one srun, and `stdin`, the write end of its stdin.

    `attempt_number` is 0 for the first srun of a run. `job_and_node` is None until the evaluator
    was started. `is_sending`: this process of the daemon or an earlier one has begun to send the
    job. `resume_position` is where a later process goes on.
    """

    stdin: int
    _state: int
    stdout: OutputMemfd
    stderr: OutputMemfd
    job_name: str = ""
    attempt_number: int = 0
    job_and_node: tuple[str | None, str | None] | None = None
    resume_position: FramePosition = FramePosition()
    is_sending: bool = False
    is_closed: bool = False

    @classmethod
    def create(cls, stdin: int, job_name: str, attempt_number: int) -> SrunFiles:
        """Make the files of a new srun. Raises: OSError; `stdin` is the caller's then."""
        made: list[int] = []
        try:
            made.extend(os.memfd_create(f"srun-{what}", os.MFD_CLOEXEC) for what in _FILES)
            state, stdout, stderr = made
            os.ftruncate(state, _END)
            _write(state, _NAME_AT, [job_name, attempt_number])
        except OSError:
            for descriptor in made:
                os.close(descriptor)
            raise
        return cls(stdin, state, OutputMemfd(stdout), OutputMemfd(stderr), job_name, attempt_number)

    @classmethod
    def load(cls, descriptors: Sequence[int]) -> SrunFiles:
        """Return the files of an earlier process.

        Raises: OSError, ValueError, struct.error; the descriptors are the caller's then.
        """
        stdin, state, stdout, stderr = descriptors
        job_name, attempt_number = _read(state, _NAME_AT)
        start = _read(state, _START_AT)
        return cls(
            *(stdin, state, OutputMemfd(stdout), OutputMemfd(stderr), job_name, attempt_number),
            None if start is None else (start[0], start[1]),
            FramePosition(*_POSITION.unpack(os.pread(state, _POSITION.size, 0))),
            os.pread(state, 1, _SENDING_AT) != b"\0",
        )

    @property
    def descriptors(self) -> Sequence[int]:
        """All descriptors, in the order of `load`."""
        return self.stdin, self._state, self.stdout.descriptor, self.stderr.descriptor

    def record_evaluator_start(self, job: str | None, node: str | None) -> None:
        """Note that the evaluator was started. Raises: OSError, ValueError."""
        _write(self._state, _START_AT, [job, node])
        self.job_and_node = job, node

    def record_sending_begun(self) -> None:
        """Note that the job description is being sent. Raises: OSError."""
        os.pwrite(self._state, b"\1", _SENDING_AT)
        self.is_sending = True

    def write_resume_position(self, position: FramePosition) -> None:
        """Note from where a later process goes on. Raises: OSError."""
        os.pwrite(self._state, _POSITION.pack(*attrs.astuple(position)), 0)
        self.resume_position = position

    def count_skipped_stderr_bytes(self) -> int:
        """Return the bytes of stderr that a run that goes on does not get again."""
        return max(0, self.stderr.size - REPLAYABLE_STDERR_BYTES)

    def close_stdin(self) -> None:
        """Close the stdin of srun."""
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def close(self) -> None:
        """Close everything here; the keeper may have it still."""
        self.close_stdin()
        if not self.is_closed:
            self.is_closed = True
            for descriptor in (self._state, self.stdout.descriptor, self.stderr.descriptor):
                os.close(descriptor)


def _write(state: int, offset: int, value: Any) -> None:
    content = json.dumps(value).encode()
    if len(content) > _MOST:
        raise ValueError("the names of job and node are too long")
    os.pwrite(state, _SIZE.pack(len(content)) + content, offset)


def _read(state: int, offset: int) -> Any:
    (size,) = _SIZE.unpack(os.pread(state, _SIZE.size, offset))
    return json.loads(os.pread(state, size, offset + _SIZE.size)) if size else None
