"""The process of a daemon or a `try`: reactor, clock, signals, allocator, garbage collection."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import select
import signal
import sys
import time
from typing import Any

from twisted.internet import pollreactor
from twisted.logger import Logger

MALLOC_TRIM_THRESHOLD = 16 * 1024 * 1024
"""Free bytes at the end of the heap that the C library keeps; it returns the rest to the kernel."""

MAX_COUNTED_PAUSE_SECONDS = 2.0
"""The most seconds of a timer that a pause of the whole process takes; longer ones do not count."""

_LARGE = 1024 * 1024  # bytes from which an allocation has a mapping of its own

# From malloc.h. Setting either ends glibc's own adjustment of both, so one without the other
# makes it slower.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# Ignored signals that stay so: those that Python ignores, and those that shells and nohup(1) do.
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)

_SHELL_IGNORES = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)

log = Logger()


def install_poll_reactor_if_needed() -> None:
    """Use poll(2) if an evaluator that has outlived the daemon has all epoll watches of the user.

    Otherwise no daemon could start, and none would hold that evaluator to its time.
    """
    reading, writing = os.pipe()
    try:
        with select.epoll() as epoll:
            epoll.register(reading)
    except OSError as error:
        if error.errno == errno.ENOSPC and "twisted.internet.reactor" not in sys.modules:
            log.warn("no epoll watch is left: poll(2) is used; raise fs.epoll.max_user_watches")
            pollreactor.install()
    finally:
        os.close(reading)
        os.close(writing)


def keep_freed_memory() -> None:
    """Let the C library keep `MALLOC_TRIM_THRESHOLD` of freed memory, if it can (musl cannot).

    A block of stdout becomes several times as large when it is encoded, and is freed once it is
    acknowledged. By default glibc returns 128 KiB of free heap to the kernel, and each large
    allocation at once (mallopt(3)). The kernel then has to find, clear and map pages for each
    block, which costs more than all other work on the block.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, MALLOC_TRIM_THRESHOLD)
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def reset_inherited_signals() -> None:
    """Unblock all signals, and restore the default disposition of most that are ignored.

    A child inherits both. If SIGCHLD is ignored, exit statuses are lost (wait(2)).
    """
    for number in signal.valid_signals():
        is_ignored = signal.getsignal(number) is signal.SIG_IGN
        if is_ignored and number not in _PYTHON_IGNORES + _SHELL_IGNORES:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def exempt_objects_from_gc() -> None:
    """Exclude all present objects from garbage collection. Blocks, for about 30 ms.

    A full collection visits tens of thousands of objects of modules, which live as long as the
    daemon. It would block the reactor for as long as the start of an evaluation takes.
    """
    gc.collect()  # without it, present garbage would stay for good
    gc.freeze()


class PauseLimitedClock:
    """The monotonic clock, which counts at most `MAX_COUNTED_PAUSE_SECONDS` between two readings.

    After a longer pause the process was stopped, or its reactor blocked. All timers would be due at
    once, before the reactor has read what clients and evaluators have done meanwhile.
    """

    def __init__(self) -> None:
        self._latest = time.monotonic()
        self._left_out = 0.0  # seconds

    def __call__(self) -> float:
        """Return the seconds. To be called in the reactor's thread, at least once a second."""
        now = time.monotonic()
        pause = now - self._latest
        if pause > MAX_COUNTED_PAUSE_SECONDS:  # max() takes half a µs; a poll reads ten times
            self._left_out += pause - MAX_COUNTED_PAUSE_SECONDS
        self._latest = now
        return now - self._left_out


def use_monotonic_clock(reactor: Any) -> None:
    """Let a reactor's `seconds`, and so all its timers, follow a `PauseLimitedClock`.

    Twisted uses the time of day. Setting that forward would make all timers due at once and end
    every evaluation by its time limit; setting it back would stop all timers. To be called before
    there are timers.
    """
    reactor.seconds = PauseLimitedClock()

    def read_clock() -> None:
        reactor.callLater(1.0, read_clock)

    read_clock()


def ignore_sighup_and_sigusr1() -> None:
    """Ignore SIGUSR1, and SIGHUP until a service handles it: by default they end the process.

    Programs that the daemon starts do not inherit this, unlike SIG_IGN.
    """
    for number in (signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
