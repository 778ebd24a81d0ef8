"""Pipes from child processes, read in large pieces, with back-pressure."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import termios
from time import thread_time
from typing import Any, Protocol

from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.main import CONNECTION_DONE
from twisted.python.failure import Failure
from zope.interface import implementer

_READ = 64 * 1024
_PIPE = 256 * 1024  # what a pipe is to hold whose writer is faster than we are
_SLOW = 0.005  # seconds of processor time, a hundred times as long as a read takes


class Owner(Protocol):
    """Who has what the child prints; `name` is the child's number for the pipe."""

    def received(self, name: int, chunk: bytes) -> None:
        """Take what was read."""

    def lost(self, name: int) -> None:
        """Take the end, which comes once."""


@implementer(IReadDescriptor)
class PipeReader:
    """Reads one pipe of a child in large pieces, and can be paused.

    A pipe that is found full is made larger: its writer would wait for us. All pipes of a user
    other than root have a bound together (pipe(7)), so those that are never full stay small.

    `closed` tells whether the end has come; `owner` is told of it then. `delay` is the processor
    time of slow reads in seconds: each read wakes all epoll instances that watch the pipe.
    """

    __slots__ = (
        "_descriptor",
        "_holds",
        "_left",
        "_owner",
        "_paused",
        "_reactor",
        "closed",
        "delay",
        "name",
    )

    def __init__(self, reactor: Any, descriptor: int, name: int, owner: Owner) -> None:
        self.name = name
        self.closed = False
        self.delay = 0.0
        self._reactor = reactor
        self._descriptor = descriptor
        self._owner = owner
        self._paused = False
        self._left: int | None = None  # bytes that are still to be read, if that is decided
        self._holds = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
        reactor.addReader(self)

    def fileno(self) -> int:
        """Return the descriptor that is read, -1 when it is closed."""
        return -1 if self.closed else self._descriptor

    def logPrefix(self) -> str:
        """Return how log lines call this."""
        return type(self).__name__

    def doRead(self) -> Any:
        """Read once; return the reason to close, if there is one."""
        began = thread_time()
        try:
            chunk = os.read(self._descriptor, _READ)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return CONNECTION_DONE
        if not chunk:
            return CONNECTION_DONE
        if len(chunk) >= self._holds:
            self._enlarge()
        took = thread_time() - began
        if took > _SLOW:
            self.delay += took
        self._owner.received(self.name, chunk)
        return None

    def _enlarge(self) -> None:
        """Let the pipe hold more; where there are too many large ones just now, perhaps later."""
        with contextlib.suppress(OSError):
            self._holds = fcntl.fcntl(self._descriptor, fcntl.F_SETPIPE_SZ, _PIPE)

    def connectionLost(self, reason: Failure) -> None:
        """Close the pipe: its end was reached, or nobody wants more of it."""
        if self.closed:
            return
        self._reactor.removeReader(self)
        self.closed = True
        os.close(self._descriptor)
        self._owner.lost(self.name)

    def pauseProducing(self) -> None:
        """Stop reading, so that the child comes to block when the pipe is full."""
        if not self._paused and not self.closed:
            self._paused = True
            self._reactor.removeReader(self)

    def resumeProducing(self) -> None:
        """Read on."""
        if self._paused and not self.closed:
            self._paused = False
            if self._left is None:
                self._reactor.addReader(self)
            else:
                self._reactor.callLater(0, self._drain)

    def read_the_rest(self) -> None:
        """Read what the pipe holds now, no more, and close it: somebody may still write to it."""
        if not self.closed:
            self._reactor.removeReader(self)
            self._left = _held(self._descriptor)
            self._reactor.callLater(0, self._drain)

    def _drain(self) -> None:
        if self.closed or (self._paused and self._left):
            return
        assert self._left is not None
        chunk = os.read(self._descriptor, min(_READ, self._left)) if self._left else b""
        if chunk:
            self._left -= len(chunk)
            self._reactor.callLater(0, self._drain)
            self._owner.received(self.name, chunk)
        else:
            self.connectionLost(Failure(CONNECTION_DONE))


def _held(descriptor: int) -> int:
    """Return how many bytes a pipe holds (ioctl_tty(2), FIONREAD)."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)


def open_pipe(reading: contextlib.ExitStack, writing: contextlib.ExitStack) -> tuple[int, int]:
    """Return a pipe whose reading end does not block; the stacks close its ends."""
    ends = os.pipe2(os.O_CLOEXEC)
    reading.callback(os.close, ends[0])
    writing.callback(os.close, ends[1])
    os.set_blocking(ends[0], False)
    return ends
