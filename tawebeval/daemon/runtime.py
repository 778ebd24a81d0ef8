"""The process that the daemon runs in: allocator, garbage collector, clock, imports and signals."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pkgutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from twisted.application.service import Service

import tawebeval
import twisted
from tawebeval.errors import Problem

KEPT = 16 * 1024 * 1024
"""Bytes that may be free at the end of the heap; the C library gives back what is beyond."""

_LARGE = 1024 * 1024  # bytes from which an allocation has a mapping of its own

# From malloc.h. Setting one of them ends glibc's own adjustment of both, so that either without
# the other makes things worse.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

LATER = {
    "encodings.ascii": "a lock is made, /proc is read",
    "encodings.idna": "a host's name is looked up",
}
"""Modules that are imported in the middle of functions, each with the occasion."""

COMMAND = ("tawebeval.cli", "tawebeval.client")
"""Packages that the daemon does not use."""

_STOPPING = (signal.SIGTERM, signal.SIGINT)

_Handler = Callable[[int, FrameType | None], Any]


def keep_freed_memory() -> bool:
    """Let the C library keep `KEPT` bytes of freed memory; return whether it can. musl cannot.

    A block of stdout becomes several times as large, is kept until it is acknowledged, and makes
    room for the next. glibc gives what is free at the end of its heap back to the kernel as soon
    as that is 128 KiB, and a large allocation at once (mallopt(3)). Then each block is written to
    pages that the kernel has to find, clear and map first, which costs more than all the rest.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(option, size)
        for option, size in ((_M_TRIM_THRESHOLD, KEPT), (_M_MMAP_THRESHOLD, _LARGE))
    )


def freeze_objects() -> None:
    """Exclude all present objects from garbage collection. Blocks for some 30 ms.

    A full collection looks at tens of thousands of objects from modules alone, which takes as long
    as the start of an evaluation and holds up the reactor. They live as long as the daemon.
    """
    gc.collect()  # what is garbage already would stay, too
    gc.freeze()


def use_monotonic_clock(reactor: Any) -> None:
    """Let a reactor's `seconds`, and all its timers, follow the monotonic clock.

    Twisted counts by the time of day. When that is set forward, all timers are due at once and
    every evaluation is over its time; set back, no timer is due for as long. Timers that are
    pending keep what is left of their time.
    """
    pending = [(call, call.getTime() - reactor.seconds()) for call in reactor.getDelayedCalls()]
    reactor.seconds = time.monotonic
    for call, left in pending:
        call.seconds = time.monotonic
        call.reset(max(0.0, left))


def preload() -> None:
    """Import all modules that the daemon may need, before it gives up root.

    The interpreter, the virtualenv or the checkout may be readable by root only. A module that is
    not loaded by then could not be loaded later.
    """
    _import_all(tawebeval)
    for name in LATER:
        importlib.import_module(name)


def _import_all(package: ModuleType) -> None:
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if found.name not in COMMAND:
            module = importlib.import_module(found.name)
            if found.ispkg:
                _import_all(module)


def find_unreadable() -> Iterator[Problem]:
    """Yield the directories of Python and of packages that the effective user may not read."""
    for file in (os.__file__, twisted.__file__, tawebeval.__file__):
        directory = Path(file).parent
        if not os.access(directory, os.R_OK | os.X_OK, effective_ids=True):
            yield Problem(
                f"{directory} cannot be read by the user that the daemon runs as: what of it is"
                " not loaded yet cannot be",
                "install Python and tawebeval where every user can read",
            )


class EarlyHangup:
    """Handler of SIGHUP during the start, which the signal would end otherwise."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, *_: object) -> None:
        """Note that the signal came."""
        self.came = True

    def install(self) -> None:
        """Handle the signal until `Reloader` does."""
        signal.signal(signal.SIGHUP, self)


class ShutdownSignals(Service):
    """Handler of SIGTERM and SIGINT: the first stops the daemon, later ones call `stop_now`.

    Twisted would try to stop again for each signal, and log a traceback because that is not
    possible: also for one that comes before the stop has begun, as two in a row do. The handlers
    stay after the service has stopped, for the reactor has still to end.
    """

    name = "signals"

    def __init__(self, stop_now: Callable[[], object], reactor: Any) -> None:
        self._stop_now = stop_now
        self._reactor = reactor
        self._stopping = False

    def startService(self) -> None:
        """Handle the signals as soon as the reactor has installed its own handlers."""
        super().startService()
        self._reactor.callWhenRunning(self._install)
        self._reactor.addSystemEventTrigger("before", "shutdown", self._on_shutdown)

    def _install(self) -> None:
        for number in _STOPPING:
            handler = signal.getsignal(number)
            if callable(handler):  # a signal that is ignored stays so
                signal.signal(number, self._wrap(handler))

    def _wrap(self, handler: _Handler) -> _Handler:
        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._stopping:
                self._reactor.callFromThread(self._stop_now)
            else:
                self._on_shutdown()
                handler(number, frame)

        return on_signal

    def _on_shutdown(self) -> None:
        self._stopping = True
