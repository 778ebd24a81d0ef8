"""Children of the keeper: their output outlasts the process that reads it.

`SplicedPipeReader` moves a pipe's bytes into a memfd by splice(2) before it delivers them. The size
of the memfd tells how many bytes have left the pipe: the kernel ends no process between a write and
its effect on the pipe, so SIGKILL at any moment loses no byte and repeats none. The next process,
with the same descriptors, delivers what it wants of the memfd, and goes on with the pipe. It must
not begin before the last one has ended.

`KeeperOwnedProcess` drives a Twisted `ProcessProtocol` by two such readers and the pidfd of a
process that is no child of this one. Another program, the keeper, holds the descriptors and waits
for it.

`release_output_memory` punches holes into the memfd of stdout: its memory is the part that was not
discarded, and 64 KiB at most. Of stderr the last `REPLAYABLE_STDERR_BYTES` stay, and as many more
at most. The kernel charges both to the daemon's control group.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from resource import struct_rusage
from typing import Any

import attrs
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.error import ConnectionLost
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from tawebeval.linux.child import STDERR, STDOUT, PipedProcess, PipeListener, PipeReader
from tawebeval.linux.memory_file import punch_hole

REPLAYABLE_STDERR_BYTES = 64 * 1024
"""Bytes of stderr, at least, that the next process can deliver again."""

_HOLE = 64 * 1024  # bytes: holes are whole multiples of it, hence of a page


class SplicedPipeReader(PipeReader):
    """The reader of a pipe whose bytes go to a memfd first.

    `delivered_bytes` is the offset in the memfd up to which bytes were delivered, with those of
    this call included. `write_error` is the error by which the memfd took no more bytes. The reader
    then closes the pipe; the bytes that are left in it were not delivered.
    """

    __slots__ = ("_discarded", "_memfd", "_size", "delivered_bytes", "write_error")

    def __init__(
        self,
        reactor: Any,
        descriptor: int,
        name: int,
        owner: PipeListener,
        memfd: int,
        begin: int = 0,
    ) -> None:
        """Deliver the bytes of the memfd from `begin` on, and then those of the pipe."""
        super().__init__(reactor, descriptor, name, owner)
        self.delivered_bytes = begin
        self.write_error: OSError | None = None
        self._memfd = memfd
        self._discarded = 0
        self._size = os.fstat(memfd).st_size
        if begin < self._size:
            self.read_one_chunk_per_turn(self._size - begin)

    def read_chunk(self, size: int) -> bytes:
        """Return bytes of the memfd; if there are none, move some there. Raises: OSError."""
        if self.delivered_bytes == self._size:
            try:
                self._size += os.splice(
                    self._descriptor,
                    self._memfd,
                    size,
                    offset_dst=self._size,
                    flags=os.SPLICE_F_NONBLOCK,
                )
            except BlockingIOError:
                raise
            except OSError as error:
                self.write_error = error
        chunk = os.pread(
            self._memfd, min(size, self._size - self.delivered_bytes), self.delivered_bytes
        )
        self.delivered_bytes += len(chunk)
        return chunk

    def release_delivered_memory(self, before: int) -> None:
        """Release the memory of the memfd before an offset, at most up to `delivered_bytes`."""
        before = min(before, self.delivered_bytes)
        before -= before % _HOLE
        if before > self._discarded:
            with contextlib.suppress(OSError):  # the memory is then kept until the end
                punch_hole(self._memfd, self._discarded, before)
            self._discarded = before

    def count_readable_bytes(self) -> int:
        """Return the bytes that can be read now, from the memfd and from the pipe."""
        return self._size - self.delivered_bytes + super().count_readable_bytes()

    def connectionLost(self, reason: Failure) -> None:
        """Close the pipe, unless the reactor stops: the next process goes on with it."""
        if not reason.check(ConnectionLost):
            super().connectionLost(reason)


@attrs.frozen
class KeeperOwnedDescriptors:
    """The descriptors of a process whose parent is the keeper; `KeeperOwnedProcess` closes them.

    `pid` leads its own session and process group. `stdout` and `stderr` are the non-blocking read
    ends of its pipes, `stdout_memfd` and `stderr_memfd` the memfds for their bytes. Delivery begins
    with byte `stdout_offset` of stdout and `stderr_offset` of stderr.
    """

    pid: int
    pidfd: int
    stdout: int
    stderr: int
    stdout_memfd: int
    stderr_memfd: int
    stdout_offset: int = 0
    stderr_offset: int = 0


class KeeperOwnedProcess(PipedProcess):
    """A process whose parent is the keeper: a `ProcessTransport`.

    If a memfd takes no more bytes (ENOSPC, ENOMEM; EFBIG: RLIMIT_FSIZE of the daemon), the output
    cannot be kept: the process group is killed, and `output_error` tells why.
    """

    __slots__ = ("_errors", "_exit_error", "_output", "_pidfd", "_wait")

    _stdout: SplicedPipeReader
    _stderr: SplicedPipeReader

    def __init__(
        self,
        reactor: Any,
        protocol: ProcessProtocol,
        run: KeeperOwnedDescriptors,
        wait: Callable[[], Deferred[tuple[int, struct_rusage | None]]],
    ) -> None:
        """Take over a process.

        `wait()` is called after the process's end, once, for its status as of wait4(2) and its
        resource usage. If that fails, the keeper has gone: the process counts as killed by SIGKILL.
        """
        self._wait = wait
        self._pidfd = run.pidfd
        self._output = run.stdout_memfd
        self._errors = run.stderr_memfd
        self._exit_error: str | None = None
        self._stdout = SplicedPipeReader(
            reactor, run.stdout, STDOUT, self, run.stdout_memfd, run.stdout_offset
        )
        self._stderr = SplicedPipeReader(
            reactor, run.stderr, STDERR, self, run.stderr_memfd, run.stderr_offset
        )
        super().__init__(reactor, protocol, run.pid, run.pidfd)

    @property
    def delivered_bytes(self) -> int:
        """The offset in stdout up to which `childDataReceived` was called, now or before."""
        return self._stdout.delivered_bytes

    @property
    def lost_reason(self) -> str | None:
        """Why the exit or a part of the output is unknown; None if both are known."""
        if self.output_error is not None:
            return f"the daemon could not store the output: {self.output_error.strerror}"
        return self._exit_error

    @property
    def output_error(self) -> OSError | None:
        """The error by which the end of stdout or stderr was not kept, and is missing."""
        return self._stdout.write_error or self._stderr.write_error

    def release_output_memory(self, before: int) -> None:
        """Release the memory of stdout before an offset, at most up to `delivered_bytes`.

        Cheap to call often: each system call discards 64 KiB or more.
        """
        if not self._ended:
            self._stdout.release_delivered_memory(before)

    def release_output_range(self, start: int, end: int) -> None:
        """Release the memory of stdout between two offsets, which then reads as zeros."""
        if not self._ended:
            with contextlib.suppress(OSError):  # the memory is then kept until the end
                punch_hole(self._output, start, end)

    def on_pipe_data(self, name: int, chunk: bytes) -> None:
        """Pass on output; release the memory of old stderr."""
        super().on_pipe_data(name, chunk)
        if name == STDERR and not self._ended:
            self._stderr.release_delivered_memory(
                self._stderr.delivered_bytes - REPLAYABLE_STDERR_BYTES
            )

    def on_pipe_end(self, name: int) -> None:
        """Take the end of stdout or stderr; if it is an early one, kill the process."""
        if self.output_error is not None:
            self.signal_group(signal.SIGKILL)
        super().on_pipe_end(name)

    def on_exit(self, pidfd: int) -> None:
        """Ask for the exit status, and tell the protocol. The pidfd stays open for signals."""
        known = maybeDeferred(self._wait).addErrback(self._lose_exit)
        known.addCallback(lambda known: self.set_exit(*known))

    def _lose_exit(self, failure: Failure) -> tuple[int, struct_rusage | None]:
        self._exit_error = f"the exit status is unknown: {failure.getErrorMessage()}"
        return signal.SIGKILL, None

    def on_end(self) -> None:
        """Close the pidfd and the memfds."""
        for descriptor in (self._pidfd, self._output, self._errors):
            os.close(descriptor)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process group, also after the process's own end.

        Another process that has got the number gets none. After `processEnded` nothing is sent.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._ended and self._has_number():
                os.killpg(self.pid, number)

    def _has_number(self) -> bool:
        """Tell whether no other process has got the number of this one.

        Linux gives a number to no other process before its process is reaped and its group empty.
        """
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except ProcessLookupError:
            return not os.path.exists(f"/proc/{self.pid}")
        return True
