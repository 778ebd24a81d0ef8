"""The daemon's process: allocator, garbage collector, clock, signals and poller."""

from __future__ import annotations

import ctypes
import errno
import gc
import select
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from twisted.application.service import Service
from twisted.logger import Logger

from tawebeval.daemon.logging import RateLimitedLog

MALLOC_TRIM_THRESHOLD = 16 * 1024 * 1024
"""Free bytes at the end of the heap that the C library keeps; it returns the rest to the kernel."""

MAX_PAUSE_SECONDS = 2.0
"""The most seconds of a timer that a pause of the whole process takes; longer ones do not count."""

_LARGE = 1024 * 1024  # bytes from which an allocation has a mapping of its own

# From malloc.h. Setting either ends glibc's own adjustment of both, so one without the other
# makes it slower.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Ignored signals that stay so: those that Python ignores, and those that shells and nohup(1) do.
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
_SHELL_IGNORES = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)

_Handler = Callable[[int, FrameType | None], Any]

log = Logger()


def keep_freed_memory() -> bool:
    """Let the C library keep `MALLOC_TRIM_THRESHOLD` of freed memory.

    Return whether it can (musl cannot).

    A block of stdout becomes several times as large when it is encoded, and is freed once it is
    acknowledged. By default glibc returns 128 KiB of free heap to the kernel, and each large
    allocation at once (mallopt(3)). The kernel then has to find, clear and map pages for each
    block, which costs more than all other work on the block.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(option, size)
        for option, size in (
            (_M_TRIM_THRESHOLD, MALLOC_TRIM_THRESHOLD),
            (_M_MMAP_THRESHOLD, _LARGE),
        )
    )


def reset_inherited_signals() -> None:
    """Unblock all signals, and restore the default disposition of most that are ignored.

    A child inherits both. If SIGCHLD is ignored, exit statuses are lost (wait(2)).
    """
    for number in signal.valid_signals():
        is_ignored = signal.getsignal(number) is signal.SIG_IGN
        if is_ignored and number not in _PYTHON_IGNORES + _SHELL_IGNORES:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def freeze_objects() -> None:
    """Exclude all present objects from garbage collection. Blocks, for about 30 ms.

    A full collection visits tens of thousands of objects of modules, which live as long as the
    daemon. It would block the reactor for as long as the start of an evaluation takes.
    """
    gc.collect()  # without it, present garbage would stay for good
    gc.freeze()


class SteadyClock:
    """The monotonic clock, on which no pause between two readings takes over `MAX_PAUSE_SECONDS`.

    After a longer pause the process was stopped, or its reactor blocked. All timers would be due at
    once, before the reactor has read what clients and evaluators have done meanwhile.
    """

    def __init__(self) -> None:
        self._latest = time.monotonic()
        self._left_out = 0.0  # seconds

    def __call__(self) -> float:
        """Return the seconds. To be called in the reactor's thread, at least once a second."""
        now = time.monotonic()
        self._left_out += max(0.0, now - self._latest - MAX_PAUSE_SECONDS)
        self._latest = now
        return now - self._left_out


def use_monotonic_clock(reactor: Any) -> None:
    """Let a reactor's `seconds`, and so all its timers, follow a `SteadyClock`.

    Twisted uses the time of day. Setting that forward would make all timers due at once and end
    every evaluation by its time limit; setting it back would stop all timers. To be called before
    there are timers.
    """
    reactor.seconds = SteadyClock()

    def read_clock() -> None:
        reactor.callLater(1.0, read_clock)

    read_clock()


def ignore_early_hangup() -> None:
    """Ignore SIGHUP until `ReloadService` handles it: by default it would end the process.

    Programs that the daemon starts meanwhile do not inherit this, unlike SIG_IGN.
    """
    signal.signal(signal.SIGHUP, lambda *_: None)


class ShutdownSignals(Service):
    """Handler of SIGTERM and SIGINT: the first stops the daemon, later ones call `on_repeat`.

    Twisted's handlers would call `reactor.stop` again for each signal, which fails with a
    traceback. The handlers stay installed after the service has stopped, until the process ends.
    """

    name = "signals"

    def __init__(self, on_repeat: Callable[[], object], reactor: Any) -> None:
        self._on_repeat = on_repeat
        self._reactor = reactor
        self._is_stopping = False

    def startService(self) -> None:
        """Handle the signals as soon as the reactor has installed its own handlers."""
        super().startService()
        self._reactor.callWhenRunning(self._install)
        self._reactor.addSystemEventTrigger("before", "shutdown", self._on_shutdown)

    def _install(self) -> None:
        for number in _STOP_SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):  # an ignored signal stays ignored
                signal.signal(number, self._wrap(handler))

    def _wrap(self, handler: _Handler) -> _Handler:
        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._is_stopping:
                self._reactor.callFromThread(self._on_repeat)
            else:
                self._on_shutdown()
                handler(number, frame)

        return on_signal

    def _on_shutdown(self) -> None:
        self._is_stopping = True


class FallbackPoller:
    """Poller by epoll(7), and by poll(2) for the descriptors that epoll refuses with ENOSPC.

    It has the methods of select.epoll that Twisted's EPollReactor calls.

    The kernel limits the epoll watches of each user (`fs.epoll.max_user_watches`). Evaluators run
    as the daemon's user, so one of them can take all watches. poll(2) has no such limit. Without
    the fallback a connection would be accepted and never read, and no evaluator could be started.
    """

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._poll = select.poll()
        self._poll.register(epoll.fileno(), select.POLLIN)
        self._polled: set[int] = set()
        self._warn = RateLimitedLog(
            log.warn,
            "epoll: the user's limit of watched descriptors is reached, so evaluators that need"
            " epoll fail; raise fs.epoll.max_user_watches by sysctl, as `tawebeval doctor` says",
        )

    def register(self, descriptor: int, events: int) -> None:
        """Watch a descriptor for `events`. Raises: OSError, except for the user's limit."""
        try:
            self._epoll.register(descriptor, events)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._poll.register(descriptor, events)
            self._polled.add(descriptor)
            self._warn()

    def modify(self, descriptor: int, events: int) -> None:
        """Change the events of a descriptor."""
        if descriptor in self._polled:
            self._poll.modify(descriptor, events)
        else:
            self._epoll.modify(descriptor, events)

    def unregister(self, descriptor: int) -> None:
        """Stop watching a descriptor."""
        if descriptor in self._polled:
            self._polled.remove(descriptor)
            self._poll.unregister(descriptor)
        else:
            self._epoll.unregister(descriptor)

    def poll(self, timeout: float, maxevents: int) -> Sequence[tuple[int, int]]:
        """Return the ready descriptors with their events, at most `maxevents` from epoll.

        Blocks for up to `timeout` seconds, without a limit if `timeout` is negative.
        """
        if not self._polled:
            return self._epoll.poll(timeout, maxevents)
        found: list[tuple[int, int]] = []
        for descriptor, events in self._poll.poll(timeout * 1000):
            if descriptor == self._epoll.fileno():
                found += self._epoll.poll(0, maxevents)
            else:
                found.append((descriptor, events))
        return found


def add_poll_fallback(reactor: Any) -> None:
    """Replace the poller of an epoll reactor by a `FallbackPoller`; leave other reactors alone."""
    poller = getattr(reactor, "_poller", None)
    if isinstance(poller, select.epoll):
        reactor._poller = FallbackPoller(poller)
