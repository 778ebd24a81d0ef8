"""Pipes from child processes, read in large pieces, with back-pressure."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.main import CONNECTION_DONE
from twisted.python.failure import Failure
from zope.interface import implementer

_READ = 64 * 1024
_PIPE = 256 * 1024


@implementer(IReadDescriptor)
class PipeReader:
    """Reads one pipe of a child in large pieces, and can be paused.

    `received(chunk)` gets what is read, `lost()` is called once at the end.
    """

    def __init__(
        self,
        reactor: Any,
        descriptor: int,
        received: Callable[[bytes], object],
        lost: Callable[[], object],
    ) -> None:
        self._reactor = reactor
        self._descriptor = descriptor
        self._received = received
        self._lost = lost
        self._paused = False
        self._last = False
        self._closed = False
        reactor.addReader(self)

    def fileno(self) -> int:
        """Return the descriptor that is read, -1 when it is closed."""
        return -1 if self._closed else self._descriptor

    def logPrefix(self) -> str:
        """Return how log lines call this."""
        return type(self).__name__

    def doRead(self) -> Any:
        """Read once; return the reason to close, if there is one."""
        try:
            chunk = os.read(self._descriptor, _READ)
        except (BlockingIOError, InterruptedError):
            return CONNECTION_DONE if self._last else None
        except OSError:
            return CONNECTION_DONE
        if not chunk:
            return CONNECTION_DONE
        self._received(chunk)
        return None

    def connectionLost(self, reason: Failure) -> None:
        """Close the pipe: its end was reached, or nobody wants more of it."""
        if self._closed:
            return
        self._reactor.removeReader(self)
        self._closed = True
        os.close(self._descriptor)
        self._lost()

    def pauseProducing(self) -> None:
        """Stop reading, so that the child comes to block when the pipe is full."""
        if not self._paused and not self._closed:
            self._paused = True
            self._reactor.removeReader(self)

    def resumeProducing(self) -> None:
        """Read on."""
        if self._paused and not self._closed:
            self._paused = False
            self._reactor.addReader(self)
            if self._last:
                self._reactor.callLater(0, self._drain)

    def read_the_rest(self) -> None:
        """Read what the pipe holds now and close it, even if somebody still holds its other end."""
        self._last = True
        self._reactor.callLater(0, self._drain)

    def _drain(self) -> None:
        if self._paused or self._closed:
            return
        if self.doRead() is not None:
            self.connectionLost(Failure(CONNECTION_DONE))
        else:
            self._reactor.callLater(0, self._drain)


def open_pipe(reading: contextlib.ExitStack, writing: contextlib.ExitStack) -> tuple[int, int]:
    """Return a pipe whose reading end does not block; the stacks close its ends."""
    ends = os.pipe2(os.O_CLOEXEC)
    reading.callback(os.close, ends[0])
    writing.callback(os.close, ends[1])
    os.set_blocking(ends[0], False)
    with contextlib.suppress(OSError):
        # Users other than root have only so many large pipes: take what is given.
        fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, _PIPE)
    return ends
