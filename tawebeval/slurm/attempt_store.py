"""Files in memory with all that a later process of the daemon needs of one srun.

The keeper holds them beside srun's pipes. Whatever comes out of srun is first in the file of frames
(`linux.kept_process`). From there the output of the evaluator goes into two more files, and the
frames are given back to the kernel. The file `state` says which: up to which frame, and how many
bytes of stdout and stderr came before it. A later process parses the frames from there, and leaves
out what the two files have already.

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

from tawebeval.linux.kept_process import KEPT_STDERR_BYTES
from tawebeval.linux.memory_file import punch_hole

_FILES = ("state", "output", "errors")
_HOLE = 64 * 1024
_POSITION = struct.Struct("<QQQ")
_SIZE = struct.Struct("<H")
_NAME_AT, _BEGUN_AT, _END = 64, 2048, 4096  # offsets in `state`
_MOST = 1900  # bytes between them


@attrs.frozen
class FramePosition:
    """A place between two frames: offsets in the frames, in stdout and in stderr."""

    frames: int = 0
    stdout: int = 0
    stderr: int = 0


class OutputFile:
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

    def discard(self, before: int) -> None:
        """Give back the memory before an offset, in steps. If the kernel refuses, keep it."""
        before -= before % _HOLE
        if before > self._discarded:
            with contextlib.suppress(OSError):
                punch_hole(self.descriptor, self._discarded, before)
                self._discarded = before


@attrs.define(eq=False)
class AttemptStore:
    """The files of one srun, and `orders`, the write end of its stdin.

    `name` is that of its job, `number` 0 for the first srun of a run. `begun` has the numbers of
    job and node once the evaluator was started. `position` is where a later process goes on.
    """

    orders: int
    _state: int
    output: OutputFile
    errors: OutputFile
    name: str = ""
    number: int = 0
    begun: tuple[str | None, str | None] | None = None
    position: FramePosition = FramePosition()
    is_closed: bool = False

    @classmethod
    def create(cls, orders: int, name: str, number: int) -> AttemptStore:
        """Make the files of a new srun. Raises: OSError; `orders` is the caller's then."""
        made: list[int] = []
        try:
            made.extend(os.memfd_create(f"srun-{what}", os.MFD_CLOEXEC) for what in _FILES)
            state, output, errors = made
            os.ftruncate(state, _END)
            _write(state, _NAME_AT, [name, number])
        except OSError:
            for descriptor in made:
                os.close(descriptor)
            raise
        return cls(orders, state, OutputFile(output), OutputFile(errors), name, number)

    @classmethod
    def load(cls, descriptors: Sequence[int]) -> AttemptStore:
        """Return the files of an earlier process.

        Raises: OSError, ValueError, struct.error; the descriptors are the caller's then.
        """
        orders, state, output, errors = descriptors
        name, number = _read(state, _NAME_AT)
        begun = _read(state, _BEGUN_AT)
        return cls(
            *(orders, state, OutputFile(output), OutputFile(errors), name, number),
            None if begun is None else (begun[0], begun[1]),
            FramePosition(*_POSITION.unpack(os.pread(state, _POSITION.size, 0))),
        )

    @property
    def descriptors(self) -> Sequence[int]:
        """All descriptors, in the order of `load`."""
        return self.orders, self._state, self.output.descriptor, self.errors.descriptor

    def write_begun(self, job: str | None, node: str | None) -> None:
        """Note that the evaluator was started. Raises: OSError, ValueError."""
        _write(self._state, _BEGUN_AT, [job, node])
        self.begun = job, node

    def write_position(self, position: FramePosition) -> None:
        """Note from where a later process goes on. Raises: OSError."""
        os.pwrite(self._state, _POSITION.pack(*attrs.astuple(position)), 0)
        self.position = position

    def count_missing_stderr(self) -> int:
        """Return the bytes of stderr that a run that goes on does not get again."""
        return max(0, self.errors.size - KEPT_STDERR_BYTES)

    def close_orders(self) -> None:
        """Close the stdin of srun."""
        if self.orders >= 0:
            os.close(self.orders)
            self.orders = -1

    def close(self) -> None:
        """Close everything here; the keeper may have it still."""
        self.close_orders()
        if not self.is_closed:
            self.is_closed = True
            for descriptor in (self._state, self.output.descriptor, self.errors.descriptor):
                os.close(descriptor)


def _write(state: int, offset: int, value: Any) -> None:
    content = json.dumps(value).encode()
    if len(content) > _MOST:
        raise ValueError("the names of job and node are too long")
    os.pwrite(state, _SIZE.pack(len(content)) + content, offset)


def _read(state: int, offset: int) -> Any:
    (size,) = _SIZE.unpack(os.pread(state, _SIZE.size, offset))
    return json.loads(os.pread(state, size, offset + _SIZE.size)) if size else None
